"""After any sequence of events the incremental state equals one rebuilt from the objects (decision 30)."""

import json
from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hami.protocol import views
from hami.scheduler.core.answers import PlacementError
from hami.scheduler.core.search import Search
from hami.scheduler.core.state import ClusterState
from hami.vendors.config import decode_config, load_profiles
from hami.vendors.types import VendorProfile

NVIDIA = {
    "resourceCountName": "nvidia.com/gpu",
    "resourceMemoryName": "nvidia.com/gpumem",
    "resourceMemoryPercentageName": "nvidia.com/gpumem-percentage",
    "resourceCoreName": "nvidia.com/gpucores",
    "defaultGPUNum": 1,
}
HYGON = {"resourceCountName": "hygon.com/dcunum", "resourceMemoryName": "hygon.com/dcumem"}
CONFIGS: list[dict[str, Any]] = [
    {"nvidia": NVIDIA},
    {"nvidia": {**NVIDIA, "memoryFactor": 3, "defaultMemory": 400, "defaultCores": 20}, "hygon": HYGON},
]
NODES = [f"n{i}" for i in range(4)]
PODS = [f"p{i}" for i in range(4)]
SPACES = ["blue", "red"]
REGISTER, HANDSHAKE = "hami.io/node-nvidia-register", "hami.io/node-handshake"
START = 1_787_400_000.0


def profiles_of(config: int) -> tuple[VendorProfile, ...]:
    return load_profiles(decode_config(CONFIGS[config]))


def new_state(config: int = 0) -> ClusterState:
    return ClusterState(profiles_of(config), node_selector={"gpu": "on"}, reservation_timeout=900)


def node_object(name: str, cards: int) -> dict[str, Any]:
    """A healthy node with equal cards of 16000 MiB."""
    register = [
        {"id": f"{name}-c{at}", "index": at, "count": 10, "devmem": 16000, "devcore": 100, "health": True}
        for at in range(cards)
    ]
    annotations = {REGISTER: json.dumps(register), HANDSHAKE: "Requesting_2026-08-22 12:01:00"}
    metadata = {"name": name, "labels": {"gpu": "on"}, "annotations": annotations}
    return {"metadata": metadata, "status": {"allocatable": {"nvidia.com/gpu": str(10 * cards)}}}


@st.composite
def node_objects(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(NODES))
    annotations: dict[str, str] = {}
    register = draw(st.sampled_from(["cards", "cards", "cards", "malformed", "empty", "absent"]))
    if register == "cards":
        cards = [
            {
                "id": f"{name}-c{at}",
                "index": at,
                "count": draw(st.sampled_from([1, 3, 10])),
                "devmem": draw(st.sampled_from([8000, 16000])),
                "devcore": 100,
                "type": "NVIDIA T4",
                "health": draw(st.booleans()),
                "mode": "hami-core",
            }
            for at in range(draw(st.sampled_from([1, 2, 3, 9])))
        ]
        annotations[REGISTER] = json.dumps(cards)
    elif register != "absent":
        annotations[REGISTER] = {"malformed": "no json", "empty": "[]"}[register]
    handshake = draw(
        st.sampled_from(
            [
                None,
                "Reported_x",
                "Requesting_2026-08-22 12:00:00",
                "Requesting_2026-08-22 12:01:00",
                "Requesting",
            ]
        )
    )
    if handshake is not None:
        annotations[HANDSHAKE] = handshake
    if draw(st.booleans()):
        annotations["hami.io/device-cordon"] = f"{name}-c0"
    allocatable = draw(st.sampled_from([None, "0", "3", "30"]))
    status = {} if allocatable is None else {"allocatable": {"nvidia.com/gpu": allocatable}}
    labels = {"gpu": draw(st.sampled_from(["on", "on", "on", "off"]))}
    return {"metadata": {"name": name, "annotations": annotations, "labels": labels}, "status": status}


@st.composite
def allocations(draw: st.DrawFn, node: str, slots: int) -> str:
    text = ""
    for _ in range(slots):
        for _ in range(draw(st.integers(0, 2))):
            text += f"{node}-c{draw(st.integers(0, 3))},NVIDIA,{draw(st.sampled_from([0, 500, 7000]))},20:"
        text += ";"
    return draw(st.sampled_from([text, text, text, "a,b:;"]))


