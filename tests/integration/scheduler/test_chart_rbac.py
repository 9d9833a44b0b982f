"""The chart's RBAC rules against the calls that our components make (chart.md §4): no more, no less.

An API server that asks the rules of the rendered manifest answers 403 to everything else; afterwards every
verb that they grant must have been used.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest
import yaml
from aiohttp import web

from hami.kube.client import Client
from hami.kube.config import ClientConfig
from hami.kube.events import EventRecorder, ObjectRef
from hami.local.api.apiserver import ApiServer
from hami.local.api.objects import Object, dig
from hami.local.api.resources import PODS
from hami.local.cluster import Cluster, ClusterConfig, GpuNode, default_native
from hami.node.cluster import KubeCluster
from hami.node.plugin.process import COMPONENT

MANIFEST = Path(__file__).resolve().parents[2] / "chart/golden/default.yaml"
NAMESPACE = "kube-system"
SCHEDULER, PLUGIN = "hami-scheduler", "hami-device-plugin"
PROGRAMS = {
    "hami": SCHEDULER,
    "hami-scheduler": SCHEDULER,
    "hami-monitor": PLUGIN,
    "hami-device-plugin": PLUGIN,
}
"""The first word of User-Agent -> the account of the pod that it runs in."""
OF_KUBE_SCHEDULER = {(SCHEDULER, verb, "leases", "hami-scheduler") for verb in ("get", "update", "patch")} | {
    (SCHEDULER, "create", "leases", "")
}
"""Granted for the kube-scheduler in the same pod, which elects the leader."""
LIMIT_S = 60.0

Grant = tuple[str, str, str, str]
"""Account, verb, resource with subresource, name ("" for any)."""


@dataclass(frozen=True)
class Call:
    """One request as RBAC sees it."""

    verb: str
    resource: str
    namespace: str
    name: str


def _grants() -> set[tuple[Grant, str]]:
    """What the manifest's own roles give to each account, and in which namespace ("" for all)."""
    objects = [found for found in yaml.safe_load_all(MANIFEST.read_text("utf-8")) if found]
    roles = {
        (found["kind"], found["metadata"]["name"]): found["rules"]
        for found in objects
        if found["kind"] in ("Role", "ClusterRole")
    }
    found: set[tuple[Grant, str]] = set()
    for binding in (item for item in objects if item["kind"] in ("RoleBinding", "ClusterRoleBinding")):
        rules = roles.get((binding["roleRef"]["kind"], binding["roleRef"]["name"]), [])
        namespace = binding["metadata"].get("namespace", "")
        for rule in rules:
            for subject in binding["subjects"]:
                for verb in rule["verbs"]:
                    for resource in rule["resources"]:
                        for name in rule.get("resourceNames", [""]):
                            found.add(((subject["name"], verb, resource, name), namespace))
    return found


def _call(request: web.Request) -> Call:
    path = unquote(request.path)
    match = re.fullmatch(
        r"/(?:api|apis/[^/]+)/v[^/]+(?:/namespaces/(?P<ns>[^/]+))?/(?P<kind>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>\w+))?",
        path,
    )
    assert match, f"a call that is none to a resource: {path}"
    query = parse_qs(request.query_string)
    name = match["name"] or ""
    verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(
        request.method, "get"
    )
    if verb == "get" and not name:
        verb = "watch" if query.get("watch", [""])[0] in ("1", "true") else "list"
        selected = re.fullmatch(r"metadata\.name=(.+)", query.get("fieldSelector", [""])[0])
        name = selected[1] if selected else ""
    resource = match["kind"] + (f"/{match['sub']}" if match["sub"] else "")
    return Call(verb, resource, match["ns"] or "", name)


@dataclass
class Authorizer:
    """An intercept of the embedded API server."""

    used: set[Grant] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)

    async def __call__(self, request: web.Request) -> web.StreamResponse | None:
        account = PROGRAMS.get(request.headers.get("User-Agent", "").split("/")[0])
        if account is None:
            return None
        call = _call(request)
        matching = [
            grant
            for grant, namespace in _grants_of(account)
            if grant[1:3] == (call.verb, call.resource)
            and grant[3] in ("", call.name)
            and namespace in ("", call.namespace)
        ]
        if not matching:
            self.refused.append(f"{account}: {call}")
            reason = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "no rule for this"}
            return web.json_response(reason, status=403)
        # the narrowest rule is the one that is needed
        self.used.add(max(matching, key=lambda grant: grant[3]))
        return None


@functools.cache
def _grants_of(account: str) -> tuple[tuple[Grant, str], ...]:
    return tuple(item for item in _grants() if item[0][0] == account)


