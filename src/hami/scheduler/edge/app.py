"""The scheduler process: puts the parts together and runs them until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hami.kube.bugs import BugLog
from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.kube.events import EventRecorder, ObjectRef
from hami.protocol.durations import format_duration
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge.alarms import alarm_counters, certificate_counter
from hami.scheduler.edge.background import kept_up, vital
from hami.scheduler.edge.binder import Binder, BinderSettings
from hami.scheduler.edge.counters import config_counters, process_counters
from hami.scheduler.edge.device_config import DeviceConfigFile
from hami.scheduler.edge.events import SchedulerEvents
from hami.scheduler.edge.extender import Extender
from hami.scheduler.edge.handshakes import MetadataWriter
from hami.scheduler.edge.informers import Informers, NodeEvents, PodEvents, QuotaEvents, run_timers
from hami.scheduler.edge.leader import LATE_S, Leadership, SyncGate, keep_gate
from hami.scheduler.edge.metrics import Metrics
from hami.scheduler.edge.node_locks import NodeLocks
from hami.scheduler.edge.orphans import Orphans
from hami.scheduler.edge.pending import PendingPods
from hami.scheduler.edge.profiling import profiling_routes
from hami.scheduler.edge.reload import ConfigReload, Feed
from hami.scheduler.edge.roles import keep_role_labels
from hami.scheduler.edge.routes import metrics_routes, scheduler_routes
from hami.scheduler.edge.server import listen, serve
from hami.scheduler.edge.settings import SchedulerSettings
from hami.scheduler.edge.timing import Timings
from hami.scheduler.edge.tls import ReloadingTls
from hami.scheduler.edge.webhook import Webhook, WebhookSettings
from hami.vendors.types import VendorProfile

if TYPE_CHECKING:
    from hami.scheduler.edge.self_tls import SelfManagedTls

_IDLE_COLLECT_S = 300.0
_FLUSH_S = 2.0

_Work = Callable[[], Awaitable[None]]

log = logging.getLogger(__name__)


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
    config: ConfigReload | None = None
    bugs: BugLog = field(default_factory=lambda: BugLog(log))
    outlived: bool = False  # a state that was frozen has been replaced

    @classmethod
    def build(
        cls,
        settings: SchedulerSettings,
        profiles: tuple[VendorProfile, ...],
        client: Client,
        events_client: Client | None = None,
        source: DeviceConfigFile | None = None,
    ) -> Scheduler:
        """Wire the parts; nothing runs yet. ``events_client`` keeps events from using up the request rate of
        Bindings; without one they share ``client``. Changes of ``source``, where the profiles come from, are
        followed; without one they stay as they are.
        """
        state = ClusterState(
            profiles,
            node_policy=settings.node_policy,
            card_policy=settings.card_policy,
            node_selector=settings.node_selector,
            reservation_timeout=settings.reservation_timeout_s,
        )
        leadership = Leadership(settings.hostname, electing=settings.lease is not None)
        gate = SyncGate()
        component = settings.scheduler_name or "hami-scheduler"
        recorder = EventRecorder(events_client or client, component, settings.hostname)
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
        bugs = BugLog(log)
        informers = Informers(client, leadership, pods, nodes, QuotaEvents(state), settings.lease, bugs)

        async def catch_up(node: str) -> None:
            if gate.opened_within(LATE_S):  # a Binding of whoever decided before us may land this late
                await informers.read_pods_of(node)

        binder = Binder(
            client, state, leadership, locks, events, binder_settings, catch_up=catch_up, bugs=bugs
        )
        timings = Timings()
        extender = Extender(
            state, gate, binder, events, pending, timings, max_body_bytes=settings.max_request_bytes
        )
        webhook_settings = WebhookSettings(
            settings.scheduler_name, settings.force_overwrite, settings.privileged
        )
        webhook = Webhook(state, profiles, webhook_settings)
        counters = process_counters(state, gate, leadership, pending, writer, recorder, informers, bugs)
        counters += alarm_counters(events, locks)
        config = None
        if source is not None:
            pod = ObjectRef("Pod", settings.pod_name, settings.pod_namespace) if settings.pod_name else None
            config = ConfigReload(source, recorder, pod)
            counters += config_counters(config)
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
            config=config,
            bugs=bugs,
        )

    async def reconfigure(self, profiles: tuple[VendorProfile, ...]) -> None:
        """Go over to other profiles of the same vendors, or more; raises ``ReloadError``, and then nothing
        has changed."""
        await self.informers.synced()
        log.info("config.taking_up", extra={"vendors": [one.common_word for one in profiles]})
        made = self.state.successor(profiles)
        feed = Feed(self.informers, made)
        try:
            await feed.until_complete()
            # nothing else runs from here until all parts go by the new profiles
            self.state.take_over(made)
        finally:
            feed.stop()
        self.webhook.use(profiles)
        self.binder.use_profiles()
        self.pending.config_changed()
        self.outlived = True
        await self.nodes.leading()

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
            extra: list[tuple[str, _Work]] = []
            if settings.tls_secret is not None:
                folder = Path(stack.enter_context(TemporaryDirectory(prefix="hami-tls-")))
                managed = self._managed_tls(settings.tls_secret, folder)
                if not await _done_before(stop, managed.prepare()):
                    return
                self.tls = ReloadingTls(managed.certificate_path, managed.key_path)
                extra.append(("self-managed TLS", managed.run))
            elif settings.cert_file is not None and settings.key_file is not None:
                self.tls = ReloadingTls(settings.cert_file, settings.key_file)
            gets = profiling_routes() if settings.profiling else {}
            routes = scheduler_routes(
                self.extender,
                self.webhook,
                gets,
                settings.max_request_bytes,
                remote_extender=settings.remote_extender,
                bugs=self.bugs,
            )
            if self.tls is not None:
                self.metrics.add(certificate_counter(self.tls))
                extra.append(("certificate", self.tls.run))
            context = self.tls.context if self.tls else None
            serving = {
                "metrics": serve(metrics_routes(self.metrics, self.bugs), metrics, None, "metrics"),
                "extender": serve(routes, main, context, "extender"),
            }
            servers = [
                asyncio.create_task(vital(name, work, self.bugs), name=name) for name, work in serving.items()
            ]
            background = [
                asyncio.create_task(vital("informers", self.informers.run(), self.bugs), name="informers"),
                *(
                    asyncio.create_task(kept_up(name, work, self.bugs), name=name)
                    for name, work in (*self._background(), *extra)
                ),
            ]
            stopping = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({*servers, *background, stopping}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self.binder.end()
                await _cancel([*servers, stopping])
                await self.binder.close()
                await self.recorder.flush(_FLUSH_S)
                await _cancel(background)
            for task in (*servers, *background):
                if not task.cancelled():
                    task.result()

    def _managed_tls(self, secret: tuple[str, str], folder: Path) -> SelfManagedTls:
        # imported here: only this needs the package cryptography
        from hami.scheduler.edge.self_tls import SelfManagedTls

        settings = self.settings
        return SelfManagedTls(
            self.client, self.leadership, secret, settings.webhook_configuration, settings.tls_hosts, folder
        )

    def _background(self) -> list[tuple[str, _Work]]:
        settings = self.settings
        timeout_text = format_duration(settings.reservation_timeout_s)
        timers = partial(run_timers, self.state, self.nodes, self.events, self.leadership, timeout_text)
        work: list[tuple[str, _Work]] = [
            ("events", self.recorder.run),
            ("handshakes and labels", self.writer.run),
            ("pending pods", self.pending.run),
            ("orphaned reservations", Orphans(self.client, self.state, self.informers.pods).run),
            ("timers", timers),
            ("gate", partial(keep_gate, self.leadership, self.gate, self._catch_up, self._on_lost)),
            ("garbage", self._collect_garbage),
        ]
        if self.config is not None:
            work.append(("device config", partial(self.config.run, self.reconfigure)))
        if settings.lease is not None and settings.pod_name and settings.pod_namespace:
            own = (settings.pod_namespace, settings.pod_name)
            work.append(("role labels", partial(keep_role_labels, self.client, self.leadership, *own)))
        return work

    async def _catch_up(self) -> None:
        await self.informers.synced()
        if self.settings.lease is not None:
            await self.informers.pass_fresh_reads()
        await self.nodes.leading()

    def _on_lost(self) -> None:
        dropped = self.state.drop_reservations()
        log.info("reservations.dropped", extra={"count": len(dropped)})

    async def _collect_garbage(self) -> None:
        """Freeze what the first sync has built; full collections only while nothing is being answered."""
        gc.set_threshold(50_000, 50, 1_000_000)
        synced = asyncio.ensure_future(self.informers.synced())
        try:
            while not (await asyncio.wait({synced}, timeout=_IDLE_COLLECT_S))[0]:
                gc.collect()
        finally:
            synced.cancel()
        gc.collect()
        gc.freeze()
        while True:
            await asyncio.sleep(_IDLE_COLLECT_S)
            if self.extender.in_flight == 0:
                if self.outlived:
                    gc.unfreeze()
                gc.collect()
                if self.outlived:
                    gc.freeze()
                    self.outlived = False


async def run_scheduler(
    settings: SchedulerSettings,
    config: ClientConfig,
    profiles: tuple[VendorProfile, ...],
    source: DeviceConfigFile | None = None,
) -> None:
    """Run the scheduler until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    limits = Limits(settings.kube_qps, settings.kube_burst, settings.kube_timeout_s)
    async with (
        Client(config, limits, user_agent="hami-scheduler") as client,
        Client(config, limits, user_agent="hami-scheduler") as events_client,
    ):
        await Scheduler.build(settings, profiles, client, events_client, source).run(stop)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _done_before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether the work was done before ``stop`` was set, which ends it."""
    tasks = [asyncio.create_task(work), asyncio.create_task(stop.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            await tasks[0]
            return True
        return False
    finally:
        await _cancel(tasks)
