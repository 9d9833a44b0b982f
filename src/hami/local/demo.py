"""The story of ``hami demo``: two pods share a simulated GPU, each within its limits; a third has to wait."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hami.local.api.objects import Object, annotations_of, dig, meta
from hami.local.api.podlog import LogRequest
from hami.local.api.resources import NODES, PODS
from hami.local.api.tables import pod_status
from hami.local.cluster import Cluster, ClusterConfig, ClusterError, GpuNode

NODE = "gpu-node-1"
_STEP_LIMIT_S = 60.0
_ASKED_MIB = 6144
_CORE_SAMPLES = 7
_TABLE_WIDTH = 100


@dataclass(frozen=True, slots=True)
class DemoPod:
    """A pod of the story; memory in MiB, cores in percent of the card."""

    name: str
    memory_mib: int
    cores_percent: int
    script: str

    def manifest(self, program: Path) -> Object:
        limits = {
            "nvidia.com/gpu": "1",
            "nvidia.com/gpumem": str(self.memory_mib),
            "nvidia.com/gpucores": str(self.cores_percent),
        }
        container = {
            "name": "main",
            "image": "simulated",
            "command": ["sh", "-c", self.script.replace("GPUPROG", str(program))],
            "resources": {"limits": limits},
        }
        return {
            "metadata": {"name": self.name},
            "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]},
        }


ALICE = DemoPod(
    "alice", 4096, 30,
    f"GPUPROG worker --mib 1024 & sleep 2; GPUPROG alloc {_ASKED_MIB}; wait",
)  # fmt: skip
BOB = DemoPod("bob", 8192, 50, "exec GPUPROG worker --mib 6000")
CAROL = DemoPod("carol", 32768, 20, "exec GPUPROG worker --mib 1024")


@dataclass(frozen=True, slots=True)
class Usage:
    """What the monitor says of one container; bytes and percent."""

    used_bytes: float
    limit_bytes: float
    core_limit_percent: float
    core_used_percent: float


class DemoError(ClusterError):
    """The story did not go as it must."""


class Demo:
    """Runs the story on ``cluster`` and checks each step."""

    def __init__(self, cluster: Cluster, console: Console) -> None:
        self._cluster = cluster
        self._console = console
        self._program = cluster.config.native / "fakegpu" / "gpuprog"

    async def run(self) -> None:
        """Raises :class:`DemoError` at the first step that fails."""
        for pod in (ALICE, BOB):
            await self._create(pod)
            await self._until(f"{pod.name} to run", lambda pod=pod: self._phase(pod) == "Running")  # type: ignore[misc]
            await self._beats(pod, 1)
            self._done(
                f"pod [b]{pod.name}[/b] runs on the shared GPU, limited to {pod.memory_mib} MiB and "
                f"{pod.cores_percent} % of the cores"
            )
        refused = await self._refusal()
        self._done(
            f"a program in [b]alice[/b] asked for {_ASKED_MIB} MiB: CUDA error {refused['result']} "
            f"({refused['error']})"
        )
        before = len(await self._heartbeats(BOB))
        await self._beats(BOB, before + 1)
        self._done("[b]bob[/b] keeps working: no error, its next heartbeat came after alice's refusal")
        await self._create(CAROL)
        await self._until("carol to be rejected", lambda: bool(self._reason(CAROL)))
        self._done(
            f"pod [b]carol[/b] asks for {CAROL.memory_mib} MiB, more than is left, and stays "
            f"{pod_status(self._pod(CAROL))}: {self._reason(CAROL)}"
        )
        usage = await self._usage()
        self._console.print()
        print_table(self._console, self._cards(usage))
        print_table(self._console, self._pods(usage))

    def _done(self, text: str) -> None:
        self._console.print(f"[green]ok[/green] {text}", highlight=False, soft_wrap=True)

    async def _create(self, pod: DemoPod) -> None:
        await self._cluster.api.registry.create(PODS, "default", pod.manifest(self._program))

    def _pod(self, pod: DemoPod) -> Object:
        return self._cluster.api.store.get(PODS, "default", pod.name)

    def _phase(self, pod: DemoPod) -> str:
        status = self._pod(pod)["status"]
        if status.get("phase") == "Failed":
            raise DemoError(f"pod {pod.name} failed: {status.get('reason', '')} {status.get('message', '')}")
        return str(status.get("phase"))

    def _reason(self, pod: DemoPod) -> str:
        for condition in dig(self._pod(pod), "status", "conditions") or []:
            if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
                return str(condition.get("message"))
        return ""

    async def _until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _STEP_LIMIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise self._late(what)
            await asyncio.sleep(0.05)

    def _late(self, what: str) -> DemoError:
        lines = [f"waited {_STEP_LIMIT_S:g} s for {what}"]
        for pod in self._cluster.api.store.list(PODS):
            lines.append(f"  pod {meta(pod)['name']}: {pod_status(pod)} {self._conditions(pod)}")
        lines.append(f"  logs: {self._cluster.logs}")
        return DemoError("\n".join(lines))

    @staticmethod
    def _conditions(pod: Object) -> str:
        conditions = dig(pod, "status", "conditions") or []
        return "; ".join(str(found["message"]) for found in conditions if found.get("message"))

    async def _lines(self, pod: DemoPod) -> list[Mapping[str, Any]]:
        """The JSON lines that the program in ``pod`` has printed so far."""
        logs = self._cluster.api.logs
        if logs is None:
            raise DemoError("the API server serves no logs")
        request = LogRequest(
            pod=self._pod(pod), container="main", follow=False, previous=False, timestamps=False,
            tail_lines=None, since=None, limit_bytes=None,
        )  # fmt: skip
        text = b"".join([chunk async for chunk in logs.read_log(request)]).decode(errors="replace")
        found = []
        for line in text.splitlines():
            if line.startswith("{"):
                found.append(json.loads(line))
        return found

    async def _heartbeats(self, pod: DemoPod) -> list[Mapping[str, Any]]:
        return [line for line in await self._lines(pod) if line.get("call") == "heartbeat"]

    async def _beats(self, pod: DemoPod, count: int) -> None:
        deadline = time.monotonic() + _STEP_LIMIT_S
        while len(beats := await self._heartbeats(pod)) < count:
            if time.monotonic() > deadline or self._phase(pod) != "Running":
                raise self._late(f"{pod.name}'s program to work")
            await asyncio.sleep(0.05)
        if any(beat.get("result") for beat in beats):
            raise DemoError(f"the program in {pod.name} got {beats[-1]}")

    async def _refusal(self) -> Mapping[str, Any]:
        """The line in which alice's second program reports what the driver answered."""
        deadline = time.monotonic() + _STEP_LIMIT_S
        while time.monotonic() < deadline:
            for line in await self._lines(ALICE):
                if line.get("call") == "cuMemAlloc" and line.get("bytes") == _ASKED_MIB << 20:
                    if line.get("result") != 2:
                        raise DemoError(f"the request above the limit was answered with {dict(line)}")
                    return line
            await asyncio.sleep(0.05)
        raise self._late("alice's request above its limit")

    async def _usage(self) -> dict[str, Usage]:
        """Usage by pod from the monitor, once it sees memory and work of both; cores are a mean of 3 s."""
        deadline = time.monotonic() + _STEP_LIMIT_S
        nothing = Usage(0.0, 0.0, 0.0, 0.0)
        while True:
            usage = read_usage(await self._cluster.metrics(NODE))
            seen = [usage.get(pod.name, nothing) for pod in (ALICE, BOB)]
            if all(found.used_bytes > 0 and found.core_used_percent > 0 for found in seen):
                break
            if time.monotonic() > deadline:
                raise self._late("the monitor to see the memory and work of alice and bob")
            await asyncio.sleep(0.2)
        samples = [usage]
        for _ in range(_CORE_SAMPLES - 1):
            await asyncio.sleep(0.5)
            samples.append(read_usage(await self._cluster.metrics(NODE)))
        return mean_cores(samples)

    def _cards(self, usage: Mapping[str, Usage]) -> Table:
        """The cards of the node: what is there, what is promised, what is in use."""
        table = Table(title=f"Cards of {NODE}", title_justify="left", box=SIMPLE_HEAD)
        for column in ("CARD", "MODEL"):
            table.add_column(column, no_wrap=True)
        for column in ("MEMORY", "PROMISED", "IN USE"):
            table.add_column(column, justify="right", no_wrap=True)
        node = self._cluster.api.store.get(NODES, "", NODE)
        cards = msgspec.json.decode(annotations_of(node)["hami.io/node-nvidia-register"])
        promised = sum(found.limit_bytes for found in usage.values())
        used = sum(found.used_bytes for found in usage.values())
        for card in cards:
            table.add_row(
                f"{str(card['id'])[:12]}…", str(card["type"]).removeprefix("NVIDIA-"),
                f"{card['devmem']} MiB", mib(promised), mib(used),
            )  # fmt: skip
        return table

    def _pods(self, usage: Mapping[str, Usage]) -> Table:
        """The pods: limits, and usage as the monitor exports it."""
        table = Table(title="Pods", title_justify="left", box=SIMPLE_HEAD)
        table.add_column("POD", no_wrap=True)
        table.add_column("STATUS", no_wrap=True)
        for column in ("MEMORY LIMIT", "IN USE", "CORE LIMIT", "IN USE"):
            table.add_column(column, justify="right", no_wrap=True)
        for pod in (ALICE, BOB, CAROL):
            found = usage.get(pod.name)
            cores = f"{found.core_used_percent:.0f} %" if found else "-"
            table.add_row(
                pod.name, pod_status(self._pod(pod)), f"{pod.memory_mib} MiB",
                mib(found.used_bytes) if found else "-", f"{pod.cores_percent} %", cores,
            )  # fmt: skip
        return table


