"""What the device plugin shows to Prometheus about itself."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from node_cards import U1
from plugin_world import Node
from prometheus_client.core import Metric

from hami.node.api import deviceplugin_v1beta1_pb2 as pb
from hami.node.errors import AllocateError, NoBindingPodError, NodeError, NvmlError
from hami.node.exact.errors import NotYetError
from hami.node.hostpid.child import BrokerChild
from hami.node.nvml import XidEvent
from hami.node.paths import HostPaths
from hami.node.plugin.counters import PluginCounters, reason_of
from hami.node.plugin.health import HealthWatcher
from hami.node.plugin.metrics import PluginMetrics, plugin_metrics
from hami.protocol.errors import HamiError

Make = Callable[..., Any]
Until = Callable[..., Awaitable[None]]


def values(metrics: tuple[Metric, ...], name: str) -> dict[tuple[str, ...], float]:
    """Values of a series by the values of its labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for metric in metrics
        for sample in metric.samples
        if sample.name == f"hami_device_plugin_{name}"
    }


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_before_the_broker_has_started_the_others_are_shown(host: HostPaths) -> None:
    found = await PluginMetrics(BrokerChild(host).totals, PluginCounters()).collect()
    assert {metric.name for metric in found} == {metric.name for metric in plugin_metrics(PluginCounters())}


def test_allocations_are_counted_by_result_and_reason_with_their_time() -> None:
    clock = Clock()
    counters = PluginCounters(clock)
    for error, seconds in (
        (None, 0.02),
        (None, 99.0),
        (NoBindingPodError("no binding pod found on node n1"), 0.3),
        (NotYetError("no owner yet"), 2.0),
    ):
        try:
            with counters.allocation():
                clock.now += seconds
                if error is not None:
                    raise error
        except NodeError:
            pass
    metrics = plugin_metrics(counters)
    assert values(metrics, "allocations_total") == {
        ("ok", ""): 2,
        ("failed", "no_pod"): 1,
        ("retried", "not_yet"): 1,
    }
    buckets = values(metrics, "allocation_seconds_bucket")
    assert (buckets[("0.01",)], buckets[("0.025",)], buckets[("10.0",)], buckets[("+Inf",)]) == (0, 1, 3, 4)
    assert values(metrics, "allocation_seconds_sum")[()] == pytest.approx(101.32)


def test_what_is_no_error_of_ours_is_not_counted() -> None:
    counters = PluginCounters()
    with pytest.raises(ZeroDivisionError), counters.allocation():
        raise ZeroDivisionError
    assert counters.allocations == {}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AllocateError("device number not matched: 2 and 1"), "device_number"),
        (AllocateError("failed to prepare host PID lock parent: x"), "lock_parent"),
        (AllocateError("/x is not a regular file"), "mount_source"),
        (AllocateError("names card 'A' with -1 MiB: no scheduler writes that"), "annotation"),
        (AllocateError("something else"), "other"),
    ],
)
def test_reasons_are_words_of_a_closed_set(error: HamiError, reason: str) -> None:
    assert reason_of(error) == reason


def test_health_is_shown_by_reason_and_its_changes_are_counted() -> None:
    counters = PluginCounters()
    counters.health({U1: "XID 79"})
    counters.health({U1: "XID 79"})
    assert values(plugin_metrics(counters), "unhealthy_card") == {(U1, "XID 79"): 1}
    counters.health({})
    counters.health({U1: "XID 48"})
    assert values(plugin_metrics(counters), "unhealthy_card") == {(U1, "XID 48"): 1}
    assert values(plugin_metrics(counters), "health_transitions_total") == {
        (U1, "healthy"): 1,
        (U1, "unhealthy"): 2,
    }


def test_the_age_of_the_registration_grows_from_the_last_one() -> None:
    clock = Clock()
    counters = PluginCounters(clock)
    assert values(plugin_metrics(counters), "registration_age_seconds") == {}
    counters.registered()
    clock.now += 42
    assert values(plugin_metrics(counters), "registration_age_seconds") == {(): 42}


@pytest.fixture
def node(cluster: Any, make_nvml: Make) -> Iterator[Node]:
    folder = tempfile.mkdtemp(prefix="hm")
    yield Node(cluster, make_nvml([(U1, "NVIDIA A", 1 << 30)]), Path(folder))
    shutil.rmtree(folder)


async def test_the_running_plugin_counts(node: Node, make_pod: Make, until: Until) -> None:
    node.cluster.add(make_pod("p", f"{U1},NVIDIA,3000,30:;"))
    source = PluginMetrics(None, node.plugin.counters)
    call = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[f"{U1}-2"])])
    other = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[f"{U1}-1"])])
    async with node:
        await until(lambda: node.kubelet.registered)
        async with node.kubelet.plugin() as stub:
            await stub.Allocate(call)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Allocate(other)
        await until(lambda: node.plugin.counters.registration_age_s is not None)
        node.nvml.xids.append(XidEvent(U1, 79))
        await until(lambda: bool(node.plugin.counters.faults))
    metrics = await source.collect()
    assert values(metrics, "allocations_total") == {("ok", ""): 1, ("failed", "no_pod"): 1}
    assert values(metrics, "unhealthy_card") == {(U1, "XID 79"): 1}


async def test_a_card_for_which_the_driver_does_not_answer_is_told_and_counted(
    node: Node, until: Until
) -> None:
    def told() -> list[str]:
        return [text for _, reason, text in node.cluster.events if reason == "HAMiDeviceUnhealthy"]

    memory = node.nvml.cards[0]
    async with node:
        await until(lambda: node.kubelet.registered)
        node.nvml.cards[0] = (*memory[:2], NvmlError("Unknown Error", 999))
        node.plugin._board.wake()  # the registration loop looks again
        await until(told)
        assert told() == [
            f"{U1}: the driver does not answer for it; no new pod gets it until it was seen to "
            "(dmesg on the node, lines with NVRM), then it comes back by itself"
        ]
        assert node.plugin.counters.faults == {U1: "the driver does not answer for it"}
        node.nvml.cards[0] = memory
        node.plugin._board.wake()
        await until(lambda: node.plugin.counters.faults == {})
    assert len(told()) == 1


async def test_a_fault_in_the_moment_of_the_start_is_told(
    node: Node, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(watcher: HealthWatcher) -> None:
        asyncio.get_running_loop().call_soon(watcher._board.mark_faulty, (U1,), "XID 79")

    monkeypatch.setattr(HealthWatcher, "start", start)
    async with node:
        await until(lambda: any(reason == "HAMiDeviceUnhealthy" for _, reason, _ in node.cluster.events))
