"""History: the ring in memory, and Prometheus behind it (webui.md §6.1, §6.2)."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from dashboard_harness import NOW, World, card, node
from hypothesis import given
from hypothesis import strategies as st

from hami.dashboard.history import METRICS, History, Points, thinned
from hami.dashboard.monitors import plain_session
from hami.dashboard.prometheus import Prometheus, PrometheusError, query_of, step_of
from hami.local.serving import serving

DAY = 86400.0


def test_the_oldest_points_go_when_the_ring_is_full() -> None:
    history = History(points=5)
    for at in range(8):
        history.note(NOW + 30 * at, {("cluster", "memoryUsedMiB"): at})
    found = history.points("cluster", "memoryUsedMiB", 0, NOW + 1000)
    assert [value for _, value in found] == [3, 4, 5, 6, 7]


def test_the_series_that_ended_first_goes_when_memory_is_full() -> None:
    history = History(points=10, max_bytes=2 * 4 * 10)
    history.note(NOW, {("a", "memoryUsedMiB"): 1, ("b", "memoryUsedMiB"): 1})
    history.note(NOW + 30, {("b", "memoryUsedMiB"): 2})
    history.note(NOW + 60, {("c", "memoryUsedMiB"): 3})
    assert len(history) == 2
    values = {one: history.points(one, "memoryUsedMiB", 0, NOW + 99)[-1][1] for one in "abc"}
    assert values == {"a": None, "b": None, "c": 3}
    assert history.points("b", "memoryUsedMiB", 0, NOW + 99)[1][1] == 2


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e6)), max_size=60), st.integers(1, 20))
def test_what_is_read_is_what_was_noted_last(values: list[float | None], points: int) -> None:
    history = History(points=points)
    for at, value in enumerate(values):
        history.note(NOW + 30 * at, {} if value is None else {("cluster", "powerWatts"): value})
    found = history.points("cluster", "powerWatts", 0, NOW + 10_000)
    assert len(found) == min(points, len(values))
    for (_, got), wanted in zip(found, values[-points:], strict=False):
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            assert math.isclose(got, wanted, rel_tol=1e-6, abs_tol=0.01)


@given(st.lists(st.one_of(st.none(), st.floats(-1e3, 1e3)), max_size=5000), st.integers(1, 1000))
def test_thinning_keeps_the_order_and_makes_no_value_where_there_was_none(
    values: list[float | None], most: int
) -> None:
    points: Points = [(float(at), value) for at, value in enumerate(values)]
    found = thinned(points, most)
    assert len(found) <= max(most, 0) or len(points) <= most
    assert [at for at, _ in found] == sorted(at for at, _ in found)
    if all(value is None for value in values):
        assert all(value is None for _, value in found)


# --- Prometheus -------------------------------------------------------------------------------------------


@asynccontextmanager
async def server(answer: Any, status: int = 200) -> AsyncIterator[tuple[str, list[Mapping[str, str]]]]:
    """A Prometheus that gives this answer; the queries that it got."""
    asked: list[Mapping[str, str]] = []

    async def query(request: web.Request) -> web.Response:
        asked.append(dict(request.query))
        if isinstance(answer, str):
            return web.Response(text=answer, status=status)
        start, end, step = (int(request.query[name]) for name in ("start", "end", "step"))
        values = [[at, str(answer(at))] for at in range(start, end + 1, step) if answer(at) is not None]
        return web.json_response({"status": "success", "data": {"result": [{"values": values}]}})

    app = web.Application()
    app.router.add_get("/api/v1/query_range", query)
    async with serving(app) as port:
        yield f"http://127.0.0.1:{port}", asked


async def test_thirty_days_are_at_most_1000_points_with_a_step_of_ours() -> None:
    world = World(now=NOW)
    world.put(node("n", card("c-0")))
    target = f"/api/v1/history?metric=memoryUsedMiB&scope=node/n&from={NOW - 30 * DAY:.0f}&to={NOW:.0f}"
    async with (
        server(lambda at: 7 if at < NOW - 10 * DAY else None) as (url, asked),
        plain_session() as client,
    ):
        world.older = Prometheus(url, client)
        reply = await world.request(target)
    assert reply.json["source"] == "prometheus"
    points = reply.json["points"]
    assert 700 < len(points) <= 1000
    assert (points[0][1], points[-1][1]) == (7, None), "what Prometheus does not have stays a gap"
    (query,) = asked
    assert query["step"] == "3600"
    assert query["query"].count('{node="n"}') == 1


@pytest.mark.parametrize("answer", ["", "[]", '{"status": "error", "error": "too many"}', "x" * (5 << 20)])
async def test_what_prometheus_cannot_give_is_a_note_beside_our_own_history(answer: str) -> None:
    world = World(now=NOW)
    world.put(node("n", card("c-0")))
    world.history.note(NOW, {("cluster", "memoryUsedMiB"): 5})
    async with server(answer) as (url, _), plain_session() as client:
        world.older = Prometheus(url, client)
        reply = await world.request(f"/api/v1/history?metric=memoryUsedMiB&from={NOW - DAY:.0f}")
        assert reply.json["points"] == [[NOW, 5.0]]
        assert reply.json["note"].startswith("Prometheus: ")


async def test_a_prometheus_that_is_not_there_is_said_so() -> None:
    async with plain_session() as client:
        with pytest.raises(PrometheusError, match="no answer"):
            await Prometheus("http://127.0.0.1:1", client).points("cluster", METRICS[0], NOW - DAY, NOW)


@given(st.sampled_from(METRICS), st.text(max_size=40))
def test_a_name_never_becomes_a_part_of_the_query_language(metric: str, name: str) -> None:
    query = query_of(metric, f"device/{name}")
    inside = query.partition('device_uuid="')[2]
    at = 0
    while inside[at] != '"':  # the first quote that is not escaped ends the name
        at += 2 if inside[at] == "\\" else 1
    assert inside[at + 1 :].startswith("}")
    assert "\n" not in query


@given(st.floats(0, 366 * DAY))
def test_every_range_has_at_most_1000_points(span: float) -> None:
    assert span / step_of(span) + 1 <= 1000
