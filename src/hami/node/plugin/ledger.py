"""The allocation checkpoint in use, with its file and the limits files that are made from it."""

from __future__ import annotations

import asyncio
import logging

from hami.node.cluster import Cluster
from hami.node.errors import UnsafePathError
from hami.node.plugin.checkpoint import Checkpoint, CheckpointError
from hami.node.plugin.workspace import Workspace

log = logging.getLogger(__name__)


class Ledger:
    """Holds the :class:`Checkpoint`; its users decide what may happen at the same time."""

    def __init__(self, cluster: Cluster, workspace: Workspace) -> None:
        self.checkpoint = Checkpoint()
        self._cluster = cluster
        self._workspace = workspace
        self._saving = asyncio.Lock()
        self._changes = 0
        self._saved = 0

    async def restore(self, limits_files: bool) -> None:
        """At start: read the checkpoint and drop pods that are gone; with ``limits_files`` write the files of
        the others again.

        Raises :class:`KubeError` when the pods cannot be listed; nothing is dropped then.
        """
        try:
            self.checkpoint = await asyncio.to_thread(self._workspace.load_checkpoint)
        except (CheckpointError, UnsafePathError) as error:
            kept = await asyncio.to_thread(self._workspace.set_aside_checkpoint)
            log.warning("checkpoint.unreadable", extra={"cause": str(error), "kept_as": kept})
            text = (
                f"{error}; kept as {kept}: until its next start a running container keeps its limits, "
                "then it gets those of its pod's annotation, whoever wrote that"
            )
            self._cluster.node_event("Warning", "HAMiCheckpointUnreadable", text)
        gone = await self._gone()
        await asyncio.to_thread(self._restore_files, gone, limits_files)

    async def prune(self) -> None:
        """Forget the entries of pods that are gone."""
        if gone := await self._gone():
            self.checkpoint.drop(gone)
            await self.save()

    async def _gone(self) -> frozenset[str]:
        """UIDs of pods that are gone; a pod that gets its answer while the others are listed is none."""
        before = self.checkpoint.pods
        return before - {pod.uid for pod in await self._cluster.pods()}

    async def save(self) -> None:
        """Return once everything that was in the checkpoint at the call is on disk; callers that wait at the
        same time share one write. Raises ``OSError`` or :class:`UnsafePathError`.
        """
        self._changes += 1
        mine = self._changes
        async with self._saving:
            if self._saved >= mine:
                return
            covered = self._changes
            content = self.checkpoint.encode()
            await asyncio.to_thread(self._workspace.write_checkpoint, content)
            self._saved = covered

    def save_now(self) -> None:
        """Write the checkpoint file; blocks."""
        self._workspace.save_checkpoint(self.checkpoint)

    def _restore_files(self, gone: frozenset[str], limits_files: bool) -> None:
        self.checkpoint.drop(gone)
        for entry in self.checkpoint.entries if limits_files else ():
            if not entry.limits:
                continue  # MIG devices have no limits
            try:
                self._workspace.write_limits(entry.pod_uid, entry.container, entry.limits)
            except (OSError, UnsafePathError) as error:
                log.warning("limits.restore_failed", extra={"pod": entry.pod, "cause": str(error)})
        if gone:
            self.save_now()