def print_table(console: Console, table: Table) -> None:
    """Print with whole cells and without spaces at line ends; a narrow terminal wraps the lines."""
    lines = console.render_lines(table, console.options.update(width=_TABLE_WIDTH), pad=False)
    for line in lines:
        text = Text.assemble(*((part.text, part.style or "") for part in line))
        text.rstrip()
        console.print(text, soft_wrap=True)


def mib(count: float) -> str:
    """Bytes as whole MiB."""
    return f"{int(count) >> 20} MiB"


def read_usage(metrics: str) -> dict[str, Usage]:
    """Usage by pod name out of the monitor's ``/metrics`` text."""
    names = {
        "hami_vgpu_memory_used_bytes": "used",
        "hami_vgpu_memory_limit_bytes": "limit",
        "hami_vgpu_core_limit_ratio": "cores",
        "hami_container_device_utilization_ratio": "busy",
    }
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name in names and "pod" in sample.labels:
                values = found.setdefault(sample.labels["pod"], {})
                values[names[sample.name]] = values.get(names[sample.name], 0.0) + sample.value
    return {
        pod: Usage(*(values.get(key, 0.0) for key in ("used", "limit", "cores", "busy")))
        for pod, values in found.items()
    }


def mean_cores(samples: Sequence[Mapping[str, Usage]]) -> dict[str, Usage]:
    """The last sample, its cores in use averaged over all: NVML's figures jump from second to second."""
    return {
        pod: replace(
            usage,
            core_used_percent=sum(
                sample[pod].core_used_percent if pod in sample else 0.0 for sample in samples
            )
            / len(samples),
        )
        for pod, usage in samples[-1].items()
    }


