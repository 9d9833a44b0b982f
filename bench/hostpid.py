#!/usr/bin/env python3
"""The host PID broker: what it saves processes that start together, and what it costs the node.

Three parts, on the simulated driver:

  start     N processes in 8 containers (PID and mount namespaces of their own) call cuInit at once and then
            make their first primary context at once; a context takes the driver 300 ms. With the broker, and
            without it (the existing path). Milliseconds: p50, p99 and total (from the first process let go to
            the last one ready) of each step, and how many host PIDs are right, unknown and wrong, by the
            kernel's own numbers.
  ask       128 processes ask the broker and a small server in C at once, in turn; what each waits from its
            own connect. broker_p99_over_c_server_ratio: median of the rounds' p99 of the one through that of
            the other. Then the same 128 while the process that started the broker computes without a pause in
            Python: cpu_bound_answered of cpu_bound_asked.
  allocate  Allocate calls of the real device plugin (gRPC, embedded API server), in turn with nothing else
            and while 2000 connections that say nothing, made anew as soon as they are closed, take every
            place of the broker. That flood runs at nice 19, like a workload with a small share of the CPU.
            allocate_flood_ratio: p99 through p99.

Needs the native build (make native); HAMI_NATIVE_BUILD names another build directory. The containers of the
first part take root, or user namespaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from parts import command

from hami.local.api.apiserver import ApiServer
from hami.local.api.resources import NODES, PODS
from hami.local.components import Component, hami_command
from hami.node.api import deviceplugin_v1beta1_pb2 as pb
from hami.node.api import deviceplugin_v1beta1_pb2_grpc as rpc
from hami.node.hostpid.child import BrokerChild
from hami.node.paths import BROKER_DIRECTORY, HostPaths
from hami.protocol import region_layout as layout
from hami.protocol.inventory import decode_json

ROOT = Path(__file__).resolve().parents[1]
CONTAINERS = 8
COUNTS = (1, 16, 64, 128, 300, 512)
CONTEXT_US = 300_000
CLIENTS = 128
FLOOD = 2000
LIMIT_S = 120.0
PATIENT = """
import functools, sys
from hami.node.hostpid.__main__ import main
from hami.node.hostpid.broker import start_broker
from hami.node.hostpid.serving import Server

