"""Whatever is put into a workload: an exact refusal, or an object with which the controllers can live."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hami.local.api.errors import ApiError
from hami.local.api.objects import Object, clone
from hami.local.api.registry import Registry
from hami.local.api.resources import (
    CONFIGMAPS,
    DAEMONSETS,
    DEFAULT_TABLE,
    DEPLOYMENTS,
    JOBS,
    NODES,
    REPLICASETS,
    SERVICES,
    Resource,
)
from hami.local.api.store import Event, Store
from hami.local.controllers.controller import Context, Controller
from hami.local.controllers.daemonset import DaemonSetController
from hami.local.controllers.deployment import DeploymentController
from hami.local.controllers.endpoints import EndpointsController
from hami.local.controllers.garbage import GarbageCollector
from hami.local.controllers.job import JobController
from hami.local.controllers.replicaset import ReplicaSetController

NOW = 1_800_000_000.0
TEMPLATE: Object = {
    "metadata": {"labels": {"a": "b"}},
    "spec": {
        "containers": [{"name": "c", "image": "i", "ports": [{"name": "web", "containerPort": 80}]}],
        "nodeSelector": {"x": "y"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}
                    ]
                }
            }
        },
    },
}
BODIES: dict[Resource, Object] = {
    DEPLOYMENTS: {"spec": {"selector": {"matchLabels": {"a": "b"}}, "template": TEMPLATE, "replicas": 1,
                           "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}}},
    REPLICASETS: {"spec": {"selector": {"matchLabels": {"a": "b"}}, "template": TEMPLATE, "replicas": 1}},
    DAEMONSETS: {"spec": {"selector": {"matchExpressions": [{"key": "a", "operator": "Exists"}]},
                          "template": TEMPLATE, "updateStrategy": {"type": "RollingUpdate"}}},
    JOBS: {"spec": {"template": {**TEMPLATE, "spec": {**TEMPLATE["spec"], "restartPolicy": "Never"}},
                    "completions": 2, "completionMode": "Indexed", "backoffLimit": 1}},
    SERVICES: {"spec": {"selector": {"a": "b"}, "ports": [{"port": 80, "targetPort": "web"}]}},
    CONFIGMAPS: {"metadata": {"finalizers": ["x/y"], "ownerReferences": [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": "o", "uid": "u", "controller": True}]}},
}  # fmt: skip

junk = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "name", "x/y"]), inner),
    max_leaves=4,
)


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON value but its root."""
    found: list[tuple[Any, ...]] = [here] if here else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += paths(item, (*here, key))
    return found


@st.composite
def spoilt(draw: st.DrawFn) -> tuple[Resource, Object]:
    """A workload with something else in one or two places."""
    resource = draw(st.sampled_from(list(BODIES)))
    body: Object = clone(BODIES[resource])
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(paths(body) or [("spec",)]))
        parent: Any = body
        for step in path[:-1]:
            parent = parent[step]
        parent[path[-1]] = draw(junk)
    if isinstance(body.get("metadata") or {}, dict):
        body["metadata"] = {**(body.get("metadata") or {}), "name": "w"}
    return resource, body


def read(controller: Controller, storage_key: str, event: Event) -> None:
    """What the manager does with a change; an exception here would reach the client."""
    list(controller.keys(storage_key, event))


async def live(resource: Resource, body: Object) -> None:
    """Create the object, let every controller work, change and delete it."""
    store = Store()
    registry = Registry(store, DEFAULT_TABLE, lambda: NOW)
    await registry.create(NODES, "", {"metadata": {"name": "n1"}})
    context = Context(registry, lambda: NOW)
    controllers: list[Controller] = [
        GarbageCollector(context), ReplicaSetController(context), DeploymentController(context),
        DaemonSetController(context), JobController(context), EndpointsController(context),
    ]  # fmt: skip
    for controller in controllers:
        store.subscribe(partial(read, controller))
    revision = store.revision
    try:
        await registry.create(resource, "default", body)
    except ApiError as error:
        assert 400 <= error.code < 500  # noqa: PT017
        assert error.message  # noqa: PT017
        assert store.revision == revision
        return
    for _ in range(3):
        for controller in controllers:
            for key in list(controller.initial()):
                try:
                    await controller.sync(key)
                except ApiError as error:
                    assert error.code in (403, 409, 422), error.message  # noqa: PT017
    await registry.delete(resource, "default", "w")


@settings(deadline=None, max_examples=300)
@given(spoilt())
def test_a_spoilt_workload_is_refused_or_lived_with(case: tuple[Resource, Object]) -> None:
    asyncio.run(live(*case))


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ({"finalizers": 7}, 400), ({"finalizers": [7]}, 400), ({"finalizers": ["a b"]}, 422),
        ({"ownerReferences": "x"}, 400), ({"ownerReferences": [7]}, 400), ({"ownerReferences": [{}]}, 422),
    ],
)  # fmt: skip
async def test_malformed_ownership_is_refused(metadata: Object, code: int) -> None:
    registry = Registry(Store(), DEFAULT_TABLE, lambda: NOW)
    with pytest.raises(ApiError) as refused:
        await registry.create(CONFIGMAPS, "default", {"metadata": {"name": "c", **metadata}})
    assert refused.value.code == code


async def test_an_object_has_one_controller() -> None:
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "o", "controller": True}
    body = {"metadata": {"name": "c", "ownerReferences": [{**owner, "uid": "1"}, {**owner, "uid": "2"}]}}
    registry = Registry(Store(), DEFAULT_TABLE, lambda: NOW)
    with pytest.raises(ApiError, match="only one reference"):
        await registry.create(CONFIGMAPS, "default", body)


@pytest.mark.parametrize(
    "spec",
    [{"ports": [{"port": 0}]}, {"ports": [{"port": "http"}]}, {"ports": [{"port": 80, "targetPort": 99999}]},
     {"ports": [{"port": True}]}, {"selector": {"a": "b c"}}],
)  # fmt: skip
async def test_a_bad_service_is_refused(spec: Object) -> None:
    registry = Registry(Store(), DEFAULT_TABLE, lambda: NOW)
    with pytest.raises(ApiError) as refused:
        await registry.create(SERVICES, "default", {"metadata": {"name": "s"}, "spec": spec})
    assert refused.value.code == 422
