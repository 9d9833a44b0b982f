"""How fast the scheduler decides: `place` on its own state, and `/filter` over HTTP from another process.

The cluster: N nodes with 8 cards of 80 GiB and 10 slots, 96 CPUs and 768 GiB each, half of the memory of the
cards taken by 16 pods a node. Every measured pod differs from the one before it, except where a figure says
`warm`. Times are milliseconds, one core decides.

  place       the decision alone: mask, order, exact fit, reservation; the names are mapped already
  nofit       a refusal with the reason of every node
  http        POST /filter with a full pod and N node names from this process to a server process,
              and its answer read
  *_cpu       processor time of the same samples, which other work on the machine does not lengthen
  *_shuffled  the names come in another order every time, so nothing about the list is remembered
  *_warm      the same refusal again while nothing has changed
  *_<policy>  of pods with another policy than node binpack, card spread
  startup_s   from the start of `hami scheduler` until it answers, against an API server that lists the nodes
              and eight pods on each from memory
  scrape_s    one answer of /metrics there; `filter_p99_ms_during_scrape` /filter while scrape follows scrape
  rss_mb      resident memory of that process, `peak_mb` the most it had

`--grid`: also 1,000, 5,000 and 10,000 nodes, empty, half full and 95 % full, with every policy; the names are
place_p99_ms_<nodes>_<policy>_<percent full>, and place_cpu_p99_ms_… of the processor time.
`--vendor all`: also 1,000 nodes of every vendor (see parts/vendor_places.py): `vendor_warm_ratio_max`, the
slowest warm p99 over NVIDIA's, and `vendor_cold_ms_max`.
"""

import argparse
import asyncio
import gc
import http.client
import itertools
import json
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from parts import command
from parts.scheduler_process import (
    CARDS,
    SchedulerProcess,
    api_process,
    node_name,
    register_text,
    scheduler_process,
)
from parts.vendor_places import measure_vendors

from hami.protocol import keys, views
from hami.scheduler.core.answers import NoFit, Placement
from hami.scheduler.core.state import ClusterState
from hami.vendors.config import decode_config, load_profiles
from hami.vendors.types import VendorProfile

PODS_PER_CARD = 2
POLICIES = {
    "binpack": ("binpack", "spread"),
    "spread": ("spread", "spread"),
    "packed": ("binpack", "binpack"),
    "fragmentation": ("fragmentation-aware", "fragmentation-aware"),
    "fragmentation_nodes": ("fragmentation-aware", "spread"),
    "topology": ("binpack", "topology-aware"),
    "numa": ("binpack", "numa"),
    "mutex": ("binpack", "mutex"),
    "list": ("binpack", "numa,binpack"),
}
GRID_NODES, GRID_FILLS = (1000, 5000, 10_000), (0, 50, 95)
NOW = 1_787_400_000.0
MiB_SIZES = (8192, 16384, 24576, 32768)  # two of them: half of a card on average


def main() -> None:
    parser = command.parser(__doc__, "a shorter run, under 50 s")
    parser.add_argument("--nodes", type=int, default=5000, help="nodes of the cluster (default 5000)")
    parser.add_argument("--requests", type=int, default=2000, help="pods per figure (default 2000)")
    parser.add_argument("--no-http", action="store_true", help="only the figures without a server")
    parser.add_argument("--grid", action="store_true", help="also every size, fill and policy")
    parser.add_argument("--vendor", default="", metavar="WORDS", help="also vendors: all, or a comma list")
    parser.add_argument("--process", action="store_true", help="also start-up, scrapes and memory")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_filled(options.nodes))
        return
    count = min(options.requests, 400) if options.quick else options.requests
    figures: dict[str, float] = {}

    def take(name: str, samples: list[float]) -> None:
        samples.sort()
        for label, share in (("p50", 0.50), ("p99", 0.99)):
            figures[f"{name}_{label}_ms_{options.nodes}"] = round(samples[int(share * (len(samples) - 1))], 3)

    with filled_state(options.nodes, 50) as state:
        measure_state(state, options.nodes, count, take)
        for policy in [name for name in POLICIES if name != "binpack"]:
            placed = measure_policy(state, options.nodes, 50, policy, min(count, 400))
            figures |= {f"place_{label}_ms_{options.nodes}_{policy}": took for label, took in placed.items()}
    if not options.no_http:
        measure_http(options.nodes, count, take)
    if options.grid:
        for nodes, percent in itertools.product(GRID_NODES, GRID_FILLS):
            with filled_state(nodes, percent) as state:
                for policy in POLICIES:
                    placed = measure_policy(state, nodes, percent, policy, min(count, 300))
                    for label in ("p99", "cpu_p99"):
                        figures[f"place_{label}_ms_{nodes}_{policy}_{percent}"] = placed[label]
    if options.vendor:
        figures |= measure_vendors(options.vendor, 1000, 200)
    if options.process:
        figures |= measure_process(5000, 10_000)
    for name, figure in figures.items():
        print(f"{name:40} {figure:9.3f}")
    if options.json:
        print(json.dumps(figures))


