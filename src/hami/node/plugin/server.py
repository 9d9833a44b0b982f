"""The gRPC side towards kubelet: device plugin API v1beta1 on a Unix socket, and registration with
kubelet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import posixpath
import stat
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import grpc.aio

from hami.node.api import deviceplugin_v1beta1_pb2 as pb
from hami.node.api import deviceplugin_v1beta1_pb2_grpc as rpc
from hami.node.config import Settings
from hami.node.errors import NoBindingPodError, NodeError, UnsafePathError
from hami.node.files import kind_name
from hami.node.plugin.allocator import Allocator
from hami.node.plugin.answer import Answer, Delivery
from hami.node.plugin.board import Board
from hami.node.plugin.inventory import FakeDevice, fake_devices, offered_cards
from hami.node.plugin.preferred import Choice
from hami.protocol.errors import HamiError

API_VERSION: Final = "v1beta1"
HEALTHY: Final = "Healthy"
UNHEALTHY: Final = "Unhealthy"
DIAL_LIMIT_S: Final = 5.0
_MAX_MESSAGE: Final = 16 << 20
_OPTIONS: Final = (("grpc.max_send_message_length", _MAX_MESSAGE),)

log = logging.getLogger(__name__)


class RegisterError(NodeError):
    """Kubelet did not take the registration."""


class PluginService(rpc.DevicePluginServicer):  # type: ignore[misc]
    """The five calls of kubelet, for one resource (mode ``lock``)."""

    pre_start_required = False

    def __init__(self, allocator: Allocator, board: Board, settings: Settings, delivery: Delivery) -> None:
        self._allocator = allocator
        self._board = board
        self._settings = settings
        self._delivery = delivery

    @property
    def options(self) -> Any:
        """What Register and GetDevicePluginOptions say."""
        return pb.DevicePluginOptions(
            pre_start_required=self.pre_start_required,
            get_preferred_allocation_available=self._settings.preferred_allocation,
        )

    async def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        return self.options

    async def ListAndWatch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802, ARG002
        sent: Any = None
        version = self._board.version
        while True:
            answer = self._devices()
            if answer != sent:
                sent = answer
                yield answer
            version = await self._board.wait_beyond(version)

    async def GetPreferredAllocation(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        choices = [
            Choice(
                tuple(container.available_deviceIDs),
                tuple(container.must_include_deviceIDs),
                container.allocation_size,
            )
            for container in request.container_requests
        ]
        preferred = await self._allocator.preferred(choices)
        return pb.PreferredAllocationResponse(
            container_responses=[pb.ContainerPreferredAllocationResponse(deviceIDs=ids) for ids in preferred]
        )

    async def Allocate(self, request: Any, context: Any) -> Any:  # noqa: N802
        requests = [tuple(container.devices_ids) for container in request.container_requests]
        try:
            answers = await self._allocator.allocate(requests, self._settings, self._delivery)
        except NoBindingPodError as error:
            log.warning("allocate.no_pod", extra={"cause": str(error)})
            await context.abort(grpc.StatusCode.UNKNOWN, str(error))
        except HamiError as error:
            await context.abort(grpc.StatusCode.UNKNOWN, str(error))
        return pb.AllocateResponse(container_responses=[_container_response(answer) for answer in answers])

    async def PreStartContainer(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        return pb.PreStartContainerResponse()

    def _devices(self) -> Any:
        offered = fake_devices(offered_cards(self._board.cards, self._settings), self._settings)
        return pb.ListAndWatchResponse(devices=[_device(device) for device in offered])


class PluginServer:
    """One gRPC server on one socket below the kubelet's directory."""

    def __init__(self, service: PluginService, socket_path: str) -> None:
        self._service = service
        self.socket_path = socket_path
        self._server: Any = None

    async def start(self) -> None:
        """Serve, and return once a client connection to ourselves succeeds (5 s).

        Raises :class:`UnsafePathError` when something other than a socket is in the way, :class:`NodeError`
        when serving fails.
        """
        _clear_socket(self.socket_path)
        server = grpc.aio.server(options=_OPTIONS)
        rpc.add_DevicePluginServicer_to_server(self._service, server)
        try:
            server.add_insecure_port(f"unix:{self.socket_path}")
            await server.start()
        except RuntimeError as error:
            raise NodeError(f"cannot serve on {self.socket_path}: {error}") from error
        self._server = server
        try:
            async with asyncio.timeout(DIAL_LIMIT_S), _dial(self.socket_path) as channel:
                await channel.channel_ready()
        except TimeoutError as error:
            await self.stop()
            raise NodeError(f"cannot reach our own socket {self.socket_path}") from error

    async def register(self, kubelet_socket: str, resource: str) -> None:
        """Register with kubelet; raises :class:`RegisterError`."""
        request = pb.RegisterRequest(
            version=API_VERSION,
            endpoint=posixpath.basename(self.socket_path),
            resource_name=resource,
            options=self._service.options,
        )
        try:
            async with _dial(kubelet_socket) as channel:
                await rpc.RegistrationStub(channel).Register(request, timeout=DIAL_LIMIT_S)
        except grpc.RpcError as error:
            raise RegisterError(f"kubelet refuses {resource}: {_details(error)}") from error
        log.info("kubelet.registered", extra={"resource": resource, "endpoint": request.endpoint})

    async def stop(self) -> None:
        """End every stream and remove the socket; safe to call twice."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace=0.5)
        with contextlib.suppress(FileNotFoundError, UnsafePathError):
            _clear_socket(self.socket_path)


@contextlib.asynccontextmanager
async def _dial(socket_path: str) -> AsyncIterator[Any]:
    # A Unix socket has no host name; without this grpc takes the escaped path for the authority.
    channel = grpc.aio.insecure_channel(
        f"unix:{socket_path}", options=(("grpc.default_authority", "localhost"),)
    )
    try:
        yield channel
    finally:
        await channel.close()


def _clear_socket(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UnsafePathError(f"{path} is a {kind_name(mode)}, not a socket")
    os.unlink(path)  # noqa: PTH108


def _details(error: Any) -> str:
    details = getattr(error, "details", None)
    text = details() if callable(details) else ""
    return str(text or error)


def _device(device: FakeDevice) -> Any:
    topology = None
    if device.numa is not None:
        topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=device.numa)])
    return pb.Device(ID=device.id, health=HEALTHY if device.healthy else UNHEALTHY, topology=topology)


def _container_response(answer: Answer) -> Any:
    return pb.ContainerAllocateResponse(
        envs=dict(answer.env),
        mounts=[
            pb.Mount(
                container_path=mount.container_path, host_path=mount.host_path, read_only=mount.read_only
            )
            for mount in answer.mounts
        ],
        devices=[
            pb.DeviceSpec(container_path=node.container_path, host_path=node.host_path, permissions="rw")
            for node in answer.devices
        ],
    )
