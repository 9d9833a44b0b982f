"""Scheduler and monitor describe their build in the same words (monitor.md §6.4)."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from hami.cli.monitor import command
from hami.node.monitor.process import add_build_info
from hami.node.monitor.series import SeriesBook
from hami.protocol.build import build_labels
from hami.scheduler.edge.metric_texts import build_info


def test_scheduler_and_monitor_name_the_same_build() -> None:
    book = SeriesBook()
    add_build_info(book)
    ((shown,),) = [metric.samples for metric in book.metrics]
    scheduler = dict(re.findall(r'(\w+)="([^"]*)"', build_info()))
    assert scheduler == shown.labels
    assert set(scheduler) == {"version", "revision", "build_date", "go_version", "compiler", "platform"}
    assert scheduler["revision"] == scheduler["build_date"] == "unknown"
    assert re.fullmatch(r"v\d+\.\d+\.\d+.*", scheduler["version"])


@pytest.mark.parametrize(
    ("machine", "name"), [("x86_64", "amd64"), ("aarch64", "arm64"), ("riscv64", "riscv64")]
)
def test_platforms_have_the_names_of_go(monkeypatch: pytest.MonkeyPatch, machine: str, name: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert build_labels("1.2.3")["platform"] == f"linux/{name}"
    assert f"platform: linux/{name}" in CliRunner().invoke(command, ["version"]).output.splitlines()
