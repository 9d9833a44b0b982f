"""Removes the directories and limits files of pods that are gone (monitor.md §3.3)."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from hami.node.files import open_directory, remove_tree
from hami.node.monitor.region import Region

BETWEEN_SIGHTINGS_S: Final = 60.0
_MAX_CGROUP: Final = 64 << 10


class StaleList:
    """Which names have been unknown for long enough. Pure: names, ages and time in, candidates out."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._first_seen: dict[str, float] = {}

    def candidates(self, unknown: Mapping[str, float], now: float) -> tuple[str, ...]:
        """Names seen as unknown at least 60 s ago and again now, whose mtime is older than the grace age.

        ``unknown`` maps a name to its mtime; ``now`` and mtimes are Unix seconds. Nothing is older than its
        first sighting says if its mtime lies ahead of that: the clock was set back.
        """
        self._first_seen = {name: min(self._first_seen.get(name, now), now) for name in unknown}
        return tuple(
            sorted(
                name
                for name, mtime in unknown.items()
                if now - min(mtime, self._first_seen[name]) > self._grace_s
                and now - self._first_seen[name] >= BETWEEN_SIGHTINGS_S
            )
        )


class Garbage:
    """The two directories of a node, of which entries with the same name belong together. Blocking."""

    def __init__(self, containers: str, limits: str) -> None:
        self._containers = containers
        self._limits = limits

    def mtimes(self) -> dict[str, float]:
        """The youngest mtime of each ``<uid>_<container>`` name; a name that cannot be judged is left out."""
        found: dict[str, float] = {}
        for path in (self._containers, self._limits):
            try:
                with open_directory(path) as directory, os.scandir(directory) as entries:
                    for entry in entries:
                        uid, _, container = entry.name.partition("_")
                        if not uid or not container:
                            continue
                        mtime = entry.stat(follow_symlinks=False).st_mtime
                        found[entry.name] = max(mtime, found.get(entry.name, mtime))
            except FileNotFoundError:
                continue
        return found

    def remove(self, name: str) -> None:
        """Remove limits file and directory of ``name``; raises ``OSError`` or ``UnsafePathError``."""
        for path in (self._limits, self._containers):
            try:
                with open_directory(path) as directory:
                    remove_tree(directory, name)
            except FileNotFoundError:
                continue


def belongs_to_pod(pid: int, pod_uid: str, proc: str = "/proc") -> bool:
    """Whether the process ``pid`` of the host runs in a cgroup of that pod."""
    try:
        with Path(proc, str(pid), "cgroup").open("rb") as file:
            text = file.read(_MAX_CGROUP)
    except OSError:
        return False
    names = {pod_uid.encode(), pod_uid.replace("-", "_").encode()}
    return bool(pod_uid) and any(name in text for name in names)


def has_live_process(region: Region | None, pod_uid: str, proc: str = "/proc") -> bool:
    """Whether a process that a region claims really runs in that pod."""
    return region is not None and any(belongs_to_pod(pid, pod_uid, proc) for pid in region.host_pids)


def still_unknown(names: Collection[str], pod_uids: Collection[str]) -> tuple[str, ...]:
    """Those of ``names`` whose pod is in no list of pods."""
    return tuple(name for name in names if name.partition("_")[0] not in pod_uids)
