"""Runs a coroutine as the whole of a command: signals end it in an orderly way."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

INTERRUPTED = 130


def run_in_foreground(work: Coroutine[Any, Any, int]) -> int:
    """The exit status that ``work`` gives, or 130 after SIGINT, SIGTERM or SIGHUP.

    A signal cancels ``work``, so that its context managers clean up; errors pass through.
    """

    async def main() -> int:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("no task runs this coroutine")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, task.cancel)
        return await work

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        return INTERRUPTED
