"""Puts the device plugin process together: client, events, NVML, allocator, signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import posixpath
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hami.kube.client import Client
from hami.kube.events import EventRecorder
from hami.node.cluster import KubeCluster
from hami.node.config import Overrides
from hami.node.exact.allocator import ExactAllocator
from hami.node.exact.chooser import ModeChooser
from hami.node.exact.documents import Documents
from hami.node.exact.kubelet_state import FILE_NAME
from hami.node.exact.owners import Owners
from hami.node.exact.pod_resources import PodResources
from hami.node.exact.pods import WatchedPods
from hami.node.hostpid.child import BrokerChild
from hami.node.lock import LockReleaser
from hami.node.metrics_server import Application, MetricsServer, listen
from hami.node.mig.given import GivenByKubelet
from hami.node.mig.instances import MigCards
from hami.node.mig.journal import Journal
from hami.node.mig.manager import MigManager
from hami.node.mig.nvml import NvmlMig
from hami.node.mig.side import MigSide
from hami.node.mig.watch import WatchedChanges
from hami.node.nvml import NvmlSession
from hami.node.paths import pod_resources_socket
from hami.node.plugin.allocator import Allocator
from hami.node.plugin.checker import CardChecker, ChildChecker
from hami.node.plugin.library import LibraryError, verify
from hami.node.plugin.loader import SettingsLoader
from hami.node.plugin.metrics import PluginMetrics
from hami.node.plugin.options import PluginOptions
from hami.node.plugin.platform import Platform, choose, look
from hami.node.plugin.recovery_rules import RecoveryMode
from hami.node.plugin.service import DevicePlugin, ExactSide
from hami.node.plugin.workspace import Workspace
from hami.node.process import FLUSH_S, NodeProcess
from hami.protocol.keys import MODE_LOCK

COMPONENT = "hami-device-plugin"
FILES_EVERY_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig(NodeProcess):
    """Everything the command line and the environment say; ``/metrics`` is not served at an empty address."""

    node_name: str
    device_config: Path
    node_config: Path
    given: Overrides
    options: PluginOptions
    library: Path | None
    """The library that must be installed on the host; None: nothing is verified."""
    lock_timeout_s: float
    allocation_mode: str = MODE_LOCK
    """``auto``, ``lock`` or ``exact``."""
    scheduler_name: str = "hami-scheduler"
    """Named to users whose pod was not scheduled by it."""
    discovery: str = "auto"
    """``auto``, ``nvml`` or ``tegra``."""


async def run_device_plugin(config: ProcessConfig) -> None:
    """Run until SIGINT, SIGTERM or SIGQUIT. Raises :class:`hami.protocol.errors.HamiError` when it cannot
    start.
    """
    config = await asyncio.to_thread(_verified, config)
    async with config.client(COMPONENT) as client:
        recorder = EventRecorder(client, COMPONENT, config.node_name)
        sending = asyncio.create_task(recorder.run())
        try:
            await _serve(config, client, KubeCluster(client, recorder, config.node_name))
        finally:
            await recorder.flush(FLUSH_S)
            sending.cancel()
            await asyncio.wait({sending})


def _verified(config: ProcessConfig) -> ProcessConfig:
    if config.library is None:
        log.warning(
            "library.not_verified",
            extra={
                "candidates": config.options.paths.library_candidates,
                "advice": "this package holds no libvgpu.so to compare with: containers get whichever of "
                "these files is there; give --library to have it checked",
            },
        )
        return config
    try:
        paths = verify(config.library, config.options.paths)
    except OSError as error:
        raise LibraryError(f"cannot read {config.library}: {error.strerror or error}") from error
    return replace(config, options=replace(config.options, paths=paths))


async def _serve(config: ProcessConfig, client: Client, cluster: KubeCluster) -> None:
    workspace = Workspace(config.options.paths)
    nvml = NvmlSession(config.nvml_library)
    driver = NvmlMig(nvml)
    manager = MigManager(
        MigCards(driver, workspace.mig_lock),
        cluster,
        Journal(config.options.paths),
        GivenByKubelet(config.options.kubelet_socket, config.options.paths),
    )
    allocator = Allocator(
        cluster,
        workspace,
        config.options.paths,
        LockReleaser(cluster),
        lock_timeout_s=config.lock_timeout_s,
        mig=manager,
    )
    loader = SettingsLoader(config.device_config, config.node_config, config.given, cluster)
    kubelet = PodResources(pod_resources_socket(config.options.kubelet_socket))
    broker = BrokerChild(config.options.paths) if config.options.delivery.broker else None
    plugin = DevicePlugin(
        config.options,
        loader.load,
        cluster,
        nvml,
        allocator,
        workspace,
        _exact_side(config, client, cluster, workspace, kubelet, manager),
        broker,
        lambda: loader.applied,
        lambda: _platform(config, nvml),
        MigSide(driver, manager, lambda: WatchedChanges(client, config.node_name)),
        _checker(config.options),
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        loop.add_signal_handler(number, plugin.stop)
    loop.add_signal_handler(signal.SIGHUP, plugin.reload)
    source = PluginMetrics(broker.totals if broker else None, plugin.counters)
    following = asyncio.create_task(_follow_files(loader.refreshed, plugin.reload, FILES_EVERY_S))
    try:
        async with _metrics_served(config.metrics_address, source):
            await plugin.run()
    finally:
        following.cancel()
        await asyncio.wait({following})
        await kubelet.close()


def _checker(options: PluginOptions) -> CardChecker | None:
    """Who looks at unhealthy cards; nobody where they never recover."""
    if options.recovery.mode is RecoveryMode.OFF:
        return None
    return ChildChecker(options.paths.host(options.driver_root))


def _platform(config: ProcessConfig, nvml: NvmlSession) -> Platform:
    options = config.options
    signs = look(
        config.nvml_library,
        lambda: [gpu.name for gpu in nvml.gpus()],
        (options.paths.host(""), options.paths.host(options.driver_root)),
    )
    return choose(config.discovery, signs)


async def _follow_files(refreshed: Callable[[], bool], reload: Callable[[], None], every_s: float) -> None:
    """Reload when changed files have changed the settings; ends only by cancellation.

    kubelet brings an edited ConfigMap into the container about a minute later.
    """
    while True:
        await asyncio.sleep(every_s)
        if refreshed():
            reload()


@contextlib.asynccontextmanager
async def _metrics_served(address: str, source: PluginMetrics) -> AsyncIterator[None]:
    """``/metrics`` on ``address``, nothing where that is empty. Raises :class:`ListenError`."""
    if not address:
        yield
        return
    server = MetricsServer(Application(source), listen(address))
    serving = asyncio.create_task(server.run())
    try:
        yield
    finally:
        server.stop()
        await asyncio.wait({serving}, timeout=FLUSH_S)


def _exact_side(
    config: ProcessConfig,
    client: Client,
    cluster: KubeCluster,
    workspace: Workspace,
    kubelet: PodResources,
    manager: MigManager,
) -> ExactSide | None:
    """Mode ``exact`` where it may be taken: never without a kubelet."""
    socket = config.options.kubelet_socket
    if config.allocation_mode == MODE_LOCK or not socket:
        return None
    documents = Documents(config.options.paths)
    pods = WatchedPods(client, config.node_name)
    owners = Owners(cluster, kubelet, posixpath.join(posixpath.dirname(socket), FILE_NAME), pods)
    allocator = ExactAllocator(
        cluster,
        workspace,
        documents,
        config.options.paths,
        owners,
        pods,
        LockReleaser(cluster),
        scheduler_name=config.scheduler_name,
        mig=manager,
    )
    return ExactSide(ModeChooser(config.allocation_mode, cluster, kubelet, documents), allocator)