@st.composite
def pod_objects(draw: st.DrawFn) -> dict[str, Any]:
    """A pod as some scheduler left it: bound or not, annotated or not, starting, running or ended."""
    name = draw(st.sampled_from(PODS))
    inits = draw(st.lists(st.sampled_from(["init", "sidecar"]), max_size=2))
    apps = draw(st.integers(1, 2))
    node = draw(st.sampled_from(NODES))
    annotations: dict[str, str] = {}
    bound = draw(st.booleans())
    if draw(st.sampled_from([True, True, bound])):
        annotations["hami.io/vgpu-node"] = draw(st.sampled_from([node, node, NODES[0]]))
        annotations["hami.io/vgpu-time"] = draw(st.sampled_from(["1", "2"]))
        if draw(st.sampled_from([True, True, True, False])):
            annotations["hami.io/vgpu-devices-allocated"] = draw(allocations(node, len(inits) + apps))
    ended = draw(st.booleans())
    return {
        "metadata": {
            "name": name,
            "namespace": SPACES[int(name[1]) % 2],
            "uid": f"uid-{name}",
            "annotations": annotations,
        },
        "spec": {
            "nodeName": node if bound else None,
            "initContainers": [
                {"name": f"i{at}", **({"restartPolicy": "Always"} if kind == "sidecar" else {})}
                for at, kind in enumerate(inits)
            ],
            "containers": [{"name": f"a{at}"} for at in range(apps)],
        },
        "status": {
            "phase": draw(st.sampled_from(["Pending", "Running", "Running", "Succeeded"])),
            "initContainerStatuses": [
                {"name": f"i{at}", "state": {"terminated": {"exitCode": 0}} if ended else {"running": {}}}
                for at in range(len(inits))
            ],
        },
    }


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """A pending pod that wants devices."""
    name = draw(st.sampled_from(PODS))

    def container(kind: str) -> dict[str, Any]:
        limits = {"nvidia.com/gpu": draw(st.sampled_from(["1", "1", "2"]))}
        if draw(st.booleans()):
            limits["nvidia.com/gpumem"] = draw(st.sampled_from(["500", "7000"]))
        return {"name": kind, "resources": {"limits": limits}}

    inits = [container("i0") for _ in range(draw(st.integers(0, 1)))]
    for init in inits:
        init["restartPolicy"] = draw(st.sampled_from([None, "Always"]))
    apps = [container(f"a{at}") for at in range(draw(st.integers(1, 2)))]
    return {
        "metadata": {"name": name, "namespace": SPACES[int(name[1]) % 2], "uid": f"uid-{name}"},
        "spec": {"initContainers": inits, "containers": apps},
    }


