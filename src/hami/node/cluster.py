"""What the node components ask of the API server, behind one Protocol, and its implementation on
``hami.kube``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from hami.kube.client import Client
from hami.kube.events import EventRecorder, ObjectRef
from hami.kube.operations import list_pages, patch_metadata, pods_of_node
from hami.kube.resources import NODES, PODS
from hami.protocol.views import Node, Pod, decode

EventType = Literal["Normal", "Warning"]
_TIMEOUT_S = 8.0


class Cluster(Protocol):
    """The API server as the node sees it. Methods raise :class:`hami.kube.errors.KubeError`."""

    node_name: str

    async def node(self) -> Node:
        """This node, a quorum read."""
        ...

    async def pods(self) -> list[Pod]:
        """All pods bound to this node, a quorum read."""
        ...

    async def pod(self, namespace: str, name: str) -> Pod:
        """One pod, a quorum read; raises ``NotFound``."""
        ...

    async def annotate_pod(
        self, pod: Pod, annotations: Mapping[str, str | None], resource_version: str = ""
    ) -> None:
        """Merge annotations into that very pod (by UID); None removes a key. With ``resource_version`` only
        if it has not changed since (``Conflict``).
        """
        ...

    async def annotate_node(self, annotations: Mapping[str, str | None], resource_version: str = "") -> None:
        """Merge annotations into this node; with ``resource_version`` only if it has not changed since."""
        ...

    def pod_event(self, pod: Pod, type_: EventType, reason: str, message: str) -> None:
        """Raise an event on a pod; never blocks, never fails."""
        ...

    def node_event(self, type_: EventType, reason: str, message: str) -> None:
        """Raise an event on this node; never blocks, never fails."""
        ...


class KubeCluster:
    """:class:`Cluster` on a client and an event recorder, which the caller runs and closes."""

    def __init__(self, client: Client, recorder: EventRecorder, node_name: str) -> None:
        self.node_name = node_name
        self._client = client
        self._recorder = recorder

    async def node(self) -> Node:
        return decode(await self._client.get(NODES, self.node_name, msgspec.Raw, timeout_s=_TIMEOUT_S), Node)

    async def pods(self) -> list[Pod]:
        found: list[Pod] = []
        async for page in list_pages(self._client, PODS, pods_of_node(self.node_name)):
            found += [decode(item, Pod) for item in page.items]
        return found

    async def pod(self, namespace: str, name: str) -> Pod:
        raw = await self._client.get(PODS, name, msgspec.Raw, namespace=namespace, timeout_s=_TIMEOUT_S)
        return decode(raw, Pod)

    async def annotate_pod(
        self, pod: Pod, annotations: Mapping[str, str | None], resource_version: str = ""
    ) -> None:
        await patch_metadata(
            self._client,
            PODS,
            pod.name,
            namespace=pod.namespace,
            annotations=annotations,
            resource_version=resource_version,
            uid=pod.uid,
            timeout_s=_TIMEOUT_S,
        )

    async def annotate_node(self, annotations: Mapping[str, str | None], resource_version: str = "") -> None:
        await patch_metadata(
            self._client,
            NODES,
            self.node_name,
            annotations=annotations,
            resource_version=resource_version,
            timeout_s=_TIMEOUT_S,
        )

    def pod_event(self, pod: Pod, type_: EventType, reason: str, message: str) -> None:
        self._recorder.record(ObjectRef("Pod", pod.name, pod.namespace, pod.uid), type_, reason, message)

    def node_event(self, type_: EventType, reason: str, message: str) -> None:
        self._recorder.record(ObjectRef("Node", self.node_name, uid=self.node_name), type_, reason, message)
