"""The dashboard on an embedded API server: it follows, survives restarts, only reads, and asks monitors."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from local_harness import reaped, until

from hami.answers.snapshot import Settings
from hami.dashboard.access import Kubernetes
from hami.dashboard.errors import AccessError
from hami.dashboard.explaining import Explainer
from hami.dashboard.following import Following
from hami.dashboard.monitors import Monitors, Way, plain_session
from hami.dashboard.scope import EVERYTHING
from hami.dashboard.store import Store
from hami.dashboard.view import Memory, View, build_view
from hami.kube.bugs import BugLog
from hami.kube.client import Client
from hami.kube.config import load_kubeconfig
from hami.kube.resources import PODS as KUBE_PODS
from hami.local.api.apiserver import ApiServer
from hami.local.api.resources import NODES, PODS
from hami.local.cluster import Cluster
from hami.local.serving import serving

NOW = 1_787_400_000.0
MIB = 1 << 20
TEXT = (
    'hami_host_gpu_memory_used_bytes{device_uuid="c-0"} 1048576\n'
    'hami_vgpu_memory_used_bytes{namespace="default",pod="p",container="main",device_uuid="c-0"} 1048576\n'
)


def node(name: str = "n") -> dict[str, Any]:
    card = {"id": "c-0", "count": 10, "devmem": 8000, "devcore": 100, "type": "NVIDIA-T4", "health": True}
    annotations = {
        "hami.io/node-nvidia-register": json.dumps([{**card, "index": 0, "mode": "hami-core"}]),
        "hami.io/node-handshake": "Reported_now",
    }
    return {"metadata": {"name": name, "annotations": annotations}}


def pod(name: str, node_name: str = "n", *, memory: int = 2000, **metadata: Any) -> dict[str, Any]:
    held = {
        "hami.io/vgpu-node": node_name,
        "hami.io/vgpu-time": "1",
        "hami.io/vgpu-devices-allocated": f"c-0,NVIDIA,{memory},30:;",
    }
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(memory)}
    containers = [{"name": "main", "image": "x", "resources": {"limits": limits}}]
    spec: dict[str, Any] = {"schedulerName": "hami-scheduler", "containers": containers}
    if node_name:
        spec["nodeName"] = node_name
    annotations = held if node_name else {}
    return {"metadata": {"name": name, "annotations": annotations, **metadata}, "spec": spec}


class Followed:
    """A store that follows an API server."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.now = NOW
        self.store = Store(Settings(), "")
        self.following = Following(self.store, client, lambda: self.now, BugLog(logging.getLogger(__name__)))

    @property
    def view(self) -> View:
        return build_view(self.store, Memory(), self.now)

    @property
    def pods(self) -> list[str]:
        return [one.pod for one in self.view.workloads]


@asynccontextmanager
async def following(kubeconfig: Path) -> AsyncIterator[Followed]:
    async with Client(load_kubeconfig([kubeconfig])) as client:
        made = Followed(client)
        task = asyncio.create_task(made.following.run())
        try:
            await until(lambda: made.following.synced)
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_what_changes_in_the_cluster_changes_in_the_picture(
    embedded_api: ApiServer, kubeconfig: Path
) -> None:
    registry = embedded_api.registry
    await registry.create(NODES, "", node())
    async with following(kubeconfig) as found:
        await registry.create(PODS, "default", pod("p"))
        await until(lambda: found.pods == ["p"])
        assert found.view.devices[0].memory_mi_b.allocated == 2000
        await found.client.delete(KUBE_PODS, "p", namespace="default", query={"gracePeriodSeconds": "0"})
        await until(lambda: found.view.devices[0].memory_mi_b.allocated == 0)


async def test_a_restart_of_the_api_server_makes_data_stale_and_no_row_twice(
    embedded_api: ApiServer, kubeconfig: Path
) -> None:
    registry = embedded_api.registry
    await registry.create(NODES, "", node())
    await registry.create(PODS, "default", pod("p"))
    async with following(kubeconfig) as found:
        await until(lambda: found.pods == ["p"])
        await found.following.probe()
        assert {one.state for one in found.store.sources.values()} == {"ok"}
        port = int(embedded_api.url.rpartition(":")[2])
        await embedded_api.stop()
        found.now += 60
        await found.following.probe()
        stale = found.store.sources["pods"]
        assert (stale.state, stale.age_seconds) == ("stale", 60)
        assert found.pods == ["p"], "what was known is still shown"
        await embedded_api.start(port)
        await registry.create(PODS, "default", pod("q", memory=1000))
        await until(lambda: sorted(found.pods) == ["p", "q"])
        await until(lambda: found.view.devices[0].memory_mi_b.allocated == 3000)
        await found.following.probe()
        await found.following.probe()
        assert found.store.sources["pods"].state == "ok"


