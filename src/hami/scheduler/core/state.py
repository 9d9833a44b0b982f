"""ClusterState: the only mutable scheduling state, and the whole interface of the scheduling core.

No I/O, no clock, no asyncio: callers feed objects and times (`now`, Unix seconds) and get data back. One
thread, one loop; no call leaves the state half changed. Typical use by the HTTP edge:

    request = state.parse(pod_dict)               # None: the pod wants nothing managed -> echo the names
    mask = state.candidates(node_names)           # cached per identical list
    search = state.search(request, mask, now)     # judges nothing yet
    while (answer := search.advance(fits=4)) is None:
        await asyncio.sleep(0)                    # the state may change meanwhile; the search notices
    # Placement: reserved in the same step as the choice; NoFit: reasons of the newest version
"""

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hami.protocol import views
from hami.scheduler.core.answers import (
    CardUsage,
    NodeOutcome,
    NodeUsage,
    NoFit,
    Placement,
    PlacementError,
    PodOutcome,
    PodRequest,
    PodUsage,
    QuotaUsage,
    Reservation,
    ReservationPhase,
    Simulated,
)
from hami.scheduler.core.closed import closed_by, closed_on
from hami.scheduler.core.hosts import HostCharge, need_of
from hami.scheduler.core.inventory import Inventory, fingerprint_of
from hami.scheduler.core.masks import Mask, MaskCache, may_fit
from hami.scheduler.core.nodes import Node, facts_of
from hami.scheduler.core.placement import NodeFit, fit_node, outgrown
from hami.scheduler.core.pods import Charge, PodFacts, PodReader, shape_of
from hami.scheduler.core.quota_room import shortage
from hami.scheduler.core.registration import Registry, RegistryMemory, Seen
from hami.scheduler.core.requests import parse_pod
from hami.scheduler.core.reservations import charge_of, make_reservation
from hami.scheduler.core.search import FitMemo, Search
from hami.scheduler.core.simulate import Simulation
from hami.scheduler.core.world import World
from hami.vendors.engine import card_healthy
from hami.vendors.types import InventoryView, NodeView, VendorProfile

__all__ = ["ClusterState", "Mask", "Search", "Simulated", "Simulation"]

_NO_OUTCOME = PodOutcome()
_TRIAL_FITS = 8
_OPEN_SEARCHES = 256


@dataclass(frozen=True, slots=True)
class Memory:
    """What the state knows beyond the objects it was fed."""

    open: Mapping[str, tuple[Reservation, Charge]]
    void: Mapping[str, tuple[str, str]]
    handshakes: RegistryMemory


