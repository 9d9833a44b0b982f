"""Flags, settings, leadership, gate, pending pods and metric text of the scheduler process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from hami.cli import scheduler as cli
from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.kube.errors import TransportError
from hami.protocol.keys import ENV_NODELOCK_EXPIRE
from hami.protocol.views import Lease, LeaseSpec
from hami.scheduler.edge.leader import Leadership, SyncGate, keep_gate
from hami.scheduler.edge.metric_texts import escape
from hami.scheduler.edge.metrics import Metrics
from hami.scheduler.edge.pending import PendingPods
from hami.scheduler.edge.server import ListenError, listen, parse_address
from hami.scheduler.edge.settings import SchedulerSettings, SettingsError, lock_timeout, parse_selector
from hami.scheduler.edge.timing import Histogram, Timings


def settings_of(monkeypatch: pytest.MonkeyPatch, *flags: str) -> SchedulerSettings:
    """The settings that these flags make."""
    seen: list[SchedulerSettings] = []
    monkeypatch.setattr(cli, "_run", lambda given: seen.append(cli._settings(given, {})))
    result = CliRunner().invoke(cli.command, ["--device-config-file", "x", *flags], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_the_defaults_are_those_of_the_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(monkeypatch)
    assert (settings.http_bind, settings.metrics_bind_address) == ("127.0.0.1:8080", ":9395")
    assert (settings.node_policy, settings.card_policy) == ("binpack", "spread")
    assert (settings.kube_qps, settings.kube_burst, settings.kube_timeout_s) == (50.0, 100, 30.0)
    assert (settings.node_lock_timeout_s, settings.node_lock_retry_s) == (300.0, 28.0)
    assert (settings.reservation_timeout_s, settings.force_overwrite, settings.lease) == (900.0, True, None)


def test_flags_are_written_as_go_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(
        monkeypatch,
        "-v=4",
        "--logtostderr",
        "--stderrthreshold=2",
        "--http_bind=0.0.0.0:443",
        "--cert_file=/tls/tls.crt",
        "--key_file",
        "/tls/tls.key",
        "--leader-elect=true",
        "--leader-elect-resource-name=hami-scheduler",
        "--leader-elect-resource-namespace=kube-system",
        "--force-overwrite-default-scheduler=false",
        "--legacy-metrics",
        "--debug",
        "--node-lock-timeout=90s",
        "--node-label-selector=gpu=on,zone=a",
        "--dcu-name=ignored",
        "--sgpu-topology-aware",
    )
    assert settings.lease == ("kube-system", "hami-scheduler")
    assert (settings.force_overwrite, settings.legacy_metrics) == (False, True)
    assert settings.node_lock_timeout_s == 90.0
    assert settings.node_selector == {"gpu": "on", "zone": "a"}
    assert settings.cert_file == Path("/tls/tls.crt")


@pytest.mark.parametrize(
    "flags",
    [
        ["--kube-qps", "many"],
        ["--leader-elect=perhaps"],
        ["--node-lock-timeout=5"],
        ["-v=loud"],
        ["--no-such-flag"],
    ],
)
def test_a_flag_that_cannot_be_read_is_refused(flags: list[str]) -> None:
    assert CliRunner().invoke(cli.command, flags).exit_code == 2


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "--device-config-file is required"),
        (["--device-config-file", "/no/such/file"], "/no/such/file"),
        (["--device-config-file", "x", "--leader-elect"], "--leader-elect needs"),
        (["--device-config-file", "x", "--cert_file", "c"], "belong together"),
        (["--device-config-file", "x", "--node-label-selector", "gpu"], "is not key=value"),
        (["--device-config-file", "x", "--tls-secret", "hami-tls"], "is not namespace/name"),
        (["--device-config-file", "x", "--tls-secret", "a/b"], "--tls-secret needs --tls-hosts"),
        (["--device-config-file", "x", "--kube-burst", "0"], "--kube-burst must be at least 1"),
        (["--device-config-file", "x", "--reservation-timeout", "0s"], "timeouts must be positive"),
    ],
)
def test_settings_that_cannot_work_end_the_process_with_their_reason(
    flags: list[str], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    result = CliRunner().invoke(cli.command, flags)
    assert result.exit_code == 1
    assert text in result.output + capfd.readouterr().err


def test_version_prints_its_six_lines() -> None:
    lines = CliRunner().invoke(cli.command, ["version"]).output.splitlines()
    names = ["Version", "Revision", "BuildDate", "PythonVersion", "Compiler", "Platform"]
    assert [line.partition(":")[0] for line in lines] == names


def test_the_lock_timeout_comes_from_the_flag_else_the_environment_else_five_minutes() -> None:
    assert ENV_NODELOCK_EXPIRE == "HAMI_NODELOCK_EXPIRE"
    assert lock_timeout(60.0, "10m") == 60.0
    assert lock_timeout(None, "10m") == 600.0
    assert lock_timeout(None, "soon") == 300.0
    assert lock_timeout(None, "") == 300.0


def test_an_empty_hostname_is_refused() -> None:
    with pytest.raises(SettingsError, match="hostname"):
        SchedulerSettings(Path("x"), hostname="")


@pytest.mark.parametrize("size", [0, -1])
def test_a_body_limit_that_lets_nothing_through_is_refused(size: int) -> None:
    with pytest.raises(SettingsError, match="--max-request-bytes"):
        SchedulerSettings(Path("x"), hostname="host", max_request_bytes=size)


def test_selectors_are_trimmed() -> None:
    assert parse_selector(" a=b , c= ") == {"a": "b", "c": ""}


@pytest.mark.parametrize(
    ("address", "parsed"),
    [(":9395", ("", 9395)), ("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:443", ("::1", 443))],
)
def test_addresses_are_read_as_go_reads_them(address: str, parsed: tuple[str, int]) -> None:
    assert parse_address(address) == parsed


@pytest.mark.parametrize("address", ["", "80", "host", "host:", "host:x", "::1:80", "h:70000"])
def test_a_bad_address_is_refused(address: str) -> None:
    with pytest.raises(ListenError, match="not host:port, with a port up to 65535"):
        parse_address(address)


def test_an_address_in_use_says_so() -> None:
    with listen("127.0.0.1:0") as sock, pytest.raises(ListenError, match="cannot listen on"):
        listen(f"127.0.0.1:{sock.getsockname()[1]}")


# --- leadership ---------------------------------------------------------------------------------------------


def lease(holder: str, transitions: int = 0) -> Lease:
    return Lease(
        spec=LeaseSpec(holder_identity=holder, lease_duration_seconds=15, lease_transitions=transitions)
    )


def test_the_holder_leads_until_its_lease_is_no_longer_renewed() -> None:
    now = [0.0]
    leadership = Leadership("sched-1", electing=True, clock=lambda: now[0])
    assert not leadership.is_leader()
    leadership.on_add(lease("sched-1_x"))
    assert leadership.is_leader()
    now[0] = 15.0
    assert not leadership.is_leader()
    leadership.on_update(lease("sched-1_x"), lease("sched-10_x", 1))
    assert not leadership.is_leader()


def test_without_election_every_replica_leads() -> None:
    assert Leadership("h", electing=False).is_leader()


async def test_the_gate_opens_after_catching_up_and_closes_when_leadership_is_lost() -> None:
    leadership = Leadership("h", electing=True)
    gate = SyncGate()
    calls: list[str] = []
    caught_up = asyncio.Event()

    async def catch_up() -> None:
        calls.append("catch up")
        if len(calls) == 1:
            raise TransportError("not yet")
        await caught_up.wait()

    task = asyncio.create_task(keep_gate(leadership, gate, catch_up, lambda: calls.append("lost")))
    leadership.on_add(lease("h_1"))
    assert not await gate.wait(0.05)
    caught_up.set()
    assert await gate.wait(10)
    leadership.on_delete(lease("h_1"))
    while gate.is_open:  # noqa: ASYNC110 -- closing tells nobody
        await asyncio.sleep(0.01)
    assert calls == ["catch up", "catch up", "lost"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_another_leader_that_came_and_went_unnoticed_closes_the_gate_and_drops_what_was_decided() -> (
    None
):
    """The Lease's changes may come all at once, after a watch that was interrupted."""
    leadership, gate, calls = Leadership("h", electing=True), SyncGate(), list[str]()

    async def catch_up() -> None:
        calls.append("catch up")

    task = asyncio.create_task(keep_gate(leadership, gate, catch_up, lambda: calls.append("lost")))
    leadership.on_add(lease("h_1", 1))
    assert await gate.wait(60)
    leadership.on_update(lease("h_1", 1), lease("other_1", 2))
    leadership.on_update(lease("other_1", 2), lease("h_1", 3))
    async with asyncio.timeout(60):
        while len(calls) < 3:  # noqa: ASYNC110 -- nobody tells
            await asyncio.sleep(0.01)
    assert calls == ["catch up", "lost", "catch up"]
    assert await gate.wait(60)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_was_read_before_another_led_opens_no_gate() -> None:
    leadership, gate, calls = Leadership("h", electing=True), SyncGate(), list[bool]()
    go = asyncio.Event()

    async def catch_up() -> None:
        calls.append(gate.is_open)
        if len(calls) == 1:
            await go.wait()

    task = asyncio.create_task(keep_gate(leadership, gate, catch_up, lambda: None))
    leadership.on_add(lease("h_1", 1))
    await asyncio.sleep(0)
    leadership.on_add(lease("other_1", 2))
    leadership.on_add(lease("h_1", 3))
    go.set()
    assert await gate.wait(60)
    assert calls == [False, False]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_renewals_begin_no_new_term_and_another_holder_or_a_deleted_lease_does() -> None:
    leadership = Leadership("h", electing=True)
    leadership.on_add(lease("h_1", 1))
    term = leadership.term
    leadership.on_update(lease("h_1", 1), lease("h_1", 1))
    assert leadership.leads_since(term)
    leadership.on_update(lease("h_1", 1), lease("h_1", 3))
    assert leadership.is_leader()
    assert not leadership.leads_since(term)
    term = leadership.term
    leadership.on_delete(lease("h_1", 3))
    leadership.on_add(lease("h_1", 3))
    assert not leadership.leads_since(term)


