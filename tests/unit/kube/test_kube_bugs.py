"""Exceptions that nobody expected are told in full, once a minute for each kind."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from hami.kube.bugs import BugLog

log = logging.getLogger("test")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def fail(kind: type[Exception]) -> None:
    raise kind("cause")


def fails(kind: type[Exception] = KeyError) -> Exception:
    try:
        fail(kind)
    except Exception as error:
        return error
    raise AssertionError


def fail_here(kind: type[Exception]) -> None:
    raise kind("cause")


def elsewhere() -> Exception:
    try:
        fail_here(KeyError)
    except Exception as error:
        return error
    raise AssertionError


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, Any]]:
    return [(record.getMessage(), vars(record)["untold_before"]) for record in caplog.records]


def test_the_first_of_a_kind_is_told_with_its_traceback_and_place(caplog: pytest.LogCaptureFixture) -> None:
    BugLog(log).note("verb.failed", fails(), route="/filter", pod="team/p")
    (record,) = caplog.records
    assert (vars(record)["route"], vars(record)["pod"]) == ("/filter", "team/p")
    assert "in fails" in caplog.text
    assert "KeyError: 'cause'" in caplog.text


def test_repetitions_are_counted_and_told_a_minute_later(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    bugs = BugLog(log, clock)
    for _ in range(100):
        bugs.note("verb.failed", fails())
    clock.now += 61
    bugs.note("verb.failed", fails())
    assert told(caplog) == [("verb.failed", 0), ("verb.failed", 99)]
    assert bugs.total == 101


def test_another_type_line_or_event_is_another_kind(caplog: pytest.LogCaptureFixture) -> None:
    bugs = BugLog(log, Clock())
    for _ in range(2):
        bugs.note("verb.failed", fails())
        bugs.note("verb.failed", fails(ValueError))
        bugs.note("verb.failed", elsewhere())
        bugs.note("part.failed", fails())
    assert told(caplog) == [("verb.failed", 0)] * 3 + [("part.failed", 0)]


def test_the_kinds_that_are_remembered_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    bugs = BugLog(log, Clock())
    for number in range(1000):
        bugs.note(f"event {number}", fails())
    assert len(bugs._seen) == 256


def test_an_exception_without_a_traceback_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    BugLog(log).note("verb.failed", KeyError("never raised"))
    assert "never raised" in caplog.text