class IncrementalEqualsRebuilt(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.state = new_state()
        self.config = 0
        self.twins: list[ClusterState] = []  # the state, and the one that is to take its place
        self.now = START
        self.nodes: dict[str, views.Node] = {}
        self.pods: dict[str, views.Pod] = {}
        self.quotas: dict[tuple[str, str], views.ResourceQuota] = {}
        self.wanted: dict[str, dict[str, Any]] = {}
        self.searches: list[Search] = []
        for name in NODES:
            self.node_changes(node_object(name, 3))

    # --- objects --------------------------------------------------------------------------------------------

    @rule(node=node_objects())
    def node_changes(self, node: dict[str, Any]) -> None:
        view = msgspec.convert(node, views.Node)
        self.nodes[view.name] = view
        for state in (self.state, *self.twins):
            state.upsert_node(view, self.now)

    @rule(name=st.sampled_from(NODES))
    def node_goes(self, name: str) -> None:
        self.nodes.pop(name, None)
        for state in (self.state, *self.twins):
            state.delete_node(name)

    @rule(pod=pod_objects())
    def pod_changes(self, pod: dict[str, Any]) -> None:
        self.see_pod(msgspec.convert(pod, views.Pod))

    @rule(name=st.sampled_from(PODS))
    def pod_goes(self, name: str) -> None:
        self.pods.pop(f"uid-{name}", None)
        for state in (self.state, *self.twins):
            state.delete_pod(f"uid-{name}")

    @rule(
        space=st.sampled_from(SPACES),
        name=st.sampled_from(["q1", "q2"]),
        limit=st.sampled_from([0, 900, 20000]),
    )
    def quota_changes(self, space: str, name: str, limit: int) -> None:
        hard = {"limits.nvidia.com/gpumem": str(limit)}
        quota = {"metadata": {"namespace": space, "name": name}, "spec": {"hard": hard}}
        view = msgspec.convert(quota, views.ResourceQuota)
        self.quotas[space, name] = view
        for state in (self.state, *self.twins):
            state.upsert_quota(view)

    @rule(space=st.sampled_from(SPACES), name=st.sampled_from(["q1", "q2"]))
    def quota_goes(self, space: str, name: str) -> None:
        self.quotas.pop((space, name), None)
        for state in (self.state, *self.twins):
            state.delete_quota(space, name)

    # --- deciding -------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NODES), cards=st.sampled_from([1, 3, 4]))
    def node_is_good(self, name: str, cards: int) -> None:
        self.node_changes(node_object(name, cards))

    @rule(pod=requests(), at_once=st.booleans())
    def filter_starts(self, pod: dict[str, Any], at_once: bool) -> None:
        known = self.pods.get(pod["metadata"]["uid"])
        if known is not None and (known.node_name or known.is_finished):
            return  # kube-scheduler filters only pods that are neither
        request = self.state.parse(pod)
        assert request is not None
        try:
            search = self.state.search(request, self.state.candidates(NODES), self.now)
        except PlacementError:
            return
        self.wanted[request.info.uid] = pod
        self.searches.append(search)
        while at_once and search.open:
            search.advance(1)

    @rule()
    def filters_go_on(self) -> None:
        for search in self.searches:
            with suppress(PlacementError):
                search.advance(1)
        self.searches = [search for search in self.searches if search.open]

    # --- binding --------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(PODS), outcome=st.sampled_from(["refused", "unsent", "unknown", "confirmed"]))
    def binding(self, name: str, outcome: str) -> None:
        uid = f"uid-{name}"
        if self.state.reservation(uid) is None:
            return
        self.state.binding_started(uid)
        getattr(self.state, f"binding_{outcome}")(uid)

    @rule(name=st.sampled_from(PODS))
    def watch_shows_the_binding(self, name: str) -> None:
        uid = f"uid-{name}"
        reservation = self.state.reservation(uid)
        if reservation is None:
            return
        pod = self.wanted[uid]
        metadata = {
            **pod["metadata"],
            "annotations": reservation.binding_annotations(self.now),
            "labels": dict(reservation.labels),
        }
        bound = {**pod, "metadata": metadata, "spec": {**pod["spec"], "nodeName": reservation.node}}
        self.see_pod(msgspec.convert(bound, views.Pod))
        assert self.state.reservation(uid) is None

    @rule()
    def leadership_is_lost(self) -> None:
        self.state.drop_reservations()

    @rule()
    def leadership_is_gained(self) -> None:
        for name in self.state.seen_names():
            self.state.handshake_writes(name, self.now)

    @rule(seconds=st.sampled_from([5, 45, 100, 1000]))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.state.tick(self.now)
        self.state.expire(self.now)

    # --- the device config changes --------------------------------------------------------------------------

    @rule()
    def a_new_config_is_taken_up(self) -> None:
        twin = self.state.successor(profiles_of(1 - self.config))
        self.twins = [twin]
        for node in self.nodes.values():
            twin.upsert_node(node, self.now)
        for pod in self.pods.values():
            twin.upsert_pod(pod)
        for quota in self.quotas.values():
            twin.upsert_quota(quota)

    @rule()
    def the_new_config_is_in_force(self) -> None:
        version, freed = self.state.version, self.state.freed
        for twin in self.twins:
            self.state.take_over(twin)
            self.config = 1 - self.config
            assert self.state.version > version
            assert self.state.freed > freed
            for search in self.searches:
                assert not search.open, "decided under the old config"
        self.twins = []

    # --- the property ---------------------------------------------------------------------------------------

    @invariant()
    def equals_rebuilt(self) -> None:
        self.state.tick(self.now)
        rebuilt = new_state(self.config)
        rebuilt.adopt(self.state.memory())
        for pod in reversed(self.pods.values()):
            rebuilt.upsert_pod(pod)
        for node in reversed(self.nodes.values()):
            rebuilt.upsert_node(node, self.now)
        for quota in self.quotas.values():
            rebuilt.upsert_quota(quota)
        assert rebuilt.fingerprint() == self.state.fingerprint()

    def see_pod(self, pod: views.Pod) -> None:
        self.pods.pop(pod.uid, None)
        self.pods[pod.uid] = pod
        for state in (self.state, *self.twins):
            state.upsert_pod(pod)


IncrementalEqualsRebuilt.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestIncrementalEqualsRebuilt = IncrementalEqualsRebuilt.TestCase
