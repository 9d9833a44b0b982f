"""Life of the device plugin process: start, restarts of kubelet, reload, end (device-plugin.md §4)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import posixpath
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol

from hami.kube.errors import KubeError
from hami.kube.ratelimit import Backoff
from hami.node.cluster import Cluster
from hami.node.config import Settings
from hami.node.errors import NodeError, NvmlError, UnsafePathError
from hami.node.exact.allocator import ExactAllocator
from hami.node.exact.chooser import ModeChooser
from hami.node.exact.server import ExactService
from hami.node.nvml import Nvml
from hami.node.paths import LOCK_PARENT, HostPaths
from hami.node.plugin.allocator import Allocator
from hami.node.plugin.answer import Delivery, DeviceNode
from hami.node.plugin.board import Board
from hami.node.plugin.cards import CardReader
from hami.node.plugin.health import EventOpener, HealthWatcher
from hami.node.plugin.health_rules import XidRules
from hami.node.plugin.inventory import offered_cards
from hami.node.plugin.registration import Registrar
from hami.node.plugin.server import PluginServer, PluginService
from hami.node.plugin.workspace import Workspace
from hami.protocol.errors import ProtocolError
from hami.protocol.keys import MODE_EXACT, MODE_LOCK

RETRY_S: Final = 30.0
DEBOUNCE_S: Final = 1.0
_POLL_S: Final = 0.25
_JOIN_S: Final = 10.0
_PRUNE_S: Final = 600.0
_RESTORE_BACKOFF_S: Final = (0.5, 15.0)

log = logging.getLogger(__name__)


class NvmlWithEvents(Nvml, EventOpener, Protocol):
    """NVML as the plugin needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginOptions:
    """What the process was started with and a reload does not change."""

    paths: HostPaths
    kubelet_socket: str
    delivery: Delivery
    rules: XidRules
    fail_on_init_error: bool = True
    pass_device_specs: bool = False
    dev_root: str = ""
    retry_s: float = RETRY_S
    register_interval_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ExactSide:
    """What mode ``exact`` needs, and who decides whether it is taken."""

    chooser: ModeChooser
    allocator: ExactAllocator


