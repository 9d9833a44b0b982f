"""Directories and files that change, grow or vanish while the monitor looks at them (monitor.md §2.1, §5)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from region_cutter import cut_without_pause

from hami.node.monitor import files
from hami.node.monitor.files import (
    Writes,
    directory_bytes,
    list_directories,
    open_containers,
    read_directory,
    read_ring,
    write_directory,
)
from hami.node.monitor.ring import RING_BYTES
from hami.node.monitor.tracker import Tracker
from hami.node.region.format import RegionError
from hami.protocol import region_layout as layout

NAME = "uid-a_web"


def region(size: int = layout.V1.SIZE + 1, slots: int = 0) -> bytearray:
    data = bytearray(size)
    layout.V1.magic.write(data, layout.MAGIC)
    layout.V1.major.write(data, 1)
    layout.V1.minor.write(data, 2)
    layout.V1.device_count.write(data, 1)
    data[layout.V1.uuid.offset : layout.V1.uuid.offset + 5] = b"GPU-a"
    layout.V1.recent_kernel.write(data, 2)
    layout.V1.proc_num.write(data, slots)
    for index in range(slots):
        layout.V1Slot.status.write(data, layout.SLOT_RUNNING, layout.V1.procs.base(index))
    return data


def with_extension(version: int = layout.EXTENSION_VERSION) -> bytearray:
    data = region(layout.FILE_LENGTH)
    base = layout.EXTENSION_OFFSET
    data[base : base + 8] = layout.EXTENSION_MAGIC
    layout.Extension.version.write(data, version, base)
    layout.Extension.length.write(data, layout.EXTENSION_LENGTH, base)
    return data


class Host:
    """The directory of all containers, with one container's in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "containers"
        self.own = self.folder / NAME
        self.own.mkdir(parents=True)
        self.descriptor = os.open(self.folder, os.O_RDONLY)

    def store(self, data: bytes | bytearray) -> Path:
        path = self.own / "k.cache"
        path.write_bytes(data)
        return path


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    os.close(made.descriptor)


