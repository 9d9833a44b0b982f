"""The scheduler process: puts the parts together and runs them until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.kube.events import EventRecorder
from hami.protocol.durations import format_duration
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge.binder import Binder, BinderSettings
from hami.scheduler.edge.events import SchedulerEvents
from hami.scheduler.edge.extender import Extender
from hami.scheduler.edge.handshakes import MetadataWriter
from hami.scheduler.edge.informers import Informers, NodeEvents, PodEvents, QuotaEvents, run_timers
from hami.scheduler.edge.leader import Leadership, SyncGate, keep_gate
from hami.scheduler.edge.metrics import Counter, Metrics
from hami.scheduler.edge.node_locks import NodeLocks
from hami.scheduler.edge.orphans import Orphans
from hami.scheduler.edge.pending import PendingPods
from hami.scheduler.edge.profiling import profiling_routes
from hami.scheduler.edge.roles import keep_role_labels
from hami.scheduler.edge.routes import metrics_routes, scheduler_routes
from hami.scheduler.edge.self_tls import SelfManagedTls
from hami.scheduler.edge.server import listen, serve
from hami.scheduler.edge.settings import SchedulerSettings, SettingsError
from hami.scheduler.edge.timing import Timings
from hami.scheduler.edge.tls import ReloadingTls
from hami.scheduler.edge.webhook import Webhook, WebhookSettings
from hami.vendors.config import ConfigError, load_profiles, parse_config
from hami.vendors.types import VendorProfile

_IDLE_COLLECT_S = 300.0
_FLUSH_S = 2.0
_YOUNG_S = 60.0  # as long as an API server works on a request

log = logging.getLogger(__name__)


def read_profiles(path: Path, *, enable_ascend: bool, enable_iluvatar: bool) -> tuple[VendorProfile, ...]:
    """The vendors of a device config file; raises ``SettingsError``, which names the file."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"--device-config-file {path}: {error.strerror or error}") from error
    try:
        config = parse_config(text)
    except ConfigError as error:
        raise SettingsError(f"--device-config-file {path}: {error}") from error
    for warning in config.warnings:
        log.warning("config.warning", extra={"file": str(path), "text": warning})
    return load_profiles(config, enable_ascend=enable_ascend, enable_iluvatar=enable_iluvatar)


