"""The scheduler loop of the embedded cluster: towards our extender it behaves like kube-scheduler.

Pods are tried one after the other: the built-in filters first, then POST /filter with the names that are
left (nodeCacheCapable), then POST /bind or, without an extender, our own Binding. Binds run beside the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from hami.local.api.errors import ApiError
from hami.local.api.objects import Object, clone, dig, meta, name_of, namespace_of
from hami.local.api.recorder import Recorder
from hami.local.api.registry import Registry, set_condition
from hami.local.api.resources import NODES, PODS
from hami.local.api.store import Event
from hami.local.scheduling import node_fit
from hami.local.scheduling.scheduling_queue import SchedulingQueue

_LOG = logging.getLogger(__name__)
_MAX_ANSWER_BYTES = 32 * 1024 * 1024
_FINISHED = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class Extender:
    """One entry of ``extenders`` in a KubeSchedulerConfiguration; HTTPS is not verified."""

    url_prefix: str
    managed_resources: frozenset[str]
    filter_verb: str = "filter"
    bind_verb: str = "bind"
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Profile:
    """A scheduler name and the extender its pods go through. ``ignored`` is skipped by the built-in fit."""

    name: str
    extender: Extender | None = None
    ignored: frozenset[str] = field(default_factory=frozenset)


class _UnschedulableError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class SchedulerLoop:
    """Schedules the pods of ``profiles``; ``start`` and ``stop`` bracket its task.

    ``max_parked_s`` is kube-scheduler's ``--pod-max-in-unschedulable-pods-duration``.
    """

    def __init__(
        self,
        registry: Registry,
        clock: Callable[[], float],
        profiles: Collection[Profile],
        *,
        max_parked_s: float = 20.0,
    ) -> None:
        self._registry = registry
        self._store = registry.store
        self._clock = clock
        self._profiles = {profile.name: profile for profile in profiles}
        self._queue = SchedulingQueue(max_parked_s=max_parked_s)
        self._recorders = {name: Recorder(registry, clock, name) for name in self._profiles}
        self._wake = asyncio.Event()
        self._pods: dict[str, tuple[str, str]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._assumed: dict[str, tuple[str, Object]] = {}
        self._loop_task: asyncio.Task[None] | None = None
        self._cancel: Callable[[], None] | None = None

    async def start(self) -> None:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=32))
        self._cancel = self._store.subscribe(self._observe)
        for pod in self._store.list(PODS):
            self._consider(pod)
        self._loop_task = asyncio.create_task(self._run(), name="scheduler-loop")

    async def stop(self) -> None:
        if self._cancel is not None:
            self._cancel()
            self._cancel = None
        tasks = [*self._tasks, *([self._loop_task] if self._loop_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop_task = None
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _observe(self, key: str, event: Event) -> None:
        """Queue new pods, and count what kube-scheduler counts as a cluster event."""
        if key == "nodes":
            self._queue.cluster_event()
        elif key == "pods":
            if dig(event.obj, "spec", "nodeName"):
                self._forget(event.obj)
                self._queue.cluster_event()
            elif event.change == "DELETED":
                self._forget(event.obj)
            elif event.previous is None or _own_change(event.previous, event.obj):
                self._consider(event.obj)
        else:
            return
        self._wake.set()

    def _consider(self, pod: Object) -> None:
        spec = pod["spec"]
        if spec.get("nodeName") or spec.get("schedulerName") not in self._profiles:
            return
        if spec.get("schedulingGates") or dig(pod, "status", "phase") in _FINISHED:
            return
        if meta(pod).get("deletionTimestamp"):
            self._forget(pod)
            return
        uid = str(meta(pod)["uid"])
        self._pods[uid] = (namespace_of(pod), name_of(pod))
        self._queue.add(uid, int(spec.get("priority") or 0), self._clock())

    def _forget(self, pod: Object) -> None:
        uid = str(meta(pod)["uid"])
        self._queue.remove(uid)
        self._pods.pop(uid, None)
        self._assumed.pop(uid, None)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            uid = self._queue.pop(self._clock())
            if uid is not None:
                await self._try(uid)
                continue
            ready = self._queue.next_ready()
            pause = None if ready in (None, float("inf")) else max(float(ready or 0) - self._clock(), 0.005)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    async def _try(self, uid: str) -> None:
        pod = self._store.find(PODS, *self._pods[uid]) if uid in self._pods else None
        if pod is None or meta(pod)["uid"] != uid:
            self._queue.remove(uid)
            return
        profile = self._profiles[pod["spec"]["schedulerName"]]
        try:
            node = await self._select(profile, pod)
        except _UnschedulableError as error:
            self._queue.failed(uid, self._clock())
            await self._report(profile, pod, "Unschedulable", error.text)
            return
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self._queue.failed(uid, self._clock(), retry=True)
            await self._report(profile, pod, "SchedulerError", str(error) or type(error).__name__)
            return
        self._assumed[uid] = (node, pod)
        task = asyncio.create_task(self._bind(profile, pod, node), name=f"bind-{name_of(pod)}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _select(self, profile: Profile, pod: Object) -> str:
        """The node to bind to. Raises :class:`_UnschedulableError` with the sentence for the user."""
        nodes = self._store.list(NODES)
        by_node: dict[str, list[Object]] = {}
        for other in self._store.list(PODS):
            if dig(other, "spec", "nodeName") and dig(other, "status", "phase") not in _FINISHED:
                by_node.setdefault(other["spec"]["nodeName"], []).append(other)
        for name, other in self._assumed.values():
            by_node.setdefault(name, []).append(other)
        reasons: dict[str, tuple[str, ...]] = {}
        feasible: list[str] = []
        for node in nodes:
            unfit = node_fit.check(pod, node, by_node.get(name_of(node), ()), profile.ignored)
            if unfit is None:
                feasible.append(name_of(node))
            else:
                reasons[name_of(node)] = unfit.reasons
        if not nodes:
            raise _UnschedulableError("no nodes available to schedule pods")
        if feasible and profile.extender is not None and _is_managed(profile.extender, pod):
            feasible, rejected = await self._ask_filter(profile.extender, pod, feasible)
            reasons.update((name, (reason,)) for name, reason in rejected.items())
        if not feasible:
            raise _UnschedulableError(node_fit.message(len(nodes), reasons))
        return min(feasible, key=lambda name: (len(by_node.get(name, ())), name))

    async def _ask_filter(
        self, extender: Extender, pod: Object, names: list[str]
    ) -> tuple[list[str], dict[str, str]]:
        answer = await self._post(
            extender, extender.filter_verb, {"Pod": pod, "Nodes": None, "NodeNames": names}
        )
        if answer.get("Error"):
            raise ValueError(str(answer["Error"]))
        left = answer.get("NodeNames") or []
        url = extender.url_prefix
        unknown = [name for name in left if name not in names]
        if unknown:
            raise ValueError(f"extender {url} answered with nodes that were not sent: {unknown}")
        rejected = {**(answer.get("FailedNodes") or {}), **(answer.get("FailedAndUnresolvableNodes") or {})}
        return left, rejected

    async def _bind(self, profile: Profile, pod: Object, node: str) -> None:
        uid = str(meta(pod)["uid"])
        try:
            if profile.extender is not None and _is_managed(profile.extender, pod):
                answer = await self._post(
                    profile.extender,
                    profile.extender.bind_verb,
                    {"PodName": name_of(pod), "PodNamespace": namespace_of(pod), "PodUID": uid, "Node": node},
                )
                if answer.get("Error"):
                    raise ValueError(str(answer["Error"]))  # noqa: TRY301
            else:
                self._registry.bind(
                    namespace_of(pod), name_of(pod), {"metadata": {"uid": uid}, "target": {"name": node}}
                )
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, ApiError) as error:
            self._queue.failed(uid, self._clock(), retry=True)
            self._wake.set()
            text = f'running Bind plugin "DefaultBinder": {error or type(error).__name__}'
            await self._report(profile, pod, "SchedulerError", f"binding rejected: {text}")
            return
        finally:
            self._assumed.pop(uid, None)
        await self._recorders[profile.name].record(
            pod, "Normal", "Scheduled",
            f"Successfully assigned {namespace_of(pod)}/{name_of(pod)} to {node}",
        )  # fmt: skip

    async def _report(self, profile: Profile, pod: Object, reason: str, text: str) -> None:
        """Event and condition of a pod that could not be placed."""
        await self._recorders[profile.name].record(pod, "Warning", "FailedScheduling", text)

        def change(current: Object) -> Object:
            updated: Object = clone(current)
            set_condition(updated, "PodScheduled", "False", now=self._clock(), reason=reason, message=text)
            return updated

        try:
            await self._registry.update(PODS, namespace_of(pod), name_of(pod), change, subresource="status")
        except ApiError as error:
            _LOG.info("condition of pod %s/%s not set: %s", namespace_of(pod), name_of(pod), error)

    async def _post(self, extender: Extender, verb: str, body: Any) -> Object:
        if self._session is None:
            raise ValueError("the scheduler loop is stopped")
        url = f"{extender.url_prefix.rstrip('/')}/{verb}"
        async with asyncio.timeout(extender.timeout_s):
            async with self._session.post(
                url, data=msgspec.json.encode(body), headers={"Content-Type": "application/json"}
            ) as response:
                if response.status != 200:
                    raise ValueError(f"failed {verb} with extender at URL {url}, code {response.status}")
                data = await response.content.read(_MAX_ANSWER_BYTES)
                while not response.content.at_eof() and len(data) < _MAX_ANSWER_BYTES:
                    data += await response.content.read(_MAX_ANSWER_BYTES - len(data))
        answer = msgspec.json.decode(data)
        if not isinstance(answer, dict):
            raise ValueError(f"extender at URL {url} did not answer with an object")  # noqa: TRY004
        return answer


def _is_managed(extender: Extender, pod: Object) -> bool:
    """Whether a container or init container names a resource of the extender in requests or limits."""
    return any(
        name in extender.managed_resources
        for field_name in ("initContainers", "containers")
        for container in dig(pod, "spec", field_name) or []
        for side in ("requests", "limits")
        for name in dig(container, "resources", side) or {}
    )


def _own_change(before: Object, after: Object) -> bool:
    """Whether a pod's update counts for the scheduler: anything but status and resourceVersion."""

    def essence(pod: Object) -> Object:
        metadata = {key: value for key, value in meta(pod).items() if key != "resourceVersion"}
        return {"metadata": metadata, "spec": pod.get("spec")}

    return essence(before) != essence(after)
