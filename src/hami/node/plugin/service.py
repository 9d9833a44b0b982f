"""Life of the device plugin process: start, restarts of kubelet, reload, end (device-plugin.md §4)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import posixpath
import random
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from hami.kube.errors import KubeError
from hami.kube.ratelimit import Backoff
from hami.node.cdi.edits import CdiError
from hami.node.cluster import Cluster
from hami.node.config import Settings, socket_name
from hami.node.errors import MigError, NodeError, NvmlError, UnsafePathError
from hami.node.exact.allocator import ExactAllocator
from hami.node.exact.chooser import ModeChooser
from hami.node.exact.errors import PodResourcesError
from hami.node.exact.server import ExactService
from hami.node.hostpid.errors import BrokerError
from hami.node.mig.manager import FAILED
from hami.node.mig.server import StaticMigService
from hami.node.mig.side import MigSide, parts_of
from hami.node.mig.static import NOTHING, Layout
from hami.node.nvml import NvmlWithEvents
from hami.node.paths import LOCK_PARENT
from hami.node.plugin.allocator import Allocator
from hami.node.plugin.answer import Delivery
from hami.node.plugin.board import Board
from hami.node.plugin.broker import BrokerProcess, broker_running
from hami.node.plugin.cards import CardReader
from hami.node.plugin.checker import CardChecker
from hami.node.plugin.counters import PluginCounters
from hami.node.plugin.delivery import build_delivery
from hami.node.plugin.health import HealthWatcher
from hami.node.plugin.inventory import offered_cards
from hami.node.plugin.options import PluginOptions
from hami.node.plugin.platform import NoCards, Platform, refuse_cdi
from hami.node.plugin.recovery import Recoverer
from hami.node.plugin.recovery_rules import Recovery, RecoveryMode
from hami.node.plugin.registration import Registrar
from hami.node.plugin.rival import OtherPluginError, PluginLock
from hami.node.plugin.server import PluginServer, PluginService
from hami.node.plugin.sockets import Watched, identity
from hami.node.plugin.workspace import LOCK_PARENT_UNSAFE, Workspace, tell_mount_point
from hami.protocol.errors import ProtocolError
from hami.protocol.keys import MODE_EXACT, MODE_LOCK

OTHER_PLUGIN: Final = "HAMiOtherDevicePlugin"
"""Reason of the event about another plugin that offers our resource."""
NO_CARDS: Final = "HAMiNoCards"
"""Reason of the event about a machine whose devices cannot be offered."""
DEBOUNCE_S: Final = 1.0
PATIENCE_S: Final = 10.0
"""How long the plugin before us may take to end, as in a rolling update, before it is told."""
_POLL_S: Final = 0.25
_JOIN_S: Final = 10.0
_PRUNE_S: Final = 600.0
_RESTORE_BACKOFF_S: Final = (0.5, 15.0)
_SICK: Final = "no new pod gets it until it was seen to (dmesg on the node, lines with NVRM)"
_SILENT: Final = "the driver does not answer for it"
_BY_ITSELF: Final = "then it comes back by itself"
_COMES_BACK: Final = {
    RecoveryMode.OFF: "then restart the device plugin's pod",
    RecoveryMode.RESET: "it comes back by itself after a reset",
    RecoveryMode.TIMED: "it comes back by itself after a reset, or a while after errors that pass",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExactSide:
    """What mode ``exact`` needs, and who decides whether it is taken."""

    chooser: ModeChooser
    allocator: ExactAllocator


LoadSettings = Callable[[], Settings]
"""Reads the configuration files again; raises :class:`hami.node.errors.SettingsError`."""


class DevicePlugin:
    """The whole plugin; ``run()`` returns after :meth:`stop`."""

    def __init__(
        self,
        options: PluginOptions,
        load_settings: LoadSettings,
        cluster: Cluster,
        nvml: NvmlWithEvents,
        allocator: Allocator,
        workspace: Workspace,
        exact: ExactSide | None = None,
        broker: BrokerProcess | None = None,
        applied: Callable[[], str] = str,
        platform: Callable[[], Platform] = lambda: Platform.NVML,
        mig: MigSide | None = None,
        checker: CardChecker | None = None,
    ) -> None:
        self._options = options
        self._load_settings = load_settings
        self._applied = applied
        self._cluster = cluster
        self._nvml = nvml
        self._allocator = allocator
        self._workspace = workspace
        self._exact_side = exact
        self._broker = broker
        self._mig = mig
        self._checker = checker
        self._recovery = Recovery(options.recovery)
        self.counters = PluginCounters()
        self._exact: ExactAllocator | None = None
        self._find_platform = platform
        self._platform = Platform.NVML
        self._reader = self._nvml_reader = CardReader(nvml)
        self._board = Board()
        self._stop = asyncio.Event()
        self._reload = asyncio.Event()
        self._crashed = False
        self.rounds = 0
        """How often the plugin has been started, for tests and logs."""

    def stop(self) -> None:
        """End ``run()`` in an orderly way."""
        self._stop.set()

    def reload(self) -> None:
        """Read the configuration again and restart the kubelet side (SIGHUP)."""
        self._reload.set()

    async def run(self) -> None:
        """Serve until :meth:`stop`. Raises :class:`NodeError` when the start is impossible, and
        :class:`BrokerError` when the host PID broker ends.
        """
        lock = PluginLock(self._options.paths)
        try:
            if await self._is_alone(lock):
                await self._run()
        finally:
            lock.release()

    async def _is_alone(self, lock: PluginLock) -> bool:
        """Wait for the lock of the node, and tell whom we wait for; False: stopped before."""
        loop = asyncio.get_running_loop()
        tell_at: float | None = loop.time() + PATIENCE_S
        while not self._stop.is_set():
            if await asyncio.to_thread(lock.take):
                return True
            if tell_at is not None and loop.time() >= tell_at:
                tell_at = None
                text = (
                    f"{lock.holder()} is the device plugin of this node, it holds {lock.path}: this one does "
                    "nothing until that has ended; if two were installed, remove one"
                )
                log.warning("plugin.waits", extra={"cause": text})
                self._cluster.node_event("Warning", OTHER_PLUGIN, text)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._stop.wait()
        return False

    async def _run(self) -> None:
        await asyncio.to_thread(self._workspace.prepare_start)
        await self._prepare_lock_parent()
        async with broker_running(self._broker, self._stop):
            await self._restore()
            try:
                while not self._stop.is_set():
                    settings = self._load_settings()
                    self._reload.clear()
                    await self._round(settings)
            finally:
                await (self._exact or self._allocator).drain(_JOIN_S)
                await asyncio.to_thread(self._nvml.close)

    async def _restore(self) -> None:
        """Choose the allocation mode and bring back what known pods need, before kubelet hears of us; waits
        for the API server.
        """
        backoff = Backoff(*_RESTORE_BACKOFF_S, random.Random())  # noqa: S311 - jitter, not a secret
        while not self._stop.is_set():
            try:
                if self._exact_side is not None and await self._exact_side.chooser.choose() == MODE_EXACT:
                    self._exact = self._exact_side.allocator
                await (self._exact or self._allocator).restore(self._options.delivery.limits_file)
            except (KubeError, ProtocolError, PodResourcesError) as error:
                delay = backoff.next()
                log.warning("restore.failed", extra={"cause": str(error), "retry_s": round(delay, 1)})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._stop.wait()
            else:
                return

    async def _prepare_lock_parent(self) -> None:
        try:
            await asyncio.to_thread(self._workspace.prepare_lock_parent, self._options.delivery.broker)
        except UnsafePathError as error:
            path = self._options.paths.host(LOCK_PARENT)
            log.warning("lockparent.unsafe", extra={"cause": str(error)})
            self._cluster.node_event("Warning", LOCK_PARENT_UNSAFE, f"{path}: {error}")
            return
        tell_mount_point(self._cluster, self._workspace)
        if not self._options.delivery.broker:
            await asyncio.to_thread(self._workspace.release_mount_point)

    async def _round(self, settings: Settings) -> None:
        """From one start of the kubelet side to the next; every loop has ended when it returns."""
        self.rounds += 1
        log.info(
            "plugin.start",
            extra={
                "resource": settings.resource_name,
                "mode": settings.mode,
                "split": settings.split_count,
                "memory_scaling": settings.memory_scaling,
                "core_scaling": settings.core_scaling,
                "sources": dict(settings.sources),
            },
        )
        failure: Exception | None = None
        seen = identity(self._options.kubelet_socket)
        async with contextlib.AsyncExitStack() as stack:
            try:
                watched = await self._start(settings, stack)
            except BrokerError:
                raise
            except (NodeError, OSError) as error:
                failure = error
            else:
                await self._wait(watched)
                if self._interrupted():
                    # kubelet waits for these answers, and does not ask twice
                    await (self._exact or self._allocator).drain(_JOIN_S)
        log.info("plugin.stopped")
        if self._crashed and failure is None:
            self._crashed = False
            self._reload.clear()
            failure = NodeError("a loop of the plugin ended unexpectedly")
        if failure is not None:
            lost = isinstance(failure, NvmlError) and self._options.fail_on_init_error
            if self.rounds == 1 and (lost or isinstance(failure, CdiError)):
                raise failure
            if isinstance(failure, OtherPluginError):
                self._cluster.node_event("Warning", OTHER_PLUGIN, str(failure))
            if isinstance(failure, MigError):
                self._cluster.node_event("Warning", FAILED, str(failure))
            log.warning(
                "plugin.start_failed", extra={"cause": str(failure), "retry_s": self._options.retry_s}
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.retry_s):
                    await self._wait(Watched(kubelet=seen))

    async def _start(self, settings: Settings, stack: contextlib.AsyncExitStack) -> Watched:
        """Start everything; what has been started is put on ``stack``. The result says what a restart is."""
        await self._choose_platform()
        self._reader.offers = None
        if settings.is_dynamic_mig:
            await self._mig_side.prepare(settings, self._reader, self._options)
        self._board = board = Board(self._board.lasting)
        board.show(await asyncio.to_thread(self._reader.read))
        parts = NOTHING
        if settings.is_static_mig:
            parts = await asyncio.to_thread(self._mig_side.static_devices, settings, self._reader, self._nvml)
        settings = replace(settings, excluded_uuids=settings.excluded_uuids | parts.divided)
        watched = Watched(kubelet=identity(self._options.kubelet_socket))
        if offered_cards(board.cards, settings) or parts.resources:
            gpus = await asyncio.to_thread(self._reader.identities)
            delivery = await asyncio.to_thread(
                build_delivery, self._options, gpus, self._platform, parts.devices
            )
            services = self._services(board, settings, delivery, parts)
            for service in services.values():
                service.counters = self.counters
            served = await self._serve_kubelet(services, stack)
            if self._interrupted():
                return watched
            watched = served
        else:
            log.warning("plugin.no_devices", extra={"found": len(board.cards)})
        await self._start_loops(settings, board, parts, stack)
        return watched

    async def _serve_kubelet(
        self, services: Mapping[str, PluginService], stack: contextlib.AsyncExitStack
    ) -> Watched:
        """One server for each resource; ends early, with nothing registered, when interrupted."""
        socket = self._options.kubelet_socket
        folder = posixpath.dirname(socket) or posixpath.dirname(
            self._options.paths.host("/var/lib/kubelet/device-plugins/kubelet.sock")
        )
        servers = {
            resource: PluginServer(service, posixpath.join(folder, socket_name(resource)))
            for resource, service in services.items()
        }
        for server in servers.values():
            stack.push_async_callback(server.stop)
        if socket:
            await self._wait_for_kubelet()
            if self._interrupted():
                return Watched()
        kubelet = identity(socket)
        for server in servers.values():
            await server.start()
        made = tuple((server.socket_path, identity(server.socket_path)) for server in servers.values())
        for resource, server in servers.items() if socket else ():
            if self._broker is not None:
                await self._broker.check()
            await server.register(socket, resource)
        return Watched(made, kubelet)

    @property
    def _mig_side(self) -> MigSide:
        if self._mig is None:
            raise NodeError("this plugin was started without MIG")
        return self._mig

    async def _choose_platform(self) -> None:
        """Without cards that can be offered the node registers none, and that is said once."""
        before, platform = self._platform, await asyncio.to_thread(self._find_platform)
        if platform is Platform.UNKNOWN and self._options.fail_on_init_error:
            platform = Platform.NVML  # whose error says what is missing
        self._platform = platform
        self._reader = self._nvml_reader if platform.has_cards else NoCards(self._nvml)
        if self._options.delivery.cdi is not None:
            refuse_cdi(platform)
        if platform is not before and not platform.has_cards:
            text = f"this is {platform.value}, whose devices cannot be shared: no card is registered"
            log.warning("platform.no_cards", extra={"platform": platform.name.lower(), "cause": text})
            self._cluster.node_event("Warning", NO_CARDS, text)

    async def _look_again(self) -> None:
        """Until this machine has become one with cards, as after the installation of its driver."""
        while not self._platform.has_cards:
            await asyncio.sleep(self._options.retry_s)
            if (await asyncio.to_thread(self._find_platform)) is not self._platform:
                self.reload()
                await asyncio.sleep(self._options.retry_s)

    def _services(
        self, board: Board, settings: Settings, delivery: Delivery, parts: Layout
    ) -> dict[str, PluginService]:
        """The service of each resource: whole cards, if there are any, and MIG devices."""
        services: dict[str, PluginService] = {}
        if offered_cards(board.cards, settings):
            services[settings.resource_name] = (
                PluginService(self._allocator, board, settings, delivery)
                if self._exact is None
                else ExactService(self._exact, self._allocator, board, settings, delivery)
            )
        for resource, devices in parts.resources.items():
            services[resource] = StaticMigService(
                self._allocator, board, settings, delivery, resource, devices
            )
        return services

    async def _start_loops(
        self, settings: Settings, board: Board, parts: Layout, stack: contextlib.AsyncExitStack
    ) -> None:
        gpus = await asyncio.to_thread(self._reader.identities)
        offered = {card.uuid for card in offered_cards(board.cards, settings)}
        offered |= {device.parent for device in parts.devices}
        watcher = HealthWatcher(
            self._nvml,
            [gpu for gpu in gpus if gpu.uuid in offered],
            self._options.rules,
            board,
            parts=parts_of(parts),
        )
        bus_ids = {gpu.uuid: gpu.bus_id for gpu in gpus}
        bus_ids |= {device.uuid: device.bus_id for device in parts.devices}
        recoverer = self._recoverer(board, watcher, bus_ids)
        if offered:
            watcher.start()
            stack.push_async_callback(watcher.stop)
        registrar = Registrar(
            self._cluster,
            self._reader,
            board,
            settings,
            interval_s=self._options.register_interval_s,
            mode=MODE_LOCK if self._exact is None else MODE_EXACT,
            pair_scores=self._options.pair_scores,
            applied=self._applied,
            registered=self.counters.registered,
        )
        loops = [registrar.run(), self._report_sick(board, offered, set(board.lasting)), self._prune()]
        if recoverer is not None:
            loops.append(recoverer.run())
        if not self._platform.has_cards:
            loops.append(self._look_again())
        if self._exact is not None:
            loops.append(self._exact.run(settings.resource_name))
        if settings.is_dynamic_mig:
            loops.append(self._mig_side.manager.run(self._mig_side.changes(), board.wake))
        for work in loops:
            stack.push_async_callback(_end, self._spawn(work))

    def _recoverer(
        self, board: Board, watcher: HealthWatcher, bus_ids: Mapping[str, str]
    ) -> Recoverer | None:
        """What brings cards back, if that is switched on; it hears of every fault from now on."""
        if self._checker is None:
            return None
        recoverer = Recoverer(
            self._recovery, board, watcher, self._checker, self._cluster, bus_ids, self._nvml.close
        )
        watcher.on_fault = recoverer.fault
        return recoverer

    async def _report_sick(self, board: Board, offered: Collection[str], known: set[str]) -> None:
        """A Warning event on the node for each of the ``offered`` cards that becomes unhealthy and is not
        ``known`` as that.
        """
        version = board.version
        while True:
            silent = [card.uuid for card in board.cards if not card.healthy and card.uuid in offered]
            sick = dict.fromkeys(silent, _SILENT) | board.faults
            known &= sick.keys()
            self.counters.health(sick)
            for uuid, reason in sick.items():
                if uuid not in known:
                    known.add(uuid)
                    back = _COMES_BACK[self._options.recovery.mode] if uuid in board.faults else _BY_ITSELF
                    text = f"{uuid}: {reason}; {_SICK}, {back}"
                    self._cluster.node_event("Warning", "HAMiDeviceUnhealthy", text)
            version = await board.wait_beyond(version)

    async def _prune(self) -> None:
        while True:
            await asyncio.sleep(_PRUNE_S)
            try:
                await (self._exact or self._allocator).prune()
            except (KubeError, ProtocolError, OSError, UnsafePathError) as error:
                log.warning("checkpoint.prune_failed", extra={"cause": str(error)})

    async def _wait_for_kubelet(self) -> None:
        if identity(self._options.kubelet_socket) is not None:
            return
        log.info("kubelet.awaited", extra={"socket": self._options.kubelet_socket})
        while not self._interrupted():
            if identity(self._options.kubelet_socket) is not None:
                return
            await asyncio.sleep(_POLL_S)

    async def _wait(self, watched: Watched) -> None:
        """Until stop, reload, a new kubelet socket, or the loss of our own socket, also to another plugin,
        while kubelet is there.
        """
        kubelet = self._options.kubelet_socket
        while not self._interrupted():
            await asyncio.sleep(_POLL_S)
            found = identity(kubelet)
            if found is None:
                continue
            created = found != watched.kubelet
            lost = watched.is_lost
            if created or lost:
                log.info("kubelet.restarted", extra={"socket_created": created, "own_socket_lost": lost})
                await self._settle()
                return

    async def _settle(self) -> None:
        """Several new sockets within a second cause one restart."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEBOUNCE_S):
                await self._stop.wait()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A loop of this round; if it ends with an error, everything is started again."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._loop_ended)
        return task

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._crashed = True
            self._reload.set()

    def _interrupted(self) -> bool:
        return self._stop.is_set() or self._reload.is_set()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=_JOIN_S)
    if not done:
        log.warning("loop.does_not_end", extra={"task": repr(task.get_coro())})
    elif not task.cancelled() and (error := task.exception()) is not None:
        log.warning("loop.failed", exc_info=error)
