"""Bugs of ours: no request goes without an answer, no part of the process ends unseen."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from hami.kube.bugs import BugLog
from hami.scheduler.edge import background
from hami.scheduler.edge.background import PartEnded, kept_up, vital
from hami.scheduler.edge.routes import metrics_routes, scheduler_routes
from hami.scheduler.edge.server import Application, listen, serve

log = logging.getLogger("test")
POD = {"metadata": {"name": "p", "namespace": "team"}}


@asynccontextmanager
async def serving(application: Application) -> AsyncIterator[str]:
    with listen("127.0.0.1:0") as sock:
        task = asyncio.create_task(serve(application, sock, None, "test"))
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class Broken:
    """Every verb fails."""

    async def filter(self, _: bytes) -> bytes:
        raise KeyError("secret detail")

    simulate = bind = filter

    def review(self, _: Any) -> Any:
        raise KeyError("secret detail")


def routes(bugs: BugLog) -> Application:
    broken: Any = Broken()
    return scheduler_routes(broken, broken, {}, 1 << 20, bugs=bugs)


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.name == "test"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/filter", {"Pod": POD, "NodeNames": ["n1"]}),
        ("/simulate", {"pod": POD, "nodes": {"items": []}}),
        ("/bind", {"PodName": "p", "PodNamespace": "team", "PodUID": "u", "Node": "n1"}),
    ],
)
async def test_a_bug_in_a_verb_is_logged_with_route_and_pod(
    route: str, body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bugs = BugLog(log)
    async with serving(routes(bugs)) as url, aiohttp.ClientSession() as session:
        for _ in range(3):
            async with session.post(url + route, json=body) as response:
                assert response.status == 200
                assert (await response.json())["Error"] == "internal error: KeyError"
    (line,) = told(caplog)
    assert (line["route"], line["pod"]) == (route, "team/p")
    assert "secret detail" in caplog.text, "the log has the cause, the answer has not"
    assert bugs.total == 3


async def test_a_bug_of_a_body_that_says_no_pod_is_logged_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(routes(BugLog(log))) as url, aiohttp.ClientSession() as session:
        for body in (b"", b"[1]", b'{"Pod": 3}', b'{"Pod": null}', b"\xff"):
            async with session.post(url + "/filter", data=body) as response:
                assert "internal error" in (await response.json())["Error"]
    assert [line["pod"] for line in told(caplog)] == [""]


async def test_a_bug_in_the_review_is_logged_with_the_pod_and_denies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pod = {"kind": "Pod", "metadata": {"generateName": "p-"}, "spec": {"containers": []}}
    review = {"request": {"uid": "u", "operation": "CREATE", "namespace": "team", "object": pod}}
    async with (
        serving(routes(BugLog(log))) as url,
        aiohttp.ClientSession() as session,
        session.post(url + "/webhook", json=review) as response,
    ):
        answer = (await response.json())["response"]
    assert (answer["allowed"], answer["status"]["code"]) == (False, 500)
    (line,) = told(caplog)
    assert (line["route"], line["pod"], line["uid"]) == ("/webhook", "team/p-", "u")


class Figures:
    """`/metrics` that fails before or after its first piece."""

    def __init__(self, pieces: int) -> None:
        self._pieces = pieces

    async def chunks(self) -> AsyncIterator[bytes]:
        for _ in range(self._pieces):
            yield b"# a comment\n"
        raise KeyError("bug")


async def test_metrics_that_cannot_be_made_are_a_500_that_is_logged_with_its_route(
    caplog: pytest.LogCaptureFixture,
) -> None:
    figures: Any = Figures(0)
    async with (
        serving(metrics_routes(figures, BugLog(log))) as url,
        aiohttp.ClientSession() as session,
        session.get(url + "/metrics") as response,
    ):
        assert response.status == 500
        assert await response.text() == "internal error: KeyError\n"
    assert [line["route"] for line in told(caplog)] == ["/metrics"]


async def test_metrics_that_fail_on_the_way_are_cut_off_not_taken_for_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    figures: Any = Figures(2)
    async with serving(metrics_routes(figures, BugLog(log))) as url, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            async with session.get(url + "/metrics") as response:
                await response.read()
    assert [line["route"] for line in told(caplog)] == ["/metrics"]


async def test_a_bug_behind_a_get_is_a_500_and_the_next_request_is_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken() -> AsyncIterator[bytes]:
        raise RuntimeError("bug")
        yield b""

    async def fine() -> AsyncIterator[bytes]:
        yield json.dumps({}).encode()

    application = Application({}, {"/broken": broken, "/fine": fine}, 0, bugs=BugLog(log))
    async with serving(application) as url, aiohttp.ClientSession() as session:
        for path, status in (("/broken", 500), ("/fine", 200)):
            async with session.get(url + path) as response:
                assert response.status == status
    assert [line["route"] for line in told(caplog)] == ["/broken"]


@pytest.mark.parametrize("ending", ["raises", "returns"])
async def test_work_beside_the_requests_begins_anew_after_a_bug(
    ending: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "_PAUSE_S", (0.001, 0.001))
    begun = asyncio.Semaphore(0)

    async def work() -> None:
        begun.release()
        if ending == "raises":
            raise KeyError("bug")

    bugs = BugLog(log)
    task = asyncio.create_task(kept_up("pending pods", work, bugs))
    for _ in range(3):
        await begun.acquire()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert bugs.total >= 2
    assert [line["part"] for line in told(caplog)] == ["pending pods"]


async def test_what_the_process_cannot_do_without_ends_it_with_its_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken() -> None:
        raise KeyError("bug")

    async def ends() -> None:
        return

    with pytest.raises(KeyError):
        await vital("informers", broken(), BugLog(log))
    assert [line["part"] for line in told(caplog)] == ["informers"]
    with pytest.raises(PartEnded, match="extender has ended by itself"):
        await vital("extender", ends(), BugLog(log))
