"""Dynamic MIG of one node: cards are divided at start, instances are made for containers and go with their
pods (device-plugin.md §11). One manager per process; it outlives restarts of the kubelet side.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from hami.kube.errors import ApiError, Conflict, KubeError
from hami.node.cdi.edits import CdiError, Edits
from hami.node.cluster import Cluster
from hami.node.config import MigAllowed
from hami.node.errors import AllocateError, MigError, NvmlError, SliceBusyError, UnsafePathError
from hami.node.mig.caps import Minors, instance_nodes, read_minors
from hami.node.mig.documents import InstanceDocuments
from hami.node.mig.given import Given
from hami.node.mig.instances import MigCards, how_to_destroy
from hami.node.mig.plan import (
    RESOLVE,
    At,
    Journalled,
    Managed,
    Realised,
    Record,
    Seen,
    SliceKey,
    Survey,
    adopt,
    key_of,
    survey,
    unwanted,
    usable,
    wanted_slices,
    with_identity,
)
from hami.node.mig.profiles import Offer
from hami.node.nvml import GpuIdentity
from hami.protocol.allocation import Slot
from hami.protocol.errors import ProtocolError
from hami.protocol.keys import MIG_ALLOCATIONS
from hami.protocol.views import Pod

RECORD: Final = "record MIG runtime placement"
"""How errors about writing the ids of instances begin (WIRE: users search for it)."""
FAILED: Final = "HAMiMigFailed"
"""Reason of events about a card that cannot be divided, or an instance that cannot be destroyed."""
FOREIGN: Final = "HAMiMigForeignInstance"
"""Reason of events about instances that nobody here has made."""
SWEEP_S: Final = 60.0
SOON_S: Final = 5.0
GRACE_S: Final = 120.0
PATIENCE_S: Final = 8.0
"""How long an allocation waits for the place of an instance whose last pod has just ended."""
_WRITES: Final = 5
_RETRY_S: Final = 0.2
_PATIENT_RETRIES: Final = 3

log = logging.getLogger(__name__)


class Records(Protocol):
    """The journal; see :class:`hami.node.mig.journal.Journal`."""

    def load(self) -> Journalled: ...

    def save(self, known: Journalled, /) -> None: ...


class PodChanges(Protocol):
    """When pods of the node change."""

    async def run(self) -> None:
        """Follow them; ends only by cancellation."""
        ...

    async def wait(self, timeout_s: float) -> None:
        """Return after the next change, or after ``timeout_s``."""
        ...


class MigManager:
    """Divides cards and keeps their instances. What it decides is in ``plan``; one change at a time."""

    def __init__(
        self,
        cards: MigCards,
        cluster: Cluster,
        journal: Records,
        given: Given,
        *,
        clock: Callable[[], float] = time.monotonic,
        retry_s: float = _RETRY_S,
        patience_s: float = PATIENCE_S,
        minors: Callable[[], Minors] = read_minors,
    ) -> None:
        self._cards = cards
        self._cluster = cluster
        self._journal = journal
        self._given = given
        self._clock = clock
        self._retry_s = retry_s
        self._patience_s = patience_s
        self._minors = minors
        self._events: list[tuple[str, str]] = []
        self._lock = asyncio.Lock()
        self._gpus: dict[str, GpuIdentity] = {}
        self._managed: dict[SliceKey, Managed] = {}
        self._loaded: tuple[Record, ...] | None = None
        self._known: frozenset[str] = frozenset()  # cards of which all is known that was made on them
        self._ready: set[str] = set()
        self._untouched: dict[str, tuple[str, ...]] = {}  # cards with lost instances: nothing is destroyed
        self._why: dict[str, str] = {}  # cards that are not ready
        self._busy_since: dict[SliceKey, float] = {}
        self._told: dict[str, str] = {}
        self._calls = 0
        self.documents: InstanceDocuments | None = None  # where a CDI strategy is on

    @property
    def instances(self) -> tuple[Managed, ...]:
        """The instances that are ours, by place."""
        return tuple(self._managed[key] for key in sorted(self._managed))

    def offer(self, gpu: GpuIdentity, entries: Sequence[MigAllowed]) -> Offer:
        """What a card is registered with. Blocks; raises :class:`NvmlError`."""
        why = self._why.get(gpu.uuid)
        return Offer(why=why) if why else self._cards.offer(gpu, entries)

    def nodes(self, each: Managed) -> tuple[str, ...]:
        """Paths of the device nodes that a container needs for an instance. Blocks."""
        gpu, compute = self._gpus.get(each.key.gpu), each.compute_instance
        if gpu is None or compute is None:
            return ()
        return instance_nodes(gpu.minor, each.gpu_instance, compute, self._minors())

    def describe(self, each: Managed) -> Edits:
        """Write the CDI document of an instance; what it adds. Blocks; raises :class:`CdiError`."""
        if (gpu := self._gpus.get(each.key.gpu)) is None or self.documents is None:
            raise CdiError(f"no CDI document can be made for {each.uuid}")
        return self.documents.write(each.uuid, self.nodes(each), gpu.bus_id)

    async def prepare(self, gpus: Sequence[GpuIdentity]) -> None:
        """At every start of the kubelet side: divide those of ``gpus`` that nobody uses and that were not
        prepared before, and adopt the instances of the others. What fails is told and tried again later.
        """
        async with self._lock:
            self._gpus = {gpu.uuid: gpu for gpu in gpus}
            try:
                found = await self._survey()
            except (KubeError, ProtocolError, NvmlError) as error:
                log.warning("mig.pods_unknown", extra={"cause": str(error)})
                found = None
            await self._work(self._prepare, found)

    async def realise(self, pod: Pod, parts: Sequence[tuple[int, Slot]]) -> Realised:
        """Make what the containers at these positions of ``pod`` reserved, or find it, and write its ids into
        the pod's annotation.

        Raises :class:`AllocateError`; then nothing of this call is left.
        """
        wanted: dict[At, SliceKey] = {}
        for position, devices in parts:
            for item in wanted_slices(pod, position, devices):
                wanted[position, item.device_index] = key_of(item)
        async with self._lock:
            self._calls += 1
            made: list[Managed] = []
            try:
                at = await self._instances_for(pod, wanted, made)
                await self._record(pod, at)
            except (NvmlError, MigError) as error:
                await self._work(self._undo, made)
                raise AllocateError(f"{RESOLVE}: {error}") from error
            except BaseException:
                await self._work(self._undo, made)
                raise
            return Realised(at, tuple(made))

    async def undo(self, realised: Realised) -> None:
        """Destroy what was made for a call that failed later, newest first; what was there before stays."""
        async with self._lock:
            await self._work(self._undo, realised.made)

    async def reconcile(self) -> bool:
        """Destroy what nobody can use any more, and prepare cards that were not ready. True: something is
        left to do soon.
        """
        calls = self._calls
        try:
            found = await self._survey()
        except (KubeError, ProtocolError, NvmlError) as error:
            log.warning("mig.pods_unknown", extra={"cause": str(error)})
            return True
        async with self._lock:
            if calls != self._calls:
                return True  # a pod that was bound meanwhile may not be among those listed
            await self._work(self._settle, found)
            return bool(self._why or self._busy_since or found.problem)

    async def run(self, changes: PodChanges, ready: Callable[[], None]) -> None:
        """Reconcile whenever pods change and once a minute; ``ready`` is called when cards became ready. Ends
        only by cancellation, or with the error of ``changes``.
        """
        watching = asyncio.create_task(changes.run())
        try:
            while True:
                before = frozenset(self._ready)
                soon = await self.reconcile()
                if self._ready != before:
                    ready()
                await changes.wait(SOON_S if soon else SWEEP_S)
                if watching.done():
                    await watching
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    # --- in a thread, under the lock ---

    def _prepare(self, found: Survey | None) -> None:
        if self._loaded is None:
            journalled = self._journal.load()
            self._loaded, self._known = journalled.records, journalled.cards
        for uuid, gpu in self._gpus.items():
            if uuid in self._ready:
                continue
            try:
                why = self._prepare_card(gpu, found)
            except (NvmlError, MigError) as error:
                why = str(error)
            if why:
                self._why[uuid] = why
                self._tell(f"card {uuid}", FAILED, why)
            else:
                self._why.pop(uuid, None)
                self._told.pop(f"card {uuid}", None)
                self._ready.add(uuid)
        self._save()

    def _prepare_card(self, gpu: GpuIdentity, found: Survey | None) -> str:
        """Divide a card that nobody uses and clear it; else adopt what is on it. Why it is not ready, or
        empty. Only a card that is known to be unused is changed.
        """
        certain = found if found is not None and not found.problem else None
        if certain and gpu.uuid not in certain.cards and not self._cards.is_busy(gpu):
            self._cards.divide(gpu)
            cleared = self._cards.clear(gpu)
            self._forget(gpu.uuid)
            self._known |= {gpu.uuid}
            log.info("mig.ready", extra={"gpu": gpu.uuid, "destroyed": cleared})
            return ""
        if not self._cards.is_divided(gpu):
            # After a reboot pods may wait for slices of a card that is not divided any more.
            if certain and gpu.uuid not in certain.undivided_cards and not self._cards.is_busy(gpu):
                self._cards.divide(gpu)
                self._adopt(gpu, certain)
                return ""
            return (
                f"GPU {gpu.index} ({gpu.uuid}) is not divided by MIG, and not known to be unused; "
                "it is divided as soon as no pod and no process uses it"
            )
        if found is None:
            return f"GPU {gpu.index} ({gpu.uuid}) waits for the API server: the node's pods cannot be listed"
        self._adopt(gpu, found)
        return ""

    def _adopt(self, gpu: GpuIdentity, found: Survey) -> None:
        seen = self._cards.seen(gpu)
        uuids = [uuid for each in seen for uuid in each.devices.values()]
        given = self._given.owners(uuids) if uuids and gpu.uuid not in self._known else {}
        adopted = adopt(gpu.uuid, seen, found, self._records(gpu.uuid), given)
        self._forget(gpu.uuid)
        self._known |= {gpu.uuid}
        self._managed.update((each.key, each) for each in adopted.managed)
        if adopted.problems:
            self._untouched[gpu.uuid] = adopted.problems
            advice = "no instance of this card is destroyed until this pod has ended; delete the pod"
            self._tell(f"lost {gpu.uuid}", FAILED, f"{adopted.problems[0]}: {advice}")
        else:
            self._untouched.pop(gpu.uuid, None)
            self._told.pop(f"lost {gpu.uuid}", None)
        self._tell_foreign(gpu, adopted.foreign)

    def _settle(self, found: Survey) -> None:
        self._prepare(found)
        for uuid, gpu in self._gpus.items():
            if uuid not in self._ready:
                continue
            try:
                if self._cards.is_divided(gpu):
                    self._adopt(gpu, found)
                else:
                    self._lost(gpu)
            except (NvmlError, MigError) as error:
                self._tell(f"card {uuid}", FAILED, f"{error}; its instances stay as they are")
            else:
                self._told.pop(f"card {uuid}", None)
        self._destroy_unwanted(found)

    def _lost(self, gpu: GpuIdentity) -> None:
        """A card that was reset or switched back has no instances any more and is prepared anew."""
        self._ready.discard(gpu.uuid)
        self._forget(gpu.uuid)
        self._why[gpu.uuid] = f"GPU {gpu.index} ({gpu.uuid}) is not divided by MIG any more"

    def _destroy_unwanted(self, found: Survey) -> None:
        if found.problem:
            self._tell("pods", FAILED, f"{found.problem}; no MIG instance is destroyed until this is mended")
            return
        self._told.pop("pods", None)
        gone = unwanted(self._managed.values(), found)
        for key in set(self._busy_since) - {each.key for each in gone}:
            del self._busy_since[key]
        for each in gone:
            if not self._untouched.get(each.key.gpu):
                self._destroy_one(each)
        self._save()

    def _destroy_one(self, each: Managed) -> None:
        gpu = self._gpus.get(each.key.gpu)
        if gpu is None:
            return
        since = self._busy_since.setdefault(each.key, self._clock())
        where = f"MIG instance {each.gpu_instance} of GPU {gpu.index} ({each.key})"
        try:
            if self._cards.unmake(gpu, each):
                self._managed.pop(each.key, None)
                del self._busy_since[each.key]
                self._told.pop(where, None)
                log.info("mig.destroyed", extra={"place": str(each.key), "instance": each.gpu_instance})
            elif self._clock() - since >= GRACE_S:
                self._tell(
                    where,
                    FAILED,
                    f"{where} still has processes {GRACE_S:.0f} s after its pod ended; it is destroyed when "
                    "they have: find them with nvidia-smi and end them",
                )
        except NvmlError as error:
            self._tell(where, FAILED, f"{error}; {where} is not needed any more and is tried again")

    def _instance(self, key: SliceKey, pod: Pod, made: list[Managed]) -> None:
        """See to it that the pod has an instance at ``key``; a new one is added to ``made`` as soon as there
        is something to undo.
        """
        gpu = self._gpus.get(key.gpu)
        if gpu is None or key.gpu not in self._ready:
            raise AllocateError(
                f"{RESOLVE}: card {key.gpu} takes no MIG instances: "
                f"{self._why.get(key.gpu, 'this node does not offer it')}"
            )
        for each in [
            item for item in self._managed.values() if not item.is_finished and item.key.overlaps(key)
        ]:
            if each.owners <= {pod.uid}:
                self._destroy_one(each)
        there = usable(key, pod.uid, self._managed.values())
        if there is not None and self._cards.has(gpu, there):
            return
        self._managed.pop(key, None)  # gone with a reset of the card
        self._save(Record(key, frozenset({pod.uid})))

        def begun(unfinished: Managed) -> None:
            self._managed[key] = unfinished
            made.append(unfinished)

        each = self._cards.make(gpu, key, pod.uid, begun)
        self._managed[key] = made[-1] = each
        self._save()
        log.info(
            "mig.made",
            extra={"pod": f"{pod.namespace}/{pod.name}", "place": str(key), "device": each.uuid},
        )

    def _undo(self, made: Sequence[Managed]) -> None:
        """What cannot be destroyed now belongs to nobody: it goes with the next round."""
        for each in reversed(made):
            kept = self._managed.get(each.key)
            if kept is None:
                continue
            orphan = Managed(kept.key, kept.gpu_instance, kept.compute_instance, kept.uuid)
            self._managed[each.key] = orphan
            self._destroy_one(orphan)
        self._save()

    def _save(self, *about_to_be: Record) -> None:
        """Write the journal. An error matters only before something is made."""
        records = [
            *(self._loaded or ()),
            *(Record(each.key, each.owners, each.gpu_instance, each.uuid) for each in self._managed.values()),
            *about_to_be,
        ]
        try:
            self._journal.save(Journalled(tuple(records), self._known))
        except (OSError, UnsafePathError) as error:
            if about_to_be:
                raise AllocateError(
                    f"{RESOLVE}: cannot write the journal of MIG instances: {error}"
                ) from error
            log.warning("mig.journal_not_written", extra={"cause": str(error)})
        if self.documents is not None:
            self.documents.retain({each.uuid for each in self._managed.values()})

    def _records(self, uuid: str) -> list[Record]:
        """What is known to be made on a card: by this process, else what the one before wrote down."""
        own = [each for each in self._managed.values() if each.key.gpu == uuid]
        if own:
            return [Record(each.key, each.owners, each.gpu_instance, each.uuid) for each in own]
        return [record for record in self._loaded or () if record.key.gpu == uuid]

    def _forget(self, uuid: str) -> None:
        self._managed = {key: each for key, each in self._managed.items() if key.gpu != uuid}
        self._loaded = tuple(record for record in self._loaded or () if record.key.gpu != uuid)

    def _tell_foreign(self, gpu: GpuIdentity, foreign: Sequence[Seen]) -> None:
        for each in foreign:
            self._tell(
                f"foreign {gpu.uuid}/{each.gpu_instance}",
                FOREIGN,
                f"MIG instance {each.gpu_instance} ({each.key}) of GPU {gpu.index} was not made by this "
                "plugin, whatever a pod says: its place cannot be used; it is left alone; when nothing needs "
                f"it, destroy it with: {how_to_destroy(gpu, each.gpu_instance)}",
            )

    def _tell(self, about: str, reason: str, text: str) -> None:
        """An event on the node, once for the same words."""
        if self._told.get(about) == text:
            return
        self._told[about] = text
        log.warning("mig.told", extra={"reason": reason, "cause": text})
        self._events.append((reason, text))

    # --- in the event loop ---

    async def _work(self, work: Callable[..., None], *parameters: object) -> None:
        """Run blocking work in a thread; it is finished, under the lock, even if we are cancelled."""
        task = asyncio.ensure_future(asyncio.to_thread(work, *parameters))
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
        events, self._events = self._events, []
        for reason, text in events:
            self._cluster.node_event("Warning", reason, text)
        task.result()
        if cancelled is not None:
            raise cancelled

    async def _instances_for(
        self, pod: Pod, wanted: Mapping[At, SliceKey], made: list[Managed]
    ) -> dict[At, Managed]:
        """The instances, made or found; waits a little for places whose last user is just ending."""
        deadline = self._clock() + self._patience_s
        at: dict[At, Managed] = {}
        while True:
            try:
                found = await self._survey()
            except (KubeError, ProtocolError) as error:
                raise AllocateError(f"{RESOLVE}: cannot list the pods of this node: {error}") from error
            await self._work(self._destroy_unwanted, found)
            try:
                for place, key in wanted.items():
                    await self._work(self._instance, key, pod, made)
                    at[place] = self._managed[key]
            except SliceBusyError:
                if self._clock() >= deadline:
                    raise
            else:
                return at
            await asyncio.sleep(self._retry_s * _PATIENT_RETRIES)

    async def _survey(self) -> Survey:
        pods = await self._cluster.pods()
        known = {gpu.uuid for gpu in await asyncio.to_thread(self._cards.gpus)}
        return survey(pods, known)

    async def _record(self, pod: Pod, at: Mapping[At, Managed]) -> None:
        """Write the ids into the pod's annotation, against the version that was read."""
        current = pod
        for attempt in range(1, _WRITES + 1):
            text = current.annotations.get(MIG_ALLOCATIONS, "")
            written = with_identity(text, at)
            if written == text:
                return
            try:
                await self._cluster.annotate_pod(
                    current, {MIG_ALLOCATIONS: written}, resource_version=current.resource_version
                )
            except (KubeError, ProtocolError) as error:
                if attempt == _WRITES or not (isinstance(error, Conflict) or _may_pass(error)):
                    raise AllocateError(f"{RECORD}: {error}") from error
                log.info("mig.write_repeated", extra={"cause": str(error), "attempt": attempt})
            else:
                return
            await asyncio.sleep(self._retry_s * attempt)
            try:
                current = await self._cluster.pod(pod.namespace, pod.name)
            except (KubeError, ProtocolError) as error:
                raise AllocateError(f"{RECORD}: {error}") from error
            if current.uid != pod.uid:
                raise AllocateError(f"{RECORD}: pod {pod.namespace}/{pod.name} is a new one")


def _may_pass(error: KubeError | ProtocolError) -> bool:
    """Whether the same write may succeed later."""
    return isinstance(error, KubeError) and (
        not isinstance(error, ApiError) or error.status >= 500 or error.status == 429
    )
