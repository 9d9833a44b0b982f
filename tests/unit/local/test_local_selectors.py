"""Label and field selectors."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.local.api.errors import ApiError
from hami.local.api.selectors import field_predicate, label_predicate, matches_label_selector

LABELS = {"app": "web", "tier": "front"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("app=web", True), ("app==web", True), ("app!=web", False), ("app=db", False), ("other!=x", True),
        ("app in (web, db)", True), ("app notin (web)", False), ("other notin (web)", True), ("app", True),
        ("!app", False), ("!other", True), ("app=web,tier=front", True), ("app=web,tier=back", False),
        ("app in (a,b),tier", False), ("app=", False),
    ],
)  # fmt: skip
def test_label_selectors(text: str, expected: bool) -> None:
    matches = label_predicate(text)
    assert matches is not None
    assert matches({"metadata": {"labels": LABELS}}) is expected


def test_an_empty_label_selector_selects_everything() -> None:
    assert label_predicate("") is None


@pytest.mark.parametrize("text", ["app in web", "=web", "app=web,,x", "a b", "app in (a"])
def test_a_bad_label_selector_is_refused(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        label_predicate(text)
    assert refused.value.code == 400


@given(st.text(max_size=40))
def test_any_text_is_a_label_selector_or_a_bad_request(text: str) -> None:
    with contextlib.suppress(ApiError):
        label_predicate(text)


POD = {
    "metadata": {"name": "p", "namespace": "ns"},
    "spec": {"nodeName": "n1"},
    "status": {"phase": "Running"},
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("metadata.name=p", True), ("metadata.name=q", False),
        ("spec.nodeName=n1,status.phase=Running", True),
        ("status.phase!=Running", False), ("status.phase!=Succeeded,status.phase!=Failed", True),
        ("spec.schedulerName=", True),
    ],
)  # fmt: skip
def test_field_selectors_of_pods(text: str, expected: bool) -> None:
    matches = field_predicate("pods", text)
    assert matches is not None
    assert matches(POD) is expected


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(ApiError, match=r"field label not supported: spec\.containers"):
        field_predicate("pods", "spec.containers=x")


def test_events_are_selected_by_what_they_are_about() -> None:
    matches = field_predicate("events", "involvedObject.name=p,involvedObject.uid=1")
    assert matches is not None
    assert matches({"involvedObject": {"name": "p", "uid": "1"}})
    assert not matches({"involvedObject": {"name": "p", "uid": "2"}})


def test_unschedulable_is_false_where_it_is_absent() -> None:
    matches = field_predicate("nodes", "spec.unschedulable=false")
    assert matches is not None
    assert matches({"spec": {}})


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({}, True),
        (None, False),
        ({"matchLabels": {"app": "web"}}, True),
        ({"matchLabels": {"app": "db"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}, False),
        ({"matchExpressions": [{"key": "x", "operator": "NotIn", "values": ["ignore"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, False),
        ({"matchExpressions": [{"key": "app", "operator": "Near", "values": []}]}, False),
    ],
)
def test_selectors_of_webhooks(selector: Any, expected: bool) -> None:
    assert matches_label_selector(selector, LABELS) is expected
