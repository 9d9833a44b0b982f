"""The kubelet stand-in of one simulated node: Node object, device plugins, pods as processes, logs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hami.local.api.errors import ApiError, bad_request, internal, not_found
from hami.local.api.node_services import ExecRequest
from hami.local.api.objects import Object, clone, dig, meta, name_of, namespace_of, rfc3339, rfc3339_micro
from hami.local.api.podlog import LogRequest
from hami.local.api.recorder import Recorder
from hami.local.api.registry import DeleteOptions, Registry
from hami.local.api.resources import CONFIGMAPS, LEASES, NODES, PODS, SECRETS
from hami.local.api.store import Event
from hami.local.kubelet.container_log import read_log
from hami.local.kubelet.containers import ContainerStartError, Isolation
from hami.local.kubelet.device_manager import DeviceManager
from hami.local.kubelet.exec_session import ExecProcess, start_exec
from hami.local.kubelet.pod_resources import PodResourcesServer
from hami.local.kubelet.pod_status import key_of
from hami.local.kubelet.pod_worker import PodWorker, RuntimeHook
from hami.local.scheduling.amounts import milli, pod_amounts, sum_amounts

_LOG = logging.getLogger(__name__)
_LEASE_RENEWAL_S = 10.0
_FINISHED = ("Succeeded", "Failed")
KUBELET_VERSION = "v1.32.0"


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One simulated node. ``host_root`` holds everything that would be on its file system."""

    name: str
    host_root: Path
    labels: Mapping[str, str] = field(default_factory=dict)
    cpu: str = "8"
    memory: str = "32Gi"
    hooks: Sequence[RuntimeHook] = ()
    visible: Sequence[Path] = ()
    restart_backoff_s: float = 10.0


