"""The dashboard process: puts the parts together and runs them until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hami.answers.collect import Overrides, installed, settings_of
from hami.dashboard.access import Access, Kubernetes, Mode, NoCheck, ProxyHeader
from hami.dashboard.api import Api
from hami.dashboard.app import Dashboard
from hami.dashboard.explaining import Explainer
from hami.dashboard.following import Following
from hami.dashboard.guard import Hosts, Rates
from hami.dashboard.history import STEP_S, History, samples
from hami.dashboard.monitors import EVERY_S, Monitors, Way, plain_session
from hami.dashboard.prometheus import Prometheus
from hami.dashboard.shapes import Source
from hami.dashboard.store import Store
from hami.dashboard.view import Memory, View, build_view
from hami.kube.bugs import BugLog
from hami.kube.client import Client
from hami.kube.config import ClientConfig
from hami.scheduler.edge.server import listen, serve

_REBUILD_S: Final = 1.0
_OLDEST_VIEW_S: Final = 5.0  # ages are shown, so a picture is made anew even when nothing has changed
_ALIVE_S: Final = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    """What the process is told; an empty text means what its name says is not used."""

    bind: str = "127.0.0.1:8080"
    allowed_hosts: tuple[str, ...] = ()
    auth: Mode = "none"
    auth_header: str = "X-Forwarded-User"
    monitors: Way = "direct"
    monitor_urls: Mapping[str, str] = field(default_factory=dict)  # by node
    hami_namespace: str = ""
    prometheus_url: str = ""
    cluster: str = ""
    device_config_file: Path | None = None
    scheduler_flags: Mapping[str, str] = field(default_factory=dict)


class Pictures:
    """The newest picture; made in the background, so that requests only read."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self.view: View | None = None
        self.made = 0.0
        self._store = store
        self._clock = clock
        self._memory = Memory()
        self._version = -1

    def renew(self) -> None:
        """Make a new picture where something has changed, or the old one has aged."""
        now = self._clock()
        if self._version == self._store.version and 0 <= now - self.made < _OLDEST_VIEW_S:
            return
        self._version = self._store.version
        self.view = build_view(self._store, self._memory, now)
        self.made = now


async def run_dashboard(
    settings: DashboardSettings,
    config: ClientConfig,
    *,
    listening: Callable[[int], None] = lambda _: None,
    clock: Callable[[], float] = time.time,
) -> None:
    """Serve until SIGTERM or SIGINT. Raises `HamiError` when it cannot start.

    `listening` is told the port once requests are taken.
    """
    sock = listen(settings.bind)
    with contextlib.closing(sock):
        async with (
            Client(config, user_agent="hami-dashboard") as client,
            plain_session() as session,
        ):
            store = await _store(settings, client)
            pictures, history, bugs = Pictures(store, clock), History(), BugLog(log)
            following = Following(store, client, clock, bugs)
            older = Prometheus(settings.prometheus_url, session) if settings.prometheus_url else None
            if older is None:
                store.report(Source("prometheus", "off", "no --prometheus-url: history begins at the start"))
            else:
                store.report(Source("prometheus", "ok", "asked for history older than the start"))
            api = Api(lambda: pictures.view, history, Explainer(store, client, clock), clock, older)
            application = Dashboard(
                api,
                _access(settings, client),
                Hosts(settings.allowed_hosts),
                Rates(),
                time.monotonic,
                alive=lambda: pictures.view is None or clock() - pictures.made < _ALIVE_S,
                ready=lambda: pictures.view is not None,
                metrics=lambda answered: _metrics(store, pictures, history, answered, clock()),
                bugs=bugs,
            )
            monitors = Monitors(
                store,
                client,
                session,
                way=settings.monitors,
                namespace=settings.hami_namespace,
                clock=clock,
                urls=settings.monitor_urls,
            )
            listening(sock.getsockname()[1])
            await _until_stopped(
                serve(application, sock, None, "dashboard"),
                following.run(),
                _pictures(pictures, following, bugs),
                _history(pictures, history),
                _monitors(monitors, following, bugs),
            )


async def _store(settings: DashboardSettings, client: Client) -> Store:
    file, flags, notes = settings.device_config_file, settings.scheduler_flags, list[str]()
    text = None if file is None else file.read_text(encoding="utf-8", errors="replace")
    if text is not None and "scheduler-name" in flags:  # told everything, as the chart does
        return Store(settings_of(flags), text, settings.cluster)
    overrides = Overrides(settings.hami_namespace, text, flags)
    known, device_config = await installed(client, overrides, notes)
    for note in notes:
        log.warning("dashboard.note", extra={"note": note})
    return Store(known, device_config, settings.cluster)


def _access(settings: DashboardSettings, client: Client) -> Access:
    if settings.auth == "kubernetes":
        return Kubernetes(client, time.monotonic)
    if settings.auth == "header":
        return ProxyHeader(settings.auth_header)
    return NoCheck()


# --- loops ------------------------------------------------------------------------------------------------


async def _until_stopped(*work: object) -> None:
    """Run everything until a signal; the first failure ends it too."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tasks = [asyncio.ensure_future(one) for one in work]  # type: ignore[call-overload]
    waiting = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([*tasks, waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        for task in (*tasks, waiting):
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        waiting.cancel()
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome


async def _pictures(pictures: Pictures, following: Following, bugs: BugLog) -> None:
    while True:
        begun = time.monotonic()
        if following.synced:
            try:
                pictures.renew()
            except Exception as error:
                bugs.note("picture.failed", error)
        # requests wait while a picture is made: that is at most a tenth of the time
        await asyncio.sleep(max(_REBUILD_S, 9 * (time.monotonic() - begun)))


async def _history(pictures: Pictures, history: History) -> None:
    while True:
        if pictures.view is not None:
            history.note(pictures.view.summary.generated_at, samples(pictures.view))
            await asyncio.sleep(STEP_S)
        else:
            await asyncio.sleep(_REBUILD_S)


async def _monitors(monitors: Monitors, following: Following, bugs: BugLog) -> None:
    await following.nodes.synced.wait()
    while True:
        try:
            await monitors.round()
        except Exception as error:
            bugs.note("monitors.failed", error)
        await asyncio.sleep(EVERY_S)


def _metrics(
    store: Store, pictures: Pictures, history: History, answered: Mapping[int, int], now: float
) -> bytes:
    age = now - pictures.made if pictures.view is not None else -1.0
    lines = [
        "# HELP hami_dashboard_view_age_seconds Age of what the pages show, -1 before there is anything",
        "# TYPE hami_dashboard_view_age_seconds gauge",
        f"hami_dashboard_view_age_seconds {age:.3f}",
        "# HELP hami_dashboard_history_series Series of the history in memory",
        "# TYPE hami_dashboard_history_series gauge",
        f"hami_dashboard_history_series {len(history)}",
        "# HELP hami_dashboard_answers_total Requests answered, by HTTP status",
        "# TYPE hami_dashboard_answers_total counter",
        *(f'hami_dashboard_answers_total{{status="{one}"}} {answered[one]}' for one in sorted(answered)),
        "# HELP hami_dashboard_source_up 1 while a source of data can be relied on",
        "# TYPE hami_dashboard_source_up gauge",
        *(
            f'hami_dashboard_source_up{{source="{name}"}} {int(source.state == "ok")}'
            for name, source in sorted(store.sources.items())
        ),
    ]
    return ("\n".join(lines) + "\n").encode()
