"""The host PID broker around the main loop of the plugin: its end is our end, its error our error."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Protocol

from hami.node.errors import NodeError
from hami.node.hostpid.errors import BrokerError, combined

log = logging.getLogger(__name__)


class BrokerProcess(Protocol):
    """The host PID broker as the plugin sees it; methods raise :class:`BrokerError`."""

    async def start(self) -> None:
        """Start it and wait until it serves."""
        ...

    async def ended(self) -> BrokerError:
        """Wait until it has ended, and say why."""
        ...

    async def check(self) -> None:
        """See that it lives and answers."""
        ...

    async def stop(self) -> None:
        """End it; a second call does nothing."""
        ...


@contextlib.asynccontextmanager
async def broker_running(broker: BrokerProcess | None, stop: asyncio.Event) -> AsyncIterator[None]:
    """With the gate on, the broker runs meanwhile, and ``stop`` is set when it ends. Raises
    :class:`BrokerError`.
    """
    if broker is None:
        yield
        return
    starting = asyncio.create_task(broker.start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        # It may wait for the lock of another broker; nobody needs it any more.
        starting.cancel()
        await asyncio.wait({starting})
        yield
        return
    await starting
    watching = asyncio.create_task(broker.ended())
    watching.add_done_callback(lambda _: stop.set())
    problems: list[NodeError] = []
    try:
        yield
    except NodeError as error:
        problems.append(error)
    finally:
        if watching.done():
            log.error("hostpid.ended", extra={"cause": str(watching.result())})
            problems.append(watching.result())
        watching.cancel()
        try:
            await broker.stop()
        except BrokerError as error:
            problems.append(error)
    if problems:
        raise combined(problems)
