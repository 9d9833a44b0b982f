"""Mode ``exact`` at work: names for Allocate, documents for PreStartContainer, marks, what is left over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final
from weakref import WeakValueDictionary

from hami.kube.errors import KubeError, NotFound
from hami.node.cdi.edits import CdiError
from hami.node.cluster import Cluster
from hami.node.config import Settings
from hami.node.errors import AllocateError, SliceBusyError, UnsafePathError
from hami.node.exact.cdi import (
    build_document,
    cache_file,
    device_name,
    document_environment,
    qualified_name,
)
from hami.node.exact.decision import (
    Given,
    allocation_of,
    check_cards,
    check_first,
    given_to,
    is_unmarked,
    success_notes,
)
from hami.node.exact.documents import Documents
from hami.node.exact.errors import NotYetError, RefusedError, StorageError
from hami.node.exact.owners import Owners
from hami.node.exact.pods import PodSource
from hami.node.lock import LockReleaser
from hami.node.mig.answer import with_instances
from hami.node.mig.manager import MigManager
from hami.node.paths import HostPaths
from hami.node.plugin.answer import (
    Delivery,
    base_response,
    build_answer,
    cache_path,
    control_disabled,
    inlined_edits,
    limits_table,
    reserved_variables,
)
from hami.node.plugin.checkpoint import Entry, checkpoint_devices
from hami.node.plugin.inventory import Card, offered_cards
from hami.node.plugin.ledger import Ledger
from hami.node.plugin.pending import MAX_ERROR_CHARS
from hami.node.plugin.workspace import Workspace, tell_mount_point
from hami.node.running import Running
from hami.protocol.errors import ProtocolError
from hami.protocol.keys import ALLOCATE_ERROR, BIND_FAILED, BIND_PHASE, ENV_SHARED_CACHE
from hami.protocol.views import Pod

RESYNC_S: Final = 30.0
KEEP_S: Final = 300.0
_START_KEEP_S: Final = 2.0  # a document that is being written while the first list is made
_STORAGE_EVENT_S: Final = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One PreStartContainer call with what is in force: ``cards`` of the node with their health."""

    device_ids: tuple[str, ...]
    settings: Settings
    delivery: Delivery
    cards: tuple[Card, ...]


