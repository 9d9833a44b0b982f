"""While the device plugin changes MIG nobody else holds NVML open (monitor.md §9)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hami.node.monitor.claims import LimitsFolder
from hami.node.monitor.garbage import Garbage
from hami.node.monitor.hostgpu import HostReader
from hami.node.monitor.series import SeriesBook
from hami.node.monitor.service import Monitor, MonitorOptions
from hami.node.monitor.tracker import Tracker

CARD = ("GPU-11111111-2222-3333-4444-555555555555", "A100", 40 << 30)


class _NoPods:
    synced = True

    def by_uid(self) -> dict[str, Any]:
        return {}

    async def list_uids(self) -> set[str]:
        return set()


def _nothing(book: SeriesBook) -> None:
    """No series besides the monitor's own."""


async def test_a_tick_closes_nvml_while_mig_is_changed_even_if_nobody_scrapes(
    tmp_path: Path, make_nvml: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = make_nvml([CARD])
    closed: list[int] = []
    monkeypatch.setattr(nvml, "close", lambda: closed.append(1))
    lock, pods = tmp_path / "mig.lock", _NoPods()
    monitor = Monitor(
        MonitorOptions(node="n1", proc=str(tmp_path), patience_s=60, scrape_patience_s=60),
        Tracker(str(tmp_path / "containers")),
        HostReader(nvml, str(lock)),
        Garbage(str(tmp_path / "containers"), str(tmp_path / "limits")),
        LimitsFolder(str(tmp_path / "limits")),
        pods,
        pods.list_uids,
        _nothing,
        lambda pod, event: None,
    )
    await monitor.tick()
    assert closed == []
    lock.touch()
    await monitor.tick()
    assert closed == [1]


def test_an_old_lock_is_obeyed_and_told_once_a_minute(
    tmp_path: Path, make_nvml: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    lock, now = tmp_path / "mig.lock", [1000.0]
    reader = HostReader(make_nvml([CARD]), str(lock), clock=lambda: now[0])
    lock.touch()
    with caplog.at_level(logging.WARNING):
        assert reader.stand_aside()
        assert not caplog.messages, "a young lock is nothing special"
        os.utime(lock, (time.time() - 601, time.time() - 601))
        for later in (0.0, 30.0, 61.0):
            now[0] = 1000.0 + later
            assert reader.stand_aside()
    assert caplog.messages == ["mig_lock.old"] * 2
    lock.unlink()
    assert not reader.stand_aside()
