"""When an unhealthy card is healthy again (device-plugin.md §10.5): rules, child processes, the plugin."""

from __future__ import annotations

import asyncio
import errno
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_cards import U1, U2
from plugin_world import Node

from hami.node.errors import NvmlError, SettingsError
from hami.node.nvml import XidEvent
from hami.node.plugin import recovery as recovery_loop
from hami.node.plugin.board import Board
from hami.node.plugin.checker import ChildChecker, Finding
from hami.node.plugin.inventory import Card
from hami.node.plugin.recovery_rules import (
    DEFAULT_TRANSIENT,
    Recovery,
    RecoveryMode,
    RecoveryRules,
    Sight,
    Step,
    parse_recovery,
)

RESET = RecoveryRules(RecoveryMode.RESET)
TIMED = RecoveryRules(RecoveryMode.TIMED, frozenset({94}), 600.0)
GOOD = Sight(answers=True, generation="1")
LOST = Sight(answers=False)
Make = Callable[..., Any]
Until = Callable[..., Awaitable[None]]


def faulty(rules: RecoveryRules, xid: int | None = 79, now: float = 0.0) -> Recovery:
    recovery = Recovery(rules)
    recovery.fault(U1, xid, f"XID {xid}", "1", now)
    return recovery


def steps(recovery: Recovery, *sights: Sight, now: float = 0.0) -> list[Step]:
    return [recovery.sighted(U1, sight, now) for sight in sights]


# ---- rules -------------------------------------------------------------------------------------------------


def test_a_card_that_was_never_lost_stays_unhealthy() -> None:
    recovery = faulty(RESET)
    assert set(steps(recovery, *[GOOD] * 50, now=1e9)) == {Step.WAIT}
    assert recovery.unhealthy == {U1: "XID 79"}


def test_a_card_that_was_lost_comes_back_after_two_good_looks() -> None:
    recovery = faulty(RESET)
    assert steps(recovery, GOOD, LOST, GOOD, GOOD, GOOD) == [
        Step.WAIT,
        Step.WAIT,
        Step.WATCH_ANEW,
        Step.WAIT,
        Step.HEALTHY,
    ]
    assert recovery.unhealthy == {}


@pytest.mark.parametrize("generation", ["2", ""])
def test_another_enumeration_or_driver_is_a_reset(generation: str) -> None:
    recovery = faulty(RESET)
    new = replace(GOOD, generation=generation)
    assert steps(recovery, new, new, new) == [Step.WATCH_ANEW, Step.WAIT, Step.HEALTHY]


def test_a_bad_look_in_between_begins_anew() -> None:
    recovery = faulty(RESET)
    unwatched = replace(GOOD, watched=False)
    assert Step.HEALTHY not in steps(recovery, LOST, GOOD, GOOD, unwatched, GOOD, LOST, GOOD, GOOD)
    assert steps(recovery, GOOD) == [Step.HEALTHY]


def test_suspect_memory_keeps_a_card_out() -> None:
    suspect = replace(GOOD, suspect="its row remapping has failed")
    recovery = faulty(RESET)
    assert Step.HEALTHY not in steps(recovery, LOST, GOOD, *[suspect] * 20)
    timed = faulty(TIMED, 94)
    assert Step.PROBE not in steps(timed, *[suspect] * 20, now=1e6)


def test_a_fault_after_the_return_needs_another_reset() -> None:
    recovery = faulty(RESET)
    steps(recovery, LOST, GOOD, GOOD)
    recovery.fault(U1, 79, "XID 79", "1", 1.0)
    assert set(steps(recovery, *[GOOD] * 10)) == {Step.WAIT}


def test_a_watch_that_failed_is_mended_by_events_that_arrive() -> None:
    recovery = faulty(RESET, None)
    unwatched = replace(GOOD, watched=False)
    assert steps(recovery, unwatched, unwatched, GOOD, GOOD) == [
        Step.WATCH_ANEW,
        Step.WAIT,
        Step.WAIT,
        Step.HEALTHY,
    ]


def test_each_recovery_doubles_the_wait_for_the_next() -> None:
    recovery = Recovery(RESET)
    waits = []
    now = 0.0
    for _ in range(5):
        recovery.fault(U1, 79, "XID 79", "1", now)
        begin = now
        steps(recovery, LOST, GOOD, now=now)
        while steps(recovery, GOOD, now=now) != [Step.HEALTHY]:
            now += 5
        waits.append(now - begin)
    assert waits == [5, 30, 60, 120, 240]
    recovery.fault(U1, 79, "XID 79", "1", now + 7 * 3600)
    assert steps(recovery, LOST, GOOD, GOOD, GOOD, now=now + 7 * 3600)[-1] is Step.HEALTHY


