"""Work that goes on beside the requests for as long as the process lives."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from hami.kube.bugs import BugLog
from hami.kube.ratelimit import Backoff
from hami.protocol.errors import HamiError

_PAUSE_S = (1.0, 60.0)
_RAN_WELL_S = 300.0


class PartEnded(HamiError):  # noqa: N818
    """A part of the process has ended that the others cannot do without."""


async def kept_up(name: str, work: Callable[[], Awaitable[None]], bugs: BugLog) -> None:
    """Work without end, begun anew after an exception that nobody expected; until cancelled.

    For what keeps its state in objects, not in the call, and whose failure must not take the rest along.
    """
    pause = Backoff(*_PAUSE_S, random.Random())  # noqa: S311 -- jitter, not a secret
    while True:
        begun = time.monotonic()
        try:
            await work()
            raise PartEnded(f"{name} has ended by itself")  # noqa: TRY301 -- as bad as a failure
        except Exception as error:
            bugs.note("background.failed", error, part=name)
        if time.monotonic() - begun > _RAN_WELL_S:
            pause.reset()
        await asyncio.sleep(pause.next())


async def vital(name: str, work: Awaitable[None], bugs: BugLog) -> None:
    """Work without end that the process cannot do without: raises what it raises, `PartEnded` when it ends.

    The process ends with it and is started again from nothing.
    """
    try:
        await work
    except Exception as error:
        bugs.note("background.ended", error, part=name)
        raise
    raise PartEnded(f"{name} has ended by itself")