@asynccontextmanager
async def monitor(answer: str, status: int = 200) -> AsyncIterator[int]:
    """A monitor on this machine."""

    async def metrics(request: web.Request) -> web.Response:
        headers = {"Location": "/metrics"} if status == 302 else None
        reply = web.Response(text=answer, status=status, headers=headers)
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            reply.enable_compression(web.ContentCoding.gzip)  # as the real one does
        return reply

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with serving(app) as port:
        yield port


def plugin(port: int, *, namespace: str = "kube-system") -> dict[str, Any]:
    return {
        "metadata": {
            "name": "plugin",
            "namespace": namespace,
            "labels": {"app.kubernetes.io/component": "hami-device-plugin"},
        },
        "spec": {
            "nodeName": "n",
            "containers": [
                {"name": "m", "image": "x", "ports": [{"name": "metrics", "containerPort": port}]}
            ],
        },
        "status": {"phase": "Running", "podIP": "127.0.0.1"},
    }


async def asked(api: ApiServer, found: Followed, way: Way, urls: Mapping[str, str] | None = None) -> None:
    async with plain_session() as session:
        monitors = Monitors(
            found.store, found.client, session, way=way, namespace="kube-system", clock=lambda: NOW, urls=urls
        )
        await monitors.round()
    assert {method for method, _ in api.seen} <= {"GET"}


async def put_plugin(api: ApiServer, found: Followed, port: int, namespace: str = "kube-system") -> None:
    made = plugin(port, namespace=namespace)
    await api.registry.create(PODS, namespace, made)
    status = {"status": made["status"]}
    await found.client.patch(KUBE_PODS, "plugin", status, dict, namespace=namespace, subresource="status")
    api.seen.clear()


async def test_a_monitor_is_asked_at_the_address_of_its_pod(
    embedded_api: ApiServer, kubeconfig: Path
) -> None:
    await embedded_api.registry.create(NODES, "", node())
    await embedded_api.registry.create(PODS, "default", pod("p"))
    async with monitor(TEXT) as port, following(kubeconfig) as found:
        await put_plugin(embedded_api, found, port)
        await until(lambda: found.pods == ["p"])
        await asked(embedded_api, found, "direct")
        assert found.view.devices[0].memory_mi_b.used == 1.0
        assert found.view.workloads[0].used_memory_mi_b == 1.0
        assert found.store.monitors["n"].source(NOW).state == "ok"


async def test_only_pods_of_hamis_namespace_are_taken_for_monitors(
    embedded_api: ApiServer, kubeconfig: Path
) -> None:
    await embedded_api.registry.create(NODES, "", node())
    async with monitor(TEXT) as port, following(kubeconfig) as found:
        await put_plugin(embedded_api, found, port, "default")
        await asked(embedded_api, found, "direct")
        assert found.store.monitors == {}
        assert (
            found.store.sources["monitorPods"].reason == "no running device plugin in namespace kube-system"
        )


@pytest.mark.parametrize(
    ("answer", "status", "why"),
    [
        ("no", 500, "HTTP 500"),
        (TEXT, 302, "HTTP 302"),
        ("{not metrics", 200, "no metrics of a monitor"),
    ],
)
async def test_a_monitor_that_answers_something_else_is_told_with_its_node(
    embedded_api: ApiServer, kubeconfig: Path, answer: str, status: int, why: str
) -> None:
    await embedded_api.registry.create(NODES, "", node())
    async with monitor(answer, status) as port, following(kubeconfig) as found:
        await asked(embedded_api, found, "none", {"n": f"http://127.0.0.1:{port}/metrics"})
        source = found.store.monitors["n"].source(NOW)
        assert source.state == "missing"
        assert why in source.reason
        assert found.view.devices[0].memory_mi_b.used is None


async def test_the_real_monitor_of_a_node_is_understood(cluster: Cluster) -> None:
    async with following(cluster.kubeconfig) as found, plain_session() as session:
        urls = {"n1": f"{cluster.nodes['n1'].metrics_url}/metrics"}
        monitors = Monitors(
            found.store, found.client, session, way="none", namespace="", clock=lambda: NOW, urls=urls
        )
        await monitors.round()
        (card,) = found.view.devices
        assert found.store.monitors["n1"].failure == ""
        assert card.physical_memory_mi_b == card.memory_mi_b.total
        assert card.memory_mi_b.used is not None
        assert card.temperature_celsius is not None