class ExactAllocator:
    """Answers Allocate and PreStartContainer; calls for different devices run side by side.

    A call that has begun is finished even if kubelet hangs up; killed anywhere, the next call does the whole
    again.
    """

    def __init__(
        self,
        cluster: Cluster,
        workspace: Workspace,
        documents: Documents,
        paths: HostPaths,
        owners: Owners,
        pods: PodSource,
        lock: LockReleaser,
        *,
        scheduler_name: str = "hami-scheduler",
        clock: Callable[[], float] = time.time,
        mig: MigManager | None = None,
    ) -> None:
        self._cluster = cluster
        self._workspace = workspace
        self._documents = documents
        self._paths = paths
        self._owners = owners
        self._pods = pods
        self._lock = lock
        self._scheduler_name = scheduler_name
        self._clock = clock
        self._mig = mig
        self._ledger = Ledger(cluster, workspace)
        self._names: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._running = Running()
        self._marked: set[str] = set()  # pods by UID; the watch may not show it yet
        self._storage_told = float("-inf")

    async def restore(self, limits_files: bool) -> None:
        """At start: as :meth:`Ledger.restore`."""
        await self._ledger.restore(limits_files)

    async def prune(self) -> None:
        """As :meth:`Ledger.prune`."""
        await self._ledger.prune()
        self._marked &= {entry.pod_uid for entry in self._ledger.checkpoint.entries}

    async def drain(self, timeout_s: float) -> None:
        """Wait for calls that have begun, at most ``timeout_s``."""
        await self._running.drain(timeout_s)

    async def run(self, resource: str) -> None:
        """Follow the pods; mark pods whose mark was lost, remove documents that nobody holds. For ever."""
        watching = asyncio.create_task(self._pods.run())
        keep_s = _START_KEEP_S
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESYNC_S):
                    await self._pods.synced()
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RESYNC_S):
                        await self.collect(resource, keep_s)
                        keep_s = KEEP_S
                await self.mark_served()
                await asyncio.wait({watching}, timeout=RESYNC_S)
                if watching.done():
                    await watching
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    def names(self, requests: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """The qualified CDI name for each container of an Allocate call."""
        if not requests or not all(requests):
            raise RefusedError("an Allocate call needs at least one device id per container")
        return tuple(qualified_name(device_name(ids)) for ids in requests)

    async def prepare(self, call: Call) -> None:
        """Write the document of the container that holds the ids.

        Raises :class:`RefusedError`, after the pod was told, or :class:`NotYetError`.
        """
        if not call.device_ids:
            raise RefusedError("a PreStartContainer call needs at least one device id")
        await asyncio.shield(self._running.start(self._prepare(call)))

    async def collect(self, resource: str, keep_s: float) -> None:
        """Remove documents older than ``keep_s`` whose container kubelet does not know any more."""
        before = self._clock() - keep_s
        try:
            held = await self._owners.held(resource)
            removed = await asyncio.to_thread(
                self._documents.collect, {device_name(ids) for ids in held}, before
            )
        except (KubeError, ProtocolError, StorageError, UnsafePathError, OSError) as error:
            log.warning("cdi.collect_failed", extra={"cause": str(error)})
        else:
            if removed:
                log.info("cdi.removed", extra={"documents": list(removed)})

    async def mark_served(self) -> None:
        """Mark pods that are served completely and were not marked: the plugin was killed in between, or the
        API server did not answer.
        """
        for pod in self._pods.all():
            if is_unmarked(pod) and not pod.is_finished:
                self._marked.discard(pod.uid)
                await self._settle(pod)

    async def _prepare(self, call: Call) -> None:
        name = device_name(call.device_ids)
        lock = self._names.get(name)
        if lock is None:
            lock = self._names[name] = asyncio.Lock()
        async with lock:
            owner = await self._owners.find(call.device_ids, call.settings.resource_name, self._answered)
            try:
                await self._serve(owner.pod, owner.container, name, call)
            except RefusedError as error:
                await self._refuse(owner.pod, owner.container, error)
                raise

    async def _serve(self, pod: Pod, container: str, name: str, call: Call) -> None:
        allocation = allocation_of(pod, self._cluster.node_name, self._scheduler_name)
        given = given_to(pod, allocation, container, len(call.device_ids))
        first = self._ledger.checkpoint.get(pod.uid, container)
        devices = checkpoint_devices(given.devices)
        if first is not None:
            check_first(container, first.devices, devices)
        offered = {card.uuid for card in offered_cards(call.cards, call.settings)}
        cards = {card.uuid: card for card in call.cards}
        check_cards(given, cards, offered, is_first=first is None)
        has_instances = call.settings.is_dynamic_mig if first is None else not first.limits
        if has_instances:
            limits: dict[str, str] = {}
            document = await self._instances_document(pod, given, name, call)
        else:
            limits = self._limits(pod, given, first, call)
            document = await self._on_disk(self._prepare_files, pod, given, limits, name, call)
            tell_mount_point(self._cluster, self._workspace)
        self._ledger.checkpoint.renew(
            Entry(pod.uid, pod.namespace, pod.name, container, devices, limits, int(self._clock()))
        )
        try:
            await self._ledger.save()
        except (OSError, UnsafePathError) as error:
            raise self._storage(error) from error
        await self._write_document(name, document)
        log.info(
            "exact.prepared",
            extra={"pod": f"{pod.namespace}/{pod.name}", "container": container, "document": name},
        )
        self._running.start(self._settle(pod))

    def _limits(self, pod: Pod, given: Given, first: Entry | None, call: Call) -> dict[str, str]:
        cache = (first.limits.get(ENV_SHARED_CACHE) if first else None) or cache_path(
            self._paths, cache_file(pod.uid, given.container.name)
        )
        limits = limits_table(given.devices, given.container, call.settings, cache, call.delivery)
        self._judge_environment(pod, given, limits, call.settings)
        return limits

    async def _instances_document(self, pod: Pod, given: Given, name: str, call: Call) -> bytes:
        """The document of a container with MIG instances, which are made or found: no library, no files."""
        if self._mig is None:
            raise RefusedError("this plugin makes no MIG instances")
        position = [item.name for item in pod.slots].index(given.container.name)
        try:
            realised = await self._mig.realise(pod, [(position, given.devices)])
        except SliceBusyError as error:
            raise NotYetError(str(error)) from error
        except AllocateError as error:
            raise RefusedError(str(error)) from error
        instances = realised.of(position)
        try:
            delivery = await asyncio.to_thread(with_instances, instances, self._mig, call.delivery)
        except CdiError as error:
            raise RefusedError(str(error)) from error
        uuids = [each.uuid for each in instances]
        answer = base_response(uuids, delivery)
        cards = inlined_edits(uuids, delivery)
        return build_document(name, answer.env, answer.mounts, answer.devices, cards)

    def _prepare_files(
        self, pod: Pod, given: Given, limits: Mapping[str, str], name: str, call: Call
    ) -> bytes:
        """What the mounts of the document need, in a thread; the result is the document."""
        workspace, container = self._workspace, given.container
        delivery = replace(call.delivery, broker=workspace.prepare_lock_parent(call.delivery.broker))
        files = workspace.find_sources(preload=not control_disabled(container))
        workspace.ensure_cache_directory(pod.uid, container.name)
        if call.delivery.limits_file:
            workspace.write_limits(pod.uid, container.name, limits)
            workspace.check_limits(pod.uid, container.name)
        answer = build_answer(
            given.devices, container, pod.uid, limits, call.settings, self._paths, files, delivery
        )
        cards = inlined_edits([device.uuid for device in given.devices], delivery)
        env = document_environment(answer, limits, container)
        return build_document(name, env, answer.mounts, answer.devices, cards)

    async def _on_disk(self, work: Callable[..., bytes], *parameters: object) -> bytes:
        try:
            return await asyncio.to_thread(work, *parameters)
        except (UnsafePathError, AllocateError) as error:
            raise RefusedError(str(error)) from error
        except OSError as error:
            raise self._storage(error) from error

    async def _write_document(self, name: str, document: bytes) -> None:
        try:
            await asyncio.to_thread(self._documents.write, name, document)
        except (OSError, UnsafePathError) as error:
            raise self._storage(error) from error

    def _storage(self, error: OSError | UnsafePathError) -> StorageError:
        """The error for kubelet; the node gets an event, at most one a minute."""
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        path = getattr(error, "filename", None)
        text = f"cannot write what the container needs: {words}" + (f": {path}" if path else "")
        now = self._clock()
        if now - self._storage_told >= _STORAGE_EVENT_S:
            self._storage_told = now
            self._cluster.node_event("Warning", "HAMiStorageFailed", text)
        return StorageError(text)

    def _judge_environment(
        self, pod: Pod, given: Given, limits: Mapping[str, str], settings: Settings
    ) -> None:
        names = reserved_variables(given.container, limits)
        if not names or settings.reserved_env == "ignore":
            return
        text = (
            f"container {given.container.name} sets variables of the device limits itself: {', '.join(names)}"
        )
        if settings.reserved_env == "deny":
            raise RefusedError(text, fails_pod=True)
        self._cluster.pod_event(pod, "Warning", "HAMiReservedEnv", text)

    async def _refuse(self, pod: Pod, container: str, error: RefusedError) -> None:
        """Tell the pod, once for the same words."""
        text = str(error)
        log.warning(
            "exact.refused",
            extra={"pod": f"{pod.namespace}/{pod.name}", "container": container, "cause": text},
        )
        self._cluster.pod_event(pod, "Warning", "AllocateFailed", text)
        wanted: dict[str, str] = {ALLOCATE_ERROR: text[:MAX_ERROR_CHARS]} if error.marks_pod else {}
        if error.fails_pod:
            wanted[BIND_PHASE] = BIND_FAILED
        written = {key: value for key, value in wanted.items() if pod.annotations.get(key) != value}
        if written:
            try:
                await self._cluster.annotate_pod(pod, written)
            except KubeError as failure:
                log.warning("exact.mark_failed", extra={"cause": str(failure)})
        if error.fails_pod and written:
            self._marked.discard(pod.uid)
            await self._lock.release(pod)

    async def _settle(self, pod: Pod) -> None:
        """Mark the pod as served and give back a node lock that another scheduler took for it."""
        notes = success_notes(pod, self._answered(pod))
        if not notes or pod.uid in self._marked:
            return
        self._marked.add(pod.uid)
        try:
            await self._cluster.annotate_pod(pod, notes)
        except NotFound:
            return
        except (KubeError, ProtocolError) as error:
            self._marked.discard(pod.uid)
            log.warning("exact.mark_failed", extra={"cause": str(error)})
        await self._lock.release(pod)

    def _answered(self, pod: Pod) -> dict[str, int]:
        """The containers of ``pod`` that have an answer, with the Unix seconds of the last one."""
        entries = [self._ledger.checkpoint.get(pod.uid, item.name) for item in pod.slots]
        return {entry.container: entry.answered_at for entry in entries if entry is not None}
