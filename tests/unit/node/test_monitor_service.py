"""The tick, the metrics and the removal of old directories (monitor.md §13)."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from monitor_world import GIB, Bench, pod, region_bytes, value
from node_cards import U1, U2

from hami.node.errors import NvmlError, NvmlUnsupportedError
from hami.node.monitor.beside import Beside
from hami.node.monitor.garbage import StaleList, belongs_to_pod
from hami.node.monitor.region import DeviceUse, Region
from hami.node.monitor.ring import new_events
from hami.node.monitor.series import ContainerSample, SeriesBook, add_container, elapsed_seconds
from hami.protocol import region_layout as layout


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


def declare(bench: Bench, name: str, text: str) -> None:
    (bench.base / "limits" / name).write_text(text)


async def test_a_priority_that_the_node_did_not_give_stops_nobody(bench: Bench) -> None:
    """The region is the workload's to write; the limits file is the node's."""
    for uid, claimed in (("uid-a", 0), ("uid-b", 1)):
        bench.pods.add(pod(uid, "web"))
        bench.directory(f"{uid}_web", region_bytes(priority=claimed))
        declare(bench, f"{uid}_web", "CUDA_DEVICE_SM_LIMIT=30\nCUDA_TASK_PRIORITY=1\n")
    await bench.monitor.tick()
    assert bench.fields("uid-a_web") == bench.fields("uid-b_web") == (1, 1)


async def test_a_priority_that_the_node_gave_counts_whatever_the_region_says(bench: Bench) -> None:
    """Nobody gets past a block by a priority of his own."""
    for uid, given, claimed in (("uid-a", 0, 1), ("uid-b", 3, -1)):
        bench.pods.add(pod(uid, "web"))
        bench.directory(f"{uid}_web", region_bytes(priority=claimed))
        declare(bench, f"{uid}_web", f" CUDA_TASK_PRIORITY = {given}\r\n")
    await bench.monitor.tick()
    assert bench.fields("uid-a_web") == (1, 0)
    assert bench.fields("uid-b_web") == (-1, 1)


@pytest.mark.parametrize("text", ["", "CUDA_TASK_PRIORITY=high\n", "#CUDA_TASK_PRIORITY=1\n", None])
async def test_without_a_priority_of_the_node_the_region_s_counts(bench: Bench, text: str | None) -> None:
    """As HAMi's plugin leaves it."""
    for uid, claimed in (("uid-a", 0), ("uid-b", 1)):
        bench.pods.add(pod(uid, "web"))
        bench.directory(f"{uid}_web", region_bytes(priority=claimed))
        if text is None:
            (bench.base / "limits" / f"{uid}_web").mkdir()
        else:
            declare(bench, f"{uid}_web", text)
    await bench.monitor.tick()
    assert bench.fields("uid-b_web") == (-1, 1)


async def test_a_container_is_active_on_no_card_that_it_was_not_given(bench: Bench) -> None:
    bench.pods.add(pod("uid-a", "web", allocated=f"{U2},NVIDIA,1024,30:;"))
    bench.pods.add(pod("uid-b", "web", allocated=f"{U1},NVIDIA,1024,30:;"))
    bench.directory("uid-a_web", region_bytes(U1, priority=0))
    bench.directory("uid-b_web", region_bytes(U1, priority=1))
    await bench.monitor.tick()
    assert bench.fields("uid-b_web") == (1, 0)
    bench.directory("uid-a_web", region_bytes(U2, priority=0))
    bench.directory("uid-c_web", region_bytes(U2, priority=1))
    bench.pods.add(pod("uid-c", "web", allocated=f"{U2},NVIDIA,1024,30:;"))
    await bench.monitor.tick()
    assert bench.fields("uid-c_web") == (-1, 1)


async def test_the_cards_of_the_limits_file_count_whatever_the_pod_s_annotation_says(bench: Bench) -> None:
    """Who may edit a pod could name a neighbour's card in it."""
    bench.pods.add(pod("uid-a", "web", allocated=f"{U1},NVIDIA,1024,30:{U2},NVIDIA,1024,30:;"))
    bench.pods.add(pod("uid-b", "web", allocated=f"{U1},NVIDIA,1024,30:;"))
    bench.directory("uid-a_web", region_bytes(U1, priority=0))
    bench.directory("uid-b_web", region_bytes(U1, priority=1))
    declare(bench, "uid-a_web", f"HAMI_DEVICE_UUIDS={U2}\nCUDA_TASK_PRIORITY=0\n")
    await bench.monitor.tick()
    assert bench.fields("uid-b_web") == (1, 0)
    samples = await bench.scrape()
    assert value(samples, "hami_vgpu_memory_used_bytes", pod="pod-uid-a", device_uuid=U1) is None
    declare(bench, "uid-a_web", f"HAMI_DEVICE_UUIDS={U2},{U1}\nCUDA_TASK_PRIORITY=0\n")
    bench.directory("uid-a_web", region_bytes(U1, priority=0))
    await bench.monitor.tick()
    assert bench.fields("uid-b_web") == (-1, 1)


