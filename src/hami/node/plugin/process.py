"""Puts the device plugin process together: client, events, NVML, allocator, signals."""

from __future__ import annotations

import asyncio
import logging
import posixpath
import signal
from dataclasses import dataclass, replace
from pathlib import Path

from hami.kube.client import Client, Limits
from hami.kube.config import load_config
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
from hami.node.lock import LockReleaser
from hami.node.nvml import NvmlSession
from hami.node.paths import pod_resources_socket
from hami.node.plugin.allocator import Allocator
from hami.node.plugin.library import LibraryError, verify
from hami.node.plugin.loader import SettingsLoader
from hami.node.plugin.service import DevicePlugin, ExactSide, PluginOptions
from hami.node.plugin.workspace import Workspace
from hami.protocol.keys import MODE_LOCK

COMPONENT = "hami-device-plugin"
_FLUSH_S = 3.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Everything the command line and the environment say."""

    node_name: str
    device_config: Path
    node_config: Path
    given: Overrides
    options: PluginOptions
    nvml_library: str
    library: Path | None
    """The library that must be installed on the host; None: nothing is verified."""
    lock_timeout_s: float
    kube_qps: float
    kube_burst: int
    allocation_mode: str = MODE_LOCK
    """``auto``, ``lock`` or ``exact``."""
    scheduler_name: str = "hami-scheduler"
    """Named to users whose pod was not scheduled by it."""


async def run_device_plugin(config: ProcessConfig) -> None:
    """Run until SIGINT, SIGTERM or SIGQUIT. Raises :class:`hami.protocol.errors.HamiError` when it cannot
    start.
    """
    config = await asyncio.to_thread(_verified, config)
    limits = Limits(qps=config.kube_qps, burst=config.kube_burst)
    async with Client(load_config(), limits, user_agent=COMPONENT) as client:
        recorder = EventRecorder(client, COMPONENT, config.node_name)
        sending = asyncio.create_task(recorder.run())
        try:
            await _serve(config, client, KubeCluster(client, recorder, config.node_name))
        finally:
            await recorder.flush(_FLUSH_S)
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
    allocator = Allocator(
        cluster, workspace, config.options.paths, LockReleaser(cluster), lock_timeout_s=config.lock_timeout_s
    )
    loader = SettingsLoader(config.device_config, config.node_config, config.given, cluster)
    kubelet = PodResources(pod_resources_socket(config.options.kubelet_socket))
    plugin = DevicePlugin(
        config.options,
        loader.load,
        cluster,
        NvmlSession(config.nvml_library),
        allocator,
        workspace,
        _exact_side(config, client, cluster, workspace, kubelet),
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        loop.add_signal_handler(number, plugin.stop)
    loop.add_signal_handler(signal.SIGHUP, plugin.reload)
    try:
        await plugin.run()
    finally:
        await kubelet.close()


def _exact_side(
    config: ProcessConfig,
    client: Client,
    cluster: KubeCluster,
    workspace: Workspace,
    kubelet: PodResources,
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
    )
    return ExactSide(ModeChooser(config.allocation_mode, cluster, kubelet, documents), allocator)
