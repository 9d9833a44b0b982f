"""The gRPC side of static MIG: one resource, whose devices kubelet itself hands out. No pod is looked up and
nothing is written.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import grpc

from hami.node.api import deviceplugin_v1beta1_pb2 as pb
from hami.node.config import Settings
from hami.node.errors import AllocateError
from hami.node.mig.static import StaticDevice, kubelet_ids, requested
from hami.node.plugin.allocator import Allocator
from hami.node.plugin.answer import Delivery, base_response
from hami.node.plugin.board import Board
from hami.node.plugin.inventory import FakeDevice
from hami.node.plugin.server import PluginService, container_response, device_message

log = logging.getLogger(__name__)


class StaticMigService(PluginService):
    """The five calls of kubelet for the MIG devices of one resource; in both allocation modes."""

    def __init__(
        self,
        allocator: Allocator,
        board: Board,
        settings: Settings,
        delivery: Delivery,
        resource: str,
        devices: Sequence[StaticDevice],
    ) -> None:
        super().__init__(allocator, board, settings, delivery)
        self._resource = resource
        self._mig_devices = {device.uuid: device for device in devices}

    @property
    def options(self) -> Any:
        return pb.DevicePluginOptions()

    async def GetPreferredAllocation(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        return pb.PreferredAllocationResponse()

    async def Allocate(self, request: Any, context: Any) -> Any:  # noqa: N802
        sharing = self._settings.sharing
        try:
            answers = [
                base_response(requested(item.devices_ids, self._mig_devices, sharing), self.delivery)
                for item in request.container_requests
            ]
        except AllocateError as error:
            log.warning("mig.refused", extra={"resource": self._resource, "cause": str(error)})
            await context.abort(grpc.StatusCode.UNKNOWN, str(error))
        return pb.AllocateResponse(container_responses=[container_response(answer) for answer in answers])

    def _devices(self) -> Any:
        """Always with the NUMA node; unhealthy with its card or on its own."""
        faults = self._board.faults
        replicas = self._settings.sharing.replicas(self._resource)
        offered = [
            FakeDevice(id_, device.uuid not in faults and device.parent not in faults, device.numa)
            for device in self._mig_devices.values()
            for id_ in kubelet_ids((device.uuid,), replicas)
        ]
        return pb.ListAndWatchResponse(devices=[device_message(device) for device in offered])
