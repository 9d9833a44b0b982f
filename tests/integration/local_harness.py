"""What the tests of the embedded cluster share: clients, and a kubelet without processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from hami.kube.client import Client as KubeClient
from hami.kube.resources import PODS as KUBE_PODS
from hami.local.api import spdy
from hami.local.api.apiserver import ApiServer
from hami.local.api.objects import Object, clone, dig, meta, name_of, namespace_of, rfc3339
from hami.local.api.registry import DeleteOptions
from hami.local.api.resources import PODS
from hami.local.api.store import Event

TUNNEL = "SPDY/3.1+portforward.k8s.io"


class Client:
    """Requests with decoded answers."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session
        self.watches: list[aiohttp.ClientResponse] = []

    async def __call__(
        self, method: str, path: str, body: Any = None, content: str = "application/json", **headers: str
    ) -> tuple[int, Any]:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        if data is not None:
            names["Content-Type"] = content
        async with self.session.request(method, self.url + path, data=data, headers=names) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith("{") else text

    async def ok(self, method: str, path: str, body: Any = None, **options: str) -> Any:
        code, answer = await self(method, path, body, **options)
        assert code < 300, answer
        return answer


class Kubectl:
    """The real kubectl as a process. ``run`` gives (exit status, stdout and stderr)."""

    def __init__(self, program: str, kubeconfig: Path) -> None:
        self._program = program
        self._environment = {
            "PATH": "/usr/bin:/bin",
            "KUBECONFIG": str(kubeconfig),
            "HOME": str(kubeconfig.parent),
            "KUBECACHEDIR": str(kubeconfig.parent / "cache"),
        }

    async def run(self, *words: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            self._program, *words, env=self._environment, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        async with reaped(process), asyncio.timeout(100.0):
            output, _ = await process.communicate()
        return process.returncode or 0, output.decode()


@asynccontextmanager
async def reaped(process: asyncio.subprocess.Process) -> AsyncIterator[asyncio.subprocess.Process]:
    """Kills a program that a failed test leaves behind, and waits until nothing of it is open."""
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        async with asyncio.timeout(60.0):
            await process.communicate()


class Tunnel:
    """The client's side of SPDY in a WebSocket, as kubectl has it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.connection = spdy.SpdyConnection()
        self.data: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self._next = 1

    async def connect(self, port: int, request_id: str) -> tuple[int, int]:
        """Open the error and the data stream of one connection."""
        opened = []
        for kind in ("error", "data"):
            stream, self._next = self._next, self._next + 2
            names = {"streamType": kind, "port": str(port), "requestID": request_id}
            await self.socket.send_bytes(self.connection.open(stream, names))
            self.data[stream] = b""
            opened.append(stream)
        await self.socket.send_bytes(self.connection.data(opened[0], b"", last=True))
        return opened[0], opened[1]

    async def send(self, stream: int, data: bytes, *, last: bool = False) -> None:
        await self.socket.send_bytes(self.connection.data(stream, data, last=last))

    async def until_ended(self, *streams: int) -> None:
        async with asyncio.timeout(60.0):
            while not set(streams) <= self.ended:
                message = await self.socket.receive()
                assert message.type is aiohttp.WSMsgType.BINARY, message
                for event in self.connection.receive(message.data):
                    if isinstance(event, spdy.Data):
                        self.data[event.stream] += event.data
                        if event.last:
                            self.ended.add(event.stream)
                    elif isinstance(event, spdy.Reset):
                        self.ended.add(event.stream)


class ReadyKubelet:
    """Stands for all kubelets and the scheduler: a pod is bound and Ready at once, and goes when deleted.

    ``held``: values of the label ``app`` whose pods stay Pending.
    """

    def __init__(self, api: ApiServer, nodes: list[str]) -> None:
        self.api = api
        self.nodes = nodes
        self.held: set[str] = set()
        self._cancel = api.store.subscribe(self._observe)
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        self._cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _observe(self, key: str, event: Event) -> None:
        if key == PODS.key and event.change != "DELETED":
            task = asyncio.create_task(self._act(event.obj))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _act(self, seen: Object) -> None:
        namespace, name = namespace_of(seen), name_of(seen)
        pod = self.api.store.find(PODS, namespace, name)
        if pod is None or meta(pod)["uid"] != meta(seen)["uid"]:
            return
        if meta(pod).get("deletionTimestamp"):
            if meta(pod).get("deletionGracePeriodSeconds"):
                await self.api.registry.delete(
                    PODS, namespace, name, DeleteOptions({"gracePeriodSeconds": 0})
                )
            return
        if not dig(pod, "spec", "nodeName"):
            wanted = dig(
                pod, "spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"
            )
            node = self.nodes[0]
            if wanted:
                node = wanted["nodeSelectorTerms"][0]["matchFields"][0]["values"][0]
            self.api.registry.bind(namespace, name, {"target": {"name": node}})
        elif (
            dig(pod, "status", "phase") == "Pending"
            and meta(pod).get("labels", {}).get("app") not in self.held
        ):
            await self.set_status(pod, "Running")

    async def set_status(self, pod: Object, phase: str) -> None:
        """Report ``phase``; Running pods are Ready."""
        ready = {"type": "Ready", "status": "True" if phase == "Running" else "False",
                 "lastTransitionTime": rfc3339(1.0)}  # fmt: skip

        def change(current: Object) -> Object:
            changed: Object = clone(current)
            changed["status"] = {"phase": phase, "conditions": [ready], "podIP": "10.0.0.1"}
            return changed

        await self.api.registry.update(PODS, namespace_of(pod), name_of(pod), change, subresource="status")


async def until(
    condition: Callable[[], Any], limit_s: float = 60.0, why: Callable[[], Exception] = TimeoutError
) -> Any:
    """What ``condition()`` gives once it is true; raises ``why()`` after ``limit_s``."""
    try:
        async with asyncio.timeout(limit_s):
            while not (found := condition()):  # noqa: ASYNC110 - the condition is on objects of the API
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise why() from None
    return found


async def add_pod(client: KubeClient, name: str) -> None:
    """A pod of one container in namespace ``default``."""
    pod = {"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    await client.create(KUBE_PODS, pod, msgspec.Raw, namespace="default")
