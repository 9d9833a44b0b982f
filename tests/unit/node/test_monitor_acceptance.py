"""Cases of monitor.md §13 that concern the tick as a whole, by number."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from node_cards import U1

from hami.node.errors import NvmlError
from hami.node.monitor.claims import LimitsFolder
from hami.node.monitor.feedback import Activity, judge
from hami.node.monitor.garbage import Garbage
from hami.node.monitor.hostgpu import HostReader
from hami.node.monitor.pods import PodInfo, pod_info
from hami.node.monitor.series import SeriesBook
from hami.node.monitor.service import Monitor, MonitorOptions
from hami.node.monitor.tracker import Tracker
from hami.node.nvml import ProcessUse
from hami.protocol import region_layout as layout

UID = "7c0b9f4e-11d2-4b0e-9f3a-6f0a52d7c001"
GIB = 1 << 30


def region(*, hostpid: int = 0, recent: int = 2, last: int = 0, extension: bool = False) -> bytearray:
    """A v1 region with one device and one process."""
    data = bytearray(layout.FILE_LENGTH if extension else layout.V1.SIZE + 1)
    layout.V1.magic.write(data, layout.MAGIC)
    layout.V1.major.write(data, 1)
    layout.V1.device_count.write(data, 1)
    data[layout.V1.uuid.offset : layout.V1.uuid.offset + len(U1)] = U1.encode()
    layout.V1.proc_num.write(data, 1)
    base = layout.V1.procs.base(0)
    layout.V1Slot.status.write(data, layout.SLOT_RUNNING, base)
    layout.V1Slot.hostpid.write(data, hostpid, base)
    layout.V1.recent_kernel.write(data, recent)
    layout.V1.utilization_switch.write(data, 1)
    layout.V1.last_kernel_time.write(data, last)
    if extension:
        base = layout.EXTENSION_OFFSET
        data[base : base + 8] = layout.EXTENSION_MAGIC
        layout.Extension.version.write(data, layout.EXTENSION_VERSION, base)
        layout.Extension.length.write(data, layout.EXTENSION_LENGTH, base)
    return data


def pod(uid: str = UID, *, mig: str = "", init: tuple[str, ...] = (), phase: str = "Running") -> PodInfo:
    text = {
        "metadata": {
            "uid": uid,
            "namespace": "team-a",
            "name": f"pod-{uid[:4]}",
            "annotations": {"hami.io/vgpu-mig-allocations": mig},
        },
        "spec": {
            "initContainers": [{"name": name} for name in init],
            "containers": [{"name": "web"}, {"name": "side"}],
        },
        "status": {"phase": phase},
    }
    return pod_info(msgspec.Raw(msgspec.json.encode(text)))


class Pods:
    """The pod watch and the direct list."""

    synced = True

    def __init__(self) -> None:
        self.pods: dict[str, PodInfo] = {}

    def add(self, *infos: PodInfo) -> None:
        self.pods |= {info.uid: info for info in infos}

    def by_uid(self) -> Mapping[str, PodInfo]:
        return self.pods

    async def list_uids(self) -> set[str]:
        return set(self.pods)


class Bench:
    """A monitor on a temporary directory; series by name and labels."""

    def __init__(self, folder: Path, nvml: Any, **options: bool) -> None:
        self.containers = folder / "vgpu/containers"
        self.limits = folder / "vgpu/limits"
        self.proc = folder / "proc"
        for path in (self.containers, self.limits, self.proc):
            path.mkdir(parents=True)
        self.mig_lock = folder / "mig.lock"
        self.pods = Pods()
        self.nvml = nvml
        self.now = float(int(time.time()))
        self.monitor = Monitor(
            MonitorOptions(node="n1", proc=str(self.proc), patience_s=60, scrape_patience_s=60, **options),
            Tracker(str(self.containers)),
            HostReader(nvml, str(self.mig_lock), retry_s=0),
            Garbage(str(self.containers), str(self.limits)),
            LimitsFolder(str(self.limits)),
            self.pods,
            self.pods.list_uids,
            lambda book: None,
            lambda info, event: None,
            clock=lambda: self.now,
        )

    def directory(self, name: str, data: bytes | bytearray) -> Path:
        path = self.containers / name
        path.mkdir(exist_ok=True)
        (path / "k.cache").write_bytes(data)
        return path

    def process(self, pid: int, cgroup: str) -> None:
        (self.proc / str(pid)).mkdir(exist_ok=True)
        (self.proc / str(pid) / "cgroup").write_text(cgroup)

    async def series(self, name: str) -> list[tuple[dict[str, str], float]]:
        return [
            (dict(sample.labels), sample.value)
            for metric in await self.monitor.collect()
            for sample in metric.samples
            if sample.name == name
        ]

    async def value(self, name: str) -> float | None:
        found = await self.series(name)
        assert len(found) <= 1
        return found[0][1] if found else None


@pytest.fixture
def bench(tmp_path: Path, make_nvml: Callable[..., Any]) -> Bench:
    return Bench(tmp_path, make_nvml([(U1, "A100", 40 * GIB)]))


def test_41_the_same_card_twice_is_no_contention_with_itself() -> None:
    """A region with one UUID in two places names one card."""
    alone = Activity(frozenset([U1, U1]), recent_kernel=2, utilization_switch=1, priority=1)
    assert judge({"a": alone}, 0.0, True)["a"].utilization_switch == 0


async def test_41_in_a_region_as_it_is_read(bench: Bench) -> None:
    data = region()
    start = layout.V1.uuid.offset + layout.UUID_LENGTH
    data[start : start + len(U1)] = U1.encode()
    layout.V1.device_count.write(data, 2)
    bench.pods.add(pod())
    path = bench.directory(f"{UID}_web", data) / "k.cache"
    await bench.monitor.tick()
    assert layout.V1.utilization_switch.read(path.read_bytes()) == 0


async def test_43_a_lock_that_comes_and_goes_within_a_moment_stops_nothing(bench: Bench) -> None:
    bench.pods.add(pod())
    path = bench.directory(f"{UID}_web", region()) / "k.cache"
    bench.mig_lock.touch()
    bench.mig_lock.unlink()
    await bench.monitor.tick()
    assert layout.V1.recent_kernel.read(path.read_bytes()) == 1
    assert await bench.value("hami_monitor_feedback_paused") == 0


async def test_44_without_nvml_the_process_is_alive_and_tells_so(bench: Bench) -> None:
    bench.nvml.list_error = NvmlError("cannot initialise NVML", 12)
    bench.pods.add(pod())
    bench.directory(f"{UID}_web", region())
    await bench.monitor.tick()
    assert bench.monitor.is_alive
    assert await bench.value("hami_monitor_nvml_up") == 0
    assert await bench.value("hami_vgpu_hook_active") == 1


async def test_46_a_card_that_fails_does_not_hide_its_neighbour(
    tmp_path: Path, make_nvml: Callable[..., Any]
) -> None:
    bench = Bench(tmp_path, make_nvml([("GPU-0", "A", NvmlError("lost", 15)), ("GPU-1", "A", GIB)]))
    found = await bench.series("hami_host_gpu_memory_used_bytes")
    assert [labels["device_uuid"] for labels, _ in found] == ["GPU-1"]


REALISED = (
    '{"containerIndex":%d,"deviceIndex":0,"gpuUUID":"GPU-a","profile":"1g.5gb","placement":{"start":0,"size":1},'
    '"migUUID":"MIG-b","gpuInstanceID":0,"computeInstanceID":3}'
)


async def test_47_a_mig_instance_is_shown_with_its_container(
    tmp_path: Path, make_nvml: Callable[..., Any]
) -> None:
    bench = Bench(tmp_path, make_nvml([]), legacy=True)
    bench.pods.add(pod(init=("setup",), mig=f"[{REALISED % 1}]"))
    assert await bench.series("hami_mig_device_info") == [
        (
            {
                "zone": "vGPU",
                "namespace": "team-a",
                "pod": "pod-7c0b",
                "container": "web",
                "vdevice_index": "0",
                "device_uuid": "GPU-a",
                "mig_uuid": "MIG-b",
                "profile": "1g.5gb",
                "gpu_instance_id": "0",
                "compute_instance_id": "3",
            },
            1.0,
        )
    ]
    ((labels, _),) = await bench.series("MigInfo")
    assert (labels["ctrname"], labels["instanceid"]) == ("web", "0")


@pytest.mark.parametrize(
    "text",
    [
        '[{"containerIndex":0,"deviceIndex":0,"gpuUUID":"GPU-a","profile":"1g","placement":{"start":0,"size":1}}]',
        f"[{REALISED % 9}]",
        f"[{REALISED % 0}",
        "7",
    ],
    ids=["no instance yet", "no such container", "broken", "no list"],
)
async def test_48_what_cannot_be_shown_leaves_other_pods_alone(bench: Bench, text: str) -> None:
    bench.pods.add(pod(mig=text), pod("other", mig=f"[{REALISED % 1}]"))
    assert [labels["container"] for labels, _ in await bench.series("hami_mig_device_info")] == ["side"]


async def test_31_a_finished_pod_has_no_mig_series(bench: Bench) -> None:
    bench.pods.add(pod(mig=f"[{REALISED % 0}]", phase="Failed"))
    assert await bench.series("hami_mig_device_info") == []


async def test_54_only_processes_of_the_own_pod_are_used(bench: Bench) -> None:
    """The utilisation of a foreign library is summed over the PIDs that the pod's cgroup names."""
    data = region(hostpid=42)
    layout.V1.proc_num.write(data, 3)
    for index, pid in ((1, 1), (2, 43)):
        base = layout.V1.procs.base(index)
        layout.V1Slot.status.write(data, layout.SLOT_RUNNING, base)
        layout.V1Slot.hostpid.write(data, pid, base)
    bench.pods.add(pod())
    bench.directory(f"{UID}_web", data)
    bench.process(42, f"0::/kubepods/pod{UID}/x")
    bench.process(1, "0::/init.scope")
    bench.process(43, "0::/kubepods/podother/x")
    bench.nvml.samples[U1] = [ProcessUse(42, 5, 30), ProcessUse(42, 6, 35), ProcessUse(43, 6, 50)]
    await bench.monitor.tick()
    assert await bench.value("hami_monitor_foreign_hostpid_total") == 2
    assert await bench.value("hami_container_device_utilization_ratio") == 35
    await bench.monitor.tick()
    assert await bench.value("hami_container_device_utilization_ratio") == 0
    bench.nvml.samples[U1] = NvmlError("no", 3)
    await bench.monitor.tick()
    assert await bench.value("hami_container_device_utilization_ratio") == 0