def test_more_directories_than_anybody_has_are_not_all_read(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_DIRECTORIES", 3)
    for index in range(5):
        (host.folder / f"uid-{index}_c").mkdir()
    good, odd = list_directories(host.descriptor)
    assert (len(good), odd) == (3, ())


def test_a_directory_with_endless_entries_is_ambiguous(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.store(region())
    monkeypatch.setattr(files, "MAX_ENTRIES", 3)
    for index in range(5):
        (host.own / f"note-{index}").touch()
    with pytest.raises(RegionError) as caught:
        read_directory(host.descriptor, NAME)
    assert caught.value.reason == "ambiguous"


def test_the_size_of_a_directory_is_looked_at_within_bounds(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(4):
        inner = host.own / f"d{index}"
        inner.mkdir()
        (inner / "data").write_bytes(b"x" * 40_000)
    whole = directory_bytes(host.descriptor, NAME)
    assert whole >= 4 * 40_000
    monkeypatch.setattr(files, "MAX_ENTRIES", 5)
    assert 0 < directory_bytes(host.descriptor, NAME) < whole


def test_a_region_that_is_gone_is_neither_read_nor_written(host: Host) -> None:
    write_directory(host.descriptor, NAME, Writes(recent_kernel=0))
    write_directory(host.descriptor, "absent_c", Writes(recent_kernel=0))
    assert read_ring(host.descriptor, NAME) == b""
    assert list(host.own.iterdir()) == []


def test_only_a_block_of_ours_has_a_ring(host: Host) -> None:
    for data, length in (
        (region(), 0),
        (region(layout.FILE_LENGTH), 0),
        (with_extension(2), 0),
        (with_extension(), RING_BYTES),
    ):
        host.store(data)
        assert len(read_ring(host.descriptor, NAME)) == length


@pytest.mark.parametrize("what", ["directory", "region"])
def test_what_cannot_be_opened_has_its_reason(host: Host, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host.store(region())
    real = os.open
    wanted = NAME if what == "directory" else "k.cache"

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if path == wanted:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RegionError, match="Permission denied") as caught:
        read_directory(host.descriptor, NAME)
    assert caught.value.reason == "open_failed"


def test_an_error_of_the_disk_is_an_error_of_that_region(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.store(region())

    def fail(descriptor: int, length: int, offset: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(RegionError, match="Input/output error") as caught:
        read_directory(host.descriptor, NAME)
    assert caught.value.reason == "open_failed"


def test_one_of_two_regions_may_vanish_while_they_are_compared(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.store(region())
    (host.own / "gone.cache").touch()
    real = os.stat

    def vanish(path: Any, *arguments: Any, **options: Any) -> Any:
        if path == "gone.cache":
            raise FileNotFoundError(errno.ENOENT, "gone")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", vanish)
    assert read_directory(host.descriptor, NAME) is not None


def test_a_file_cut_between_two_reads_is_a_short_read(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    path = host.store(region(slots=2))
    real = os.pread

    def cut(descriptor: int, length: int, offset: int) -> bytes:
        if offset:
            os.truncate(path, 4096)
        return real(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", cut)
    with pytest.raises(RegionError) as caught:
        read_directory(host.descriptor, NAME)
    assert caught.value.reason == "short_read"


def test_a_file_cut_inside_the_head_of_our_block_has_none(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = host.store(with_extension())
    before = path.stat()
    os.truncate(path, layout.EXTENSION_OFFSET + 10)
    monkeypatch.setattr(os, "fstat", lambda _: before)
    assert read_ring(host.descriptor, NAME) == b""
    write_directory(host.descriptor, NAME, Writes(heartbeat=5))
    assert path.stat().st_size == layout.EXTENSION_OFFSET + 10


def test_a_file_that_is_cut_and_grown_without_pause_is_an_error_of_that_region(host: Host) -> None:
    data = with_extension()
    layout.V1.proc_num.write(data, 1000)
    path = host.store(data)
    tracker = Tracker(str(host.folder))
    with cut_without_pause(path):
        for turn in range(300):
            sweep = tracker.sweep()
            assert sum(sweep.errors.values()) <= 1
            tracker.rings([NAME])
            tracker.write({NAME: Writes(recent_kernel=0, utilization_switch=1, heartbeat=turn)})


def seen_during(path: Path, field: layout.Number, base: int, writes: Writes, order: list[int]) -> list[int]:
    """What a program reads from a field while it is written by a kernel that copies byte by byte.

    Of the bytes left to be copied the next one is chosen by ``order``.
    """
    real = os.pwrite
    seen = []

    def bytewise(descriptor: int, data: bytes, offset: int) -> int:
        left = list(range(len(data)))
        for turn in range(len(data)):
            place = left.pop(order[turn % len(order)] % len(left))
            real(descriptor, data[place : place + 1], offset + place)
            seen.append(field.read(os.pread(descriptor, 8, base + field.offset), -field.offset))
        return len(data)

    with (
        open_containers(str(path.parent.parent)) as containers,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setattr(os, "pwrite", bytewise)
        write_directory(containers, NAME, writes)
    assert seen
    return seen


ORDERS = st.lists(st.integers(0, 7), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def shared_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """One for many examples."""
    made = Host(tmp_path_factory.mktemp("shared"))
    yield made
    os.close(made.descriptor)


@given(old=st.integers(0, 2**34), step=st.integers(-(2**20), 2**20) | st.sampled_from([5]), order=ORDERS)
@example(old=0x6A_FE, step=5, order=[0])
@example(old=0x6B_03, step=-5, order=[7])
def test_a_program_never_reads_a_heartbeat_older_than_both(
    shared_host: Host, old: int, step: int, order: list[int]
) -> None:
    """One that is 30 s old lets a blocked container go."""
    data, new = with_extension(), max(0, old + step)
    layout.Extension.heartbeat.write(data, old, layout.EXTENSION_OFFSET)
    path = shared_host.store(data)
    if new == old:
        new += 1
    seen = seen_during(
        path, layout.Extension.heartbeat, layout.EXTENSION_OFFSET, Writes(heartbeat=new), order
    )
    assert min(seen) >= min(old, new)
    assert seen[-1] == new


@given(
    change=st.integers(0, 254).map(lambda n: (n + 1, n))
    | st.integers(0, 255).map(lambda n: (n, -1))
    | st.just((-1, 0)),
    order=ORDERS,
)
def test_a_half_written_counter_acts_like_the_old_or_the_new_one(
    shared_host: Host, change: tuple[int, int], order: list[int]
) -> None:
    """Programs ask whether it is negative, and replace 0 and 1 by 2 with one instruction."""
    data, (old, new) = region(), change
    layout.V1.recent_kernel.write(data, old)
    path = shared_host.store(data)
    seen = seen_during(path, layout.V1.recent_kernel, 0, Writes(recent_kernel=new), order)
    signs = [value < 0 for value in seen]
    assert signs == sorted(signs, reverse=old < 0), "it changes once"
    assert all(value in (old, new) for value in seen if value in (0, 1))
    assert seen[-1] == new


@pytest.mark.parametrize(("settles_after", "total"), [(1, 7), (99, 5)])
def test_a_slot_that_is_being_written_is_read_again_and_then_used(
    host: Host, monkeypatch: pytest.MonkeyPatch, settles_after: int, total: int
) -> None:
    """monitor.md §5 rule 4: at most three times."""
    data = region(slots=2)
    base = layout.V1.procs.base(1)
    layout.V1Slot.seqlock.write(data, 3, base)
    layout.V1Slot.used_total.write(data, 5, base)
    path = host.store(data)
    real = os.pread
    again = 0

    def settle(descriptor: int, length: int, offset: int) -> bytes:
        nonlocal again
        if offset == base and length == layout.V1.procs.stride:
            again += 1
            if again == settles_after:
                layout.V1Slot.seqlock.write(data, 4, base)
                layout.V1Slot.used_total.write(data, 7, base)
                path.write_bytes(data)
        return real(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", settle)
    found = read_directory(host.descriptor, NAME)
    assert found is not None
    assert found.devices[0].total == total
    assert again == min(settles_after, 3)


def test_the_tracker_goes_on_after_files_that_fail(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    other = host.folder / "uid-b_web"
    other.mkdir()
    host.store(b"1234")
    path = other / "k.cache"
    path.write_bytes(with_extension())
    tracker = Tracker(str(host.folder))
    tracker.write({NAME: Writes(recent_kernel=0), "uid-b_web": Writes(recent_kernel=1)})
    assert layout.V1.recent_kernel.read(path.read_bytes()) == 1
    host.store(b"")
    (host.own / "a.cache").touch()
    (host.own / "b.cache").touch()
    assert set(tracker.rings([NAME, "uid-b_web"])) == {"uid-b_web"}
    real = files.directory_bytes
    monkeypatch.setattr(
        "hami.node.monitor.tracker.directory_bytes",
        lambda containers, name: real(containers, name if name == NAME else "absent"),
    )
    assert set(tracker.sizes()) == {NAME}


def test_without_any_containers_the_tracker_has_nothing(tmp_path: Path) -> None:
    tracker = Tracker(str(tmp_path / "absent"))
    tracker.write({NAME: Writes(recent_kernel=0)})
    assert tracker.rings([NAME]) == {}
    assert tracker.sizes() == {}
    assert tracker.sweep().regions == {}


def test_a_region_that_vanishes_is_forgotten_at_once(host: Host) -> None:
    """Only one that is broken is shown for a while."""
    tracker = Tracker(str(host.folder))
    path = host.store(region())
    assert next(iter(tracker.sweep().regions.values())) is not None
    path.unlink()
    assert next(iter(tracker.sweep().regions.values())) is None
    host.store(b"1234")
    assert next(iter(tracker.sweep().regions.values())) is None
    host.own.rename(host.folder / "nodash")
    assert tracker.sweep().regions == {}
    with open_containers(str(host.folder)) as descriptor:
        assert list_directories(descriptor) == ((), ("nodash",))


def test_a_directory_that_cannot_be_listed_hides_no_other(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.store(region())
    (host.folder / "uid-b_web").mkdir()
    broken = (host.folder / "uid-b_web").stat().st_ino
    plain = os.scandir

    def listed(place: Any) -> Any:
        if isinstance(place, int) and os.fstat(place).st_ino == broken:
            raise OSError(errno.EIO, "Input/output error")
        return plain(place)

    monkeypatch.setattr(os, "scandir", listed)
    sweep = Tracker(str(host.folder)).sweep()
    assert {directory.name: found is not None for directory, found in sweep.regions.items()} == {
        NAME: True,
        "uid-b_web": False,
    }
    assert sweep.errors == {"open_failed": 1}


def lines(caplog: pytest.LogCaptureFixture, event: str) -> int:
    return [record.message for record in caplog.records].count(event)


def test_a_region_that_stays_unreadable_is_logged_once_and_again_after_ten_minutes(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    now = [1000.0]
    tracker = Tracker(str(host.folder), clock=lambda: now[0])
    path = host.store(b"four")
    for _ in range(3):
        assert tracker.sweep().errors == {"too_small": 1}
    assert lines(caplog, "region.unreadable") == 1
    now[0] += 600
    tracker.sweep()
    assert lines(caplog, "region.unreadable") == 2
    path.write_bytes(bytes(64))
    tracker.sweep()
    assert lines(caplog, "region.unreadable") == 3, "another reason"
    path.write_bytes(region())
    tracker.sweep()
    path.write_bytes(bytes(64))
    tracker.sweep()
    assert lines(caplog, "region.unreadable") == 4, "it was good meanwhile"


def test_a_missing_directory_of_containers_is_logged_once_with_its_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "containers"
    tracker = Tracker(str(folder), clock=lambda: 0.0)
    for _ in range(3):
        tracker.sweep()
    assert lines(caplog, "containers.absent") == 1
    assert vars(caplog.records[0])["path"] == str(folder)
    folder.mkdir()
    tracker.sweep()
    folder.rmdir()
    tracker.sweep()
    assert lines(caplog, "containers.absent") == 2
