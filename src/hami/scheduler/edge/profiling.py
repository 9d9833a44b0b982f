"""`/debug/pprof/…` for `--profiling`: what the process is doing right now, as text."""

from __future__ import annotations

import asyncio
import cProfile
import io
import pstats
import traceback
from collections.abc import AsyncIterator

from hami.scheduler.edge.server import Stream

_PROFILE_S = 5.0


def profiling_routes() -> dict[str, Stream]:
    """The index, the stacks of all tasks, and a CPU profile of five seconds."""
    return {
        "/debug/pprof/": _index,
        "/debug/pprof/goroutine": _tasks,
        "/debug/pprof/profile": _profile,
    }


async def _index() -> AsyncIterator[bytes]:
    yield b"goroutine: stacks of all tasks\nprofile: CPU profile of the next 5 s\n"


async def _tasks() -> AsyncIterator[bytes]:
    for task in asyncio.all_tasks():
        lines = [f"{task.get_name()} {task.get_coro()}\n"]
        for frame in task.get_stack():
            lines.extend(traceback.format_stack(frame, limit=1))
        yield "".join([*lines, "\n"]).encode()


async def _profile() -> AsyncIterator[bytes]:
    profile = cProfile.Profile()
    try:
        profile.enable()
    except ValueError:
        yield b"another profile is being taken\n"
        return
    try:
        await asyncio.sleep(_PROFILE_S)
    finally:
        profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(60)
    yield text.getvalue().encode()