async def test_our_own_library_needs_no_samples_of_nvml(bench: Bench) -> None:
    bench.pods.add(pod())
    bench.directory(f"{UID}_web", region(hostpid=42, extension=True))
    bench.process(42, f"0::/kubepods/pod{UID}/x")
    bench.nvml.samples[U1] = [ProcessUse(42, 5, 30)]
    await bench.monitor.tick()
    assert await bench.value("hami_container_device_utilization_ratio") == 0


async def test_while_mig_changes_nvml_is_not_asked_for_processes(bench: Bench) -> None:
    bench.pods.add(pod())
    bench.directory(f"{UID}_web", region(hostpid=42))
    bench.process(42, f"0::/kubepods/pod{UID}/x")
    bench.nvml.samples[U1] = [ProcessUse(42, 5, 30)]
    bench.mig_lock.touch()
    await bench.monitor.tick()
    assert await bench.value("hami_container_device_utilization_ratio") == 0
    bench.mig_lock.unlink()
    bench.nvml.list_error = NvmlError("gone", 1)
    await bench.monitor.tick()
    assert await bench.value("hami_container_device_utilization_ratio") == 0


async def test_without_pod_cgroups_host_pids_are_neither_used_nor_called_foreign(
    tmp_path: Path, make_nvml: Callable[..., Any]
) -> None:
    """Below --host-root containers are plain processes; what they claim cannot be judged."""
    bench = Bench(tmp_path, make_nvml([(U1, "A100", GIB)]), pod_cgroups=False)
    bench.pods.add(pod())
    bench.directory(f"{UID}_web", region(hostpid=42))
    bench.nvml.samples[U1] = [ProcessUse(42, 5, 30)]
    await bench.monitor.tick()
    assert await bench.value("hami_monitor_foreign_hostpid_total") == 0
    assert await bench.value("hami_container_device_utilization_ratio") == 0


