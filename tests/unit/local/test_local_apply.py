"""Server-side apply: ownership, conflicts, removal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.local.api.apply import FIRST, LAST_APPLIED, Applier, managers_of, track_update
from hami.local.api.errors import ApiError
from hami.local.api.field_sets import contains, difference, fields_of, leaves, union
from hami.local.api.objects import clone
from hami.local.api.resources import CONFIGMAPS, DEPLOYMENTS, PODS

NOW = 1_800_000_000.0


def config(data: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", **metadata}}
    if data is not None:
        body["data"] = data
    return body


def applier(manager: str, *, force: bool = False, resource: Any = CONFIGMAPS) -> Applier:
    return Applier(resource, manager, force=force, subresource="", now=NOW)


def owners(obj: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["manager"]: entry["fieldsV1"] for entry in managers_of(obj)}


def test_a_new_object_belongs_to_its_manager() -> None:
    created = applier("one").created(config({"a": "1"}))
    assert owners(created) == {"one": {"f:data": {"f:a": {}}}}
    entry = created["metadata"]["managedFields"][0]
    assert (entry["operation"], entry["fieldsType"], entry["apiVersion"]) == ("Apply", "FieldsV1", "v1")


def test_two_managers_own_their_own_keys() -> None:
    first = applier("one").created(config({"a": "1"}))
    both = applier("two").applied(first, config({"b": "2"}))
    assert both["data"] == {"a": "1", "b": "2"}
    assert owners(both) == {"one": {"f:data": {"f:a": {}}}, "two": {"f:data": {"f:b": {}}}}


def test_another_value_of_an_owned_field_is_a_conflict_that_names_manager_and_field() -> None:
    first = applier("one").created(config({"a": "1"}))
    with pytest.raises(ApiError) as refused:
        applier("two").applied(first, config({"a": "2"}))
    assert refused.value.code == 409
    assert refused.value.message == 'Apply failed with 1 conflict: conflict with "one": .data.a'
    causes = refused.value.status()["details"]["causes"]
    assert causes[0] == {
        "reason": "FieldManagerConflict", "message": 'conflict with "one"', "field": ".data.a",
    }  # fmt: skip


def test_several_conflicts_are_listed_by_manager() -> None:
    first = applier("one").created(config({"a": "1", "b": "1"}))
    with pytest.raises(ApiError) as refused:
        applier("two").applied(first, config({"a": "2", "b": "2"}))
    assert refused.value.message == (
        'Apply failed with 2 conflicts: conflicts with "one":\n- .data.a\n- .data.b'
    )


def test_the_same_value_is_owned_together() -> None:
    first = applier("one").created(config({"a": "1"}))
    both = applier("two").applied(first, config({"a": "1"}))
    assert contains(owners(both)["one"], ("f:data", "f:a"))
    assert contains(owners(both)["two"], ("f:data", "f:a"))


def test_forcing_takes_the_field_over() -> None:
    first = applier("one").created(config({"a": "1", "b": "1"}))
    forced = applier("two", force=True).applied(first, config({"a": "2"}))
    assert forced["data"] == {"a": "2", "b": "1"}
    assert owners(forced)["one"] == {"f:data": {"f:b": {}}}


def test_a_field_that_is_no_longer_applied_is_removed() -> None:
    first = applier("one").created(config({"a": "1", "b": "1"}))
    assert applier("one").applied(first, config({"a": "1"}))["data"] == {"a": "1"}


def test_a_field_that_another_manager_also_owns_stays() -> None:
    first = applier("one").created(config({"a": "1"}))
    both = applier("two").applied(first, config({"a": "1", "b": "2"}))
    assert applier("two").applied(both, config({"b": "2"}))["data"] == {"a": "1", "b": "2"}


def test_the_map_goes_with_its_last_field() -> None:
    first = applier("one").created(config({"a": "1"}))
    assert "data" not in applier("one").applied(first, config())


def test_applying_the_same_again_changes_nothing() -> None:
    first = applier("one").created(config({"a": "1"}))
    later = Applier(CONFIGMAPS, "one", force=False, subresource="", now=NOW + 60)
    assert later.applied(first, config({"a": "1"})) == first


def test_what_was_there_before_the_first_apply_has_an_owner() -> None:
    existing = config({"a": "1"}, resourceVersion="7")
    with pytest.raises(ApiError, match=FIRST):
        applier("one").applied(existing, config({"a": "2"}))
    changed = applier("one").applied(existing, config({"b": "2"}))
    assert owners(changed)[FIRST] == {"f:data": {"f:a": {}}}


def test_kubectl_takes_over_from_its_own_client_side_apply() -> None:
    text = '{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"c"},"data":{"a":"1"}}'
    existing = config({"a": "1", "b": "1"}, annotations={LAST_APPLIED: text})
    assert applier("kubectl").applied(existing, config({"a": "2"}))["data"]["a"] == "2"
    with pytest.raises(ApiError, match="conflict"):
        applier("kubectl").applied(existing, config({"b": "2"}))
    with pytest.raises(ApiError, match="conflict"):
        applier("helm").applied(existing, config({"a": "2"}))


def deployment(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"},
        "spec": {"template": {"spec": {"containers": list(containers)}}, **spec},
    }  # fmt: skip


def test_list_items_are_told_apart_by_their_key() -> None:
    first = applier("one", resource=DEPLOYMENTS).created(deployment({"name": "a", "image": "x"}))
    both = applier("two", resource=DEPLOYMENTS).applied(first, deployment({"name": "b", "image": "y"}))
    containers = both["spec"]["template"]["spec"]["containers"]
    assert [item["name"] for item in containers] == ["a", "b"]
    less = applier("two", resource=DEPLOYMENTS).applied(both, deployment())
    assert [item["name"] for item in less["spec"]["template"]["spec"]["containers"]] == ["a"]


def test_a_conflict_inside_a_list_item_names_the_item() -> None:
    first = applier("one", resource=DEPLOYMENTS).created(deployment({"name": "a", "image": "x"}))
    with pytest.raises(ApiError, match=r'\.spec\.template\.spec\.containers\[name="a"\]\.image'):
        applier("two", resource=DEPLOYMENTS).applied(first, deployment({"name": "a", "image": "z"}))


def test_ports_are_told_apart_by_number_and_protocol() -> None:
    ports = [{"containerPort": 53}, {"containerPort": 53, "protocol": "UDP"}]
    body = deployment({"name": "a", "image": "x", "ports": ports})
    fields = fields_of("Deployment", body)["f:spec"]["f:template"]["f:spec"]["f:containers"]
    assert set(fields['k:{"name":"a"}']["f:ports"]) == {
        'k:{"containerPort":53,"protocol":"TCP"}', 'k:{"containerPort":53,"protocol":"UDP"}',
    }  # fmt: skip


def test_a_plain_list_is_one_value() -> None:
    container = {"name": "a", "image": "x", "command": ["sh", "-c", "true"]}
    first = applier("one", resource=DEPLOYMENTS).created(deployment(container))
    changed = applier("one", resource=DEPLOYMENTS).applied(
        first, deployment({**container, "command": ["sleep"]})
    )
    assert changed["spec"]["template"]["spec"]["containers"][0]["command"] == ["sleep"]


def test_finalizers_are_a_set() -> None:
    first = applier("one").created(config(finalizers=["x/a"]))
    both = applier("two").applied(first, config(finalizers=["x/b"]))
    assert both["metadata"]["finalizers"] == ["x/a", "x/b"]
    assert applier("two").applied(both, config())["metadata"]["finalizers"] == ["x/a"]


def test_an_update_takes_the_fields_it_changes() -> None:
    before = applier("one").created(config({"a": "1", "b": "1"}))
    after = clone(before)
    after["data"].update(a="2", c="3")
    track_update(CONFIGMAPS, before, after, "kubectl-edit", "", NOW)
    assert owners(after) == {
        "one": {"f:data": {"f:b": {}}}, "kubectl-edit": {"f:data": {"f:a": {}, "f:c": {}}},
    }  # fmt: skip
    with pytest.raises(ApiError, match=r'conflict with "kubectl-edit" using v1: \.data\.a'):
        applier("one").applied(after, config({"a": "1", "b": "1"}))


def test_an_update_that_removes_a_field_leaves_it_without_owner() -> None:
    before = applier("one").created(config({"a": "1", "b": "1"}))
    after = clone(before)
    del after["data"]["a"]
    track_update(CONFIGMAPS, before, after, "edit", "", NOW)
    assert owners(after) == {"one": {"f:data": {"f:b": {}}}}


def test_an_object_that_was_never_applied_is_not_tracked() -> None:
    before, after = config({"a": "1"}), config({"a": "2"})
    track_update(CONFIGMAPS, before, after, "edit", "", NOW)
    assert "managedFields" not in after["metadata"]


def test_many_updaters_are_kept_in_bounds() -> None:
    obj = applier("one").created(config({"a": "0"}))
    for number in range(30):
        after = clone(obj)
        after["data"][f"k{number}"] = "1"
        track_update(CONFIGMAPS, obj, after, f"m{number}", "", NOW + number)
        obj = after
    entries = managers_of(obj)
    assert len(entries) <= 12
    everything: dict[str, Any] = {}
    for entry in entries:
        everything = union(everything, entry["fieldsV1"])
    assert everything == fields_of("ConfigMap", obj)


@pytest.mark.parametrize("manager", ["", "x" * 129, "a\nb"])
def test_a_manager_needs_a_usable_name(manager: str) -> None:
    with pytest.raises(ApiError) as refused:
        applier(manager)
    assert refused.value.code == 422


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "ConfigMap", "metadata": {"name": "c"}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "c"}},
        config(managedFields=[{"manager": "x"}]),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": 7},
    ],
)
def test_an_apply_without_identity_or_with_managed_fields_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        applier("one").created(body)
    assert refused.value.code == 400


def test_an_old_resource_version_is_a_conflict() -> None:
    existing = config({"a": "1"}, resourceVersion="7")
    with pytest.raises(ApiError) as refused:
        applier("one").applied(existing, config({"a": "1"}, resourceVersion="6"))
    assert refused.value.reason == "Conflict"


def test_status_is_not_applied_with_the_object() -> None:
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p"},
        "spec": {},
        "status": {"phase": "X"},
    }
    assert "status" not in applier("one", resource=PODS).created(body)


data_maps = st.dictionaries(st.sampled_from("abcde"), st.sampled_from(["1", "2", "3"]), max_size=5)


@given(first=data_maps, second=data_maps, third=data_maps)
def test_after_a_forced_apply_the_object_holds_what_was_applied(
    first: dict[str, str], second: dict[str, str], third: dict[str, str]
) -> None:
    """What a manager applied is there; what nobody owns any more is gone; the other's rest stays."""
    obj = applier("one").created(config(first))
    obj = applier("two", force=True).applied(obj, config(second))
    obj = applier("two", force=True).applied(obj, config(third))
    wanted = {key: value for key, value in first.items() if second.get(key, value) == value} | third
    assert obj.get("data", {}) == wanted


nested = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from(["spec", "data", "containers", "finalizers"]), nested, max_size=4)


@given(left=objects, right=objects)
def test_set_algebra_holds(left: dict[str, Any], right: dict[str, Any]) -> None:
    one, two = fields_of("Pod", left), fields_of("Pod", right)
    assert difference(one, one) == {}
    assert union(one, one) == one
    assert all(contains(union(one, two), path) for path in [*leaves(one), *leaves(two)])
