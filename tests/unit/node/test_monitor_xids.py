"""The monitor counts the XIDs of each card (monitor.md §6.5)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from node_cards import U1, U2

from hami.node.errors import NvmlError
from hami.node.monitor.hostgpu import HostReader
from hami.node.monitor.series import SeriesBook, add_host
from hami.node.nvml import XidEvent

CARDS = [(U1, "A100", 40 << 30), (U2, "A100", 40 << 30)]
Make = Callable[..., Any]


def counts(reader: HostReader) -> dict[str, float]:
    book = SeriesBook()
    add_host(book, "n1", reader.read(), legacy=False)
    return {
        sample.labels["device_uuid"]: sample.value
        for metric in book.metrics
        for sample in metric.samples
        if sample.name == "hami_host_gpu_xid_errors_total"
    }


def test_every_xid_counts_for_its_card(make_nvml: Make, tmp_path: Path) -> None:
    nvml = make_nvml(CARDS)
    reader = HostReader(nvml, str(tmp_path / "lock"))
    assert counts(reader) == {}, "nobody watches yet"
    nvml.xids = [XidEvent(U1, 31), XidEvent(U1, 79), XidEvent("", 48)]
    reader.watch_xids()
    assert counts(reader) == {U1: 2, U2: 0}
    nvml.xids = [XidEvent(U2, 13)]
    reader.watch_xids()
    assert counts(reader) == {U1: 2, U2: 1}


def test_a_card_that_cannot_be_watched_has_no_count(make_nvml: Make, tmp_path: Path) -> None:
    nvml = make_nvml(CARDS)
    nvml.unwatched = (U1,)
    reader = HostReader(nvml, str(tmp_path / "lock"))
    reader.watch_xids()
    assert counts(reader) == {U2: 0}


def test_a_watch_that_fails_is_begun_again_later_and_keeps_its_counts(
    make_nvml: Make, tmp_path: Path
) -> None:
    nvml, now = make_nvml(CARDS), [0.0]
    reader = HostReader(nvml, str(tmp_path / "lock"), clock=lambda: now[0])
    nvml.xids = [XidEvent(U1, 79)]
    reader.watch_xids()
    nvml.wait_error = NvmlError("driver gone", 999)
    reader.watch_xids()
    assert nvml.closed_sources == 1
    nvml.wait_error = None
    nvml.xids = [XidEvent(U1, 79)]
    reader.watch_xids()
    assert counts(reader)[U1] == 1, "30 s have not passed"
    now[0] = 31.0
    reader.watch_xids()
    assert counts(reader)[U1] == 2


def test_nobody_watches_while_mig_is_changed(make_nvml: Make, tmp_path: Path) -> None:
    nvml, lock = make_nvml(CARDS), tmp_path / "lock"
    reader = HostReader(nvml, str(lock))
    reader.watch_xids()
    lock.touch()
    assert reader.stand_aside()
    assert nvml.closed_sources == 1
    waits = nvml.waits
    reader.watch_xids()
    assert nvml.waits == waits


def test_nobody_begins_to_watch_after_a_scrape_stood_aside_for_mig(make_nvml: Make, tmp_path: Path) -> None:
    nvml, lock = make_nvml(CARDS), tmp_path / "lock"

    def clock() -> float:
        if not lock.exists():
            lock.touch()
            assert reader.read().paused  # a scrape, between two steps of the tick
        return 0.0

    reader = HostReader(nvml, str(lock), clock=clock)
    reader.watch_xids()
    assert nvml.waits == 0
