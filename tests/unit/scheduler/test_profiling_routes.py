from __future__ import annotations

import asyncio
import json

import pytest

from hami.scheduler.edge import profiling
from hami.scheduler.edge.profiling import profiling_routes
from hami.scheduler.edge.server import Stream


async def text_of(stream: Stream) -> str:
    return b"".join([chunk async for chunk in stream()]).decode()


async def test_the_index_names_the_other_routes() -> None:
    routes = profiling_routes()
    index = await text_of(routes["/debug/pprof/"])
    for path in routes:
        assert path.removeprefix("/debug/pprof/") in index


async def test_the_stacks_of_all_tasks_are_shown() -> None:
    async def waiting_for_nothing() -> None:
        await asyncio.sleep(3600)

    task = asyncio.create_task(waiting_for_nothing())
    await asyncio.sleep(0)
    assert "waiting_for_nothing" in await text_of(profiling_routes()["/debug/pprof/goroutine"])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_profile_shows_what_ran_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_PROFILE_S", 0.05)

    async def work() -> None:
        for _ in range(50):
            json.dumps({"a": 1})
            await asyncio.sleep(0)

    text, _ = await asyncio.gather(text_of(profiling_routes()["/debug/pprof/profile"]), work())
    assert "dumps" in text