def test_timed_probes_after_the_quiet_period_only_for_transient_xids() -> None:
    recovery = faulty(TIMED, 94)
    assert recovery.sighted(U1, GOOD, 599) is Step.WAIT
    assert recovery.sighted(U1, GOOD, 600) is Step.PROBE
    recovery.fault(U1, 94, "XID 94", "1", 601)
    assert recovery.sighted(U1, GOOD, 1200) is Step.WAIT
    assert recovery.sighted(U1, GOOD, 1201) is Step.PROBE
    assert recovery.probed(U1, True, 1201) is Step.HEALTHY
    for xid in (79, None):
        assert Step.PROBE not in steps(faulty(TIMED, xid), *[GOOD] * 5, now=1e6)
    both = faulty(TIMED, 94)
    both.fault(U1, 48, "XID 48", "1", 1)
    assert both.sighted(U1, GOOD, 1e6) is Step.WAIT
    assert faulty(RESET, 94).sighted(U1, GOOD, 1e6) is Step.WAIT


def test_a_failed_probe_is_repeated_ever_later() -> None:
    recovery = faulty(TIMED, 94)
    now, pauses = 600.0, []
    for _ in range(4):
        assert recovery.sighted(U1, GOOD, now) is Step.PROBE
        assert recovery.probed(U1, False, now) is Step.WAIT
        before = now
        while recovery.sighted(U1, GOOD, now) is not Step.PROBE:
            now += 100
        pauses.append(now - before)
    assert pauses == [1200, 2400, 3600, 3600]


def test_a_fault_during_the_probe_makes_its_result_worthless() -> None:
    recovery = faulty(TIMED, 94)
    assert recovery.sighted(U1, GOOD, 600) is Step.PROBE
    recovery.fault(U1, 94, "XID 94", "1", 610)
    assert recovery.probed(U1, True, 615) is Step.WAIT


def test_cards_that_are_healthy_for_another_reason_are_forgotten() -> None:
    recovery = faulty(RESET)
    recovery.fault(U2, None, "its events cannot be watched", "1", 0)
    recovery.keep([U1])
    assert recovery.unhealthy == {U1: "XID 79"}
    assert recovery.sighted(U2, GOOD, 0) is Step.WAIT
    assert recovery.probed(U2, True, 0) is Step.WAIT


_SIGHTS = st.builds(
    Sight,
    st.booleans(),
    st.sampled_from(["", "", "suspect"]),
    st.sampled_from(["1", "1", "2"]),
    st.booleans(),
)
_ACTIONS = st.one_of(
    st.tuples(st.just("look"), _SIGHTS), st.tuples(st.just("xid"), st.sampled_from([79, 94, None]))
)


@given(st.lists(st.tuples(_ACTIONS, st.floats(0, 700)), max_size=30), st.sampled_from([RESET, TIMED]))
def test_no_card_is_healthy_without_a_reason(
    actions: list[tuple[tuple[str, Any], float]], rules: RecoveryRules
) -> None:
    """A reset needs a loss or a new generation since the last fault, a probe transient XIDs and quiet."""
    recovery = faulty(rules)
    now, last, returned, xids = 0.0, 0.0, False, {79}
    for (kind, value), pause in actions:
        now += pause
        if not recovery.unhealthy:
            return
        if kind == "xid":
            recovery.fault(U1, value, "again", "1", now)
            last, returned = now, value is None
            xids |= {value} if value is not None else set()
            continue
        returned |= not value.answers or value.generation != "1"
        step = recovery.sighted(U1, value, now)
        if step is Step.HEALTHY:
            assert returned
        if step in (Step.HEALTHY, Step.PROBE):
            assert value.answers
            assert not value.suspect
            assert value.watched
        if step is Step.PROBE:
            assert rules is TIMED
            assert xids <= TIMED.transient
            assert now - last >= TIMED.quiet_s


# ---- environment -------------------------------------------------------------------------------------------


def test_recovery_is_off_unless_it_is_switched_on() -> None:
    assert parse_recovery("", "", None) == RecoveryRules()
    assert parse_recovery("off", "", None).mode is RecoveryMode.OFF
    assert parse_recovery("timed", " 94, 63 ,", 60) == RecoveryRules(
        RecoveryMode.TIMED, frozenset({63, 94}), 60
    )
    assert parse_recovery("reset", "", None).transient == DEFAULT_TRANSIENT


