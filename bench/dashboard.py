"""The dashboard at the size of case 14 of its specification: 2,000 cards, 20,000 containers in 10,000 pods.

Prints one JSON object: milliseconds of server time for lists (median and slowest of 20, JSON included), for
a new picture after a change, and for an explanation; peak resident memory in MiB. Needs no cluster.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import time
from typing import Any

import msgspec
from parts import command

from hami.answers.snapshot import Settings
from hami.dashboard.api import Api
from hami.dashboard.explaining import Explainer
from hami.dashboard.history import History, samples
from hami.dashboard.reading import read_monitor
from hami.dashboard.scope import EVERYTHING
from hami.dashboard.store import Store
from hami.dashboard.view import Memory, build_view

NODES, CARDS, PODS = 250, 8, 10_000
NOW = 1_787_400_000.0
RUNS = 20
LISTS = (
    "summary",
    "nodes?limit=1000",
    "devices?limit=1000",
    "workloads?limit=1000",
    "workloads?q=pod-99&sort=memory",
)


def node(at: int) -> dict[str, Any]:
    """A node with eight cards."""
    cards = [
        {
            "id": f"GPU-{at:04}-{card}",
            "index": card,
            "count": 20,
            "devmem": 81920,
            "devcore": 100,
            "type": "NVIDIA-A100",
            "health": True,
            "mode": "hami-core",
        }
        for card in range(CARDS)
    ]
    annotations = {
        "hami.io/node-nvidia-register": json.dumps(cards),
        "hami.io/node-handshake": "Reported_now",
    }
    allocatable = {"nvidia.com/gpu": "160", "cpu": "256", "memory": "1Ti", "pods": "500"}
    metadata = {"name": f"node-{at:04}", "uid": f"n{at}", "resourceVersion": "1", "annotations": annotations}
    return {"metadata": metadata, "spec": {}, "status": {"allocatable": allocatable}}


def pod(at: int) -> dict[str, Any]:
    """A pod with two containers, each with a part of a card; the last one waits for more than there is."""
    where, card = at % NODES, at // NODES % CARDS
    waits = at == PODS - 1
    memory = 90000 if waits else 2000
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(memory), "nvidia.com/gpucores": "3"}
    containers = [
        {"name": name, "image": "image", "resources": {"limits": limits}} for name in ("one", "two")
    ]
    share = f"GPU-{where:04}-{card},NVIDIA,{memory},3:;"
    annotations = {
        "hami.io/vgpu-node": f"node-{where:04}",
        "hami.io/vgpu-time": "1",
        "hami.io/vgpu-devices-allocated": share * 2,
    }
    spec: dict[str, Any] = {"schedulerName": "hami-scheduler", "containers": containers}
    if not waits:
        spec["nodeName"] = f"node-{where:04}"
    metadata = {"name": f"pod-{at}", "namespace": f"team-{at % 40}", "uid": f"p{at}", "resourceVersion": "1"}
    metadata["annotations"] = {} if waits else annotations  # type: ignore[assignment]
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Pending" if waits else "Running"}}


def monitor(at: int) -> str:
    """What the node's monitor exports."""
    lines = [
        f'hami_host_gpu_memory_used_bytes{{device_uuid="GPU-{at:04}-{card}"}} 1e9' for card in range(CARDS)
    ]
    for number in range(at, PODS, NODES):
        card = number // NODES % CARDS
        for name in ("one", "two"):
            who = f'namespace="team-{number % 40}",pod="pod-{number}",container="{name}"'
            lines.append(f'hami_vgpu_memory_used_bytes{{{who},device_uuid="GPU-{at:04}-{card}"}} 1e8')
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    options = command.parser(__doc__).parse_args()
    store, memory, history = Store(Settings(), ""), Memory(), History()
    for at in range(NODES):
        store.put_node(store.reader.node(msgspec.Raw(json.dumps(node(at)).encode())), NOW)
        store.heard(f"node-{at:04}", read_monitor(monitor(at)), NOW)
    for at in range(PODS):
        store.put_pod(store.reader.pod(msgspec.Raw(json.dumps(pod(at)).encode())))
    pictures = [_timed(lambda: build_view(store, memory, NOW)) for _ in range(5)]
    view = build_view(store, memory, NOW)
    for step in range(720):
        history.note(NOW + 30 * step, samples(view) if step < 2 else {})
    api = Api(lambda: view, history, Explainer(store, None, lambda: NOW), lambda: NOW)
    found: dict[str, float] = {"nodes": NODES, "cards": len(view.devices), "containers": 2 * PODS}
    found["picture_ms"] = round(statistics.median(pictures), 1)
    for target in LISTS:
        path, _, query = target.partition("?")
        times = [
            _timed(lambda p=path, q=query: asyncio.run(api.answer([p], q.encode(), EVERYTHING)))
            for _ in range(RUNS)
        ]
        found[f"list_median_ms.{target}"] = round(statistics.median(times), 1)
        found[f"list_slowest_ms.{target}"] = round(max(times), 1)
    last = view.pending[0]
    found["explanation_ms"] = round(
        _timed(lambda: asyncio.run(api.answer(["pending", last.namespace, last.pod], b"", EVERYTHING))), 1
    )
    found["peak_memory_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps(found, indent=None if options.json else 1))


def _timed(work: Any) -> float:
    """Milliseconds."""
    begun = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begun)


if __name__ == "__main__":
    main()
