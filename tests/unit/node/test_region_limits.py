"""Limits that `hami region` sets beside the limits file that the node wrote: never one without effect."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from hami.cli.region import command
from hami.node.errors import UnsafePathError
from hami.node.region.limits import limits_file_of, parse_size
from hami.protocol import region_layout as layout

MIB = 1 << 20
UUID = "GPU-00000000-0000-0000-0000-00000000000a"
OTHER = "GPU-00000000-0000-0000-0000-00000000000b"


class Container:
    """A container's region on a node, and its limits file."""

    def __init__(self, folder: Path) -> None:
        self.region = folder / "vgpu" / "containers" / "uid_main" / "x.cache"
        self.limits = folder / "vgpu" / "limits" / "uid_main"
        data = bytearray(layout.FILE_LENGTH)
        layout.V1.magic.write(data, layout.MAGIC)
        layout.V1.major.write(data, 1)
        layout.V1.device_count.write(data, 1)
        layout.V1.limit.write(data, 512 * MIB)
        layout.V1.sm_limit.write(data, 30)
        layout.V1.utilization_switch.write(data, 1)
        data[layout.V1.uuid.offset : layout.V1.uuid.offset + len(UUID)] = UUID.encode()
        for path in (self.region, self.limits):
            path.parent.mkdir(parents=True)
        self.region.write_bytes(data)

    def allow(self, *lines: str) -> None:
        self.limits.write_text("".join(f"{line}\n" for line in lines))

    def run(self, *options: str) -> tuple[int, str]:
        result = CliRunner().invoke(command, [str(self.region), *options])
        return result.exit_code, result.output

    def values(self) -> tuple[int, int]:
        data = self.region.read_bytes()
        return layout.V1.limit.read(data), layout.V1.sm_limit.read(data)


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--set-limit=0=2g", "2048 MiB is above the 1024 MiB of"),
        ("--set-limit=0=0", "no limit is above the 1024 MiB of"),
        ("--set-sm-limit=0=51", "51 % is above the 50 % of"),
        ("--set-sm-limit=0=100", "100 % is above the 50 % of"),
    ],
)
def test_a_limit_above_the_limits_file_is_refused_with_a_way_on(
    container: Container, option: str, told: str
) -> None:
    container.allow("CUDA_DEVICE_MEMORY_LIMIT_0=1024m", "CUDA_DEVICE_SM_LIMIT_0=50")
    before = container.region.read_bytes()
    status, output = container.run(option)
    assert status == 1
    assert f"device 0: {told} {container.limits}, and programs get the smaller of the two" in output
    assert (
        f"Write another CUDA_DEVICE_{'SM' if 'sm' in option else 'MEMORY'}_LIMIT_0 into that file" in output
    )
    assert container.region.read_bytes() == before


def test_nothing_is_set_if_one_of_several_limits_is_refused(container: Container) -> None:
    container.allow("CUDA_DEVICE_MEMORY_LIMIT=1024m")
    assert container.run("--set-sm-limit=0=20", "--set-limit=0=1025m")[0] == 1
    assert container.values() == (512 * MIB, 30)


def test_a_limit_that_counts_is_set_and_told(container: Container) -> None:
    container.allow("CUDA_DEVICE_MEMORY_LIMIT_0=1024m", "CUDA_DEVICE_SM_LIMIT_0=50")
    status, output = container.run("--set-limit=0=1024m", "--set-sm-limit=0=50")
    assert status == 0
    assert output.splitlines()[:2] == [
        f"device 0: programs get 1024 MiB of memory from now on; {container.limits} allows 1024 MiB",
        f"device 0: programs get 50 % of the cores from now on; {container.limits} allows 50 %",
    ]
    assert container.values() == (1024 * MIB, 50)


def test_without_a_limits_file_the_region_alone_counts(container: Container) -> None:
    status, output = container.run("--set-limit=0=0", "--set-sm-limit=0=100")
    assert status == 0
    assert output.splitlines()[:2] == [
        "device 0: programs get memory without a limit from now on",
        "device 0: programs get the cores without a limit from now on",
    ]


