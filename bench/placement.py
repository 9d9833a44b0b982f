"""How much of a pool of GPUs the placement policies allocate before pods stop fitting.

The pool and the pods are those of the public 2023 production GPU trace of the paper on fragmentation gradient
descent (Weng et al., USENIX ATC 2023, data set `openb`, list `default`: 1,213 GPU nodes, 6,212 GPUs), as
counts of shapes. Pods are drawn with replacement until 130 % of the GPUs are asked for, in random order, and
none leaves. A pod of `g x p %` asks for g cards, p percent of the cores and of the memory of each.

CPU and memory of nodes are kube-scheduler's business: before each decision only nodes with room for the pod's
CPU and memory are candidates, as its filter leaves them. Pods without GPUs never come to this scheduler; they
go where kube-scheduler's default scores send them (NodeResourcesLeastAllocated and
NodeResourcesBalancedAllocation, of CPU and memory), under every policy alike.

  random        a node and cards by chance among those that fit
  binpack       node and card policy binpack
  spread        node and card policy spread
  best_fit      the node with the least left of GPUs, CPU and memory (the sum of the three as fractions of
                the largest node), cards by binpack
  hami_default  node policy binpack, card policy spread
  fragmentation_aware   node and card policy fragmentation-aware

Figures: percent of all GPUs allocated, the mean over the seeds, and the lowest seed as `*_min`.
"""

import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from parts import command

from hami.protocol import views
from hami.scheduler.core.answers import NoFit, PodRequest
from hami.scheduler.core.state import ClusterState, Mask
from hami.vendors.config import BUILTIN, load_profiles

NOW = 1_787_400_000.0
CARD_MIB = 16_000  # of every card: shares are percentages, so any size does
DEMAND = 1.3

POOL = """549x8 96c/384G, 387x2 104c/512G, 107x2 16c/120G, 39x8 128c/768G, 28x4 32c/128G, 22x2 64c/256G,
21x8 96c/768G, 19x1 8c/32G, 17x4 96c/384G, 9x4 48c/368G, 7x8 64c/256G, 3x1 8c/60G, 2x2 8c/60G, 2x1 128c/1024G,
1x8 82c/336G"""

SHAPES = """1x81 3c/5G 1047; 1x100 11c/48G 857; 1x100 11c/47G 534; 1x100 3c/5G 470; 1x47 12c/46G 388;
0 12c/56G 364; 1x47 8c/30G 360; 0 32c/48G 284; 1x100 19c/63G 255; 1x65 12c/46G 237; 1x100 10c/41G 195;
0 8c/30G 163; 1x100 12c/46G 161; 1x100 12c/24G 158; 1x100 16c/57G 158; 0 15c/50G 120; 1x32 4c/22G 111;
1x100 16c/32G 108; 1x100 8c/16G 104; 1x100 4c/24G 104; 1x100 12c/16G 101; 0 16c/50G 95; 1x100 14c/57G 93;
1x23 4c/30G 84; 1x100 24c/91G 84; 1x32 4c/15G 78; 1x59 3c/5G 75; 1x32 8c/30G 72; 1x55 4c/10G 72;
1x100 11c/76G 65; 1x100 8c/32G 55; 1x16 4c/15G 53; 1x46 6c/6G 51; 1x100 12c/76G 51; 1x37 4c/10G 45;
1x100 12c/15G 44; 1x32 4c/30G 43; 1x100 8c/33G 41; 1x100 4c/31G 40; 1x100 15c/79G 36; 1x100 16c/64G 33;
1x81 4c/10G 31; 1x46 6c/12G 29; 1x100 16c/123G 27; 1x23 4c/22G 26; 1x22 4c/15G 24; 1x32 1c/2G 22;
1x16 6c/22G 20; 1x22 8c/30G 19; 8x100 88c/320G 18; 1x48 4c/22G 18; 1x23 8c/30G 18; 1x46 6c/18G 18;
8x100 64c/257G 18; 1x100 11c/37G 16; 1x100 1c/6G 15; 1x65 8c/30G 12; 1x23 4c/15G 12; 4x100 32c/129G 12;
4x100 60c/313G 3; 2x100 16c/65G 12; 2x100 30c/157G 4; 8x100 120c/720G 5; 8x100 64c/256G 3"""