# --- the cluster ------------------------------------------------------------------------------------------


def profiles() -> tuple[VendorProfile, ...]:
    names = {
        "resourceCountName": "nvidia.com/gpu",
        "resourceMemoryName": "nvidia.com/gpumem",
        "resourceMemoryPercentageName": "nvidia.com/gpumem-percentage",
        "resourceCoreName": "nvidia.com/gpucores",
        "defaultGPUNum": 1,
    }
    return load_profiles(decode_config({"nvidia": names}))


def fill(state: ClusterState, nodes: int, percent: int = 50) -> None:
    """Register the nodes and place the running pods: `percent` (0, 50 or 95) of the cards."""
    rng = random.Random(7)
    for number in range(nodes):
        state.upsert_node(node_object(number), NOW)
        for held in range(CARDS * PODS_PER_CARD if percent else 0):
            mem, cores = rng.choice(MiB_SIZES), rng.choice((10, 20, 30))
            if percent == 95:
                mem, cores = ((40960, 50), (36864, 45))[held // CARDS]
            state.upsert_pod(running_pod(number, held, mem, cores))
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000_000)  # as the scheduler does after its first sync


def node_object(number: int) -> views.Node:
    annotations = {
        "hami.io/node-nvidia-register": register_text(number),
        "hami.io/node-handshake": "Requesting_2026-08-22 12:00:00",
    }
    slots = {"nvidia.com/gpu": str(10 * CARDS), "cpu": "96", "memory": "768Gi"}
    obj = {
        "metadata": {"name": node_name(number), "annotations": annotations},
        "status": {"capacity": slots, "allocatable": slots},
    }
    return msgspec.convert(obj, views.Node)


def running_pod(number: int, held: int, held_mib: int, held_percent: int) -> views.Pod:
    card = f"GPU-{number:05d}-{held % CARDS}"
    name = f"running-{number}-{held}"
    annotations = {
        "hami.io/vgpu-node": node_name(number),
        "hami.io/vgpu-time": "1",
        "hami.io/vgpu-devices-allocated": f"{card},NVIDIA,{held_mib},{held_percent}:;",
    }
    obj = {
        "metadata": {"name": name, "namespace": "default", "uid": name, "annotations": annotations},
        "spec": {
            "nodeName": node_name(number),
            "containers": [{"name": "main", "resources": {"requests": {"cpu": "3", "memory": "20Gi"}}}],
        },
        "status": {"phase": "Running"},
    }
    return msgspec.convert(obj, views.Pod)


def pending_pod(number: int, gpus: int, mem: int, cores: int) -> dict[str, Any]:
    limits = {
        "cpu": str(1 + number % 8),
        "memory": f"{4 + number % 32}Gi",
        "nvidia.com/gpu": str(gpus),
        "nvidia.com/gpumem": str(mem),
        "nvidia.com/gpucores": str(cores),
    }
    main_container = {
        "name": "main",
        "image": "registry.example.com/team/train:1.2",
        "command": ["python", "train.py", "--epochs", "10"],
        "env": [{"name": f"SETTING_{at}", "value": "x" * 20} for at in range(10)],
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [{"name": "token", "mountPath": "/var/run/secrets/token", "readOnly": True}],
    }
    name = f"train-{number}"
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}", "labels": {"app": "train"}},
        "spec": {
            "containers": [main_container],
            "schedulerName": "hami-scheduler",
            "tolerations": [
                {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}
            ],
            "volumes": [{"name": "token", "projected": {"sources": []}}],
        },
        "status": {"phase": "Pending"},
    }


def fitting_pod(number: int) -> dict[str, Any]:
    """One of many sizes, all of which fit somewhere."""
    return pending_pod(
        number, (1, 1, 2, 4)[number % 4], 1000 + 16 * (number % 997), (0, 10, 20, 30)[number % 4]
    )


