"""One node in allocation mode exact: the plugin's allocator, and kubelet's books, which a test fills."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from node_cards import U1, U2

from hami.node.config import Settings
from hami.node.exact.allocator import Call, ExactAllocator
from hami.node.exact.cdi import device_name, document_file
from hami.node.exact.documents import Documents
from hami.node.exact.holders import Holding
from hami.node.exact.owners import Owners
from hami.node.lock import LockReleaser
from hami.node.mig.manager import MigManager
from hami.node.paths import HostPaths
from hami.node.plugin.answer import Delivery
from hami.node.plugin.inventory import Card
from hami.node.plugin.workspace import Workspace
from hami.protocol.views import Pod, decode

GPU = "nvidia.com/gpu"
TO_ALLOCATE = "hami.io/vgpu-devices-to-allocate"
ALLOCATED = "hami.io/vgpu-devices-allocated"
LOCK = "hami.io/mutex.lock"
CARDS = (Card(0, U1, "A100", 1 << 35), Card(1, U2, "A100", 1 << 35))
PLAIN = Delivery(extras={}, device_nodes={})


class Pods:
    """A watch that has seen everything that is not held back."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.unseen: set[str] = set()
        self.stale: dict[str, Pod] = {}

    def seen(self, namespace: str, name: str) -> Pod | None:
        if name in self.stale:
            return self.stale[name]
        return None if name in self.unseen else self._decoded(namespace, name)

    def all(self) -> list[Pod]:
        found = (self._decoded(*key) for key in self._cluster.objects if key[1] not in self.unseen)
        return [pod for pod in found if pod is not None]

    async def synced(self) -> None:
        return None

    async def run(self) -> None:
        await asyncio.Event().wait()

    def _decoded(self, namespace: str, name: str) -> Pod | None:
        found = self._cluster.objects.get((namespace, name))
        return decode(msgspec.json.encode(found), Pod) if found is not None else None


class World:
    """One node in mode exact: the plugin, and kubelet's books, which a test fills."""

    def __init__(self, cluster: Any, host: HostPaths) -> None:
        self.cluster = cluster
        self.host = host
        self.held: dict[tuple[str, str], tuple[str, ...]] = {}
        self.state = Path(host.root) / "kubelet_internal_checkpoint"
        self.pods = Pods(cluster)
        self.documents = Documents(host)
        self.lists = 0
        self.settings = Settings()
        self.delivery = PLAIN
        self.cards = CARDS
        self.now = 1000.0
        self.mig: MigManager | None = None
        self.limit_s = 0.2
        """How long the plugin looks for the container of a call; most tests wait for its end."""
        Workspace(host).prepare_start()
        self.plugin = self.start()

    def start(self) -> ExactAllocator:
        """The plugin process as it is after a start, with nothing in memory."""
        owners = Owners(self.cluster, self, str(self.state), self.pods, limit_s=self.limit_s)
        return ExactAllocator(
            self.cluster,
            Workspace(self.host),
            self.documents,
            self.host,
            owners,
            self.pods,
            LockReleaser(self.cluster),
            clock=lambda: self.now,
            mig=self.mig,
        )

    async def holdings(self, resource: str) -> Sequence[Holding]:
        self.lists += 1
        return [
            Holding("team-a", pod, container, frozenset(ids)) for (pod, container), ids in self.held.items()
        ]

    def record(self, entries: Iterable[tuple[str, str, Sequence[str]]]) -> None:
        """Kubelet's own checkpoint, with init containers."""
        body = [
            {"PodUID": uid, "ContainerName": name, "ResourceName": GPU, "DeviceIDs": {"-1": list(ids)}}
            for uid, name, ids in entries
        ]
        self.state.write_bytes(msgspec.json.encode({"Data": {"PodDeviceEntries": body}}))

    async def pre_start(self, *ids: str) -> None:
        await self.plugin.prepare(
            Call(device_ids=ids, settings=self.settings, delivery=self.delivery, cards=self.cards)
        )
        await self.plugin.drain(30)

    async def started(self, pod: str, container: str = "app") -> dict[str, str]:
        """Start a container that holds its ids; the environment of its document."""
        ids = self.held[(pod, container)]
        await self.pre_start(*ids)
        return self.env(ids)

    def path(self, ids: Iterable[str]) -> Path:
        return Path(self.documents.directory) / document_file(device_name(ids))

    def edits(self, ids: Iterable[str]) -> Any:
        return json.loads(self.path(ids).read_bytes())["devices"][0]["containerEdits"]

    def env(self, ids: Iterable[str]) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in self.edits(ids)["env"])

    @property
    def directory(self) -> Path:
        """The CDI directory."""
        return Path(self.documents.directory)

    def checkpoint(self) -> Any:
        """What the plugin's checkpoint file says."""
        return json.loads(Path(self.host.checkpoint).read_bytes())

    def events(self, reason: str) -> list[str]:
        return [text for _, found, text in self.cluster.events if found == reason]

    async def listed(self) -> None:
        """Return once a call has asked kubelet."""
        async with asyncio.timeout(20):
            while not self.lists:  # noqa: ASYNC110 - a counter
                await asyncio.sleep(0)


def gpus(index: int, count: int = 1) -> tuple[str, ...]:
    """Ids of one container."""
    return tuple(f"{U1}-{index}-{position}" for position in range(count))


def documents_of(world: World) -> list[str]:
    """Names in the CDI directory."""
    return sorted(path.name for path in world.directory.iterdir()) if world.directory.exists() else []
