"""A scheduler's state and webhook with one vendor's profile, fed and asked in the notation of the recorded
cases."""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hami.protocol import views
from hami.protocol.admission import AdmissionAnswer, AdmissionRequest
from hami.scheduler.core.answers import NodeOutcome, NoFit, Placement
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge.webhook import Webhook, WebhookSettings
from hami.vendors.engine import container_request
from hami.vendors.types import DeviceInfo, Usage, VendorProfile

NOW = 1_787_392_800.0  # 2026-08-22 10:00:00 UTC

Limits = Mapping[str, Any]


def pod(
    *apps: Limits,
    inits: Sequence[Limits] = (),
    annotations: Mapping[str, str] | None = None,
    name: str = "p",
    namespace: str = "ns",
) -> dict[str, Any]:
    """A pod of containers given as their limits, or as whole containers where they have a `name`."""

    def container(kind: str, number: int, given: Limits) -> dict[str, Any]:
        if "name" in given:
            return dict(given)
        limits = {key: str(value) for key, value in given.items()}
        return {"name": f"{kind}{number}", **({"resources": {"limits": limits}} if limits else {})}

    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "annotations": dict(annotations or {}),
        },
        "spec": {
            "initContainers": [container("init", at, given) for at, given in enumerate(inits)],
            "containers": [container("app", at, given) for at, given in enumerate(apps)],
        },
    }


def shares(
    count: str, memory: str, cores: str, num: Any = 1, mem: Any = None, core: Any = None
) -> dict[str, Any]:
    """Limits of a vendor with these resource names; what is None is not asked."""
    limits = {count: num, memory: mem, cores: core}
    return {name: amount for name, amount in limits.items() if amount is not None}


def csv_cards(*cards: tuple[str, int, int, int, str, bool]) -> str:
    """The older register text of (id, count, MiB, cores, type, healthy)."""
    return "".join(
        f"{one},{count},{mem},{cores},{kind},0,{str(health).lower()}:"
        for one, count, mem, cores, kind, health in cards
    )


