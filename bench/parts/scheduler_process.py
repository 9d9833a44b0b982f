"""For the benches of the scheduler: `hami scheduler` as its own process, and API servers to run it against.

`--stub NODES` serves lists of made-up nodes and pods from memory, encoded before it starts, and watches that
stay silent: what is measured against it is the scheduler alone. `--embedded NODES` is the embedded API server
with empty nodes. Both print their port and run until terminated.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hami.protocol.keys import ALLOCATION_MODE, MODE_EXACT

PODS_PER_NODE = 8
CARDS = 8
_HERE = Path(__file__).resolve()
_TICKS = os.sysconf("SC_CLK_TCK")
_DEVICE_CONFIG = """nvidia:
  resourceCountName: nvidia.com/gpu
  resourceMemoryName: nvidia.com/gpumem
  resourceMemoryPercentageName: nvidia.com/gpumem-percentage
  resourceCoreName: nvidia.com/gpucores
  resourcePriorityName: nvidia.com/priority
  defaultGPUNum: 1
"""


# --- objects of a usual size --------------------------------------------------------------------------------


def node_name(number: int) -> str:
    return f"gpu-node-{number:05d}"


def register_text(number: int) -> str:
    """What a node's plugin registers: eight cards."""
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
    return json.dumps(cards)


def node_object(number: int) -> dict[str, Any]:
    """About 10 kB of JSON: labels, images and conditions as on a real node, eight cards."""
    name = node_name(number)
    amounts = {"cpu": "96", "memory": "768Gi", "pods": "110", "nvidia.com/gpu": str(10 * CARDS)}
    conditions = [
        {
            "type": kind,
            "status": "True" if kind == "Ready" else "False",
            "reason": f"Kubelet{kind}",
            "message": f"kubelet says something about {kind}",
            "lastHeartbeatTime": "2026-08-22T12:00:00Z",
            "lastTransitionTime": "2026-08-20T12:00:00Z",
        }
        for kind in ("MemoryPressure", "DiskPressure", "PIDPressure", "Ready", "NetworkUnavailable")
    ]
    images = [
        {
            "names": [
                f"registry.example.com/team/image-{at}@sha256:{at:064x}",
                f"registry.example.com/team/image-{at}:1.2",
            ],
            "sizeBytes": 1234567890,
        }
        for at in range(30)
    ]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": "1",
            "labels": {f"example.com/label-{at}": f"value-{at}" for at in range(26)},
            "annotations": {
                "hami.io/node-nvidia-register": register_text(number),
                ALLOCATION_MODE: MODE_EXACT,  # nobody is there to give node locks back
                # in the future, so that nothing is to be written
                "hami.io/node-handshake": time.strftime("Requesting_%Y-%m-%d %H:%M:%S", time.gmtime()),
            },
        },
        "spec": {},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": conditions,
            "images": images,
            "nodeInfo": {"kubeletVersion": "v1.36.0", "containerRuntimeVersion": "containerd://2.4.0"},
        },
    }


def running_pod(node: int, at: int) -> dict[str, Any]:
    """About 3 kB of JSON: a pod with half of the memory of one card."""
    name = f"running-{node}-{at}"
    uid = f"{node:08x}-0000-4000-8000-{at:012x}"
    return pod_object(
        name,
        uid,
        40960,
        50,
        {
            "hami.io/vgpu-node": node_name(node),
            "hami.io/vgpu-time": "1787400000",
            "hami.io/bind-phase": "success",
            "hami.io/bind-time": "1787400001",
            "hami.io/vgpu-devices-allocated": f"GPU-{node:05d}-{at},NVIDIA,40960,50:;",
        },
        node_name(node),
    )


def pod_object(
    name: str, uid: str, mem: int, cores: int, annotations: dict[str, str], node: str = ""
) -> dict[str, Any]:
    """A pod of a training job."""
    amounts = {
        "cpu": "8",
        "memory": "48Gi",
        "nvidia.com/gpu": "1",
        "nvidia.com/gpumem": str(mem),
        "nvidia.com/gpucores": str(cores),
    }
    container = {
        "name": "main",
        "image": "registry.example.com/team/train:1.2",
        "command": ["python", "train.py", "--epochs", "10"],
        "env": [{"name": f"SETTING_{at}", "value": "x" * 40} for at in range(16)],
        "resources": {"limits": amounts, "requests": amounts},
        "volumeMounts": [
            {"name": f"data-{at}", "mountPath": f"/data/{at}", "readOnly": True} for at in range(4)
        ],
    }
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": "2026-08-22T12:00:00Z"}
        for kind in ("Initialized", "Ready", "ContainersReady", "PodScheduled")
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid,
            "resourceVersion": "1",
            "labels": {"app": "train", "team": "vision"},
            "annotations": annotations,
        },
        "spec": {
            "schedulerName": "hami-scheduler",
            "containers": [container],
            "volumes": [{"name": f"data-{at}", "emptyDir": {}} for at in range(4)],
            **({"nodeName": node} if node else {}),
        },
        "status": {"phase": "Running" if node else "Pending", "conditions": conditions if node else []},
    }