async def test_55_a_foreign_live_process_keeps_no_directory(bench: Bench) -> None:
    old = bench.directory("gone_web", region(hostpid=42))
    limits = bench.limits / "gone_web"
    limits.write_text("A=1\n")
    bench.process(42, f"0::/kubepods/pod{UID}/x")
    for path in (old, limits):
        os.utime(path, (bench.now - 660, bench.now - 660))
    await bench.monitor.tick()
    assert old.exists()
    bench.now += 61
    await bench.monitor.tick()
    assert not old.exists()
    assert not limits.exists()


async def test_a_finished_pod_keeps_its_directory_and_its_limits_file_together(bench: Bench) -> None:
    """device-plugin.md L37."""
    old = bench.directory(f"{UID}_web", region())
    limits = bench.limits / f"{UID}_web"
    limits.write_text("A=1\n")
    for path in (old, limits):
        os.utime(path, (bench.now - 660, bench.now - 660))
    bench.pods.add(pod(phase="Succeeded"))
    for _ in range(3):
        await bench.monitor.tick()
        bench.now += 61
    assert old.exists()
    assert limits.exists()
    bench.pods.pods.clear()
    for _ in range(2):
        await bench.monitor.tick()
        bench.now += 61
    assert not old.exists()
    assert not limits.exists()