class Desk:
    """One vendor in a cluster."""

    def __init__(self, profile: VendorProfile, **settings: Any) -> None:
        self.profile = profile
        self.state = ClusterState((profile,), **settings)

    # --- objects ------------------------------------------------------------------------------------------

    def node(self, name: str, **parts: Any) -> NodeOutcome:
        """A node; `annotations`, `labels`, `capacity`, `allocatable` (default: the capacity), `now`."""
        capacity = {key: str(value) for key, value in parts.get("capacity", {}).items()}
        allocatable = {key: str(value) for key, value in parts.get("allocatable", capacity).items()}
        plain = {
            "metadata": {
                "name": name,
                "annotations": parts.get("annotations", {}),
                "labels": parts.get("labels", {}),
            },
            "status": {"capacity": capacity, "allocatable": allocatable},
        }
        return self.state.upsert_node(msgspec.convert(plain, views.Node), parts.get("now", NOW))

    def registered(self, name: str, *cards: Mapping[str, Any], **parts: Any) -> NodeOutcome:
        """A node whose plugin has written these cards as JSON."""
        annotations = {self.profile.rules.register.key: json.dumps(cards), **parts.pop("annotations", {})}
        return self.node(name, annotations=annotations, **parts)

    def hold(self, name: str, node: str, allocated: str, **parts: Any) -> None:
        """A running pod that holds cards; `annotations`, `namespace`, `slots`, `inits`, `status`."""
        written = {
            "hami.io/vgpu-node": node,
            "hami.io/vgpu-time": "1",
            self.profile.rules.allocated: allocated,
            **parts.get("annotations", {}),
        }
        slots, inits = max(allocated.count(";"), parts.get("slots", 1)), parts.get("inits", 0)
        obj = pod(*[{}] * (slots - inits), inits=[{}] * inits, annotations=written, name=name)
        obj["metadata"]["namespace"] = parts.get("namespace", "ns")
        obj["spec"]["nodeName"] = node
        obj["status"] = parts.get("status", {"phase": "Running"})
        self.state.upsert_pod(msgspec.convert(obj, views.Pod))

    def quota(self, limits: Mapping[str, Any], namespace: str = "ns") -> None:
        """A quota object with `limits.<name>` entries."""
        hard = {f"limits.{name}": str(value) for name, value in limits.items()}
        obj = {"metadata": {"name": "quota", "namespace": namespace}, "spec": {"hard": hard}}
        self.state.upsert_quota(msgspec.convert(obj, views.ResourceQuota))

    def bind(self, obj: Mapping[str, Any]) -> dict[str, Any]:
        """The watch shows the placed pod as the Binding stored it."""
        reservation = self.state.reservation(obj["metadata"]["uid"])
        assert reservation is not None
        stored = copy.deepcopy(dict(obj))
        stored["metadata"]["annotations"].update(reservation.binding_annotations(NOW))
        stored["metadata"]["labels"] = dict(reservation.labels)
        stored["spec"]["nodeName"] = reservation.node
        self.state.upsert_pod(msgspec.convert(stored, views.Pod))
        return stored

    # --- answers ------------------------------------------------------------------------------------------

    def cards(self, node: str) -> list[DeviceInfo]:
        """The registered cards; none: the vendor is not on the node."""
        if node not in self.state.node_names():
            return []
        return [card.info for card in self.state.node_usage(node).cards]

    def used(self, node: str) -> dict[str, Usage]:
        """Use of each card."""
        return {card.info.id: card.used for card in self.state.node_usage(node).cards}

    def place(self, obj: Mapping[str, Any]) -> Placement | NoFit:
        """The decision for a pod among all registered nodes."""
        request = self.state.parse(obj)
        assert request is not None
        return self.state.place(request, self.state.candidates(sorted(self.state.node_names())), NOW)

    def written(self, obj: Mapping[str, Any]) -> dict[str, str]:
        """The annotations that the Binding of a pod that fits will carry."""
        answer = self.place(obj)
        assert isinstance(answer, Placement), answer
        return dict(answer.reservation.annotations)

    def allocated(self, obj: Mapping[str, Any]) -> str:
        """The allocation text of a pod that fits."""
        return self.written(obj)[self.profile.rules.allocated]

    def refused(self, obj: Mapping[str, Any], node: str = "n1") -> str:
        """The node's reason against a pod that fits nowhere."""
        answer = self.place(obj)
        assert isinstance(answer, NoFit), answer
        reasons = {**answer.failed, **answer.unresolvable}
        return reasons[node]

    def numbers(self, obj: Mapping[str, Any], at: int = 0) -> tuple[int, int, int, int] | None:
        """{nums, mem, percent, cores} of a regular container."""
        request = container_request(self.profile, obj["spec"]["containers"][at], obj)
        if request is None:
            return None
        return request.nums, request.memreq, request.mem_percent, request.cores

    # --- admission ----------------------------------------------------------------------------------------

    def review(self, obj: Mapping[str, Any]) -> AdmissionAnswer:
        """The webhook's answer to a new pod."""
        settings = WebhookSettings(scheduler_name="hami-scheduler")
        request = AdmissionRequest(
            uid="r", operation="CREATE", namespace="ns", name="p", object=copy.deepcopy(dict(obj))
        )
        return Webhook(self.state, (self.profile,), settings).review(request)

    def denied(self, obj: Mapping[str, Any]) -> str:
        """The text of a denial."""
        answer = self.review(obj)
        assert not answer.allowed, answer
        return answer.message

    def admitted(self, obj: Mapping[str, Any]) -> dict[str, Any]:
        """The pod as it is stored."""
        answer = self.review(obj)
        assert answer.allowed, answer.message
        return patched(obj, answer.patch)


def patched(obj: Mapping[str, Any], patch: Any) -> dict[str, Any]:
    """`obj` after a JSON patch that adds, replaces and removes members of objects."""
    root: dict[str, Any] = copy.deepcopy(dict(obj))
    for operation in patch or ():
        *parents, last = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        ]
        target: Any = root
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target[part]
        if isinstance(target, list):
            position = len(target) if last == "-" else int(last)
            target[position : position + (operation["op"] == "replace")] = [operation["value"]]
        elif operation["op"] == "remove":
            del target[last]
        else:
            target[last] = operation["value"]
    return root


def limits_of(obj: Mapping[str, Any], at: int = 0) -> dict[str, str]:
    """Limits of a regular container."""
    found: dict[str, str] = obj["spec"]["containers"][at]["resources"]["limits"]
    return found
