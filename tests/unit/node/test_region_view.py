"""What `hami region` shows of a file that anybody may have written."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from region_cutter import cut_without_pause

from hami.cli.region import command
from hami.node.errors import UnsafePathError
from hami.node.region.edit import RegionEditError, RegionFile
from hami.node.region.explain import explanation, lines
from hami.node.region.format import RegionError
from hami.node.region.view import view
from hami.protocol import region_layout as layout

MIB = 1 << 20


def region(slots: int = 2) -> bytearray:
    """A region of ours with one device and `slots` (at most 64) processes of 1 MiB each."""
    data = bytearray(layout.FILE_LENGTH)
    base = layout.EXTENSION_OFFSET
    layout.V1.magic.write(data, layout.MAGIC)
    layout.V1.major.write(data, 1)
    layout.V1.minor.write(data, 2)
    layout.V1.device_count.write(data, 1)
    data[layout.V1.uuid.offset : layout.V1.uuid.offset + 5] = b"GPU-x"
    layout.V1.limit.write(data, 64 * MIB)
    layout.V1.proc_num.write(data, slots)
    data[base : base + 8] = layout.EXTENSION_MAGIC
    layout.Extension.version.write(data, layout.EXTENSION_VERSION, base)
    layout.Extension.length.write(data, layout.EXTENSION_LENGTH, base)
    layout.Extension.claimed.write(data, (1 << slots) - 1, base)
    layout.ExtensionDevice.memory_limit.write(data, 64 * MIB, layout.Extension.devices.base(0, base))
    for k in range(slots):
        slot = layout.V1.procs.base(k)
        layout.V1Slot.pid.write(data, 100 + k, slot)
        layout.V1Slot.status.write(data, layout.SLOT_RUNNING, slot)
        layout.V1Slot.used_data.write(data, MIB, slot)
        layout.V1Slot.used_total.write(data, MIB, slot)
        layout.Extension.totals.write(data, MIB, base, k)
    return data


places = st.sampled_from(
    [
        0,
        4,
        layout.V1.device_count.offset,
        layout.V1.uuid.offset,
        layout.V1.limit.offset,
        layout.V1.proc_num.offset,
        layout.V1.procs.base(0),
        layout.V1.procs.base(0) + layout.V1Slot.status.offset,
        layout.EXTENSION_OFFSET,
        layout.EXTENSION_OFFSET + layout.Extension.next_event.offset,
        layout.EXTENSION_OFFSET + layout.Extension.heartbeat.offset,
        layout.Extension.slots.base(0, layout.EXTENSION_OFFSET) + layout.ExtensionSlot.host_pid_path.offset,
        layout.Extension.events.base(0, layout.EXTENSION_OFFSET),
        layout.Extension.events.base(0, layout.EXTENSION_OFFSET) + 16,
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(places, st.binary(min_size=1, max_size=12)), max_size=6))
def test_any_content_is_shown_or_refused_with_a_reason(edits: list[tuple[int, bytes]]) -> None:
    data = region()
    for place, value in edits:
        data[place : place + len(value)] = value
    try:
        shown = view(bytes(data), lambda _: True)
    except RegionError:
        return
    json.dumps(shown)
    explained = explanation(shown, 2**62, {}, from_file=False)
    assert all(line.isprintable() for line in lines(shown, explained))
    assert len(shown["devices"]) <= layout.MAX_DEVICES
    assert shown["slots"] <= layout.MAX_SLOTS


@settings(max_examples=25, deadline=None)
@given(st.integers(0, layout.FILE_LENGTH - 1))
def test_a_file_that_was_cut_is_shown_or_refused(length: int) -> None:
    try:
        shown = view(bytes(region()[:length]), lambda _: True)
    except RegionError:
        return
    assert not shown["extension"]


def test_where_a_limit_comes_from_is_told() -> None:
    shown = view(bytes(region()), lambda _: True)

    def origin(named: dict[str, str], *, from_file: bool) -> object:
        return explanation(shown, 0, named, from_file)["devices"][0]["memory_limit_from"]

    assert origin({}, from_file=False) == "region"
    assert origin({"CUDA_DEVICE_MEMORY_LIMIT_0": "64m"}, from_file=False) == "environment"
    assert origin({"CUDA_DEVICE_MEMORY_LIMIT": "64m"}, from_file=True) == "limits file"
    shown["devices"][0]["limit"] = 128 * MIB  # the region was raised above the file
    assert origin({}, from_file=True) == "limits file"


def test_only_the_slots_of_the_dead_are_cleared(tmp_path: Path) -> None:
    path = tmp_path / "a.cache"
    content = region(3)
    device = layout.Extension.devices.base(0, layout.EXTENSION_OFFSET)
    layout.ExtensionDevice.oversubscribed.write(content, 5 * MIB, device)
    for k in (1, 2):
        layout.V1Slot.used_managed.write(content, k * MIB, layout.V1.procs.base(k))
    path.write_bytes(content)
    with RegionFile(path, write=True) as living, RegionFile(path, write=True) as tool:
        assert living._try_lock(layout.LOCK_SLOT + 1)
        assert tool.repair() == {"slots_cleared": 2, "flags_cleared": 0}
        assert [process["pid"] for process in tool.view()["processes"]] == [101]
        assert tool.view()["processes"][0]["live"]
        data = path.read_bytes()
        totals = [layout.Extension.totals.read(data, layout.EXTENSION_OFFSET, k) for k in range(3)]
        assert totals == [0, MIB, 0]
        assert layout.ExtensionDevice.oversubscribed.read(data, device) == 3 * MIB
        assert layout.Extension.claimed.read(data, layout.EXTENSION_OFFSET) == 0b010


def test_a_region_without_our_locks_is_never_cleared(tmp_path: Path) -> None:
    data = region()
    layout.Extension.flags.write(data, layout.FLAG_NO_OFD_LOCKS, layout.EXTENSION_OFFSET)
    path = tmp_path / "a.cache"
    path.write_bytes(data)
    with RegionFile(path, write=True) as tool, pytest.raises(RegionEditError):
        tool.repair()
    assert path.read_bytes() == data


def test_a_planted_path_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "link.cache").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "link.cache", tmp_path, tmp_path / "none.cache"):
        with pytest.raises(UnsafePathError):
            RegionFile(path, write=False)


@pytest.mark.parametrize(
    "options",
    [
        ("--set-limit", "1=5m"),
        ("--set-limit", "0"),
        ("--set-limit", "0=five"),
        ("--set-limit", "x=5m"),
        ("--set-sm-limit", "0=0"),
        ("--set-sm-limit", "0=101"),
        ("--set-sm-limit", "0=" + "9" * 5000),
        ("--set-limit", "0=" + "9" * 5000),
        ("--set-limit", "9" * 5000 + "=1g"),
        ("--set-limit", "0=18446744073709551616"),
        ("--set-limit", "0=17179869184g"),
        ("--set-limit", "0=\u0663m"),
        ("--set-limit", "0=5m", "--set-limit", "1=5m"),
        ("--set-limit", "0=5m", "--set-sm-limit", "1=5"),
        ("--suspend", "--resume"),
    ],
)
def test_what_makes_no_sense_changes_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    path = tmp_path / "a.cache"
    path.write_bytes(region())
    result = CliRunner().invoke(command, [str(path), *options])
    assert result.exit_code in (1, 2), result.exception
    assert path.read_bytes() == region()


def test_a_file_that_was_cut_after_it_was_opened_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.cache"
    path.write_bytes(region())
    with RegionFile(path, write=True) as tool:
        for length in (len(region()) - 1, 100, 4, 0):
            with path.open("r+b") as file:
                file.truncate(length)
            for change in (lambda: tool.set_limits([(0, 5)], []), lambda: tool.set_status(2), tool.repair):
                with pytest.raises(RegionEditError):
                    change()
            assert path.stat().st_size == length


def test_a_file_that_is_cut_while_its_head_is_read_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.cache"
    path.write_bytes(region())
    monkeypatch.setattr("os.pread", lambda *_: b"")
    with RegionFile(path, write=True) as tool, pytest.raises(RegionEditError, match="its length changes"):
        tool.repair()
    assert path.read_bytes() == region()


def test_a_file_that_cannot_be_mapped_any_more_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.cache"
    path.write_bytes(region())
    real = mmap.mmap

    def cut(descriptor: int, length: int) -> mmap.mmap:
        with path.open("r+b") as file:
            file.truncate(100)
        return real(descriptor, length)

    monkeypatch.setattr(mmap, "mmap", cut)
    with RegionFile(path, write=True) as tool, pytest.raises(RegionEditError, match="cannot be mapped"):
        tool.repair()


def test_a_file_that_is_cut_while_it_is_changed_ends_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.cache"
    path.write_bytes(region())
    real = RegionFile._used_slots

    def cut(tool: RegionFile, data: memoryview) -> range:
        with path.open("r+b") as file:
            file.truncate(100)
        return real(tool, data)

    monkeypatch.setattr(RegionFile, "_used_slots", cut)
    result = CliRunner().invoke(command, [str(path), "--suspend"])
    assert result.exit_code == 1
    assert f"Error: {path}: somebody cut it while it was changed" in result.output
    assert path.stat().st_size == 100


@pytest.mark.parametrize("options", [(), ("--json",), ("--set-limit", "0=5m"), ("--suspend",), ("--repair",)])
def test_a_file_that_is_cut_and_grown_without_pause_is_survived(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    path = tmp_path / "a.cache"
    path.write_bytes(region(64))
    with cut_without_pause(path):
        for _ in range(25):
            result = CliRunner().invoke(command, [str(path), *options])
            assert result.exit_code in (0, 1), result.exception
            assert result.exit_code == 0 or result.output.startswith("Error: ")


def test_a_name_with_an_escape_sequence_is_told_plainly(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [str(tmp_path / "\x1b]0;owned\x07.cache")], color=True)
    assert result.exit_code == 1
    assert "\x1b" not in result.output
    assert "\\x1b]0;owned" in result.output


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("3000m", 3000 * MIB),
        ("2g", 2048 * MIB),
        ("1Gi", 1024 * MIB),
        ("18446744073709551615", 2**64 - 1),
        ("512kb", 524288),
        ("0", 0),
    ],
)
def test_sizes_are_written_as_in_the_environment(tmp_path: Path, text: str, size: int) -> None:
    path = tmp_path / "a.cache"
    path.write_bytes(region())
    assert CliRunner().invoke(command, [str(path), "--set-limit", f"0={text}"]).exit_code == 0
    assert layout.V1.limit.read(path.read_bytes()) == size
