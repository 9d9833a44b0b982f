"""An API server, a proxy or a kubeconfig that answers nonsense: a typed error, and the informer goes on."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from hami.kube.auth import Credential, StaticCredential
from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.kube.errors import (
    ConfigError,
    Conflict,
    CredentialError,
    DecodeError,
    KubeError,
    error_from_response,
)
from hami.kube.events import EventRecorder, ObjectRef
from hami.kube.informer import Informer
from hami.kube.operations import list_pages
from hami.kube.resources import PODS

PATH = "/api/v1/pods"
DEEP = b"[" * 5000 + b"]" * 5000


class Silent:
    """A handler of no interest."""

    def on_add(self, obj: Any) -> None: ...

    def on_update(self, old: Any, new: Any) -> None: ...

    def on_delete(self, obj: Any) -> None: ...


def raw(body: bytes) -> Any:
    async def respond(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    return respond


@contextlib.asynccontextmanager
async def running(client: Client) -> AsyncIterator[tuple[Informer[Any], asyncio.Task[None]]]:
    informer = Informer(client, PODS, msgspec.json.Decoder(dict).decode, Silent(), rng=random.Random(0))
    task = asyncio.create_task(informer.run())
    try:
        yield informer, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    "body", [b'{"metadata":{},"items":[' + DEEP + b"]}", b'{"metadata":' + DEEP + b"}", DEEP]
)
async def test_an_answer_nested_beyond_reason_is_a_decode_error(
    api: Any, client: Client, body: bytes
) -> None:
    api.on("GET", PATH, raw(body))
    with pytest.raises(DecodeError):
        await client.json("GET", PATH, dict)
    with pytest.raises(DecodeError):
        async for _ in list_pages(client, PODS):
            pass


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"ADDED","object":{"metadata":{"name":"a"},"x":' + DEEP + b"}}\n",
        b'{"type":"ERROR","object":' + DEEP + b"}\n",
        b'{"type":"ERROR","object":{"code":null,"message":null,"reason":null}}\n',
        b"\xff\xfe\n",
    ],
)
async def test_a_senseless_watch_event_does_not_end_the_informer(
    api: Any, client: Client, line: bytes
) -> None:
    api.answer("GET", PATH, {"metadata": {"resourceVersion": "1"}, "items": []})
    api.on("WATCH", PATH, raw(line))
    async with running(client) as (informer, task), asyncio.timeout(60):
        while informer.counters.failures < 1:  # noqa: ASYNC110 -- under a time-out
            await asyncio.sleep(0.01)
        assert not task.done()


async def test_versions_that_are_no_sensible_numbers_lead_to_a_new_list(api: Any, client: Client) -> None:
    api.answer("GET", PATH, {"metadata": {"resourceVersion": "9" * 5000}, "items": []})
    api.on("WATCH", PATH, api.watch(then=asyncio.Event().wait))
    async with running(client) as (informer, _), asyncio.timeout(60):
        await informer.pass_fresh_read()
        assert informer.counters.lists == 2


async def test_a_list_that_gives_the_same_token_again_is_given_up(api: Any, client: Client) -> None:
    api.answer("GET", PATH, {"metadata": {"resourceVersion": "1", "continue": "t"}, "items": []})
    with pytest.raises(DecodeError, match="same token"):
        async for _ in list_pages(client, PODS):
            pass
    assert api.count("GET", PATH) == 2


async def test_watches_of_one_event_each_are_not_made_in_a_tight_loop(api: Any, client: Client) -> None:
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "2"}}}
    api.answer("GET", PATH, {"metadata": {"resourceVersion": "1"}, "items": []})
    api.on("WATCH", PATH, api.watch(bookmark))
    async with running(client) as (informer, _):
        await asyncio.wait_for(informer.synced.wait(), 60)
        await asyncio.sleep(0.5)
        assert informer.counters.watches <= 6


@pytest.mark.parametrize("wish", ["0", "-5", "0.0"])
async def test_a_wish_for_no_wait_is_not_followed_in_a_tight_loop(api: Any, wish: str) -> None:
    api.answer("GET", PATH, {}, status=429, headers={"Retry-After": wish})
    async with Client(ClientConfig(api.url), Limits(qps=0, timeout_s=0.55)) as client:
        with pytest.raises(KubeError):
            await client.request("GET", PATH)
    assert api.count("GET", PATH) <= 6


@pytest.mark.parametrize(("namespace", "name"), [("..", "p"), ("a", ".."), (".", "p"), ("a", ".")])
def test_a_name_that_is_a_step_in_a_path_is_refused(namespace: str, name: str) -> None:
    with pytest.raises(ValueError, match="no name of an object"):
        PODS.path(namespace, name)


async def test_an_event_about_a_nameless_thing_does_not_stop_the_recorder(api: Any, client: Client) -> None:
    api.answer("POST", "/api/v1/namespaces/a/events", {})
    recorder = EventRecorder(client, "test")
    task = asyncio.create_task(recorder.run())
    for namespace, name in (("..", "p"), ("a", "\ud800"), ("a", "good")):
        recorder.record(ObjectRef("Pod", name, namespace), "Normal", "Reason", "text")
    await recorder.flush(60)
    assert (recorder.dropped, api.count("POST", "/api/v1/namespaces/a/events")) == (2, 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_status_with_null_members_is_read() -> None:
    error = error_from_response(409, b'{"message":null,"reason":"AlreadyExists","code":null}')
    assert isinstance(error, Conflict)
    assert (error.reason, error.message) == ("AlreadyExists", "")


def test_a_long_reason_is_cut() -> None:
    assert len(str(error_from_response(403, b'{"reason":"' + b"x" * 10_000 + b'"}'))) < 200


async def test_a_token_with_a_line_break_is_a_credential_error(api: Any) -> None:
    source = StaticCredential(Credential("Bearer a\r\nX-Other: b"))
    async with Client(ClientConfig(api.url, source), Limits(qps=0)) as client:
        with pytest.raises(CredentialError, match="line breaks"):
            await client.request("GET", PATH)
    assert api.seen == []


@pytest.mark.parametrize(
    "server",
    [
        "https://[::1",
        "https://h:99999",
        "https://h:0",
        "https://:443",
        "http://h?x=1",
        "http://h#f",
        "http://h\n",
        "ftp://h",
    ],
)
def test_a_server_that_is_no_url_is_a_config_error(server: str) -> None:
    with pytest.raises(ConfigError, match="is not an http or https URL"):
        ClientConfig(server)
