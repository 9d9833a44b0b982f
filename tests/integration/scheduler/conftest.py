"""A running scheduler (all of its parts, over its real sockets) against the embedded API server."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.local.api.apiserver import ApiServer
from hami.scheduler.edge.app import Scheduler
from hami.scheduler.edge.device_config import DeviceConfigFile
from hami.scheduler.edge.settings import SchedulerSettings
from hami.vendors.config import decode_config, load_profiles

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for vendor_plugins

NVIDIA = {
    "resourceCountName": "nvidia.com/gpu",
    "resourceMemoryName": "nvidia.com/gpumem",
    "resourceMemoryPercentageName": "nvidia.com/gpumem-percentage",
    "resourceCoreName": "nvidia.com/gpucores",
    "resourcePriorityName": "nvidia.com/priority",
    "defaultGPUNum": 1,
}
ALLOCATED = "hami.io/vgpu-devices-allocated"


@dataclass
class World:
    """The cluster and the scheduler under test."""

    api: ApiServer
    scheduler: Scheduler
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.scheduler.ports['extender']}"

    async def call(self, verb: str, body: Any) -> Any:
        """POST to the extender; bytes are sent as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(f"{self.url}/{verb}", data=data) as response:
            assert response.status == 200, await response.text()
            return json.loads(await response.read())

    async def metrics(self) -> str:
        url = f"http://127.0.0.1:{self.scheduler.ports['metrics']}/metrics"
        async with self.http.get(url) as response:
            assert response.status == 200
            return await response.text()

    async def request(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """A request to the API server."""
        data = None if body is None else json.dumps(body)
        async with self.http.request(
            method, self.api.url + path, data=data, headers={"Content-Type": kind}
        ) as response:
            answer = await response.json()
            assert response.status < 300, answer
            return answer

    async def add_node(self, name: str, cards: int = 1, mem: int = 8000, **metadata: Any) -> None:
        devices = [
            {
                "id": f"GPU-{name}-{index}",
                "index": index,
                "count": 10,
                "devmem": mem,
                "devcore": 100,
                "type": "NVIDIA T4",
                "mode": "hami-core",
                "health": True,
            }
            for index in range(cards)
        ]
        asked = f"Requesting_{datetime.now(UTC).strftime('%Y-%m-%d %H:%M:%S')}"  # so that nothing is to write
        annotations = {
            "hami.io/node-nvidia-register": json.dumps(devices),
            "hami.io/node-handshake": asked,
            **metadata.pop("annotations", {}),
        }
        amounts = {"nvidia.com/gpu": str(10 * cards), "cpu": "8", "memory": "32Gi", "pods": "110"}
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "annotations": annotations, **metadata},
            "status": {"capacity": amounts, "allocatable": amounts},
        }
        await self.request("POST", "/api/v1/nodes", node)
        await self.until(lambda: name in self.scheduler.state.node_names())

    async def add_pod(self, name: str, mem: int | None = 1000, gpus: int = 1, **metadata: Any) -> Any:
        limits = {"nvidia.com/gpu": str(gpus)} | ({"nvidia.com/gpumem": str(mem)} if mem is not None else {})
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", **metadata},
            "spec": {
                "schedulerName": "hami-scheduler",
                "containers": [{"name": "main", "image": "app", "resources": {"limits": limits}}],
            },
        }
        return await self.request("POST", "/api/v1/namespaces/default/pods", pod)

    async def placed(self, **metadata: Any) -> Any:
        """Pod ``p`` with a reservation on ``n1``, the only node."""
        await self.add_node("n1")
        pod = await self.add_pod("p", **metadata)
        assert (await self.filter(pod, "n1"))["NodeNames"] == ["n1"]
        return pod

    async def pod(self, name: str) -> Any:
        return await self.request("GET", f"/api/v1/namespaces/default/pods/{name}")

    async def filter(self, pod: Any, *names: str) -> Any:
        return await self.call("filter", {"Pod": pod, "Nodes": None, "NodeNames": list(names)})

    async def bind(self, pod: Any, node: str) -> str:
        meta = pod["metadata"]
        body = {
            "PodName": meta["name"],
            "PodNamespace": meta["namespace"],
            "PodUID": meta["uid"],
            "Node": node,
        }
        answer: str = (await self.call("bind", body))["Error"]
        return answer

    def used_mib(self, node: str) -> list[int]:
        return [card.used.mem for card in self.scheduler.state.node_usage(node).cards]

    def writes(self, *, events: bool = False) -> list[tuple[str, str]]:
        """Requests of the scheduler that change something, in order."""
        return [
            (method, path)
            for method, path in self.api.seen
            if method != "GET" and (events or "/events" not in path) and "fieldManager" not in path
        ]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; the test's own time-out ends a wait in vain."""
        while not condition():  # noqa: ASYNC110 -- the state tells nobody of its changes
            await asyncio.sleep(0.01)

    async def events(self) -> list[tuple[str, str, str]]:
        """Type, reason and text of all events."""
        found = (await self.request("GET", "/api/v1/namespaces/default/events"))["items"]
        return [(event["type"], event["reason"], event["message"]) for event in found]


Start = Callable[..., AbstractAsyncContextManager[World]]


@pytest.fixture
def start(embedded_api: ApiServer) -> Start:
    """Start a scheduler with other settings than the defaults."""

    @asynccontextmanager
    async def run(
        during: Callable[[World], Awaitable[None]] | None = None,
        device_config: Mapping[str, Any] | None = None,
        source: DeviceConfigFile | None = None,
        **settings: Any,
    ) -> AsyncIterator[World]:
        chosen = SchedulerSettings(
            **{
                "device_config_file": Path("unused"),
                "hostname": "host",
                "http_bind": "127.0.0.1:0",
                "metrics_bind_address": "127.0.0.1:0",
                "scheduler_name": "hami-scheduler",
                "kube_qps": 0.0,
                **settings,
            }
        )
        config = decode_config({"nvidia": NVIDIA, **(device_config or {})})
        profiles = load_profiles(config, enable_ascend=True, enable_iluvatar=True)
        stop = asyncio.Event()
        async with (
            Client(
                ClientConfig(embedded_api.url), Limits(qps=chosen.kube_qps, burst=chosen.kube_burst)
            ) as client,
            aiohttp.ClientSession() as http,
        ):
            scheduler = Scheduler.build(chosen, profiles, client, source=source)
            running = asyncio.create_task(scheduler.run(stop))
            world = World(embedded_api, scheduler, http)
            try:
                await world.until(lambda: bool(scheduler.ports) or running.done())
                if chosen.lease is None:
                    await world.until(lambda: scheduler.gate.is_open or running.done())
                if running.done():
                    running.result()
                yield world
            finally:
                stop.set()
                await running

    return run


@pytest.fixture
async def world(start: Start) -> AsyncIterator[World]:
    """A running scheduler with default settings."""
    async with start() as made:
        yield made
