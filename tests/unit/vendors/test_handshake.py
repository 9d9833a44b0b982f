"""The handshake machine (README §5, 20-26, 48, 50; nvidia-scheduling.md N6-N10)."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.protocol.timestamps import parse_handshake
from hami.vendors.handshake import (
    Action,
    Drop,
    Handshake,
    PatchNode,
    Refresh,
    Report,
    Seen,
    State,
    TimePassed,
    seen,
)

NOON = parse_handshake("2026-08-22 10:00:00")
KEY = "hami.io/node-handshake"
Step = tuple[float, Seen | TimePassed]
ASKED = "Requesting_2026-08-22 10:00:00"


def machine(lab: Any, health: str = "handshake") -> Handshake:
    """A vendor whose plugin answers handshakes (the NVIDIA rule is `allocatable`)."""
    profile = lab.nvidia()
    return Handshake(dataclasses.replace(profile, rules=dataclasses.replace(profile.rules, health=health)))


def run(m: Handshake, *steps: tuple[float, Seen | TimePassed]) -> tuple[State, list[tuple[Action, ...]]]:
    state, first = m.start(NOON)
    assert first == ()
    done = []
    for after, event in steps:
        state, actions = m.step(state, event, NOON + after)
        done.append(actions)
    return state, done


def last(m: Handshake, *steps: tuple[float, Seen | TimePassed]) -> tuple[Action, ...]:
    return run(m, *steps)[1][-1]


def asked(value: str | None = ASKED, allocatable: int | None = None, source: str = "devices") -> Seen:
    return Seen(source, value, allocatable)


CLEANUP = PatchNode({KEY: None})


def test_new_devices_are_read_and_the_plugin_is_asked(lab: Any) -> None:
    assert last(machine(lab), (0, asked("Reported_2026.08.22 09:59:59"))) == (
        Refresh(),
        PatchNode({KEY: ASKED}),
    )


def test_an_absent_handshake_is_written_too(lab: Any) -> None:
    assert last(machine(lab), (0, asked(None))) == (Refresh(), PatchNode({KEY: ASKED}))


def test_a_question_of_59_seconds_leaves_all_as_it_is(lab: Any) -> None:  # 20
    assert last(machine(lab), (0, asked()), (59, TimePassed())) == ()


def test_an_unanswered_question_with_nothing_allocatable_means_dead(lab: Any) -> None:  # 21
    m = machine(lab)
    state, done = run(m, (0, asked()), (61, TimePassed()))
    assert isinstance(done[-1][0], Drop)
    assert done[-1][1:] == (CLEANUP,)
    assert state.applied is None


def test_allocatable_devices_keep_an_unanswered_node_alive(lab: Any) -> None:  # 22
    assert last(machine(lab), (0, asked(allocatable=4)), (61, TimePassed())) == ()


def test_a_dead_plugin_stays_away_until_it_shows_life(lab: Any) -> None:  # 23
    m = machine(lab)
    steps: list[Step] = [
        (0, asked()),
        (61, TimePassed()),
        (62, asked(None)),
        (77, asked(None, 0)),
        (500, TimePassed()),
    ]
    _, done = run(m, *steps)
    assert done[2:] == [(), (), ()]


@pytest.mark.parametrize(
    "sign",
    [
        pytest.param(asked("Reported_2026.08.22 10:05:00"), id="24 answer"),
        pytest.param(asked(None, allocatable=3), id="allocatable"),
        pytest.param(asked(None, source="other devices"), id="other register text"),
        pytest.param(asked(ASKED, source="other devices"), id="other register text, old question"),
    ],
)
def test_a_dead_plugin_comes_back_on_a_sign_of_life(lab: Any, sign: Seen) -> None:
    actions = last(machine(lab), (0, asked()), (61, TimePassed()), (300, sign))
    assert actions[0] == Refresh()


def test_a_node_without_devices_is_never_written(lab: Any) -> None:  # 25
    m = machine(lab)
    _, done = run(m, (0, Seen(None, None, None)), (1, Seen(None, "Reported_x", 0)), (100, TimePassed()))
    assert done == [(), (), ()]


def test_devices_that_are_no_longer_registered_are_dropped(lab: Any) -> None:
    actions = last(machine(lab), (0, asked()), (5, Seen(None, ASKED, None)))
    assert len(actions) == 1
    assert isinstance(actions[0], Drop)


@pytest.mark.parametrize("value", ["Requesting", "Requesting_garbage"])  # 26
def test_an_unreadable_question_counts_as_expired(lab: Any, value: str) -> None:
    alive = last(machine(lab), (0, asked(value, allocatable=4)))
    assert alive == (Refresh(),)
    state, done = run(machine(lab), (0, asked(value, allocatable=0)))
    assert done[-1] == ()
    assert state.dead == "devices"


def test_a_plugin_that_dies_after_its_last_answer_is_noticed(lab: Any) -> None:
    m = machine(lab)
    steps: list[Step] = [
        (0, asked("Reported_2026.08.22 10:00:00")),
        (1, asked(ASKED)),
        (60, TimePassed()),
        (61, TimePassed()),
    ]
    _, done = run(m, *steps)
    assert done[2] == ()
    assert isinstance(done[3][0], Drop)


def test_the_machine_says_when_time_alone_will_decide(lab: Any) -> None:
    m = machine(lab)
    state, _ = run(m, (0, asked()))
    due = m.due(state)
    assert due is not None
    state, actions = m.step(state, TimePassed(), due)
    assert isinstance(actions[0], Drop)
    assert m.due(state) is None


def test_changed_devices_are_read_again_without_any_handshake(lab: Any) -> None:
    m = machine(lab)
    steps: list[Step] = [
        (0, asked(allocatable=1)),
        (1, asked(allocatable=1)),
        (2, asked(allocatable=1, source="new")),
    ]
    _, done = run(m, *steps)
    assert done == [(Refresh(),), (), (Refresh(),)]


@pytest.mark.parametrize(
    "ahead",
    [
        pytest.param("Requesting_2026-08-22 18:00:00", id="50 another zone"),
        pytest.param("Requesting_2026-08-22 10:30:00", id="50 half an hour"),
    ],
)
def test_a_time_ahead_of_ours_is_told_and_not_trusted(lab: Any, ahead: str) -> None:
    m = machine(lab)
    _, done = run(m, (0, asked(ahead)), (60, TimePassed()), (61, TimePassed()))
    assert isinstance(done[0][0], Report)
    assert done[0][0].reason == "ClockSkew"
    assert done[1] == ()
    assert isinstance(done[2][0], Drop)


def test_an_old_local_time_never_kills_a_node_with_allocatable_devices(lab: Any) -> None:
    behind = asked("Requesting_2026-08-22 02:00:00", allocatable=8)
    assert last(machine(lab), (0, behind)) == (Refresh(),)


def test_the_dotted_form_of_older_schedulers_is_read(lab: Any) -> None:
    dotted = asked("Requesting_2026.08.22 09:59:30")
    _, done = run(machine(lab), (0, dotted), (31, TimePassed()))
    assert done[0] == (Refresh(),)
    assert isinstance(done[1][0], Drop)


class TestNvidia:
    """The reported count decides; the handshake only where nothing is reported."""

    def test_a_reported_zero_is_dead_at_once(self, lab: Any) -> None:  # N6
        m = Handshake(lab.nvidia())
        _, done = run(m, (0, asked(allocatable=8)), (1, asked(allocatable=0)))
        assert isinstance(done[1][0], Drop)
        assert done[1][1:] == (CLEANUP,)

    def test_a_reported_zero_is_dead_right_after_a_restart(self, lab: Any) -> None:  # N6
        state, done = run(Handshake(lab.nvidia()), (0, asked("Reported_x", allocatable=0)))
        assert done == [()]
        assert state.applied is None

    def test_a_flipped_health_is_read(self, lab: Any) -> None:  # N7
        m = Handshake(lab.nvidia())
        _, done = run(m, (0, asked(allocatable=8)), (1, asked(allocatable=8, source="sick")))
        assert done[1] == (Refresh(),)

    def test_a_node_made_again_is_new(self, lab: Any) -> None:  # N8
        assert last(Handshake(lab.nvidia()), (0, asked(allocatable=8))) == (Refresh(),)

    def test_an_old_question_does_not_matter_while_devices_are_reported(self, lab: Any) -> None:  # N9
        _, done = run(
            Handshake(lab.nvidia()),
            (0, asked(allocatable=8)),
            (7200, asked(allocatable=8)),
            (9999, TimePassed()),
        )
        assert done == [(Refresh(),), (), ()]

    def test_nothing_reported_and_an_unreadable_question_is_dead(self, lab: Any) -> None:  # N10
        state, _ = run(Handshake(lab.nvidia()), (0, asked("Requesting_garbage")))
        assert state.dead == "devices"


WRITE = PatchNode({KEY: "Requesting_2026-08-22 10:00:00"})
DEAD: tuple[type[Action], ...] = (Drop, PatchNode)


@pytest.mark.parametrize(
    ("value", "allocatable", "actions"),
    [
        pytest.param("Requesting_2026-08-22 09:59:30", 0, (), id="26"),
        pytest.param("Requesting_2026-08-22 09:58:00", 0, DEAD, id="27"),
        pytest.param("Requesting_2026-08-22 09:58:00", 4, (), id="29"),
        pytest.param("Requesting_2024.01.10 04:06:57", 0, DEAD, id="30"),
        pytest.param("Deleted_2026-05-07 10:00:00", 4, (PatchNode,), id="31"),
        pytest.param("Requesting_garbage", 4, (), id="66 allocatable"),
        pytest.param("Requesting_garbage", 0, DEAD, id="66 nothing allocatable"),
        pytest.param("Requesting", 4, (), id="no time, allocatable"),
        pytest.param("Requesting", 0, DEAD, id="no time, nothing allocatable"),
    ],
)
def test_a_value_on_a_node_whose_devices_are_known(
    lab: Any, value: str, allocatable: int, actions: tuple[type[Action], ...]
) -> None:
    m = machine(lab)
    state, done = run(m, (-3600, asked("Reported_x")), (0, asked(value, allocatable)))
    assert tuple(type(action) for action in done[1]) == actions
    assert (state.applied is None) == (actions == DEAD)


def test_a_new_node_with_a_stale_deleted_mark_is_read_and_asked(lab: Any) -> None:
    assert last(machine(lab), (0, asked("Deleted_2026-05-07 10:00:00", 4))) == (Refresh(), WRITE)


@pytest.mark.parametrize("allocatable", [0, None])
def test_what_was_declared_dead_is_still_absent_on_the_next_pass(lab: Any, allocatable: int | None) -> None:
    m = machine(lab)
    value = "Requesting_2026-08-22 09:58:00"
    steps: list[Step] = [
        (-3600, asked("Reported_x")),
        (0, asked(value, allocatable)),
        (1, asked(None, allocatable)),
        (15, TimePassed()),
        (16, asked(None, allocatable)),
    ]
    state, done = run(m, *steps)
    assert tuple(type(action) for action in done[1]) == DEAD
    assert done[2:] == [(), (), ()]
    assert state.applied is None


def test_a_question_of_the_future_is_dead_60_seconds_after_first_sight(lab: Any) -> None:
    ahead = asked("Requesting_2026-08-22 10:30:00", 0)
    m = machine(lab)
    _, done = run(m, (-3600, asked("Reported_x")), (0, ahead), (60, TimePassed()), (61, TimePassed()))
    assert [type(action) for action in done[1]] == [Report]
    assert done[2] == ()
    assert tuple(type(action) for action in done[3]) == DEAD


def test_a_capacity_rule_needs_no_handshake(lab: Any) -> None:
    m = machine(lab, "capacity")
    _, done = run(m, (0, asked("Reported_x", 2)), (1, asked("Reported_x", None)))
    assert Refresh() in done[0]
    assert isinstance(done[1][0], Drop)


def test_what_the_machine_sees_comes_from_the_node(lab: Any) -> None:
    node = lab.node(
        annotations={"hami.io/node-nvidia-register": "[]", KEY: ASKED}, allocatable={"nvidia.com/gpu": 8}
    )
    assert seen(lab.nvidia(), node) == Seen(("[]", ""), ASKED, 8)
    assert seen(lab.nvidia(), lab.node()) == Seen(None, None, None)


EVENTS = st.one_of(
    st.builds(TimePassed),
    st.builds(
        Seen,
        st.sampled_from([None, "a", "b"]),
        st.sampled_from(
            [None, "Requesting", ASKED, "Requesting_2026-08-22 11:00:00", "Reported_x", "Deleted_y"]
        ),
        st.sampled_from([None, 0, 3]),
    ),
)


@given(
    st.lists(st.tuples(st.floats(0, 100), EVENTS), max_size=20), st.sampled_from(["handshake", "allocatable"])
)
def test_equal_histories_give_equal_actions_and_a_consistent_cache(
    lab: Any, history: list[tuple[float, Seen | TimePassed]], health: str
) -> None:  # 48
    m = machine(lab, health)
    moments, now = [], 0.0
    for pause, event in history:
        now += pause
        moments.append((now, event))
    state, done = run(m, *moments)
    assert run(m, *moments) == (state, done)
    cached = False
    for actions in done:
        for action in actions:
            cached = isinstance(action, Refresh) or (cached and not isinstance(action, Drop))
    assert cached == (state.applied is not None)
    assert state.applied is None or state.dead is None
