"""The monitor's 5 s tick and what a scrape returns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from prometheus_client.core import Metric

from hami.kube.errors import KubeError
from hami.node.errors import UnsafePathError
from hami.node.monitor.beside import Beside
from hami.node.monitor.claims import LimitsFolder, Said, activity, cards_of, own_devices
from hami.node.monitor.feedback import Verdict, judge
from hami.node.monitor.files import CacheDirectory, Writes
from hami.node.monitor.garbage import Garbage, StaleList, belongs_to_pod, has_live_process, still_unknown
from hami.node.monitor.hostgpu import HostReader, HostState
from hami.node.monitor.pods import PodInfo
from hami.node.monitor.region import Region
from hami.node.monitor.ring import EventLimiter, PodEvent, new_events
from hami.node.monitor.series import (
    ContainerSample,
    SelfState,
    SeriesBook,
    add_container,
    add_host,
    add_mig,
    add_self,
    is_ahead,
)
from hami.node.monitor.tracker import Sweep, Tracker
from hami.node.monitor.utilization import UtilizationMeter, process_shares
from hami.node.told import Told
from hami.protocol.errors import ProtocolError

TICK_S: Final = 5.0
LATE_S: Final = 60.0
SIZES_EVERY_S: Final = 60.0
LARGE_BYTES: Final = 16 << 20
LARGE_EVERY_S: Final = 3600.0
_MAX_PID_CHECKS: Final = 64

log = logging.getLogger(__name__)

Writer = Callable[[SeriesBook], None]
"""Adds series that belong to the process, such as its version."""


Reporter = Callable[[PodInfo, PodEvent], None]
"""Raises an event on a pod; never blocks, never fails."""


class Pods(Protocol):
    """The pods of this node as the watch sees them."""

    @property
    def synced(self) -> bool:
        """Whether the first list is complete."""
        ...

    def by_uid(self) -> Mapping[str, PodInfo]:
        """All pods by UID."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorOptions:
    """What the command line and the environment say."""

    node: str
    grace_s: float = 300.0
    legacy: bool = False
    emit_allocated: bool = True
    activity_from_last_kernel: bool = True
    tick_s: float = TICK_S
    patience_s: float = 2.0
    """How long a tick waits for the driver and for the removal of directories: heartbeats must not stop while
    those hang.
    """
    scrape_patience_s: float = 8.0
    """How long a scrape waits for the driver. Prometheus waits 10 s by default, and should get the series of
    the containers.
    """
    proc: str = "/proc"
    pod_cgroups: bool = True
    """Whether containers run in cgroups of their pods; if not, no host PID can be verified, none counts."""


