"""Chooses the allocation mode at start: versions of the node, then kubelet and the CDI directory."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from hami.node.cluster import Cluster
from hami.node.errors import UnsafePathError
from hami.node.exact.documents import Documents
from hami.node.exact.errors import PodResourcesError
from hami.node.exact.mode import MODE_AUTO, refusal, version_obstacle
from hami.node.exact.owners import HoldingSource
from hami.protocol.keys import ALLOCATION_MODE, MODE_EXACT, MODE_LOCK

_TRIES: Final = 20
_PAUSE_S: Final = 0.5

log = logging.getLogger(__name__)


class ModeChooser:
    """``wanted`` is the value of ``--allocation-mode``; ``pause_s`` lies between two tries of kubelet."""

    def __init__(
        self,
        wanted: str,
        cluster: Cluster,
        kubelet: HoldingSource,
        documents: Documents,
        *,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._wanted = wanted
        self._cluster = cluster
        self._kubelet = kubelet
        self._documents = documents
        self._pause_s = pause_s

    async def choose(self) -> str:
        """``lock`` or ``exact``; the reason is logged.

        Raises ``KubeError`` or ``ProtocolError`` while the node cannot be read, :class:`PodResourcesError`
        while kubelet does not answer on a node that was ``exact`` before: its containers could not start
        again otherwise; and :class:`SettingsError` for an explicit ``exact`` that cannot work here.
        """
        if self._wanted == MODE_LOCK:
            log.info("allocation_mode", extra={"mode": MODE_LOCK, "reason": "--allocation-mode=lock"})
            return MODE_LOCK
        reason = await self._obstacle()
        if reason and self._wanted != MODE_AUTO:
            raise refusal(reason)
        mode = MODE_LOCK if reason else MODE_EXACT
        log.info("allocation_mode", extra={"mode": mode, "reason": reason or "kubelet and runtime can do it"})
        return mode

    async def _obstacle(self) -> str:
        node = await self._cluster.node()
        system = node.system
        obstacle = version_obstacle(system.kubelet_version, system.container_runtime_version)
        if obstacle is not None and (obstacle.known or self._wanted == MODE_AUTO):
            return obstacle.text
        if problem := await self._cdi_obstacle():
            return problem
        silence = await self._kubelet_obstacle()
        if silence and node.annotations.get(ALLOCATION_MODE) == MODE_EXACT:
            raise PodResourcesError(silence)
        return silence

    async def _cdi_obstacle(self) -> str:
        try:
            problem = await asyncio.to_thread(self._documents.probe)
        except UnsafePathError as error:
            problem = str(error)
        return f"the CDI directory cannot be written: {problem}" if problem else ""

    async def _kubelet_obstacle(self) -> str:
        """Kubelet may be restarting: it is asked for some seconds."""
        text = ""
        for _ in range(_TRIES):
            try:
                await self._kubelet.holdings("")
            except PodResourcesError as error:
                text = str(error)
            else:
                return ""
            await asyncio.sleep(self._pause_s)
        return text
