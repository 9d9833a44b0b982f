"""A monitor on a temporary directory, with fakes of the pod watch and the cards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from node_cards import U1

from hami.node.monitor.claims import LimitsFolder
from hami.node.monitor.garbage import Garbage
from hami.node.monitor.hostgpu import HostReader
from hami.node.monitor.pods import PodInfo, pod_info
from hami.node.monitor.process import add_build_info
from hami.node.monitor.service import Monitor, MonitorOptions
from hami.node.monitor.tracker import Tracker
from hami.protocol import region_layout as layout

GIB = 1 << 30
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def region_bytes(
    uuid: str = U1, *, used: int = 0, limit: int = 0, recent: int = 2, priority: int = 1
) -> bytearray:
    """A v1 region of one device and one process."""
    data = bytearray(layout.V1.SIZE + 1)
    layout.V1.magic.write(data, layout.MAGIC)
    layout.V1.major.write(data, 1)
    layout.V1.minor.write(data, 2)
    layout.V1.device_count.write(data, 1)
    start = layout.V1.uuid.offset
    data[start : start + len(uuid)] = uuid.encode()
    layout.V1.limit.write(data, limit)
    layout.V1.sm_limit.write(data, 30)
    layout.V1.proc_num.write(data, 1)
    base = layout.V1.procs.base(0)
    layout.V1Slot.status.write(data, layout.SLOT_RUNNING, base)
    layout.V1Slot.used_total.write(data, used, base)
    layout.V1Slot.hostpid.write(data, 4242, base)
    layout.V1.utilization_switch.write(data, 1)
    layout.V1.recent_kernel.write(data, recent)
    layout.V1.priority.write(data, priority)
    return data


def pod(uid: str, *containers: str, allocated: str = "", mig: str = "", phase: str = "Running") -> PodInfo:
    text = {
        "metadata": {
            "uid": uid,
            "namespace": "team-a",
            "name": f"pod-{uid}",
            "annotations": {
                "hami.io/vgpu-devices-allocated": allocated,
                "hami.io/vgpu-mig-allocations": mig,
            },
        },
        "spec": {"containers": [{"name": name} for name in containers]},
        "status": {"phase": phase},
    }
    return pod_info(msgspec.Raw(msgspec.json.encode(text)))


class FakePods:
    """The pod watch and the direct list."""

    def __init__(self) -> None:
        self.synced = True
        self.pods: dict[str, PodInfo] = {}
        self.listed: set[str] | None = None
        self.lists = 0

    def add(self, info: PodInfo) -> None:
        self.pods[info.uid] = info

    def by_uid(self) -> Mapping[str, PodInfo]:
        return self.pods

    async def list_uids(self) -> set[str]:
        self.lists += 1
        return self.listed if self.listed is not None else set(self.pods)


class Bench:
    """A monitor on a temporary directory."""

    def __init__(self, folder: Path, nvml: Any, **options: Any) -> None:
        self.base = folder / "vgpu"
        (self.base / "containers").mkdir(parents=True)
        (self.base / "limits").mkdir()
        self.mig_lock = folder / "mig.lock"
        self.proc = folder / "proc"
        self.proc.mkdir()
        self.pods = FakePods()
        self.nvml = nvml
        self.events: list[tuple[str, str, str]] = []
        self.now = time.time()
        self.monitor = Monitor(
            MonitorOptions(
                node="n1", proc=str(self.proc), tick_s=0.02, patience_s=60, scrape_patience_s=60, **options
            ),
            Tracker(str(self.base / "containers")),
            HostReader(nvml, str(self.mig_lock), retry_s=0),
            Garbage(str(self.base / "containers"), str(self.base / "limits")),
            LimitsFolder(str(self.base / "limits")),
            self.pods,
            self.pods.list_uids,
            add_build_info,
            lambda info, event: self.events.append((info.name, event.reason, event.message)),
            clock=lambda: self.now,
        )

    def directory(self, name: str, data: bytes | bytearray | None = None) -> Path:
        path = self.base / "containers" / name
        path.mkdir(exist_ok=True)
        if data is not None:
            (path / "k.cache").write_bytes(data)
        return path

    def fields(self, name: str) -> tuple[int, int]:
        data = (self.base / "containers" / name / "k.cache").read_bytes()
        return layout.V1.recent_kernel.read(data), layout.V1.utilization_switch.read(data)

    async def scrape(self) -> Samples:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for metric in await self.monitor.collect()
            for sample in metric.samples
        }


def value(samples: Samples, name: str, **labels: str) -> float | None:
    """The one series of ``name`` that has these labels, None if there is none."""
    found = [
        number
        for (series, pairs), number in samples.items()
        if series == name and labels.items() <= dict(pairs).items()
    ]
    assert len(found) <= 1
    return found[0] if found else None
