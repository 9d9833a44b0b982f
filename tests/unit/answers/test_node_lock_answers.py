"""`hami locks`: which node locks somebody still needs (protocol.md §7; decision 29)."""

from __future__ import annotations

import string
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.answers.locks import Locks, Unreadable, judge
from hami.answers.render import lock_lines
from hami.protocol.keys import CAMBRICON_LOCK, NODE_LOCK
from hami.protocol.lock import LockOwner, format_lock
from hami.protocol.timestamps import format_rfc3339
from hami.protocol.views import Pod

NOW = 1_787_400_000.0
TIMEOUT = 300.0
OWNER = LockOwner("team", "train-0")


def pod(node: str = "", phase: str = "Pending", bind_phase: str = "") -> Pod:
    annotations = {"hami.io/bind-phase": bind_phase} if bind_phase else {}
    found: dict[str, Any] = {
        "metadata": {"name": "train-0", "namespace": "team", "annotations": annotations},
        "spec": {"nodeName": node},
        "status": {"phase": phase},
    }
    return msgspec.convert(found, Pod)


@pytest.mark.parametrize(
    ("holder", "state", "why"),
    [
        (pod(), "held", "the pod is about to be bound; stale in 4m50s"),
        (pod("n1", bind_phase="allocating"), "held", "the pod waits for its devices; stale in 4m50s"),
        (pod("n1", bind_phase="success"), "stale", "the pod's allocation has ended (bind-phase success)"),
        (pod("n1", bind_phase="failed"), "stale", "the pod's allocation has ended (bind-phase failed)"),
        (pod("n2"), "stale", "the pod is on node n2"),
        (pod("n1", phase="Failed"), "stale", "the pod has ended (Failed)"),
        (None, "stale", "the pod does not exist"),
        (Unreadable("403"), "unknown", "the pod cannot be read: 403"),
    ],
)
def test_a_lock_is_held_while_its_pod_is_being_started(holder: Pod | None, state: str, why: str) -> None:
    found = judge("n1", NODE_LOCK, format_lock(OWNER, NOW - 10), holder, NOW, TIMEOUT)
    assert (found.state, found.why, found.holder, found.age_s) == (state, why, "team/train-0", 10.0)


def test_an_old_lock_is_stale_whoever_holds_it() -> None:
    found = judge("n1", NODE_LOCK, format_lock(OWNER, NOW - 301), pod(), NOW, TIMEOUT)
    assert (found.state, found.why) == ("stale", "older than 5m0s")
    assert judge("n1", NODE_LOCK, format_lock(OWNER, NOW - 301), pod(), NOW, 600.0).state == "held"


def test_a_lock_without_an_owner_is_held_until_it_is_old() -> None:
    found = judge("n1", NODE_LOCK, format_rfc3339(NOW - 10), None, NOW, TIMEOUT)
    assert (found.state, found.why, found.holder) == ("held", "names no pod; stale in 4m50s", "")


def test_cambricons_lock_is_stale_after_two_minutes() -> None:
    young, old = (
        judge("n1", CAMBRICON_LOCK, format_rfc3339(NOW - age), None, NOW, 600.0) for age in (100, 121)
    )
    assert (young.state, old.state) == ("held", "stale")


def test_an_unreadable_lock_is_stale_except_cambricons_which_the_scheduler_watches_first() -> None:
    assert judge("n1", NODE_LOCK, "x,y", None, NOW, TIMEOUT).state == "stale"
    assert judge("n1", CAMBRICON_LOCK, "x,y", None, NOW, TIMEOUT).state == "unknown"


def test_a_lock_from_the_future_is_not_called_stale() -> None:
    found = judge("n1", NODE_LOCK, format_lock(OWNER, NOW + 3600), None, NOW, TIMEOUT)
    assert (found.state, found.age_s) == ("unknown", 0.0)


@given(st.text(max_size=40) | st.text(string.printable, max_size=40))
def test_any_text_is_judged(text: str) -> None:
    for key in (NODE_LOCK, CAMBRICON_LOCK):
        found = judge("n1", key, text, None, NOW, TIMEOUT)
        assert (found.state in ("held", "stale", "unknown"), found.text) == (True, text)
        assert lock_lines(Locks([found], TIMEOUT))[1].startswith("n1")
