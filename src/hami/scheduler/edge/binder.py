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

from hami.kube.client import Client
from hami.kube.errors import ApiError, Conflict, CredentialError, KubeError, NotFound, TooManyRequests
from hami.kube.events import ObjectRef
from hami.kube.operations import bind_pod
from hami.kube.resources import PODS
from hami.protocol import keys
from hami.protocol.errors import HamiError
from hami.protocol.extender import ExtenderBindingArgs
from hami.protocol.lock import LockOwner
from hami.protocol.views import Pod, decode
from hami.scheduler.core.answers import Reservation, ReservationPhase
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge.events import SchedulerEvents, pod_of
from hami.scheduler.edge.leader import Leadership
from hami.scheduler.edge.node_locks import LockContention, LockFailed, NodeLocks
from hami.vendors.types import NodeView

STALE = "stale bind request"
NOT_LEADER = "not the leader"
_SETTLE_FIRST_S, _SETTLE_CAP_S = 0.1, 30.0
_NOTES = 10_000

log = logging.getLogger(__name__)


class Outcome(enum.Enum):
    """What became of a Binding."""

    BOUND = "bound"
    REFUSED = "refused"
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
    """Seconds a pod-group member waits for a locked node (0: none), and the longest answer to
    kube-scheduler."""

    lock_retry_s: float = 28.0
    answer_within_s: float = 25.0
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
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        """``catch_up`` brings what is bound to a node into the state, as far as that is needed; asked with
        the node's lock in hand, it raises ``HamiError`` when it cannot."""
        self._client = client
        self._state = state
        self._leadership = leadership
        self._locks = locks
        self._events = events
        self._settings = settings or BinderSettings()
        self._managed = {name for profile in state.profiles.values() for name in profile.names.all()}
        self._catch_up = catch_up
        self._clock = clock
        self._sleep = sleep
        self._settling: dict[str, asyncio.Task[Result]] = {}
        self._locking: set[str] = set()  # pod uids whose node lock is being taken
        self._acquired: dict[str, str] = {}  # pod uid -> lock text written for it, until the outcome is known
        self._notes: OrderedDict[str, PodNote] = OrderedDict()

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
        reservation = self._state.reservation(args.pod_uid)
        if reservation is None:
            return await self._bind_without_reservation(args)
        if (reservation.node, reservation.namespace, reservation.name) != (
            args.node,
            args.pod_namespace,
            args.pod_name,
        ):
            return STALE
        if reservation.phase is ReservationPhase.BOUND:
            return ""
        if reservation.phase is not ReservationPhase.RESERVED:
            return await self._answer_of_settling(reservation)
        if not self._leadership.is_leader():
            self._state.binding_refused(args.pod_uid)
            return NOT_LEADER
        node = self._state.node(args.node)
        if node is None:
            self._state.binding_refused(args.pod_uid)
            self._events.binding_failed(pod_of(reservation), f"failed to get node {args.node}")
            return f'node "{args.node}" not found'
        if args.pod_uid in self._locking:  # two attempts would release each other's lock
            return _under_way(reservation)
        self._locking.add(args.pod_uid)
        try:
            failure = await self._lock(reservation, node)
        finally:
            self._locking.discard(args.pod_uid)
        if failure:
            self._events.binding_failed(pod_of(reservation), failure)
            return failure
        if self._catch_up is not None:
            try:
                await self._catch_up(args.node)
            except HamiError as error:
                await self._release(reservation)
                failure = f"the pods of node {args.node} cannot be read: {error}"
                self._events.binding_failed(pod_of(reservation), failure)
                return failure
        return await self._send_first(reservation)

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

    async def close(self) -> None:
        """Stop settling (the process ends)."""
        tasks = list(self._settling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- locks ---------------------------------------------------------------------------------------------

    async def _lock(self, reservation: Reservation, node: NodeView) -> str:
        """Take the locks this reservation needs; the reason why that failed, else ""."""
        exact = node.annotations.get(keys.ALLOCATION_MODE) == keys.MODE_EXACT
        needed = [
            word for word, kind in reservation.locks if kind == "hami" and not (exact and word == keys.NVIDIA)
        ]
        if not needed:
            return ""
        owner = LockOwner(reservation.namespace, reservation.name)
        note = self._notes.get(reservation.uid, _NOTHING_NOTED)
        retry_s = self._settings.lock_retry_s if note.group_member else 0.0
        try:
            if retry_s > 0:
                acquired = await self._locks.acquire_within(reservation.node, owner, retry_s)
            else:
                acquired = await self._locks.acquire(reservation.node, owner)
        except LockContention as error:
            if error.unbound is not None and not self._holds_room(error.unbound):
                # Nobody is binding the holder: whoever was has died, and it will come back for its lock. The
                # room that we hold here may be what it waits for, as we wait for its lock.
                self._state.binding_refused(reservation.uid)
            return str(error)
        except LockFailed as error:
            if error.written:
                self._acquired[reservation.uid] = error.written
                await self._release(reservation)
            return str(error)
        if acquired:
            self._acquired[reservation.uid] = acquired
        return ""

    def _holds_room(self, pod: LockOwner) -> bool:
        return any(
            (one.namespace, one.name) == (pod.namespace, pod.name) for one in self._state.reservations()
        )

    async def _release(self, reservation: Reservation) -> None:
        text = self._acquired.pop(reservation.uid, "")
        if not text:
            return
        try:
            await self._locks.release(
                reservation.node, LockOwner(reservation.namespace, reservation.name), text
            )
        except LockFailed as error:
            log.warning("lock.release_failed", extra={"node": reservation.node, "reason": str(error)})

    # --- the Binding ---------------------------------------------------------------------------------------

    async def _send_first(self, reservation: Reservation) -> str:
        uid = reservation.uid
        current = self._state.reservation(uid)
        if (
            current is None
            or current.node != reservation.node
            or current.phase is not ReservationPhase.RESERVED
        ):
            await self._release(reservation)
            return STALE
        if not self._leadership.is_leader():
            self._state.binding_refused(uid)
            await self._release(reservation)
            return NOT_LEADER
        if changed := self._state.outgrown(uid):
            self._state.binding_refused(uid)
            await self._release(reservation)
            text = f"{changed}, pod {_name(reservation)} will be scheduled again"
            self._events.binding_failed(pod_of(reservation), text)
            return text
        reservation = self._state.binding_started(uid)
        annotations = reservation.binding_annotations(self._clock())
        task = asyncio.create_task(self._drive(reservation, annotations))
        self._settling[uid] = task
        task.add_done_callback(lambda done: self._forget(uid, done))
        return await self._answer_of_settling(reservation)

    async def _answer_of_settling(self, reservation: Reservation) -> str:
        task = self._settling.get(reservation.uid)
        if task is None:
            return _under_way(reservation)
        done, _ = await asyncio.wait({task}, timeout=self._settings.answer_within_s)
        if not done:
            return (
                f"the outcome of the Binding of pod {reservation.namespace}/{reservation.name} is unknown, "
                "it is being settled"
            )
        return task.result().text

    def _forget(self, uid: str, task: asyncio.Task[Result]) -> None:
        if self._settling.get(uid) is task:
            del self._settling[uid]
        if not task.cancelled() and task.exception() is not None:
            self._state.binding_unsent(uid)  # may expire or be replaced; if it was bound, the watch will tell
            log.error("binding.crashed", extra={"uid": uid}, exc_info=task.exception())

    async def _drive(self, reservation: Reservation, annotations: Mapping[str, str]) -> Result:
        """Send the Binding until its outcome is known, and draw the consequences."""
        result = await self._attempt(reservation, annotations, repeated=False)
        if result.outcome is Outcome.UNKNOWN:
            self._state.binding_unknown(reservation.uid)
            log.warning("binding.unknown", extra={"pod": _name(reservation), "reason": result.text})
            result = await self._settle(reservation, annotations)
        if result.outcome is Outcome.BOUND:
            self._acquired.pop(reservation.uid, None)  # the lock is the plugin's from now on
            self._state.binding_confirmed(reservation.uid)
            self._events.bound(pod_of(reservation), reservation.node)
            note = self._notes.pop(reservation.uid, _NOTHING_NOTED)
            if note.privileged and self._settings.privileged_allowed:
                self._events.unlimited(pod_of(reservation), note.privileged)
            log.info("pod.bound", extra={"pod": _name(reservation), "node": reservation.node})
        else:
            self._state.binding_refused(reservation.uid)
            await self._release(reservation)
            self._events.binding_failed(pod_of(reservation), result.text)
            log.info("binding.refused", extra={"pod": _name(reservation), "reason": result.text})
        return result

    async def _settle(self, reservation: Reservation, annotations: Mapping[str, str]) -> Result:
        """GET, and the same Binding again while the pod is unbound: only a definite answer ends this
        (decision 25)."""
        delay = _SETTLE_FIRST_S
        while True:
            await self._sleep(delay)
            delay = min(_SETTLE_CAP_S, delay * 2)
            result = await self._look(reservation)
            if result is None and self._leadership.is_leader():
                result = await self._attempt(reservation, annotations, repeated=True)
            if result is not None and result.outcome is not Outcome.UNKNOWN:
                return result

    async def _attempt(
        self, reservation: Reservation, annotations: Mapping[str, str], *, repeated: bool
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
            )
        except Conflict as error:
            seen = await self._look(reservation)
            return seen or Result(Outcome.REFUSED, str(error))
        except (TooManyRequests, CredentialError) as error:
            # this one was not processed; an earlier one of unknown outcome may still land
            return Result(Outcome.UNKNOWN if repeated else Outcome.REFUSED, str(error))
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
            pod.annotations.get(key) == text for key, text in reservation.annotations.items() if _stays(key)
        )
        if pod.node_name == reservation.node and ours:
            return Result(Outcome.BOUND)
        return Result(Outcome.REFUSED, f"pod {_name(reservation)} is already bound to node {pod.node_name}")

    # --- without a reservation -----------------------------------------------------------------------------

    async def _bind_without_reservation(self, args: ExtenderBindingArgs) -> str:
        ref = ObjectRef("Pod", args.pod_name, args.pod_namespace, args.pod_uid)
        where = f"{args.pod_namespace}/{args.pod_name}"
        try:
            body = await self._client.request("GET", PODS.path(args.pod_namespace, args.pod_name))
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
            await self._bind_plainly(pod, args.node)
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

    async def _bind_plainly(self, pod: Pod, node: str) -> None:
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
        )


def _stays(key: str) -> bool:
    """Whether node plugins leave this key of a placement alone (they consume the to-allocate keys and
    others)."""
    return key in (keys.ASSIGNED_NODE, keys.ASSIGNED_TIME) or (
        key.startswith("hami.io/") and key.endswith("-allocated")
    )


def _name(reservation: Reservation) -> str:
    return f"{reservation.namespace}/{reservation.name}"


def _under_way(reservation: Reservation) -> str:
    return f"a Binding of pod {_name(reservation)} is under way"
