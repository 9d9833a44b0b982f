"""A model of admission (libvgpu.md §7.2, `admit.c`): one access to shared memory a step, every order (A120).

A slow request holds the admission lock and adds its size before it sums. Beside it run attempts of the fast
path and a free. It may be refused only if at some moment it did not fit; the limit is never exceeded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

LIMIT = 4
SLOW = 0
"""Slot of the slow request; the others follow."""


@dataclass(frozen=True, slots=True)
class Task:
    """One process: what it is, where it is, and what its pass has seen so far."""

    kind: str
    size: int
    at: str
    slot: int = 0
    total: int = 0
    attempts: int = 0
    clean: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """Totals and undecided attempts by slot, the slow flag, what is really held, and all tasks."""

    totals: tuple[int, ...]
    attempts: tuple[int, ...]
    flag: bool
    held: tuple[int, ...]
    tasks: tuple[Task, ...]
    fitted: bool = True
    """Whether the slow request has fitted at every moment since it added its size."""

    def added(self, slot: int, size: int, attempts: int) -> State:
        totals = tuple(total + size * (k == slot) for k, total in enumerate(self.totals))
        undecided = tuple(count + attempts * (k == slot) for k, count in enumerate(self.attempts))
        return replace(self, totals=totals, attempts=undecided)

    def holding(self, slot: int, size: int) -> State:
        return replace(self, held=tuple(size if k == slot else own for k, own in enumerate(self.held)))

    def going(self, slot: int, task: Task) -> State:
        return replace(self, tasks=tuple(task if k == slot else other for k, other in enumerate(self.tasks)))


def step(state: State, slot: int, clean_passes: int) -> State:
    """What the process of ``slot`` does next."""
    task = state.tasks[slot]
    match task.at:
        case "free":
            return state.added(slot, -task.size, 0).holding(slot, 0).going(slot, replace(task, at="done"))
        case "look":
            return state.going(slot, replace(task, at="done" if state.flag else "add"))
        case "flag":
            return replace(state, flag=True).going(slot, replace(task, at="add"))
        case "add":
            following = "pass" if task.kind == "slow" else "look again"
            return state.added(slot, task.size, 1).going(slot, replace(task, at=following))
        case "look again":
            return state.going(slot, replace(task, at="withdraw" if state.flag else "pass"))
        case "pass":
            return state.going(slot, read(state, task, clean_passes))
        case "decide":
            return state.added(slot, 0, -1).holding(slot, task.size).going(slot, replace(task, at="leave"))
        case "withdraw":
            return state.added(slot, -task.size, -1).going(slot, replace(task, at="leave"))
    admitted = "admitted" if state.held[slot] else "refused"
    left = replace(state, flag=False) if task.kind == "slow" else state
    return left.going(slot, replace(task, at=admitted))


def read(state: State, task: Task, clean_passes: int) -> Task:
    """One total more; at the end of the pass the verdict."""
    task = replace(
        task,
        slot=task.slot + 1,
        total=task.total + state.totals[task.slot],
        attempts=task.attempts + state.attempts[task.slot],
    )
    if task.slot < len(state.totals):
        return task
    if task.total <= LIMIT:
        return replace(task, at="decide")
    if task.kind != "slow":
        return replace(task, at="withdraw")
    clean = task.clean + (task.attempts <= 1)
    again = replace(task, slot=0, total=0, attempts=0, clean=clean)
    return replace(again, at="withdraw") if clean == clean_passes else again


def reachable(start: State, clean_passes: int) -> Iterator[State]:
    """Every state that some order of steps leads to."""
    seen, pending = {start}, [start]
    while pending:
        state = pending.pop()
        yield state
        for slot, task in enumerate(state.tasks):
            if task.at in ("done", "admitted", "refused"):
                continue
            following = step(state, slot, clean_passes)
            slow = following.tasks[SLOW]
            others = sum(following.held) - following.held[SLOW]
            if slow.at in ("pass", "withdraw") and others + slow.size > LIMIT:
                following = replace(following, fitted=False)
            if following not in seen:
                seen.add(following)
                pending.append(following)


def start(*others: Task) -> State:
    tasks = (Task("slow", 2, "flag"), *others)
    held = tuple(task.size if task.kind == "free" else 0 for task in tasks)
    return State(held, (0,) * len(tasks), flag=False, held=held, tasks=tasks)


FREE = Task("free", 2, "free")
FITS = Task("fast", 2, "look")
NEVER = Task("fast", LIMIT + 1, "look")


@pytest.mark.parametrize(
    "others",
    [
        pytest.param((NEVER, NEVER), id="two attempts that never fit"),
        pytest.param((FREE, FITS), id="a free and an attempt"),
        pytest.param((FREE, FITS, NEVER), id="all three"),
        pytest.param((FITS, FITS), id="two attempts of which one fits"),
    ],
)
def test_a120_a_slow_request_is_refused_only_if_it_did_not_fit(others: tuple[Task, ...]) -> None:
    ends = set()
    for state in reachable(start(*others), clean_passes=2):
        assert sum(state.held) <= LIMIT
        slow = state.tasks[SLOW].at
        ends.add(slow)
        assert slow != "refused" or not state.fitted
    assert "admitted" in ends


def test_a120_one_clean_pass_would_not_do() -> None:
    """A free and an attempt that fits after it, between two reads of one pass, look like both at once."""
    states = reachable(start(FREE, FITS), clean_passes=1)
    assert any(state.tasks[SLOW].at == "refused" and state.fitted for state in states)