# --- the scheduler ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SchedulerProcess:
    """A running `hami scheduler`."""

    pid: int
    extender: int  # ports on 127.0.0.1
    metrics: int
    synced_s: float  # from its start until it answered /filter

    def rss_mb(self) -> float:
        """Resident memory now, MB."""
        return _status(self.pid, "VmRSS") / 1000

    def peak_mb(self) -> float:
        """The largest resident memory so far, MB."""
        return _status(self.pid, "VmHWM") / 1000

    def cpu_s(self) -> float:
        """Processor seconds used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS


@contextmanager
def scheduler_process(api_port: int, *flags: str) -> Iterator[SchedulerProcess]:
    """Start one against an API server on this machine and wait until it is synced."""
    with tempfile.TemporaryDirectory(prefix="hami-bench-") as folder:
        config = Path(folder, "device-config.yaml")
        config.write_text(_DEVICE_CONFIG)
        kubeconfig = Path(folder, "kubeconfig")
        kubeconfig.write_text(json.dumps(_kubeconfig(api_port)))
        command = [
            *(sys.executable, "-c", "from hami.cli.main import main; main(prog_name='hami')", "scheduler"),
            *("--http_bind", "127.0.0.1:0", "--metrics-bind-address", "127.0.0.1:0"),
            *("--scheduler-name", "hami-scheduler", "--device-config-file", str(config)),
            *flags,
        ]
        started = time.perf_counter()
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "KUBECONFIG": str(kubeconfig)}
        ) as process:
            try:
                assert process.stderr is not None
                ports: dict[str, int] = {}
                for line in process.stderr:
                    event = json.loads(line) if line.startswith("{") else {}
                    if event.get("event") == "server.listening":
                        ports[event["server"]] = int(event["port"])
                    if event.get("event") == "scheduler.synced":
                        break
                else:
                    raise SystemExit("the scheduler ended before it was synced")
                synced = time.perf_counter() - started
                threading.Thread(target=_drain, args=(process,), daemon=True).start()
                yield SchedulerProcess(process.pid, ports["extender"], ports["metrics"], synced)
            finally:
                process.terminate()


def _drain(process: "subprocess.Popen[str]") -> None:
    """Read the log away, so that the process never waits for its reader."""
    for _ in process.stderr or ():
        pass


def _kubeconfig(port: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bench",
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
        "clusters": [{"name": "bench", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "bench", "user": {}}],
    }


def _status(pid: int, name: str) -> float:
    """A value of /proc/PID/status, kB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return float(line.split()[1]) * 1.024
    return 0.0


# --- API servers --------------------------------------------------------------------------------------------


@contextmanager
def api_process(kind: str, nodes: int) -> Iterator[int]:
    """An API server in another process (`stub` or `embedded`); its port."""
    command = [sys.executable, str(_HERE), f"--{kind}", str(nodes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.strip():
                raise SystemExit("the API server ended before it listened")
            yield int(line)
        finally:
            process.terminate()


async def serve_stub(nodes: int) -> None:
    """Lists from memory, watches without events, every write accepted."""
    import msgspec
    from aiohttp import web

    encode = msgspec.json.encode
    shelves = {
        "nodes": [encode(node_object(number)) for number in range(nodes)],
        "pods": [
            encode(running_pod(node, at)) for node in range(nodes) for at in range(PODS_PER_NODE)
        ],
    }  # fmt: skip

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        if request.method != "GET":
            return web.json_response({"kind": "Status", "status": "Success"}, status=201)
        plural = request.path.rpartition("/")[2]
        if request.query.get("watch") == "true":
            response = web.StreamResponse()
            await response.prepare(request)
            await asyncio.sleep(3600)
            return response
        items = shelves.get(plural, [])
        size, start = int(request.query.get("limit", "500")), int(request.query.get("continue") or "0")
        more = str(start + size) if start + size < len(items) else ""
        head = encode({"resourceVersion": "1", "continue": more})
        body = b"".join(
            (b'{"kind":"List","apiVersion":"v1","metadata":', head, b',"items":[',
             b",".join(items[start : start + size]), b"]}")
        )  # fmt: skip
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


async def serve_embedded(nodes: int) -> None:
    """The embedded API server with empty nodes."""
    from hami.local.api.apiserver import ApiServer
    from hami.local.api.resources import NODES

    server = ApiServer()
    for number in range(nodes):
        server.store.create(NODES, node_object(number))
    await server.start()
    print(server.url.rpartition(":")[2], flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--stub", type=int, metavar="NODES")
    kinds.add_argument("--embedded", type=int, metavar="NODES")
    options = parser.parse_args()
    import uvloop

    work = serve_stub(options.stub) if options.stub is not None else serve_embedded(options.embedded)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


if __name__ == "__main__":
    main()