async def test_a_directory_that_cannot_be_removed_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = bench.directory("gone_web", region())
    os.utime(old, (bench.now - 660, bench.now - 660))
    calls = []

    def refuse(self: Garbage, name: str) -> None:
        calls.append(name)
        raise PermissionError(13, "no")

    await bench.monitor.tick()
    bench.now += 61
    with monkeypatch.context() as patched:
        patched.setattr(Garbage, "remove", refuse)
        await bench.monitor.tick()
    assert calls == ["gone_web"]
    assert old.exists()
    await bench.monitor.tick()
    assert not old.exists()
    assert await bench.value("hami_monitor_gc_removed_total") == 1


async def test_60_a_time_of_the_future_is_reported_once_and_not_shown(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.pods.add(pod())
    bench.directory(f"{UID}_web", region(last=int(bench.now) + 600))
    with caplog.at_level(logging.WARNING):
        await bench.monitor.tick()
        await bench.monitor.tick()
    assert [record.message for record in caplog.records].count("region.clock_ahead") == 1
    assert await bench.series("hami_container_last_kernel_elapsed_seconds") == []
    bench.now += 601
    assert await bench.value("hami_container_last_kernel_elapsed_seconds") == 1


async def test_52_the_heartbeat_goes_only_into_a_block_of_ours(bench: Bench) -> None:
    bench.pods.add(pod())
    for data, written in ((region(extension=True), True), (region(), False)):
        path = bench.directory(f"{UID}_web", data) / "k.cache"
        await bench.monitor.tick()
        after = path.read_bytes()
        changed = {index for index, (old, new) in enumerate(zip(data, after, strict=True)) if old != new}
        fields = set(range(layout.V1.utilization_switch.offset, layout.V1.priority.offset))
        heartbeat = set(range(2_011_152, 2_011_160))
        assert changed <= fields | (heartbeat if written else set())
        if written:
            beat = layout.EXTENSION_OFFSET + layout.Extension.heartbeat.offset
            assert beat == 2_011_152
            assert int.from_bytes(after[beat : beat + 8], "little") == int(bench.now)


async def test_the_directory_of_all_containers_may_be_missing(bench: Bench) -> None:
    shutil.rmtree(bench.containers)
    shutil.rmtree(bench.limits)
    await bench.monitor.tick()
    assert await bench.value("hami_monitor_tracked_containers") == 0
    assert bench.monitor.is_alive


def test_series_of_a_card_without_sensors_are_left_out(make_nvml: Callable[..., Any]) -> None:
    from hami.node.monitor.hostgpu import HostGpu, HostState
    from hami.node.monitor.series import add_host
    from hami.node.nvml import GpuIdentity, GpuMemory, GpuSensors, GpuUtilization

    identity = GpuIdentity(0, U1, "A100", "", 0)
    bare = HostGpu(identity, None, None, None)
    silent = HostGpu(identity, None, None, GpuSensors(None, None, None))
    full = HostGpu(identity, GpuMemory(100, 10), GpuUtilization(5, 6), GpuSensors(40, 1.5, 2))
    host = {"hami_host_gpu_memory_used_bytes", "hami_host_gpu_utilization_ratio", "HostGPUMemoryUsage"}
    for gpu, expected in ((bare, set()), (silent, set()), (full, host)):
        book = SeriesBook()
        add_host(book, "n1", HostState((gpu,), up=True), legacy=True)
        names = {metric.name for metric in book.metrics}
        assert names & host == expected
        assert ("hami_host_gpu_ecc_uncorrected_errors" in names) == (gpu is full)
