"""A scrape of a large cluster holds nobody up (scheduler.md §13, case 92; decision 35)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.kube.events import EventRecorder
from hami.scheduler.edge.binder import Binder
from hami.scheduler.edge.events import SchedulerEvents
from hami.scheduler.edge.extender import Extender
from hami.scheduler.edge.leader import Leadership, SyncGate
from hami.scheduler.edge.metrics import Metrics
from hami.scheduler.edge.node_locks import NodeLocks
from hami.scheduler.edge.pending import PendingPods
from hami.scheduler.edge.routes import metrics_routes, scheduler_routes
from hami.scheduler.edge.server import listen, serve
from hami.scheduler.edge.timing import Timings
from hami.scheduler.edge.webhook import Webhook, WebhookSettings

Lab = Any
NODES, CARDS = 3300, 8


def extender_of(lab: Lab, timings: Timings) -> Extender:
    """An extender whose API server cannot be reached."""
    client = Client(ClientConfig("http://127.0.0.1:1"), Limits(qps=0, timeout_s=0.5))
    leadership = Leadership("h", electing=False)
    recorder = EventRecorder(client, "test")
    events = SchedulerEvents(recorder)
    gate = SyncGate()
    gate.open()
    binder = Binder(client, lab.state, leadership, NodeLocks(client, recorder), events)
    return Extender(lab.state, gate, binder, events, PendingPods(client, lab.state, leadership), timings)


async def exchange(port: int, method: str, path: str, body: bytes = b"") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    return answer


async def test_other_requests_are_answered_while_360000_series_are_sent(lab: Lab) -> None:
    for number in range(NODES):
        lab.node(f"n{number}", *(lab.card(f"c{number}-{at}") for at in range(CARDS)))
    timings = Timings()
    metrics = Metrics(lab.state, timings, legacy=True)
    webhook = Webhook(lab.state, lab.profiles(), WebhookSettings("hami-scheduler"))
    routes = scheduler_routes(extender_of(lab, timings), webhook, {}, 1 << 20)
    with listen("127.0.0.1:0") as metrics_socket, listen("127.0.0.1:0") as main_socket:
        servers = [
            asyncio.create_task(serve(metrics_routes(metrics), metrics_socket, None, "metrics")),
            asyncio.create_task(serve(routes, main_socket, None, "extender")),
        ]
        main = main_socket.getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", metrics_socket.getsockname()[1])
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head.lower()

        # The rest of the text, tens of MB, is more than the sockets hold, and is not read yet.
        assert (await exchange(main, "GET", "/healthz")).startswith(b"HTTP/1.1 200")
        body = json.dumps({"Pod": lab.pod("p"), "NodeNames": ["n1", "n2"]}).encode()
        answer = json.loads((await exchange(main, "POST", "/filter", body)).partition(b"\r\n\r\n")[2])
        assert answer["NodeNames"] == ["n1"]

        text = await reader.read()
        writer.close()
        assert text.endswith(b"0\r\n\r\n")
        assert text.count(b'zone="vGPU"') >= 360_000
        for task in servers:
            task.cancel()
        await asyncio.gather(*servers, return_exceptions=True)


async def test_making_the_text_yields_between_a_few_nodes(lab: Lab) -> None:
    for number in range(200):
        lab.node(f"n{number}", lab.card(f"c{number}"))
    metrics = Metrics(lab.state, Timings(), legacy=False)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    async for _ in metrics.chunks():
        pass
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert turns >= 200 / 8
