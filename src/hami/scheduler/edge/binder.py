"""`/bind`: one Binding per placement, and the settling of unknown outcomes (scheduler.md §10; decisions 24
to 29)."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hami.kube.bugs import BugLog
from hami.kube.client import Client
from hami.kube.errors import (
    UNPROCESSED,
    ApiError,
    Conflict,
    Forbidden,
    KubeError,
    NotFound,
    Unauthorized,
)
from hami.kube.events import ObjectRef
from hami.kube.operations import bind_pod
from hami.kube.resources import PODS
from hami.protocol import keys
from hami.protocol.durations import format_duration
from hami.protocol.errors import HamiError
from hami.protocol.extender import ExtenderBindingArgs
from hami.protocol.lock import LockOwner
from hami.protocol.views import Pod, decode
from hami.scheduler.core.answers import Reservation, ReservationPhase
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge.deadline import ANSWER_WITHIN_S, Deadline
from hami.scheduler.edge.events import SchedulerEvents, pod_of
from hami.scheduler.edge.half_allocated import HalfAllocated
from hami.scheduler.edge.leader import LATE_S, NOT_LEADER, Leadership
from hami.scheduler.edge.node_locks import LockContention, LockFailed, LockKind, NodeLocks
from hami.scheduler.edge.pod_locks import KEPT_S, PodLocks
from hami.vendors.types import NodeView

STALE = "stale bind request"
_SETTLE_FIRST_S, _SETTLE_CAP_S = 0.1, 30.0
_LEAST_FIRST_S = 1.0  # for the first Binding: less, and all of them would be of unknown outcome
_RELEASE_S = 3.0
_NOTES = 10_000
_MAX_ANNOTATION_BYTES = 200 << 10  # protocol.md §15; the API server takes 256 KiB with those of the user

log = logging.getLogger(__name__)


class Outcome(enum.Enum):
    """What became of a Binding."""

    BOUND = "bound"
    REFUSED = "refused"
    UNPROCESSED = "unprocessed"  # not this time: it says nothing of one that was sent before
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Result:
    """An outcome and, unless bound, its text."""

    outcome: Outcome
    text: str = ""


@dataclass(frozen=True, slots=True)
class PodNote:
    """What `/bind` needs to know of a pod beyond its reservation."""

    group_member: bool = False  # a contended lock is tried again
    privileged: str = ""  # name of its first privileged container


_NOTHING_NOTED = PodNote()


@dataclass(frozen=True, slots=True)
class BinderSettings:
    """Seconds a pod-group member waits for a locked node (0: none), until kube-scheduler has its answer,
    whatever there is to wait for, and in which a Binding without an answer may still be carried out."""

    lock_retry_s: float = 28.0
    answer_within_s: float = ANSWER_WITHIN_S
    late_s: float = LATE_S
    privileged_allowed: bool = False  # privileged pods with devices are admitted; say so once they are bound
    scheduler_name: str = ""  # whose pods are bound; empty: any scheduler's


class Binder:
    """Binds reserved pods. Every method runs in the scheduler's loop."""

    def __init__(
        self,
        client: Client,
        state: ClusterState,
        leadership: Leadership,
        locks: NodeLocks,
        events: SchedulerEvents,
        settings: BinderSettings | None = None,
        *,
        catch_up: Callable[[str], Awaitable[None]] | None = None,
        bugs: BugLog | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        """``catch_up`` brings what is bound to a node into the state, as far as that is needed; asked with
        the node's lock in hand, it raises ``HamiError`` when it cannot. It may be cancelled."""
        self._client = client
        self._state = state
        self._leadership = leadership
        self._bugs = bugs or BugLog(log)
        self._locks = PodLocks(locks, leadership, self._bugs)
        self._events = events
        self._settings = settings or BinderSettings()
        self._catch_up = catch_up
        self._clock = clock
        self._sleep = sleep
        self._settling: dict[str, asyncio.Task[Result]] = {}
        self._preparing: set[str] = set()  # pod uids between their bind request and their Binding
        self._notes: OrderedDict[str, PodNote] = OrderedDict()
        self._half_done = HalfAllocated(client, state.profiles)
        self.use_profiles()

    def use_profiles(self) -> None:
        """Go by the vendors of the state as they are now."""
        profiles = self._state.profiles
        self._managed = {name for profile in profiles.values() for name in profile.names.all()}
        self._consumed = {  # allocated keys that node plugins use up
            profile.rules.allocated
            for profile in profiles.values()
            if profile.rules.rebuild == "longer_of_both_keys"
        }
        self._half_done.use(profiles)

    def note(self, uid: str, note: PodNote) -> None:
        """Remember what `/filter` saw of a pod that it placed."""
        self._notes[uid] = note
        self._notes.move_to_end(uid)
        if len(self._notes) > _NOTES:
            self._notes.popitem(last=False)

    async def bind(self, args: ExtenderBindingArgs) -> str:
        """Answer a bind request; "" means bound."""
        if not args.pod_name or not args.pod_namespace or not args.node:
            return "extender binding args missing pod or node"
        deadline = Deadline(self._settings.answer_within_s)
        reservation = self._state.reservation(args.pod_uid)
        if reservation is None:
            return await self._bind_without_reservation(args, deadline)
        if (reservation.node, reservation.namespace, reservation.name) != (
            args.node,
            args.pod_namespace,
            args.pod_name,
        ):
            return STALE
        if reservation.phase is ReservationPhase.BOUND:
            return ""
        if reservation.phase is not ReservationPhase.RESERVED:
            return await self._answer_of_settling(reservation, deadline)
        if not self._leadership.is_leader():
            self._state.binding_refused(args.pod_uid)
            return NOT_LEADER
        node = self._state.node(args.node)
        if node is None:
            self._state.binding_refused(args.pod_uid)
            self._events.binding_failed(pod_of(reservation), f"failed to get node {args.node}")
            return f'node "{args.node}" not found'
        if args.pod_uid in self._preparing:  # two attempts would release each other's lock
            return _under_way(reservation)
        self._preparing.add(args.pod_uid)
        try:
            failure = await self._prepare(reservation, node, deadline) or self._start(reservation, deadline)
        except BaseException:
            failure = "interrupted"  # whoever asked gets the exception
            raise
        finally:
            self._preparing.discard(args.pod_uid)
            if failure:
                await self._locks.give_back(reservation, deadline)
        return failure or await self._answer_of_settling(reservation, deadline)

    async def settled(self, uid: str, timeout_s: float) -> bool:
        """Whether no Binding of the pod is under way or of unknown outcome, waiting up to ``timeout_s``
        seconds."""
        reservation = self._state.reservation(uid)
        task = self._settling.get(uid)
        if reservation is None or reservation.phase in (ReservationPhase.RESERVED, ReservationPhase.BOUND):
            return True
        if task is None:
            return False
        await asyncio.wait({task}, timeout=timeout_s)
        return task.done()

    def end(self) -> None:
        """The process is about to end: nobody waits for a node lock any more."""
        self._locks.node_locks.end()

    async def close(self) -> None:
        """Stop settling, and give back the locks of pods whose Binding was never sent (the process ends)."""
        tasks = list(self._settling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        deadline = Deadline(_RELEASE_S)
        while self._preparing and not deadline.has_passed:  # noqa: ASYNC110 -- whom the server has cancelled
            await asyncio.sleep(0.01)
        await self._locks.close(_RELEASE_S)

    # --- before the Binding --------------------------------------------------------------------------------

    async def _prepare(self, reservation: Reservation, node: NodeView, deadline: Deadline) -> str:
        """All that has to be so before the Binding is sent; the reason why it is not, else ""."""
        failure = (
            await self._lock(reservation, node, deadline)
            or _too_late(reservation, deadline)
            or await self._make_sure(reservation, deadline)
            or _too_late(reservation, deadline)
        )
        if failure and self._leadership.is_leader():
            self._events.binding_failed(pod_of(reservation), failure)
        return failure

    async def _lock(self, reservation: Reservation, node: NodeView, deadline: Deadline) -> str:
        note = self._notes.get(reservation.uid, _NOTHING_NOTED)
        longest = max(0.0, deadline.total_s - KEPT_S)
        retry_s = min(self._settings.lock_retry_s, longest) if note.group_member else 0.0
        try:
            await self._locks.take(reservation, _needed_locks(reservation, node), retry_s, deadline)
        except LockContention as error:
            if error.unbound is not None and not self._holds_room(error.unbound):
                # Nobody is binding the holder: whoever was has died, and it will come back for its lock. The
                # room that we hold here may be what it waits for, as we wait for its lock.
                self._state.binding_refused(reservation.uid)
            return str(error)
        except LockFailed as error:
            if not self._leadership.is_leader():
                self._state.binding_refused(reservation.uid)
                return NOT_LEADER
            return str(error)
        return ""

    async def _make_sure(self, reservation: Reservation, deadline: Deadline) -> str:
        """With the lock in hand: that the node is free for the pod, as far as others know."""
        node = reservation.node
        if other := await self._half_done.on_node(reservation, deadline.left()):
            return f"containers of pod {other} are still being allocated on node {node}"
        if self._catch_up is None:
            return ""
        try:
            async with asyncio.timeout(deadline.left()):
                await self._catch_up(node)
        except HamiError as error:
            return f"the pods of node {node} cannot be read: {error}"
        except TimeoutError:
            return f"the pods of node {node} were not read in time: {_too_late(reservation, deadline)}"
        return ""

    def _holds_room(self, pod: LockOwner) -> bool:
        return any(
            (one.namespace, one.name) == (pod.namespace, pod.name) for one in self._state.reservations()
        )

    # --- the Binding ---------------------------------------------------------------------------------------

    def _start(self, reservation: Reservation, deadline: Deadline) -> str:
        """Begin to send the Binding, unless something has changed while the locks were taken: the reason."""
        uid = reservation.uid
        current = self._state.reservation(uid)
        if (
            current is None
            or current.node != reservation.node
            or current.phase is not ReservationPhase.RESERVED
        ):
            return STALE
        if not self._leadership.is_leader():
            self._state.binding_refused(uid)
            return NOT_LEADER
        size = sum(len(key) + len(text.encode()) for key, text in current.annotations.items())
        problem = self._state.outgrown(uid)
        if problem:
            problem = f"{problem}, pod {_name(reservation)} will be scheduled again"
        elif size > _MAX_ANNOTATION_BYTES:
            problem = f"the allocation takes {size} bytes of annotations, over {_MAX_ANNOTATION_BYTES}"
        if problem:
            self._state.binding_refused(uid)
            self._events.binding_failed(pod_of(reservation), problem)
            return problem
        reservation = self._state.binding_started(uid)
        self._half_done.binding(reservation)
        annotations = reservation.binding_annotations(self._clock())
        task = asyncio.create_task(self._drive(reservation, annotations, deadline))
        self._settling[uid] = task
        task.add_done_callback(lambda done: self._forget(reservation, done))
        return ""

    async def _answer_of_settling(self, reservation: Reservation, deadline: Deadline) -> str:
        task = self._settling.get(reservation.uid)
        if task is None:
            return _under_way(reservation)
        done, _ = await asyncio.wait({task}, timeout=deadline.left())
        if not done:
            return (
                f"the outcome of the Binding of pod {reservation.namespace}/{reservation.name} is unknown, "
                "it is being settled"
            )
        return task.result().text

    def _forget(self, reservation: Reservation, task: asyncio.Task[Result]) -> None:
        uid = reservation.uid
        if self._settling.get(uid) is task:
            del self._settling[uid]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._state.binding_unsent(uid)  # may expire or be replaced; if it was bound, the watch will tell
            self._bugs.note("binding.crashed", error, pod=_name(reservation), node=reservation.node)

    async def _drive(
        self, reservation: Reservation, annotations: Mapping[str, str], deadline: Deadline
    ) -> Result:
        """Send the Binding until its outcome is known, and draw the consequences."""
        term = self._leadership.term
        first_s = max(_LEAST_FIRST_S, self._within(deadline))
        result = await self._attempt(reservation, annotations, timeout_s=first_s)
        if result.outcome is Outcome.UNKNOWN:
            self._state.binding_unknown(reservation.uid)
            log.warning("binding.unknown", extra={"pod": _name(reservation), "reason": result.text})
            result = await self._settle(reservation, annotations, term)
        if result.outcome is Outcome.BOUND:
            self._locks.hand_over(reservation.uid)
            self._state.binding_confirmed(reservation.uid)
            self._half_done.binding(reservation)
            self._events.bound(pod_of(reservation), reservation.node)
            note = self._notes.pop(reservation.uid, _NOTHING_NOTED)
            if note.privileged and self._settings.privileged_allowed:
                self._events.unlimited(pod_of(reservation), note.privileged)
            log.info("pod.bound", extra={"pod": _name(reservation), "node": reservation.node})
        else:
            self._state.binding_refused(reservation.uid)
            self._half_done.refused(reservation)
            await self._locks.give_back(reservation, deadline)
            self._events.binding_failed(pod_of(reservation), result.text)
            log.info("binding.refused", extra={"pod": _name(reservation), "reason": result.text})
        return result

    async def _settle(self, reservation: Reservation, annotations: Mapping[str, str], term: int) -> Result:
        """GET, and the same Binding again while the pod is unbound: only a definite answer ends this
        (decision 25).

        It is not sent again once another replica may have led, and may have given the cards to other pods.
        Then, or when it cannot be sent, it is over once what was sent can no longer be carried out.
        """
        delay = _SETTLE_FIRST_S
        until = Deadline(self._settings.late_s)
        while True:
            await self._sleep(delay)
            delay = min(_SETTLE_CAP_S, delay * 2)
            too_late = until.has_passed
            result = await self._look(reservation)
            if result is None and self._leadership.leads_since(term):
                result = await self._attempt(reservation, annotations)
                if result.outcome is Outcome.UNKNOWN:
                    until = Deadline(self._settings.late_s)
                elif result.outcome is Outcome.UNPROCESSED and not too_late:
                    continue
            elif result is None and too_late:
                result = Result(Outcome.REFUSED, NOT_LEADER)
            if result is not None and result.outcome is not Outcome.UNKNOWN:
                return result

    async def _attempt(
        self,
        reservation: Reservation,
        annotations: Mapping[str, str],
        timeout_s: float | None = None,
    ) -> Result:
        try:
            await bind_pod(
                self._client,
                namespace=reservation.namespace,
                name=reservation.name,
                uid=reservation.uid,
                node=reservation.node,
                annotations=annotations,
                labels=reservation.labels,
                timeout_s=timeout_s,
            )
        except Conflict as error:
            seen = await self._look(reservation)
            return seen or Result(Outcome.REFUSED, str(error))
        except (*UNPROCESSED, Unauthorized, Forbidden) as error:
            return Result(Outcome.UNPROCESSED, str(error))
        except ApiError as error:
            definite = error.status < 500 and error.status != 408
            return Result(Outcome.REFUSED if definite else Outcome.UNKNOWN, str(error))
        except KubeError as error:
            return Result(Outcome.UNKNOWN, str(error))
        return Result(Outcome.BOUND)

    async def _look(self, reservation: Reservation) -> Result | None:
        """What a live GET proves: bound by us, refused (gone, another pod, bound elsewhere), or None: still
        unbound."""
        try:
            pod = await self._client.get(PODS, reservation.name, Pod, namespace=reservation.namespace)
        except NotFound as error:
            return Result(Outcome.REFUSED, str(error))
        except KubeError as error:
            return Result(Outcome.UNKNOWN, str(error))
        if pod.uid != reservation.uid:
            return Result(Outcome.REFUSED, f"pod {_name(reservation)} was recreated")
        if not pod.node_name:
            return None
        ours = all(
            pod.annotations.get(key) == text
            for key, text in reservation.annotations.items()
            if _stays(key) and key not in self._consumed
        )
        if pod.node_name == reservation.node and ours:
            return Result(Outcome.BOUND)
        return Result(Outcome.REFUSED, f"pod {_name(reservation)} is already bound to node {pod.node_name}")

    # --- without a reservation -----------------------------------------------------------------------------

    async def _bind_without_reservation(self, args: ExtenderBindingArgs, deadline: Deadline) -> str:
        ref = ObjectRef("Pod", args.pod_name, args.pod_namespace, args.pod_uid)
        where = f"{args.pod_namespace}/{args.pod_name}"
        try:
            path = PODS.path(args.pod_namespace, args.pod_name)
            body = await self._client.request("GET", path, timeout_s=self._within(deadline))
            pod = decode(body, Pod)
            if args.pod_uid and pod.uid != args.pod_uid:
                return STALE
            if pod.node_name:
                return (
                    ""
                    if pod.node_name == args.node
                    else f"pod {where} is already bound to node {pod.node_name}"
                )
            if self._state.parse(decode(body, dict)) is not None:
                return f"no reservation for pod {where}, it will be scheduled again"
            if not self._is_ours(pod):
                return f"pod {where} is not scheduled by this scheduler"
            if not self._leadership.is_leader():
                return NOT_LEADER
            await self._bind_plainly(pod, args.node, self._within(deadline))
        except (HamiError, ValueError) as error:
            self._events.binding_failed(ref, str(error))
            return str(error)
        self._events.bound(ref, args.node)
        return ""

    def _is_ours(self, pod: Pod) -> bool:
        """Whether kube-scheduler asks us about such a pod: ours by name, and a managed resource is in it."""
        own = self._settings.scheduler_name
        if own and pod.spec.scheduler_name != own:
            return False
        return any(
            not self._managed.isdisjoint((*one.limits.keys(), *one.requests.keys())) for one in pod.slots
        )

    def _within(self, deadline: Deadline) -> float:
        """Time-out of one request to the API server."""
        return min(self._client.limits.timeout_s, deadline.left())

    async def _bind_plainly(self, pod: Pod, node: str, timeout_s: float) -> None:
        """A pod without devices (only a managed name such as the priority) gets a Binding with the `bind-`
        keys."""
        annotations = {keys.BIND_PHASE: keys.BIND_ALLOCATING, keys.BIND_TIME: str(int(self._clock()))}
        await bind_pod(
            self._client,
            namespace=pod.namespace,
            name=pod.name,
            uid=pod.uid,
            node=node,
            annotations=annotations,
            labels={},
            timeout_s=timeout_s,
        )


def _needed_locks(reservation: Reservation, node: NodeView) -> list[LockKind]:
    """The kinds of node lock that the pod's vendors want, in ascending order of their common words."""
    exact = node.annotations.get(keys.ALLOCATION_MODE) == keys.MODE_EXACT
    words = {word: kind for word, kind in reservation.locks if not (exact and word == keys.NVIDIA)}
    kinds: dict[LockKind, None] = {}
    for _, kind in sorted(words.items()):
        kinds["dsmlu" if kind == "dsmlu" else "hami"] = None
    return list(kinds)


def _stays(key: str) -> bool:
    """Whether node plugins leave this key of a placement alone (they consume the to-allocate keys and
    others)."""
    return key in (keys.ASSIGNED_NODE, keys.ASSIGNED_TIME) or (
        key.startswith("hami.io/") and key.endswith("-allocated")
    )


def _name(reservation: Reservation) -> str:
    return f"{reservation.namespace}/{reservation.name}"


def _too_late(reservation: Reservation, deadline: Deadline) -> str:
    if not deadline.has_passed:
        return ""
    return f"no Binding of pod {_name(reservation)} was sent within {format_duration(deadline.total_s)}"


def _under_way(reservation: Reservation) -> str:
    return f"a Binding of pod {_name(reservation)} is under way"