async def test_a_container_has_no_series_of_cards_that_it_was_not_given(bench: Bench) -> None:
    """With ever new names it would fill the metrics store, and with a neighbour's it would speak for him."""
    bench.pods.add(pod("uid-a", "web", allocated=f"{U1},NVIDIA,1024,30:;"))
    bench.directory("uid-a_web", region_bytes(U2, used=GIB))
    samples = await bench.scrape()
    assert value(samples, "hami_vgpu_memory_used_bytes", container="web") is None
    bench.directory("uid-a_web", region_bytes(U1, used=GIB))
    samples = await bench.scrape()
    assert value(samples, "hami_vgpu_memory_used_bytes", container="web", device_uuid=U1) == GIB


MIG = (
    '[{"containerIndex":0,"deviceIndex":0,"gpuUUID":"%s","profile":"1g.5gb","placement":{"start":0,"size":1},'
    '"migUUID":"MIG-b","gpuInstanceID":1,"computeInstanceID":0}]'
)


@pytest.mark.parametrize("claimed", [U1, "MIG-b"])
async def test_a_container_of_an_instance_has_series_of_card_and_instance(bench: Bench, claimed: str) -> None:
    bench.pods.add(pod("uid-a", "web", allocated=f"{U1}[0-1],NVIDIA,1024,30:;", mig=MIG % U1))
    bench.directory("uid-a_web", region_bytes(claimed, used=GIB))
    samples = await bench.scrape()
    assert value(samples, "hami_vgpu_memory_used_bytes", container="web", device_uuid=claimed) == GIB


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
    shutil.rmtree(bench.base / "containers/uid-a_web")
    await bench.monitor.tick()
    bench.directory("uid-a_web", region_bytes())
    await bench.monitor.tick()
    samples = await bench.scrape()
    assert value(samples, "hami_monitor_foreign_hostpid_total") == 2, "what is gone is not remembered"


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


async def test_an_api_server_that_does_not_answer_stops_no_heartbeat(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.monitor, "_collecting", Beside("removal", 0.01))
    old = bench.directory("stranger_c")
    os.utime(old, (bench.now - 660, bench.now - 660))
    answer = asyncio.Event()
    asked = 0

    async def silent() -> set[str]:
        nonlocal asked
        asked += 1
        await answer.wait()
        return set()

    bench.monitor._list_uids = silent
    async with asyncio.timeout(60):
        for _ in range(4):
            await bench.monitor.tick()
            bench.now += 61
        assert asked == 1, "one question at a time"
        answer.set()
        while old.exists():
            await bench.monitor.tick()


async def test_a_driver_that_hangs_stops_neither_feedback_nor_the_series_of_containers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_driver", "_reading"):
        monkeypatch.setattr(bench.monitor, name, Beside(name, 0.01))
    bench.pods.add(pod("uid-a", "web"))
    bench.directory("uid-a_web", region_bytes(used=7))
    answers = threading.Event()
    cards = bench.nvml.gpus

    def hang() -> Any:
        assert answers.wait(60)
        return cards()

    bench.nvml.gpus = hang
    async with asyncio.timeout(60):
        try:
            for recent in (1, 0):
                await bench.monitor.tick()
                assert bench.fields("uid-a_web") == (recent, 0)
                samples = await bench.scrape()
                assert value(samples, "hami_vgpu_memory_used_bytes", pod="pod-uid-a") == 7
                assert value(samples, "hami_monitor_nvml_up") == 0
        finally:
            answers.set()
        while value(await bench.scrape(), "hami_monitor_nvml_up") == 0:
            await bench.monitor.tick()


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


@pytest.mark.parametrize(("broker", "expected"), [((0, 0), None), ((3, 0), 0), ((1, 2), 2)])
def test_fallbacks_of_the_host_pid_broker_are_shown_once_anybody_asked(
    broker: tuple[int, int], expected: int | None
) -> None:
    """host-pid-broker.md C28: per container, with the gate on only."""
    sample = sample_of(DeviceUse(0, U1, 1, 0, 1, 1, 1, 1, 1))
    assert sample.region is not None
    book = SeriesBook()
    asked = replace(sample, region=replace(sample.region, broker=broker))
    add_container(book, asked, 1000.0, emit_allocated=True, legacy=False)
    found = {item.name: item for metric in book.metrics for item in metric.samples}
    shown = found.get("hami_hostpid_broker_fallbacks_total")
    assert (shown and shown.value) == expected
    assert shown is None or shown.labels.items() >= {"namespace": "ns", "pod": "p", "container": "c"}.items()


def test_a_duplicate_series_is_dropped_and_counted() -> None:
    book = SeriesBook()
    book.gauge("hami_monitor_nvml_up", {}, 1)
    book.gauge("hami_monitor_nvml_up", {}, 0)
    assert book.duplicates == 1
    assert [sample.value for metric in book.metrics for sample in metric.samples] == [1.0]
