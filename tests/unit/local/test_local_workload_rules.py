"""Defaults and rules of workloads; views and scales of objects."""

from __future__ import annotations

from typing import Any

import pytest

from hami.local.api import strategy
from hami.local.api.defaults import apply_defaults
from hami.local.api.errors import ApiError
from hami.local.api.objects import Object, clone
from hami.local.api.resources import (
    CLUSTERROLES,
    DAEMONSETS,
    DEPLOYMENTS,
    EVENTS,
    EVENTS_V1,
    JOBS,
    SECRETS,
    SERVICES,
    Resource,
)
from hami.local.api.scale import scale_of, scaled
from hami.local.api.store import Store


def workload(resource: Resource, **spec: Any) -> Object:
    template: Object = {
        "metadata": {"labels": {"a": "b"}},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }
    body: Object = {
        "kind": resource.kind,
        "apiVersion": resource.api_version,
        "metadata": {"name": "w", "namespace": "default", "uid": "u1"},
        "spec": {"template": template, "selector": {"matchLabels": {"a": "b"}}, **spec},
    }
    if resource is JOBS:
        del body["spec"]["selector"]
        template["spec"]["restartPolicy"] = "Never"
    return body


def defaulted(resource: Resource, body: Object) -> Object:
    apply_defaults(resource, body)
    return body


def test_a_deployment_gets_replicas_and_a_rolling_update() -> None:
    spec = defaulted(DEPLOYMENTS, workload(DEPLOYMENTS))["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {
        "type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"},
    }  # fmt: skip
    assert spec["template"]["spec"]["restartPolicy"] == "Always"
    strategy.validate(DEPLOYMENTS, workload(DEPLOYMENTS, **spec))


def test_defaults_do_not_change_an_object_twice() -> None:
    for resource in (DEPLOYMENTS, DAEMONSETS, JOBS):
        once = defaulted(resource, workload(resource))
        assert defaulted(resource, clone(once)) == once


def test_nulls_in_a_template_mean_absent() -> None:
    body = workload(DEPLOYMENTS)
    body["spec"]["template"]["metadata"]["creationTimestamp"] = None
    assert defaulted(DEPLOYMENTS, body) == defaulted(DEPLOYMENTS, workload(DEPLOYMENTS))


def test_a_job_gets_a_selector_of_its_own() -> None:
    spec = defaulted(JOBS, workload(JOBS))["spec"]
    assert spec["selector"]["matchLabels"] == {"batch.kubernetes.io/controller-uid": "u1"}
    assert spec["template"]["metadata"]["labels"]["job-name"] == "w"
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (1, 1, 6)


@pytest.mark.parametrize(
    ("resource", "spec", "text"),
    [
        (DEPLOYMENTS, {"selector": None}, "spec.selector: Required value"),
        (DEPLOYMENTS, {"selector": {"matchLabels": {"a": "other"}}}, "`selector` does not match"),
        (DEPLOYMENTS, {"replicas": -1}, "spec.replicas"),
        (DEPLOYMENTS, {"replicas": True}, "spec.replicas"),
        (DEPLOYMENTS, {"replicas": 1_000_000}, "spec.replicas"),
        (DAEMONSETS, {"template": {"metadata": {"labels": {"a": "b"}}, "spec": {}}}, "containers: Required"),
        (JOBS, {"template": {"spec": {"containers": [{"name": "c", "image": "i"}]}}}, "OnFailure"),
        (JOBS, {"completionMode": "Odd"}, "spec.completionMode"),
        (JOBS, {"completionMode": "Indexed", "parallelism": 2}, "spec.completions: Required"),
    ],
)
def test_a_bad_workload_is_refused_with_the_reason(resource: Resource, spec: Object, text: str) -> None:
    body = defaulted(resource, workload(resource, **spec))
    with pytest.raises(ApiError) as refused:
        strategy.validate(resource, body)
    assert refused.value.code == 422
    assert text in refused.value.message


def test_a_bad_container_of_a_template_is_named_with_its_path() -> None:
    body = workload(DEPLOYMENTS)
    body["spec"]["template"]["spec"]["containers"][0]["name"] = "Not Valid"
    with pytest.raises(ApiError, match=r"spec\.template\.spec\.containers\[0\]\.name"):
        strategy.validate(DEPLOYMENTS, defaulted(DEPLOYMENTS, body))


@pytest.mark.parametrize("template", [7, {"spec": 7}, {"spec": {"containers": 7}}])
def test_a_malformed_template_is_a_bad_request(template: Any) -> None:
    with pytest.raises(ApiError) as refused:
        strategy.validate(DEPLOYMENTS, defaulted(DEPLOYMENTS, workload(DEPLOYMENTS, template=template)))
    assert refused.value.code == 400