async def _scheduler(start: Any) -> None:
    """A life of the scheduler that makes each of its calls."""
    lease = {
        "metadata": {"name": "hami-scheduler", "namespace": NAMESPACE},
        "spec": {"holderIdentity": "host_1", "leaseDurationSeconds": 600, "leaseTransitions": 1},
    }
    configuration = {
        "metadata": {"name": "hami-webhook"},
        "webhooks": [
            {
                "name": "vgpu.hami.io",
                "clientConfig": {"url": "https://127.0.0.1:1/"},
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "rules": [],
            }
        ],
    }
    settings = {
        "lease": (NAMESPACE, "hami-scheduler"),
        "tls_secret": (NAMESPACE, "hami-scheduler-tls"),
        "tls_hosts": ("127.0.0.1",),
        "webhook_configuration": "hami-webhook",
        "pod_name": "hami-scheduler-1",
        "pod_namespace": NAMESPACE,
    }
    secret = f"/api/v1/namespaces/{NAMESPACE}/secrets/hami-scheduler-tls"
    hooks = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"

    async def bundle_written(world: Any) -> None:
        deadline = time.monotonic() + LIMIT_S
        while True:
            found = await world.request("GET", f"{hooks}/hami-webhook")
            if found["webhooks"][0]["clientConfig"].get("caBundle"):
                return
            assert time.monotonic() < deadline, "no CA bundle"
            await asyncio.sleep(0.05)

    async with start(**settings) as world:  # makes the Secret
        await world.request("POST", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases", lease)
        await world.until(lambda: world.scheduler.gate.is_open)
        await world.request("PATCH", secret, {"data": {"tls.crt": "eA=="}}, "application/merge-patch+json")
        await world.request("POST", hooks, configuration)
        own = {
            "metadata": {
                "name": "hami-scheduler-1",
                "labels": {"app.kubernetes.io/component": "hami-scheduler"},
            },
            "spec": {"containers": [{"name": "main", "image": "x"}]},
        }
        await world.request("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", own)

    async def labelled(world: Any) -> None:
        own = f"/api/v1/namespaces/{NAMESPACE}/pods/hami-scheduler-1"
        async with asyncio.timeout(LIMIT_S):
            while "hami.io/scheduler-role" not in (await world.request("GET", own))["metadata"]["labels"]:  # noqa: ASYNC110 -- asks the API server
                await asyncio.sleep(0.05)

    async with start(**settings) as world:  # mends the Secret, labels the pod
        await world.until(lambda: world.scheduler.gate.is_open)
        await bundle_written(world)
        await labelled(world)
        await world.add_node("n1")

    plain = {key: settings[key] for key in ("pod_name", "pod_namespace")}
    async with start(**plain, http_bind="127.0.0.1:0") as world:  # plain HTTP, for the extender's verbs
        await world.until(lambda: "n1" in world.scheduler.state.node_names())
        pod = await world.add_pod("p")
        assert (await world.filter(pod, "n1"))["NodeNames"] == ["n1"]
        assert await world.bind(pod, "n1") == ""
        unknown = await world.add_pod("unknown")
        assert await world.bind(unknown, "n1"), "a bind that nobody asked for is looked up"
        for _ in range(2):  # the second one counts the first one up
            world.scheduler.recorder.record(ObjectRef("Node", "n1"), "Warning", "Again", "comes again")
            await world.scheduler.recorder.flush(60.0)


async def _seldom(api: ApiServer) -> None:
    """Calls of the device plugin that a node without trouble does not make, by the plugin's own client."""
    async with Client(ClientConfig(api.url), user_agent=COMPONENT) as client:
        recorder = EventRecorder(client, COMPONENT, "n1")
        sending = asyncio.create_task(recorder.run())
        cluster = KubeCluster(client, recorder, "n1")
        pod = await cluster.pod("default", "p")  # the holder of a lock; a pod that the watch has not seen yet
        for _ in range(2):
            cluster.pod_event(pod, "Warning", "AllocateFailed", "comes again")
            await recorder.flush(60.0)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def _node(directory: Path, authorizer: Authorizer, mode: str) -> None:
    """A pod's life on a node of the embedded cluster."""
    config = ClusterConfig(
        [GpuNode("n1")], default_native(), directory=directory, plugin_args=("--allocation-mode", mode)
    )
    cluster = Cluster(config)
    cluster.api.intercept = authorizer
    async with cluster:
        pod: Object = {
            "metadata": {"name": "p"},
            "spec": {
                "restartPolicy": "Never",
                "containers": [
                    {
                        "name": "main",
                        "image": "none",
                        "command": ["sleep", "600"],
                        "resources": {"limits": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}},
                    }
                ],
            },
        }
        await cluster.api.registry.create(PODS, "default", json.loads(json.dumps(pod)))
        deadline = time.monotonic() + LIMIT_S
        while dig(cluster.api.store.get(PODS, "default", "p"), "status", "phase") != "Running":
            assert time.monotonic() < deadline, (
                authorizer.refused,
                cluster.api.store.get(PODS, "default", "p"),
            )
            await asyncio.sleep(0.05)
        assert "hami" in await cluster.metrics("n1")


async def test_the_rules_are_the_calls_that_the_components_make(
    start: Any, embedded_api: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    authorizer = Authorizer()
    embedded_api.intercept = authorizer
    await _scheduler(start)
    await _seldom(embedded_api)
    for mode in ("lock", "exact"):
        await _node(tmp_path_factory.mktemp(mode), authorizer, mode)
    assert authorizer.refused == []
    granted = {grant for grant, _ in _grants()}
    unused = sorted(granted - authorizer.used - OF_KUBE_SCHEDULER)
    assert not unused, unused


def _accounts() -> Iterator[tuple[str, str, str]]:
    for (account, verb, resource, _), _namespace in _grants():
        yield account, verb, resource


def test_no_rule_gives_more_than_it_names() -> None:
    assert {account for account, _, _ in _accounts()} == {SCHEDULER, PLUGIN}
    assert not [item for item in _accounts() if "*" in item]
    assert {resource for _, _, resource in _accounts()} == {
        *("pods", "pods/binding", "nodes", "resourcequotas", "events", "leases", "secrets"),
        "mutatingwebhookconfigurations",
    }
    named = {grant[3] for grant, _ in _grants() if grant[2] == "secrets" and grant[1] != "create"}
    assert named == {"hami-scheduler-tls"}
