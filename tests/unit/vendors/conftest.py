"""One laboratory for all vendor tests: profiles, cards, pods and fits in the specification's notation."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from hami.protocol.inventory import DeviceInfo, MigPlacement, MigProfile
from hami.vendors.config import decode_config, load_profiles
from hami.vendors.engine import container_request, fit, mutate_admission, pod_info
from hami.vendors.types import (
    NO_PERCENT,
    UNLIMITED,
    Allocation,
    Card,
    ContainerRequest,
    FitContext,
    FitResult,
    PodInfo,
    QuotaView,
    Usage,
    VendorProfile,
)

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for vendor_pools, used by several files

CHART_CONFIG = Path(__file__).parents[2] / "conformance" / "cases" / "device-config-default.json"
"""The device config that HAMi's chart renders, as recorded."""

AS_RENDERED: Mapping[str, Any] = MappingProxyType({})

CHART_NVIDIA: dict[str, Any] = {
    "resourceCountName": "nvidia.com/gpu",
    "resourceMemoryName": "nvidia.com/gpumem",
    "resourceMemoryPercentageName": "nvidia.com/gpumem-percentage",
    "resourceCoreName": "nvidia.com/gpucores",
    "resourcePriorityName": "nvidia.com/priority",
    "defaultGPUNum": 1,
    "memoryFactor": 1,
    "gpuCorePolicy": "default",
}

A100_PROFILES = (
    MigProfile("1g.5gb", 4864, 15, 1, tuple(MigPlacement(start, 1) for start in range(7))),
    MigProfile("2g.10gb", 9856, 29, 2, tuple(MigPlacement(start, 2) for start in (0, 2, 4))),
    MigProfile("3g.20gb", 19968, 43, 3, (MigPlacement(0, 4), MigPlacement(4, 4))),
)


@dataclass
class Facts:
    """A node as the engine sees it."""

    name: str = "n1"
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    capacity: Mapping[str, int] = field(default_factory=dict)
    allocatable: Mapping[str, int] = field(default_factory=dict)


class NoInventory:
    """An empty cluster."""

    def kinds(self, common_word: str) -> Sequence[DeviceInfo]:
        return ()


class Lab:
    """Builders with the defaults of nvidia-scheduling.md §15."""

    no_inventory = NoInventory()
    mig_profiles = A100_PROFILES

    def nvidia(self, **section: Any) -> VendorProfile:
        """The NVIDIA profile of the chart's defaults with some keys set."""
        return load_profiles(decode_config({"nvidia": CHART_NVIDIA | section}))[0]

    def config(self, changes: Mapping[str, Any] = AS_RENDERED) -> dict[str, Any]:
        """The device config of HAMi's chart, changed at `/`-separated paths."""
        document: dict[str, Any] = json.loads(CHART_CONFIG.read_text())
        for path, value in changes.items():
            *parents, last = path.split("/")
            target: Any = document
            for part in parents:
                target = target[int(part)] if isinstance(target, list) else target.setdefault(part, {})
            target[last] = value
        return document

    def vendor(self, word: str, changes: Mapping[str, Any] = AS_RENDERED) -> VendorProfile:
        """The profile of a vendor by its common word, from the chart's config with changes."""
        profiles = load_profiles(
            decode_config(self.config(changes)), enable_ascend=True, enable_iluvatar=True
        )
        return next(profile for profile in profiles if profile.common_word == word)

    def node(self, **facts: Any) -> Facts:
        return Facts(**facts)

    def card(self, card_id: str = "d0", **values: Any) -> Card:
        """A healthy card, 0/10 slots, 0/40960 MiB, 0/100 cores; `used`, `usedmem`, `usedcores` and
        DeviceInfo fields.
        """
        used = Usage(values.pop("used", 0), values.pop("usedmem", 0), values.pop("usedcores", 0))
        used = values.pop("usage", used)
        defaults: dict[str, Any] = {
            "count": 10,
            "devmem": 40960,
            "devcore": 100,
            "type": "NVIDIA A100-SXM4-40GB",
            "health": True,
            "mode": "hami-core",
            "vendor": "NVIDIA",
        }
        return Card(DeviceInfo(id=card_id, **(defaults | values)), used)

    def mig_card(self, card_id: str = "d0", **values: Any) -> Card:
        return self.card(card_id, **({"mode": "mig", "count": 7, "mig_profiles": A100_PROFILES} | values))

    def request(
        self, nums: int = 1, mem: int = 0, percent: int = NO_PERCENT, cores: int = 0
    ) -> ContainerRequest:
        """{nums, mem, percent, cores}."""
        return ContainerRequest(nums, "NVIDIA", mem, percent, cores)

    def pod(
        self, *apps: Mapping[str, Any], inits: Sequence[Mapping[str, Any]] = (), **annotations: str
    ) -> dict[str, Any]:
        """A pod of containers given as their limits (or whole containers with a `resources` key)."""
        keyed = {name.replace("__", "/").replace("_", "-"): text for name, text in annotations.items()}
        return {
            "metadata": {"name": "p", "namespace": "ns", "uid": "u", "annotations": keyed},
            "spec": {
                "containers": [self.container(f"app{n}", app) for n, app in enumerate(apps or ({},))],
                "initContainers": [self.container(f"init{n}", init) for n, init in enumerate(inits)],
            },
        }

    def container(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        if "resources" in given or "name" in given:
            return {"name": name, **given}
        limits = {f"nvidia.com/{key}": str(value) for key, value in given.items()}
        return {"name": name, "resources": {"limits": limits}} if limits else {"name": name}

    def info(self, annotations: Mapping[str, str] | None = None, slots: int = 1, inits: int = 0) -> PodInfo:
        """A pod of `slots` containers, the first `inits` of them init containers."""
        pod: dict[str, Any] = {
            "metadata": {"name": "p", "namespace": "ns", "uid": "u", "annotations": dict(annotations or {})},
            "spec": {
                "initContainers": [{"name": f"init{n}"} for n in range(inits)],
                "containers": [{"name": f"app{n}"} for n in range(slots - inits)],
            },
        }
        return pod_info(pod)

    def fit(
        self,
        cards: Sequence[Card],
        request: ContainerRequest,
        annotations: Mapping[str, str] | None = None,
        *,
        policy: str = "",
        node: Facts | None = None,
        quota: QuotaView = UNLIMITED,
        allocated: Allocation = (),
        pod: PodInfo | None = None,
        profile: VendorProfile | None = None,
    ) -> FitResult:
        """One request on cards in ascending preference."""
        words = frozenset(word.strip() for word in policy.split(",") if word.strip())
        return fit(
            profile or self.nvidia(),
            FitContext(
                cards,
                request,
                pod or self.info(annotations, slots=len(allocated) + 1),
                node or Facts(),
                allocated,
                words,
                quota,
            ),
        )

    def admit(self, profile: VendorProfile, pod: dict[str, Any]) -> bool:
        """The webhook's calls for one pod."""
        uses = False
        for container in [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]:
            uses = mutate_admission(profile, container, pod, self.no_inventory) or uses
        return uses

    def numbers(self, profile: VendorProfile, pod: dict[str, Any]) -> list[tuple[int, int, int, int] | None]:
        """{nums, mem, percent, cores} of each regular container."""
        found: list[tuple[int, int, int, int] | None] = []
        for container in pod["spec"]["containers"]:
            request = container_request(profile, container, pod)
            if request is None:
                found.append(None)
            else:
                found.append((request.nums, request.memreq, request.mem_percent, request.cores))
        return found


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()
