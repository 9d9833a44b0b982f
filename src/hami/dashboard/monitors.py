"""Asks every node's monitor for its metrics, and keeps what it says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal

import aiohttp

from hami.answers.errors import AnswerError, MetricsError
from hami.answers.lists import list_plain
from hami.answers.monitors import metrics_port, proxied_metrics, whole_body
from hami.answers.ours import PLUGINS
from hami.dashboard.reading import read_monitor
from hami.dashboard.shapes import Source
from hami.dashboard.store import Store
from hami.kube.client import Client
from hami.kube.errors import KubeError
from hami.kube.operations import Selection
from hami.kube.resources import PODS
from hami.protocol.members import map_of

Way = Literal["direct", "proxy", "none"]

EVERY_S: Final = 30.0
TIMEOUT_S: Final = 5.0
MAX_BYTES: Final = 8 << 20
_AT_ONCE: Final = 16

log = logging.getLogger(__name__)

Pod = Mapping[str, Any]


def plain_session() -> aiohttp.ClientSession:
    """A session whose answers come as they are counted: a small compressed one may become any size."""
    return aiohttp.ClientSession(auto_decompress=False, headers={"Accept-Encoding": "identity"})


class Monitors:
    """One round asks all; `direct`: at pod addresses, `proxy`: through the API server. Nodes in `urls` are
    asked there."""

    def __init__(
        self,
        store: Store,
        client: Client,
        session: aiohttp.ClientSession,
        *,
        way: Way,
        namespace: str,
        clock: Callable[[], float],
        urls: Mapping[str, str] | None = None,
    ) -> None:
        self._store = store
        self._client = client
        self._session = session
        self._way = way
        self._namespace = namespace
        self._clock = clock
        self._urls = dict(urls or {})

    async def round(self) -> None:
        """Ask every monitor once. Failures are kept with the node, or with the source."""
        gate = asyncio.Semaphore(_AT_ONCE)
        await asyncio.gather(*(self._one(node, self._text_of(url), gate) for node, url in self._urls.items()))
        if self._way == "none":
            self._store.report(Source("monitorPods", "off", "switched off with --monitors=none"))
            return
        try:
            pods = await list_plain(self._client, PODS, Selection(self._namespace, label_selector=PLUGINS))
        except (KubeError, AnswerError) as error:
            self._store.report(Source("monitorPods", "stale", str(error)[:300]))
            return
        running = [pod for pod in pods if _is_running(pod)]
        where = f"namespace {self._namespace}" if self._namespace else "any namespace"
        reason = f"{len(running)} found" if running else f"no running device plugin in {where}"
        self._store.report(Source("monitorPods", "ok" if running else "missing", reason))
        by_node = {str(map_of(pod, "spec").get("nodeName") or ""): pod for pod in running}
        names = [name for name in by_node if name in self._store.nodes and name not in self._urls]
        await asyncio.gather(*(self._one(name, self._read(by_node[name]), gate) for name in names))

    async def _one(self, node: str, text: Awaitable[bytes], gate: asyncio.Semaphore) -> None:
        try:
            async with gate:
                decoded = (await text).decode("utf-8", "replace")
                reading = await asyncio.to_thread(read_monitor, decoded)
        except (KubeError, aiohttp.ClientError, TimeoutError, MetricsError, ValueError) as error:
            self._store.not_heard(node, str(error) or type(error).__name__)
        else:
            self._store.heard(node, reading, self._clock())

    async def _read(self, pod: Pod) -> bytes:
        if self._way == "proxy":
            return await proxied_metrics(self._client, pod, metrics_port(pod), TIMEOUT_S, MAX_BYTES)
        address = str(map_of(pod, "status").get("podIP") or "")
        if not address:
            raise MetricsError("the monitor's pod has no address yet")
        host = f"[{address}]" if ":" in address else address
        return await self._text_of(f"http://{host}:{metrics_port(pod)}/metrics")

    async def _text_of(self, url: str) -> bytes:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with self._session.get(url, timeout=timeout, allow_redirects=False) as answer:
            if answer.status != 200:
                raise MetricsError(f"the monitor answers HTTP {answer.status}")
            return await whole_body(answer, MAX_BYTES)


def _is_running(pod: Pod) -> bool:
    return (
        map_of(pod, "status").get("phase") == "Running"
        and not map_of(pod, "metadata").get("deletionTimestamp")
        and bool(map_of(pod, "spec").get("nodeName"))
    )
