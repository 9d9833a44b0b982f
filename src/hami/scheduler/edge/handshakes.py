"""Writing handshakes and labels to the API server: best effort, limited, the newest value per object wins."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from hami.kube.client import Client
from hami.kube.errors import KubeError, NotFound
from hami.kube.operations import patch_metadata
from hami.kube.ratelimit import Backoff, TokenBucket
from hami.kube.resources import Resource
from hami.scheduler.edge.leader import Leadership

_WRITES_PER_S, _WRITES_BURST = 20.0, 40
_BACKOFF_S = (1.0, 60.0)
_ATTEMPTS = 8
_PENDING = 50_000

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Write:
    annotations: dict[str, str | None] = field(default_factory=dict)
    labels: dict[str, str | None] = field(default_factory=dict)
    uid: str = ""
    attempts: int = 0


class MetadataWriter:
    """Merges wanted annotations and labels per object and writes them, the leader only."""

    def __init__(self, client: Client, leadership: Leadership, rng: random.Random | None = None) -> None:
        self.written = 0
        self.failed = 0
        self._client = client
        self._leadership = leadership
        self._bucket = TokenBucket(_WRITES_PER_S, _WRITES_BURST)
        self._backoff = Backoff(*_BACKOFF_S, rng or random.Random())  # noqa: S311 -- jitter, not a secret
        self._pending: OrderedDict[tuple[Resource, str, str], _Write] = OrderedDict()
        self._ready = asyncio.Event()

    def want(
        self,
        resource: Resource,
        name: str,
        *,
        namespace: str = "",
        uid: str = "",
        annotations: Mapping[str, str | None] | None = None,
        labels: Mapping[str, str | None] | None = None,
    ) -> None:
        """Write these soon; a follower forgets the wish at once (the leader has its own)."""
        if not self._leadership.is_leader() or len(self._pending) >= _PENDING:
            return
        write = self._pending.setdefault((resource, namespace, name), _Write())
        write.annotations.update(annotations or {})
        write.labels.update(labels or {})
        write.uid = uid or write.uid
        self._ready.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._ready.wait()
            while self._pending:
                await asyncio.sleep(self._bucket.reserve(time.monotonic()))
                target, write = self._pending.popitem(last=False)
                if self._leadership.is_leader():
                    await self._write(target, write)
            self._ready.clear()

    async def _write(self, target: tuple[Resource, str, str], write: _Write) -> None:
        resource, namespace, name = target
        try:
            await patch_metadata(
                self._client,
                resource,
                name,
                namespace=namespace,
                annotations=write.annotations or None,
                labels=write.labels or None,
                uid=write.uid,
            )
        except NotFound:
            return
        except KubeError as error:
            self.failed += 1
            write.attempts += 1
            log.warning(
                "metadata.write_failed", extra={"kind": resource.kind, "object": name, "reason": str(error)}
            )
            if write.attempts < _ATTEMPTS:
                self._again(target, write)
                await asyncio.sleep(self._backoff.next())
            return
        self.written += 1
        self._backoff.reset()

    def _again(self, target: tuple[Resource, str, str], write: _Write) -> None:
        """Back to the queue, under values that came meanwhile."""
        newer = self._pending.get(target)
        if newer is None:
            self._pending[target] = write
            return
        newer.annotations = write.annotations | newer.annotations
        newer.labels = write.labels | newer.labels
        newer.attempts = max(newer.attempts, write.attempts)
