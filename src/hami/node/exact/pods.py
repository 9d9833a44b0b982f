"""The pods of this node as the plugin's own watch shows them."""

from __future__ import annotations

from typing import Protocol

import msgspec

from hami.kube.client import Client
from hami.kube.informer import Informer, Unheard
from hami.kube.operations import pods_of_node
from hami.kube.resources import PODS
from hami.protocol.views import Pod


class PodSource(Protocol):
    """Copies of the pods bound to this node, as of the last event seen."""

    def seen(self, namespace: str, name: str) -> Pod | None:
        """The pod, None if the watch has not shown it."""
        ...

    def all(self) -> list[Pod]:
        """Every pod seen."""
        ...

    async def synced(self) -> None:
        """Return once every pod that was bound before has been seen."""
        ...

    async def run(self) -> None:
        """Follow the API server; ends only by cancellation."""
        ...


class WatchedPods:
    """:class:`PodSource` on an informer."""

    def __init__(self, client: Client, node_name: str) -> None:
        self._informer: Informer[Pod] = Informer(
            client, PODS, msgspec.json.Decoder(Pod).decode, Unheard(), pods_of_node(node_name)
        )

    def seen(self, namespace: str, name: str) -> Pod | None:
        return self._informer.get(name, namespace)

    def all(self) -> list[Pod]:
        return self._informer.values()

    async def synced(self) -> None:
        await self._informer.synced.wait()

    async def run(self) -> None:
        await self._informer.run()
