"""ClusterState: the only mutable scheduling state, and the whole interface of the scheduling core.

No I/O, no clock, no asyncio: callers feed objects and times (`now`, Unix seconds) and get data back. One thread, one
loop; no call leaves the state half changed. Typical use by the HTTP edge:

    request = state.parse(pod_dict)               # None: the pod wants nothing managed -> echo the names
    mask = state.candidates(node_names)           # cached per identical list
    search = state.search(request, mask, now)     # judges nothing yet
    while (answer := search.advance(fits=4)) is None:
        await asyncio.sleep(0)                    # the state may change meanwhile; the search notices
    # Placement: reserved in the same step as the choice; NoFit: reasons of the newest version
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from hami.protocol import views
from hami.scheduler.answers import (
    NodeUsage,
    NoFit,
    Notice,
    Placement,
    PodOutcome,
    PodRequest,
    PodUsage,
    QuotaUsage,
    Reservation,
    Simulated,
)
from hami.vendors.types import InventoryView, NodeView, VendorProfile


class Mask(Protocol):
    """Candidate nodes of one request, by name; made by `ClusterState.candidates`."""

    @property
    def names(self) -> Sequence[str]: ...


class Search(Protocol):
    """One `/filter` in progress."""

    def advance(self, fits: int) -> Placement | NoFit | None:
        """Judge up to `fits` (>= 1) nodes exactly; None: not decided yet. A Placement is reserved on return."""
        ...


class Simulation(Protocol):
    """One dry run in progress."""

    def advance(self, fits: int) -> Simulated | None:
        """Judge up to `fits` (>= 1) nodes; None: not decided yet."""
        ...


class ClusterState:
    """Nodes, pods, quotas and reservations, and every decision that follows from them."""

    def __init__(
        self,
        profiles: Sequence[VendorProfile],
        *,
        node_policy: str = "binpack",
        card_policy: str = "spread",
        node_selector: Mapping[str, str] | None = None,
        reservation_timeout: float = 900.0,
    ) -> None: ...

    # --- objects in -------------------------------------------------------------------------------------------

    def upsert_node(self, node: NodeView, now: float) -> "NodeOutcome":
        """Take over a node as it is now. Nodes outside the label selector are dropped. Idempotent."""
        ...

    def delete_node(self, name: str) -> tuple[Reservation, ...]:
        """Forget a node; its open reservations that are not yet binding are released and returned."""
        ...

    def tick(self, now: float) -> "NodeOutcome":
        """Run the handshake timers that are due at `now` (call at `next_timer()` or every few seconds)."""
        ...

    def next_timer(self) -> float | None:
        """When `tick` or `expire` has something to do next (Unix seconds); None: nothing scheduled."""
        ...

    def upsert_pod(self, pod: views.Pod) -> PodOutcome:
        """Take over a pod as it is now (scheduler.md §4.1, §4.3). Idempotent."""
        ...

    def delete_pod(self, uid: str) -> PodOutcome:
        """Forget a pod, its usage and its reservation."""
        ...

    def upsert_quota(self, quota: views.ResourceQuota) -> None:
        """Take over the limits of one quota object; several objects on one resource: the minimum counts."""
        ...

    def delete_quota(self, namespace: str, name: str) -> None: ...

    # --- deciding ---------------------------------------------------------------------------------------------

    def parse(self, pod: Mapping[str, Any]) -> PodRequest | None:
        """The pod's device requests; None when it names none. Raises `PlacementError` for bad scoring weights."""
        ...

    def candidates(self, names: Sequence[str]) -> Mask:
        """Candidate nodes by name (cached per identical list). Unknown names fail with `node unregistered`."""
        ...

    def candidates_json(self, raw: bytes) -> Mask:
        """As `candidates`, from the JSON text of the list: an identical text is not decoded again.

        Raises `ObjectError` when it is not a list of strings.
        """
        ...

    def search(self, request: PodRequest, mask: Mask, now: float) -> Search:
        """Start a decision. An earlier reservation of the pod is dropped when the search ends, whatever its answer."""
        ...

    def place(self, request: PodRequest, mask: Mask, now: float) -> Placement | NoFit:
        """`search` run to its end in one go."""
        ...

    def fits_now(self, request: PodRequest) -> bool:
        """Whether some node fits now; reserves nothing (for touching pending pods). At most 8 exact fits."""
        ...

    def simulate(self, request: PodRequest, nodes: Sequence[NodeView]) -> Simulation:
        """Dry run on the given nodes, all empty; quota is the live one. Changes nothing."""
        ...

    def quota_allows(self, request: PodRequest) -> bool:
        """The admission check: whether the namespace's quota leaves room for amounts known before a card is chosen."""
        ...

    # --- reservations -----------------------------------------------------------------------------------------

    def reservation(self, uid: str) -> Reservation | None:
        """The open reservation of a pod."""
        ...

    def binding_started(self, uid: str) -> Reservation:
        """A Binding is about to be sent: from now on the reservation does not expire. KeyError without one."""
        ...

    def binding_refused(self, uid: str) -> None:
        """The API server refused definitely, or leadership was lost before the Binding: release. No-op without one."""
        ...

    def binding_unsent(self, uid: str) -> None:
        """Nothing was sent (node lock contention): back to `RESERVED`, kube-scheduler will come again."""
        ...

    def binding_unknown(self, uid: str) -> None:
        """The outcome is unknown: held without expiry until settled."""
        ...

    def binding_confirmed(self, uid: str) -> None:
        """201, or a GET showed the pod bound by us: held until the watch shows the bound pod."""
        ...

    def expire(self, now: float) -> tuple[Reservation, ...]:
        """Release reservations never bound within the timeout; each deserves an event `ReservationExpired`."""
        ...

    def drop_reservations(self) -> tuple[Reservation, ...]:
        """Leadership is lost: release all reservations without a Binding under way, and return them."""
        ...

    # --- views ------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Grows with every change that can alter a decision."""
        ...

    @property
    def freed(self) -> int:
        """Grows whenever capacity is freed or added: pods that fitted nowhere deserve another try."""
        ...

    @property
    def inventory(self) -> InventoryView:
        """What is registered, for admission."""
        ...

    def node_names(self) -> Sequence[str]:
        """Registered nodes, in no particular order."""
        ...

    def node(self, name: str) -> NodeView | None:
        """The node as last seen (registered or not)."""
        ...

    def node_usage(self, name: str) -> NodeUsage:
        """Cards and usage of a registered node. KeyError otherwise."""
        ...

    def usage(self) -> Iterator[NodeUsage]:
        """Every registered node."""
        ...

    def pods(self) -> Iterator[PodUsage]:
        """Every counted pod, placed or reserved."""
        ...

    def quota_usage(self) -> Iterator[QuotaUsage]:
        """Every namespace and resource with a limit or some use."""
        ...

    # --- the property "incremental equals rebuilt" ------------------------------------------------------------

    def rebuild(self) -> "ClusterState":
        """A new state made from this one's objects, open reservations and handshake memory alone."""
        ...

    def fingerprint(self) -> Hashable:
        """All that decisions depend on, comparable between states."""
        ...


class NodeOutcome(Protocol):
    """What a node event asks the caller to do: handshake actions (writes: the leader only) and notices."""

    @property
    def patches(self) -> Sequence[tuple[str, Mapping[str, str | None]]]:
        """(node name, annotations to merge; None removes a key)."""
        ...

    @property
    def notices(self) -> Sequence[Notice]: ...
