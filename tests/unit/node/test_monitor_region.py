"""Reading regions from hostile files (monitor.md §13 cases 6-26)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hami.node.monitor.files import (
    Writes,
    directory_bytes,
    list_directories,
    open_containers,
    read_directory,
    write_directory,
)
from hami.node.monitor.region import SATURATED, RawRegion, Region, parse_region
from hami.node.monitor.tracker import KEEP_S, Tracker
from hami.node.region.format import V0, V1, RegionError, choose_format
from hami.protocol import region_layout as layout

U1 = b"GPU-11111111-2222-3333-4444-555555555555"
GIB = 1 << 30
NAME = "uid-a_web"


class Builder:
    """A region file under construction, v0 or v1."""

    def __init__(self, version: int = 1, extension: bool = False) -> None:
        self.region: type[layout.V0] | type[layout.V1] = layout.V1 if version else layout.V0
        self.slot: type[layout.V0Slot] | type[layout.V1Slot] = layout.V1Slot if version else layout.V0Slot
        size = layout.FILE_LENGTH if extension else self.region.SIZE + 1
        self.data = bytearray(size)
        self.region.magic.write(self.data, layout.MAGIC)
        if version:
            layout.V1.major.write(self.data, version)
            layout.V1.minor.write(self.data, 2)
        self.region.recent_kernel.write(self.data, 2)
        self.region.utilization_switch.write(self.data, 1)
        self.region.priority.write(self.data, 1)
        if extension:
            base = layout.EXTENSION_OFFSET
            self.data[base : base + 8] = layout.EXTENSION_MAGIC
            layout.Extension.version.write(self.data, layout.EXTENSION_VERSION, base)
            layout.Extension.length.write(self.data, layout.EXTENSION_LENGTH, base)

    def device(self, index: int, uuid: bytes = U1, limit: int = 0, cores: int = 0) -> Builder:
        start = self.region.uuid.offset + index * layout.UUID_LENGTH
        self.data[start : start + len(uuid)] = uuid
        self.region.limit.write(self.data, limit, 0, index)
        self.region.sm_limit.write(self.data, cores, 0, index)
        self.region.device_count.write(self.data, max(self.region.device_count.read(self.data), index + 1))
        return self

    def process(
        self, index: int, *, status: int = 1, device: int = 0, hostpid: int = 0, **used: int
    ) -> Builder:
        base = self.region.procs.base(index)
        self.slot.status.write(self.data, status, base)
        self.slot.hostpid.write(self.data, hostpid, base)
        for name, value in used.items():
            getattr(self.slot, name).write(self.data, value, base, device)
        count = max(self.region.proc_num.read(self.data), index + 1)
        self.region.proc_num.write(self.data, count)
        return self


@pytest.fixture
def containers(tmp_path: Path) -> Path:
    folder = tmp_path / "containers"
    (folder / NAME).mkdir(parents=True)
    return folder


def store(containers: Path, data: bytes | bytearray, file: str = "k.cache") -> Path:
    path = containers / NAME / file
    path.write_bytes(data)
    return path


def read(containers: Path) -> Region:
    with open_containers(str(containers)) as descriptor:
        region = read_directory(descriptor, NAME)
    assert region is not None
    return region


def reason(containers: Path) -> str:
    with open_containers(str(containers)) as descriptor, pytest.raises(RegionError) as caught:
        read_directory(descriptor, NAME)
    return caught.value.reason


@pytest.mark.parametrize("version", [0, 1])
def test_13_14_limits_usage_and_state_of_both_formats(containers: Path, version: int) -> None:
    builder = Builder(version).device(0, limit=4 * GIB, cores=30).device(1, b"GPU-b", 2 * GIB)
    builder.process(0, used_total=100, used_context=60, used_module=30, used_data=20, util_sm=40, hostpid=7)
    builder.process(1, used_total=11, device=1)
    store(containers, builder.data)
    region = read(containers)
    assert region.format == f"v{version}"
    first, second = region.devices
    assert (first.uuid, first.memory_limit, first.core_limit) == (U1.decode(), 4 * GIB, 30)
    assert (first.total, first.context, first.module, first.buffer, first.sm) == (100, 60, 30, 20, 40)
    assert (second.index, second.memory_limit, second.total) == (1, 2 * GIB, 11)
    assert region.processes == 2
    assert region.host_pids == (7,)
    assert (region.recent_kernel, region.utilization_switch, region.priority) == (2, 1, 1)


def test_7_9_other_files_do_not_matter(containers: Path) -> None:
    with open_containers(str(containers)) as descriptor:
        assert read_directory(descriptor, NAME) is None
        assert read_directory(descriptor, "absent_x") is None
        for name in ("notes.txt", "debug.log", "k.cache.bak", "libvgpu.so"):
            (containers / NAME / name).write_text("x")
        assert read_directory(descriptor, NAME) is None
    store(containers, Builder().device(0).data)
    assert len(read(containers).devices) == 1


def test_8_two_regions_give_the_newer_one_and_three_are_ambiguous(containers: Path) -> None:
    old = store(containers, Builder().device(0, b"GPU-old").data, "a.cache")
    store(containers, Builder().device(0, b"GPU-new").data, "b.cache")
    os.utime(old, (1, 1))
    assert read(containers).devices[0].uuid == "GPU-new"
    os.utime(containers / NAME / "b.cache", (0, 0))
    assert read(containers).devices[0].uuid == "GPU-old"
    store(containers, b"", "c.cache")
    assert reason(containers) == "ambiguous"


def sized(size: int, magic: int = layout.MAGIC, major: int = 0, minor: int = 0) -> bytearray:
    data = bytearray(size)
    for field, value in ((layout.V1.magic, magic), (layout.V1.major, major), (layout.V1.minor, minor)):
        if size >= 12:
            field.write(data, value)
    return data


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(sized(4), "too_small", id="case 10"),
        pytest.param(sized(64, magic=0), "bad_magic", id="case 11"),
        pytest.param(sized(64, major=1), "unknown_version", id="case 12"),
        pytest.param(sized(2_008_953, major=2), "unknown_version", id="case 15"),
        pytest.param(sized(1_300_000, major=1, minor=2), "short_read", id="case 16"),
        pytest.param(sized(804_681), "unknown_version", id="case 17"),
    ],
)
def test_10_to_17_broken_files_have_their_reason(containers: Path, data: bytearray, expected: str) -> None:
    store(containers, data)
    assert reason(containers) == expected


def test_18_19_counts_are_clamped(containers: Path) -> None:
    builder = Builder().device(0)
    builder.region.device_count.write(builder.data, 0x8000000000000001)
    for index in range(16):
        start = builder.region.uuid.offset + index * layout.UUID_LENGTH
        builder.data[start : start + 5] = b"GPU-x"
    builder.region.proc_num.write(builder.data, -5)
    store(containers, builder.data)
    region = read(containers)
    assert len(region.devices) == 16
    assert region.processes == 0
    builder.process(1023, used_total=5)
    builder.region.proc_num.write(builder.data, 5000)
    store(containers, builder.data)
    assert read(containers).devices[0].total == 5


def test_20_free_slots_and_slots_beyond_the_count_do_not_count(containers: Path) -> None:
    builder = Builder().device(0)
    for index, (status, total) in enumerate([(1, 300), (0, 999), (1, 200), (1, 777)]):
        builder.process(index, status=status, used_total=total)
    builder.region.proc_num.write(builder.data, 3)
    store(containers, builder.data)
    region = read(containers)
    assert (region.devices[0].total, region.processes) == (500, 2)


def test_21_22_an_unusable_uuid_skips_its_device_only(containers: Path) -> None:
    builder = Builder().device(0, b"").device(1, b"\xff" + b"a" * 39).device(2)
    store(containers, builder.data)
    region = read(containers)
    assert [device.index for device in region.devices] == [2]
    assert region.bad_uuids == 1
    assert Tracker(str(containers)).sweep().errors == {"bad_uuid": 1}


def test_sums_saturate_and_utilisation_is_bounded_per_process(containers: Path) -> None:
    builder = Builder().device(0, limit=2**64 - 1)
    for index in range(3):
        builder.process(index, used_total=2**64 - 1, util_sm=2**64 - 1)
    store(containers, builder.data)
    device = read(containers).devices[0]
    assert (device.total, device.memory_limit, device.sm) == (SATURATED, SATURATED, 300)


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory", "hard link", "huge"])
def test_25_only_plain_files_are_opened(containers: Path, tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(Builder().device(0).data)
    path = containers / NAME / "x.cache"
    if kind == "symlink":
        path.symlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "hard link":
        path.hardlink_to(victim)
    else:
        with path.open("wb") as file:
            file.truncate((16 << 20) + 1)
    assert reason(containers) == "not_regular"


def test_a_symlink_in_place_of_a_directory_is_not_listed(containers: Path, tmp_path: Path) -> None:
    (containers / "uid-b_web").symlink_to(tmp_path)
    (containers / "file_x").write_text("x")
    for name in ("nodashes", "uid_", "_x"):
        (containers / name).mkdir()
    with open_containers(str(containers)) as descriptor:
        good, odd = list_directories(descriptor)
    assert [item.name for item in good] == [NAME]
    assert odd == ("_x", "nodashes", "uid_")


def test_26_a_truncated_file_keeps_its_last_sample_for_15_seconds(containers: Path) -> None:
    now = [0.0]
    tracker = Tracker(str(containers), clock=lambda: now[0])
    path = store(containers, Builder().device(0, limit=GIB).data)
    (first,) = tracker.sweep().regions.values()
    os.truncate(path, 0)
    now[0] = KEEP_S
    sweep = tracker.sweep()
    assert list(sweep.regions.values()) == [first]
    assert sweep.errors == {"too_small": 1}
    now[0] = KEEP_S + 0.1
    assert list(tracker.sweep().regions.values()) == [None]


def test_50_a_replaced_file_is_read_at_once(containers: Path) -> None:
    tracker = Tracker(str(containers))
    path = store(containers, Builder().device(0, b"GPU-old").data)
    tracker.sweep()
    path.unlink()
    store(containers, Builder().device(0, b"GPU-new").data)
    (region,) = tracker.sweep().regions.values()
    assert region is not None
    assert region.devices[0].uuid == "GPU-new"


def test_a_missing_directory_of_all_containers_means_none(tmp_path: Path) -> None:
    assert Tracker(str(tmp_path / "absent")).sweep().regions == {}


@pytest.mark.parametrize("kind", ["with block", "without block", "block version 2", "v0"])
def test_52_writes_touch_only_their_fields(containers: Path, kind: str) -> None:
    builder = Builder(0 if kind == "v0" else 1, extension=kind in ("with block", "block version 2")).device(0)
    if kind == "block version 2":
        layout.Extension.version.write(builder.data, 2, layout.EXTENSION_OFFSET)
    path = store(containers, builder.data)
    with open_containers(str(containers)) as descriptor:
        write_directory(descriptor, NAME, Writes(-1, 0, 0x1122334455667788))
    expected = bytearray(builder.data)
    builder.region.recent_kernel.write(expected, -1)
    builder.region.utilization_switch.write(expected, 0)
    if kind == "with block":
        assert layout.EXTENSION_OFFSET + layout.Extension.heartbeat.offset == 2_011_152
        layout.Extension.heartbeat.write(expected, 0x1122334455667788, layout.EXTENSION_OFFSET)
    assert path.read_bytes() == bytes(expected)


def test_the_extension_block_gives_its_numbers_per_device(containers: Path) -> None:
    builder = Builder(extension=True).device(0).device(1, b"GPU-b")
    base = layout.EXTENSION_OFFSET + layout.Extension.devices.base(1)
    for field, value in (("throttled", 2_500_000_000), ("refusals", 3), ("peak", 99), ("residual", 7)):
        getattr(layout.ExtensionDevice, field).write(builder.data, value, base)
    store(containers, builder.data)
    extra = read(containers).devices[1].extra
    assert extra is not None
    assert (extra.throttled_seconds, extra.refusals, extra.peak, extra.residual) == (2.5, 3, 99, 7)


@pytest.mark.parametrize(("answers", "fallbacks"), [(0, 0), (3, 0), (0, 2), (2**64 - 1, 2**64 - 1)])
def test_the_extension_block_counts_who_asked_the_broker(
    containers: Path, answers: int, fallbacks: int
) -> None:
    builder = Builder(extension=True).device(0)
    layout.Extension.broker_answers.write(builder.data, answers, layout.EXTENSION_OFFSET)
    layout.Extension.broker_fallbacks.write(builder.data, fallbacks, layout.EXTENSION_OFFSET)
    store(containers, builder.data)
    assert read(containers).broker == (min(answers, SATURATED), min(fallbacks, SATURATED))


def test_56_the_size_of_a_directory_follows_no_link(containers: Path, tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(b"x" * (1 << 20))
    (containers / NAME / "link").symlink_to(big)
    (containers / NAME / "deep").mkdir()
    (containers / NAME / "deep/file").write_bytes(b"x" * 65536)
    with open_containers(str(containers)) as descriptor:
        assert 65536 <= directory_bytes(descriptor, NAME) < 200_000


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=0, max_size=64), st.sampled_from([0, 12, 64, V0.region.SIZE, V1.region.SIZE]))
def test_any_start_gives_a_format_or_a_typed_error(start: bytes, size: int) -> None:
    try:
        choose_format(size, start)
    except RegionError:
        return


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.integers(0, 2**32), st.integers(0, 5))
def test_any_content_is_parsed_into_bounded_numbers(old: bool, seed: int, slots: int) -> None:
    form = V0 if old else V1
    noise = random.Random(seed).randbytes
    head, used, tail = noise(form.head_bytes), noise(slots * form.stride), noise(form.tail_bytes)
    region = parse_region(RawRegion(form, head, used, tail, noise(9000)))
    for device in region.devices:
        assert 0 <= device.total <= SATURATED
        assert 0 <= device.sm <= 100 * slots
        assert device.uuid.isprintable()
    assert 0 <= region.last_kernel <= SATURATED
