"""An allocator in mode ``lock`` on a fake cluster and a temporary host."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node_cards import U1

from hami.node.config import Settings
from hami.node.lock import LockReleaser
from hami.node.paths import HostPaths
from hami.node.plugin.allocator import Allocator
from hami.node.plugin.answer import Answer, Delivery
from hami.node.plugin.workspace import Workspace

ONE = f"{U1},NVIDIA,3000,30:;"
LOCK = "hami.io/mutex.lock"
NOW = 1_787_300_100.0


class Bench:
    """The allocator of one process after the other, and what lies on the host."""

    def __init__(self, cluster: Any, host: HostPaths) -> None:
        self.cluster = cluster
        self.host = host
        self.now = NOW
        self.workspace = Workspace(host)
        self.workspace.prepare_start()
        self.allocator = self.restarted()

    def restarted(self) -> Allocator:
        return Allocator(
            self.cluster, self.workspace, self.host, LockReleaser(self.cluster), clock=lambda: self.now
        )

    def lock(self, pod: str) -> None:
        self.cluster.node_annotations[LOCK] = f"2026-08-21T08:14:55Z,team-a,{pod}"

    async def allocate(self, *ids: Sequence[str], settings: Settings | None = None) -> tuple[Answer, ...]:
        delivery = Delivery(extras={}, device_nodes={})
        return await self.allocator.allocate(ids, settings or Settings(), delivery)

    def path(self, name: str) -> Path:
        return Path(self.host.root, "usr/local/vgpu", name)

    def mode_below_root(self, name: str) -> int:
        return stat.S_IMODE(Path(self.host.root, name).stat().st_mode)

    def link_below_root(self, name: str, target: str) -> None:
        Path(self.host.root, target).mkdir(mode=0o700)
        Path(self.host.root, name).symlink_to(Path(self.host.root, target))

    @property
    def is_locked(self) -> bool:
        return LOCK in self.cluster.node_annotations
