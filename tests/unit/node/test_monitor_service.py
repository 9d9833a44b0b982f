"""The tick, the metrics and the removal of old directories (monitor.md §13)."""

from __future__ import annotations

import asyncio
import gzip
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from hami.cli.monitor import command, resync_seconds
from hami.node.errors import NvmlError, NvmlUnsupportedError, SettingsError
from hami.node.monitor.garbage import Garbage, StaleList, belongs_to_pod
from hami.node.monitor.hostgpu import HostReader
from hami.node.monitor.pods import PodInfo, pod_info
from hami.node.monitor.process import add_build_info
from hami.node.monitor.region import DeviceUse, Region
from hami.node.monitor.ring import new_events
from hami.node.monitor.series import ContainerSample, SeriesBook, add_container, elapsed_seconds
from hami.node.monitor.server import Application, ListenError, MetricsServer, listen
from hami.node.monitor.service import Monitor, MonitorOptions
from hami.node.monitor.tracker import Tracker
from hami.protocol import region_layout as layout

U1 = "GPU-11111111-2222-3333-4444-555555555555"
U2 = "GPU-66666666-7777-8888-9999-000000000000"
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


def pod(uid: str, *containers: str, allocated: str = "", phase: str = "Running") -> PodInfo:
    text = {
        "metadata": {
            "uid": uid,
            "namespace": "team-a",
            "name": f"pod-{uid}",
            "annotations": {"hami.io/vgpu-devices-allocated": allocated},
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
            MonitorOptions(node="n1", proc=str(self.proc), tick_s=0.02, **options),
            Tracker(str(self.base / "containers")),
            HostReader(nvml, str(self.mig_lock), retry_s=0),
            Garbage(str(self.base / "containers"), str(self.base / "limits")),
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


@pytest.fixture
def bench(tmp_path: Path, make_nvml: Callable[..., Any]) -> Bench:
    return Bench(tmp_path, make_nvml([(U1, "A100", 40 * GIB), (U2, "A100", 40 * GIB)]))


async def test_6_a_container_has_its_series_by_their_exact_names(bench: Bench) -> None:
    bench.pods.add(pod("uid-a", "side", "web"))
    bench.directory("uid-a_web", region_bytes(used=3 * GIB, limit=4 * GIB))
    samples = await bench.scrape()
    labels = {
        "zone": "vGPU",
        "namespace": "team-a",
        "pod": "pod-uid-a",
        "container": "web",
        "vdevice_index": "0",
        "device_uuid": U1,
    }
    expected = {
        "hami_vgpu_memory_used_bytes": 3 * GIB,
        "hami_vgpu_memory_limit_bytes": 4 * GIB,
        "hami_container_device_memory_bytes": 3 * GIB,
        "hami_container_device_utilization_ratio": 0,
        "hami_vgpu_memory_context_bytes": 0,
        "hami_vgpu_memory_module_bytes": 0,
        "hami_vgpu_memory_buffer_bytes": 0,
        "hami_vgpu_hook_active": 1,
        "hami_vgpu_core_limit_ratio": 30,
        "hami_vgpu_process_count": 1,
    }
    key = tuple(sorted(labels.items()))
    assert {name: samples.get((name, key)) for name in expected} == expected


async def test_9_an_allocated_container_has_a_limit_before_it_uses_cuda(bench: Bench) -> None:
    bench.pods.add(pod("uid-a", "side", "web", allocated=f";{U1},NVIDIA,3000,30:;"))
    bench.directory("uid-a_web")
    samples = await bench.scrape()
    assert value(samples, "hami_vgpu_memory_limit_bytes", container="web", device_uuid=U1) == 3000 << 20
    assert value(samples, "hami_vgpu_memory_used_bytes", container="web") == 0
    assert value(samples, "hami_vgpu_hook_active", container="web") == 0
    assert value(samples, "hami_container_device_memory_bytes", container="web") is None
    assert value(samples, "hami_vgpu_hook_active", container="side") is None


async def test_emit_allocated_false_restores_the_silence(
    tmp_path: Path, make_nvml: Callable[..., Any]
) -> None:
    bench = Bench(tmp_path, make_nvml([]), emit_allocated=False)
    bench.pods.add(pod("uid-a", "web", allocated=f"{U1},NVIDIA,3000,30:;"))
    assert value(await bench.scrape(), "hami_vgpu_memory_limit_bytes") is None


async def test_31_finished_pods_and_unknown_directories_have_no_series(bench: Bench) -> None:
    bench.pods.add(pod("uid-a", "web", phase="Succeeded"))
    bench.pods.add(pod("uid-c", "web"))
    for name in ("uid-a_web", "uid-b_web", "uid-c_other"):
        bench.directory(name, region_bytes())
    assert value(await bench.scrape(), "hami_vgpu_memory_used_bytes") is None
    await bench.monitor.tick()
    assert bench.directory("uid-a_web").exists()


async def test_host_series_have_hamis_labels(bench: Bench) -> None:
    samples = await bench.scrape()
    labels = {
        "node": "n1",
        "device_index": "1",
        "device_uuid": U2,
        "device_type": "NVIDIA-A100",
        "zone": "vGPU",
    }
    assert value(samples, "hami_host_gpu_memory_used_bytes", **labels) == 10 * GIB
    assert value(samples, "hami_host_gpu_utilization_ratio", **labels) == 50
    assert value(samples, "hami_host_gpu_memory_controller_utilization_ratio", **labels) == 10
    assert value(samples, "hami_host_gpu_temperature_celsius", **labels) == 41
    assert value(samples, "hami_host_gpu_power_watts", **labels) == 61.5
    assert value(samples, "hami_host_gpu_ecc_uncorrected_errors_total") is None
    assert value(samples, "hami_monitor_nvml_up") == 1


async def test_44_without_nvml_container_series_stay(bench: Bench) -> None:
    bench.nvml.list_error = NvmlError("cannot initialise NVML", 12)
    bench.pods.add(pod("uid-a", "web"))
    bench.directory("uid-a_web", region_bytes(used=1))
    samples = await bench.scrape()
    assert value(samples, "hami_monitor_nvml_up") == 0
    assert value(samples, "hami_host_gpu_memory_used_bytes") is None
    assert value(samples, "hami_vgpu_memory_used_bytes") == 1
    bench.nvml.list_error = None
    assert value(await bench.scrape(), "hami_monitor_nvml_up") == 1


async def test_45_46_partial_answers_of_nvml_are_used(bench: Bench) -> None:
    bench.nvml.cards[0] = (U1, "A100", NvmlUnsupportedError("no", 3))
    bench.nvml.cards[1] = (U2, "A100", NvmlError("lost", 15))
    samples = await bench.scrape()
    assert value(samples, "hami_host_gpu_memory_used_bytes") is None
    assert value(samples, "hami_host_gpu_utilization_ratio") == 50
    assert value(samples, "hami_host_gpu_utilization_ratio", device_uuid=U1) == 50


async def test_32_the_tick_blocks_and_51_the_end_unblocks(bench: Bench) -> None:
    for uid, priority in (("uid-a", 0), ("uid-b", 1)):
        bench.pods.add(pod(uid, "web"))
        bench.directory(f"{uid}_web", region_bytes(priority=priority))
    running = asyncio.create_task(bench.monitor.run())
    while bench.fields("uid-b_web") != (-1, 1):  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert bench.fields("uid-b_web")[0] == 0
    samples = await bench.scrape()
    assert value(samples, "hami_vgpu_core_limit_enforced", pod="pod-uid-b") in (0, 1)


async def test_42_a_change_of_mig_pauses_nvml_and_feedback(bench: Bench) -> None:
    bench.pods.add(pod("uid-a", "web"))
    bench.directory("uid-a_web", region_bytes())
    bench.mig_lock.write_text("")
    await bench.monitor.tick()
    assert bench.fields("uid-a_web") == (2, 1)
    samples = await bench.scrape()
    assert value(samples, "hami_monitor_feedback_paused") == 1
    assert value(samples, "hami_host_gpu_utilization_ratio") is None
    assert value(samples, "hami_vgpu_hook_active") == 1
    bench.mig_lock.unlink()
    await bench.monitor.tick()
    assert bench.fields("uid-a_web") == (1, 0)


async def test_a_bad_file_is_counted_once_per_tick_and_harms_nobody(bench: Bench) -> None:
    for uid in ("uid-a", "uid-b"):
        bench.pods.add(pod(uid, "web"))
    bench.directory("uid-a_web", b"1234")
    bench.directory("uid-b_web", region_bytes(used=7))
    await bench.monitor.tick()
    for _ in range(2):
        samples = await bench.scrape()
    assert value(samples, "hami_monitor_cache_errors_total", reason="too_small") == 1
    assert value(samples, "hami_vgpu_memory_used_bytes") == 7
    assert value(samples, "hami_monitor_tracked_containers") == 1


async def test_54_host_pids_of_other_pods_are_counted_once(bench: Bench) -> None:
    bench.pods.add(pod("uid-a", "web"))
    bench.directory("uid-a_web", region_bytes())
    await bench.monitor.tick()
    await bench.monitor.tick()
    assert value(await bench.scrape(), "hami_monitor_foreign_hostpid_total") == 1


def test_a_process_belongs_to_the_pod_that_its_cgroup_names(tmp_path: Path) -> None:
    uid = "7c0b9f4e-11d2-4b0e-9f3a-6f0a52d7c001"
    for pid, text in (
        (1, "0::/init"),
        (2, f"0::/kubepods/pod{uid}/x"),
        (3, f"pod{uid.replace('-', '_')}.slice"),
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(text)
    assert [pid for pid in range(1, 5) if belongs_to_pod(pid, uid, str(tmp_path))] == [2, 3]
    assert not belongs_to_pod(1, "", str(tmp_path))


async def test_27_28_29_only_old_directories_of_gone_pods_are_removed(bench: Bench) -> None:
    old = bench.directory("stranger_c", region_bytes())
    limits = bench.base / "limits/stranger_c"
    limits.write_text("A=1\n")
    young = bench.directory("newcomer_c")
    for path in (old, limits):
        os.utime(path, (bench.now - 660, bench.now - 660))
    bench.pods.synced = False
    await bench.monitor.tick()
    bench.pods.synced = True
    await bench.monitor.tick()
    assert old.exists()
    bench.now += 61
    bench.pods.listed = {"stranger"}
    await bench.monitor.tick()
    assert old.exists()
    bench.pods.listed = set()
    await bench.monitor.tick()
    assert not old.exists()
    assert not limits.exists()
    assert young.exists()
    assert value(await bench.scrape(), "hami_monitor_gc_removed_total") == 1


async def test_a_directory_with_a_live_process_of_its_pod_stays(bench: Bench) -> None:
    old = bench.directory("stranger_c", region_bytes())
    os.utime(old, (bench.now - 660, bench.now - 660))
    (bench.proc / "4242").mkdir()
    (bench.proc / "4242/cgroup").write_text("0::/kubepods/podstranger")
    await bench.monitor.tick()
    bench.now += 61
    await bench.monitor.tick()
    assert old.exists()
    (bench.proc / "4242/cgroup").write_text("0::/kubepods/podother")
    await bench.monitor.tick()
    assert not old.exists()


async def test_56_a_large_directory_is_reported_once_an_hour(bench: Bench) -> None:
    bench.pods.add(pod("uid-a", "web"))
    (bench.directory("uid-a_web") / "big").write_bytes(b"x" * (17 << 20))
    for _ in range(3):
        await bench.monitor.tick()
        bench.now += 61
    assert [event[:2] for event in bench.events] == [("pod-uid-a", "HAMiCacheDirectoryLarge")]
    size = value(await bench.scrape(), "hami_container_cache_directory_bytes", container="web")
    assert size is not None
    assert size >= 17 << 20
    bench.now += 3600
    await bench.monitor.tick()
    assert len(bench.events) == 2


def with_ring(written: int, kind: int = layout.EVENT_REFUSAL, skip: int = -1) -> bytes:
    """A region with our extension block and ``written`` events, entry ``skip`` half-written."""
    data = region_bytes() + bytes(layout.FILE_LENGTH - layout.V1.SIZE - 1)
    base = layout.EXTENSION_OFFSET
    data[base : base + 8] = layout.EXTENSION_MAGIC
    layout.Extension.version.write(data, layout.EXTENSION_VERSION, base)
    layout.Extension.length.write(data, layout.EXTENSION_LENGTH, base)
    layout.Extension.next_event.write(data, written, base)
    for number in range(max(0, written - layout.EVENT_RING), written):
        entry = base + layout.Extension.events.base(number % layout.EVENT_RING)
        layout.ExtensionEvent.sequence.write(data, 0 if number == skip else number + 1, entry)
        layout.ExtensionEvent.type.write(data, kind, entry)
        layout.ExtensionEvent.pid.write(data, 42, entry)
        layout.ExtensionEvent.value.write(data, (number + 1) << 20, entry)
    return bytes(data)


def ring_of(data: bytes) -> bytes:
    return data[layout.EXTENSION_OFFSET + layout.Extension.events.offset :]


def test_58_only_the_newest_whole_entries_are_read() -> None:
    events = new_events(ring_of(with_ring(1500, skip=1499)), 1500, 0)
    assert (events[0].number, events[-1].number, len(events)) == (476, 1498, 1023)
    assert new_events(ring_of(with_ring(1500)), 1500, 1499)[0].value == 1500 << 20
    assert new_events(b"", 5, 0) == ()
    assert new_events(ring_of(with_ring(3)), 2**64 - 1, 0) == ()


async def test_58_a_refusal_becomes_one_event_per_minute(bench: Bench) -> None:
    bench.pods.add(pod("uid-a", "web"))
    await bench.monitor.tick()
    for written in (3, 4):
        bench.directory("uid-a_web", with_ring(written))
        await bench.monitor.tick()
    assert [event[:2] for event in bench.events] == [("pod-uid-a", "HAMiMemoryRefused")]
    assert "process 42: a request for 3.0 MiB was refused" in bench.events[0][2]
    bench.now += 61
    await bench.monitor.tick()
    bench.directory("uid-a_web", with_ring(5))
    await bench.monitor.tick()
    assert len(bench.events) == 2


async def test_events_from_before_the_start_are_not_repeated(bench: Bench) -> None:
    bench.pods.add(pod("uid-a", "web"))
    bench.directory("uid-a_web", with_ring(7))
    await bench.monitor.tick()
    assert bench.events == []


async def test_30_names_of_another_form_are_never_removed(bench: Bench) -> None:
    for name in ("nodashes", "uid_", "_x"):
        os.utime(bench.directory(name), (1, 1))
    await bench.monitor.tick()
    bench.now += 61
    await bench.monitor.tick()
    assert len(list((bench.base / "containers").iterdir())) == 3
    assert bench.pods.lists == 0


def test_a_name_that_was_known_in_between_starts_anew() -> None:
    stale = StaleList(300)
    assert stale.candidates({"a_b": 0.0}, 1000) == ()
    assert stale.candidates({}, 1060) == ()
    assert stale.candidates({"a_b": 0.0}, 1061) == ()
    assert stale.candidates({"a_b": 0.0}, 1121) == ("a_b",)
    assert stale.candidates({"a_b": 1000.0}, 1122) == ()


def test_directories_are_still_collected_after_the_clock_was_set_back() -> None:
    stale = StaleList(300)
    day = 86_400.0
    assert stale.candidates({"a_b": 10 * day}, 10 * day + 400) == ()
    assert stale.candidates({"a_b": 10 * day}, 9 * day) == ()
    assert stale.candidates({"a_b": 10 * day}, 9 * day + 300) == ()
    assert stale.candidates({"a_b": 10 * day}, 9 * day + 301) == ("a_b",)


@pytest.mark.parametrize(
    ("last", "expected"), [(940, 60.0), (1030, 0.0), (0, None), (1600, None), (1300, 0.0)]
)
def test_23_60_the_time_since_the_last_kernel(last: int, expected: float | None) -> None:
    assert elapsed_seconds(last, 1000.0) == expected


def sample_of(device: DeviceUse, last_kernel: int = 0) -> ContainerSample:
    region = Region("v1", (device,), frozenset(), 0, 1, (), 1, 0, 1, last_kernel, False)
    return ContainerSample("ns", "p", "c", (), region)


def test_24_legacy_names_and_the_floor_of_offset() -> None:
    book = SeriesBook()
    device = DeviceUse(0, U1, 1, 0, total=100, context=60, module=30, buffer=20, sm=5)
    add_container(book, sample_of(device, 990), 1000.0, emit_allocated=True, legacy=True)
    samples = {sample.name: sample for metric in book.metrics for sample in metric.samples}
    described = samples["Device_memory_desc_of_container"]
    assert described.value == 100
    assert described.labels["offset"] == "0"
    assert (described.labels["context"], described.labels["data"]) == ("60", "20")
    assert samples["Device_last_kernel_of_container"].value == 10
    assert samples["vGPU_device_memory_limit_in_bytes"].labels["vdeviceid"] == "0"


def test_without_a_last_kernel_there_are_seven_of_the_eight_series() -> None:
    names = {
        "hami_vgpu_memory_used_bytes",
        "hami_vgpu_memory_limit_bytes",
        "hami_container_device_memory_bytes",
        "hami_container_device_utilization_ratio",
        "hami_vgpu_memory_context_bytes",
        "hami_vgpu_memory_module_bytes",
        "hami_vgpu_memory_buffer_bytes",
        "hami_container_last_kernel_elapsed_seconds",
    }
    device = DeviceUse(0, U1, 1, 0, 1, 1, 1, 1, 1)
    for last, count in ((0, 7), (990, 8)):
        book = SeriesBook()
        add_container(book, sample_of(device, last), 1000.0, emit_allocated=True, legacy=False)
        assert len(names & {metric.name for metric in book.metrics}) == count


def test_a_duplicate_series_is_dropped_and_counted() -> None:
    book = SeriesBook()
    book.gauge("hami_monitor_nvml_up", {}, 1)
    book.gauge("hami_monitor_nvml_up", {}, 0)
    assert book.duplicates == 1
    assert [sample.value for metric in book.metrics for sample in metric.samples] == [1.0]


class Served:
    """The HTTP server of a bench on a free port."""

    def __init__(self, monitor: Monitor) -> None:
        self.listener = listen("127.0.0.1:0")
        self.server = MetricsServer(Application(monitor), self.listener)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    async def __aenter__(self) -> Served:
        self.task = asyncio.create_task(self.server.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.stop()
        await self.task

    async def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
        def fetch() -> tuple[int, bytes, Any]:
            request = urllib.request.Request(self.url + path, headers=headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    return answer.status, answer.read(), answer.headers
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read(), error.headers

        return await asyncio.to_thread(fetch)


async def test_49_the_scrape_is_prometheus_text_in_one_zone(bench: Bench) -> None:
    bench.pods.add(pod("uid-a", "web"))
    bench.directory("uid-a_web", region_bytes(used=7))
    async with Served(bench.monitor) as served:
        status, body, headers = await served.get("/metrics")
        packed = (await served.get("/metrics", **{"Accept-Encoding": "gzip"}))[1]
        openmetrics = await served.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(body.decode()))
    for family in families:
        for sample in family.samples:
            assert (sample.labels.get("zone") == "vGPU") != (family.name == "hami_build_info")
            assert family.type == ("counter" if sample.name.endswith("_total") else "gauge")
    assert b"hami_vgpu_memory_used_bytes" in gzip.decompress(packed)
    assert openmetrics[1].rstrip().endswith(b"# EOF")


async def test_health_and_readiness(bench: Bench) -> None:
    bench.pods.synced = False
    async with Served(bench.monitor) as served:
        assert (await served.get("/healthz"))[0] == 200
        assert (await served.get("/readyz"))[0] == 503
        bench.pods.synced = True
        assert (await served.get("/readyz"))[0] == 200
        bench.now += 61
        assert (await served.get("/healthz"))[0] == 503
        assert (await served.get("/other"))[0] == 404
        assert (await served.get("/metrics", method="POST"))[0] == 405


def test_a_taken_port_and_a_bad_address_are_errors() -> None:
    with listen("127.0.0.1:0") as taken, pytest.raises(ListenError, match="cannot listen"):
        listen(f"127.0.0.1:{taken.getsockname()[1]}")
    for address in ("9394", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", ""):
        with pytest.raises(SettingsError):
            listen(address)


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, 300), ("abc", 300), ("1h30m", 5400), ("250ms", 60), ("-5m", 60), ("0s", 60)]
)
def test_2_3_the_resync_interval(text: str | None, seconds: float) -> None:
    assert resync_seconds(text) == seconds


@pytest.mark.parametrize("missing", ["HOOK_PATH", "NODE_NAME"])
def test_1_a_missing_variable_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOOK_PATH", "NODE_NAME"):
        monkeypatch.setenv(name, "" if name == missing else "x")
    result = CliRunner().invoke(command, ["-v=4", "--logtostderr", "--v", "2"])
    assert result.exit_code != 0
    assert missing in result.output


def test_5_the_version_has_six_lines_and_unknown_flags_are_refused() -> None:
    result = CliRunner().invoke(command, ["version"])
    assert result.exit_code == 0
    assert len(result.output.splitlines()) >= 6
    assert CliRunner().invoke(command, ["--no-such-flag"]).exit_code != 0
