"""The versioned store behind the embedded API server."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.local.api.errors import ApiError
from hami.local.api.objects import Object, clone
from hami.local.api.resources import NODES, PODS
from hami.local.api.store import Event, Store


def pod(name: str, namespace: str = "default", **metadata: Any) -> Object:
    return {"metadata": {"name": name, "namespace": namespace, "uid": f"uid-{name}", **metadata}}


def test_every_change_gets_the_next_revision() -> None:
    store = Store()
    first = store.create(PODS, pod("a"))
    second = store.create(NODES, {"metadata": {"name": "n"}})
    assert (first["metadata"]["resourceVersion"], second["metadata"]["resourceVersion"]) == ("1", "2")


def test_a_second_object_of_the_same_name_is_refused() -> None:
    store = Store()
    store.create(PODS, pod("a"))
    with pytest.raises(ApiError) as refused:
        store.create(PODS, pod("a"))
    assert (refused.value.code, refused.value.reason) == (409, "AlreadyExists")
    assert refused.value.message == 'pods "a" already exists'


def test_the_same_name_in_another_namespace_is_another_object() -> None:
    store = Store()
    store.create(PODS, pod("a"))
    store.create(PODS, pod("a", "other"))
    assert len(store.list(PODS)) == 2
    assert len(store.list(PODS, "other")) == 1


def test_an_update_with_an_old_version_is_a_conflict_and_changes_nothing() -> None:
    store = Store()
    old = clone(store.create(PODS, pod("a")))
    store.update(PODS, {**clone(old), "spec": {"x": 1}})
    with pytest.raises(ApiError) as refused:
        store.update(PODS, {**old, "spec": {"x": 2}})
    assert refused.value.reason == "Conflict"
    assert store.get(PODS, "default", "a")["spec"] == {"x": 1}
    assert store.revision == 2


def test_an_update_for_another_uid_is_a_conflict() -> None:
    store = Store()
    store.create(PODS, pod("a"))
    with pytest.raises(ApiError) as refused:
        store.update(PODS, pod("a", uid="somebody-else"))
    assert refused.value.code == 409


def test_a_missing_object_is_not_found() -> None:
    with pytest.raises(ApiError) as refused:
        Store().get(PODS, "default", "a")
    assert refused.value.status()["details"] == {"name": "a", "kind": "pods"}


def test_a_watch_sees_changes_after_its_revision_only() -> None:
    store = Store()
    store.create(PODS, pod("a"))
    revision = store.revision
    store.create(PODS, pod("b"))
    store.create(NODES, {"metadata": {"name": "n"}})
    store.delete(PODS, pod("a"))
    seen = [(event.change, event.obj["metadata"]["name"]) for event in store.events_since(PODS, revision)]
    assert seen == [("ADDED", "b"), ("DELETED", "a")]


def test_a_deletion_has_a_revision_of_its_own() -> None:
    store = Store()
    store.create(PODS, pod("a"))
    store.delete(PODS, pod("a"))
    event = next(iter(store.events_since(PODS, 1)))
    assert event.obj["metadata"]["resourceVersion"] == "2"


def test_a_watch_from_before_compaction_is_expired() -> None:
    store = Store()
    store.create(PODS, pod("a"))
    store.create(PODS, pod("b"))
    store.compact()
    with pytest.raises(ApiError) as refused:
        store.events_since(PODS, 1)
    assert (refused.value.code, refused.value.reason) == (410, "Expired")
    assert list(store.events_since(PODS, 2)) == []


def test_the_log_is_bounded() -> None:
    store = Store(history=10)
    store.create(PODS, pod("a"))
    for index in range(100):
        store.update(PODS, {**pod("a"), "spec": {"i": index}})
    with pytest.raises(ApiError):
        store.events_since(PODS, 1)
    assert len(list(store.events_since(PODS, store.revision - 10))) == 10


def test_a_listener_is_told_until_it_cancels() -> None:
    store = Store()
    seen: list[tuple[str, str]] = []

    def listen(key: str, event: Event) -> None:
        seen.append((key, event.change))

    cancel = store.subscribe(listen)
    store.create(PODS, pod("a"))
    cancel()
    store.create(PODS, pod("b"))
    assert seen == [("pods", "ADDED")]


STEP = st.tuples(st.sampled_from(["create", "update", "delete"]), st.sampled_from("abc"))


@given(st.lists(STEP, max_size=60), st.integers(0, 60))
def test_replaying_the_log_over_an_earlier_list_gives_the_present_list(
    steps: list[tuple[str, str]], cut: int
) -> None:
    store = Store()
    snapshot: dict[str, Object] = {}
    revision = 0
    for index, (step, name) in enumerate(steps):
        if index == cut:
            snapshot = {obj["metadata"]["name"]: obj for obj in store.list(PODS)}
            revision = store.revision
        with contextlib.suppress(ApiError):
            if step == "create":
                store.create(PODS, {**pod(name), "spec": {"n": index}})
            elif step == "update":
                store.update(PODS, {**pod(name), "spec": {"n": index}})
            else:
                store.delete(PODS, pod(name))
    for event in store.events_since(PODS, revision):
        if event.change == "DELETED":
            snapshot.pop(event.obj["metadata"]["name"], None)
        else:
            snapshot[event.obj["metadata"]["name"]] = event.obj
    assert sorted(snapshot) == [obj["metadata"]["name"] for obj in store.list(PODS)]
    assert all(snapshot[obj["metadata"]["name"]] == obj for obj in store.list(PODS))
