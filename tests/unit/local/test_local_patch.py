"""Merge, JSON and strategic patches."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.local.api.errors import ApiError
from hami.local.api.objects import clone
from hami.local.api.patch import json_patch, merge_patch
from hami.local.api.strategic import strategic_merge

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab~/", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab~/", max_size=2), inner, max_size=3)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("target", "patch", "expected"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patch_examples_of_rfc_7386(target: Any, patch: Any, expected: Any) -> None:
    assert merge_patch(target, patch) == expected


@given(JSON, JSON)
def test_merge_patch_leaves_its_arguments_alone(target: Any, patch: Any) -> None:
    before = clone(target), clone(patch)
    merge_patch(target, patch)
    assert (target, patch) == before


@given(JSON, JSON)
def test_a_merge_patch_applied_twice_changes_nothing_more(target: Any, patch: Any) -> None:
    once = merge_patch(target, patch)
    assert merge_patch(once, patch) == once


@pytest.mark.parametrize(
    ("target", "operations", "expected"),
    [
        ({"foo": "bar"}, [{"op": "add", "path": "/baz", "value": "qux"}], {"baz": "qux", "foo": "bar"}),
        ({"foo": ["a", "c"]}, [{"op": "add", "path": "/foo/1", "value": "b"}], {"foo": ["a", "b", "c"]}),
        ({"foo": ["a"]}, [{"op": "add", "path": "/foo/-", "value": ["b"]}], {"foo": ["a", ["b"]]}),
        ({"foo": ["a", "b"]}, [{"op": "remove", "path": "/foo/0"}], {"foo": ["b"]}),
        ({"a": 1}, [{"op": "replace", "path": "/a", "value": 2}], {"a": 2}),
        ({"a": {"b": 1}, "c": {}}, [{"op": "move", "from": "/a/b", "path": "/c/d"}],
         {"a": {}, "c": {"d": 1}}),
        ({"a": [1]}, [{"op": "copy", "from": "/a", "path": "/b"}], {"a": [1], "b": [1]}),
        ({"a/b": 1, "m~n": 2}, [{"op": "test", "path": "/a~1b", "value": 1},
                               {"op": "remove", "path": "/m~0n"}], {"a/b": 1}),
        ({"a": 1}, [{"op": "replace", "path": "", "value": []}], []),
    ],
)  # fmt: skip
def test_json_patch_examples(target: Any, operations: Any, expected: Any) -> None:
    assert json_patch(target, operations) == expected


@pytest.mark.parametrize(
    ("operations", "code"),
    [
        ({"op": "add"}, 400),
        ([1], 400),
        ([{"op": "spin", "path": "/a"}], 400),
        ([{"op": "add", "path": "/a"}], 400),
        ([{"op": "add", "path": "a", "value": 1}], 400),
        ([{"op": "replace", "path": "/missing", "value": 1}], 422),
        ([{"op": "remove", "path": "/list/9"}], 422),
        ([{"op": "add", "path": "/list/01", "value": 1}], 422),
        ([{"op": "test", "path": "/a", "value": 2}], 422),
        ([{"op": "test", "path": "/a", "value": True}], 422),
        ([{"op": "test", "path": "/list", "value": [True]}], 422),
        ([{"op": "move", "from": "/o", "path": "/o/inner"}], 422),
        ([{"op": "remove", "path": "/a/b"}], 422),
        ([{"op": "test", "path": "/a", "value": 1}] * 10_001, 413),
    ],
)
def test_a_bad_json_patch_is_refused_and_changes_nothing(operations: Any, code: int) -> None:
    target = {"a": 1, "list": [1], "o": {}}
    before = clone(target)
    with pytest.raises(ApiError) as refused:
        json_patch(target, operations)
    assert refused.value.code == code
    assert target == before


OPERATION = st.fixed_dictionaries(
    {"op": st.sampled_from(["add", "remove", "replace", "move", "copy", "test", "x"])},
    optional={
        "path": st.sampled_from(["", "/a", "/a/0", "/a/-", "/b~1", "bad", "/a/b/c"]),
        "from": st.sampled_from(["", "/a", "/b"]),
        "value": JSON,
    },
)


@given(JSON, st.lists(OPERATION, max_size=6))
def test_json_patch_never_fails_with_anything_but_an_api_error(target: Any, operations: Any) -> None:
    before = clone(target)
    with contextlib.suppress(ApiError):
        json_patch(target, operations)
    assert target == before


def test_strategic_merge_joins_containers_by_name() -> None:
    pod = {"spec": {"containers": [{"name": "a", "image": "1"}, {"name": "b", "image": "1"}]}}
    patch = {"spec": {"containers": [{"name": "b", "image": "2"}]}}
    expected = [{"name": "a", "image": "1"}, {"name": "b", "image": "2"}]
    assert strategic_merge("Pod", pod, patch)["spec"]["containers"] == expected


def test_strategic_merge_adds_a_container_of_a_new_name() -> None:
    merged = strategic_merge("Pod", {"spec": {}}, {"spec": {"containers": [{"name": "a", "x": None}]}})
    assert merged["spec"]["containers"] == [{"name": "a"}]


def test_strategic_merge_deletes_an_item_by_directive() -> None:
    pod = {"spec": {"containers": [{"name": "a"}, {"name": "b"}]}}
    patch = {"spec": {"containers": [{"name": "a", "$patch": "delete"}]}}
    assert strategic_merge("Pod", pod, patch)["spec"]["containers"] == [{"name": "b"}]


def test_strategic_merge_replaces_a_list_by_directive() -> None:
    pod = {"spec": {"containers": [{"name": "a"}, {"name": "b"}]}}
    patch = {"spec": {"containers": [{"$patch": "replace"}, {"name": "c"}]}}
    assert strategic_merge("Pod", pod, patch)["spec"]["containers"] == [{"name": "c"}]


def test_strategic_merge_replaces_an_object_by_directive() -> None:
    pod = {"metadata": {"labels": {"a": "1"}}}
    patch = {"metadata": {"labels": {"$patch": "replace", "b": "2"}}}
    assert strategic_merge("Pod", pod, patch)["metadata"]["labels"] == {"b": "2"}


def test_strategic_merge_orders_items_as_told() -> None:
    pod = {"spec": {"containers": [{"name": "a"}, {"name": "b"}]}}
    patch = {"spec": {"$setElementOrder/containers": [{"name": "b"}, {"name": "a"}], "containers": []}}
    assert strategic_merge("Pod", pod, patch)["spec"]["containers"] == []
    patch = {"spec": {"$setElementOrder/containers": [{"name": "b"}, {"name": "a"}]}}
    assert strategic_merge("Pod", pod, patch)["spec"]["containers"] == [{"name": "b"}, {"name": "a"}]


def test_strategic_merge_of_finalizers_adds_and_deletes_single_values() -> None:
    obj = {"metadata": {"finalizers": ["a", "b"]}}
    patch = {"metadata": {"finalizers": ["c"], "$deleteFromPrimitiveList/finalizers": ["a"]}}
    assert sorted(strategic_merge("Pod", obj, patch)["metadata"]["finalizers"]) == ["b", "c"]


def test_strategic_merge_keeps_only_retained_keys() -> None:
    pod = {"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}
    patch = {
        "spec": {"volumes": [{"name": "v", "hostPath": {"path": "/x"}, "$retainKeys": ["name", "hostPath"]}]}
    }
    assert strategic_merge("Pod", pod, patch)["spec"]["volumes"] == [
        {"name": "v", "hostPath": {"path": "/x"}}
    ]


def test_strategic_merge_replaces_tolerations_as_a_whole() -> None:
    pod = {"spec": {"tolerations": [{"key": "a"}]}}
    merged = strategic_merge("Pod", pod, {"spec": {"tolerations": [{"key": "b"}]}})
    assert merged["spec"]["tolerations"] == [{"key": "b"}]


@pytest.mark.parametrize(
    "patch",
    [
        [],
        {"spec": {"$patch": "explode"}},
        {"spec": {"containers": [{"image": "x"}]}},
        {"spec": {"$retainKeys": 1}},
    ],
)
def test_a_malformed_strategic_patch_is_refused(patch: Any) -> None:
    with pytest.raises(ApiError) as refused:
        strategic_merge("Pod", {"spec": {"containers": [{"name": "a"}]}}, patch)
    assert refused.value.code == 400