def test_a_selector_never_changes_and_a_job_keeps_its_own() -> None:
    old = defaulted(DEPLOYMENTS, workload(DEPLOYMENTS))
    new = defaulted(DEPLOYMENTS, workload(DEPLOYMENTS, selector={"matchLabels": {"x": "y"}}))
    with pytest.raises(ApiError, match="field is immutable"):
        strategy.prepare_update(DEPLOYMENTS, old, new, "")
    job = defaulted(JOBS, workload(JOBS))
    replaced = workload(JOBS)
    replaced["metadata"].pop("uid")
    replaced = defaulted(JOBS, replaced)
    strategy.prepare_update(JOBS, job, replaced, "")
    assert replaced["spec"]["selector"] == job["spec"]["selector"]


def test_the_generation_counts_changes_of_the_spec_only() -> None:
    old = {**defaulted(DEPLOYMENTS, workload(DEPLOYMENTS)), "status": {}}
    old["metadata"]["generation"] = 4
    same, other = clone(old), clone(old)
    same["metadata"]["labels"] = {"x": "y"}
    other["spec"]["replicas"] = 7
    for new, generation in ((same, 4), (other, 5)):
        strategy.prepare_update(DEPLOYMENTS, old, new, "")
        assert new["metadata"]["generation"] == generation


def test_rbac_names_may_have_colons() -> None:
    strategy.validate(CLUSTERROLES, {"metadata": {"name": "system:node"}})
    with pytest.raises(ApiError):
        strategy.validate(CLUSTERROLES, {"metadata": {"name": "a/b"}})


def test_string_data_of_a_secret_becomes_data() -> None:
    secret: Object = {"metadata": {"name": "s"}, "stringData": {"a": "text"}}
    assert defaulted(SECRETS, secret)["data"] == {"a": "dGV4dA=="}
    assert "stringData" not in secret


def test_a_service_keeps_the_address_that_it_got() -> None:
    service: Object = {"metadata": {"name": "s", "uid": "u"}, "spec": {"ports": [{"port": 80}]}}
    spec = defaulted(SERVICES, clone(service))["spec"]
    assert spec["clusterIP"].startswith("10.96.")
    assert spec["ports"] == [{"port": 80, "protocol": "TCP", "targetPort": 80}]
    assert defaulted(SERVICES, clone(service))["spec"]["clusterIP"] == spec["clusterIP"]
    headless: Object = {"metadata": {"uid": "u"}, "spec": {"clusterIP": "None"}}
    assert defaulted(SERVICES, headless)["spec"]["clusterIP"] == "None"


# --- scale ---


def test_a_scale_shows_and_sets_the_replicas() -> None:
    found = defaulted(DEPLOYMENTS, workload(DEPLOYMENTS, replicas=3))
    found["spec"]["selector"]["matchExpressions"] = [{"key": "t", "operator": "In", "values": ["y", "x"]}]
    scale = scale_of(found)
    assert (scale["kind"], scale["spec"]["replicas"]) == ("Scale", 3)
    assert scale["status"]["selector"] == "a=b,t in (x,y)"
    changed = scaled(found, {**scale, "spec": {"replicas": 0}})
    assert (changed["spec"]["replicas"], found["spec"]["replicas"]) == (0, 3)


@pytest.mark.parametrize(
    "body", [[], {"kind": "Pod"}, {"spec": {"replicas": -1}}, {"spec": {"replicas": "3"}}]
)
def test_a_bad_scale_is_refused(body: Any) -> None:
    with pytest.raises(ApiError):
        scaled(workload(DEPLOYMENTS), body)


# --- views ---


def test_an_event_is_seen_in_both_forms() -> None:
    store = Store()
    event = {
        "kind": "Event", "apiVersion": "v1", "metadata": {"name": "e", "namespace": "default"},
        "involvedObject": {"kind": "Pod", "name": "p"}, "message": "hello", "reason": "Started", "count": 2,
        "reportingComponent": "kubelet",
    }  # fmt: skip
    store.create(EVENTS, event)
    shown = store.get(EVENTS_V1, "default", "e")
    assert (shown["apiVersion"], shown["regarding"]["name"], shown["note"]) == (
        "events.k8s.io/v1", "p", "hello",
    )  # fmt: skip
    assert (shown["deprecatedCount"], shown["reportingController"]) == (2, "kubelet")
    store.update(EVENTS_V1, {**shown, "note": "again"})
    stored = store.get(EVENTS, "default", "e")
    assert (stored["apiVersion"], stored["message"]) == ("v1", "again")
    assert {**stored, "metadata": 0} == {**event, "message": "again", "metadata": 0}
    changes = list(store.events_since(EVENTS_V1, 1))
    assert changes[0].previous is not None
    assert (changes[0].obj["note"], changes[0].previous["note"]) == ("again", "hello")
    store.delete(EVENTS_V1, store.list(EVENTS_V1)[0])
    assert store.list(EVENTS) == []
