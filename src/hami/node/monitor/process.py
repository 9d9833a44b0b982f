"""Puts the monitor process together: pod watch, NVML, tick, HTTP, signals."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version as package_version

from hami.kube.client import Client
from hami.kube.events import EventRecorder, ObjectRef
from hami.kube.informer import Informer, Unheard
from hami.kube.operations import list_pages, pods_of_node
from hami.kube.resources import PODS
from hami.node.metrics_server import Application, MetricsServer, listen
from hami.node.monitor.claims import LimitsFolder
from hami.node.monitor.garbage import Garbage
from hami.node.monitor.hostgpu import HostReader
from hami.node.monitor.pods import PodInfo, pod_info
from hami.node.monitor.series import SeriesBook
from hami.node.monitor.service import Monitor, MonitorOptions, cancel_and_wait
from hami.node.monitor.tracker import Tracker
from hami.node.nvml import NvmlSession
from hami.node.paths import MIG_LOCK_NAME
from hami.node.process import FLUSH_S, NodeProcess
from hami.protocol.build import build_labels

MIG_LOCK = f"/tmp/hami/{MIG_LOCK_NAME}"  # noqa: S108 - WIRE with the device plugin; only looked at
USER_AGENT = "hami-monitor"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig(NodeProcess):
    """Everything the command line and the environment say. ``hook`` is HOOK_PATH as the monitor has it."""

    options: MonitorOptions
    hook: str
    host_root: str


class PodWatch:
    """The pods of one node, followed."""

    def __init__(self, client: Client, node: str) -> None:
        self._client = client
        self._selection = pods_of_node(node)
        self.informer: Informer[PodInfo] = Informer(client, PODS, pod_info, Unheard(), self._selection)

    @property
    def synced(self) -> bool:
        return self.informer.synced.is_set()

    def by_uid(self) -> Mapping[str, PodInfo]:
        return {pod.uid: pod for pod in self.informer.values()}

    async def list_uids(self) -> set[str]:
        """UIDs of a quorum read made now."""
        found: set[str] = set()
        async for page in list_pages(self._client, PODS, self._selection):
            found |= {pod_info(item).uid for item in page.items}
        return found


async def run_monitor(config: ProcessConfig) -> None:
    """Run until SIGINT or SIGTERM. Raises :class:`hami.protocol.errors.HamiError` when it cannot start."""
    listener = listen(config.metrics_address)
    base = f"{config.host_root}{config.hook}"
    log.info("monitor.start", extra={"containers": f"{base}/containers", "node": config.options.node})
    async with config.client(USER_AGENT) as client:
        pods = PodWatch(client, config.options.node)
        nvml = NvmlSession(config.nvml_library)
        recorder = EventRecorder(client, USER_AGENT, config.options.node)
        monitor = Monitor(
            config.options,
            Tracker(f"{base}/containers"),
            HostReader(nvml, f"{config.host_root}{MIG_LOCK}"),
            Garbage(f"{base}/containers", f"{base}/limits"),
            LimitsFolder(f"{base}/limits"),
            pods,
            pods.list_uids,
            add_build_info,
            lambda pod, event: recorder.record(
                ObjectRef("Pod", pod.name, pod.namespace, pod.uid), event.type, event.reason, event.message
            ),
        )
        server = MetricsServer(Application(monitor), listener)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.stop)
        watching = asyncio.create_task(pods.informer.run())
        recording = asyncio.create_task(recorder.run())
        ticking = asyncio.create_task(monitor.run())
        # What dies of these ends the process with its error; it must not look healthy for another minute, nor
        # go on with the pods of yesterday.
        for task in (watching, recording, ticking):
            task.add_done_callback(lambda _: server.stop())
        try:
            await server.run()
        finally:
            await cancel_and_wait(ticking)
            await cancel_and_wait(watching)
            await recorder.flush(FLUSH_S)
            await cancel_and_wait(recording)
            await asyncio.to_thread(nvml.close)


def add_build_info(book: SeriesBook) -> None:
    """``hami_build_info`` with HAMi's label names; what is not known is ``unknown``."""
    book.plain("hami_build_info", build_labels(package_version("hami")), 1)
