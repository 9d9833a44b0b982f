"""The gRPC side of mode ``exact`` towards kubelet."""

from __future__ import annotations

import logging
from typing import Any

import grpc

from hami.node.api import deviceplugin_v1beta1_pb2 as pb
from hami.node.config import Settings
from hami.node.exact.allocator import Call, ExactAllocator
from hami.node.exact.errors import NotYetError, RefusedError
from hami.node.plugin.allocator import Allocator
from hami.node.plugin.answer import Delivery
from hami.node.plugin.board import Board
from hami.node.plugin.server import PluginService
from hami.protocol.errors import HamiError

log = logging.getLogger(__name__)


class ExactService(PluginService):
    """The five calls of kubelet for one resource. Preferred ids are a hint only: cards and limits come from
    the pod's annotation, whatever ids kubelet takes.
    """

    pre_start_required = True

    def __init__(
        self,
        exact: ExactAllocator,
        allocator: Allocator,
        board: Board,
        settings: Settings,
        delivery: Delivery,
    ) -> None:
        super().__init__(allocator, board, settings, delivery)
        self._exact = exact

    async def Allocate(self, request: Any, context: Any) -> Any:  # noqa: N802
        try:
            names = self._exact.names([tuple(item.devices_ids) for item in request.container_requests])
        except RefusedError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return pb.AllocateResponse(
            container_responses=[
                pb.ContainerAllocateResponse(cdi_devices=[pb.CDIDevice(name=name)]) for name in names
            ]
        )

    async def PreStartContainer(self, request: Any, context: Any) -> Any:  # noqa: N802
        call = Call(
            device_ids=tuple(request.devices_ids),
            settings=self._settings,
            delivery=self.delivery,
            cards=self._board.cards,
        )
        try:
            with self.counters.allocation():
                await self._exact.prepare(call)
        except NotYetError as error:
            log.info("exact.not_yet", extra={"cause": str(error)})
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except RefusedError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except HamiError as error:
            await context.abort(grpc.StatusCode.UNKNOWN, str(error))
        return pb.PreStartContainerResponse()
