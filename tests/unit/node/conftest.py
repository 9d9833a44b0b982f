"""Small fakes of what the node components talk to: the API server, NVML, and a host below a temporary
root.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hami.kube.errors import Conflict, KubeError, NotFound
from hami.node.errors import NvmlError
from hami.node.hostpid import child as child_module
from hami.node.nvml import (
    EventSource,
    GpuIdentity,
    GpuMemory,
    GpuSensors,
    GpuUtilization,
    NvLink,
    ProcessUse,
    XidEvent,
)
from hami.node.paths import HostPaths
from hami.protocol.views import Node, Pod, decode

sys.path.insert(0, str(Path(__file__).resolve().parent))


class FakeCluster:
    """An API server for one node: pods, the node's annotations, events; failures on request."""

    def __init__(self, node_name: str = "n1") -> None:
        self.node_name = node_name
        self.node_annotations: dict[str, str] = {}
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.patches: list[tuple[str, dict[str, str | None]]] = []
        self.events: list[tuple[str, str, str]] = []
        self.version = 1
        self.fail_pod_patches: Callable[[Mapping[str, str | None]], KubeError | None] = lambda _: None
        self.fail_node_patches: list[KubeError] = []
        self.fail_reads: list[KubeError] = []

    def add(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        self.objects[(meta["namespace"], meta["name"])] = pod

    def notes(self, name: str, namespace: str = "team-a") -> dict[str, str]:
        found: dict[str, str] = self.objects[(namespace, name)]["metadata"]["annotations"]
        return found

    async def node(self) -> Node:
        self._maybe_fail()
        meta = {
            "name": self.node_name,
            "annotations": self.node_annotations,
            "resourceVersion": str(self.version),
        }
        return decode(msgspec.json.encode({"metadata": meta}), Node)

    async def pods(self) -> list[Pod]:
        self._maybe_fail()
        found = [decode(msgspec.json.encode(item), Pod) for item in self.objects.values()]
        return [pod for pod in found if pod.node_name == self.node_name]

    async def pod(self, namespace: str, name: str) -> Pod:
        try:
            return decode(msgspec.json.encode(self.objects[(namespace, name)]), Pod)
        except KeyError as error:
            raise NotFound(404, "NotFound", f'pods "{name}" not found') from error

    async def annotate_pod(
        self, pod: Pod, annotations: Mapping[str, str | None], resource_version: str = ""
    ) -> None:
        failure = self.fail_pod_patches(annotations)
        if failure is not None:
            raise failure
        self.patches.append((pod.name, dict(annotations)))
        _merge(self.notes(pod.name, pod.namespace), annotations)

    async def annotate_node(self, annotations: Mapping[str, str | None], resource_version: str = "") -> None:
        if self.fail_node_patches:
            raise self.fail_node_patches.pop(0)
        if resource_version and resource_version != str(self.version):
            raise Conflict(409, "Conflict", "the object has been modified")
        self.version += 1
        self.patches.append(("node", dict(annotations)))
        _merge(self.node_annotations, annotations)

    def pod_event(self, pod: Pod, type_: str, reason: str, message: str) -> None:
        self.events.append((pod.name, reason, message))

    def node_event(self, type_: str, reason: str, message: str) -> None:
        self.events.append(("node", reason, message))

    def _maybe_fail(self) -> None:
        if self.fail_reads:
            raise self.fail_reads.pop(0)


def _merge(target: dict[str, str], patch: Mapping[str, str | None]) -> None:
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = value


class FakeEvents:
    """XID events as a list; then time-outs, or an error for ever."""

    def __init__(self, owner: FakeNvml) -> None:
        self._owner = owner

    def wait(self, timeout_s: float) -> XidEvent | None:
        self._owner.waits += 1
        if self._owner.wait_error is not None:
            raise self._owner.wait_error
        return self._owner.xids.pop(0) if self._owner.xids else None

    def close(self) -> None:
        self._owner.closed_sources += 1


class FakeNvml:
    """NVML with the cards of a list; memory in bytes or an error."""

    def __init__(self, cards: Sequence[tuple[str, str, int | NvmlError]]) -> None:
        self.cards = list(cards)
        self.utilizations: dict[str, GpuUtilization | NvmlError] = {}
        self.list_error: NvmlError | None = None
        self.samples: dict[str, list[ProcessUse] | NvmlError] = {}
        self.links: dict[str, list[NvLink] | NvmlError] = {}
        self.ancestors: dict[tuple[str, str], int | NvmlError] = {}
        self.link_questions = 0
        self.xids: list[XidEvent] = []
        self.wait_error: NvmlError | None = None
        self.waits = 0
        self.closed_sources = 0
        self.unwatched: tuple[str, ...] = ()

    def gpus(self) -> tuple[GpuIdentity, ...]:
        if self.list_error is not None:
            raise self.list_error
        return tuple(
            GpuIdentity(index, uuid, name, f"00000000:{index:02X}:00.0", index)
            for index, (uuid, name, _) in enumerate(self.cards)
        )

    def memory(self, gpu: GpuIdentity) -> GpuMemory:
        found = self.cards[gpu.index][2]
        if isinstance(found, NvmlError):
            raise found
        return GpuMemory(found, found // 4)

    def utilization(self, gpu: GpuIdentity) -> GpuUtilization:
        found = self.utilizations.get(gpu.uuid, GpuUtilization(50, 10))
        if isinstance(found, NvmlError):
            raise found
        return found

    def sensors(self, gpu: GpuIdentity) -> GpuSensors:
        return GpuSensors(40 + gpu.index, 61.5, None)

    def processes(self, gpu: GpuIdentity, since_us: int) -> tuple[ProcessUse, ...]:
        found = self.samples.get(gpu.uuid, [])
        if isinstance(found, NvmlError):
            raise found
        return tuple(sample for sample in found if sample.time_us > since_us)

    def nvlinks(self, gpu: GpuIdentity) -> tuple[NvLink, ...]:
        self.link_questions += 1
        found = self.links.get(gpu.uuid, [])
        if isinstance(found, NvmlError):
            raise found
        return tuple(found)

    def common_ancestor(self, one: GpuIdentity, other: GpuIdentity) -> int | None:
        found = self.ancestors.get((one.uuid, other.uuid), 40)
        if isinstance(found, NvmlError):
            raise found
        return found

    def watch(self, gpus: Sequence[GpuIdentity]) -> tuple[EventSource, tuple[str, ...]]:
        return FakeEvents(self), self.unwatched

    def close(self) -> None:
        pass


async def eventually(condition: Callable[[], bool], limit_s: float = 60) -> None:
    """Wait until ``condition`` holds; the limit only ends a test that fails."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while not condition():
        assert loop.time() < deadline, "the condition never became true"
        await asyncio.sleep(0.005)


def pod_object(
    name: str,
    to_allocate: str,
    *,
    containers: Sequence[str] = ("app",),
    init: Sequence[str] = (),
    env: Mapping[str, Sequence[tuple[str, str]]] | None = None,
    bind_time: int = 1_787_300_000,
    phase: str = "Pending",
    bind_phase: str = "allocating",
    node: str = "n1",
) -> dict[str, Any]:
    """A pod bound to ``node`` as our scheduler leaves it."""

    def spec(container: str) -> dict[str, Any]:
        entries = [{"name": key, "value": value} for key, value in (env or {}).get(container, ())]
        return {"name": container, "image": "app:1", "env": entries}

    return {
        "metadata": {
            "name": name,
            "namespace": "team-a",
            "uid": f"uid-{name}",
            "annotations": {
                "hami.io/vgpu-node": node,
                "hami.io/bind-time": str(bind_time),
                "hami.io/bind-phase": bind_phase,
                "hami.io/vgpu-devices-to-allocate": to_allocate,
                "hami.io/vgpu-devices-allocated": to_allocate,
            },
        },
        "spec": {
            "nodeName": node,
            "initContainers": [spec(item) for item in init],
            "containers": [spec(item) for item in containers],
        },
        "status": {"phase": phase},
    }


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def make_pod() -> Callable[..., dict[str, Any]]:
    return pod_object


@pytest.fixture
def make_nvml() -> Callable[..., FakeNvml]:
    return FakeNvml


@pytest.fixture
def host(tmp_path: Path) -> HostPaths:
    """A host below a temporary root with the library of version v2.10.0 installed."""
    root = tmp_path / "host"
    vgpu = root / "usr/local/vgpu"
    vgpu.mkdir(parents=True)
    (vgpu / "libvgpu.so.v2.10.0").write_bytes(b"library")
    (vgpu / "libvgpu.so").write_bytes(b"library")
    (vgpu / "ld.so.preload").write_text("/usr/local/vgpu/libvgpu.so\n")
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    return HostPaths(str(root), "/usr/local", "v2.10.0")


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    return eventually


@pytest.fixture
def patient_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a good child may take longer than the plugin waits."""
    from hostpid_world import LIMIT_S

    monkeypatch.setattr(child_module, "STOP_LIMIT_S", LIMIT_S)
    monkeypatch.setattr(child_module, "CHECK_LIMIT_S", LIMIT_S)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: a Unix socket path has at most 107 characters."""
    path = tempfile.mkdtemp(prefix="hp")
    yield Path(path)
    shutil.rmtree(path)
