from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from hami.kube.auth import Credential
from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.kube.errors import (
    AlreadyExists,
    ApiError,
    Conflict,
    DecodeError,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
    ResponseTooLarge,
    ServerError,
    TooManyRequests,
    TransportError,
    Unauthorized,
)
from hami.kube.operations import Page, Selection, bind_pod, list_pages, patch_metadata, read_ahead
from hami.kube.resources import LEASES, NODES, PODS


class Tokens:
    """A credential source that hands out a new token after each refusal."""

    def __init__(self) -> None:
        self.number = 1

    async def current(self) -> Credential:
        return Credential(f"Bearer t{self.number}")

    def invalidate(self) -> None:
        self.number += 1


def status(code: int, reason: str, message: str = "because") -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "code": code, "reason": reason, "message": message}


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (401, "Unauthorized", Unauthorized),
        (403, "Forbidden", Forbidden),
        (404, "NotFound", NotFound),
        (409, "Conflict", Conflict),
        (409, "AlreadyExists", AlreadyExists),
        (410, "Expired", Gone),
        (422, "Invalid", Invalid),
        (500, "InternalError", ServerError),
        (503, "ServiceUnavailable", ServerError),
        (418, "Teapot", ApiError),
    ],
)
async def test_an_error_status_becomes_its_type(
    api: Any, client: Client, code: int, reason: str, kind: type[ApiError]
) -> None:
    api.answer("GET", "/api/v1/nodes/n1", status(code, reason), status=code)
    with pytest.raises(kind) as caught:
        await client.get(NODES, "n1", dict)
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.reason, caught.value.message) == (code, reason, "because")


async def test_an_error_body_that_is_no_status_is_quoted(api: Any, client: Client) -> None:
    async def respond(_: web.Request) -> web.StreamResponse:
        return web.Response(status=502, body=b"\xffbad gateway")

    api.on("GET", "/api/v1/nodes/n1", respond)
    with pytest.raises(ServerError, match="bad gateway"):
        await client.get(NODES, "n1", dict)


async def test_429_is_repeated_after_the_servers_wish(api: Any, client: Client) -> None:
    api.on(
        "GET",
        "/api/v1/nodes/n1",
        api.json(status(429, "TooManyRequests"), 429, {"Retry-After": "0"}),
        api.json({"metadata": {"name": "n1"}}),
    )
    assert (await client.get(NODES, "n1", dict))["metadata"]["name"] == "n1"
    assert api.count("GET", "/api/v1/nodes/n1") == 2


async def test_429_with_a_wish_beyond_the_time_left_is_reported_at_once(api: Any, client: Client) -> None:
    refusal = status(429, "TooManyRequests")
    api.answer("GET", "/api/v1/nodes/n1", refusal, status=429, headers={"Retry-After": "3000"})
    with pytest.raises(TooManyRequests) as caught:
        await client.get(NODES, "n1", dict)
    assert caught.value.retry_after_s == 3000
    assert api.count("GET", "/api/v1/nodes/n1") == 1


async def test_401_is_repeated_once_with_a_fresh_credential(api: Any) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        if request.headers["Authorization"] == "Bearer t2":
            return web.json_response({"ok": True})
        return web.json_response(status(401, "Unauthorized"), status=401)

    api.on("GET", "/api/v1/nodes/n1", respond)
    async with Client(ClientConfig(api.url, Tokens()), Limits(qps=0)) as client:
        assert await client.get(NODES, "n1", dict) == {"ok": True}
    assert [seen.headers["Authorization"] for seen in api.seen] == ["Bearer t1", "Bearer t2"]