def small_pod(number: int) -> dict[str, Any]:
    """One of many sizes that fit on a card of which 95 % are taken."""
    return pending_pod(number, (1, 1, 2, 4)[number % 4], 100 + number % 997, (0, 1, 2, 3)[number % 4])


def impossible_pod(number: int) -> dict[str, Any]:
    """Eight whole cards, of which no node has more than none."""
    return pending_pod(number, 8, 81920 - number % 997, 100)


# --- the state alone --------------------------------------------------------------------------------------


def measure_state(
    state: ClusterState, nodes: int, count: int, take: Callable[[str, list[float]], None]
) -> None:
    """The default policies. The state is as full afterwards as before."""
    mask = state.candidates([node_name(number) for number in range(nodes)])

    def decide(pod: dict[str, Any]) -> tuple[float, float, Placement | NoFit]:
        request = state.parse(pod)
        assert request is not None
        started, busy = time.perf_counter(), time.thread_time()
        answer = state.place(request, mask, NOW)
        return (time.perf_counter() - started) * 1e3, (time.thread_time() - busy) * 1e3, answer

    wall: list[float] = []
    cpu: list[float] = []
    for number in range(count):
        spent, busy, answer = decide(fitting_pod(number))
        assert isinstance(answer, Placement)
        wall.append(spent)
        cpu.append(busy)
        if number % 2:  # the cluster stays as full as it is
            state.release(answer.reservation.uid)
    take("place", wall)
    take("place_cpu", cpu)
    refusals = [decide(impossible_pod(number)) for number in range(max(50, count // 10))]
    again = [decide(impossible_pod(0)) for _ in refusals][1:]
    assert all(isinstance(answer, NoFit) for _, _, answer in (*refusals, *again))
    take("nofit", [spent for spent, _, _ in refusals])
    take("nofit_cpu", [busy for _, busy, _ in refusals])
    take("nofit_warm", [spent for spent, _, _ in again])
    for reservation in state.reservations():
        state.release(reservation.uid)


@contextmanager
def filled_state(nodes: int, percent: int) -> Iterator[ClusterState]:
    """A state with so many nodes, of which that part is taken."""
    state = ClusterState(profiles())
    fill(state, nodes, percent)
    try:
        yield state
    finally:
        gc.unfreeze()
        del state
        gc.collect()


def measure_policy(
    state: ClusterState, nodes: int, percent: int, policy: str, count: int
) -> dict[str, float]:
    """p50 and p99 of placing pods that name one policy, milliseconds, and `cpu_p99` of the processor time;
    mutex takes cards that serve nobody.

    The state is as full afterwards as before.
    """
    node_policy, card_policy = POLICIES[policy]
    wanted = {keys.NODE_POLICY: node_policy, keys.CARD_POLICY: card_policy}
    mask = state.candidates([node_name(number) for number in range(nodes)])
    wall, cpu, placed = [], [], []
    for number in range(count):
        pod = (small_pod if percent == 95 else fitting_pod)(number)
        pod["metadata"] |= {"annotations": wanted, "uid": f"{policy}-{number}"}
        request = state.parse(pod)
        assert request is not None
        started, busy = time.perf_counter(), time.thread_time()
        answer = state.place(request, mask, NOW)
        wall.append((time.perf_counter() - started) * 1e3)
        cpu.append((time.thread_time() - busy) * 1e3)
        assert isinstance(answer, Placement) or policy == "mutex"
        if isinstance(answer, Placement):
            placed.append(request.info.uid)
        if number % 2 and placed:
            state.release(placed.pop())
    for uid in placed:
        state.release(uid)
    return {
        label: round(sorted(samples)[int(share * (count - 1))], 3)
        for label, samples, share in (("p50", wall, 0.50), ("p99", wall, 0.99), ("cpu_p99", cpu, 0.99))
    }


# --- the process ------------------------------------------------------------------------------------------


def measure_process(startup_nodes: int, memory_nodes: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for nodes in (startup_nodes, memory_nodes):
        with api_process("stub", nodes) as api, scheduler_process(api) as scheduler:
            if nodes == startup_nodes:
                figures[f"startup_s_{nodes}"] = round(scheduler.synced_s, 2)
                figures |= measure_scrapes(scheduler, nodes)
            time.sleep(3)  # the collection after the first sync
            figures[f"rss_mb_{nodes}"] = round(scheduler.rss_mb(), 1)
            figures[f"peak_mb_{nodes}"] = round(scheduler.peak_mb(), 1)
    return figures


def measure_scrapes(scheduler: SchedulerProcess, nodes: int) -> dict[str, float]:
    """Scrapes one after the other, and /filter beside them."""
    took: list[float] = []
    done = threading.Event()

    def scrape() -> None:
        while not done.is_set():
            started = time.perf_counter()
            with urllib.request.urlopen(
                f"http://127.0.0.1:{scheduler.metrics}/metrics", timeout=60
            ) as answer:
                answer.read()
            took.append(time.perf_counter() - started)

    names = [node_name(number) for number in range(nodes)]
    connection = http.client.HTTPConnection("127.0.0.1", scheduler.extender, timeout=60)
    scraper = threading.Thread(target=scrape)
    scraper.start()
    samples = sorted(post(connection, fitting_pod(number), names)[0] for number in range(300))
    done.set()
    scraper.join()
    connection.close()
    return {
        f"first_scrape_s_{nodes}": round(took[0], 3),
        f"scrape_s_{nodes}": round(min(took), 3),
        f"filter_p99_ms_during_scrape_{nodes}": round(samples[int(0.99 * (len(samples) - 1))], 3),
    }


# --- over HTTP --------------------------------------------------------------------------------------------


def measure_http(nodes: int, count: int, take: Callable[[str, list[float]], None]) -> None:
    names = [node_name(number) for number in range(nodes)]
    rng = random.Random(11)

    def shuffled() -> list[str]:
        rng.shuffle(names)
        return names

    with server(nodes) as connection:
        for number in range(20):  # first requests of a connection, first imports
            post(connection, fitting_pod(number), names)
        fits = [post(connection, fitting_pod(100 + number), names) for number in range(count)]
        assert all(answer["NodeNames"] for _, answer in fits)
        take("http", [spent for spent, _ in fits])
        fits = [post(connection, fitting_pod(100_000 + number), shuffled()) for number in range(count // 2)]
        take("http_shuffled", [spent for spent, _ in fits])
        refusals = [post(connection, impossible_pod(number), names) for number in range(max(50, count // 10))]
        assert all(len(answer["FailedNodes"]) == nodes for _, answer in refusals)
        take("http_nofit", [spent for spent, _ in refusals])


def post(
    connection: http.client.HTTPConnection, pod: dict[str, Any], names: list[str]
) -> tuple[float, dict[str, Any]]:
    body = msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": names})
    started = time.perf_counter()
    connection.request("POST", "/filter", body, {"Content-Type": "application/json"})
    answer = connection.getresponse().read()
    spent = (time.perf_counter() - started) * 1e3
    decoded: dict[str, Any] = msgspec.json.decode(answer)
    assert not decoded["Error"], decoded["Error"]
    return spent, decoded


@contextmanager
def server(nodes: int) -> Iterator[http.client.HTTPConnection]:
    """A scheduler in another process, and a connection to it."""
    command = [sys.executable, __file__, "--serve", "--nodes", str(nodes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.strip():
                raise SystemExit("the server process ended before it listened")
            connection = http.client.HTTPConnection("127.0.0.1", int(line), timeout=60)
            try:
                yield connection
            finally:
                connection.close()
        finally:
            process.terminate()


async def serve_filled(nodes: int) -> None:
    """The scheduler's own HTTP edge over a filled state; it prints its port and serves until terminated."""
    from hami.kube.client import Client, Limits
    from hami.kube.config import ClientConfig
    from hami.scheduler.edge.app import Scheduler
    from hami.scheduler.edge.routes import scheduler_routes
    from hami.scheduler.edge.server import listen, serve
    from hami.scheduler.edge.settings import SchedulerSettings

    settings = SchedulerSettings(Path("device-config.yaml"), "bench", http_bind="127.0.0.1:0")
    async with Client(
        ClientConfig("http://127.0.0.1:9"), Limits(50, 100, 30.0), user_agent="bench"
    ) as client:
        scheduler = Scheduler.build(settings, profiles(), client)
        fill(scheduler.state, nodes)
        scheduler.gate.open()
        routes = scheduler_routes(scheduler.extender, scheduler.webhook, {}, settings.max_request_bytes)
        with listen(settings.http_bind) as sock:
            print(sock.getsockname()[1], flush=True)
            await serve(routes, sock, None, "extender")


if __name__ == "__main__":
    main()
