"""The node lock machines (protocol.md acceptance cases 32-41, 63-65, vendors/README.md cases 27-31, 48)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.protocol.errors import LockFormatError
from hami.protocol.lock import (
    Acquire,
    Action,
    Contention,
    Done,
    Failed,
    GetNode,
    GetPod,
    LockEvent,
    LockOwner,
    LockState,
    NodeRead,
    Patched,
    PatchFailed,
    PatchNode,
    PodMissing,
    PodRead,
    ReadFailed,
    Release,
    ReportEvent,
    Sight,
    Sleep,
    Slept,
    format_lock,
    parse_lock,
)
from hami.protocol.timestamps import format_rfc3339
from hami.protocol.views import Metadata, Pod, PodSpec, PodStatus

NOON = 1787313600.0
A = LockOwner("ns", "a")
B = LockOwner("ns", "b")
KEY = "hami.io/mutex.lock"
ALIVE = PodRead(Pod())


class Node:
    """A node whose lock annotation a machine works on, with scripted answers to patches and holder reads."""

    def __init__(
        self, lock: str | None, holder: LockEvent = ALIVE, patches: tuple[LockEvent, ...] = ()
    ) -> None:
        self.lock = lock
        self.holder = holder
        self.patches = list(patches)
        self.performed: list[Action] = []
        self.replaced_by: str | None = None

    def answer(self, action: Action) -> LockEvent:
        match action:
            case GetNode():
                return NodeRead(self.lock, "5")
            case GetPod():
                return self.holder
            case PatchNode():
                answer = self.patches.pop(0) if self.patches else Patched()
                if isinstance(answer, Patched) or self.replaced_by is not None:
                    self.lock = self.replaced_by or action.value
                return answer
            case _:
                return Slept()

    def run(self, machine: Acquire | Release, now: float = NOON) -> Action:
        state, actions = machine.start(now)
        while not isinstance(actions[-1], Done | Contention | Failed):
            self.performed += actions
            state, actions = machine.step(state, self.answer(actions[-1]), now)
        self.performed += actions
        self.state: LockState = state
        return actions[-1]

    @property
    def writes(self) -> list[PatchNode]:
        return [action for action in self.performed if isinstance(action, PatchNode)]


def at(offset: float, *owner: str) -> str:
    return ",".join((format_rfc3339(NOON + offset), *owner))


MINE = at(0, "ns", "a")


def test_case_32_a_free_lock_is_set_with_the_resource_version() -> None:
    node = Node(None)
    assert node.run(Acquire("n", A)) == Done(acquired=MINE)
    assert node.writes == [PatchNode(KEY, MINE, "5")]


def test_case_33_the_own_lock_is_kept_without_a_write() -> None:
    node = Node(at(-120, "ns", "a"))
    assert node.run(Acquire("n", A)) == Done()
    assert node.writes == []


@pytest.mark.parametrize("age", [pytest.param(120, id="34"), pytest.param(10, id="vendors 28")])
def test_a_living_holder_means_contention_and_no_write(age: float) -> None:
    node = Node(at(-age, "ns", "b"))
    answer = node.run(Acquire("n", A))
    assert answer == Contention("node n has been locked within 5m0s: node lock contention")
    assert node.writes == []


def test_case_35_the_lock_of_a_missing_pod_is_taken_over() -> None:
    node = Node(at(-120, "ns", "b"), holder=PodMissing())
    assert node.run(Acquire("n", A)) == Done(acquired=MINE)
    assert [write.value for write in node.writes] == [None, MINE]


def test_case_36_an_expired_lock_is_taken_over_without_asking_for_the_holder() -> None:
    node = Node(at(-600, "ns", "b"))
    assert node.run(Acquire("n", A)) == Done(acquired=MINE)
    assert GetPod(B) not in node.performed


def test_the_configured_timeout_decides_and_is_named() -> None:
    assert Node(at(-120, "ns", "b")).run(Acquire("n", A, timeout=60)) == Done(acquired=MINE)
    answer = Node(at(-120, "ns", "b")).run(Acquire("n", A, timeout=600))
    assert answer == Contention("node n has been locked within 10m0s: node lock contention")


def test_a_fresh_legacy_lock_is_contention_and_an_expired_one_is_taken_over() -> None:
    assert isinstance(Node(at(-120)).run(Acquire("n", A)), Contention)
    assert Node(at(-600)).run(Acquire("n", A)) == Done(acquired=MINE)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a,b", id="38"),
        pytest.param("2026-08-21T08:20:39Z,ns", id="vendors 30"),
        "garbage",
        "",
        ",ns,a",
        "x" * 5000,
    ],
)
def test_case_38_a_malformed_lock_is_taken_over_at_once(text: str) -> None:
    node = Node(text)
    assert node.run(Acquire("n", A)) == Done(acquired=MINE)


def test_case_39_a_lost_race_is_contention_after_one_patch() -> None:
    node = Node(None, patches=(PatchFailed("conflict"),))
    node.replaced_by = at(0, "ns", "b")
    assert isinstance(node.run(Acquire("n", A)), Contention)
    assert len(node.writes) == 1
    assert node.lock == at(0, "ns", "b")


def test_case_40_a_lost_answer_is_recognised_without_a_second_patch() -> None:
    node = Node(None, patches=(PatchFailed("timeout"),))
    node.replaced_by = MINE
    assert node.run(Acquire("n", A)) == Done(acquired=MINE)
    assert len(node.writes) == 1


def test_five_attempts_with_doubling_sleeps_then_the_last_error() -> None:
    node = Node(None, patches=tuple(PatchFailed(f"error {number}") for number in range(9)))
    assert node.run(Acquire("n", A)) == Failed("error 4", written=MINE)
    sleeps = [action for action in node.performed if isinstance(action, Sleep)]
    assert sleeps == [Sleep(0.1, 0.5), Sleep(0.2, 0.5), Sleep(0.4, 0.5), Sleep(0.8, 0.5)]


def test_locks_that_come_back_faster_than_they_are_removed_are_contention() -> None:
    node = Node("garbage", patches=(Patched(),) * 9)
    node.replaced_by = "garbage"
    assert isinstance(node.run(Acquire("n", A)), Contention)
    assert len(node.writes) == 5


def test_a_failed_first_read_is_final_and_a_failed_holder_read_too() -> None:
    machine = Acquire("n", A)
    state, _ = machine.start(NOON)
    _, actions = machine.step(state, ReadFailed("no route"), NOON)
    assert actions == (Failed("no route"),)
    node = Node(at(-1, "ns", "b"), holder=ReadFailed("forbidden"))
    assert node.run(machine) == Failed("forbidden")


@pytest.mark.parametrize(
    "holder",
    [
        Pod(status=PodStatus(phase="Succeeded")),
        Pod(status=PodStatus(phase="Failed")),
        Pod(spec=PodSpec(node_name="other")),
        Pod(metadata=Metadata(annotations={"hami.io/bind-phase": "success"})),
        Pod(metadata=Metadata(annotations={"hami.io/bind-phase": "failed"})),
    ],
)
def test_case_63_a_holder_that_is_done_loses_the_lock(holder: Pod) -> None:
    assert Node(at(-120, "ns", "b"), holder=PodRead(holder)).run(Acquire("n", A)) == Done(acquired=MINE)


def test_a_plugin_that_is_about_to_release_is_not_raced() -> None:
    done = PodRead(Pod(Metadata(annotations={"hami.io/bind-phase": "success"}), PodSpec(node_name="n")))

    class Releasing(Node):
        def answer(self, action: Action) -> LockEvent:
            if isinstance(action, Sleep):
                self.lock = None
            return super().answer(action)

    node = Releasing(at(-1, "ns", "b"), holder=done)
    assert node.run(Acquire("n", A)) == Done(acquired=MINE)
    assert [write.value for write in node.writes] == [MINE]
    forgotten = Node(at(-1, "ns", "b"), holder=done)
    assert forgotten.run(Acquire("n", A)) == Done(acquired=MINE)
    assert [write.value for write in forgotten.writes] == [None, MINE]
    assert sum(isinstance(action, Sleep) for action in forgotten.performed) == 1


def test_a_holder_still_allocating_on_this_node_keeps_the_lock() -> None:
    holder = Pod(Metadata(annotations={"hami.io/bind-phase": "allocating"}), PodSpec(node_name="n"))
    assert isinstance(Node(at(-120, "ns", "b"), holder=PodRead(holder)).run(Acquire("n", A)), Contention)


def test_case_64_a_lock_from_the_future_ages_from_first_sight() -> None:
    text = at(1200, "ns", "b")
    node = Node(text)
    assert isinstance(node.run(Acquire("n", A)), Contention)
    assert [action.reason for action in node.performed if isinstance(action, ReportEvent)] == ["ClockSkew"]
    assert node.state.sight == Sight(text, NOON)
    again = Acquire("n", A, known=node.state.sight)
    assert isinstance(Node(text).run(again, NOON + 299), Contention)
    assert isinstance(Node(text).run(again, NOON + 301), Done)


def test_case_37_a_legacy_lock_is_released_by_anyone() -> None:
    node = Node(at(-120))
    assert node.run(Release(A)) == Done()
    assert node.lock is None


def test_case_41_somebody_elses_lock_stays_without_an_error() -> None:
    node = Node(at(-120, "ns", "b"))
    assert node.run(Release(A)) == Done()
    assert node.writes == []


def test_the_own_lock_is_released_with_the_resource_version_and_an_absent_one_is_done() -> None:
    node = Node(MINE)
    assert node.run(Release(A)) == Done()
    assert node.writes == [PatchNode(KEY, None, "5")]
    assert Node(None).run(Release(A)) == Done()


def test_case_65_a_failed_bind_releases_only_the_text_it_wrote() -> None:
    for lock in (at(-120, "ns", "a"), at(-120), at(0, "ns", "b"), "garbage"):
        node = Node(lock)
        assert node.run(Release(A, only=MINE)) == Done()
        assert node.lock == lock
    node = Node(MINE)
    node.run(Release(A, only=MINE))
    assert node.lock is None


def test_a_legacy_lock_replaced_during_the_release_stays() -> None:
    node = Node(at(-120), patches=(PatchFailed("conflict"),))
    node.replaced_by = at(-1)
    assert node.run(Release(A)) == Done()
    assert len(node.writes) == 1


def test_release_gives_up_after_five_attempts() -> None:
    node = Node(MINE, patches=tuple(PatchFailed("busy") for _ in range(9)))
    assert node.run(Release(A)) == Failed("busy")
    assert len(node.writes) == 5


def test_lock_texts_are_read_in_every_form() -> None:
    assert parse_lock(f"{at(0)}").owner is None
    assert parse_lock(f"{at(0)},,").owner is None
    for half in (",ns,", ",,name"):
        with pytest.raises(LockFormatError, match="half an owner"):
            parse_lock(f"{at(0)}{half}")
    assert parse_lock("2026-08-21T20:00:00.5+08:00,ns,a") == parse_lock("2026-08-21T12:00:00.5Z,ns,a")
    assert parse_lock(format_lock(A, NOON)).owner == A


@given(st.text(max_size=60))
def test_the_lock_decoder_raises_only_its_error(text: str) -> None:
    try:
        parse_lock(text)
    except LockFormatError:
        return


EVENTS = st.lists(
    st.one_of(
        st.builds(
            NodeRead,
            st.sampled_from(
                [None, MINE, at(-120, "ns", "b"), at(-600, "ns", "b"), at(1200, "ns", "b"), at(-1), "x"]
            ),
            st.sampled_from(["1", "2"]),
        ),
        st.sampled_from([ALIVE, PodMissing(), ReadFailed("r"), Patched(), PatchFailed("p"), Slept()]),
    ),
    max_size=12,
)


@given(EVENTS, st.sampled_from([Acquire("n", A), Release(A), Release(A, only=MINE)]))
def test_case_48_same_events_and_times_give_the_same_actions(
    events: list[LockEvent], machine: Acquire | Release
) -> None:
    def drive() -> list[tuple[Action, ...]]:
        state, actions = machine.start(NOON)
        seen = [actions]
        for number, event in enumerate(events):
            state, actions = machine.step(state, event, NOON + number)
            seen.append(actions)
        return seen

    assert drive() == drive()


@given(EVENTS)
def test_a_foreign_lock_is_never_overwritten_without_a_reason(events: list[LockEvent]) -> None:
    """Whatever the answers to patches: while a fresh lock of a living holder stands, nothing is written."""
    machine = Acquire("n", A)
    state, actions = machine.start(NOON)
    for event in events:
        if isinstance(event, NodeRead) and isinstance(actions[-1], GetNode):
            event = NodeRead(at(-120, "ns", "b"), "1")
        elif isinstance(actions[-1], GetPod):
            event = ALIVE
        else:
            break
        state, actions = machine.step(state, event, NOON)
        assert not any(isinstance(action, PatchNode) for action in actions)