async def test_a_silent_server_is_a_transport_error_not_a_hang(api: Any) -> None:
    async def respond(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    api.on("GET", "/api/v1/nodes/n1", respond)
    async with Client(ClientConfig(api.url), Limits(qps=0, timeout_s=0.1)) as client:
        with pytest.raises(TransportError, match=r"no answer within 0.1s"):
            await client.get(NODES, "n1", dict)


async def test_a_refused_connection_is_a_transport_error() -> None:
    async with Client(ClientConfig("http://127.0.0.1:1"), Limits(qps=0)) as client:
        with pytest.raises(TransportError):
            await client.get(NODES, "n1", dict)


async def test_an_answer_over_the_limit_is_refused(api: Any) -> None:
    api.answer("GET", "/api/v1/nodes/n1", {"big": "x" * 5000})
    async with Client(ClientConfig(api.url), Limits(qps=0, max_object_bytes=1000)) as client:
        with pytest.raises(ResponseTooLarge):
            await client.get(NODES, "n1", dict)


async def test_an_answer_of_the_wrong_shape_is_a_decode_error(api: Any, client: Client) -> None:
    api.answer("GET", "/api/v1/nodes/n1", ["not", "an", "object"])
    with pytest.raises(DecodeError):
        await client.get(NODES, "n1", dict)


async def test_redirects_are_not_followed(api: Any, client: Client) -> None:
    api.answer("GET", "/api/v1/nodes/n1", {}, status=302, headers={"Location": "/api/v1/nodes/n2"})
    with pytest.raises(ApiError):
        await client.get(NODES, "n1", dict)
    assert api.count("GET", "/api/v1/nodes/n2") == 0


async def test_names_cannot_change_the_path(api: Any, client: Client) -> None:
    with pytest.raises(NotFound):
        await client.get(PODS, "../../nodes/n1", dict, namespace="a")
    assert not any(seen.path == "/api/v1/nodes/n1" for seen in api.seen)
    with pytest.raises(ValueError, match="needs a namespace"):
        await client.get(PODS, "p", dict)


async def test_a_list_is_read_page_by_page(api: Any, client: Client) -> None:
    pages = [
        {"metadata": {"resourceVersion": "7", "continue": "c1"}, "items": [{"n": 1}, {"n": 2}]},
        {"metadata": {"resourceVersion": "7", "continue": "c2"}, "items": [{"n": 3}]},
        {"metadata": {"resourceVersion": "7"}, "items": None},
    ]
    api.answer("GET", "/api/v1/pods", *pages)
    requested = []
    sizes = []
    async for page in list_pages(client, PODS, Selection(field_selector="spec.nodeName=n1"), page_size=2):
        requested.append(len(api.seen))
        sizes.append(len(page.items))
        assert page.resource_version == "7"
    assert sizes == [2, 1, 0]
    assert requested == [1, 2, 3], "a page is requested only after the one before was consumed"
    assert [seen.query.get("continue") for seen in api.seen] == [None, "c1", "c2"]
    assert all(seen.query["fieldSelector"] == "spec.nodeName=n1" for seen in api.seen)
    assert all("resourceVersion" not in seen.query for seen in api.seen), "a quorum read"


async def test_ahead_of_its_consumer_the_next_page_is_read_and_no_further_one() -> None:
    produced: list[int] = []
    closed = asyncio.Event()

    async def three() -> AsyncGenerator[Page, None]:
        try:
            for number in range(3):
                produced.append(number)
                yield Page([], str(number))
        finally:
            closed.set()

    pages = read_ahead(three())
    seen = []
    async for page in pages:
        for _ in range(5):
            await asyncio.sleep(0)
        seen.append((page.resource_version, list(produced)))
    assert seen == [("0", [0, 1]), ("1", [0, 1, 2]), ("2", [0, 1, 2])]
    assert closed.is_set()


async def test_a_failure_ahead_is_raised_after_the_page_before_it() -> None:
    async def failing() -> AsyncGenerator[Page, None]:
        yield Page([], "1")
        raise Gone(410, "Expired", "too old")

    pages = read_ahead(failing())
    assert (await anext(pages)).resource_version == "1"
    with pytest.raises(Gone):
        await anext(pages)


async def test_reading_ahead_ends_with_its_consumer() -> None:
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def endless() -> AsyncGenerator[Page, None]:
        yield Page([], "1")
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with contextlib.aclosing(read_ahead(endless())) as pages:
        async for _ in pages:
            await asyncio.wait_for(asked.wait(), 60)
            break
    assert cancelled.is_set()


async def test_a_page_that_is_too_large_is_asked_for_in_smaller_pieces(api: Any) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        count = min(10, int(request.query["limit"]))
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": [{"x": "y" * 1000}] * count})

    api.on("GET", "/api/v1/pods", respond)
    async with Client(ClientConfig(api.url), Limits(qps=0, max_page_bytes=6000)) as client:
        items = [item async for page in list_pages(client, PODS) for item in page.items]
    assert 1 <= len(items) <= 5


async def test_a_binding_carries_uid_annotations_and_labels(api: Any, client: Client) -> None:
    path = "/api/v1/namespaces/team-a/pods/train-0/binding"
    api.answer("POST", path, {"kind": "Status", "status": "Success"}, status=201)
    await bind_pod(
        client,
        namespace="team-a",
        name="train-0",
        uid="u1",
        node="n2",
        annotations={"a": "1"},
        labels={"l": "2"},
    )
    assert api.seen[0].json() == {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {
            "name": "train-0",
            "namespace": "team-a",
            "uid": "u1",
            "annotations": {"a": "1"},
            "labels": {"l": "2"},
        },
        "target": {"apiVersion": "v1", "kind": "Node", "name": "n2"},
    }


async def test_a_metadata_patch_is_a_merge_patch_with_its_version(api: Any, client: Client) -> None:
    api.answer("PATCH", "/api/v1/nodes/n1", status(409, "Conflict"), status=409)
    with pytest.raises(Conflict):
        await patch_metadata(client, NODES, "n1", annotations={"k": None}, resource_version="41", uid="u")
    assert api.seen[0].headers["Content-Type"] == "application/merge-patch+json"
    expected = {"annotations": {"k": None}, "resourceVersion": "41", "uid": "u"}
    assert api.seen[0].json() == {"metadata": expected}


async def test_create_and_delete(api: Any, client: Client) -> None:
    leases = "/apis/coordination.k8s.io/v1/namespaces/a/leases"
    api.answer("POST", leases, {"metadata": {"name": "l"}}, status=201)
    api.answer("DELETE", f"{leases}/l", {"status": "Success"})
    made = await client.create(LEASES, {"metadata": {"name": "l"}}, msgspec.Raw, namespace="a")
    assert b'"l"' in bytes(made)
    await client.delete(LEASES, "l", namespace="a", uid="u")
    assert api.seen[1].json() == {"preconditions": {"uid": "u"}}
