"""Puts the device plugin process together: client, events, NVML, allocator, signals."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass, replace
from pathlib import Path

from hami.kube.client import Client, Limits
from hami.kube.config import load_config
from hami.kube.events import EventRecorder
from hami.node.cluster import KubeCluster
from hami.node.config import Overrides
from hami.node.lock import LockReleaser
from hami.node.nvml import NvmlSession
from hami.node.plugin.allocator import Allocator
from hami.node.plugin.library import LibraryError, verify
from hami.node.plugin.loader import SettingsLoader
from hami.node.plugin.service import DevicePlugin, PluginOptions
from hami.node.plugin.workspace import Workspace

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
            await _serve(config, KubeCluster(client, recorder, config.node_name))
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


async def _serve(config: ProcessConfig, cluster: KubeCluster) -> None:
    workspace = Workspace(config.options.paths)
    allocator = Allocator(
        cluster, workspace, config.options.paths, LockReleaser(cluster), lock_timeout_s=config.lock_timeout_s
    )
    loader = SettingsLoader(config.device_config, config.node_config, config.given, cluster)
    plugin = DevicePlugin(
        config.options, loader.load, cluster, NvmlSession(config.nvml_library), allocator, workspace
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        loop.add_signal_handler(number, plugin.stop)
    loop.add_signal_handler(signal.SIGHUP, plugin.reload)
    await plugin.run()
