"""Wakes the reconciliation of MIG instances when pods of the node change."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import msgspec

from hami.kube.client import Client
from hami.kube.informer import Informer
from hami.kube.operations import pods_of_node
from hami.kube.resources import PODS
from hami.protocol.views import Pod

_SETTLE_S: Final = 0.5
"""Changes that come together are looked at together."""


class WatchedChanges:
    """:class:`hami.node.mig.manager.PodChanges` on a watch of the pods bound to the node."""

    def __init__(self, client: Client, node_name: str) -> None:
        self._changed = asyncio.Event()
        self._informer = Informer(
            client, PODS, msgspec.json.Decoder(Pod).decode, self, pods_of_node(node_name)
        )

    async def run(self) -> None:
        await self._informer.run()

    async def wait(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
                await asyncio.sleep(_SETTLE_S)
        self._changed.clear()

    def on_add(self, _pod: Pod, /) -> None:
        """A pod was bound: there is nothing to destroy."""

    def on_update(self, old: Pod, new: Pod, /) -> None:
        """A pod's containers, or the pod itself, may have ended."""
        if old.status != new.status or old.is_terminating != new.is_terminating:
            self._changed.set()

    def on_delete(self, _pod: Pod, /) -> None:
        """A pod is gone."""
        self._changed.set()