def test_limits_belong_to_cards_by_their_uuid(container: Container) -> None:
    container.allow(
        f"HAMI_DEVICE_UUIDS={OTHER},{UUID}",
        "CUDA_DEVICE_MEMORY_LIMIT_0=8g",
        "CUDA_DEVICE_MEMORY_LIMIT_1=600m",
    )
    status, output = container.run("--set-limit=0=601m")
    assert status == 1
    assert "CUDA_DEVICE_MEMORY_LIMIT_1" in output
    container.allow(
        f"HAMI_DEVICE_UUIDS={OTHER}", "CUDA_DEVICE_MEMORY_LIMIT_0=1m", "CUDA_DEVICE_MEMORY_LIMIT=2g"
    )
    assert container.run("--set-limit=0=2048m")[0] == 0
    assert container.run("--set-limit=0=2049m")[0] == 1


def test_a_core_limit_that_is_switched_off_is_refused(container: Container) -> None:
    container.allow("CUDA_DEVICE_SM_LIMIT=50", "GPU_CORE_UTILIZATION_POLICY=disable")
    status, output = container.run("--set-sm-limit=0=20")
    assert status == 1
    assert "GPU_CORE_UTILIZATION_POLICY=disable" in output
    assert container.values() == (512 * MIB, 30)


@pytest.mark.parametrize(("policy", "paced"), [("default", False), ("force", True)])
def test_a_core_limit_that_waits_for_a_neighbour_is_told(
    container: Container, policy: str, paced: bool
) -> None:
    data = bytearray(container.region.read_bytes())
    layout.V1.utilization_switch.write(data, 0)
    container.region.write_bytes(data)
    container.allow("CUDA_DEVICE_SM_LIMIT=50", f"GPU_CORE_UTILIZATION_POLICY={policy}")
    status, output = container.run("--set-sm-limit=0=20")
    assert status == 0
    assert ("not paced while no other container uses the card" in output.splitlines()[0]) != paced


def test_on_the_node_a_limit_is_explained_by_the_limits_file_of_the_container(container: Container) -> None:
    assert "memory limit 512 MiB (region)" in container.run("--explain")[1]
    container.allow("CUDA_DEVICE_MEMORY_LIMIT_0=512m")
    assert "memory limit 512 MiB (limits file)" in container.run("--explain")[1]


@pytest.mark.parametrize("what", ["link", "folder", "pipe", "large"])
def test_a_limits_file_that_is_none_is_an_error(container: Container, what: str) -> None:
    if what == "link":
        container.limits.symlink_to(container.region)
    elif what == "folder":
        container.limits.mkdir()
    elif what == "pipe":
        os.mkfifo(container.limits)
    else:
        container.limits.write_bytes(b"#" * 65537)
    with pytest.raises(UnsafePathError):
        limits_file_of(container.region)
    assert container.run("--set-limit=0=1m")[0] == 1
    assert container.values() == (512 * MIB, 30)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("3000m", 3000 * MIB),
        ("2G", 2048 * MIB),
        (" 64m ", 64 * MIB),
        ("010m", 10 * MIB),
        ("1.5g", 1536 * MIB),
        ("1gb", 1024 * MIB),
        ("1Gi", 1024 * MIB),
        ("512MiB", 512 * MIB),
        ("0", 0),
        ("0.3333333333333333k", 341),
        ("18446744073709551615", 2**64 - 1),
        *((bad, None) for bad in ("", "0x10m", "-1m", "99999999999g", "abc", "1.g", "1b", "m", "1 m", "1\n")),
    ],
)
def test_sizes_are_read_as_the_library_reads_them(text: str, size: int | None) -> None:
    assert parse_size(text) == size


@given(st.text("0123456789.kKmMgGiIbB x-\t", max_size=30))
def test_any_text_is_a_size_below_2_to_the_64_or_none(text: str) -> None:
    size = parse_size(text)
    assert size is None or 0 <= size < 1 << 64
