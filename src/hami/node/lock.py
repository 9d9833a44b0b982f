"""Giving a node lock back: runs the release machine of ``hami.protocol.lock`` against the API server."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from hami.kube.errors import KubeError
from hami.node.cluster import Cluster
from hami.protocol.errors import ProtocolError
from hami.protocol.keys import NODE_LOCK
from hami.protocol.lock import (
    Done,
    Failed,
    GetNode,
    LockEvent,
    LockOwner,
    NodeRead,
    Patched,
    PatchFailed,
    PatchNode,
    ReadFailed,
    Release,
    Sleep,
    Slept,
)
from hami.protocol.views import Pod

log = logging.getLogger(__name__)


class LockReleaser:
    """Releases the lock of this node for a pod that holds it; a lock of somebody else stays."""

    def __init__(self, cluster: Cluster, rng: random.Random | None = None) -> None:
        self._cluster = cluster
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not a secret

    async def release(self, pod: Pod) -> bool:
        """True once nothing of ``pod`` is locked; False, logged, when that could not be settled."""
        machine = Release(LockOwner(pod.namespace, pod.name))
        state, actions = machine.start(time.time())
        while True:
            action = actions[-1]
            match action:
                case Done():
                    return True
                case GetNode():
                    event = await self._read()
                case PatchNode():
                    event = await self._patch(action)
                case Sleep():
                    await asyncio.sleep(action.seconds * (1 + action.jitter * self._rng.random()))
                    event = Slept()
                case _:
                    reason = action.message if isinstance(action, Failed) else repr(action)
                    log.warning("lock.release_failed", extra={"cause": reason})
                    return False
            state, actions = machine.step(state, event, time.time())

    async def _read(self) -> LockEvent:
        try:
            node = await self._cluster.node()
        except (KubeError, ProtocolError) as error:
            return ReadFailed(str(error))
        return NodeRead(node.annotations.get(NODE_LOCK), node.resource_version)

    async def _patch(self, action: PatchNode) -> LockEvent:
        try:
            await self._cluster.annotate_node({action.key: action.value}, action.resource_version)
        except KubeError as error:
            return PatchFailed(str(error))
        return Patched()
