"""One node in mode mig on a driver in memory, and the manager of its instances."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from mig_world import NOTE, FakeGiven, FakeMig, mig_pod, slot
from node_cards import U1, U2

from hami.kube.errors import KubeError
from hami.node.config import MigAllowed
from hami.node.mig.instances import MigCards
from hami.node.mig.journal import Journal
from hami.node.mig.manager import MigManager
from hami.node.paths import HostPaths
from hami.protocol.views import Pod, decode

ALLOWED = (MigAllowed(("A100",), ("1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb")),)
Make = Callable[..., dict[str, Any]]


class World:
    """One node in mode mig: cards, pods, the manager of one process after the other."""

    def __init__(self, cluster: Any, host: HostPaths, make_pod: Make) -> None:
        self.cluster = cluster
        self.host = host
        self.make_pod = make_pod
        self.driver = FakeMig(U1, U2)
        self.given = FakeGiven()
        self.now = 0.0
        self.changing = 0
        self.boot = Path(host.root, "boot_id")
        self.boot.write_text("boot-1\n")
        self.journal = Path(host.root, "usr/local/vgpu/mig-instances.json")
        self.manager = self.process()

    def process(self) -> MigManager:
        """A new process: nothing but the journal is known."""

        @contextmanager
        def applying() -> Any:
            self.changing += 1
            yield

        wrapped: Callable[[], AbstractContextManager[None]] = applying
        self.manager = MigManager(
            MigCards(self.driver, wrapped),
            self.cluster,
            Journal(self.host, str(self.boot)),
            self.given,
            clock=lambda: self.now,
            retry_s=0.001,
            patience_s=0.0,
        )
        return self.manager

    async def start(self) -> None:
        await self.process().prepare(self.driver.gpus())

    def add(self, name: str, *reservations: dict[str, object], **more: Any) -> None:
        self.cluster.add(mig_pod(self.make_pod, name, *reservations, **more))

    def pod(self, name: str) -> Pod:
        return decode(msgspec.json.encode(self.cluster.objects["team-a", name]), Pod)

    async def realise(self, name: str, *uuids: str, position: int = 0) -> list[str]:
        """The MIG UUIDs of one container of a pod."""
        found = await self.manager.realise(self.pod(name), [(position, slot(*(uuids or (U1,))))])
        return [each.uuid for each in found.of(position)]

    def end(self, name: str, phase: str = "Succeeded") -> None:
        self.cluster.objects["team-a", name]["status"]["phase"] = phase

    def ids(self, name: str, position: int = 0) -> tuple[str, int, int]:
        item = json.loads(self.cluster.notes(name)[NOTE])[position]
        return item["migUUID"], item["gpuInstanceID"], item["computeInstanceID"]

    def events(self, reason: str) -> list[str]:
        return [text for _, found, text in self.cluster.events if found == reason]


def conflicts(count: int, error: KubeError) -> Callable[[Any], KubeError | None]:
    """For the failures of a fake cluster: the first ``count`` times this one."""
    left = [error] * count
    return lambda _: left.pop() if left else None
