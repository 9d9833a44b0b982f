"""The embedded cluster: API server, scheduler loop, kubelets in this process, HAMi's programs beside it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import TracebackType

import aiohttp
import yaml

from hami.kube.certificates import create_authority, issue
from hami.local.api.apiserver import ApiServer
from hami.local.api.objects import Object, annotations_of, dig
from hami.local.api.resources import MUTATING_WEBHOOKS, NODES
from hami.local.components import Component, ComponentError, hami_command
from hami.local.kubelet.containers import Isolation, probe_isolation
from hami.local.kubelet.kubelet import Kubelet, NodeConfig, NodeLogs
from hami.local.kubelet.pod_worker import RuntimeHook
from hami.local.scheduling.scheduler_loop import Extender, Profile, SchedulerLoop
from hami.local.scratch import Scratch
from hami.protocol.errors import HamiError

SCHEDULER_NAME = "hami-scheduler"
HOOK_PATH = "/usr/local"
_SOCKET_PATH_LIMIT = 107
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_REGISTER = "hami.io/node-nvidia-register"

DEVICE_CONFIG: Object = {
    "nvidia": {
        "resourceCountName": "nvidia.com/gpu",
        "resourceMemoryName": "nvidia.com/gpumem",
        "resourceMemoryPercentageName": "nvidia.com/gpumem-percentage",
        "resourceCoreName": "nvidia.com/gpucores",
        "resourcePriorityName": "nvidia.com/priority",
        "overwriteEnv": False,
        "defaultMemory": 0,
        "defaultCores": 0,
        "defaultGPUNum": 1,
        "memoryFactor": 1,
        "deviceSplitCount": 10,
        "deviceMemoryScaling": 1.0,
        "deviceCoreScaling": 1.0,
        "gpuCorePolicy": "default",
        "libCudaLogLevel": "1",
    }
}
MANAGED_RESOURCES = frozenset(
    DEVICE_CONFIG["nvidia"][key]
    for key in (
        "resourceCountName", "resourceMemoryName", "resourceMemoryPercentageName", "resourceCoreName",
        "resourcePriorityName",
    )
)  # fmt: skip


class ClusterError(HamiError):
    """The cluster cannot be started; the text says what is missing or which log to read."""


@dataclass(frozen=True, slots=True)
class GpuNode:
    """A node with simulated cards. ``settings`` are further ``FAKEGPU_*`` values of its driver."""

    name: str
    cards: int = 1
    model: str = "A100-SXM4-40GB"
    settings: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=lambda: {"gpu": "on"})


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """``native``: the folder of ``make native``. ``directory``: working files (default: a temporary folder).

    ``isolation`` of the containers: None takes the strongest that works here.
    ``allocation_mode``: ``lock`` or ``exact`` (or ``auto``, which is ``lock`` with this kubelet).
    ``scheduler_args``, ``plugin_args``, ``monitor_args`` are appended to the command lines.
    """

    nodes: Sequence[GpuNode]
    native: Path
    directory: Path | None = None
    isolation: Isolation | None = None
    device_config: Object = field(default_factory=lambda: DEVICE_CONFIG)
    allocation_mode: str = "auto"
    scheduler_args: Sequence[str] = ()
    plugin_args: Sequence[str] = ()
    monitor_args: Sequence[str] = ()
    webhook: bool = True
    monitor: bool = True
    ready_timeout_s: float = 60.0


@dataclass(slots=True)
class SimulatedNode:
    """One running node and its HAMi programs."""

    config: GpuNode
    host_root: Path
    kubelet: Kubelet
    driver: Component
    plugin: Component
    monitor: Component | None
    metrics_url: str = ""


class Cluster:
    """``async with Cluster(config) as cluster``: everything runs and is ready inside, nothing is left after.

    ``progress`` is called with a line for each step of the start.
    """

    def __init__(self, config: ClusterConfig, progress: Callable[[str], None] | None = None) -> None:
        self.config = config
        self.api = ApiServer()
        self.nodes: dict[str, SimulatedNode] = {}
        self.isolation = Isolation.NONE
        self.scheduler: Component | None = None
        self.scheduler_loop: SchedulerLoop | None = None
        self._progress = progress or (lambda _line: None)
        self._scratch: Scratch | None = None
        if config.directory is None:
            self._scratch = Scratch()
            self.directory = self._scratch.path
        else:
            self.directory = config.directory
        self._ports: dict[str, socket.socket] = {}
        self._scheduler_url = ""
        self._authority_pem = b""

    @property
    def kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    @property
    def logs(self) -> Path:
        """The folder with one log file per component."""
        return self.directory / "logs"

    @property
    def scheduler_url(self) -> str:
        """Base URL of extender and webhook."""
        return self._scheduler_url

    async def __aenter__(self) -> Cluster:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything and wait until it is ready. Raises ClusterError or ComponentError."""
        self._check_native()
        self._check_socket_paths()
        self.logs.mkdir(parents=True, exist_ok=True)
        self.isolation = self.config.isolation or await probe_isolation(self.directory / "probe")
        self._check_preload_path()
        self._progress(f"containers: {self.isolation.describe()}")
        await self.api.start()
        self.api.write_kubeconfig(self.kubeconfig)
        self._progress(f"API server: {self.api.url}")
        device_config = self.directory / "device-config.yaml"
        device_config.write_text(yaml.safe_dump(self.config.device_config))
        for node in self.config.nodes:
            await self._start_node(node, device_config)
        self.api.logs = NodeLogs(lambda: [node.kubelet for node in self.nodes.values()])
        self._progress(f"nodes: {', '.join(self.nodes)}")
        await self._start_scheduler(device_config)
        self._progress(f"scheduler: {self._scheduler_url}")
        await self._start_loop()
        for found in self.nodes.values():
            await self._node_ready(found)
            self._progress(f"{found.config.name}: device plugin registered")

    async def stop(self) -> None:
        """Stop everything; working files are removed if their folder was ours."""
        components = [self.scheduler] if self.scheduler is not None else []
        for node in self.nodes.values():
            components += [node.driver, node.plugin] + ([node.monitor] if node.monitor else [])
        async with contextlib.AsyncExitStack() as stack:  # from the last to the first, whatever fails
            if self._scratch is not None:
                stack.callback(self._scratch.remove)
            for held in self._ports.values():
                stack.callback(held.close)
            stack.push_async_callback(self.api.stop)
            stack.push_async_callback(_all, [component.stop for component in components])
            stack.push_async_callback(_all, [node.kubelet.stop for node in self.nodes.values()])
            if self.scheduler_loop is not None:
                stack.push_async_callback(self.scheduler_loop.stop)

    async def metrics(self, node: str) -> str:
        """The text of the monitor's ``/metrics`` on ``node``."""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30.0)) as session,
            session.get(f"{self.nodes[node].metrics_url}/metrics") as answer,
        ):
            answer.raise_for_status()
            return await answer.text()

    def component(self, name: str) -> Component:
        """``scheduler``, ``<node>-driver``, ``<node>-plugin`` or ``<node>-monitor``."""
        everything: list[Component | None] = [self.scheduler]
        for node in self.nodes.values():
            everything += [node.driver, node.plugin, node.monitor]
        for component in everything:
            if component is not None and component.name == name:
                return component
        raise KeyError(name)

    def _check_native(self) -> None:
        for name in (
            "libvgpu.so", "fakegpu/libcuda.so.1", "fakegpu/libnvidia-ml.so.1", "fakegpu/fakegpud",
        ):  # fmt: skip
            if not (self.config.native / name).is_file():
                raise ClusterError(f"{self.config.native / name} is missing: run `make native` first")

    def _check_preload_path(self) -> None:
        """Without namespaces the library is loaded by LD_PRELOAD, a list that spaces and colons separate."""
        if self.isolation is Isolation.NONE and any(mark in str(self.directory) for mark in " :"):
            raise ClusterError(
                f"the working folder {self.directory} has a space or a colon in its name, so that no limit "
                "would be enforced: set TMPDIR to another folder"
            )

    def _check_socket_paths(self) -> None:
        for node in self.config.nodes:
            path = self.directory / node.name / "var/lib/kubelet/device-plugins/nvidia-gpu.sock"
            if len(str(path)) > _SOCKET_PATH_LIMIT:
                raise ClusterError(
                    f"{path} is longer than a socket's path may be ({_SOCKET_PATH_LIMIT} characters): "
                    "set TMPDIR to a folder with a shorter name"
                )

    async def _start_node(self, node: GpuNode, device_config: Path) -> None:
        root = self.directory / node.name
        state = self.directory / f"{node.name}-gpu"
        driver = self.config.native / "fakegpu"
        _install(root, self.config.native / "libvgpu.so")
        _write_driver_settings(state, node)
        hook = RuntimeHook(
            env={"FAKEGPU_STATE": str(state)}, library_path=str(driver), visible=(str(state), str(driver))
        )
        config = NodeConfig(
            node.name, root, labels=node.labels, hooks=[hook], visible=[self.config.native],
        )  # fmt: skip
        kubelet = Kubelet(config, self.api.registry, time.time, self.isolation)
        base = {
            "PATH": _SYSTEM_PATH, "HOME": str(self.directory), "KUBECONFIG": str(self.kubeconfig),
            "NODE_NAME": node.name, "NODE_IP": "127.0.0.1", "LD_LIBRARY_PATH": str(driver),
            "FAKEGPU_STATE": str(state), "NVIDIA_VISIBLE_DEVICES": "all",
        }  # fmt: skip
        plugin = Component(
            f"{node.name}-plugin",
            lambda: hami_command(
                "device-plugin", "--config-file", str(device_config), "--host-root", str(root),
                "--allocation-mode", self.config.allocation_mode, *self.config.plugin_args,
            ),
            {**base, "HOOK_PATH": HOOK_PATH},
            self.logs,
        )  # fmt: skip
        monitor = None
        if self.config.monitor:
            name = f"{node.name}-monitor"
            monitor = Component(
                name,
                lambda: hami_command(
                    "monitor", "--metrics-bind-address", self._address(name),
                    "--host-root", str(root), *self.config.monitor_args,
                ),
                {**base, "HOOK_PATH": f"{HOOK_PATH}/vgpu"},
                self.logs,
            )  # fmt: skip
        # The host side of the simulated driver: tells processes in PID namespaces their host PID.
        daemon = Component(
            f"{node.name}-driver", lambda: [str(driver / "fakegpud"), "serve"], base, self.logs
        )
        self.nodes[node.name] = SimulatedNode(node, root, kubelet, daemon, plugin, monitor)
        await daemon.start()
        await self._until_file(state / "daemon.sock", daemon)
        await kubelet.start()
        await plugin.start()
        if monitor is not None:
            await monitor.start()

    async def _start_scheduler(self, device_config: Path) -> None:
        certificate, key = self._make_certificate()
        self.scheduler = Component(
            "scheduler",
            lambda: hami_command(
                "scheduler", "--http_bind", self._address("extender"),
                "--metrics-bind-address", self._address("scheduler-metrics"),
                "--cert_file", str(certificate), "--key_file", str(key),
                "--scheduler-name", SCHEDULER_NAME, "--device-config-file", str(device_config),
                *self.config.scheduler_args,
            ),
            {"PATH": _SYSTEM_PATH, "HOME": str(self.directory), "KUBECONFIG": str(self.kubeconfig)},
            self.logs,
        )  # fmt: skip
        await self.scheduler.start()
        limit = self.config.ready_timeout_s
        for server in ("extender", "metrics"):
            await self.scheduler.wait_event("server.listening", limit, server=server)
        self._scheduler_url = f"https://{self._address('extender')}"
        await self._until_answering(f"{self._scheduler_url}/readyz", self.scheduler)
        if self.config.webhook:
            await self._register_webhook()

    def _address(self, name: str) -> str:
        """Where the server of this name listens, also after a restart: the port is held for it, so that no
        other program gets it while the server is down.
        """
        held = self._ports.get(name)
        if held is None:
            held = self._ports[name] = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{held.getsockname()[1]}"

    def _make_certificate(self) -> tuple[Path, Path]:
        now = time.time()
        authority = create_authority("hami-embedded", now)
        pair = issue(authority, "hami-scheduler", now, hosts=["127.0.0.1", "localhost"])
        self._authority_pem = authority.certificate_pem
        certificate, key = self.directory / "tls.crt", self.directory / "tls.key"
        certificate.write_bytes(pair.certificate_pem)
        key.touch(mode=0o600)
        key.write_bytes(pair.key_pem)
        return certificate, key

    async def _register_webhook(self) -> None:
        """The configuration that HAMi's chart installs, for a server on this machine."""
        ignore = {"matchExpressions": [{"key": "hami.io/webhook", "operator": "NotIn", "values": ["ignore"]}]}
        webhook: Object = {
            "name": "vgpu.hami.io",
            "admissionReviewVersions": ["v1", "v1beta1"],
            "clientConfig": {
                "url": f"{self._scheduler_url}/webhook",
                "caBundle": base64.b64encode(self._authority_pem).decode(),
            },
            "failurePolicy": "Ignore",
            "matchPolicy": "Equivalent",
            "reinvocationPolicy": "Never",
            "sideEffects": "None",
            "timeoutSeconds": 10,
            "namespaceSelector": ignore,
            "objectSelector": ignore,
            "rules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"],
                 "scope": "*"}
            ],
        }  # fmt: skip
        await self.api.registry.create(
            MUTATING_WEBHOOKS, "", {"metadata": {"name": "hami-webhook"}, "webhooks": [webhook]}
        )

    async def _start_loop(self) -> None:
        extender = Extender(url_prefix=self._scheduler_url, managed_resources=MANAGED_RESOURCES)
        self.scheduler_loop = SchedulerLoop(
            self.api.registry,
            time.time,
            [
                Profile("default-scheduler"),
                Profile(SCHEDULER_NAME, extender=extender, ignored=MANAGED_RESOURCES),
            ],
        )
        await self.scheduler_loop.start()

    async def _node_ready(self, node: SimulatedNode) -> None:
        """Wait for the plugin's registration with kubelet and in the node's annotation, then the monitor."""
        resource = str(self.config.device_config["nvidia"]["resourceCountName"])
        deadline = time.monotonic() + self.config.ready_timeout_s
        while True:
            found = self.api.store.get(NODES, "", node.config.name)
            count = str((dig(found, "status", "allocatable") or {}).get(resource, "0"))
            if count != "0" and annotations_of(found).get(_REGISTER):
                break
            if time.monotonic() > deadline:
                raise node.plugin.error(f"the node has {resource}={count} and is not registered")
            await asyncio.sleep(0.02)
        if node.monitor is not None:
            limit = self.config.ready_timeout_s
            await node.monitor.wait_event("server.listening", limit, server="metrics")
            node.metrics_url = f"http://{self._address(node.monitor.name)}"

    async def _until_file(self, path: Path, component: Component) -> None:
        deadline = time.monotonic() + self.config.ready_timeout_s
        while not _exists(path):
            if not component.running or time.monotonic() > deadline:
                raise component.error(f"it does not make {path}")
            await asyncio.sleep(0.01)

    async def _until_answering(self, url: str, component: Component) -> None:
        context = ssl.create_default_context(cadata=self._authority_pem.decode())
        deadline = time.monotonic() + self.config.ready_timeout_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(url, ssl=context) as answer:
                        if answer.status == 200:
                            return
                if not component.running or time.monotonic() > deadline:
                    raise component.error(f"{url} does not answer")
                await asyncio.sleep(0.05)