# --- pending pods -------------------------------------------------------------------------------------------


class Patches(Client):
    """Records what would be written."""

    def __init__(self) -> None:
        super().__init__(ClientConfig("http://unused"), Limits(qps=0))
        self.paths: list[str] = []

    async def request(self, method: str, path: str, **_: Any) -> bytes:
        self.paths.append(path)
        return b"{}"


async def test_only_quiet_pods_that_fit_are_touched_and_not_again_within_ten_seconds(lab: Any) -> None:
    now = [100.0]
    client = Patches()
    pending = PendingPods(
        client, lab.state, Leadership("h", electing=False), clock=lambda: now[0], wall_clock=lambda: 5.0
    )
    lab.node("n1", lab.card("a"))
    pending.rejected(lab.request(lab.pod("fits")))
    pending.rejected(lab.request(lab.pod("big", lab.container(mem=99999))))
    assert await pending.touch_fitting() == 0, "it was at /filter a moment ago"
    now[0] += 3.0
    assert await pending.touch_fitting() == 1
    assert client.paths == ["/api/v1/namespaces/default/pods/fits"]
    now[0] += 9.0
    assert await pending.touch_fitting() == 0
    now[0] += 1.0
    assert await pending.touch_fitting() == 1
    pending.forget("uid-fits")
    now[0] += 60.0
    assert await pending.touch_fitting() == 0


