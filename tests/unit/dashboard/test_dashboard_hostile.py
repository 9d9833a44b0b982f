"""What the cluster and clients may send, and what it must not do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from dashboard_harness import World, api, card, container, node, pod
from hypothesis import given
from hypothesis import strategies as st

from hami.answers.errors import MetricsError
from hami.dashboard import reading
from hami.dashboard.app import Answer, Dashboard
from hami.dashboard.explaining import Explainer
from hami.dashboard.guard import Hosts, Rates
from hami.dashboard.listing import QueryError, parameters
from hami.dashboard.reading import read_monitor
from hami.protocol.errors import ObjectError

HUGE = 2**31 - 1


def test_sums_of_the_largest_cards_do_not_overflow() -> None:
    world = World()
    world.put(*(node(f"n{at}", card(f"c{at}", devmem=HUGE, count=HUGE)) for at in range(4)))
    assert api(world, "summary")["memoryMiB"]["total"] == 4 * HUGE
    assert api(world, "summary")["slots"]["total"] == 4 * HUGE


@pytest.mark.parametrize(
    "annotations",
    [
        {"hami.io/vgpu-devices-allocated": "c-0,NVIDIA,99999999999999,1:;"},
        {"hami.io/vgpu-devices-allocated": ";" * 20000},
        {"hami.io/vgpu-devices-allocated": "\x00,,,:;"},
        {"hami.io/vgpu-devices-allocated": "c-9,NVIDIA,-5,-5:;"},
        {"hami.io/vgpu-mig-allocations": "[" * 5000, "hami.io/vgpu-devices-allocated": "c-0,NVIDIA,1,1:;"},
        {"hami.io/bind-time": "9" * 400, "hami.io/vgpu-devices-allocated": "c-0,NVIDIA,1,1:;"},
        {"hami.io/bind-phase": "x" * 100000, "hami.io/vgpu-devices-allocated": "c-0,NVIDIA,1,1:;"},
    ],
)
def test_an_allocation_nobody_can_read_costs_only_its_own_pod(annotations: dict[str, str]) -> None:
    world = World()
    world.put(
        node("n", card("c-0")),
        pod("bad", "n", annotations=annotations),
        pod("good", "n", "c-0,NVIDIA,2000,30:;"),
    )
    found = {one["pod"]: one for one in api(world, "workloads")["items"]}
    assert found["good"]["memoryMiB"] == 2000
    assert len(json.dumps(found["bad"])) < 4096
    assert world.get("/").status == 200


def test_times_and_locks_that_are_none_are_unknown() -> None:
    world = World()
    odd = node("n", card("c-0"), **{"hami.io__mutex.lock": "yesterday,a,b"})
    odd["metadata"]["creationTimestamp"] = "0000-99-99T99:99:99Z"
    world.put(odd)
    found = api(world, "nodes/n")["node"]
    assert (found["created"], found["lock"]) == (None, None)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{",
        b'{"metadata": 1}',
        b'{"metadata": {}, "spec": {"containers": 5}}',
        b"\xff",
        b"[" * 100000,
    ],
)
def test_what_is_no_object_is_refused_with_a_typed_error(raw: bytes) -> None:
    world = World()
    for read in (world.store.reader.pod, world.store.reader.node):
        if raw == b'{"metadata": {}, "spec": {"containers": 5}}' and read == world.store.reader.node:
            continue  # containers mean nothing in a node
        with pytest.raises(ObjectError):
            read(msgspec.Raw(raw))


def test_a_pod_that_cannot_be_judged_is_an_answer_not_a_failure() -> None:
    world = World()
    bad = pod("p", containers=[container("main", gpu=1)])
    bad["metadata"]["annotations"] = {"hami.io/device-scoring-weights": "{"}
    bad["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "many"
    world.put(node("n", card("c-0")), bad)
    reply = world.get("/api/v1/pending/default/p")
    assert reply.status in (200, 422)
    assert "internal" not in reply.body.decode()


def test_only_so_many_explanations_wait_at_once() -> None:
    async def ask() -> list[Any]:
        world = World()
        world.put(node("n", card("c-0")), pod("p"))
        explainer = Explainer(world.store, None, lambda: world.now)
        return await asyncio.gather(*(explainer("default", "p") for _ in range(20)), return_exceptions=True)

    answers = asyncio.run(ask())
    refused = [one for one in answers if isinstance(one, Exception)]
    assert len(refused) == 12
    assert all("try again" in str(one) for one in refused)


# --- monitors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{", "x{", 'x{a="b} 1', "hami_vgpu_blocked{} one", "\x00"])
def test_what_are_no_metrics_is_a_typed_error(text: str) -> None:
    with pytest.raises(MetricsError):
        read_monitor(text)


def test_numbers_that_are_none_are_not_measured() -> None:
    text = "".join(
        f'hami_host_gpu_memory_used_bytes{{device_uuid="{at}"}} {number}\n'
        for at, number in enumerate(("NaN", "+Inf", "-Inf", "5"))
    )
    assert read_monitor(text).cards == {"3": {"used_bytes": 5.0}}


def test_more_series_than_any_node_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_SERIES", 10)
    text = "".join(f'hami_vgpu_blocked{{pod="{at}"}} 1\n' for at in range(11))
    with pytest.raises(MetricsError, match="more than 10 series"):
        read_monitor(text)


@given(st.text(max_size=200))
def test_no_text_of_a_monitor_does_more_than_a_typed_error(text: str) -> None:
    try:
        read_monitor(text)
    except MetricsError:
        return


# --- clients ----------------------------------------------------------------------------------------------


@given(st.binary(max_size=300))
def test_no_query_does_more_than_a_typed_error(query: bytes) -> None:
    try:
        parameters(query, ("a", "b"))
    except QueryError:
        return


@given(st.text(max_size=80))
def test_a_host_is_ours_only_by_its_whole_name(text: str) -> None:
    hosts = Hosts(["dash.example.org"])
    if hosts.allow(text):
        name = text.strip().lower()
        assert name.startswith(("dash.example.org", "localhost", "[")) or name[:1].isdigit() or ":" in name
    assert not hosts.allow(f"{text}x.evil.example") or not text


def test_clients_are_counted_apart_and_forgotten_in_the_end() -> None:
    rates = Rates(rate=1, burst=2, clients=2)
    assert [rates.allow("a", 0) for _ in range(3)] == [True, True, False]
    assert rates.allow("b", 0)
    assert rates.allow("c", 0)
    assert rates.allow("a", 0), "forgotten for c: the table has an end"


async def test_a_client_that_takes_no_answer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hami.dashboard.app.SEND_TIMEOUT_S", 0.01)
    world = World()
    world.put(node("n", card("c-0")))

    async def stuck(_: Any) -> None:
        await asyncio.Event().wait()

    scope = {
        "type": "http", "method": "GET", "path": "/", "raw_path": b"/", "query_string": b"",
        "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1),
    }  # fmt: skip
    with pytest.raises(TimeoutError):
        await world.application()(scope, None, stuck)


async def test_a_bug_of_ours_is_told_without_its_details(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    async def broken(_: Dashboard, scope: Any) -> Answer:
        raise RuntimeError("secret detail " + scope["path"])

    monkeypatch.setattr(Dashboard, "_route", broken)
    reply = await world.request("/")
    assert (reply.status, reply.error) == (500, "internal error: RuntimeError")


async def test_a_header_sent_twice_counts_as_not_sent() -> None:
    from hami.dashboard.access import ProxyHeader

    world = World(access=ProxyHeader("x-forwarded-user"))
    world.put(node("n", card("c-0")))
    scope = {
        "type": "http", "method": "GET", "path": "/api/v1/summary", "raw_path": b"/api/v1/summary",
        "query_string": b"", "client": ("127.0.0.1", 1),
        "headers": [(b"host", b"localhost"), (b"x-forwarded-user", b"a"), (b"X-Forwarded-User", b"b")],
    }  # fmt: skip
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await world.application()(scope, None, send)
    assert sent[0]["status"] == 401
