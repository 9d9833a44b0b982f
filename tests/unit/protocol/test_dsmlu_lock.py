"""The Cambricon lock, which names no owner (vendors/cambricon.md §7)."""

from __future__ import annotations

from hami.protocol.dsmlu_lock import KEY, AcquireDsmlu
from hami.protocol.lock import (
    Action,
    Contention,
    Done,
    Failed,
    GetNode,
    LockOwner,
    NodeRead,
    Patched,
    PatchFailed,
    PatchNode,
    ReadFailed,
    Release,
    Sight,
    Slept,
)
from hami.protocol.timestamps import format_rfc3339

NOON = 1787313600.0
MINE = format_rfc3339(NOON)


def first(machine: AcquireDsmlu, lock: str | None, now: float = NOON) -> Action:
    state, actions = machine.start(now)
    assert actions == (GetNode(),)
    _, actions = machine.step(state, NodeRead(lock, "5"), now)
    return actions[-1]


def test_a_free_lock_is_set_to_the_time_with_the_resource_version() -> None:
    machine = AcquireDsmlu("n")
    state, _ = machine.start(NOON)
    state, actions = machine.step(state, NodeRead(None, "5"), NOON)
    assert actions == (PatchNode(KEY, MINE, "5"),)
    assert machine.step(state, Patched(), NOON)[1] == (Done(acquired=MINE),)


def test_a_lock_of_two_minutes_is_contention_and_an_older_one_is_taken_over() -> None:
    held = Contention("node n has been locked within 2 minutes")
    assert first(AcquireDsmlu("n"), format_rfc3339(NOON - 120)) == held
    assert first(AcquireDsmlu("n"), format_rfc3339(NOON - 121)) == PatchNode(KEY, None, "5")


def test_an_old_lock_is_released_and_then_set() -> None:
    machine = AcquireDsmlu("n")
    state, _ = machine.start(NOON)
    state, _ = machine.step(state, NodeRead(format_rfc3339(NOON - 121), "5"), NOON)
    state, actions = machine.step(state, Patched(), NOON)
    assert actions == (GetNode(),)
    state, actions = machine.step(state, NodeRead(None, "6"), NOON)
    assert actions == (PatchNode(KEY, MINE, "6"),)
    assert machine.step(state, Patched(), NOON)[1] == (Done(acquired=MINE),)


def test_old_locks_that_come_back_again_and_again_end_in_contention() -> None:
    machine = AcquireDsmlu("n")
    state, actions = machine.start(NOON)
    for _ in range(20):
        state, actions = machine.step(state, NodeRead(format_rfc3339(NOON - 121), "5"), NOON)
        if isinstance(actions[-1], Contention):
            break
        state, actions = machine.step(state, Patched(), NOON)
    assert isinstance(actions[-1], Contention)


def test_an_unreadable_lock_expires_two_minutes_after_it_was_first_seen() -> None:
    assert isinstance(first(AcquireDsmlu("n"), "garbage"), Contention)
    known = AcquireDsmlu("n", known=Sight("garbage", NOON))
    assert isinstance(first(known, "garbage", NOON + 120), Contention)
    assert isinstance(first(known, "garbage", NOON + 121), PatchNode)
    assert isinstance(first(known, "other garbage", NOON + 121), Contention)


def test_a_refused_patch_does_not_make_an_equal_text_our_own() -> None:
    machine = AcquireDsmlu("n")
    state, _ = machine.start(NOON)
    state, _ = machine.step(state, NodeRead(None, "5"), NOON)
    state, _ = machine.step(state, PatchFailed("conflict", refused=True), NOON)
    state, _ = machine.step(state, Slept(), NOON)
    assert isinstance(machine.step(state, NodeRead(MINE, "6"), NOON)[1][0], Contention)


def test_a_failure_is_judged_again_and_a_lost_answer_is_recognised() -> None:
    machine = AcquireDsmlu("n")
    state, _ = machine.start(NOON)
    state, _ = machine.step(state, NodeRead(None, "5"), NOON)
    state, _ = machine.step(state, PatchFailed("timeout"), NOON)
    state, _ = machine.step(state, Slept(), NOON)
    assert machine.step(state, NodeRead(MINE, "6"), NOON)[1] == (Done(acquired=MINE),)
    other = format_rfc3339(NOON - 1)
    assert isinstance(machine.step(state, NodeRead(other, "6"), NOON)[1][0], Contention)


def test_a_failed_first_read_is_final() -> None:
    machine = AcquireDsmlu("n")
    state, _ = machine.start(NOON)
    assert machine.step(state, ReadFailed("no route"), NOON)[1] == (Failed("no route"),)


def test_only_the_lock_this_scheduler_wrote_is_released() -> None:
    machine = Release(LockOwner("ns", "p"), only=MINE, key=KEY)
    state, _ = machine.start(NOON)
    assert machine.step(state, NodeRead(MINE, "7"), NOON)[1] == (PatchNode(KEY, None, "7"),)
    assert machine.step(state, NodeRead(format_rfc3339(NOON - 1), "7"), NOON)[1] == (Done(),)
