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
from dataclasses import replace
from typing import Any, Final

import grpc
import grpc.aio

from hami.node.api import deviceplugin_v1beta1_pb2 as pb
from hami.node.api import deviceplugin_v1beta1_pb2_grpc as rpc
from hami.node.config import Settings
from hami.node.errors import NoBindingPodError, NodeError, UnsafePathError
from hami.node.files import kind_name
from hami.node.hostpid.gate import gate_is_on
from hami.node.plugin.allocator import Allocator
from hami.node.plugin.answer import Answer, Delivery
from hami.node.plugin.board import Board
from hami.node.plugin.counters import PluginCounters
from hami.node.plugin.inventory import FakeDevice, fake_devices, offered_cards
from hami.node.plugin.preferred import Choice
from hami.node.plugin.rival import check_unserved
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
        self._ended = False
        self.counters = PluginCounters()

    def end_streams(self) -> None:
        """Let kubelet's streams of devices end: a server that stops waits for them."""
        self._ended = True
        self._board.wake()

    @property
    def options(self) -> Any:
        """What Register and GetDevicePluginOptions say."""
        return pb.DevicePluginOptions(
            pre_start_required=self.pre_start_required,
            get_preferred_allocation_available=self._settings.preferred_allocation,
        )

    @property
    def delivery(self) -> Delivery:
        """What goes into an answer now: the broker only as long as this process's environment has its gate
        on.
        """
        return replace(self._delivery, broker=self._delivery.broker and gate_is_on(os.environ))

    async def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        return self.options

    async def ListAndWatch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802, ARG002
        sent: Any = None
        version = self._board.version
        while not self._ended:
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
            with self.counters.allocation():
                answers = await self._allocator.allocate(requests, self._settings, self.delivery)
        except NoBindingPodError as error:
            log.warning("allocate.no_pod", extra={"cause": str(error)})
            await context.abort(grpc.StatusCode.UNKNOWN, str(error))
        except HamiError as error:
            await context.abort(grpc.StatusCode.UNKNOWN, str(error))
        return pb.AllocateResponse(container_responses=[container_response(answer) for answer in answers])

    async def PreStartContainer(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        return pb.PreStartContainerResponse()

    def _devices(self) -> Any:
        offered = fake_devices(offered_cards(self._board.cards, self._settings), self._settings)
        return pb.ListAndWatchResponse(devices=[device_message(device) for device in offered])


class PluginServer:
    """One gRPC server on one socket below the kubelet's directory."""

    def __init__(self, service: PluginService, socket_path: str) -> None:
        self._service = service
        self.socket_path = socket_path
        self._server: Any = None
        self._inode = 0

    async def start(self) -> None:
        """Serve, and return once a client connection to ourselves succeeds (5 s).

        Raises :class:`UnsafePathError` when something other than a socket is in the way,
        :class:`OtherPluginError` when another program serves it, :class:`NodeError` when serving fails.
        """
        check_unserved(self.socket_path)
        _clear_socket(self.socket_path)
        # When gRPC ends it removes whatever lies at the path it was given, also the socket of a plugin that
        # has taken our place. So it gets a path of its own.
        private = posixpath.join(posixpath.dirname(self.socket_path), f".{os.getpid()}.sock")
        server = grpc.aio.server(options=_OPTIONS)
        rpc.add_DevicePluginServicer_to_server(self._service, server)
        try:
            _clear_socket(private)
            server.add_insecure_port(f"unix:{private}")
            await server.start()
        except RuntimeError as error:
            raise NodeError(f"cannot serve on {self.socket_path}: {error}") from error
        self._server = server
        os.rename(private, self.socket_path)  # noqa: PTH104
        self._inode = os.lstat(self.socket_path).st_ino
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
        if server is None:
            return
        with contextlib.suppress(FileNotFoundError):
            # as long as we serve it nobody else's socket has this inode
            if os.lstat(self.socket_path).st_ino == self._inode:
                os.unlink(self.socket_path)  # noqa: PTH108
        self._service.end_streams()
        await server.stop(grace=0.5)


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


def device_message(device: FakeDevice) -> Any:
    """A device as kubelet reads it."""
    topology = None
    if device.numa is not None:
        topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=device.numa)])
    return pb.Device(ID=device.id, health=HEALTHY if device.healthy else UNHEALTHY, topology=topology)


def container_response(answer: Answer) -> Any:
    """An answer as kubelet reads it."""
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
        annotations=dict(answer.annotations),
        cdi_devices=[pb.CDIDevice(name=name) for name in answer.cdi_devices],
    )
