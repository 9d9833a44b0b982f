"""Which device IDs belong to which container: the pure part of the kubelet's device manager."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hami.protocol.errors import HamiError

HEALTHY = "Healthy"


class AllocationRefusedError(HamiError):
    """The kubelet cannot give a container its devices; the pod fails with UnexpectedAdmissionError."""


@dataclass(slots=True)
class Grant:
    """What one container got of one resource; ``answer`` is the serialised ContainerAllocateResponse."""

    pod_uid: str
    container: str
    resource: str
    device_ids: tuple[str, ...]
    answer: bytes


@dataclass(slots=True)
class Offer:
    """The devices of one resource as its plugin reported them, in its order: ID -> health and NUMA nodes."""

    health: dict[str, str] = field(default_factory=dict)
    numa: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def healthy(self) -> list[str]:
        return [device for device, state in self.health.items() if state == HEALTHY]


class DeviceBook:
    """Offers and grants of one node."""

    def __init__(self) -> None:
        self.offers: dict[str, Offer] = {}
        self.grants: list[Grant] = []

    def capacity(self) -> dict[str, tuple[int, int]]:
        """Resource -> (all devices, healthy devices)."""
        return {name: (len(offer.health), len(offer.healthy())) for name, offer in self.offers.items()}

    def known(self, resource: str) -> bool:
        """Whether a plugin ever offered the resource here."""
        return resource in self.offers

    def replace(self, resource: str, health: Mapping[str, str], numa: Mapping[str, tuple[int, ...]]) -> None:
        self.offers[resource] = Offer(dict(health), dict(numa))

    def lose(self, resource: str) -> None:
        """The plugin has gone: its devices stay known but count as unhealthy."""
        offer = self.offers.get(resource)
        if offer is not None:
            offer.health = dict.fromkeys(offer.health, "Unhealthy")

    def find(self, pod_uid: str, container: str, resource: str) -> Grant | None:
        for grant in self.grants:
            if (grant.pod_uid, grant.container, grant.resource) == (pod_uid, container, resource):
                return grant
        return None

    def of_container(self, pod_uid: str, container: str) -> list[Grant]:
        return [g for g in self.grants if g.pod_uid == pod_uid and g.container == container]

    def candidates(self, resource: str, count: int, reusable: Iterable[str]) -> tuple[list[str], list[str]]:
        """(available IDs, those that must be chosen): ``reusable`` come from the pod's init containers.

        Raises :class:`AllocationRefusedError` with the kubelet's words when there are too few.
        """
        offer = self.offers.get(resource)
        healthy = offer.healthy() if offer else []
        again = [device for device in healthy if device in set(reusable)]
        used = {device for grant in self.grants if grant.resource == resource for device in grant.device_ids}
        free = [device for device in healthy if device not in used]
        must = again[:count]
        if len(must) + len(free) < count:
            raise AllocationRefusedError(
                f"requested number of devices unavailable for {resource}. "
                f"Requested: {count}, Available: {len(must) + len(free)}"
            )
        return must + free, must

    def choose(
        self, available: list[str], must: list[str], count: int, preferred: Iterable[str]
    ) -> tuple[str, ...]:
        """``count`` IDs: the plugin's preference where it is usable, filled up in offered order."""
        chosen = list(must)
        for device in [*preferred, *available]:
            if len(chosen) == count:
                break
            if device in available and device not in chosen:
                chosen.append(device)
        return tuple(chosen)

    def release(self, pod_uid: str) -> None:
        self.grants = [grant for grant in self.grants if grant.pod_uid != pod_uid]

    def to_json(self) -> dict[str, Any]:
        """The checkpoint: grants, and the IDs that each resource had."""
        return {
            "Data": {
                "PodDeviceEntries": [
                    {
                        "PodUID": grant.pod_uid,
                        "ContainerName": grant.container,
                        "ResourceName": grant.resource,
                        "DeviceIDs": {"-1": list(grant.device_ids)},
                        "AllocResp": grant.answer,
                    }
                    for grant in self.grants
                ],
                "RegisteredDevices": {name: offer.healthy() for name, offer in self.offers.items()},
            }
        }

    def load_json(self, data: Any) -> None:
        """Take over a checkpoint that :meth:`to_json` wrote (``AllocResp`` decoded). Raises ValueError."""
        try:
            body = data["Data"]
            self.grants = [
                Grant(
                    str(entry["PodUID"]),
                    str(entry["ContainerName"]),
                    str(entry["ResourceName"]),
                    tuple(str(device) for ids in entry["DeviceIDs"].values() for device in ids),
                    bytes(entry["AllocResp"]),
                )
                for entry in body["PodDeviceEntries"]
            ]
            self.offers = {
                str(name): Offer(dict.fromkeys(map(str, devices), "Unhealthy"))
                for name, devices in body["RegisteredDevices"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the device checkpoint is malformed: {error!r}") from error