async def test_a_pass_touches_fifty_pods_at_most_oldest_first(lab: Any) -> None:
    now = [0.0]
    client = Patches()
    pending = PendingPods(client, lab.state, Leadership("h", electing=False), clock=lambda: now[0])
    lab.node("n1", lab.card("a"))
    for number in range(60):
        pending.rejected(lab.request(lab.pod(f"p{number:02}")))
    now[0] = 10.0
    assert await pending.touch_fitting() == 50
    assert client.paths[0].endswith("/p00")
    assert client.paths[-1].endswith("/p49")


# --- metrics ------------------------------------------------------------------------------------------------


async def text_of(metrics: Metrics) -> str:
    return b"".join([chunk async for chunk in metrics.chunks()]).decode()


async def test_series_follow_the_state_and_leave_with_their_node(lab: Any) -> None:
    metrics = Metrics(lab.state, Timings(), legacy=False)
    lab.node("n1", lab.card("a"))
    assert 'hami_gpu_shared_count{device_index="0"' in await text_of(metrics)
    lab.holder("h", "n1", "a,NVIDIA,2000,30:;a,NVIDIA,1000,0:;")
    text = await text_of(metrics)
    assert "hami_gpu_shared_count" in text
    labels = 'device_uuid="a",namespace="default",node="n1",pod="h",zone="vGPU"'
    assert f'hami_vgpu_core_allocated_ratio{{container_index="0",{labels}}} 30\n' in text
    assert f'hami_vgpu_memory_allocated_bytes{{container_index="1",{labels}}} {1000 * 1048576}\n' in text
    lab.state.delete_node("n1")
    assert "hami_gpu_shared_count{" not in await text_of(metrics)


async def test_series_are_of_the_state_that_has_taken_over_although_versions_are_equal(lab: Any) -> None:
    lab.node("n1", lab.card("old"))
    metrics = Metrics(lab.state, Timings(), legacy=False)
    assert 'device_uuid="old"' in await text_of(metrics)
    other = type(lab)(lab.state.successor(lab.profiles(memoryFactor=2)))
    other.node("n1", lab.card("new"))
    version = lab.state.node_version("n1")
    lab.state.take_over(other.state)
    assert lab.state.node_version("n1") == version, "else this proves nothing"
    text = await text_of(metrics)
    assert 'device_uuid="new"' in text
    assert 'device_uuid="old"' not in text