patient = functools.partial(Server, deadline_s=60)
sys.exit(main(sys.argv[1:], functools.partial(start_broker, make_server=patient)))
"""
_LINE = 64
_USER = () if os.geteuid() == 0 else ("--user", "--map-root-user")
_UNSHARE = ("unshare", *_USER, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
#: Arguments: broker directory, directories that stay visible where they are below /tmp (":"), program.
_MOUNTS = """
set -e
broker=$1 visible=$2
shift 2
mount --bind /tmp /mnt
mount -t tmpfs tmpfs /tmp
IFS=:
for directory in $visible; do
    case $directory in
    /tmp/*) mkdir -p "$directory"; mount --bind "/mnt${directory#/tmp}" "$directory" ;;
    esac
done
unset IFS
mkdir -p /tmp/vgpulock/hostpid
mount --bind "$broker" /tmp/vgpulock/hostpid
mount -o remount,bind,ro /tmp/vgpulock/hostpid
exec "$@"
"""

Figures = dict[str, float]


def milliseconds(samples: list[int], share: float) -> float:
    """A quantile of nanoseconds; the largest sample not above it."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1e6


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {LIMIT_S:.0f} s")
        time.sleep(0.01)


@contextlib.contextmanager
def program(*command: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process for the time of a block."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def broker(root: Path, *, patient: bool = False) -> Iterator[Path]:
    """The broker as a process of its own; its socket."""
    socket = Path(HostPaths(str(root)).host(f"{BROKER_DIRECTORY}/broker.sock"))
    words = ("-c", PATIENT) if patient else ("-m", "hami.node.hostpid")
    with program(sys.executable, "-P", *words, "--host-root", str(root)):
        until(socket.is_socket, "broker")
        yield socket


# ---- start ----------------------------------------------------------------------------------------


@dataclass
class Row:
    """One process's answers to a step."""

    number: int
    pid: int
    result: int
    took: int


class Start:
    """N processes of several containers on one simulated driver. ``patient``: they wait for the broker's
    answer as long as it takes, so that a busy machine costs nobody its PID; their times are not meant then.
    """

    def __init__(
        self, build: Path, directory: Path, count: int, *, gate: bool, patient: bool = False
    ) -> None:
        self.build = build
        self.patient = patient
        self.directory = directory
        self.count = count
        self.gate = gate
        self.ends: list[int] = []
        self.launchers: list[subprocess.Popen[bytes]] = []

    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "FAKEGPU_STATE": str(self.directory / "driver"),
            "FAKEGPU_MODEL": "H200",
            "FAKEGPU_CONTEXT_MIB": "200",
            "LD_LIBRARY_PATH": str(self.build / "fakegpu"),
        }

    def launch(self, container: int, first: int, count: int, broker_directory: Path) -> None:
        """Processes `first`... of one container."""
        region = self.directory / f"c{container}"
        region.mkdir()
        inside = {
            **self.environment(),
            "LD_PRELOAD": f"{self.build / 'vgpu-test/libvgpu_patient.so'}:{self.build / 'libvgpu.so'}"
            if self.patient
            else str(self.build / "libvgpu.so"),
            "FAKEGPU_CONTAINER": f"c{container}",
            "FAKEGPU_DELAY_US": f"cuDevicePrimaryCtxRetain={CONTEXT_US}",
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(region / "vgpu.cache"),
            "LIBVGPU_HOSTPID_BROKER": "1" if self.gate else "0",
        }
        variables = [f"{name}={value}" for name, value in inside.items()]
        command = [
            str(self.build / "vgpu-test/vgpu_start_bench"),
            str(self.directory),
            str(first),
            str(count),
        ]
        visible = f"{self.directory}:{self.build}"
        mounts = ["sh", "-c", _MOUNTS, "sh", str(broker_directory), visible]
        wrapped = [*_UNSHARE, *mounts, "env", *variables, *command]
        self.launchers.append(subprocess.Popen(wrapped))

    def step(self, number: int) -> tuple[list[Row], int]:
        """Let every process go, unless the step is 0, and wait for all; their rows, and the time, ns."""
        start = time.monotonic_ns()
        if number > 0:
            os.close(self.ends[number - 1])
        rows: list[Row] = []
        while len(rows) < self.count:
            data = b""
            while len(data) < _LINE:
                if not select.select([self.done], [], [], LIMIT_S)[0]:
                    raise SystemExit(f"step {number}: not all {self.count} processes within {LIMIT_S:.0f} s")
                data += os.read(self.done, _LINE - len(data))
            step, *values = (int(word) for word in data.split())
            if step == number:
                rows.append(Row(*values))
        return rows, time.monotonic_ns() - start

    def run(self, broker_directory: Path) -> Figures:
        for name in ("go1", "go2", "go3", "done"):
            os.mkfifo(self.directory / name)
        # Open for both, so that nobody waits for the other end.
        self.ends = [os.open(self.directory / f"go{n}", os.O_RDWR | os.O_CLOEXEC) for n in (1, 2, 3)]
        self.done = os.open(self.directory / "done", os.O_RDWR | os.O_CLOEXEC)
        try:
            return self._run(broker_directory)
        finally:
            for launcher in self.launchers:
                launcher.kill()  # and with it all that it has started
                launcher.wait()

    def _run(self, broker_directory: Path) -> Figures:
        used = min(CONTAINERS, self.count)
        shares = [self.count // used + (k < self.count % used) for k in range(used)]
        with program(str(self.build / "fakegpu/fakegpud"), "serve", env=self.environment()):
            state = self.directory / "driver"
            until(lambda: state.is_dir() and any(p.is_socket() for p in state.iterdir()), "driver")
            for container, share in enumerate(shares):
                self.launch(container, sum(shares[:container]), share, broker_directory)
            self.step(0)
            init, init_total = self.step(1)
            context, context_total = self.step(2)
            correct = self.check(used)
            os.close(self.ends[2])
            for launcher in self.launchers:
                launcher.wait(timeout=LIMIT_S)
        os.close(self.done)
        if any(row.result != 0 for row in init + context):
            raise SystemExit(f"{self.count} processes: CUDA errors { ({r.result for r in init + context}) }")
        name = f"{'on' if self.gate else 'off'}_n{self.count}"
        figures = {
            f"{step}_{figure}_ms_{name}": value
            for step, rows, total in (("init", init, init_total), ("context", context, context_total))
            for figure, value in (
                ("p50", milliseconds([row.took for row in rows], 0.5)),
                ("p99", milliseconds([row.took for row in rows], 0.99)),
                ("total", total / 1e6),
            )
        }
        return figures | {f"hostpids_{kind}_{name}": float(number) for kind, number in correct.items()}

    def check(self, containers: int) -> dict[str, int]:
        """Host PIDs of all regions against what the kernel says of the processes that we started."""
        counts = {"right": 0, "unknown": 0, "wrong": 0}
        for container in range(containers):
            kernel = numbers(self.launchers[container].pid)
            data = (self.directory / f"c{container}/vgpu.cache").read_bytes()
            for k in range(layout.V1.proc_num.read(data)):
                base = layout.V1.procs.base(k)
                if layout.V1Slot.status.read(data, base) == layout.SLOT_FREE:
                    continue
                told = layout.V1Slot.hostpid.read(data, base)
                right = told == kernel.get(layout.V1Slot.pid.read(data, base))
                counts["right" if right else "unknown" if told == 0 else "wrong"] += 1
        return counts


def numbers(launcher: int) -> dict[int, int]:
    """PID inside -> PID outside of the descendants of a launcher, whose namespace is below ours."""
    found: dict[int, int] = {}
    waiting = [launcher]
    while waiting:
        pid = waiting.pop()
        for task in Path(f"/proc/{pid}/task").iterdir():
            waiting += [int(child) for child in (task / "children").read_text().split()]
        names = re.search(r"^NSpid:\s+(.*)$", Path(f"/proc/{pid}/status").read_text(), re.M)
        if names is not None and len(names[1].split()) > 1:
            found[int(names[1].split()[-1])] = pid
    return found


def start_figures(build: Path, counts: tuple[int, ...], *, patient: bool = False) -> Figures:
    figures: Figures = {}
    for count in counts:
        for gate in (False, True):
            with tempfile.TemporaryDirectory(prefix="hami-hostpid-") as path:
                directory = Path(path)
                host = directory / "host"
                host.mkdir()
                with broker(host, patient=patient) as socket:
                    found = Start(build, directory, count, gate=gate, patient=patient).run(socket.parent)
            figures |= found
            print(f"{count:4} processes, broker {'on' if gate else 'off'}", file=sys.stderr)
    return figures


# ---- ask ------------------------------------------------------------------------------------------


def load(build: Path, socket: Path, clients: int, rounds: int) -> list[list[int]]:
    """What each client waited, round by round, ns; -1: not answered, or with a wrong PID."""
    command = [str(build / "vgpu-test/vgpu_hostpid_load"), str(socket), str(clients), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


def ask_figures(build: Path, turns: int, rounds: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="hami-hostpid-") as path:
        directory = Path(path)
        other = directory / "c.sock"
        samples: dict[str, list[list[int]]] = {"broker": [], "c_server": []}
        with (
            broker(directory) as socket,
            program(str(build / "vgpu-test/vgpu_hostpid_server"), str(other)),
        ):
            until(other.is_socket, "C server")
            places = {"broker": socket, "c_server": other}
            for place in places.values():
                load(build, place, CLIENTS, 2)
            for turn in range(turns):
                for name in sorted(places, reverse=turn % 2 == 1):
                    samples[name] += load(build, places[name], CLIENTS, rounds)
    figures: Figures = {}
    for name, found in samples.items():
        flat = [value for one in found for value in one]
        figures[f"{name}_unanswered"] = float(sum(value < 0 for value in flat))
        figures[f"{name}_p50_ms"] = milliseconds(flat, 0.5)
        figures[f"{name}_p99_ms"] = statistics.median(milliseconds(one, 0.99) for one in found)
        figures[f"{name}_p99_pooled_ms"] = milliseconds(flat, 0.99)
    figures["broker_p99_over_c_server_ratio"] = figures["broker_p99_ms"] / figures["c_server_p99_ms"]
    return figures


async def cpu_bound_figures(build: Path, rounds: int) -> Figures:
    """The broker as the plugin starts it, from a process that computes without a pause meanwhile."""
    with tempfile.TemporaryDirectory(prefix="hami-hostpid-") as path:
        child = BrokerChild(HostPaths(path))
        await child.start()
        try:
            socket = HostPaths(path).host(f"{BROKER_DIRECTORY}/broker.sock")
            command = [str(build / "vgpu-test/vgpu_hostpid_load"), socket, str(CLIENTS), str(rounds)]
            running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220 - on purpose
            turns = 0
            while running.poll() is None:
                turns += sum(range(20000)) > 0
            assert running.stdout is not None
            with running.stdout as output:
                found = [[int(word) for word in line.split()] for line in output]
        finally:
            await child.stop()
    flat = [value for one in found for value in one]
    good = [value for value in flat if value >= 0]
    return {
        "cpu_bound_asked": float(len(flat)),
        "cpu_bound_answered": float(len(good)),
        "cpu_bound_p99_ms": statistics.median(milliseconds(one, 0.99) for one in found),
    }


# ---- allocate -------------------------------------------------------------------------------------


class Registration(rpc.RegistrationServicer):  # type: ignore[misc]
    """What a device plugin needs of kubelet."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.rounds = 0

    async def Register(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002 - gRPC's names
        self.endpoint = request.endpoint
        self.rounds += 1
        return pb.Empty()


class PluginNode:
    """The real device plugin, with its broker, on an embedded API server."""

    def __init__(self, api: ApiServer, build: Path, directory: Path) -> None:
        self.api = api
        self.directory = directory
        self.root = directory / "n"
        self.build = build
        self.pods = 0
        self.kubelet = Registration()
        self.plugin = self.component()

    @property
    def broker_directory(self) -> Path:
        """Where the broker's socket is."""
        return Path(HostPaths(str(self.root)).host(BROKER_DIRECTORY))

    def component(self) -> Component:
        vgpu = self.root / "usr/local/vgpu"
        library = vgpu / f"lib/v{version('hami')}/libvgpu.so"
        library.parent.mkdir(parents=True)
        library.write_bytes(b"library")
        (vgpu / "ld.so.preload").write_text("/usr/local/vgpu/libvgpu.so\n")
        (self.directory / "config.yaml").write_text("nvidia:\n  deviceSplitCount: 10\n")
        self.api.write_kubeconfig(self.directory / "kubeconfig")
        env = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.directory),
            "KUBECONFIG": str(self.directory / "kubeconfig"),
            "NODE_NAME": "n1",
            "HOOK_PATH": "/usr/local",
            "LIBVGPU_HOSTPID_BROKER": "1",
            "LD_LIBRARY_PATH": str(self.build / "fakegpu"),
            "FAKEGPU_STATE": str(self.directory / "cards"),
            "FAKEGPU_UUID_SEED": "bench",
            "NVIDIA_VISIBLE_DEVICES": "all",
        }
        flags = ("--config-file", str(self.directory / "config.yaml"), "--host-root", str(self.root))
        return Component("device-plugin", lambda: hami_command("device-plugin", *flags), env, self.directory)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Any]:
        """A stub of the plugin."""
        folder = self.root / "var/lib/kubelet/device-plugins"
        folder.mkdir(parents=True)
        node = {"metadata": {"name": "n1"}, "status": {"capacity": {}, "allocatable": {}}}
        await self.api.registry.create(NODES, "", node)
        kubelet, plugin = self.kubelet, self.plugin
        server = grpc.aio.server()
        rpc.add_RegistrationServicer_to_server(kubelet, server)
        server.add_insecure_port(f"unix:{folder / 'kubelet.sock'}")
        await server.start()
        await plugin.start()
        try:
            deadline = time.monotonic() + LIMIT_S
            while not (kubelet.endpoint and self.annotation("hami.io/node-nvidia-register")):
                if time.monotonic() > deadline or plugin.starts > 1:
                    raise plugin.error("the device plugin does not register")
                await asyncio.sleep(0.05)
            options = (("grpc.default_authority", "localhost"),)
            async with grpc.aio.insecure_channel(
                f"unix:{folder / kubelet.endpoint}", options=options
            ) as channel:
                yield rpc.DevicePluginStub(channel)
        finally:
            await plugin.stop()
            await server.stop(None)

    def annotation(self, name: str) -> str:
        notes = self.api.store.get(NODES, "", "n1").get("metadata", {}).get("annotations") or {}
        return str(notes.get(name, ""))

    async def allocate(self, stub: Any) -> int:
        """One Allocate for a pod that was just bound; nanoseconds of the call."""
        card = decode_json(self.annotation("hami.io/node-nvidia-register"), "NVIDIA").devices[0].id
        name = f"p{self.pods}"
        self.pods += 1
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

        def lock(node: dict[str, Any]) -> dict[str, Any]:
            changed: dict[str, Any] = json.loads(json.dumps(node))
            changed["metadata"].setdefault("annotations", {})["hami.io/mutex.lock"] = (
                f"{stamp},default,{name}"
            )
            return changed

        await self.api.registry.update(NODES, "", "n1", lock)
        given = f"{card},NVIDIA,100,1:;"
        annotations = {
            "hami.io/vgpu-node": "n1",
            "hami.io/bind-phase": "allocating",
            "hami.io/bind-time": str(int(time.time())),
            "hami.io/vgpu-devices-to-allocate": given,
            "hami.io/vgpu-devices-allocated": given,
        }
        limits = {"limits": {"nvidia.com/gpu": "1"}}
        spec = {"nodeName": "n1", "containers": [{"name": "main", "image": "none", "resources": limits}]}
        pod = {"metadata": {"name": name, "annotations": annotations}, "spec": spec}
        await self.api.registry.create(PODS, "default", pod)
        request = pb.AllocateRequest(container_requests=[{"devices_ids": [f"{card}-0"]}])
        start = time.monotonic_ns()
        await stub.Allocate(request, timeout=30, wait_for_ready=True)
        return time.monotonic_ns() - start

    async def delete_pods(self) -> None:
        for pod in list(self.api.store.list(PODS)):
            await self.api.registry.delete(PODS, "default", pod["metadata"]["name"])


async def allocate_figures(build: Path, turns: int, calls: int) -> Figures:
    samples: dict[str, list[int]] = {"flooded": [], "quiet": []}
    api = ApiServer(bookmark_interval_s=1)
    await api.start()
    try:
        with tempfile.TemporaryDirectory(prefix="hp") as path:
            node = PluginNode(api, build, Path(path))
            async with node.running() as stub:
                socket = str(node.broker_directory / "broker.sock")
                flood = (
                    "nice",
                    "-n",
                    "19",
                    str(build / "vgpu-test/vgpu_hostpid_load"),
                    socket,
                    "flood",
                    str(FLOOD),
                )
                for _ in range(5):
                    await node.allocate(stub)
                for turn in range(turns):
                    for name in sorted(samples, reverse=turn % 2 == 1):
                        with program(*flood) if name == "flooded" else contextlib.nullcontext():
                            await asyncio.sleep(0.7)  # longer than a place is kept
                            samples[name] += [await node.allocate(stub) for _ in range(calls)]
                        await node.delete_pods()
    finally:
        await api.stop()
    figures = {
        f"allocate_{name}_{figure}_ms": milliseconds(found, share)
        for name, found in samples.items()
        for figure, share in (("p50", 0.5), ("p99", 0.99))
    }
    figures["allocate_flood_ratio"] = figures["allocate_flooded_p99_ms"] / figures["allocate_quiet_p99_ms"]
    return figures


TARGETS = {"broker_p99_over_c_server_ratio": 2.0, "allocate_flood_ratio": 1.5}


def main() -> int:
    """Print a table, and with --json one JSON object as the last line."""
    parser = command.parser(__doc__, "1, 16 and 64 processes, fewer rounds; ends within 60 s")
    parser.add_argument("--count", type=int, help="only that many processes start, 1 to 2048")
    parser.add_argument("--part", choices=("start", "ask", "allocate"), help="only this part")
    parser.add_argument(
        "--patient", action="store_true", help="no limit of time for an answer, for tests on a busy machine"
    )
    arguments = parser.parse_args()
    build = command.native_build("vgpu-test/vgpu_start_bench")
    quick, figures = arguments.quick, Figures()
    if arguments.part in (None, "start"):
        counts = (arguments.count,) if arguments.count else COUNTS[:3] if quick else COUNTS
        figures |= start_figures(build, counts, patient=arguments.patient)
    if arguments.part in (None, "ask"):
        figures |= ask_figures(build, 4 if quick else 20, 5)
        figures |= asyncio.run(cpu_bound_figures(build, 5 if quick else 20))
    if arguments.part in (None, "allocate"):
        figures |= asyncio.run(allocate_figures(build, 2 if quick else 8, 25))
    for name, value in figures.items():
        target = f"   target <= {TARGETS[name]}" if name in TARGETS else ""
        print(f"{name:36} {value:10.3f}{target}")
    if arguments.json:
        print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