# Pods of the whole trace by their GPU request; the shapes above are 96 % of them and scaled to these.
CLASSES = {"none": 1088, "share": 3078, "1": 3911, "2": 16, "4": 15, "8": 44}

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a pod asks for: cards, percent of each, CPUs, GiB."""

    cards: int
    percent: int
    cpu: int
    mem: int

    @property
    def kind(self) -> str:
        """Its class in `CLASSES`."""
        if not self.cards:
            return "none"
        return "share" if self.percent < 100 else str(self.cards)


def main() -> None:
    parser = command.parser(__doc__, "two seeds only")
    parser.add_argument("--seeds", type=int, default=10, help="runs with other pods (default 10)")
    parser.add_argument("--policies", default=",".join(POLICIES), help="comma list (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    options = parser.parse_args()
    seeds = min(options.seeds, 2) if options.quick else options.seeds
    names = options.policies.split(",")
    work = [(name, seed) for name in names for seed in range(seeds)]
    with ProcessPoolExecutor(options.jobs) as executor:
        results = list(executor.map(allocated, *zip(*work, strict=True)))
    figures: dict[str, float] = {}
    for name in names:
        found = [share for (policy, _), share in zip(work, results, strict=True) if policy == name]
        figures[f"alloc_percent_{name}"] = round(sum(found) / len(found), 2)
        figures[f"alloc_percent_{name}_min"] = round(min(found), 2)
    for name, figure in figures.items():
        print(f"{name:45} {figure:7.2f}")
    if options.json:
        print(json.dumps(figures))


def allocated(policy: str, seed: int) -> float:
    """Percent of all GPUs allocated when the stream of pods ends."""
    cluster = Cluster(POLICIES[policy], seed)
    started = time.perf_counter()
    for number, shape in enumerate(pods(seed, cluster.gpus)):
        cluster.schedule(shape, number)
    share = 100 * cluster.given / cluster.gpus
    print(f"{policy:20} seed {seed}: {share:.2f} %, {time.perf_counter() - started:.0f} s", flush=True)
    return share


# --- the workload -----------------------------------------------------------------------------------------


def pool() -> list[tuple[int, int, int]]:
    """GPUs, CPUs and GiB of every node."""
    nodes = []
    for text in POOL.split(","):
        count, rest = text.strip().split("x")
        gpus, host = rest.split(" ")
        cpu, mem = host.split("/")
        nodes += [(int(gpus), int(cpu[:-1]), int(mem[:-1]))] * int(count)
    return nodes


def shapes() -> dict[Shape, float]:
    """Shape -> how often it is drawn."""
    counts: dict[Shape, float] = {}
    for text in SHAPES.split(";"):
        cards, host, count = text.split()
        gpus, _, percent = cards.partition("x")
        cpu, mem = host.split("/")
        counts[Shape(int(gpus), int(percent or 0), int(cpu[:-1]), int(mem[:-1]))] = int(count)
    listed = {kind: sum(n for shape, n in counts.items() if shape.kind == kind) for kind in CLASSES}
    return {shape: count * CLASSES[shape.kind] / listed[shape.kind] for shape, count in counts.items()}


def pods(seed: int, gpus: int) -> list[Shape]:
    """Pods drawn until they ask for `DEMAND` times the GPUs of the pool."""
    rng = random.Random(seed)
    table = shapes()
    kinds, weights = list(table), list(table.values())
    asked, found = 0.0, []
    while asked < DEMAND * gpus:
        (shape,) = rng.choices(kinds, weights)
        found.append(shape)
        asked += shape.cards * shape.percent / 100
    return found


# --- the cluster ------------------------------------------------------------------------------------------


class Cluster:
    """The scheduler's own state, and beside it what kube-scheduler knows of the nodes."""

    def __init__(self, policy: "Policy", seed: int) -> None:
        self.policy = policy
        self.rng = random.Random(f"choices {seed}")
        nodes = pool()
        self.names = [f"node-{at:04d}" for at in range(len(nodes))]
        self.size: Ints = np.array([gpus for gpus, _, _ in nodes])
        self.gpus = int(self.size.sum())
        self.host_all: Floats = np.array([(cpu, mem) for _, cpu, mem in nodes], np.float64)
        self.host_free = self.host_all.copy()
        self.free: Ints = np.where(np.arange(8) < self.size[:, None], 100, -1)  # percent of every card
        self.given = 0.0
        self.state = ClusterState(
            load_profiles(BUILTIN), node_policy=policy.node_policy, card_policy=policy.card_policy
        )
        for name, (gpus, cpu, mem) in zip(self.names, nodes, strict=True):
            self.state.upsert_node(node_object(name, gpus, cpu, mem), NOW)

    def schedule(self, shape: Shape, number: int) -> None:
        """One pod: placed, or left out for ever."""
        rows = np.flatnonzero((self.host_free >= (shape.cpu, shape.mem)).all(axis=1))
        if not len(rows):
            return
        if not shape.cards:
            self.take(int(rows[np.argmax(self.default_score(rows, shape))]), shape, number)
            return
        fits = ((self.free[rows] >= shape.percent).sum(axis=1) >= shape.cards).nonzero()[0]
        request = self.state.parse(pod_object(shape, number))
        assert request is not None
        if self.policy.choose is not None:
            if not len(fits):
                return
            rows = np.array([self.policy.choose(self, rows[fits])])
        mask = self.state.candidates([self.names[row] for row in rows.tolist()])
        self.place(request, mask, shape, number)

    def place(self, request: PodRequest, mask: Mask, shape: Shape, number: int) -> None:
        answer = self.state.place(request, mask, NOW)
        if isinstance(answer, NoFit):
            return
        row = self.names.index(answer.node)
        for device in answer.reservation.allocations["NVIDIA"][0]:
            self.free[row, int(device.uuid.rpartition("-")[2])] -= shape.percent
        self.given += shape.cards * shape.percent / 100
        self.take(row, shape, number, dict(answer.reservation.annotations))

    def take(self, row: int, shape: Shape, number: int, annotations: dict[str, str] | None = None) -> None:
        """The pod is bound."""
        self.host_free[row] -= (shape.cpu, shape.mem)
        bound = pod_object(shape, number)
        bound["metadata"]["annotations"] = annotations or {}
        bound["spec"]["nodeName"] = self.names[row]
        self.state.upsert_pod(msgspec.convert(bound, views.Pod))

    def default_score(self, rows: Ints, shape: Shape) -> Floats:
        """kube-scheduler's default: least allocated and balanced, each 0 to 100, of CPU and memory."""
        used = 1 - (self.host_free[rows] - (shape.cpu, shape.mem)) / self.host_all[rows]
        least = 100 * (1 - used).mean(axis=1)
        balanced = 100 * (1 - used.std(axis=1))
        score: Floats = np.floor(least) + np.floor(balanced)
        return score