async def test_quota_series_have_the_limit_as_label_and_as_series_of_its_own(lab: Any) -> None:
    lab.node("n1", lab.card("a"))
    lab.quota("team", gpumem=4000)
    lab.holder("h", "n1", "a,NVIDIA,2000,30:;", namespace="team")
    text = await text_of(Metrics(lab.state, Timings(), legacy=True))
    where = 'namespace="team",quota_name="nvidia.com/gpumem"'
    assert f'hami_resource_quota_used{{limit="4000",{where},zone="vGPU"}} 2000\n' in text
    assert f'hami_resource_quota_limit{{{where},zone="vGPU"}} 4000\n' in text
    cores = 'limit="0",namespace="team",quota_name="nvidia.com/gpucores",zone="vGPU"'
    assert f"hami_resource_quota_used{{{cores}}} 30\n" in text
    legacy = 'limit="4000",quotaName="nvidia.com/gpumem",quotanamespace="team",zone="vGPU"'
    assert f"QuotaUsed{{{legacy}}} 2000\n" in text


async def test_every_family_is_announced_once_and_its_lines_are_together(lab: Any) -> None:
    for number in range(3):
        lab.node(f"n{number}", lab.card(f"a{number}"), lab.card(f"b{number}"))
    text = await text_of(Metrics(lab.state, Timings(), legacy=True))
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    current = ""
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            current = line.split()[2]
        elif not line.startswith("#"):
            assert line.startswith(current)


async def test_a_realised_mig_slice_is_a_series_of_its_node(lab: Any) -> None:
    lab.node("n1", lab.card("G", index=3, mode="mig"))
    slices = [
        {
            "containerIndex": 0,
            "deviceIndex": at,
            "gpuUUID": "G",
            "profile": "1g.5gb",
            "placement": {"start": at, "size": 1},
        }
        for at in range(2)
    ]
    slices[0] |= {"migUUID": "M", "gpuInstanceID": 7, "computeInstanceID": 0}
    allocated = "G,NVIDIA,2048,14:G,NVIDIA,2048,14:;"
    annotations = {
        "hami.io/vgpu-node": "n1",
        "hami.io/vgpu-time": "1",
        "hami.io/vgpu-devices-allocated": allocated,
        "hami.io/vgpu-mig-allocations": json.dumps(slices),
    }
    lab.see(lab.pod("m", annotations=annotations, node="n1"))
    text = await text_of(Metrics(lab.state, Timings(), legacy=True))
    found = [line for line in text.splitlines() if line.startswith("hami_node_gpu_mig_instance_info{")]
    assert len(found) == 1
    for label in ('mig_uuid="M"', 'gpu_instance_id="7"', 'profile="1g.5gb"', 'device_uuid="G"', 'node="n1"'):
        assert label in found[0]
    assert 'migname="1g.5gb-7"' in text


async def test_the_text_is_what_prometheus_reads(lab: Any) -> None:
    lab.node("n1", lab.card('odd"id\\'), lab.card("b", type="AMD MI300", devcore=304))
    lab.holder("h", "n1", "b,NVIDIA,2000,76:;")
    text = await text_of(Metrics(lab.state, Timings(), legacy=False))
    families = {family.name: family for family in text_string_to_metric_families(text)}
    limits = {one.labels["device_uuid"]: one.value for one in families["hami_gpu_core_limit_ratio"].samples}
    assert limits == {'odd"id\\': 100.0, "b": 100.0}, "AMD cores are percent here"
    used = {one.labels["device_uuid"]: one.value for one in families["hami_gpu_core_allocated_ratio"].samples}
    assert used["b"] == 25.0
    for family in families.values():
        for sample in family.samples:
            assert family.name == "hami_build_info" or sample.labels["zone"] == "vGPU"


def test_label_values_are_escaped() -> None:
    assert escape('a"b\\c\nd') == 'a\\"b\\\\c\\nd'


def test_a_histogram_is_cumulative() -> None:
    histogram = Histogram("h", "what")
    for seconds in (0.0005, 0.004, 100.0):
        histogram.observe(seconds)
    lines = histogram.text().splitlines()
    assert 'h_bucket{le="0.0005",zone="vGPU"} 1' in lines
    assert 'h_bucket{le="0.005",zone="vGPU"} 2' in lines
    assert 'h_bucket{le="+Inf",zone="vGPU"} 3' in lines
    assert 'h_count{zone="vGPU"} 3' in lines
    assert json.loads(lines[-2].split()[-1]) == pytest.approx(100.0045)