@dataclass(slots=True)
class Scheduler:
    """All parts of one scheduler process, wired; ``run()`` runs them."""

    settings: SchedulerSettings
    client: Client
    state: ClusterState
    leadership: Leadership
    gate: SyncGate
    recorder: EventRecorder
    events: SchedulerEvents
    writer: MetadataWriter
    pending: PendingPods
    binder: Binder
    nodes: NodeEvents
    informers: Informers
    extender: Extender
    webhook: Webhook
    metrics: Metrics
    ports: dict[str, int] = field(default_factory=dict)  # listener -> port, once it listens
    tls: ReloadingTls | None = None

    @classmethod
    def build(
        cls, settings: SchedulerSettings, profiles: tuple[VendorProfile, ...], client: Client
    ) -> Scheduler:
        """Wire the parts; nothing runs yet."""
        state = ClusterState(
            profiles,
            node_policy=settings.node_policy,
            card_policy=settings.card_policy,
            node_selector=settings.node_selector,
            reservation_timeout=settings.reservation_timeout_s,
        )
        leadership = Leadership(settings.hostname, electing=settings.lease is not None)
        gate = SyncGate()
        recorder = EventRecorder(client, settings.scheduler_name or "hami-scheduler", settings.hostname)
        events = SchedulerEvents(recorder)
        writer = MetadataWriter(client, leadership)
        pending = PendingPods(client, state, leadership)
        locks = NodeLocks(client, recorder, timeout_s=settings.node_lock_timeout_s)
        binder_settings = BinderSettings(
            lock_retry_s=settings.node_lock_retry_s,
            privileged_allowed=settings.privileged == "allow-unlimited",
            scheduler_name=settings.scheduler_name,
        )
        nodes = NodeEvents(state, leadership, events, writer, locks)
        pods = PodEvents(state, leadership, events, writer, pending)
        informers = Informers(client, leadership, pods, nodes, QuotaEvents(state), settings.lease)

        async def catch_up(node: str) -> None:
            if gate.opened_within(_YOUNG_S):  # a Binding of whoever decided before us may land this late
                await informers.read_pods_of(node)

        binder = Binder(client, state, leadership, locks, events, binder_settings, catch_up=catch_up)
        timings = Timings()
        extender = Extender(
            state, gate, binder, events, pending, timings, max_body_bytes=settings.max_request_bytes
        )
        webhook_settings = WebhookSettings(
            settings.scheduler_name, settings.force_overwrite, settings.privileged
        )
        webhook = Webhook(state, profiles, webhook_settings)
        counters = _counters(state, gate, leadership, pending, writer, recorder, informers)
        metrics = Metrics(state, timings, legacy=settings.legacy_metrics, counters=counters)
        return cls(
            settings,
            client,
            state,
            leadership,
            gate,
            recorder,
            events,
            writer,
            pending,
            binder,
            nodes,
            informers,
            extender,
            webhook,
            metrics,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Listen, follow the cluster and answer until ``stop`` is set.

        Raises `ListenError` or `TlsError` when a listener cannot be opened, and whatever ends one of the
        parts.
        """
        settings = self.settings
        with ExitStack() as stack:
            main = stack.enter_context(listen(settings.http_bind))
            metrics = stack.enter_context(listen(settings.metrics_bind_address))
            self.ports = {"extender": main.getsockname()[1], "metrics": metrics.getsockname()[1]}
            extra = []
            if settings.tls_secret is not None:
                folder = Path(stack.enter_context(TemporaryDirectory(prefix="hami-tls-")))
                managed = self._managed_tls(settings.tls_secret, folder)
                await managed.prepare()
                self.tls = ReloadingTls(managed.certificate_path, managed.key_path)
                extra.append(managed.run())
            elif settings.cert_file is not None and settings.key_file is not None:
                self.tls = ReloadingTls(settings.cert_file, settings.key_file)
            gets = profiling_routes() if settings.profiling else {}
            routes = scheduler_routes(
                self.extender,
                self.webhook,
                gets,
                settings.max_request_bytes,
                remote_extender=settings.remote_extender,
            )
            servers = [
                asyncio.create_task(serve(metrics_routes(self.metrics), metrics, None, "metrics")),
                asyncio.create_task(serve(routes, main, self.tls.context if self.tls else None, "extender")),
            ]
            background = [asyncio.create_task(work) for work in (*self._background(), *extra)]
            if self.tls is not None:
                background.append(asyncio.create_task(self.tls.run()))
            stopping = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({*servers, *background, stopping}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _cancel([*servers, stopping])
                await self.binder.close()
                await self.recorder.flush(_FLUSH_S)
                await _cancel(background)
            for task in (*servers, *background):
                if not task.cancelled():
                    task.result()

    def _managed_tls(self, secret: tuple[str, str], folder: Path) -> SelfManagedTls:
        settings = self.settings
        return SelfManagedTls(
            self.client, self.leadership, secret, settings.webhook_configuration, settings.tls_hosts, folder
        )

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        settings = self.settings
        timeout_text = format_duration(settings.reservation_timeout_s)
        work: list[Coroutine[Any, Any, None]] = [
            self.recorder.run(),
            self.writer.run(),
            self.informers.run(),
            self.pending.run(),
            Orphans(self.client, self.state, self.informers.pods).run(),
            run_timers(self.state, self.nodes, self.events, self.leadership, timeout_text),
            keep_gate(self.leadership, self.gate, self._catch_up, self._on_lost),
            self._collect_garbage(),
        ]
        if settings.lease is not None and settings.pod_name and settings.pod_namespace:
            work.append(
                keep_role_labels(self.client, self.leadership, settings.pod_namespace, settings.pod_name)
            )
        return work

    async def _catch_up(self) -> None:
        await self.informers.synced()
        if self.settings.lease is not None:
            await self.informers.pass_fresh_reads()
        self.nodes.leading()

    def _on_lost(self) -> None:
        dropped = self.state.drop_reservations()
        log.info("reservations.dropped", extra={"count": len(dropped)})

    async def _collect_garbage(self) -> None:
        """Freeze what the first sync has built; full collections only while nothing is being answered."""
        await self.informers.synced()
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 50, 1_000_000)
        while True:
            await asyncio.sleep(_IDLE_COLLECT_S)
            if self.extender.in_flight == 0:
                gc.collect()


async def run_scheduler(
    settings: SchedulerSettings, config: ClientConfig, profiles: tuple[VendorProfile, ...]
) -> None:
    """Run the scheduler until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    limits = Limits(settings.kube_qps, settings.kube_burst, settings.kube_timeout_s)
    async with Client(config, limits, user_agent="hami-scheduler") as client:
        await Scheduler.build(settings, profiles, client).run(stop)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _counters(
    state: ClusterState,
    gate: SyncGate,
    leadership: Leadership,
    pending: PendingPods,
    writer: MetadataWriter,
    recorder: EventRecorder,
    informers: Informers,
) -> list[Counter]:
    return [
        (
            "hami_scheduler_synced",
            "Whether this replica answers filter requests",
            lambda: float(gate.is_open),
        ),
        ("hami_scheduler_leader", "Whether this replica leads", lambda: float(leadership.is_leader())),
        (
            "hami_scheduler_pending_pods",
            "Pods that fitted nowhere when last tried",
            lambda: float(len(pending)),
        ),
        (
            "hami_scheduler_requeue_touches",
            "Pods touched because they fit now",
            lambda: float(pending.touches),
        ),
        ("hami_scheduler_metadata_writes", "Handshakes and labels written", lambda: float(writer.written)),
        (
            "hami_scheduler_metadata_failures",
            "Handshakes and labels not written",
            lambda: float(writer.failed),
        ),
        (
            "hami_scheduler_events_dropped",
            "Events that could not be recorded",
            lambda: float(recorder.dropped),
        ),
        (
            "hami_scheduler_doubtful_registrations",
            "Nodes whose registered devices could not be read, or not all of them",
            lambda: float(state.doubtful_registrations),
        ),
        ("hami_scheduler_cached_pods", "Pods in the cache", lambda: float(len(informers.pods))),
        ("hami_scheduler_cached_nodes", "Nodes in the cache", lambda: float(len(informers.nodes))),
    ]