async def run_demo(console: Console, native: Path, *, keep: bool) -> int:
    """Start the cluster, run the story, and with ``keep`` leave it open until cancelled.

    Returns 0. Raises HamiError when something fails; everything is stopped and removed in any case.
    """
    began = time.monotonic()
    with console.status("starting an embedded Kubernetes with one simulated GPU node") as status:

        def progress(line: str) -> None:
            status.update(f"starting: {line}")
            console.print(f"[dim]   {line}[/dim]", highlight=False, soft_wrap=True)

        cluster = Cluster(ClusterConfig([GpuNode(NODE)], native), progress)
        async with cluster:
            status.update("running the story")
            await Demo(cluster, console).run()
            status.stop()
            console.print(f"done in {time.monotonic() - began:.0f} s", highlight=False)
            if keep:
                _explain(console, cluster)
                await asyncio.Event().wait()
    return 0


def _explain(console: Console, cluster: Cluster) -> None:
    console.print()
    console.print("The cluster stays open until you press Ctrl-C. In another terminal:")
    for line in (
        f"export KUBECONFIG={cluster.kubeconfig}",
        "kubectl get pods -o wide",
        "kubectl describe pod carol     # why it waits",
        "kubectl logs alice | grep refused",
        "kubectl delete pod bob         # makes room: carol starts",
        f"curl {cluster.nodes[NODE].metrics_url}/metrics",
    ):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"Logs of the components: {cluster.logs}", highlight=False, soft_wrap=True)