@dataclass(frozen=True, slots=True)
class Policy:
    """The policies of the pods, and the node where the bench itself chooses it."""

    node_policy: str
    card_policy: str
    choose: Callable[[Cluster, Ints], int] | None = None


def by_chance(cluster: Cluster, rows: Ints) -> int:
    return int(cluster.rng.choice(rows.tolist()))


def least_left(cluster: Cluster, rows: Ints) -> int:
    left = np.maximum(cluster.free[rows], 0).sum(axis=1) / 800
    left = left + (cluster.host_free[rows] / cluster.host_all.max(axis=0)).sum(axis=1)
    return int(rows[left.argmin()])


POLICIES = {
    "random": Policy("binpack", "spread", by_chance),
    "binpack": Policy("binpack", "binpack"),
    "spread": Policy("spread", "spread"),
    "best_fit": Policy("binpack", "binpack", least_left),
    "hami_default": Policy("binpack", "spread"),
    "fragmentation_aware": Policy("fragmentation-aware", "fragmentation-aware"),
}


def node_object(name: str, gpus: int, cpu: int, mem: int) -> views.Node:
    cards = [
        {
            "id": f"{name}-{at}",
            "index": at,
            "count": 100,
            "devmem": CARD_MIB,
            "devcore": 100,
            "type": "NVIDIA GPU",
            "mode": "hami-core",
            "health": True,
        }
        for at in range(gpus)
    ]
    annotations = {
        "hami.io/node-nvidia-register": json.dumps(cards),
        "hami.io/node-handshake": "Reported_now",
    }
    status = {"allocatable": {"nvidia.com/gpu": str(100 * gpus), "cpu": str(cpu), "memory": f"{mem}Gi"}}
    return msgspec.convert(
        {"metadata": {"name": name, "annotations": annotations}, "status": status}, views.Node
    )


def pod_object(shape: Shape, number: int) -> dict[str, Any]:
    resources = {"cpu": str(shape.cpu), "memory": f"{shape.mem}Gi"}
    if shape.cards:
        resources |= {
            "nvidia.com/gpu": str(shape.cards),
            "nvidia.com/gpumem-percentage": str(shape.percent),
            "nvidia.com/gpucores": str(shape.percent),
        }
    name = f"pod-{number}"
    return {
        "metadata": {"name": name, "namespace": "default", "uid": name},
        "spec": {"containers": [{"name": "main", "resources": {"limits": resources}}]},
        "status": {"phase": "Pending"},
    }


if __name__ == "__main__":
    main()
