"""One pass over all cache directories; remembers the last good sample of each for 15 s. Blocking."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from hami.node.monitor.files import (
    CacheDirectory,
    Writes,
    directory_bytes,
    list_directories,
    open_containers,
    read_directory,
    read_ring,
    write_directory,
)
from hami.node.monitor.region import Region
from hami.node.region.format import RegionError
from hami.node.told import Told

KEEP_S: Final = 15.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a pass found: every directory with its region (None: not started), and errors by reason."""

    regions: Mapping[CacheDirectory, Region | None] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)


class Tracker:
    """Reads the regions below ``path``; safe to use from several threads."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._good: dict[str, tuple[float, Region]] = {}
        self._told = Told()

    def sweep(self) -> Sweep:
        """Read everything now; a missing directory of all containers means that there are none."""
        with self._lock:
            try:
                with open_containers(self._path) as containers:
                    return self._sweep(containers)
            except OSError as error:
                self._good.clear()
                if self._told.is_due(self._path, str(error), self._clock()):
                    advice = (
                        "right before the first allocation; else HOOK_PATH is not that of the device plugin"
                    )
                    log.warning(
                        "containers.absent", extra={"path": self._path, "cause": str(error), "advice": advice}
                    )
                return Sweep()

    def write(self, writes: Mapping[str, Writes]) -> None:
        """Write fields of regions by directory name; one that fails is logged."""
        try:
            with open_containers(self._path) as containers:
                for name, fields in writes.items():
                    try:
                        write_directory(containers, name, fields)
                    except RegionError as error:
                        log.warning("region.write_failed", extra={"directory": name, "cause": str(error)})
        except OSError as error:
            log.warning("containers.absent", extra={"path": self._path, "cause": str(error)})

    def rings(self, names: Iterable[str]) -> dict[str, bytes]:
        """The event rings of these directories; one that cannot be read is left out."""
        found: dict[str, bytes] = {}
        try:
            with open_containers(self._path) as containers:
                for name in names:
                    try:
                        found[name] = read_ring(containers, name)
                    except RegionError as error:
                        log.debug("ring.unreadable", extra={"directory": name, "cause": str(error)})
        except OSError:
            return {}
        return found

    def sizes(self) -> dict[str, int]:
        """Bytes allocated to each directory."""
        found: dict[str, int] = {}
        try:
            with open_containers(self._path) as containers:
                for directory in list_directories(containers)[0]:
                    try:
                        found[directory.name] = directory_bytes(containers, directory.name)
                    except OSError as error:
                        log.debug("directory.size", extra={"directory": directory.name, "cause": str(error)})
        except OSError:
            return {}
        return found

    def _sweep(self, containers: int) -> Sweep:
        directories, odd = list_directories(containers)
        if odd:
            log.debug("containers.odd", extra={"names": list(odd[:20])})
        errors: Counter[str] = Counter()
        regions: dict[CacheDirectory, Region | None] = {}
        bad: set[str] = set()
        now = self._clock()
        for directory in directories:
            try:
                region = read_directory(containers, directory.name)
            except RegionError as error:
                errors[error.reason] += 1
                bad.add(directory.name)
                if self._told.is_due(directory.name, str(error), now):
                    cause = {"directory": directory.name, "reason": error.reason, "cause": str(error)}
                    log.info("region.unreadable", extra=cause)
                at, last = self._good.get(directory.name, (float("-inf"), None))
                regions[directory] = last if now - at <= KEEP_S else None
                continue
            if region is None:
                self._good.pop(directory.name, None)
            else:
                self._good[directory.name] = (now, region)
                if region.bad_uuids:
                    errors["bad_uuid"] += region.bad_uuids
            regions[directory] = region
        self._told.retain(bad)
        names = {directory.name for directory in directories}
        for name in [name for name in self._good if name not in names]:
            del self._good[name]
        return Sweep(regions, errors)