class Monitor:
    """Everything of one monitor process but its sockets."""

    def __init__(
        self,
        options: MonitorOptions,
        tracker: Tracker,
        host: HostReader,
        garbage: Garbage,
        limits: LimitsFolder,
        pods: Pods,
        list_uids: Callable[[], Awaitable[set[str]]],
        extra_series: Writer,
        report: Reporter,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._tracker = tracker
        self._host = host
        self._garbage = garbage
        self._limits = limits
        self._pods = pods
        self._list_uids = list_uids
        self._extra_series = extra_series
        self._report = report
        self._clock = clock
        self._stale = StaleList(options.grace_s)
        self._told = Told()
        self._driver = Beside[None]("driver, tick", options.patience_s)
        self._reading = Beside[HostState]("driver, scrape", options.scrape_patience_s)
        self._collecting = Beside[None]("removal of directories", options.patience_s)
        self._said: dict[str, Said] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._limiter = EventLimiter()
        self._meter = UtilizationMeter()
        self._large_at: dict[str, float] = {}
        self._sizes: dict[str, int] = {}
        self._sizes_at = float("-inf")
        self._errors: Counter[str] = Counter()
        self._removed = 0
        self._duplicates = 0
        self._foreign: set[tuple[str, int]] = set()
        self._foreign_total = 0
        self._verified: dict[str, frozenset[int]] = {}
        self._shares: dict[str, dict[int, float]] = {}
        self._ahead: set[str] = set()
        self._last_update = 0.0
        self._started = clock()

    @property
    def is_alive(self) -> bool:
        """Whether the tick has run in the last 60 s."""
        return self._clock() - max(self._last_update, self._started) <= LATE_S

    @property
    def is_ready(self) -> bool:
        """Whether the pods are known."""
        return self._pods.synced

    async def run(self) -> None:
        """Tick until cancelled; then unblock the containers that we blocked."""
        try:
            while True:
                try:
                    await self.tick()
                except (OSError, UnsafePathError, KubeError, ProtocolError) as error:
                    log.warning("tick.failed", extra={"cause": str(error)})
                await asyncio.sleep(self._options.tick_s)
        finally:
            for work in (self._driver, self._collecting):
                work.cancel()
            blocked = {
                name: Writes(recent_kernel=0) for name, verdict in self._verdicts.items() if verdict.blocked
            }
            if blocked:
                self._tracker.write(blocked)

    async def tick(self) -> None:
        """Read all regions, run the feedback rules, look for directories that are to be removed."""
        now = self._clock()
        sweep = await asyncio.to_thread(self._tracker.sweep)
        self._said = await asyncio.to_thread(self._limits.read, [each.name for each in sweep.regions])
        self._errors.update(sweep.errors)
        self._measure(sweep)
        self._report_clocks(sweep, now)
        await asyncio.to_thread(self._check_host_pids, sweep)
        paused = self._host.paused
        await self._driver.get(lambda: self._ask_driver(sweep), None)
        if not paused:
            await self._feed_back(sweep, now)
        if now - self._sizes_at >= SIZES_EVERY_S:
            self._sizes = await asyncio.to_thread(self._tracker.sizes)
            self._sizes_at = now
            self._report_large(now)
        await self._report_events(sweep, now)
        self._last_update = self._clock()
        await self._collecting.get(lambda: self._collect_garbage(sweep, now), None)

    async def collect(self) -> tuple[Metric, ...]:
        """All series now; the regions and NVML are read live, in threads."""
        sweep, host = await asyncio.gather(
            asyncio.to_thread(self._tracker.sweep),
            self._reading.get(lambda: asyncio.to_thread(self._host.read), HostState()),
        )
        now = self._clock()
        book = SeriesBook()
        add_host(book, self._options.node, host, self._options.legacy)
        for sample in self._samples(sweep):
            add_container(
                book,
                sample,
                now,
                emit_allocated=self._options.emit_allocated,
                legacy=self._options.legacy,
            )
        for pod in self._pods.by_uid().values():
            if not pod.finished:
                add_mig(book, pod, self._options.legacy)
        self._extra_series(book)
        self._duplicates += book.duplicates
        book.duplicates = 0
        tracked = sum(region is not None for region in sweep.regions.values())
        add_self(
            book,
            SelfState(
                self._last_update,
                tracked,
                host.paused,
                dict(self._errors),
                self._removed,
                self._duplicates,
                self._foreign_total,
            ),
        )
        return book.metrics

    def _samples(self, sweep: Sweep) -> list[ContainerSample]:
        """One sample per container of a live pod that has a directory or an allocation."""
        found = {
            (directory.pod_uid, directory.container): (directory, region)
            for directory, region in sweep.regions.items()
        }
        samples: list[ContainerSample] = []
        for uid, pod in sorted(self._pods.by_uid().items()):
            if pod.finished:
                continue
            for container, allocated in pod.containers:
                directory, region = found.get((uid, container), (None, None))
                if directory is None and not allocated:
                    continue
                if directory is not None and region is not None:
                    region = own_devices(region, self._cards(directory, pod))
                verdict = self._verdicts.get(directory.name) if directory else None
                samples.append(
                    ContainerSample(
                        pod.namespace,
                        pod.name,
                        container,
                        allocated,
                        region,
                        verdict.blocked if verdict else None,
                        verdict.enforced if verdict else None,
                        self._sizes.get(directory.name) if directory else None,
                        self._utilization(directory, region),
                    )
                )
        return samples

    def _cards(self, directory: CacheDirectory, pod: PodInfo) -> frozenset[str]:
        """UUIDs of what the container was given; none: that is not known."""
        said = self._said.get(directory.name, Said())
        return said.cards or cards_of(pod, directory.container)

    def _measure(self, sweep: Sweep) -> None:
        now = time.monotonic()
        for directory, region in sweep.regions.items():
            if region is not None:
                self._meter.observe(directory.name, region, now)
        self._meter.retain(directory.name for directory in sweep.regions)

    async def _ask_driver(self, sweep: Sweep) -> None:
        await asyncio.to_thread(self._host.stand_aside)
        await asyncio.to_thread(self._host.watch_xids)
        await self._measure_processes(sweep)

    async def _measure_processes(self, sweep: Sweep) -> None:
        """For regions in which no library of ours counts GPU time: what NVML says about their processes."""
        verified = self._verified
        silent = {
            directory.name: region
            for directory, region in sweep.regions.items()
            if region is not None and not region.has_extension and verified.get(directory.name)
        }
        use = await asyncio.to_thread(self._host.process_use) if silent else {}
        self._shares = {name: process_shares(region, verified[name], use) for name, region in silent.items()}

    def _utilization(self, directory: CacheDirectory | None, region: Region | None) -> dict[int, float]:
        if directory is None or region is None:
            return {}
        shares = self._shares.get(directory.name)
        if shares is not None:
            return shares
        return {device.index: self._meter.percent(directory.name, device.index) for device in region.devices}

    def _report_clocks(self, sweep: Sweep, now: float) -> None:
        """One line for a container whose last kernel lies in the future; it is not trusted."""
        ahead = {
            directory.name
            for directory, region in sweep.regions.items()
            if region is not None and is_ahead(region.last_kernel, now)
        }
        for name in sorted(ahead - self._ahead):
            log.warning("region.clock_ahead", extra={"directory": name})
        self._ahead = ahead

    async def _feed_back(self, sweep: Sweep, now: float) -> None:
        known = self._known_regions(sweep)
        pods = self._pods.by_uid()
        activities = {
            directory.name: activity(
                region,
                self._cards(directory, pods[directory.pod_uid]),
                self._said.get(directory.name, Said()).priority,
            )
            for directory, region in known.items()
        }
        self._verdicts = judge(activities, now, self._options.activity_from_last_kernel)
        writes = {
            directory.name: _writes(region, self._verdicts[directory.name], now)
            for directory, region in known.items()
        }
        await asyncio.to_thread(self._tracker.write, writes)

    def _known_regions(self, sweep: Sweep) -> dict[CacheDirectory, Region]:
        uids = self._pods.by_uid().keys()
        return {
            directory: region
            for directory, region in sweep.regions.items()
            if region is not None and directory.pod_uid in uids
        }

    def _check_host_pids(self, sweep: Sweep) -> None:
        """Keep the host PIDs that belong to their pod; count the others, each once while it is claimed."""
        self._verified = {}
        foreign: set[tuple[str, int]] = set()
        for directory, region in sweep.regions.items() if self._options.pod_cgroups else ():
            claimed = region.host_pids[:_MAX_PID_CHECKS] if region else ()
            own = {pid for pid in claimed if belongs_to_pod(pid, directory.pod_uid, self._options.proc)}
            self._verified[directory.name] = frozenset(own)
            foreign |= {(directory.name, pid) for pid in claimed if pid not in own}
        self._foreign_total += len(foreign - self._foreign)
        self._foreign = foreign

    def _report_large(self, now: float) -> None:
        """A Warning event on the pod of a directory above 16 MiB, at most once an hour."""
        pods = self._pods.by_uid()
        self._large_at = {name: at for name, at in self._large_at.items() if now - at < LARGE_EVERY_S}
        for name, size in self._sizes.items():
            pod = pods.get(name.partition("_")[0])
            if size > LARGE_BYTES and pod is not None and name not in self._large_at:
                self._large_at[name] = now
                text = f"the cache directory {name} holds {size / (1 << 20):.1f} MiB, more than 16 MiB"
                self._report(pod, PodEvent("Warning", "HAMiCacheDirectoryLarge", text))

    async def _report_events(self, sweep: Sweep, now: float) -> None:
        """New entries of the libraries' event rings become events on the pods."""
        known = {directory.name: region for directory, region in self._known_regions(sweep).items()}
        pending = {
            name: (self._limiter.position(name, region.events_written), region.events_written)
            for name, region in known.items()
        }
        changed = {name: span for name, span in pending.items() if span[0] < span[1]}
        rings = await asyncio.to_thread(self._tracker.rings, changed) if changed else {}
        pods = self._pods.by_uid()
        for name, ring in rings.items():
            pod = pods.get(name.partition("_")[0])
            seen, written = changed[name]
            for event in self._limiter.reports(name, new_events(ring, written, seen), now):
                if pod is not None:
                    self._report(pod, event)
        self._limiter.end_of_tick(known, now)

    async def _collect_garbage(self, sweep: Sweep, now: float) -> None:
        if not self._pods.synced:
            return
        known = self._pods.by_uid().keys()
        mtimes = await asyncio.to_thread(self._garbage.mtimes)
        unknown = {name: mtime for name, mtime in mtimes.items() if name.partition("_")[0] not in known}
        candidates = self._stale.candidates(unknown, now)
        self._told.retain(candidates)
        if not candidates:
            return
        confirmed = still_unknown(candidates, await self._list_uids())
        regions = {directory.name: region for directory, region in sweep.regions.items()}
        for name in confirmed:
            uid = name.partition("_")[0]
            if await asyncio.to_thread(has_live_process, regions.get(name), uid, self._options.proc):
                continue
            try:
                await asyncio.to_thread(self._garbage.remove, name)
            except (OSError, UnsafePathError) as error:
                if self._told.is_due(name, str(error), now):
                    log.warning("garbage.failed", extra={"directory": name, "cause": str(error)})
                continue
            self._removed += 1
            log.info("garbage.removed", extra={"directory": name})


def _writes(region: Region, verdict: Verdict, now: float) -> Writes:
    return Writes(
        verdict.recent_kernel if verdict.recent_kernel != region.recent_kernel else None,
        verdict.utilization_switch if verdict.utilization_switch != region.utilization_switch else None,
        int(now) if region.has_extension else None,
    )


async def cancel_and_wait(task: asyncio.Task[None]) -> None:
    """End a task and swallow its cancellation."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
