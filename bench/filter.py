"""How fast the scheduler decides: `place` on its own state, and `/filter` over HTTP from another process.

The cluster: N nodes with 8 cards of 80 GiB and 10 slots each, half of the memory taken by 16 pods a node.
Every measured pod differs from the one before it, except where a figure says `warm`. Times are
milliseconds, one core decides.

  place       the decision alone: mask, order, exact fit, reservation; the names are mapped already
  nofit       a refusal with the reason of every node
  http        POST /filter with a full pod and N node names from this process to a server process,
              and its answer read
  *_cpu       processor time of the same samples, which other work on the machine does not lengthen
  *_shuffled  the names come in another order every time, so nothing about the list is remembered
  *_warm      the same refusal again while nothing has changed
"""

import argparse
import asyncio
import gc
import http.client
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from hami.protocol import views
from hami.scheduler.core.answers import NoFit, Placement
from hami.scheduler.core.state import ClusterState
from hami.vendors.config import decode_config, load_profiles
from hami.vendors.types import VendorProfile

CARDS = 8
PODS_PER_CARD = 2
NOW = 1_787_400_000.0
MiB_SIZES = (8192, 16384, 24576, 32768)  # two of them: half of a card on average


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=5000, help="nodes of the cluster (default 5000)")
    parser.add_argument("--requests", type=int, default=2000, help="pods per figure (default 2000)")
    parser.add_argument("--quick", action="store_true", help="a shorter run, under 50 s")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--no-http", action="store_true", help="only the figures without a server")
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

    measure_state(options.nodes, count, take)
    if not options.no_http:
        measure_http(options.nodes, count, take)
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


def node_name(number: int) -> str:
    return f"gpu-node-{number:05d}"


def fill(state: ClusterState, nodes: int) -> None:
    """Register the nodes and place the running pods."""
    rng = random.Random(7)
    for number in range(nodes):
        state.upsert_node(node_object(number), NOW)
        for held in range(CARDS * PODS_PER_CARD):
            state.upsert_pod(running_pod(number, held, rng))
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000_000)  # as the scheduler does after its first sync


def node_object(number: int) -> views.Node:
    cards = [
        {
            "id": f"GPU-{number:05d}-{at}",
            "index": at,
            "count": 10,
            "devmem": 81920,
            "devcore": 100,
            "type": "NVIDIA A100-SXM4-80GB",
            "numa": at // 4,
            "mode": "hami-core",
            "health": True,
        }
        for at in range(CARDS)
    ]
    annotations = {
        "hami.io/node-nvidia-register": json.dumps(cards),
        "hami.io/node-handshake": "Requesting_2026-08-22 12:00:00",
    }
    slots = {"nvidia.com/gpu": str(10 * CARDS)}
    obj = {
        "metadata": {"name": node_name(number), "annotations": annotations},
        "status": {"capacity": slots, "allocatable": slots},
    }
    return msgspec.convert(obj, views.Node)


def running_pod(number: int, held: int, rng: random.Random) -> views.Pod:
    card = f"GPU-{number:05d}-{held % CARDS}"
    name = f"running-{number}-{held}"
    held_mib, held_percent = rng.choice(MiB_SIZES), rng.choice((10, 20, 30))
    annotations = {
        "hami.io/vgpu-node": node_name(number),
        "hami.io/vgpu-time": "1",
        "hami.io/vgpu-devices-allocated": f"{card},NVIDIA,{held_mib},{held_percent}:;",
    }
    obj = {
        "metadata": {"name": name, "namespace": "default", "uid": name, "annotations": annotations},
        "spec": {"nodeName": node_name(number), "containers": [{"name": "main"}]},
        "status": {"phase": "Running"},
    }
    return msgspec.convert(obj, views.Pod)


def pending_pod(number: int, gpus: int, mem: int, cores: int) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": str(gpus), "nvidia.com/gpumem": str(mem), "nvidia.com/gpucores": str(cores)}
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


def impossible_pod(number: int) -> dict[str, Any]:
    """Eight whole cards, of which no node has more than none."""
    return pending_pod(number, 8, 81920 - number % 997, 100)


# --- the state alone --------------------------------------------------------------------------------------


def measure_state(nodes: int, count: int, take: Callable[[str, list[float]], None]) -> None:
    state = ClusterState(profiles())
    fill(state, nodes)
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
