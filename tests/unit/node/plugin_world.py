"""The whole device plugin for tests: a kubelet over real gRPC, a fake API server and NVML, a host root."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from mig_world import FakeGiven

from hami.node.api import deviceplugin_v1beta1_pb2 as pb
from hami.node.api import deviceplugin_v1beta1_pb2_grpc as rpc
from hami.node.config import Settings
from hami.node.lock import LockReleaser
from hami.node.mig.driver import MigDriver
from hami.node.mig.instances import MigCards
from hami.node.mig.journal import Journal
from hami.node.mig.manager import MigManager
from hami.node.mig.side import MigSide
from hami.node.paths import HostPaths
from hami.node.plugin.allocator import Allocator
from hami.node.plugin.answer import Delivery
from hami.node.plugin.broker import BrokerProcess
from hami.node.plugin.health_rules import XidRules
from hami.node.plugin.options import PluginOptions
from hami.node.plugin.service import DevicePlugin
from hami.node.plugin.workspace import Workspace


class Kubelet(rpc.RegistrationServicer):  # type: ignore[misc]
    """The registration service of kubelet; connects back like kubelet does."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "kubelet.sock"
        self.folder = folder
        self.registered: list[Any] = []
        self.refusals = 0
        self._server: Any = None

    async def Register(self, request: Any, context: Any) -> Any:
        if self.refusals:
            self.refusals -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        self.registered.append(request)
        return pb.Empty()

    async def start(self) -> None:
        """As after a restart: every socket in the directory is removed first."""
        for path in self.folder.iterdir():
            if path.is_socket():
                path.unlink()
        self._server = grpc.aio.server()
        rpc.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    @asynccontextmanager
    async def plugin(self) -> AsyncIterator[Any]:
        """A stub on the endpoint registered last."""
        path = self.folder / self.registered[-1].endpoint
        options = (("grpc.default_authority", "localhost"),)
        async with grpc.aio.insecure_channel(f"unix:{path}", options=options) as channel:
            yield rpc.DevicePluginStub(channel)


class PodChanges:
    """Pods change when a test says so."""

    def __init__(self) -> None:
        self.happened = asyncio.Event()

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def wait(self, timeout_s: float) -> None:
        await self.happened.wait()
        self.happened.clear()


MINORS = {
    (card, instance, compute): 100 * (card + 1) + 2 * instance + compute + 1
    for card in range(2)
    for instance in range(1, 9)
    for compute in (-1, 0)
}
"""Capability minors of two cards."""


class Node:
    """Everything of one node; with a ``broker`` its gate is on, with a ``mig`` driver it has MIG."""

    def __init__(
        self,
        cluster: Any,
        nvml: Any,
        root: Path,
        broker: BrokerProcess | None = None,
        *,
        mig: MigDriver | None = None,
        **options: Any,
    ) -> None:
        self.cluster = cluster
        self.nvml = nvml
        self.root = root
        self.paths = paths = HostPaths(str(root), "/usr/local", "v2.10.0")
        vgpu = root / "usr/local/vgpu"
        vgpu.mkdir(parents=True)
        (vgpu / "libvgpu.so").write_bytes(b"library")
        (vgpu / "ld.so.preload").write_text("/usr/local/vgpu/libvgpu.so\n")
        folder = root / "var/lib/kubelet/device-plugins"
        folder.mkdir(parents=True)
        self.kubelet = Kubelet(folder)
        self.settings = Settings(split_count=3)
        usual = {
            "paths": paths,
            "kubelet_socket": paths.kubelet_socket(None),
            "delivery": Delivery(broker=broker is not None, extras={}, device_nodes={}),
            "rules": XidRules(),
            "retry_s": 0.2,
            "register_interval_s": 30,
        }
        chosen = PluginOptions(**{**usual, **options})
        workspace = Workspace(paths)
        self.changes = PodChanges()
        side = None
        if mig is not None:
            boot = root / "boot_id"
            boot.write_text("boot-1")
            cards = MigCards(mig, workspace.mig_lock)
            journal = Journal(paths, str(boot))
            manager = MigManager(cards, cluster, journal, FakeGiven(), minors=lambda: MINORS)
            side = MigSide(mig, manager, lambda: self.changes)
        allocator = Allocator(
            cluster, workspace, paths, LockReleaser(cluster), mig=side.manager if side else None
        )
        self.plugin = DevicePlugin(
            chosen, lambda: self.settings, cluster, nvml, allocator, workspace, broker=broker, mig=side
        )
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Node:
        await self.kubelet.start()
        self.task = asyncio.create_task(self.plugin.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.plugin.stop()
        assert self.task is not None
        await asyncio.wait({self.task})
        await self.kubelet.stop()
