"""The informer against the embedded API server: broken watches, expired versions, restarts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from local_harness import add_pod, until

from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.kube.informer import Informer
from hami.kube.operations import Selection, patch_metadata
from hami.kube.resources import PODS
from hami.local.api.apiserver import ApiServer
from hami.protocol.views import Pod, decode


class Seen:
    """The pods that the callbacks describe; an update or deletion of an unknown pod is an error."""

    def __init__(self) -> None:
        self.pods: dict[str, str] = {}

    def on_add(self, pod: Pod) -> None:
        assert pod.name not in self.pods
        self.pods[pod.name] = pod.annotations.get("v", "")

    def on_update(self, old: Pod, pod: Pod) -> None:
        assert (old.name, old.uid) == (pod.name, pod.uid)
        assert pod.name in self.pods
        self.pods[pod.name] = pod.annotations.get("v", "")

    def on_delete(self, pod: Pod) -> None:
        del self.pods[pod.name]


@asynccontextmanager
async def following(
    api: ApiServer, selection: Selection | None = None
) -> AsyncIterator[tuple[Client, Any, Seen]]:
    seen = Seen()
    async with Client(ClientConfig(api.url), Limits(qps=0)) as client:
        informer = Informer(
            client, PODS, lambda raw: decode(raw, Pod), seen, selection, page_size=3, rng=random.Random(0)
        )
        task = asyncio.create_task(informer.run())
        try:
            yield client, informer, seen
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert informer.counters.handler_errors == 0


async def make(client: Client, *names: str) -> None:
    for name in names:
        await add_pod(client, name)


async def test_everything_is_seen_through_broken_watches(embedded_api: ApiServer) -> None:
    async with following(embedded_api) as (client, informer, seen):
        await make(client, *(f"p{number}" for number in range(10)))
        for number in range(10):
            embedded_api.drop_watches()
            await patch_metadata(
                client, PODS, f"p{number}", namespace="default", annotations={"v": str(number)}
            )
        await client.delete(PODS, "p0", namespace="default")
        await until(lambda: seen.pods == {f"p{number}": str(number) for number in range(1, 10)})
        assert informer.counters.lists == 1


async def test_an_expired_version_is_listed_again(embedded_api: ApiServer) -> None:
    async with following(embedded_api) as (client, informer, seen):
        await make(client, "a", "b")
        await until(lambda: len(seen.pods) == 2)
        embedded_api.intercept = refuse_watches
        embedded_api.drop_watches()
        await client.delete(PODS, "a", namespace="default")
        await make(client, "c")
        embedded_api.store.compact()
        embedded_api.intercept = None
        await until(lambda: sorted(seen.pods) == ["b", "c"])
        assert informer.counters.lists == 2


async def refuse_watches(request: Any) -> Any:
    if request.query.get("watch"):
        request.transport.abort()
        raise ConnectionResetError
    return None


async def test_a_fresh_read_is_passed_while_nothing_of_the_kind_changes(embedded_api: ApiServer) -> None:
    async with following(embedded_api) as (client, informer, seen):
        await make(client, "a")
        await informer.synced.wait()
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}}
        await client.request("POST", "/api/v1/nodes", body=msgspec.json.encode(node))
        async with asyncio.timeout(60.0):
            await informer.pass_fresh_read()
        assert list(seen.pods) == ["a"]


async def test_only_the_selected_pods_are_followed(embedded_api: ApiServer) -> None:
    selection = Selection("default", field_selector="metadata.name=wanted")
    async with following(embedded_api, selection) as (client, _, seen):
        await make(client, "other", "wanted")
        await until(lambda: list(seen.pods) == ["wanted"])
