"""A small cluster in memory for the tests of the scheduling core."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from hami.protocol import views
from hami.scheduler.core.answers import NodeOutcome, NoFit, Placement, PodOutcome, PodRequest
from hami.scheduler.core.state import ClusterState
from hami.vendors.config import decode_config, load_profiles
from hami.vendors.types import VendorProfile

NVIDIA = {
    "resourceCountName": "nvidia.com/gpu",
    "resourceMemoryName": "nvidia.com/gpumem",
    "resourceMemoryPercentageName": "nvidia.com/gpumem-percentage",
    "resourceCoreName": "nvidia.com/gpucores",
    "resourcePriorityName": "nvidia.com/priority",
    "defaultGPUNum": 1,
}
ALLOCATED = "hami.io/vgpu-devices-allocated"


def nvidia_profiles(**settings: Any) -> tuple[VendorProfile, ...]:
    """The NVIDIA profile with the chart's names."""
    return load_profiles(decode_config({"nvidia": {**NVIDIA, **settings}}))


def card(card_id: str, **overrides: Any) -> dict[str, Any]:
    """A registered card: 10 slots, 8000 MiB, 100 % cores, NUMA 0, healthy, model NVIDIA T4."""
    base = {"id": card_id, "count": 10, "devmem": 8000, "devcore": 100, "type": "NVIDIA T4"}
    return {**base, "mode": "hami-core", "health": True, **overrides}


def container(
    name: str = "main",
    gpus: int | None = 1,
    mem: int | str | None = None,
    cores: int | None = None,
    percent: int | None = None,
    **members: Any,
) -> dict[str, Any]:
    """A container; `gpus` None: it asks for nothing."""
    amounts = {"gpu": gpus, "gpumem": mem, "gpucores": cores, "gpumem-percentage": percent}
    limits = {f"nvidia.com/{key}": str(amount) for key, amount in amounts.items() if amount is not None}
    return {"name": name, "resources": {"limits": limits}, **members}


def sidecar(name: str, **amounts: Any) -> dict[str, Any]:
    """A native sidecar among the init containers."""
    return container(name, **amounts, restartPolicy="Always")


def pod(
    name: str = "new",
    *containers: dict[str, Any],
    inits: Sequence[dict[str, Any]] = (),
    annotations: Mapping[str, str] | None = None,
    namespace: str = "default",
    node: str | None = None,
    **status: Any,
) -> dict[str, Any]:
    """A pod object; without containers one that asks for a single GPU."""
    metadata = {
        "name": name,
        "namespace": namespace,
        "uid": f"uid-{name}",
        "annotations": dict(annotations or {}),
    }
    spec = {"containers": list(containers) or [container()], "initContainers": list(inits), "nodeName": node}
    return {
        "metadata": metadata,
        "spec": spec,
        "status": {"phase": "Running" if node else "Pending", **status},
    }


class Lab:
    """A ClusterState with short ways to feed and ask it."""

    card = staticmethod(card)
    container = staticmethod(container)
    sidecar = staticmethod(sidecar)
    pod = staticmethod(pod)
    profiles = staticmethod(nvidia_profiles)

    @classmethod
    def fresh(cls, **settings: Any) -> "Lab":
        """Another empty cluster; keywords as of ClusterState."""
        return cls(ClusterState(nvidia_profiles(), **settings))

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        self.now = 1_787_400_000.0

    def node(self, name: str, *cards: dict[str, Any], **parts: Any) -> NodeOutcome:
        """Register a node; `annotations`, `labels` and `allocatable` as keywords."""
        indexed = [{"index": at, **one} for at, one in enumerate(cards)]
        annotations = {
            "hami.io/node-nvidia-register": json.dumps(indexed),
            "hami.io/node-handshake": "Reported_now",
            **parts.get("annotations", {}),
        }
        allocatable = parts.get("allocatable")
        status = {} if allocatable is None else {"allocatable": {"nvidia.com/gpu": str(allocatable)}}
        metadata = {"name": name, "annotations": annotations, "labels": parts.get("labels", {})}
        return self.state.upsert_node(
            msgspec.convert({"metadata": metadata, "status": status}, views.Node), self.now
        )

    def see(self, obj: Mapping[str, Any]) -> PodOutcome:
        """A pod event."""
        return self.state.upsert_pod(msgspec.convert(obj, views.Pod))

    def holder(self, name: str, node: str, allocated: str, **parts: Any) -> None:
        """A running pod that holds cards."""
        slots = max(1, allocated.count(";"))
        containers = parts.pop("containers", [container(f"c{at}", gpus=None) for at in range(slots)])
        annotations = {"hami.io/vgpu-node": node, "hami.io/vgpu-time": "1", ALLOCATED: allocated}
        self.see(pod(name, *containers, annotations=annotations, node=node, **parts))

    def quota(self, namespace: str, name: str = "quota", **limits: int | str) -> None:
        """A quota object: `gpumem=`, `gpucores=` as limits."""
        hard = {f"limits.nvidia.com/{key}": str(limit) for key, limit in limits.items()}
        obj = {"metadata": {"name": name, "namespace": namespace}, "spec": {"hard": hard}}
        self.state.upsert_quota(msgspec.convert(obj, views.ResourceQuota))

    def request(self, obj: Mapping[str, Any]) -> PodRequest:
        """The parsed requests of a pod that has some."""
        found = self.state.parse(obj)
        assert found is not None
        return found

    def filter(self, obj: Mapping[str, Any], *names: str) -> Placement | NoFit:
        """The answer for these candidates (default: every registered node)."""
        mask = self.state.candidates(names or sorted(self.state.node_names()))
        return self.state.place(self.request(obj), mask, self.now)

    def placed(self, obj: Mapping[str, Any], *names: str) -> tuple[str, list[list[str]]]:
        """Node and card ids per container slot of a pod that fits."""
        answer = self.filter(obj, *names)
        assert isinstance(answer, Placement), answer
        slots = answer.reservation.allocations["NVIDIA"]
        return answer.node, [[device.uuid for device in slot] for slot in slots]

    def refused(self, obj: Mapping[str, Any], *names: str) -> dict[str, str]:
        """Reasons of a pod that fits nowhere."""
        answer = self.filter(obj, *names)
        assert isinstance(answer, NoFit), answer
        return {**answer.failed, **answer.unresolvable}

    def used(self, node: str) -> dict[str, tuple[int, int, int]]:
        """Slots, MiB and cores in use per card."""
        cards = self.state.node_usage(node).cards
        return {one.info.id: (one.used.slots, one.used.mem, one.used.cores) for one in cards}

    def quota_used(self, namespace: str, resource: str = "gpumem") -> int:
        """Use of a resource in a namespace."""
        found = [
            one.used
            for one in self.state.quota_usage()
            if (one.namespace, one.resource) == (namespace, f"nvidia.com/{resource}")
        ]
        return found[0] if found else 0

    def bound(self, obj: Mapping[str, Any]) -> dict[str, Any]:
        """The pod as the watch shows it once the Binding of its reservation is through."""
        reservation = self.state.reservation(obj["metadata"]["uid"])
        assert reservation is not None
        metadata = {
            **obj["metadata"],
            "annotations": reservation.binding_annotations(self.now),
            "labels": dict(reservation.labels),
        }
        return {**obj, "metadata": metadata, "spec": {**obj["spec"], "nodeName": reservation.node}}


@pytest.fixture
def lab() -> Lab:
    """An empty cluster with the default policies."""
    return Lab(ClusterState(nvidia_profiles()))