class ClusterState:
    """Nodes, pods, quotas and reservations, and every decision that follows from them.

    What is booked for a pod is always: its open reservation, else its object (unless a later `/filter`
    voided the assignment of a pod that is not bound). `_sync` brings the books in line after every change
    of either.
    """

    def __init__(
        self,
        profiles: Sequence[VendorProfile],
        *,
        node_policy: str = "binpack",
        card_policy: str = "spread",
        node_selector: Mapping[str, str] | None = None,
        reservation_timeout: float = 900.0,
    ) -> None:
        self._profiles = {profile.common_word: profile for profile in profiles}
        self._resources = frozenset(name for profile in profiles for name in profile.names.all())
        self._node_policy = node_policy
        self._card_policy = card_policy
        self._selector = dict(node_selector or {})
        self._timeout = reservation_timeout
        self._world = World(self._profiles)
        self._registry = Registry(self._profiles)
        self._reader = PodReader(self._profiles)
        self._pods: dict[str, PodFacts] = {}
        self._quotas: dict[tuple[str, str], views.ResourceQuota] = {}
        self._open: dict[str, tuple[Reservation, Charge]] = {}
        self._void: dict[str, tuple[str, str]] = {}  # uid -> decision a later /filter replaced
        self._masks = MaskCache()
        self._memo = FitMemo()
        self._searches: dict[str, Search] = {}
        self._inventory = Inventory(self._world.table)

    # --- objects in ---------------------------------------------------------------------------------------

    def upsert_node(self, node: views.Node, now: float) -> NodeOutcome:
        """Take over a node as it is now. Nodes outside the label selector are dropped. Idempotent."""
        facts = facts_of(node, self._resources)
        if any(facts.labels.get(key) != value for key, value in self._selector.items()):
            self.delete_node(facts.name)
            return NodeOutcome()
        return self._applied(self._registry.see(facts, now))

    def delete_node(self, name: str) -> tuple[Reservation, ...]:
        """Forget a node; its open reservations without a Binding under way are released and returned."""
        self._registry.forget(name)
        self._world.drop_node(name)
        return self._release_where(lambda one: one.node == name and one.phase is ReservationPhase.RESERVED)

    def tick(self, now: float) -> NodeOutcome:
        """Run the handshake timers that are due at `now` (call at `next_timer()`, or every few seconds)."""
        return self._applied(self._registry.tick(now))

    def handshake_writes(self, name: str, now: float) -> NodeOutcome:
        """Handshake values still to be written on a node, seen or not: for a replica that has just become the
        leader."""
        return self._applied(self._registry.writes(name, now))

    def next_timer(self) -> float | None:
        """When `tick` or `expire` has something to do next (Unix seconds); None: nothing scheduled."""
        times = [one.reserved_at + self._timeout for one, _ in self._open.values() if _expires(one)]
        handshake = self._registry.next_timer()
        return min([*times, *(() if handshake is None else (handshake,))], default=None)

    def upsert_pod(self, pod: views.Pod) -> PodOutcome:
        """Take over a pod as it is now (scheduler.md §4.1, §4.3). Idempotent."""
        if pod.is_finished:
            return replace(self.delete_pod(pod.uid), notices=())
        uid, node = pod.uid, sys.intern(pod.node_name)
        shape = shape_of(pod)
        reading = self._reader.read(pod, shape)
        host = HostCharge(node, need_of(pod, shape)) if node else None
        if reading.facts is None:
            self._pods.pop(uid, None)
        else:
            if host is not None and uid not in self._pods:
                allocations = reading.facts.charge.allocations
                self._world.fragmentation.mix.note_placed(uid, allocations, host.amount)
            self._pods[uid] = reading.facts
        open_ = self._open.get(uid)
        if host is not None or open_ is None:
            self._world.set_host_charge(uid, host)
        missing: Mapping[str, str] = {}
        closed = open_ is not None and bool(node)
        if open_ is not None and closed:
            del self._open[uid]
            if node == open_[0].node:
                missing = {key: text for key, text in open_[0].labels.items() if key not in pod.labels}
        if node and uid in self._searches:
            self._close_search(uid, f"pod {pod.namespace}/{pod.name} is already bound to node {node}")
        self._sync(uid)
        notices = (*reading.notices, *closed_by(self._world, uid))
        return PodOutcome(notices, closed, missing) if notices or closed else _NO_OUTCOME

    def delete_pod(self, uid: str) -> PodOutcome:
        """Forget a pod, its usage and its reservation."""
        self._pods.pop(uid, None)
        self._void.pop(uid, None)
        closed = self._open.pop(uid, None) is not None
        self._world.set_host_charge(uid, None)
        self._close_search(uid, "the pod was deleted or has ended while it was being placed")
        self._sync(uid)
        return PodOutcome(closed=closed)

    def upsert_quota(self, quota: views.ResourceQuota) -> None:
        """Take over the limits of one quota object; several objects on one resource: the minimum counts."""
        self._quotas[quota.namespace, quota.name] = quota
        self._world.set_quota(quota)

    def delete_quota(self, namespace: str, name: str) -> None:
        """Forget the limits of one quota object."""
        self._quotas.pop((namespace, name), None)
        self._world.drop_quota(namespace, name)

    # --- deciding -----------------------------------------------------------------------------------------

    def parse(self, pod: Mapping[str, Any]) -> PodRequest | None:
        """The pod's device requests; None when it names none.

        Raises `PlacementError` for bad scoring weights, `ObjectError` for what is no pod.
        """
        return parse_pod(pod, self._profiles, self._node_policy, self._card_policy)

    def candidates(self, names: Sequence[str]) -> Mask:
        """Candidate nodes by name (cached per identical list). Unknown names fail with `node
        unregistered`."""
        return self._masks.of(names)

    def candidates_json(self, raw: bytes) -> Mask:
        """As `candidates`, from the JSON text of the list: an identical text is not decoded again.

        Raises `ObjectError` when it is not a list of strings.
        """
        return self._masks.of_json(raw)

    def search(self, request: PodRequest, mask: Mask, now: float) -> Search:
        """Start a decision; the pod's earlier reservation, or unbound assignment, is void from here on.

        Raises `PlacementError` for a pod that is bound or whose Binding is not settled.
        """
        uid = request.info.uid
        who = f"pod {request.info.namespace}/{request.info.name}"
        facts, open_ = self._pods.get(uid), self._open.get(uid)
        if open_ is not None and not _expires(open_[0]):
            raise PlacementError(f"the Binding of {who} to node {open_[0].node} is not settled yet")
        if facts is not None and facts.bound:
            raise PlacementError(f"{who} is already bound to node {facts.charge.node}")
        self._close_search(uid, f"a newer request for {who} took over")
        if facts is not None:
            self._void[uid] = facts.decision
        self.release(uid)
        self._world.fragmentation.mix.note_request(self._profiles, request.info, request.slots, request.host)
        search = Search(self._world, self._memo, request, mask, now, self._reserve)
        self._searches = {other: one for other, one in self._searches.items() if one.open}
        self._searches[uid] = search
        if len(self._searches) > _OPEN_SEARCHES:  # nobody goes on with these
            oldest = next(iter(self._searches))
            self._close_search(oldest, "too many searches were started and not finished")
        return search

    def place(self, request: PodRequest, mask: Mask, now: float) -> Placement | NoFit:
        """`search` run to its end in one go."""
        search = self.search(request, mask, now)
        while (answer := search.advance(1024)) is None:
            pass
        return answer

    def fits_now(self, request: PodRequest) -> bool:
        """Whether some node fits now; reserves nothing. At most 8 exact fits."""
        return any(self.trials(request))

    def trials(self, request: PodRequest) -> Iterator[bool]:
        """`fits_now` in steps of one exact fit: whether that node fits. The state may change in between."""
        table = self._world.table
        alive = may_fit(table, self._profiles, request)
        quotas = self._world.quotas(request.info.namespace, request.vendors)
        for row in table.ranking(lowest=request.node_policy == "spread").among(alive, _TRIAL_FITS):
            node = table.by_row[row]
            if node is not None:
                yield fit_node(node, request, quotas, self._world.fragmentation).allocations is not None

    def simulate(self, request: PodRequest, nodes: Sequence[views.Node]) -> Simulation:
        """Dry run on the given nodes, all empty; quota is the live one. Changes nothing."""
        quotas = self._world.quotas(request.info.namespace, request.vendors)
        return Simulation(self._profiles, self._resources, request, nodes, quotas)

    def quota_allows(self, request: PodRequest) -> bool:
        """The admission check: whether the namespace's quota leaves room for the amounts known before cards
        are chosen.

        Advisory: the fit checks again with what the chosen cards give.
        """
        return not self.quota_shortage(request)

    def quota_shortage(self, request: PodRequest) -> str:
        """What `quota_allows` misses, in words; "": nothing. Amounts in recorded units (memory: MiB)."""
        return shortage(self._world, self._inventory, request)

    # --- reservations -------------------------------------------------------------------------------------

    def reservation(self, uid: str) -> Reservation | None:
        """The open reservation of a pod."""
        found = self._open.get(uid)
        return None if found is None else found[0]

    def outgrown(self, uid: str) -> str:
        """Why the pod's reservation must not be bound any more; empty if all it holds is still there for it.
        KeyError without one."""
        reservation = self._open[uid][0]
        node = self._world.table.by_name.get(reservation.node)
        if node is None:
            return f"node {reservation.node} is not registered any more"
        return outgrown(node, reservation.allocations)

    def release(self, uid: str) -> Reservation | None:
        """Drop the pod's reservation, whatever its phase, and return it. No-op without one."""
        found = self._open.pop(uid, None)
        if found is not None:
            self._world.set_host_charge(uid, None)
        self._sync(uid)
        return None if found is None else found[0]

    def binding_started(self, uid: str) -> Reservation:
        """A Binding is about to be sent: from now on the reservation does not expire. KeyError without
        one."""
        self._set_phase(uid, ReservationPhase.BINDING)
        return self._open[uid][0]

    def binding_refused(self, uid: str) -> None:
        """The API server refused definitely, or leadership was lost before the Binding: release. No-op
        without one."""
        self.release(uid)

    def binding_unsent(self, uid: str) -> None:
        """Nothing was sent (node lock contention): it may expire again, kube-scheduler will come back."""
        if uid in self._open:
            self._set_phase(uid, ReservationPhase.RESERVED)

    def binding_unknown(self, uid: str) -> None:
        """The outcome is unknown: held without expiry until settled. No-op without a reservation."""
        if uid in self._open:
            self._set_phase(uid, ReservationPhase.UNKNOWN)

    def binding_confirmed(self, uid: str) -> None:
        """201, or a GET showed the pod bound by us: held until the watch shows it. No-op without a
        reservation."""
        if uid in self._open:
            self._set_phase(uid, ReservationPhase.BOUND)

    def expire(self, now: float) -> tuple[Reservation, ...]:
        """Release reservations never bound within the timeout; each deserves an event
        `ReservationExpired`."""
        for uid, (one, charge) in self._open.items():
            if one.reserved_at > now:  # the clock was set back: the time starts anew
                self._open[uid] = (replace(one, reserved_at=now), charge)
        return self._release_where(lambda one: _expires(one) and now - one.reserved_at >= self._timeout)

    def drop_reservations(self) -> tuple[Reservation, ...]:
        """Leadership is lost: release all reservations without a Binding under way, and return them."""
        return self._release_where(_expires)

    def reservations(self) -> Sequence[Reservation]:
        """Every open reservation."""
        return [one for one, _ in self._open.values()]

    # --- views --------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Grows with every change that can alter a decision."""
        return self._world.version

    @property
    def freed(self) -> int:
        """Grows whenever capacity is freed or added: pods that fitted nowhere deserve another try."""
        return self._world.freed

    @property
    def doubtful_registrations(self) -> int:
        """Nodes whose registration is unreadable or has unreadable parts, counted per vendor."""
        return self._registry.doubtful

    @property
    def inventory(self) -> InventoryView:
        """What is registered, for admission."""
        return self._inventory

    @property
    def profiles(self) -> Mapping[str, VendorProfile]:
        """The configured vendors by common word."""
        return self._profiles

    def node_names(self) -> Sequence[str]:
        """Registered nodes, in no particular order."""
        return list(self._world.table.by_name)

    def seen_names(self) -> Sequence[str]:
        """Nodes seen, registered or not."""
        return self._registry.names()

    def node(self, name: str) -> NodeView | None:
        """The node as last seen, registered or not."""
        return self._registry.facts(name)

    def node_version(self, name: str) -> int:
        """Changes with anything `node_usage` shows. KeyError for a node that is not registered."""
        return self._world.table.by_name[name].version

    def node_usage(self, name: str) -> NodeUsage:
        """Cards and usage of a registered node. KeyError otherwise."""
        return _usage(self._world.table.by_name[name])

    def usage(self) -> Iterator[NodeUsage]:
        """Every registered node."""
        return (_usage(node) for node in self._world.table.registered())

    def pods(self) -> Iterator[PodUsage]:
        """Every counted pod, placed or reserved."""
        return (
            PodUsage(
                one.uid,
                one.namespace,
                one.name,
                one.node,
                one.allocations,
                one.effective,
                one.annotations,
                one.uid in self._open,
            )
            for one in self._world.charges()
        )

    def quota_usage(self) -> Iterator[QuotaUsage]:
        """Every namespace and resource with a limit or some use."""
        return self._world.quota.usage()

    # --- other profiles -----------------------------------------------------------------------------------

    def successor(self, profiles: Sequence[VendorProfile]) -> "ClusterState":
        """A state with these profiles (of all the vendors here at least) that knows nothing yet but the
        handshakes: feed it every object there is, then let this one `take_over` from it."""
        made = ClusterState(
            profiles,
            node_policy=self._node_policy,
            card_policy=self._card_policy,
            node_selector=self._selector,
            reservation_timeout=self._timeout,
        )
        made._registry.adopt(self._registry.memory())
        return made

    def take_over(self, made: "ClusterState") -> None:
        """Go on with the profiles of a `successor` that was fed the same objects, and what it made of them.

        Open reservations and voided decisions stay; searches under way are closed. Requests parsed before
        must not be used any more.
        """
        for uid in list(self._searches):
            self._close_search(uid, "the device config has changed while the pod was being placed")
        made._world.version += self._world.version + 1
        made._world.freed += self._world.freed + 1
        self._profiles, self._resources = made._profiles, made._resources
        self._world, self._inventory = made._world, made._inventory
        self._registry, self._reader = made._registry, made._reader
        self._pods, self._quotas = made._pods, made._quotas
        self._masks, self._memo = made._masks, made._memo
        self._book_memory()

    # --- the property "incremental equals rebuilt" (D30) --------------------------------------------------

    def memory(self) -> Memory:
        """What a rebuilt state needs beside the objects: reservations, voided decisions, handshake memory."""
        return Memory(dict(self._open), dict(self._void), self._registry.memory())

    def adopt(self, memory: Memory) -> None:
        """Take over the memory of another state; only on a state that has seen nothing yet."""
        self._open = dict(memory.open)
        self._void = dict(memory.void)
        self._registry.adopt(memory.handshakes)
        self._book_memory()

    def fingerprint(self) -> Hashable:
        """All that decisions depend on, comparable between states."""
        charges = {one.uid: (one.namespace, one.node, one.effective) for one in self._world.charges()}
        return (
            fingerprint_of(self._world.table),
            repr(sorted(charges.items())),
            tuple((name, node.host_left) for name, node in sorted(self._world.table.by_name.items())),
            tuple(self.quota_usage()),
            tuple(sorted((uid, one.node, one.phase.value) for uid, (one, _) in self._open.items())),
        )

    # --- inside -------------------------------------------------------------------------------------------

    def _book_memory(self) -> None:
        for uid, (reservation, _) in self._open.items():
            self._world.set_host_charge(uid, HostCharge(reservation.node, reservation.host))
        for uid in {*self._open, *self._void}:
            self._sync(uid)

    def _sync(self, uid: str) -> None:
        open_, facts = self._open.get(uid), self._pods.get(uid)
        charge = None
        if open_ is not None:
            charge = open_[1]
        elif facts is not None and (facts.bound or self._void.get(uid) != facts.decision):
            charge = facts.charge
        self._world.set_charge(uid, charge)

    def _applied(self, seen: Seen) -> NodeOutcome:
        for facts, devices in seen.changed:
            self._world.set_node(facts, devices)
        closed = tuple(one for facts, _ in seen.changed for one in closed_on(self._world, facts.name))
        return replace(seen.outcome, notices=seen.outcome.notices + closed) if closed else seen.outcome

    def _reserve(self, request: PodRequest, node: Node, fit: NodeFit, now: float) -> Reservation:
        reservation = make_reservation(self._profiles, request, node, fit, now)
        self._open[reservation.uid] = (reservation, charge_of(self._profiles, request, reservation))
        self._world.set_host_charge(reservation.uid, HostCharge(node.name, request.host))
        self._sync(reservation.uid)
        return reservation

    def _set_phase(self, uid: str, phase: ReservationPhase) -> None:
        reservation, charge = self._open[uid]
        self._open[uid] = (replace(reservation, phase=phase), charge)

    def _release_where(self, gone: Callable[[Reservation], bool]) -> tuple[Reservation, ...]:
        released = tuple(one for one, _ in self._open.values() if gone(one))
        for one in released:
            self.release(one.uid)
        return released

    def _close_search(self, uid: str, why: str) -> None:
        search = self._searches.pop(uid, None)
        if search is not None:
            search.close(why)


def _expires(reservation: Reservation) -> bool:
    return reservation.phase is ReservationPhase.RESERVED


def _usage(node: Node) -> NodeUsage:
    cards = tuple(
        CardUsage(word, card.info, card.used, card_healthy(there.profile, card.info, card.used))
        for word, there in node.vendors.items()
        for card in there.cards
    )
    return NodeUsage(node.name, node.version, cards)
