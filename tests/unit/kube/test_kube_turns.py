"""Whose request goes next: nobody who has stopped waiting, writes before reads, and every caller in time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hami.kube import client as client_module
from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.kube.errors import RateLimited
from hami.kube.resources import NODES
from hami.kube.turns import Turns


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def waiting(turns: Turns, order: list[str], name: str, *, urgent: bool = False) -> asyncio.Task[None]:
    """A caller in line, which writes its name when it has its turn."""

    async def take() -> None:
        await turns.take(3600, urgent=urgent)
        order.append(name)

    task = asyncio.create_task(take())
    await asyncio.sleep(0)
    return task


async def test_callers_that_gave_up_cost_the_others_no_turn() -> None:
    clock = Hand()
    turns = Turns(1.0, 1, 100, clock)
    await turns.take(60)
    for _ in range(500):
        with pytest.raises(TimeoutError):
            await turns.take(0)
    clock.now = 1.0
    await turns.take(60)


async def test_a_caller_that_is_cancelled_costs_the_next_one_no_turn() -> None:
    clock = Hand()
    turns, order = Turns(1.0, 1, 100, clock), list[str]()
    await turns.take(60)
    first, second = await waiting(turns, order, "first"), await waiting(turns, order, "second")
    first.cancel()
    clock.now = 1.0
    await asyncio.wait_for(second, 60)
    assert order == ["second"]


async def test_urgent_callers_go_first_and_every_fourth_turn_is_anothers() -> None:
    clock = Hand()
    turns, order = Turns(1.0, 1, 100, clock), list[str]()
    await turns.take(60)
    tasks = [await waiting(turns, order, f"read{n}") for n in range(2)]
    tasks += [await waiting(turns, order, f"write{n}", urgent=True) for n in range(5)]
    for _ in tasks:
        known = len(order)
        clock.now += 1.0
        async with asyncio.timeout(60):
            while len(order) == known:  # noqa: ASYNC110 -- nobody tells
                await asyncio.sleep(0.001)
    assert order == ["write0", "write1", "write2", "read0", "write3", "write4", "read1"]
    await asyncio.gather(*tasks)


async def test_rate_zero_lets_everybody_pass() -> None:
    turns = Turns(0.0, 1, 1000)
    for _ in range(1000):
        await turns.take(0)


async def test_no_more_turns_last_at_once_than_the_limit_and_who_gives_up_keeps_none() -> None:
    turns, order = Turns(0.0, 1, 2), list[str]()
    for _ in range(2):
        await turns.take(0)
    with pytest.raises(TimeoutError):
        await turns.take(0)
    first = await waiting(turns, order, "first")
    second = await waiting(turns, order, "second", urgent=True)
    turns.give_back()
    first.cancel()
    await second
    with pytest.raises(TimeoutError):
        await turns.take(0)
    turns.give_back()
    await turns.take(0)
    assert order == ["second"]


async def test_a_turn_that_comes_with_the_cancellation_is_passed_on() -> None:
    turns, order = Turns(0.0, 1, 1), list[str]()
    await turns.take(0)
    first, second = await waiting(turns, order, "first"), await waiting(turns, order, "second")
    turns.give_back()
    first.cancel()
    await asyncio.wait_for(second, 60)
    assert order == ["second"]


async def test_of_an_api_server_that_hangs_a_request_wants_no_more_than_its_part(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was never sent must not pass for a Binding of unknown outcome."""
    monkeypatch.setattr(client_module, "_AT_ONCE", 2)
    api.on("GET", "/api/v1/nodes/n1", api.watch(then=asyncio.Event().wait))
    async with Client(ClientConfig(api.url), Limits(qps=0)) as client:
        hanging = [asyncio.create_task(client.get(NODES, "n1", dict, timeout_s=60)) for _ in range(2)]
        async with asyncio.timeout(60):
            while len(api.seen) < 2:  # noqa: ASYNC110 -- nobody tells
                await asyncio.sleep(0.01)
        with pytest.raises(RateLimited, match="2 at once"):
            await client.get(NODES, "n1", dict, timeout_s=0.1)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        api.answer("GET", "/api/v1/nodes/n1", {})
        await client.get(NODES, "n1", dict, timeout_s=60)


async def test_a_request_that_would_be_sent_too_late_is_not_sent_and_says_so(api: Any) -> None:
    api.answer("GET", "/api/v1/nodes/n1", {})
    async with Client(ClientConfig(api.url), Limits(qps=0.001, burst=1)) as client:
        await client.get(NODES, "n1", dict)
        with pytest.raises(RateLimited, match="GET /api/v1/nodes/n1: not sent, too many requests wait"):
            await client.get(NODES, "n1", dict, timeout_s=0.1)
    assert api.count("GET", "/api/v1/nodes/n1") == 1


async def test_a_watch_needs_no_turn(api: Any) -> None:
    """The Lease must be seen while thousands of requests wait."""
    api.answer("GET", "/api/v1/nodes/n1", {})
    api.on("WATCH", "/api/v1/nodes", api.watch({"type": "ADDED"}))
    async with Client(ClientConfig(api.url), Limits(qps=0.001, burst=1, timeout_s=60.0)) as client:
        await client.get(NODES, "n1", dict)
        async with client.stream("/api/v1/nodes", query={"watch": "true"}, idle_timeout_s=60) as lines:
            assert [line async for line in lines] == [b'{"type": "ADDED"}']