async def _all(actions: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Do all at once, and raise the first error when each has ended."""
    for result in await asyncio.gather(*(action() for action in actions), return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _install(root: Path, library: Path) -> None:
    """Put the library and ``ld.so.preload`` where the installer of the DaemonSet puts them."""
    vgpu = root / f"{HOOK_PATH.lstrip('/')}/vgpu"
    target = vgpu / "lib" / f"v{version('hami')}" / "libvgpu.so"
    target.parent.mkdir(parents=True, mode=0o755)
    shutil.copyfile(library, target)
    preload = vgpu / "ld.so.preload"
    preload.write_text(f"{HOOK_PATH}/vgpu/libvgpu.so\n")
    for path in (target, preload):
        path.chmod(0o644)


def _write_driver_settings(state: Path, node: GpuNode) -> None:
    settings = {
        "FAKEGPU_DEVICES": str(node.cards),
        "FAKEGPU_MODEL": node.model,
        "FAKEGPU_UUID_SEED": node.name,
        **node.settings,
    }
    state.mkdir(parents=True)
    (state / "config").write_text("".join(f"{key}={value}\n" for key, value in settings.items()))


def default_native() -> Path:
    """``HAMI_NATIVE_BUILD``, else ``build/native`` of the checkout that this package runs from."""
    given = os.environ.get("HAMI_NATIVE_BUILD")
    return Path(given) if given else Path(__file__).resolve().parents[3] / "build" / "native"


__all__ = ["Cluster", "ClusterConfig", "ClusterError", "ComponentError", "GpuNode", "SimulatedNode"]
