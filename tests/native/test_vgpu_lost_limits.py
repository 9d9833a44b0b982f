"""Limits that cannot be lost: sessions without the environment, and what a workload can do to the region."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from vgpu_harness import MIB, OUT_OF_MEMORY, SUCCESS, UNKNOWN, Node, Shell, read_usage, wait_until

from hami.protocol import region_layout as layout

#: Arguments: new root directory, limits file, library, program. The new root has all of the old, the limits
#: file as the host mounts it, and a preload file in an /etc of its own.
CONTAINER = """
set -e
root=$1 file=$2 library=$3
shift 3
mount -t tmpfs tmpfs "$root"
for entry in /*; do
    name=$root$entry
    if [ -L "$entry" ]; then cp -P "$entry" "$name"
    elif [ "$entry" = /etc ]; then mkdir "$name"; cp -R /etc/. "$name" 2>/dev/null || true
    elif [ -d "$entry" ]; then mkdir "$name"; mount --rbind "$entry" "$name"
    fi
done
touch "$root/overrideEnv"
mount --bind "$file" "$root/overrideEnv"
mount -o remount,bind,ro "$root/overrideEnv"
echo "$library" > "$root/etc/ld.so.preload"
exec chroot "$root" "$@"
"""


def host_region(node: Node) -> Path:
    return node.directory / "host.cache"


def limits_file(node: Node, limit: str = "64m") -> Path:
    file = node.directory / "limits"
    file.write_text(
        f"CUDA_DEVICE_MEMORY_LIMIT_0={limit}\nCUDA_DEVICE_MEMORY_SHARED_CACHE={host_region(node)}\n"
    )
    return file


def in_container(node: Node, *program: str) -> Shell:
    """A program in a container with a limits file of 64 MiB; it is started without any preload variable."""
    root = node.directory / f"root{len(node.shells)}"
    root.mkdir()
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    prefix = ("unshare", *user, "--mount", "sh", "-c", CONTAINER, "sh")
    errors = node.directory / f"stderr-{len(node.shells)}"
    with errors.open("w") as stream:
        process = subprocess.Popen(
            [*prefix, str(root), str(limits_file(node)), str(node.build.libvgpu), *program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, text=True,
            env={"PATH": os.environ["PATH"]},
        )  # fmt: skip
    shell = Shell(process, errors)
    node.shells.append(shell)
    return shell


def program(node: Node, **variables: str) -> list[str]:
    """The test program with what only the simulated driver needs, as words of a shell command."""
    needed = {"LD_LIBRARY_PATH": str(node.build.driver), "FAKEGPU_STATE": str(node.state),
              "FAKEGPU_CONTEXT_MIB": "0", "FAKEGPU_MEMORY_MIB": "16384", **variables}  # fmt: skip
    return [
        "env",
        *(f"{name}={value}" for name, value in needed.items()),
        str(node.build.program("vgpu_shell")),
    ]


def session(node: Node, kind: str) -> Shell:
    """A program in a session of the kind: nothing of the container's environment is left."""
    command = "exec " + " ".join(program(node))
    if kind == "empty":
        return in_container(node, "env", "-i", *program(node))
    if kind == "ssh":
        return in_container(node, "setsid", "env", "-i", "HOME=/", "USER=root", "sh", "-l", "-c", command)
    # Without root there is one user in the namespace and su cannot set groups: its login shell alone.
    su = ["su", "-", "root", "-c"] if os.geteuid() == 0 else ["env", "-i", "HOME=/", "sh", "-l", "-c"]
    return in_container(node, *su, command)


@pytest.mark.parametrize("kind", ["empty", "su", "ssh"])
def test_a_session_without_the_environment_is_limited(node: Node, kind: str) -> None:
    """2.4, B27: it shares limit and region with the container's other processes."""
    first = session(node, "empty").start()
    first.must(f"alloc {32 * MIB}")
    later = session(node, kind).start()
    assert later.ask("info")[2] == 64 * MIB
    assert later.ask(f"alloc {33 * MIB}")[0] == OUT_OF_MEMORY
    later.must(f"alloc {32 * MIB}")
    assert sum(read_usage(host_region(node)).values()) == 64 * MIB


def test_a_cache_variable_that_points_elsewhere_changes_nothing(node: Node) -> None:
    """2.3: the file names the region."""
    first = session(node, "empty").start()
    first.must(f"alloc {64 * MIB}")
    elsewhere = node.directory / "mine.cache"
    other = in_container(
        node, *program(node, CUDA_DEVICE_MEMORY_SHARED_CACHE=str(elsewhere), CUDA_DEVICE_MEMORY_LIMIT="8g")
    ).start()
    assert other.ask("alloc 1")[0] == OUT_OF_MEMORY
    assert not elsewhere.exists()


def test_a_limits_file_that_cannot_be_opened_for_a_moment_is_not_forgotten(node: Node) -> None:
    """For want of a descriptor: the environment, which the program chooses, must not stand in for it."""
    scarce = str(node.build.program("libvgpu_scarce.so"))
    mine = {
        "CUDA_DEVICE_MEMORY_LIMIT": "8g",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(node.directory / "mine.cache"),
    }
    shell = in_container(node, *program(node, LD_PRELOAD=":".join([*node.preload, scarce]), **mine))
    assert shell.ask("init")[0] == UNKNOWN
    shell.start()
    assert shell.ask(f"alloc {65 * MIB}")[0] == OUT_OF_MEMORY
    shell.must(f"alloc {64 * MIB}")
    assert sum(read_usage(host_region(node)).values()) == 64 * MIB


def test_the_first_process_of_the_container_says_what_a_lost_environment_said(node: Node) -> None:
    """2.4 (d): /proc/1/environ."""
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    script = 'exec 3<&0; env -i $KEPT "$0" <&3 & wait'
    kept = " ".join([f"LD_PRELOAD={node.build.libvgpu}", *program(node)[1:-1], "VGPU_FAILURE_POLICY=deny"])
    shell = node.shell(
        prefix=("unshare", *user, "--pid", "--fork", "--mount-proc", "sh", "-c", script),
        CUDA_DEVICE_MEMORY_LIMIT_0="64m", KEPT=kept,
    ).start()  # fmt: skip
    assert shell.ask(f"alloc {65 * MIB}")[0] == OUT_OF_MEMORY
    shell.must(f"alloc {64 * MIB}")
    assert sum(read_usage(node.region()).values()) == 64 * MIB


def busy(node: Node, mib: int, limit: str = "64m") -> Shell:
    """A process with a context and `mib` MiB."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0=limit).start()
    shell.must("kernel 1000")
    if mib:
        shell.must(f"alloc {mib * MIB}")
    return shell


def settles_at(node: Node, shells: list[Shell], mib: list[int]) -> Callable[[], bool]:
    def settled() -> bool:
        for shell in shells:
            shell.ask("launch 1 1 32")
        try:
            used = read_usage(node.region())
        except (OSError, ValueError):
            return False
        return used == {s.process.pid: m * MIB for s, m in zip(shells, mib, strict=True)}

    return settled


def test_a88_a_region_that_was_removed_and_made_anew_is_joined(node: Node) -> None:
    """A88: the numbers go along, and the limit is one again."""
    holder = busy(node, 40)
    node.region().unlink()
    other = busy(node, 10)
    wait_until(settles_at(node, [other, holder], [10, 40]))
    assert other.ask(f"alloc {15 * MIB}")[0] == OUT_OF_MEMORY
    address = other.must(f"alloc {14 * MIB}")
    assert holder.ask("alloc 1")[0] == OUT_OF_MEMORY
    other.must(f"free {address}")
    holder.must(f"alloc {14 * MIB}")
    data = node.region().read_bytes()
    types = [
        layout.ExtensionEvent.type.read(data, layout.Extension.events.base(i, layout.EXTENSION_OFFSET))
        for i in range(8)
    ]
    assert layout.EVENT_REGION_REPLACED in types
    assert holder.leave() == other.leave() == 0


NVML_CLIENT = """
import ctypes, sys
nvml = ctypes.CDLL("libnvidia-ml.so.1")
device, memory = ctypes.c_void_p(), (ctypes.c_uint64 * 3)()
assert nvml.nvmlInit_v2() == 0
assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
for _ in sys.stdin:
    assert nvml.nvmlDeviceGetMemoryInfo(device, memory) == 0
    print(memory[2], flush=True)
"""


def test_a_program_that_only_asks_nvml_follows_the_region(node: Node) -> None:
    """3.4: a monitoring program that runs for days has no slot and shows the region in use."""
    holder = busy(node, 40)
    with (node.directory / "client-errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", NVML_CLIENT], env=node.environment(), stderr=errors, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
    node.shells.append(client := Shell(process, node.directory / "client-errors"))

    def shown() -> int:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("?\n")
        process.stdin.flush()
        return int(process.stdout.readline() or client.stderr())

    assert shown() == 40 * MIB
    node.region().unlink()
    wait_until(settles_at(node, [holder], [40]))
    holder.must(f"alloc {8 * MIB}")
    wait_until(lambda: shown() == 48 * MIB)


def test_a_region_that_was_removed_is_made_again_by_its_users(node: Node) -> None:
    """3.4: also memory that was allocated before is given back where it is counted now."""
    shells = [busy(node, 0) for _ in range(3)]
    blocks = [shell.must(f"alloc {16 * MIB}") for shell in shells]
    node.region().unlink()
    wait_until(settles_at(node, shells, [16] * 3))
    assert shells[0].ask(f"alloc {17 * MIB}")[0] == OUT_OF_MEMORY
    for shell, block in zip(shells, blocks, strict=True):
        shell.must(f"free {block}")
    wait_until(lambda: sum(read_usage(node.region()).values()) == 0)
    shells[1].must(f"alloc {64 * MIB}")


def test_a_region_that_was_written_over_keeps_nobody_from_being_limited(node: Node) -> None:
    """3.9: everything in the file is in reach of the workload."""
    holder, other = busy(node, 40), busy(node, 0)
    size = node.region().stat().st_size
    data = bytearray(node.region().read_bytes())
    for k in range(2):
        base = layout.V1.procs.base(k)
        layout.V1Slot.used_total.write(data, 0, base)
        layout.V1Slot.used_data.write(data, 0, base)
        layout.Extension.totals.write(data, 0, layout.EXTENSION_OFFSET, k)
    layout.V1.proc_num.write(data, 0)
    with node.region().open("r+b") as stream:
        stream.write(data)
    assert node.region().stat().st_size == size
    assert holder.ask(f"alloc {25 * MIB}")[0] == OUT_OF_MEMORY  # what it holds itself it knows
    wait_until(settles_at(node, [holder, other], [40, 0]))
    assert other.ask(f"alloc {25 * MIB}")[0] == OUT_OF_MEMORY
    other.must(f"alloc {24 * MIB}")


def test_a_region_that_was_cleared_is_filled_again(node: Node) -> None:
    """3.8: limits of the environment, names of the devices and the own numbers."""
    holder = busy(node, 40)
    with node.region().open("r+b") as stream:
        stream.write(bytes(layout.FILE_LENGTH))
    wait_until(settles_at(node, [holder], [40]))
    data = node.region().read_bytes()
    assert layout.V1.limit.read(data) == 64 * MIB
    assert layout.V1.uuid.read(data).startswith(b"GPU-")
    assert holder.ask(f"alloc {25 * MIB}")[0] == OUT_OF_MEMORY
    holder.must(f"alloc {24 * MIB}")


@pytest.mark.parametrize("what", ["symlink", "directory", "fifo", "other version"])
def test_what_is_planted_in_place_of_the_region_stops_the_container(node: Node, what: str) -> None:
    """3.4, 3.8: never limits of one's own, and what was planted is left as it is."""
    shell = busy(node, 10)
    region = node.region()
    target = node.directory / "target"
    target.write_bytes(b"keep me")
    region.unlink()
    if what == "symlink":
        region.symlink_to(target)
    elif what == "directory":
        region.mkdir()
    elif what == "fifo":
        os.mkfifo(region)
    else:
        planted = bytearray(layout.FILE_LENGTH)
        layout.V1.magic.write(planted, layout.MAGIC)
        layout.V1.major.write(planted, 9)
        region.write_bytes(planted)
    wait_until(lambda: shell.ask("launch 1 1 32")[0] == UNKNOWN)
    assert shell.ask("alloc 512")[0] == UNKNOWN
    assert target.read_bytes() == b"keep me"
    assert "cannot be used" in shell.stderr()
    late = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m")
    assert late.ask("init")[0] == UNKNOWN


@pytest.mark.parametrize("missing", [0, 2])
def test_a_number_that_would_make_the_sum_wrap_round_makes_no_room(node: Node, missing: int) -> None:
    """In a slot of nobody, or of a living neighbour, whose number is right again a second or two later."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    shell.must("kernel 1000")
    shell.must(f"alloc {40 * MIB}")
    neighbour = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    neighbour.must("kernel 1000")
    neighbour.must(f"alloc {8 * MIB}")
    victim = missing or 1
    with node.region().open("r+b") as stream:
        stream.seek(layout.V1.proc_num.offset)
        stream.write((victim + 1).to_bytes(4, "little"))
        stream.seek(layout.EXTENSION_OFFSET + layout.Extension.totals.offset + 8 * victim)
        stream.write((2**64 - 40 * MIB).to_bytes(8, "little"))
    assert shell.ask(f"alloc {25 * MIB}")[0] == OUT_OF_MEMORY

    def counts_again() -> bool:
        neighbour.must("launch 1 1 32")
        data = node.region().read_bytes()
        return layout.Extension.totals.read(data, layout.EXTENSION_OFFSET, 1) == 8 * MIB

    wait_until(counts_again)
    assert shell.ask(f"alloc {17 * MIB}")[0] == OUT_OF_MEMORY
    shell.must(f"alloc {16 * MIB}")


def test_a_program_in_another_root_directory_keeps_its_region(node: Node) -> None:
    """3.4: after a chroot the path leads elsewhere, the region does not."""
    user = () if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user")
    shell = node.shell(prefix=user, CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    shell.must("kernel 1000")
    shell.must(f"alloc {10 * MIB}")
    other = busy(node, 10)
    assert shell.ask("chroot")[0] == SUCCESS
    for _ in range(25):
        shell.must("launch 1 1 32")
        time.sleep(0.1)
    assert shell.ask(f"alloc {45 * MIB}")[0] == OUT_OF_MEMORY
    shell.must(f"alloc {44 * MIB}")
    assert other.ask("alloc 1")[0] == OUT_OF_MEMORY