class Kubelet:
    """Runs the pods that are bound to its node. ``start`` and ``stop`` bracket it; ``stop`` ends all pods."""

    def __init__(
        self, config: NodeConfig, registry: Registry, clock: Callable[[], float], isolation: Isolation
    ) -> None:
        self.config = config
        self.clock = clock
        self.isolation = isolation
        self.address = "127.0.0.1"
        self.admission = asyncio.Lock()
        self.hooks = list(config.hooks)
        self.visible = [config.host_root, *config.visible]
        self.restart_backoff_s = config.restart_backoff_s
        self.recorder = Recorder(registry, clock, "kubelet", config.name)
        self._registry = registry
        self._workers: dict[str, PodWorker] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._cancel: Callable[[], None] | None = None
        kubelet_directory = config.host_root / "var/lib/kubelet"
        self.pods_directory = kubelet_directory / "pods"
        self.devices = DeviceManager(kubelet_directory / "device-plugins", self._devices_changed)
        self._pod_resources = PodResourcesServer(
            kubelet_directory / "pod-resources/kubelet.sock", self.devices, self._active_pods
        )

    @property
    def name(self) -> str:
        return self.config.name

    async def start(self) -> None:
        """Create or refresh the Node, serve plugins, take over the pods bound to it."""
        self.pods_directory.mkdir(parents=True, exist_ok=True)
        await self.devices.start()
        await self._pod_resources.start()
        await self._register_node()
        self._spawn(self._renew_lease())
        self._cancel = self._registry.store.subscribe(self._observe)
        for pod in self._registry.store.list(PODS):
            self._consider(pod)

    async def stop(self) -> None:
        """End every pod's processes and all servers. Objects in the API stay as they are."""
        if self._cancel is not None:
            self._cancel()
            self._cancel = None
        tasks = [*self._tasks.values(), *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.reap() for worker in self._workers.values()))
        self._tasks.clear()
        await self._pod_resources.stop()
        await self.devices.stop()

    async def restart(self) -> None:
        """As kubelet's restart: plugins lose their registration and sockets; containers run on."""
        await self._pod_resources.stop()
        await self.devices.stop()
        await asyncio.sleep(0.2)
        await self.devices.start()
        await self._pod_resources.start()

    def node(self) -> Object:
        return self._registry.store.get(NODES, "", self.name)

    def lookup(self, plural: str, namespace: str, name: str) -> Object | None:
        """A ConfigMap or Secret for a pod's environment or volumes."""
        resource = CONFIGMAPS if plural == "configmaps" else SECRETS
        return self._registry.store.find(resource, namespace, name)

    def exceeded(self, pod: Object) -> str:
        """The first ordinary resource that the node has too little of for ``pod``; empty if none."""
        allocatable = dig(self.node(), "status", "allocatable") or {}
        others = [other for other in self._active_pods() if key_of(other) != key_of(pod)]
        used = sum_amounts(others)
        for name, amount in pod_amounts(pod).items():
            known = name in allocatable and not self.devices.book.known(name)
            if known and used.get(name, 0) + amount > milli(allocatable[name]):
                return name
        return ""

    async def set_status(self, pod: Object, status: Object) -> None:
        await self.update_status(pod, lambda _current: status)

    async def update_status(self, pod: Object, make: Callable[[Object], Object]) -> None:
        """Write ``make(current pod)`` as its status; a pod that has gone is left alone."""
        namespace, name, uid = key_of(pod)

        def change(current: Object) -> Object:
            updated: Object = clone(current)
            if meta(current)["uid"] == uid:
                updated["status"] = make(current)
            return updated

        try:
            await self._registry.update(PODS, namespace, name, change, subresource="status")
        except ApiError as error:
            if error.code != 404:
                _LOG.warning("status of pod %s/%s not written: %s", namespace, name, error)

    async def read_log(self, request: LogRequest) -> AsyncIterator[bytes]:
        """:class:`hami.local.api.podlog.LogSource` for the pods of this node."""
        worker = self._workers.get(key_of(request.pod)[2])
        if worker is None:
            raise not_found("", "pods", name_of(request.pod))
        path = worker.log_path(request.container, previous=request.previous)
        if not path.exists() and worker.is_over(request.container):
            word = "previous terminated " if request.previous else ""
            raise bad_request(
                f'{word}container "{request.container}" in pod "{name_of(request.pod)}" is waiting to start'
            )
        async for chunk in read_log(path, request, lambda: worker.is_over(request.container)):
            yield chunk

    async def start_exec(self, request: ExecRequest) -> ExecProcess:
        """Run a program in a container of this node. Raises ApiError where that does not run."""
        worker = self._workers.get(key_of(request.pod)[2])
        container = worker.running(request.container) if worker is not None else None
        if container is None:
            raise bad_request(f'container "{request.container}" in pod "{name_of(request.pod)}" does not run')
        try:
            return await start_exec(container, request.command, tty=request.tty, stdin=request.stdin)
        except ContainerStartError as error:
            raise internal(f"error executing command in container: {error}") from error

    def _observe(self, key: str, event: Event) -> None:
        if key != "pods" or dig(event.obj, "spec", "nodeName") != self.name:
            return
        if event.change == "DELETED":
            worker = self._workers.get(key_of(event.obj)[2])
            if worker is not None:
                worker.terminate(0.0)
                self._spawn(self._forget(worker))
        else:
            self._consider(event.obj)

    def _consider(self, pod: Object) -> None:
        """Start a pod that is new here, end one that is to go."""
        if dig(pod, "spec", "nodeName") != self.name:
            return
        uid = key_of(pod)[2]
        worker = self._workers.get(uid)
        deleting = bool(meta(pod).get("deletionTimestamp"))
        if worker is None:
            if dig(pod, "status", "phase") in _FINISHED:
                return
            worker = self._workers[uid] = PodWorker(self, pod)
            self._tasks[uid] = asyncio.create_task(self._run(worker), name=f"pod-{name_of(pod)}")
        if deleting:
            worker.terminate(float(meta(pod).get("deletionGracePeriodSeconds") or 0))
            if worker.finished:
                self._spawn(self._remove(worker))

    async def _run(self, worker: PodWorker) -> None:
        try:
            await worker.run()
        except asyncio.CancelledError:
            raise
        except Exception:
            _LOG.exception("pod %s failed in the kubelet", name_of(worker.pod))
        namespace, name, uid = key_of(worker.pod)
        current = self._registry.store.find(PODS, namespace, name)
        if current is not None and meta(current)["uid"] == uid and meta(current).get("deletionTimestamp"):
            await self._remove(worker)

    async def _remove(self, worker: PodWorker) -> None:
        """The pod's processes have ended: let the object go."""
        namespace, name, uid = key_of(worker.pod)
        options = DeleteOptions({"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})
        with contextlib.suppress(ApiError):
            await self._registry.delete(PODS, namespace, name, options)

    async def _forget(self, worker: PodWorker) -> None:
        """After the object has gone: end what is left, then remove the files."""
        task = self._tasks.pop(worker.uid, None)
        if task is not None and task is not asyncio.current_task():
            await asyncio.wait([task], timeout=10.0)
        self._workers.pop(worker.uid, None)
        await asyncio.to_thread(worker.clean_up)

    def _active_pods(self) -> list[Object]:
        return [
            pod
            for pod in self._registry.store.list(PODS)
            if dig(pod, "spec", "nodeName") == self.name and dig(pod, "status", "phase") not in _FINISHED
        ]

    def _devices_changed(self) -> None:
        self._spawn(self._update_capacity())

    async def _update_capacity(self) -> None:
        """Put the offered devices into the Node: all into capacity, the healthy ones into allocatable."""
        offered = self.devices.book.capacity()

        def change(current: Object) -> Object:
            node: Object = clone(current)
            for resource, (total, healthy) in offered.items():
                node["status"].setdefault("capacity", {})[resource] = str(total)
                node["status"].setdefault("allocatable", {})[resource] = str(healthy)
            return node

        with contextlib.suppress(ApiError):
            await self._registry.update(NODES, "", self.name, change, subresource="status")

    async def _register_node(self) -> None:
        now = rfc3339(self.clock())
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "amd64"),
            **self.config.labels,
        }
        resources = {
            "cpu": self.config.cpu, "memory": self.config.memory, "pods": "110", "ephemeral-storage": "64Gi",
        }  # fmt: skip
        conditions = [
            {"type": kind, "status": status, "reason": reason, "message": "embedded kubelet",
             "lastHeartbeatTime": now, "lastTransitionTime": now}
            for kind, status, reason in (
                ("MemoryPressure", "False", "KubeletHasSufficientMemory"),
                ("DiskPressure", "False", "KubeletHasNoDiskPressure"),
                ("PIDPressure", "False", "KubeletHasSufficientPID"),
                ("Ready", "True", "KubeletReady"),
            )
        ]  # fmt: skip
        status: Object = {
            "capacity": dict(resources),
            "allocatable": dict(resources),
            "conditions": conditions,
            "addresses": [
                {"type": "InternalIP", "address": self.address},
                {"type": "Hostname", "address": self.name},
            ],
            "nodeInfo": {
                "kubeletVersion": KUBELET_VERSION,
                "kubeProxyVersion": "",
                "containerRuntimeVersion": "hami-local://1.0",
                "osImage": f"simulated ({self.isolation.describe()})",
                "kernelVersion": os.uname().release,
                "operatingSystem": "linux",
                "architecture": labels["kubernetes.io/arch"],
                "machineID": "", "systemUUID": "", "bootID": "",
            },
        }  # fmt: skip
        if self._registry.store.find(NODES, "", self.name) is None:
            await self._registry.create(
                NODES, "", {"metadata": {"name": self.name, "labels": labels}, "spec": {}, "status": status}
            )
            return

        def change(current: Object) -> Object:
            node: Object = clone(current)
            node["status"] = {**(current.get("status") or {}), **status}
            return node

        await self._registry.update(NODES, "", self.name, change, subresource="status")

    async def _renew_lease(self) -> None:
        """The node's heartbeat in ``kube-node-lease``."""
        while True:
            with contextlib.suppress(ApiError):
                await self._write_lease()
            await asyncio.sleep(_LEASE_RENEWAL_S)

    async def _write_lease(self) -> None:
        spec = {
            "holderIdentity": self.name,
            "leaseDurationSeconds": 40,
            "renewTime": rfc3339_micro(self.clock()),
        }
        if self._registry.store.find(LEASES, "kube-node-lease", self.name) is None:
            body: Object = {"metadata": {"name": self.name, "namespace": "kube-node-lease"}, "spec": spec}
            await self._registry.create(LEASES, "kube-node-lease", body)
            return
        await self._registry.update(
            LEASES, "kube-node-lease", self.name, lambda current: {**clone(current), "spec": spec}
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class NodeLogs:
    """:class:`hami.local.api.node_services.NodeServices` of all kubelets of a cluster."""

    def __init__(self, kubelets: Callable[[], Sequence[Kubelet]]) -> None:
        self._kubelets = kubelets

    async def read_log(self, request: LogRequest) -> AsyncIterator[bytes]:
        async for chunk in self._kubelet(request.pod).read_log(request):
            yield chunk

    async def start_exec(self, request: ExecRequest) -> ExecProcess:
        return await self._kubelet(request.pod).start_exec(request)

    async def connect(self, pod: Object, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Pods share the network of this machine: their ports are those of its loopback address."""
        return await asyncio.open_connection(self._kubelet(pod).address, port)

    def _kubelet(self, pod: Object) -> Kubelet:
        node = dig(pod, "spec", "nodeName")
        for kubelet in self._kubelets():
            if kubelet.name == node:
                return kubelet
        raise not_found("", "nodes", str(node or namespace_of(pod)))
