"""The kubelet's side of the device plugin API v1beta1: registration, one stream per plugin, Allocate."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import msgspec

from hami.local.kubelet.devices import AllocationRefusedError, DeviceBook, Grant
from hami.node.api import deviceplugin_v1beta1_pb2 as pb
from hami.node.api import deviceplugin_v1beta1_pb2_grpc as pb_grpc

_LOG = logging.getLogger(__name__)
VERSION = "v1beta1"
CHECKPOINT = "kubelet_internal_checkpoint"
_CALL_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 10.0
_CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 16 << 20)]


@dataclass(slots=True)
class _Endpoint:
    """A registered plugin: its channel and what it offers besides Allocate."""

    socket: Path
    channel: Any
    stub: Any
    prefers: bool
    pre_start: bool
    task: asyncio.Task[None] | None = None


class DeviceManager:
    """Serves ``<directory>/kubelet.sock``, keeps the book of devices; ``changed`` is called on new offers."""

    def __init__(self, directory: Path, changed: Callable[[], None]) -> None:
        self.directory = directory
        self.book = DeviceBook()
        self._changed = changed
        self._endpoints: dict[str, _Endpoint] = {}
        self._pre_start: set[str] = set()  # resources whose plugin asked for PreStartContainer, gone or not
        self._server: Any = None
        self._lock = asyncio.Lock()

    @property
    def socket(self) -> Path:
        return self.directory / "kubelet.sock"

    async def start(self) -> None:
        """Remove old sockets as kubelet does, read the checkpoint, serve registrations."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for stale in self.directory.iterdir():
            if stale.is_socket():
                stale.unlink()
        self._load()
        self._server = grpc.aio.server()
        pb_grpc.add_RegistrationServicer_to_server(_Registration(self), self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        await self._server.start()

    async def stop(self) -> None:
        """As a kubelet that is shut down: plugins lose their registration and have to come again."""
        self._pre_start.clear()
        for resource in list(self._endpoints):
            await self._drop(resource)
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        self.socket.unlink(missing_ok=True)

    async def register(self, version: str, endpoint: str, resource: str, options: Any) -> None:
        """Take a plugin in. Raises ValueError for a registration that kubelet refuses."""
        if version != VERSION:
            raise ValueError(f"requested API version {version!r} is not supported by kubelet: {VERSION}")
        if not resource or "/" not in resource or resource.startswith("kubernetes.io/"):
            raise ValueError(f"the ResourceName {resource!r} is invalid")
        if not endpoint or "/" in endpoint or endpoint in (".", ".."):
            raise ValueError(f"the endpoint {endpoint!r} is not a file name")
        await self._drop(resource)
        socket = self.directory / endpoint
        channel = grpc.aio.insecure_channel(f"unix:{socket}", options=_CHANNEL_OPTIONS)
        plugin = _Endpoint(
            socket, channel, pb_grpc.DevicePluginStub(channel),
            bool(options.get_preferred_allocation_available), bool(options.pre_start_required),
        )  # fmt: skip
        self._endpoints[resource] = plugin
        (self._pre_start.add if plugin.pre_start else self._pre_start.discard)(resource)
        plugin.task = asyncio.create_task(self._follow(resource, plugin), name=f"devices-{resource}")

    async def allocate(self, pod_uid: str, containers: list[tuple[str, dict[str, int], bool]]) -> None:
        """Give every container its devices. ``containers``: (name, resource -> count, is init), in order.

        A container that has its grant already keeps it. Raises :class:`AllocationRefusedError`; what was
        given to the pod before is then released.
        """
        async with self._lock:
            reusable: dict[str, list[str]] = {}
            try:
                for name, wanted, is_init in containers:
                    for resource, count in wanted.items():
                        again = reusable.setdefault(resource, [])
                        grant = self.book.find(pod_uid, name, resource)
                        if grant is None:
                            grant = await self._allocate_one(pod_uid, name, resource, count, again)
                            self.book.grants.append(grant)
                        for device in grant.device_ids:
                            if is_init and device not in again:
                                again.append(device)
                            elif not is_init and device in again:
                                again.remove(device)
            except AllocationRefusedError:
                self.book.release(pod_uid)
                raise
            finally:
                self._save()

    async def pre_start(self, pod_uid: str, container: str) -> None:
        """PreStartContainer for every resource whose plugin asked for it. Raises AllocationRefusedError."""
        for grant in self.book.of_container(pod_uid, container):
            plugin = self._endpoints.get(grant.resource)
            if grant.resource not in self._pre_start:
                continue
            if plugin is None:
                raise AllocationRefusedError(
                    "device plugin PreStartContainer rpc failed with err: "
                    f"endpoint of {grant.resource} stopped"
                )
            request = pb.PreStartContainerRequest(devices_ids=list(grant.device_ids))
            try:
                await _answered(plugin.stub.PreStartContainer(request, timeout=_CALL_TIMEOUT_S))
            except grpc.aio.AioRpcError as error:
                raise AllocationRefusedError(
                    f"device plugin PreStartContainer rpc failed with err: {rpc_text(error)}"
                ) from error

    def answers(self, pod_uid: str, container: str) -> list[Any]:
        """The plugins' ContainerAllocateResponses for a container."""
        return [
            pb.ContainerAllocateResponse.FromString(grant.answer)
            for grant in self.book.of_container(pod_uid, container)
        ]

    def release(self, pod_uid: str) -> None:
        """The pod has ended: its devices are free again."""
        if any(grant.pod_uid == pod_uid for grant in self.book.grants):
            self.book.release(pod_uid)
            self._save()

    async def _allocate_one(
        self, pod_uid: str, container: str, resource: str, count: int, reusable: list[str]
    ) -> Grant:
        available, must = self.book.candidates(resource, count, reusable)
        plugin = self._endpoints.get(resource)
        if plugin is None:
            raise AllocationRefusedError(f"no device plugin is registered for {resource}")
        preferred: list[str] = []
        if plugin.prefers:
            preferred = await self._preferred(plugin, available, must, count)
        chosen = self.book.choose(available, must, count, preferred)
        request = pb.AllocateRequest(
            container_requests=[pb.ContainerAllocateRequest(devices_ids=list(chosen))]
        )
        try:
            answer = await _answered(plugin.stub.Allocate(request, timeout=_CALL_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            raise AllocationRefusedError(f"{rpc_text(error)}, which is unexpected") from error
        if len(answer.container_responses) != 1:
            raise AllocationRefusedError(
                f"the plugin of {resource} answered for {len(answer.container_responses)} containers, not 1"
            )
        return Grant(pod_uid, container, resource, chosen, answer.container_responses[0].SerializeToString())

    @staticmethod
    async def _preferred(plugin: _Endpoint, available: list[str], must: list[str], count: int) -> list[str]:
        request = pb.PreferredAllocationRequest(
            container_requests=[
                pb.ContainerPreferredAllocationRequest(
                    available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=count
                )
            ]
        )
        try:
            answer = await _answered(plugin.stub.GetPreferredAllocation(request, timeout=_CALL_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            raise AllocationRefusedError(f"{rpc_text(error)}, which is unexpected") from error
        if not answer.container_responses:
            return []
        return list(answer.container_responses[0].deviceIDs)

    async def _follow(self, resource: str, plugin: _Endpoint) -> None:
        """Read one plugin's ListAndWatch until it ends; its devices are unhealthy from then on."""
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await plugin.channel.channel_ready()
            async for update in plugin.stub.ListAndWatch(pb.Empty()):
                self.book.replace(
                    resource,
                    {device.ID: device.health for device in update.devices},
                    {
                        device.ID: tuple(node.ID for node in device.topology.nodes)
                        for device in update.devices
                    },
                )
                self._save()
                self._changed()
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            _LOG.info("plugin of %s ended: %s", resource, error)
        if self._endpoints.get(resource) is plugin:
            del self._endpoints[resource]
            self.book.lose(resource)
            self._changed()
            await plugin.channel.close()

    async def _drop(self, resource: str) -> None:
        plugin = self._endpoints.pop(resource, None)
        if plugin is None:
            return
        if plugin.task is not None:
            plugin.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await plugin.task
        await plugin.channel.close()
        self.book.lose(resource)
        self._changed()

    def _save(self) -> None:
        data = self.book.to_json()
        for entry in data["Data"]["PodDeviceEntries"]:
            entry["AllocResp"] = base64.b64encode(entry["AllocResp"]).decode()
        path = self.directory / CHECKPOINT
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(data))
        temporary.replace(path)

    def _load(self) -> None:
        path = self.directory / CHECKPOINT
        if not path.exists():
            return
        try:
            data = msgspec.json.decode(path.read_bytes())
            for entry in data["Data"]["PodDeviceEntries"]:
                entry["AllocResp"] = base64.b64decode(entry["AllocResp"])
            self.book.load_json(data)
        except (ValueError, KeyError, TypeError, msgspec.DecodeError) as error:
            _LOG.warning("checkpoint %s is unusable and is started anew: %s", path, error)
            self.book = DeviceBook()


class _Registration:
    """The gRPC servicer of ``v1beta1.Registration``."""

    def __init__(self, manager: DeviceManager) -> None:
        self._manager = manager

    async def Register(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        try:
            await self._manager.register(
                request.version, request.endpoint, request.resource_name, request.options
            )
        except ValueError as error:
            await context.abort(grpc.StatusCode.UNKNOWN, str(error))
        return pb.Empty()


async def _answered(call: Any) -> Any:
    """The answer of a plugin. grpc cancels a call whose channel is closed (the plugin has registered anew);
    the caller is not cancelled by that and is told what Go's client says."""
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise AllocationRefusedError(
            "rpc error: code = Canceled desc = grpc: the client connection is closing, which is unexpected"
        ) from None


def rpc_text(error: Any) -> str:
    """A gRPC error in Go's words, as users see it in pod messages."""
    name = "".join(part.capitalize() for part in str(error.code().name).split("_"))
    return f"rpc error: code = {name} desc = {error.details()}"