async def test_the_events_of_a_waiting_pod_come_with_its_explanation(
    embedded_api: ApiServer, kubeconfig: Path
) -> None:
    await embedded_api.registry.create(NODES, "", node())
    await embedded_api.registry.create(PODS, "default", pod("p", "", memory=90000))
    async with following(kubeconfig) as found:
        await until(lambda: found.pods == ["p"])
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": "p.1"},
            "involvedObject": {"kind": "Pod", "namespace": "default", "name": "p"},
            "reason": "FilteringFailed",
            "message": "no available node",
            "count": 3,
        }
        path = "/api/v1/namespaces/default/events"
        await found.client.request("POST", path, body=json.dumps(event).encode())
        explained = await Explainer(found.store, found.client, lambda: NOW)("default", "p")
        assert [(one.reason, one.count) for one in explained.events] == [("FilteringFailed", 3)]
        assert explained.nodes[0].text == "1/1 CardInsufficientMemory"


class Reviews:
    """Answers the two reviews as an API server with RBAC would; counts them."""

    def __init__(self, allowed: set[str]) -> None:
        self.allowed = allowed
        self.asked: list[str] = []
        self.broken = False

    async def __call__(self, request: web.Request) -> web.StreamResponse | None:
        kind = request.path.rpartition("/")[2]
        if kind not in ("tokenreviews", "subjectaccessreviews"):
            return None
        if self.broken:
            return web.Response(status=500, text="no")
        spec = (await request.json())["spec"]
        self.asked.append(kind)
        if kind == "tokenreviews":
            known = spec["token"] == "good"
            status: dict[str, Any] = {"authenticated": known, "user": {"username": "ann", "groups": ["dev"]}}
        else:
            assert (spec["user"], spec["groups"]) == ("ann", ["dev"])
            what = spec["resourceAttributes"]
            assert (what["verb"], what["resource"]) == ("list", "pods")
            status = {"allowed": what["namespace"] in self.allowed}
        return web.json_response({"status": status}, status=201)


async def test_kubernetes_says_whose_token_it_is_and_which_pods_he_may_list(
    embedded_api: ApiServer, kubeconfig: Path
) -> None:
    reviews = Reviews({"team-a"})
    embedded_api.intercept = reviews
    now = 0.0
    async with Client(load_kubeconfig([kubeconfig])) as client:
        access = Kubernetes(client, lambda: now)
        good = {"authorization": "Bearer good"}
        scope = await access.scope(good, lambda: ["team-a", "team-b"])
        assert scope.namespaces == frozenset({"team-a"})
        before = len(reviews.asked)
        assert await access.scope(good, lambda: ["team-a", "team-b"]) == scope
        assert len(reviews.asked) == before, "remembered for a minute"
        now, reviews.allowed = 61.0, {""}
        assert await access.scope(good, lambda: ["team-a"]) == EVERYTHING
        for headers in ({}, {"authorization": "Basic good"}, {"authorization": "Bearer bad"}):
            with pytest.raises(AccessError) as refused:
                await access.scope(headers, lambda: ["team-a"])
            assert refused.value.status == 401
        reviews.broken = True
        with pytest.raises(AccessError) as unknown:
            await access.scope({"authorization": "Bearer other"}, lambda: [])
        assert unknown.value.status == 503, "who cannot be asked about is not let in"


async def test_the_process_serves_only_reads_and_ends_when_told(
    embedded_api: ApiServer, kubeconfig: Path
) -> None:
    await embedded_api.registry.create(NODES, "", node())
    await embedded_api.registry.create(PODS, "default", pod("p"))
    program = "from hami.cli.main import main; main(prog_name='hami')"
    words = ("-c", program, "dashboard", "--bind", "127.0.0.1:0", "--kubeconfig", str(kubeconfig))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    async with reaped(process), asyncio.timeout(120.0):
        assert process.stderr is not None
        line = b""
        while b"The dashboard is at " not in line:
            line = await process.stderr.readline()
            assert line, "the process has ended"
        url = line.decode().split()[4].rstrip("/")
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{url}/readyz") as ready:
                    if ready.status == 200:
                        break
                await asyncio.sleep(0.2)
            async with session.get(f"{url}/api/v1/workloads") as answer:
                assert [one["pod"] for one in (await answer.json())["items"]] == ["p"]
            async with session.get(f"{url}/") as answer:
                assert "script-src 'self'" in answer.headers["content-security-policy"]
            async with session.post(f"{url}/api/v1/workloads", data=b"x" * 1000) as answer:
                assert answer.status == 405
            async with session.get(f"{url}/api/v1/summary", headers={"Host": "evil.example"}) as answer:
                assert answer.status == 421
            async with session.get(f"{url}/", headers={"x-long": "x" * (20 << 10)}) as answer:
                assert answer.status == 431
        assert not [one for one in embedded_api.seen if one[0] != "GET"], "nothing is ever written"
        process.send_signal(signal.SIGTERM)
        await process.stderr.read()
        assert await process.wait() == 0
