"""`/filter` and `/bind` for kube-scheduler: bytes in, bytes out (scheduler.md §2, §6.1).

Answers are always 200 with an `Error` member: kube-scheduler discards the body of any other status. A step
of the loop stays below a few milliseconds: searches advance in slices and yield.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from hami.kube.events import ObjectRef
from hami.protocol import keys
from hami.protocol.durations import format_duration
from hami.protocol.errors import ObjectError
from hami.protocol.extender import (
    MISSING_NODES,
    MISSING_POD,
    ExtenderFilterResult,
    decode_binding_args,
    encode_binding_result,
    encode_filter_result,
)
from hami.protocol.views import MAX_OBJECT_BYTES, Node, Pod, decode
from hami.scheduler.core.answers import NoFit, Placement, PlacementError, PodRequest, Simulated
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge.binder import Binder, PodNote
from hami.scheduler.edge.deadline import ANSWER_WITHIN_S, Deadline
from hami.scheduler.edge.events import SchedulerEvents
from hami.scheduler.edge.leader import SyncGate
from hami.scheduler.edge.pending import PendingPods
from hami.scheduler.edge.shares import Shares
from hami.scheduler.edge.timing import Timings
from hami.vendors.types import VendorProfile

NOT_SYNCED = "context cancelled"
MISSING_UID = "extender args: the pod has no metadata.uid, no devices can be reserved for it"
_SLICE_S = 0.002
_FITS_PER_STEP = 1  # an exact fit of a large pod takes milliseconds: the clock is asked after each
_SETTLE_S = 20.0

log = logging.getLogger(__name__)


class Extender:
    """The extender's two verbs and the dry run."""

    def __init__(
        self,
        state: ClusterState,
        gate: SyncGate,
        binder: Binder,
        events: SchedulerEvents,
        pending: PendingPods,
        timings: Timings,
        *,
        max_body_bytes: int = MAX_OBJECT_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._state = state
        self._gate = gate
        self._binder = binder
        self._events = events
        self._pending = pending
        self._timings = timings
        self._max_body_bytes = max_body_bytes
        self._clock = clock
        self._warned_of_nodes = False
        self._shares = Shares()
        self._dry_runs = asyncio.Semaphore(1)  # anybody may ask for one; live requests take turns with it
        self.in_flight = 0

    async def filter(self, body: bytes) -> bytes:
        """Answer a filter request; with full nodes it is a dry run."""
        self.in_flight += 1
        try:
            with self._timings.filter.measure():
                return await self._filter(body, simulate=False)
        except ObjectError as error:
            return encode_filter_result(ExtenderFilterResult(error=str(error)))
        finally:
            self.in_flight -= 1

    async def simulate(self, body: bytes) -> bytes:
        """Dry run by its own route: the same bodies; names without nodes are refused."""
        try:
            return await self._filter(body, simulate=True)
        except ObjectError as error:
            return encode_filter_result(ExtenderFilterResult(error=str(error)))

    async def bind(self, body: bytes) -> bytes:
        """Answer a bind request."""
        with self._timings.bind.measure():
            try:
                args = decode_binding_args(body)
            except ObjectError as error:
                return encode_binding_result(str(error))
            return encode_binding_result(await self._binder.bind(args))

    async def _filter(self, body: bytes, *, simulate: bool) -> bytes:
        members = _members(body, self._max_body_bytes)
        pod_raw = members.get("pod")
        if pod_raw is None:
            raise ObjectError(MISSING_POD)
        nodes_raw, names_raw = members.get("nodes"), members.get("nodenames")
        if nodes_raw is None and (names_raw is None or simulate):
            raise ObjectError(MISSING_NODES)
        pod = decode(pod_raw, Pod)
        ref = ObjectRef("Pod", pod.name, pod.namespace, pod.uid)
        asking = _Asking(self._state, pod_raw)
        try:
            request = asking.request()
        except PlacementError as error:
            if nodes_raw is None:
                self._events.filtering_error(ref, str(error))
            return encode_filter_result(ExtenderFilterResult(error=str(error)))
        if request is None:
            return _echo(nodes_raw, names_raw)
        if nodes_raw is None and not pod.uid:
            raise ObjectError(MISSING_UID)
        if nodes_raw is not None:
            return await self._dry_run(asking, nodes_raw, simulate=simulate)
        assert names_raw is not None
        return await self._live(pod, ref, asking, bytes(names_raw))

    async def _live(self, pod: Pod, ref: ObjectRef, asking: _Asking, names_raw: bytes) -> bytes:
        deadline = Deadline(ANSWER_WITHIN_S)
        if not await self._gate.wait(deadline.left()):
            return encode_filter_result(ExtenderFilterResult(error=NOT_SYNCED))
        opening = self._gate.changes
        if not await self._binder.settled(pod.uid, min(_SETTLE_S, deadline.left())):
            text = f"the outcome of an earlier Binding of pod {pod.namespace}/{pod.name} is unknown"
            return encode_filter_result(ExtenderFilterResult(error=text))
        answer = await self._search(asking, names_raw, deadline, opening)
        if answer is None:
            return _echo(None, msgspec.Raw(names_raw))
        if isinstance(answer, PlacementError):
            if self._gate.changes == opening:
                self._events.filtering_error(ref, str(answer))
            return encode_filter_result(ExtenderFilterResult(error=str(answer)))
        if isinstance(answer, NoFit):
            self._events.filtering_failed(ref, answer)
            request = asking.request()
            if request is not None:
                self._pending.rejected(request)
            return encode_filter_result(
                ExtenderFilterResult(
                    failed_nodes=answer.failed or None,
                    failed_and_unresolvable_nodes=answer.unresolvable or None,
                )
            )
        self._pending.forget(pod.uid)
        self._binder.note(pod.uid, PodNote(is_group_member(pod), _privileged(pod)))
        self._events.filtering_succeeded(ref, answer)
        return encode_filter_result(ExtenderFilterResult(node_names=(answer.node,)))

    async def _search(
        self, asking: _Asking, names_raw: bytes, deadline: Deadline, opening: int
    ) -> Placement | NoFit | PlacementError | None:
        """The decision, made under one device config; None: under it the pod asks for nothing."""
        while True:
            answer = await self._search_once(asking, names_raw, deadline, opening)
            if not isinstance(answer, PlacementError) or not asking.is_outdated:
                return answer

    async def _search_once(
        self, asking: _Asking, names_raw: bytes, deadline: Deadline, opening: int
    ) -> Placement | NoFit | PlacementError | None:
        started, spent = time.perf_counter(), 0.0
        try:
            request = asking.request()
            if request is None:
                return None
            namespace = request.info.namespace
            allowed = self._shares.seconds(namespace)
            mask = self._state.candidates_json(names_raw)
            search = self._state.search(request, mask, self._clock())
            while True:
                if self._gate.changes != opening:  # others have decided, or may: what is reserved would stay
                    search.close(NOT_SYNCED)
                answer = search.advance(_FITS_PER_STEP)
                worked = time.perf_counter() - started
                if answer is not None:
                    self._shares.used(namespace, spent + worked)
                    return answer
                if worked > _SLICE_S:
                    spent += worked
                    await asyncio.sleep(0)
                    started = time.perf_counter()
                    if deadline.has_passed:  # nobody would hear of what is reserved now
                        search.close(_undecided(deadline))
                    elif spent > allowed:
                        search.close(_too_costly(namespace, spent))
                    if not search.open:
                        self._shares.used(namespace, spent)
        except PlacementError as error:
            return error

    async def _dry_run(self, asking: _Asking, nodes_raw: msgspec.Raw, *, simulate: bool) -> bytes:
        deadline = Deadline(ANSWER_WITHIN_S)
        try:
            async with asyncio.timeout(deadline.left()), self._dry_runs:
                return await self._dry_run_in_turn(asking, nodes_raw, simulate=simulate)
        except TimeoutError:
            raise ObjectError(_undecided(deadline)) from None

    async def _dry_run_in_turn(self, asking: _Asking, nodes_raw: msgspec.Raw, *, simulate: bool) -> bytes:
        if not simulate and not self._warned_of_nodes:
            self._warned_of_nodes = True
            log.warning(
                "filter.got_nodes",
                extra={"advice": "set nodeCacheCapable: true; dry runs belong to /simulate"},
            )
        items = _items(nodes_raw, self._max_body_bytes)
        nodes: list[Node] = []
        by_name: dict[str, msgspec.Raw] = {}
        started = time.perf_counter()
        for item in items:
            node = decode(item, Node)
            nodes.append(node)
            by_name[node.name] = item
            if time.perf_counter() - started > _SLICE_S:
                await asyncio.sleep(0)
                started = time.perf_counter()
        request = asking.request()
        if request is None:
            return _echo(nodes_raw, None)
        answer = await self._simulation(request, nodes)
        return encode_filter_result(
            ExtenderFilterResult(
                nodes=[by_name[name] for name in answer.fits] or None,
                failed_nodes=answer.failed or None,
            )
        )

    async def _simulation(self, request: PodRequest, nodes: Sequence[Node]) -> Simulated:
        simulation = self._state.simulate(request, nodes)
        while True:
            answer = simulation.advance(_FITS_PER_STEP)
            if answer is not None:
                return answer
            await asyncio.sleep(0)


class _Asking:
    """A pod as it came, and what it asks under the device config in force."""

    def __init__(self, state: ClusterState, raw: msgspec.Raw) -> None:
        self._state = state
        self._raw = raw
        self._profiles: Mapping[str, VendorProfile] | None = None
        self._request: PodRequest | None = None

    @property
    def is_outdated(self) -> bool:
        """Whether the config has changed since the pod was read."""
        return self._profiles is not self._state.profiles

    def request(self) -> PodRequest | None:
        """Parsed anew if need be; raises ``PlacementError`` and ``ObjectError``."""
        if self.is_outdated:
            self._request = self._state.parse(decode(self._raw, dict))
            self._profiles = self._state.profiles
        return self._request


def is_group_member(pod: Pod) -> bool:
    """Whether the pod belongs to a pod group (protocol.md §5)."""
    group = pod.spec.scheduling_group
    return bool(pod.labels.get(keys.POD_GROUP_LABEL) or (group is not None and group.pod_group_name))


def _undecided(deadline: Deadline) -> str:
    return f"no decision within {format_duration(deadline.total_s)}"


def _too_costly(namespace: str, seconds: float) -> str:
    return (
        f"no decision after {format_duration(round(seconds, 1))} of work, and pods of namespace {namespace} "
        "have used up their share of it: tried again later; fewer containers are judged faster"
    )


def _privileged(pod: Pod) -> str:
    """Name of the first privileged container, else ""."""
    for container in pod.slots:
        if container.security_context is not None and container.security_context.privileged:
            return container.name
    return ""


def _echo(nodes_raw: msgspec.Raw | None, names_raw: msgspec.Raw | None) -> bytes:
    """The answer for a pod that asks for nothing managed: everything comes back as it came."""
    null = msgspec.Raw(b"null")
    return msgspec.json.encode(
        {
            "Nodes": null if nodes_raw is None else nodes_raw,
            "NodeNames": null if names_raw is None else names_raw,
            "FailedNodes": None,
            "FailedAndUnresolvableNodes": None,
            "Error": "",
        }
    )


_members_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])


def _members(data: bytes | msgspec.Raw, max_bytes: int) -> dict[str, msgspec.Raw]:
    """Members of a JSON object by lower-case name, without nulls; the last of equal names wins."""
    if len(memoryview(data)) > max_bytes:
        raise ObjectError(f"the request is longer than {max_bytes} bytes")
    try:
        members = _members_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ObjectError(f"invalid filter request: {error}") from None
    return {name.lower(): raw for name, raw in members.items() if bytes(memoryview(raw)[:5]) != b"null"}


def _items(nodes_raw: msgspec.Raw, max_bytes: int) -> list[msgspec.Raw]:
    raw = _members(nodes_raw, max_bytes).get("items")
    if raw is None:
        return []
    try:
        return _items_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ObjectError(f"invalid node list: {error}") from None