@dataclass(frozen=True, slots=True)
class _Watched:
    """Our socket (empty: none), and kubelet's socket as it was right before we registered or tried to."""

    socket: str = ""
    kubelet: tuple[int, int, int] | None = None


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
    ) -> None:
        self._options = options
        self._load_settings = load_settings
        self._cluster = cluster
        self._nvml = nvml
        self._allocator = allocator
        self._workspace = workspace
        self._exact_side = exact
        self._exact: ExactAllocator | None = None
        self._reader = CardReader(nvml)
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
        """Serve until :meth:`stop`. Raises :class:`NodeError` when the start is impossible."""
        await asyncio.to_thread(self._workspace.prepare_start)
        await self._prepare_lock_parent()
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
            except (KubeError, ProtocolError) as error:
                delay = backoff.next()
                log.warning("restore.failed", extra={"cause": str(error), "retry_s": round(delay, 1)})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._stop.wait()
            else:
                return

    async def _prepare_lock_parent(self) -> None:
        try:
            await asyncio.to_thread(self._workspace.prepare_lock_parent)
        except UnsafePathError as error:
            path = self._options.paths.host(LOCK_PARENT)
            log.warning("lockparent.unsafe", extra={"cause": str(error)})
            self._cluster.node_event("Warning", "HAMiLockParentUnsafe", f"{path}: {error}")

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
        seen = _identity(self._options.kubelet_socket)
        async with contextlib.AsyncExitStack() as stack:
            try:
                watched = await self._start(settings, stack)
            except (NodeError, OSError) as error:
                failure = error
            else:
                await self._wait(watched)
        log.info("plugin.stopped")
        if self._crashed and failure is None:
            self._crashed = False
            self._reload.clear()
            failure = NodeError("a loop of the plugin ended unexpectedly")
        if failure is not None:
            if isinstance(failure, NvmlError) and self._options.fail_on_init_error and self.rounds == 1:
                raise failure
            log.warning(
                "plugin.start_failed", extra={"cause": str(failure), "retry_s": self._options.retry_s}
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.retry_s):
                    await self._wait(_Watched(kubelet=seen))

    async def _start(self, settings: Settings, stack: contextlib.AsyncExitStack) -> _Watched:
        """Start everything; what has been started is put on ``stack``. The result says what a restart is."""
        board = Board()
        board.show(await asyncio.to_thread(self._reader.read))
        cards = offered_cards(board.cards, settings)
        watched = _Watched(kubelet=_identity(self._options.kubelet_socket))
        if cards:
            service = self._service(board, settings, self._delivery(board))
            folder = posixpath.dirname(self._options.kubelet_socket) or posixpath.dirname(
                self._options.paths.host("/var/lib/kubelet/device-plugins/kubelet.sock")
            )
            server = PluginServer(service, posixpath.join(folder, settings.socket_name))
            stack.push_async_callback(server.stop)
            if self._options.kubelet_socket:
                await self._wait_for_kubelet()
                if self._interrupted():
                    return watched
            watched = _Watched(server.socket_path, _identity(self._options.kubelet_socket))
            await server.start()
            if self._options.kubelet_socket:
                await server.register(self._options.kubelet_socket, settings.resource_name)
        else:
            log.warning("plugin.no_devices", extra={"found": len(board.cards)})
        await self._start_loops(settings, board, stack)
        return watched

    def _service(self, board: Board, settings: Settings, delivery: Delivery) -> PluginService:
        if self._exact is None:
            return PluginService(self._allocator, board, settings, delivery)
        return ExactService(self._exact, self._allocator, board, settings, delivery)

    async def _start_loops(self, settings: Settings, board: Board, stack: contextlib.AsyncExitStack) -> None:
        gpus = await asyncio.to_thread(self._reader.identities)
        offered = {card.uuid for card in offered_cards(board.cards, settings)}
        watcher = HealthWatcher(
            self._nvml, [gpu for gpu in gpus if gpu.uuid in offered], self._options.rules, board
        )
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
        )
        loops = [registrar.run(), self._report_faults(board), self._prune()]
        if self._exact is not None:
            loops.append(self._exact.run(settings.resource_name))
        for work in loops:
            stack.push_async_callback(_end, self._spawn(work))

    def _delivery(self, board: Board) -> Delivery:
        delivery = self._options.delivery
        if not self._options.pass_device_specs:
            return delivery
        nodes: dict[str, tuple[DeviceNode, ...]] = {
            card.uuid: (_device_node(self._options.dev_root, f"/dev/nvidia{card.minor}"),)
            for card in board.cards
        }
        control = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
        nodes[""] = tuple(
            _device_node(self._options.dev_root, path)
            for path in control
            if os.path.exists(self._options.paths.host(path))  # noqa: PTH110
        )
        return Delivery(
            broker=delivery.broker,
            limits_file=delivery.limits_file,
            volume_mounts=delivery.volume_mounts,
            extras=delivery.extras,
            device_nodes=nodes,
        )

    async def _report_faults(self, board: Board) -> None:
        """A Warning event on the node for every card that becomes unhealthy."""
        version = board.version
        known: set[str] = set()
        while True:
            for uuid, reason in board.faults.items():
                if uuid not in known:
                    known.add(uuid)
                    self._cluster.node_event("Warning", "HAMiDeviceUnhealthy", f"{uuid}: {reason}")
            version = await board.wait_beyond(version)

    async def _prune(self) -> None:
        while True:
            await asyncio.sleep(_PRUNE_S)
            try:
                await (self._exact or self._allocator).prune()
            except (KubeError, ProtocolError, OSError, UnsafePathError) as error:
                log.warning("checkpoint.prune_failed", extra={"cause": str(error)})

    async def _wait_for_kubelet(self) -> None:
        if _identity(self._options.kubelet_socket) is not None:
            return
        log.info("kubelet.awaited", extra={"socket": self._options.kubelet_socket})
        while not self._interrupted():
            if _identity(self._options.kubelet_socket) is not None:
                return
            await asyncio.sleep(_POLL_S)

    async def _wait(self, watched: _Watched) -> None:
        """Until stop, reload, a new kubelet socket, or the loss of our own socket while kubelet is there."""
        kubelet = self._options.kubelet_socket
        while not self._interrupted():
            await asyncio.sleep(_POLL_S)
            found = _identity(kubelet)
            if found is None:
                continue
            created = found != watched.kubelet
            lost = bool(watched.socket) and _identity(watched.socket) is None
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


def _identity(path: str) -> tuple[int, int, int] | None:
    """What makes one socket file different from its successor, None where there is none."""
    if not path:
        return None
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _device_node(dev_root: str, path: str) -> DeviceNode:
    return DeviceNode(path, f"{dev_root.rstrip('/')}{path}")


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=_JOIN_S)
    if not done:
        log.warning("loop.does_not_end", extra={"task": repr(task.get_coro())})
    elif not task.cancelled() and (error := task.exception()) is not None:
        log.warning("loop.failed", exc_info=error)