@pytest.mark.parametrize(
    ("mode", "transient", "quiet", "text"),
    [
        ("on", "", None, "must be off, reset or timed"),
        ("timed", "x", None, "HAMI_HEALTH_TRANSIENT_XIDS 'x' must be a comma list of XIDs"),
        ("timed", "-1", None, "comma list"),
        ("timed", ",".join(["1"] * 200), None, "at most 128"),
        ("timed", "", 1.0, "HAMI_HEALTH_QUIET_PERIOD must be 10s to 24h"),
    ],
)
def test_what_cannot_be_meant_is_refused(mode: str, transient: str, quiet: float | None, text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        parse_recovery(mode, transient, quiet)


# ---- checks in child processes -----------------------------------------------------------------------------


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ChildChecker]:
    """A checker whose child runs this text instead."""

    def make(text: str) -> ChildChecker:
        (tmp_path / "stand_in.py").write_text(textwrap.dedent(text))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return ChildChecker("/driver-root", look_s=30, probe_s=30, module="stand_in")

    return make


async def test_a_child_is_told_what_to_do_and_its_line_is_the_finding(
    child: Callable[[str], ChildChecker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    checker = child(
        """
        import json, os, sys
        seen = [*sys.argv[1:], os.environ.get("CUDA_VISIBLE_DEVICES"), "LD_PRELOAD" in os.environ]
        print(json.dumps({"problem": str(seen), "suspect": "s"}))
        """
    )
    assert await checker.look(U1) == Finding(f"['look', '{U1}', '/driver-root', None, False]", "s")
    assert await checker.probe(U1) == Finding(f"['probe', '{U1}', '/driver-root', '{U1}', False]", "s")


async def test_a_node_without_room_for_a_process_has_found_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    found = await ChildChecker().look(U1)
    assert found.problem == "no process can be started for the look: Resource temporarily unavailable"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raise SystemExit(3)", "the look ended with status 3"),
        ("import os; os.kill(os.getpid(), 9)", "the look ended with status -9"),
        ("print('no json')", "the look printed no result"),
        ("print('x' * 100000)", "the look "),
    ],
)
async def test_a_child_that_ends_badly_has_found_a_problem(
    child: Callable[[str], ChildChecker], text: str, problem: str
) -> None:
    assert (await child(text).look(U1)).problem.startswith(problem)


async def test_a_child_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    checker = ChildChecker(look_s=0.2, module="hangs")
    assert await checker.look(U1) == Finding("no answer within 0.2 s")
    assert checker._hanging == {}


async def test_while_a_child_cannot_be_ended_there_is_no_second_one() -> None:
    checker = ChildChecker()
    hanging = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )
    checker._hanging[U1] = hanging
    assert await checker.look(U1) == Finding("an earlier check still hangs in the driver")
    hanging.kill()
    await hanging.wait()
    assert "still hangs" not in (await checker.look(U1)).problem


def test_a_module_and_a_device_that_come_anew_change_the_generation(tmp_path: Path) -> None:
    checker = ChildChecker(sysfs=str(tmp_path))
    bus = "00000000:3B:00.0"
    assert checker.generation(bus) == "0/0"
    (tmp_path / "module/nvidia").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:3b:00.0").mkdir(parents=True)
    first = checker.generation(bus)
    assert "0" not in first.split("/")
    (tmp_path / "bus/pci/devices/0000:3b:00.0").rename(tmp_path / "away")
    (tmp_path / "bus/pci/devices/0000:3b:00.0").mkdir()
    second = checker.generation(bus)
    assert second != first
    assert second.split("/")[0] == first.split("/")[0]


# ---- the running plugin ------------------------------------------------------------------------------------


class Checker:
    """What the next looks and probes find, by UUID."""

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.looks: list[str] = []
        self.probes: list[str] = []
        self.memory = ""

    async def look(self, uuid: str) -> Finding:
        await asyncio.sleep(0)
        self.looks.append(uuid)
        return Finding("GPU is lost" if uuid in self.lost else "")

    async def probe(self, uuid: str) -> Finding:
        self.probes.append(uuid)
        return Finding(self.memory)

    def generation(self, bus_id: str) -> str:
        return f"1/{bus_id}"


