"""A second handler that is told of everything while the first goes on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from local_harness import add_pod, until

from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.kube.informer import Informer
from hami.kube.resources import PODS
from hami.local.api.apiserver import ApiServer
from hami.protocol.views import Metadata, Pod, decode


class Log:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_add(self, pod: Pod) -> None:
        self.calls.append(f"+{pod.name}")

    def on_update(self, _old: Pod, pod: Pod) -> None:
        self.calls.append(f"~{pod.name}")

    def on_delete(self, pod: Pod) -> None:
        self.calls.append(f"-{pod.name}")


def metadata(pod: Pod) -> Metadata:
    return pod.metadata


async def label(client: Client, name: str, value: str) -> None:
    patch = {"metadata": {"labels": {"v": value}}}
    await client.patch(PODS, name, patch, msgspec.Raw, namespace="default")


@pytest.fixture
async def client(embedded_api: ApiServer) -> AsyncIterator[Client]:
    async with Client(ClientConfig(embedded_api.url), Limits(qps=0)) as made:
        yield made


@asynccontextmanager
async def following(client: Client, log: Log, **options: Any) -> AsyncIterator[Informer[Pod]]:
    informer = Informer(
        client, PODS, lambda raw: decode(raw, Pod), log, rng=random.Random(0), page_size=2, **options
    )
    running = asyncio.create_task(informer.run())
    try:
        await informer.synced.wait()
        yield informer
    finally:
        running.cancel()
        await asyncio.wait({running})


@pytest.mark.parametrize("options", [{}, {"identity": metadata}])
async def test_it_knows_all_there_is_and_then_every_change(client: Client, options: Any) -> None:
    for name in "abc":
        await add_pod(client, name)
    first, second = Log(), Log()
    async with following(client, first, **options) as informer:
        await informer.tell(second)
        assert sorted(second.calls) == ["+a", "+b", "+c"]
        assert sorted(first.calls) == ["+a", "+b", "+c"], "it knew them"
        second.calls.clear()
        await label(client, "a", "1")
        await client.delete(PODS, "b", namespace="default")
        await add_pod(client, "d")
        await until(lambda: "+d" in second.calls)
        assert [call for call in second.calls if call[0] != "~"] == ["-b", "+d"]
        assert "~a" in second.calls
        informer.tell_no_more()
        second.calls.clear()
        await add_pod(client, "e")
        await until(lambda: "+e" in first.calls)
        assert second.calls == []


async def test_a_change_that_only_the_list_shows_reaches_both(client: Client) -> None:
    await add_pod(client, "a")
    first, second = Log(), Log()
    async with following(client, first) as informer:
        telling = asyncio.create_task(informer.tell(second))
        await add_pod(client, "b")
        await telling
        await until(lambda: "+b" in first.calls and "+b" in second.calls)
        assert first.calls.count("+b") == 1


async def test_a_handler_that_fails_stops_neither_the_informer_nor_the_other(client: Client) -> None:
    await add_pod(client, "a")

    class Broken(Log):
        def on_add(self, pod: Pod) -> None:
            raise KeyError(pod.name)

    first = Log()
    async with following(client, first) as informer:
        await informer.tell(Broken())
        await add_pod(client, "b")
        await until(lambda: "+b" in first.calls)
        assert informer.counters.handler_errors >= 2
