"""A cluster in memory for the dashboard's tests, and requests to its application without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hami.answers.snapshot import Settings
from hami.dashboard.access import Access, NoCheck
from hami.dashboard.api import Api, OlderHistory
from hami.dashboard.app import Dashboard
from hami.dashboard.explaining import Explainer
from hami.dashboard.guard import Hosts, Rates
from hami.dashboard.history import History
from hami.dashboard.reading import read_monitor
from hami.dashboard.store import Store
from hami.dashboard.view import Memory, View, build_view
from hami.protocol.views import ResourceQuota

NOW = 1_787_400_000.0
Object = dict[str, Any]


def card(name: str, index: int = 0, **parts: Any) -> Object:
    """A card as its node registers it."""
    usual = {"count": 10, "devmem": 8000, "devcore": 100, "type": "NVIDIA-T4", "health": True}
    return {"id": name, "index": index, "mode": "hami-core", **usual, **parts}


def node(name: str, *cards: Object, **annotations: str) -> Object:
    """A node with NVIDIA cards; further annotations by keyword, `__` is `/`, `_` is `-`."""
    found: dict[str, str] = {"hami.io/node-handshake": "Reported_now"}
    if cards:
        found["hami.io/node-nvidia-register"] = json.dumps(cards)
    found.update({key.replace("__", "/").replace("_", "-"): text for key, text in annotations.items()})
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": "1",
            "annotations": found,
            "creationTimestamp": "2026-08-01T00:00:00Z",
        },
        "spec": {},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "addresses": [{"type": "InternalIP", "address": "10.0.0.7"}],
            "nodeInfo": {
                "osImage": "Linux",
                "kernelVersion": "6.1",
                "architecture": "amd64",
                "kubeletVersion": "v1.36.0",
                "containerRuntimeVersion": "containerd://2.4.0",
            },
            "allocatable": {"nvidia.com/gpu": str(10 * len(cards)), "cpu": "64", "pods": "500"},
        },
    }


def container(name: str, **amounts: int) -> Object:
    """A container; amounts as of the resources: gpu=1, gpumem=, gpucores=."""
    limits = {f"nvidia.com/{key}": str(amount) for key, amount in amounts.items()}
    return {"name": name, "image": "image:1", "resources": {"limits": limits}}


def pod(
    name: str,
    node_name: str = "",
    devices: str = "",
    *,
    namespace: str = "default",
    phase: str = "",
    containers: Sequence[Object] | None = None,
    inits: Sequence[Object] = (),
    scheduler: str = "hami-scheduler",
    annotations: Mapping[str, str] | None = None,
) -> Object:
    """A pod; `devices` is its allocation annotation of NVIDIA cards."""
    held: dict[str, str] = dict(annotations or {})
    if node_name:
        held |= {"hami.io/vgpu-node": node_name, "hami.io/vgpu-time": "1"}
    if devices:
        held["hami.io/vgpu-devices-allocated"] = devices
    spec: Object = {
        "schedulerName": scheduler,
        "containers": list(containers or [container("main", gpu=1, gpumem=2000)]),
    }
    if inits:
        spec["initContainers"] = list(inits)
    if node_name:
        spec["nodeName"] = node_name
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{namespace}-{name}",
            "resourceVersion": "1",
            "annotations": held,
            "creationTimestamp": "2026-08-20T10:00:00Z",
        },
        "spec": spec,
        "status": {"phase": phase or ("Running" if node_name else "Pending")},
    }


def quota(namespace: str, **limits: int) -> ResourceQuota:
    """A quota on NVIDIA resources."""
    hard = {f"limits.nvidia.com/{key}": str(limit) for key, limit in limits.items()}
    return msgspec.convert(
        {"metadata": {"name": "q", "namespace": namespace}, "spec": {"hard": hard}}, ResourceQuota
    )


@dataclass(slots=True)
class Reply:
    """What the application answers."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        text: str = self.json["error"]["message"]
        return text


@dataclass(slots=True)
class World:
    """A store, its picture, and the application on both."""

    config: str = ""
    store: Store = field(init=False)
    memory: Memory = field(default_factory=Memory)
    history: History = field(default_factory=History)
    access: Access = field(default_factory=NoCheck)
    older: OlderHistory | None = None
    now: float = NOW
    is_read: bool = True
    ticks: float = 0.0
    app: Dashboard | None = None

    def __post_init__(self) -> None:
        self.store = Store(Settings(), self.config, "test")

    def put(self, *objects: Object) -> None:
        """Feed nodes and pods."""
        for one in objects:
            raw = msgspec.Raw(json.dumps(one).encode())
            if "containers" in one["spec"]:
                self.store.put_pod(self.store.reader.pod(raw))
            else:
                self.store.put_node(self.store.reader.node(raw), self.now)

    def measured(self, name: str, text: str) -> None:
        """A node's monitor says this."""
        self.store.heard(name, read_monitor(text), self.now)

    @property
    def view(self) -> View:
        return build_view(self.store, self.memory, self.now)

    def application(self) -> Dashboard:
        """The application; the same one at every call, so that rates count."""
        if self.app is None:
            explainer = Explainer(self.store, None, lambda: self.now)
            api = Api(
                lambda: self.view if self.is_read else None,
                self.history,
                explainer,
                lambda: self.now,
                self.older,
            )
            self.app = Dashboard(
                api,
                self.access,
                Hosts(["dash.example.org"]),
                Rates(),
                lambda: self.ticks,
                alive=lambda: True,
                ready=lambda: self.is_read,
                metrics=lambda answered: b"hami_dashboard_answers_total %d\n" % sum(answered.values()),
            )
        return self.app

    async def request(
        self,
        target: str,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        host: str = "127.0.0.1:1",
    ) -> Reply:
        """One request, as uvicorn hands it over."""
        from urllib.parse import unquote

        path, _, query = target.partition("?")
        given = [(b"host", host.encode("latin-1"))] if host else []
        given += [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
        scope = {
            "type": "http",
            "method": method,
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": given,
            "client": ("127.0.0.1", 5),
        }
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await self.application()(scope, None, send)
        start = sent[0]
        names = {name.decode(): value.decode() for name, value in start["headers"]}
        return Reply(start["status"], names, b"".join(one.get("body", b"") for one in sent[1:]))

    def get(self, target: str, **options: Any) -> Reply:
        """`request` for tests without a loop."""
        return asyncio.run(self.request(target, **options))


def api(world: World, target: str) -> Any:
    """The JSON of a path below `/api/v1` that must be answered."""
    reply = world.get(f"/api/v1/{target}")
    assert reply.status == 200, reply.body
    return reply.json
