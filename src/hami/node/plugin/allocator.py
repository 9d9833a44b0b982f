"""One Allocate call after the other: find the pod, prepare files, answer, mark, release the lock (mode
``lock``).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hami.kube.errors import ApiError, KubeError, NotFound
from hami.node.cluster import Cluster
from hami.node.config import Settings
from hami.node.errors import AllocateError, NoBindingPodError, UnsafePathError
from hami.node.lock import LockReleaser
from hami.node.mig.answer import instances_answer
from hami.node.mig.manager import MigManager
from hami.node.paths import HostPaths
from hami.node.plugin.answer import (
    Answer,
    Delivery,
    build_answer,
    cache_path,
    control_disabled,
    limits_table,
    reserved_variables,
)
from hami.node.plugin.checkpoint import Entry, checkpoint_devices
from hami.node.plugin.ledger import Ledger
from hami.node.plugin.pending import Popped, Taken, failure, find_pod, lock_is_ahead, remaining, take
from hami.node.plugin.preferred import Choice, align, preferred_for_containers
from hami.node.plugin.workspace import Workspace, tell_mount_point
from hami.node.running import Running
from hami.protocol.allocation import Slot, is_consumed
from hami.protocol.errors import ProtocolError
from hami.protocol.keys import MIG_ALLOCATIONS, NODE_LOCK
from hami.protocol.views import Pod

LOOKUP_LIMIT_S: Final = 8.0
REPEAT_S: Final = 120.0
REPEATS_KEPT: Final = 64
_RETRY_S: Final = 0.2
_WRITES: Final = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Given:
    pod: Pod
    answers: tuple[Answer, ...]
    at: float


@dataclass(frozen=True, slots=True)
class _Job:
    """One container of a call, decided: its devices in final order and the table of its limits."""

    popped: Popped
    devices: Slot
    entry: Entry
    is_new: bool


class Allocator:
    """Answers Allocate and GetPreferredAllocation; one allocation at a time per process.

    An allocation that has begun is finished even if kubelet hangs up: its answer is then kept for a
    repeated call.
    """

    def __init__(
        self,
        cluster: Cluster,
        workspace: Workspace,
        paths: HostPaths,
        lock: LockReleaser,
        *,
        lock_timeout_s: float = 300.0,
        clock: Callable[[], float] = time.time,
        new_name: Callable[[], str] = lambda: str(uuid.uuid4()),
        mig: MigManager | None = None,
    ) -> None:
        self._cluster = cluster
        self._workspace = workspace
        self._paths = paths
        self._lock = lock
        self._lock_timeout_s = lock_timeout_s
        self._clock = clock
        self._new_name = new_name
        self._mig = mig
        self._serial = asyncio.Lock()
        self._ledger = Ledger(cluster, workspace)
        self._recent: OrderedDict[tuple[tuple[str, ...], ...], _Given] = OrderedDict()
        self._running = Running()

    async def restore(self, limits_files: bool) -> None:
        """At start: read the checkpoint and drop pods that are gone; with ``limits_files`` write the files of
        the others again.

        Raises :class:`KubeError` when the pods cannot be listed; nothing is dropped then.
        """
        async with self._serial:
            await self._ledger.restore(limits_files)

    async def prune(self) -> None:
        """Forget the checkpoint entries of pods that are gone."""
        async with self._serial:
            await self._ledger.prune()

    async def allocate(
        self, requests: Sequence[Sequence[str]], settings: Settings, delivery: Delivery
    ) -> tuple[Answer, ...]:
        """Answers in request order; ``requests`` are the device ids per container.

        Raises :class:`NoBindingPodError` (nothing was written) or :class:`AllocateError` (the pod is marked
        as failed).
        """
        return await asyncio.shield(self._running.start(self._allocate(requests, settings, delivery)))

    async def preferred(self, choices: Sequence[Choice]) -> tuple[tuple[str, ...], ...]:
        """Preferred ids per container; empty whenever the pod or its allocation is not known."""
        try:
            pod = await self._find([choice.size for choice in choices])
            entries = [slot for slot in remaining(pod) if slot]
        except (NoBindingPodError, AllocateError) as error:
            log.info("preferred.none", extra={"cause": str(error)})
            return ()
        return preferred_for_containers(choices, entries)

    async def drain(self, timeout_s: float) -> None:
        """Wait for allocations that have begun, at most ``timeout_s``."""
        await self._running.drain(timeout_s)

    async def _allocate(
        self, requests: Sequence[Sequence[str]], settings: Settings, delivery: Delivery
    ) -> tuple[Answer, ...]:
        if not requests or not all(requests):
            raise AllocateError("an Allocate call needs at least one device id per container")
        async with self._serial:
            key = tuple(tuple(sorted(ids)) for ids in requests)
            repeated = await self._repeated(key)
            if repeated is not None:
                return repeated
            pod = await self._find([len(ids) for ids in requests])
            jobs: list[_Job] = []
            try:
                answers = await self._answer(pod, requests, settings, delivery, jobs)
            except Exception as error:
                await self._fail(pod, error, jobs)
                if isinstance(error, AllocateError):
                    raise
                raise AllocateError(str(error) or type(error).__name__) from error
            self._remember(key, _Given(pod, answers, self._clock()))
            return answers

    async def _answer(
        self,
        pod: Pod,
        requests: Sequence[Sequence[str]],
        settings: Settings,
        delivery: Delivery,
        jobs: list[_Job],
    ) -> tuple[Answer, ...]:
        taken = take(pod, [len(ids) for ids in requests])
        if settings.is_dynamic_mig:
            return await self._answer_instances(pod, taken, delivery)
        for ids, popped in zip(requests, taken.containers, strict=True):
            devices = align(popped.devices, ids) if settings.preferred_allocation else popped.devices
            jobs.append(self._decide(pod, popped, devices, settings, delivery))
        for job in jobs:
            self._judge_environment(pod, job, settings)
        answers = await asyncio.to_thread(self._prepare, pod, jobs, settings, delivery)
        tell_mount_point(self._cluster, self._workspace)
        await self._consume(pod, taken)
        return answers

    async def _answer_instances(self, pod: Pod, taken: Taken, delivery: Delivery) -> tuple[Answer, ...]:
        """Mode ``mig``: an instance for every device; neither library nor files. What was made goes again
        when the rest fails.
        """
        if self._mig is None:
            raise AllocateError("this plugin makes no MIG instances")
        realised = await self._mig.realise(pod, [(each.position, each.devices) for each in taken.containers])
        try:
            answers = [
                await asyncio.to_thread(instances_answer, realised.of(each.position), self._mig, delivery)
                for each in taken.containers
            ]
            await self._consume(pod, taken)
        except BaseException:
            await self._mig.undo(realised)
            raise
        return tuple(answers)

    async def _consume(self, pod: Pod, taken: Taken) -> None:
        """Write what is left to allocate; after the last container the pod is served."""
        await self._annotate(pod, taken.annotations)
        if taken.is_last:
            await self._lock.release(pod)
        log.info(
            "allocate.answered",
            extra={
                "pod": f"{pod.namespace}/{pod.name}",
                "containers": [each.container.name for each in taken.containers],
                "last": taken.is_last,
            },
        )

    def _decide(
        self, pod: Pod, popped: Popped, devices: Slot, settings: Settings, delivery: Delivery
    ) -> _Job:
        container = popped.container
        cache = cache_path(self._paths, self._new_name())
        fresh = Entry(
            pod.uid,
            pod.namespace,
            pod.name,
            container.name,
            checkpoint_devices(devices),
            limits_table(devices, container, settings, cache, delivery),
        )
        first = self._ledger.checkpoint.get(pod.uid, container.name)
        if first is not None and first.devices != fresh.devices:
            raise AllocateError(
                f"container {container.name} was given {first.devices} first, "
                f"its annotation now says {fresh.devices}"
            )
        return _Job(popped, devices, first or fresh, first is None)

    def _judge_environment(self, pod: Pod, job: _Job, settings: Settings) -> None:
        names = reserved_variables(job.popped.container, job.entry.limits)
        if not names or settings.reserved_env == "ignore":
            return
        text = (
            f"container {job.entry.container} sets variables of the device limits itself: {', '.join(names)}"
        )
        if settings.reserved_env == "deny":
            raise AllocateError(text)
        self._cluster.pod_event(pod, "Warning", "HAMiReservedEnv", text)

    def _prepare(
        self, pod: Pod, jobs: Sequence[_Job], settings: Settings, delivery: Delivery
    ) -> tuple[Answer, ...]:
        """Files of all containers, in a thread; nothing is answered unless everything is in place."""
        workspace = self._workspace
        delivery = replace(delivery, broker=workspace.prepare_lock_parent(delivery.broker))
        answers = []
        for job in jobs:
            container = job.popped.container
            workspace.make_cache_directory(pod.uid, container.name)
            if delivery.limits_file:
                workspace.write_limits(pod.uid, container.name, job.entry.limits)
                workspace.check_limits(pod.uid, container.name)
            files = workspace.find_sources(preload=not control_disabled(container))
            answers.append(
                build_answer(
                    job.devices,
                    container,
                    pod.uid,
                    job.entry.limits,
                    settings,
                    self._paths,
                    files,
                    delivery,
                )
            )
        for job in jobs:
            self._ledger.checkpoint.add(job.entry)
        self._ledger.save_now()
        return tuple(answers)

    async def _fail(self, pod: Pod, error: Exception, jobs: Sequence[_Job]) -> None:
        reason = str(error) or type(error).__name__
        log.warning(
            "allocate.failed",
            extra={"pod": f"{pod.namespace}/{pod.name}", "cause": reason},
            exc_info=None
            if isinstance(error, AllocateError | UnsafePathError | KubeError | OSError)
            else error,
        )
        try:
            notes = failure(reason)
            if MIG_ALLOCATIONS in pod.annotations:
                # without the ids of instances that do not exist any more
                notes[MIG_ALLOCATIONS] = pod.annotations[MIG_ALLOCATIONS]
            await self._annotate(pod, notes)
        except KubeError as patch_error:
            log.warning("allocate.mark_failed", extra={"cause": str(patch_error)})
        await self._lock.release(pod)
        self._cluster.pod_event(pod, "Warning", "AllocateFailed", reason)
        await asyncio.to_thread(self._discard, [job.entry for job in jobs if job.is_new])

    async def _annotate(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        """Write annotations; repeated (it is the same write) while the API server is only disturbed.

        Raises the last :class:`KubeError`.
        """
        for attempt in range(1, _WRITES + 1):
            try:
                await self._cluster.annotate_pod(pod, annotations)
            except KubeError as error:
                refused = isinstance(error, ApiError) and error.status < 500 and error.status != 429
                if refused or attempt == _WRITES:
                    raise
                log.info("allocate.write_repeated", extra={"cause": str(error), "attempt": attempt})
            else:
                return
            await asyncio.sleep(_RETRY_S * attempt)

    def _discard(self, entries: Sequence[Entry]) -> None:
        """Remove what this call made; every part is tried."""
        steps: list[Callable[[], None]] = [
            functools.partial(self._workspace.discard, *entry.key) for entry in entries
        ]
        for entry in entries:
            self._ledger.checkpoint.forget(*entry.key)
        if entries:
            steps.append(self._ledger.save_now)
        for step in steps:
            try:
                step()
            except (OSError, UnsafePathError) as error:
                log.warning("allocate.cleanup_failed", extra={"cause": str(error)})

    async def _find(self, wanted: Sequence[int]) -> Pod:
        """The pod of a call, with retries of API errors, in at most :data:`LOOKUP_LIMIT_S` seconds."""
        last: Exception | None = None
        try:
            async with asyncio.timeout(LOOKUP_LIMIT_S):
                while True:
                    try:
                        node, pods = await asyncio.gather(self._cluster.node(), self._cluster.pods())
                        break
                    except (KubeError, ProtocolError) as error:
                        if isinstance(error, ApiError) and error.status < 500 and error.status != 429:
                            raise AllocateError(f"cannot look up the binding pod: {error}") from error
                        last = error
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError as error:
            raise AllocateError(f"cannot look up the binding pod: {last or 'no answer'}") from error
        lock = node.annotations.get(NODE_LOCK)
        if lock_is_ahead(lock, self._clock()):
            self._cluster.node_event(
                "Warning",
                "ClockSkew",
                f"the node lock {str(lock)[:80]} is dated more than 5 min ahead: set the clock of this node, "
                "or of the scheduler's, by NTP",
            )
        return find_pod(self._cluster.node_name, lock, pods, self._clock(), wanted, self._lock_timeout_s)

    async def _repeated(self, key: tuple[tuple[str, ...], ...]) -> tuple[Answer, ...] | None:
        """The answer that was given to this very call before, if its pod still waits for it.

        A pod with something left is not asked about again: an app container may reuse the ids of an init
        container.
        """
        given = self._recent.get(key)
        if given is None or self._clock() - given.at > REPEAT_S:
            return None
        try:
            pod = await self._cluster.pod(given.pod.namespace, given.pod.name)
        except NotFound:
            return None
        except (KubeError, ProtocolError) as error:
            raise AllocateError(f"cannot read pod {given.pod.namespace}/{given.pod.name}: {error}") from error
        if pod.uid != given.pod.uid or pod.phase != "Pending" or pod.is_terminating:
            return None
        if not is_consumed(remaining(pod)):
            return None
        log.info("allocate.repeated", extra={"pod": f"{pod.namespace}/{pod.name}"})
        return given.answers

    def _remember(self, key: tuple[tuple[str, ...], ...], given: _Given) -> None:
        self._recent[key] = given
        self._recent.move_to_end(key)
        while len(self._recent) > REPEATS_KEPT:
            self._recent.popitem(last=False)