@pytest.fixture
def node(cluster: Any, make_nvml: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(recovery_loop, "LOOK_EVERY_S", 0.01)
    folder = tempfile.mkdtemp(prefix="hg")
    yield Node(cluster, make_nvml([(U1, "NVIDIA A", 1 << 30), (U2, "NVIDIA A", 1 << 30)]), Path(folder))
    shutil.rmtree(folder)


def recovering(node: Node, rules: RecoveryRules) -> Checker:
    checker = Checker()
    node.plugin._checker = checker
    node.plugin._recovery = Recovery(rules)
    return checker


def sick(node: Node) -> set[str]:
    return {card.uuid for card in node.plugin._board.cards if not card.healthy}


def told(node: Node, reason: str) -> list[str]:
    return [text for _, found, text in node.cluster.events if found == reason]


async def test_h10_with_reset_a_card_comes_back_with_an_event(node: Node, until: Until) -> None:
    checker = recovering(node, RESET)
    async with node:
        await until(lambda: node.kubelet.registered)
        node.nvml.xids.append(XidEvent(U1, 79))
        await until(lambda: sick(node) == {U1})
        checker.lost = {U1}
        await until(lambda: len(checker.looks) >= 3)
        sources = node.nvml.closed_sources
        checker.lost = set()
        await until(lambda: sick(node) == set())
        assert node.nvml.closed_sources > sources, "events are subscribed to again"
        await until(
            lambda: node.cluster.node_annotations["hami.io/node-nvidia-register"].count("health") == 2
        )
        node.nvml.xids.append(XidEvent(U1, 79))
        await until(lambda: sick(node) == {U1})
        await until(lambda: len(told(node, "HAMiDeviceUnhealthy")) == 2)
    assert node.plugin.counters.transitions == {(U1, "unhealthy"): 2, (U1, "healthy"): 1}
    assert told(node, "HAMiDeviceRecovered") == [
        f"{U1}: healthy again after XID 79: it was reset or enumerated anew"
    ]
    assert set(checker.looks) == {U1}


async def test_h10_with_reset_a_card_that_was_not_reset_stays_unhealthy_over_a_reload(
    node: Node, until: Until
) -> None:
    checker = recovering(node, RESET)
    async with node:
        await until(lambda: node.kubelet.registered)
        node.nvml.xids.append(XidEvent(U1, 79))
        await until(lambda: sick(node) == {U1})
        node.plugin.reload()
        await until(lambda: len(node.kubelet.registered) == 2)
        looks = len(checker.looks)
        await until(lambda: len(checker.looks) >= looks + 5)
        assert sick(node) == {U1}
        checker.lost = {U1}
        await until(lambda: len(checker.looks) >= looks + 8)
        checker.lost = set()
        await until(lambda: sick(node) == set())
    assert checker.probes == []


async def test_timed_recovery_probes_before_it_brings_a_card_back(node: Node, until: Until) -> None:
    checker = recovering(node, replace(TIMED, quiet_s=0.01))
    checker.memory = "cuMemAlloc_v2 gives error 2"
    async with node:
        await until(lambda: node.kubelet.registered)
        node.nvml.xids.append(XidEvent(U2, 94))
        await until(lambda: len(checker.probes) >= 2)
        assert sick(node) == {U2}
        checker.memory = ""
        await until(lambda: sick(node) == set())
    assert told(node, "HAMiDeviceRecovered") == [
        f"{U2}: healthy again after XID 94: no further fault, and its memory works"
    ]


async def test_cards_come_back_when_nvml_does(node: Node, until: Until) -> None:
    recovering(node, RESET)
    async with node:
        await until(lambda: node.kubelet.registered)
        node.nvml.wait_error = NvmlError("driver gone", 1)
        await until(lambda: sick(node) == {U1, U2})
        node.nvml.wait_error = None
        await until(lambda: sick(node) == set())


async def test_without_recovery_nobody_looks(node: Node, until: Until) -> None:
    checker = Checker()
    async with node:
        await until(lambda: node.kubelet.registered)
        node.nvml.xids.append(XidEvent(U1, 79))
        await until(lambda: sick(node) == {U1})
        await until(lambda: node.nvml.waits > 10)
        assert sick(node) == {U1}
    assert checker.looks == []


async def test_a_healthy_card_is_no_lasting_fault_any_more() -> None:
    board = Board()
    board.show([Card(0, U1, "A", 1)])
    board.mark_faulty([U1], "XID 79")
    version = board.version
    board.mark_healthy([U1, U2])
    assert (board.faults, board.lasting) == ({}, {})
    assert board.cards[0].healthy
    assert await board.wait_beyond(version) > version
    board.mark_healthy([U1])
    assert board.version == version + 1
