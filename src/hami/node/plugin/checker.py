"""Runs :mod:`hami.node.plugin.card_check` in child processes with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from typing import Final, Protocol

import msgspec

from hami.node.pci import sysfs_folder
from hami.node.plugin.card_check import LOOK, MODULE, PROBE

LOOK_S: Final = 20.0
PROBE_S: Final = 60.0
_END_S: Final = 2.0
_MAX_OUTPUT: Final = 4096

log = logging.getLogger(__name__)


class Finding(msgspec.Struct, frozen=True):
    """What a child found: ``problem`` empty means that the card did what was asked."""

    problem: str = ""
    suspect: str = ""


class CardChecker(Protocol):
    """Looks at cards."""

    async def look(self, uuid: str) -> Finding:
        """Whether NVML finds the card, and why it must stay out."""
        ...

    async def probe(self, uuid: str) -> Finding:
        """Whether its memory can be used."""
        ...

    def generation(self, bus_id: str) -> str:
        """Name of this enumeration of the card and this load of its driver; does not wait."""
        ...


class ChildChecker:
    """The checker of a node. ``driver_root`` is the driver's root as mounted here."""

    def __init__(
        self,
        driver_root: str = "",
        sysfs: str = "/sys",
        look_s: float = LOOK_S,
        probe_s: float = PROBE_S,
        module: str = MODULE,
    ) -> None:
        self._driver_root = driver_root
        self._sysfs = sysfs
        self._look_s = look_s
        self._probe_s = probe_s
        self._module = module
        self._hanging: dict[str, asyncio.subprocess.Process] = {}

    async def look(self, uuid: str) -> Finding:
        return await self._run(LOOK, uuid, self._look_s)

    async def probe(self, uuid: str) -> Finding:
        return await self._run(PROBE, uuid, self._probe_s)

    def generation(self, bus_id: str) -> str:
        """Numbers that sysfs gives anew to a module that is loaded and to a device that is found."""
        return "/".join(
            str(_inode(path)) for path in (f"{self._sysfs}/module/nvidia", sysfs_folder(bus_id, self._sysfs))
        )

    async def _run(self, kind: str, uuid: str, limit_s: float) -> Finding:
        """The finding of a child; one that ends badly or not at all has found a problem."""
        hanging = self._hanging.get(uuid)
        if hanging is not None:
            if hanging.returncode is None:
                return Finding("an earlier check still hangs in the driver")
            del self._hanging[uuid]
        environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
        if kind == PROBE:
            environment["CUDA_VISIBLE_DEVICES"] = uuid
        try:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module, kind, uuid, self._driver_root),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            return Finding(f"no process can be started for the {kind}: {error.strerror or error}")
        try:
            async with asyncio.timeout(limit_s):
                assert child.stdout is not None
                output = await child.stdout.read(_MAX_OUTPUT)
                status = await child.wait()
        except TimeoutError:
            return Finding(f"no answer within {limit_s:g} s")
        finally:
            await self._end(uuid, child)
        if status != 0:
            return Finding(f"the {kind} ended with status {status}")
        try:
            return msgspec.json.decode(output, type=Finding)
        except msgspec.DecodeError as error:
            return Finding(f"the {kind} printed no result: {error}")

    async def _end(self, uuid: str, child: asyncio.subprocess.Process) -> None:
        """Kill a child that still runs. One that hangs in the driver is ended by the kernel when it can be;
        until then there is no other for its card.
        """
        if child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        try:
            async with asyncio.timeout(_END_S):
                await child.wait()
        except TimeoutError:
            self._hanging[uuid] = child
            log.warning("recovery.check_hangs", extra={"gpu": uuid, "pid": child.pid})


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino  # noqa: PTH116
    except OSError:
        return 0
