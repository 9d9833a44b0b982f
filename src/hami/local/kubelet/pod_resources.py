"""The kubelet's PodResources API v1: which container holds which device IDs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc

from hami.local.api.objects import Object, dig, meta, name_of, namespace_of
from hami.local.kubelet.device_manager import DeviceManager
from hami.node.api import podresources_v1_pb2 as pb
from hami.node.api import podresources_v1_pb2_grpc as pb_grpc

CALLS_PER_S = 100.0
BURST = 10.0


class PodResourcesServer:
    """Serves ``socket`` from the device manager's book; ``pods`` gives the pods of the node.

    As with kubelet, calls beyond 100/s with a burst of 10 are answered RESOURCE_EXHAUSTED.
    """

    def __init__(self, socket: Path, manager: DeviceManager, pods: Callable[[], Iterable[Object]]) -> None:
        self._socket = socket
        self._manager = manager
        self._pods = pods
        self._server: Any = None
        self._tokens = BURST
        self._filled = time.monotonic()

    async def start(self) -> None:
        self._socket.parent.mkdir(parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        self._server = grpc.aio.server()
        pb_grpc.add_PodResourcesListerServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self._socket}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        self._socket.unlink(missing_ok=True)

    async def List(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802 - the name of the RPC
        await self._take(context)
        return pb.ListPodResourcesResponse(pod_resources=[self._of(pod) for pod in self._pods()])

    async def Get(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._take(context)
        for pod in self._pods():
            if (name_of(pod), namespace_of(pod)) == (request.pod_name, request.pod_namespace):
                return pb.GetPodResourcesResponse(pod_resources=self._of(pod))
        await context.abort(
            grpc.StatusCode.UNKNOWN, f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
        )
        return None

    async def GetAllocatableResources(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        await self._take(context)
        return pb.AllocatableResourcesResponse(
            devices=[
                _devices(resource, device, offer.numa.get(device, ()))
                for resource, offer in self._manager.book.offers.items()
                for device in offer.healthy()
            ]
        )

    async def _take(self, context: Any) -> None:
        """One call of the allowed ones; ends the call where there is none left."""
        now = time.monotonic()
        self._tokens = min(BURST, self._tokens + (now - self._filled) * CALLS_PER_S)
        self._filled = now
        if self._tokens < 1:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._tokens -= 1

    def _of(self, pod: Object) -> Any:
        """One entry per device and no ordinary init containers, as kubelet answers."""
        uid = str(meta(pod)["uid"])
        sidecars = [
            item for item in dig(pod, "spec", "initContainers") or [] if item.get("restartPolicy") == "Always"
        ]
        containers = [*sidecars, *(dig(pod, "spec", "containers") or [])]
        book = self._manager.book
        return pb.PodResources(
            name=name_of(pod),
            namespace=namespace_of(pod),
            containers=[
                pb.ContainerResources(
                    name=container["name"],
                    devices=[
                        _devices(
                            grant.resource,
                            device,
                            book.offers[grant.resource].numa.get(device, ())
                            if grant.resource in book.offers
                            else (),
                        )
                        for grant in book.of_container(uid, container["name"])
                        for device in grant.device_ids
                    ],
                )
                for container in containers
            ],
        )


def _devices(resource: str, device: str, numa: tuple[int, ...]) -> Any:
    topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=node) for node in numa]) if numa else None
    return pb.ContainerDevices(resource_name=resource, device_ids=[device], topology=topology)
