"""Kubelet's PodResources API: one list shared by all who wait, retried where kubelet limits the calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import grpc
import grpc.aio

from hami.node.api import podresources_v1_pb2 as pb
from hami.node.api import podresources_v1_pb2_grpc as rpc
from hami.node.exact.errors import PodResourcesBusyError, PodResourcesError
from hami.node.exact.holders import Holding

CALL_LIMIT_S: Final = 2.0
RETRY_LIMIT_S: Final = 2.0
_FIRST_DELAY_S: Final = 0.02
_MAX_DELAY_S: Final = 0.5
_OPTIONS: Final = (
    ("grpc.default_authority", "localhost"),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
)
T = TypeVar("T")


@dataclass(slots=True)
class _Waiter(Generic[T]):
    future: asyncio.Future[T]
    deadline: float


class SharedList(Generic[T]):
    """Callers that wait together share one call of ``fetch``, made after the last of them asked.

    A call that raises :class:`PodResourcesBusyError` is made again after 20 ms, then twice that and so on;
    each caller waits for at most ``limit_s`` seconds of such retries. Any other error goes to all who wait.
    """

    def __init__(self, fetch: Callable[[], Awaitable[T]], limit_s: float = RETRY_LIMIT_S) -> None:
        self._fetch = fetch
        self._limit_s = limit_s
        self._waiting: list[_Waiter[T]] = []
        self._runner: asyncio.Task[None] | None = None

    async def get(self) -> T:
        """An answer that was asked for after this call. Raises :class:`PodResourcesError`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._waiting.append(_Waiter(future, loop.time() + self._limit_s))
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        delay = _FIRST_DELAY_S
        try:
            while self._waiting:
                await asyncio.sleep(0)  # those who come at the same time ask along
                batch, self._waiting = self._waiting, []
                try:
                    answer = await self._fetch()
                except PodResourcesBusyError as error:
                    self._waiting = self._patient(batch, error, delay) + self._waiting
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, _MAX_DELAY_S)
                except Exception as error:
                    _fail(batch, error)
                else:
                    delay = _FIRST_DELAY_S
                    for waiter in batch:
                        if not waiter.future.done():
                            waiter.future.set_result(answer)
        finally:
            self._runner = None

    def _patient(self, batch: list[_Waiter[T]], error: Exception, delay: float) -> list[_Waiter[T]]:
        """Those who can wait for one more try; the others fail with ``error``."""
        again = asyncio.get_running_loop().time() + delay
        _fail([waiter for waiter in batch if waiter.deadline < again], error)
        return [waiter for waiter in batch if waiter.deadline >= again and not waiter.future.done()]


def _fail(waiters: list[_Waiter[T]], error: Exception) -> None:
    for waiter in waiters:
        if not waiter.future.done():
            waiter.future.set_exception(error)


class PodResources:
    """The client of one kubelet socket; it connects anew by itself when kubelet restarts."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._channel: Any = None
        self._shared: SharedList[Any] = SharedList(self._list)

    async def holdings(self, resource: str) -> tuple[Holding, ...]:
        """Who holds devices of ``resource`` now; raises :class:`PodResourcesError`."""
        return holdings_of(await self._shared.get(), resource)

    async def close(self) -> None:
        """Close the connection; a later call opens it again."""
        channel, self._channel = self._channel, None
        if channel is not None:
            with contextlib.suppress(grpc.RpcError):
                await channel.close()

    async def _list(self) -> Any:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS)
        stub = rpc.PodResourcesListerStub(self._channel)
        try:
            return await stub.List(pb.ListPodResourcesRequest(), timeout=CALL_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            text = f"kubelet's PodResources API at {self._socket} does not answer: {error.details()}"
            if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise PodResourcesBusyError(text) from error
            raise PodResourcesError(text) from error


def holdings_of(answer: Any, resource: str) -> tuple[Holding, ...]:
    """The containers of a ``ListPodResourcesResponse`` that hold devices of ``resource``.

    Kubelet gives one entry per device: the entries of a container are joined.
    """
    found = []
    for pod in answer.pod_resources:
        for container in pod.containers:
            ids = frozenset(
                device
                for entry in container.devices
                if entry.resource_name == resource
                for device in entry.device_ids
            )
            if ids:
                found.append(Holding(pod.namespace, pod.name, container.name, ids))
    return tuple(found)
