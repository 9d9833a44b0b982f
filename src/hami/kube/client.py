"""One request, one page, one watch: everything between a typed call and the API server's socket.

Every request is limited (client-side rate, time, size of the answer) and ends in a value or a typed error.
429 is repeated while the request's time lasts, 401 once with a fresh credential; nothing else is repeated
here. Writes go before reads, which are made for writes that follow; watches are not counted against the rate.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec
from yarl import URL

from hami.kube.auth import Credential
from hami.kube.config import ClientConfig
from hami.kube.errors import (
    UNDECODABLE,
    ApiError,
    ConfigError,
    CredentialError,
    DecodeError,
    RateLimited,
    ResponseTooLarge,
    TooManyRequests,
    TransportError,
    Unauthorized,
    error_from_response,
)
from hami.kube.resources import Resource
from hami.kube.turns import Turns

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"

DEFAULT_QPS = 50.0
DEFAULT_BURST = 100
DEFAULT_TIMEOUT_S = 30.0
MAX_OBJECT_BYTES = 8 << 20
MAX_PAGE_BYTES = 64 << 20
_RETRY_AFTER_DEFAULT_S = 1.0
_RETRY_AFTER_LEAST_S = 0.1
_AT_ONCE = 64  # requests; watches are not counted
_WAITING_PART = 0.5  # of a request's time that may go by before it is sent; the rest is for the answer
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """Client-side limits: requests per second (0: none), burst, seconds per request, bytes of an object and
    a page."""

    qps: float = DEFAULT_QPS
    burst: int = DEFAULT_BURST
    timeout_s: float = DEFAULT_TIMEOUT_S
    max_object_bytes: int = MAX_OBJECT_BYTES
    max_page_bytes: int = MAX_PAGE_BYTES


class Client:
    """An API server connection; use as ``async with`` or call ``close()``."""

    def __init__(
        self,
        config: ClientConfig,
        limits: Limits | None = None,
        *,
        user_agent: str = "hami",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.limits = limits or Limits()
        self._turns = Turns(self.limits.qps, self.limits.burst, _AT_ONCE, clock)
        self._clock = clock
        self._user_agent = user_agent
        self._session: aiohttp.ClientSession | None = None
        self._session_material: tuple[bytes, bytes, bytes] | None = None
        self._ca_in_doubt = False  # a server was not trusted: the CA may have been rotated
        self._session_lock = asyncio.Lock()
        self._retired: list[aiohttp.ClientSession] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; the client cannot be used afterwards."""
        sessions, self._retired = self._retired, []
        if self._session is not None:
            sessions.append(self._session)
            self._session = None
        for session in sessions:
            await session.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = JSON,
        timeout_s: float | None = None,
        max_bytes: int | None = None,
    ) -> bytes:
        """The body of a 2xx answer.

        ``timeout_s`` covers everything: waiting for the rate limit, repeats after 429, the answer. Raises
        ``ApiError`` subclasses, ``TransportError`` (outcome unknown), ``RateLimited``,
        ``ResponseTooLarge``, ``CredentialError``.
        """
        timeout = self.limits.timeout_s if timeout_s is None else timeout_s
        deadline = self._clock() + timeout
        limit = self.limits.max_object_bytes if max_bytes is None else max_bytes
        refreshed = False
        while True:
            try:
                return await self._in_turn(deadline, method, path, query, body, content_type, limit)
            except TimeoutError as error:
                raise TransportError(f"{method} {path}: no answer within {timeout:g}s") from error
            except Unauthorized:
                if refreshed:
                    raise
                refreshed = True
                self.config.credentials.invalidate()
            except TooManyRequests as error:
                wait = _RETRY_AFTER_DEFAULT_S if error.retry_after_s is None else error.retry_after_s
                wait = max(wait, _RETRY_AFTER_LEAST_S)
                if self._clock() + wait >= deadline:
                    raise
                log.debug("kube.throttled", extra={"method": method, "path": path, "wait_s": wait})
                await asyncio.sleep(wait)

    async def json(self, method: str, path: str, type_: type[T], **options: Any) -> T:
        """Like ``request`` with the answer decoded as ``type_`` (a Struct, ``dict``, ``msgspec.Raw``)."""
        return decode(await self.request(method, path, **options), type_)

    async def get(
        self, resource: Resource, name: str, type_: type[T], *, namespace: str = "", **options: Any
    ) -> T:
        """One object, a quorum read; raises ``NotFound``."""
        return await self.json("GET", resource.path(namespace, name), type_, **options)

    async def create(
        self, resource: Resource, obj: object, type_: type[T], *, namespace: str = "", **options: Any
    ) -> T:
        """Create an object; raises ``AlreadyExists``, ``Invalid``."""
        body = msgspec.json.encode(obj)
        return await self.json("POST", resource.path(namespace), type_, body=body, **options)

    async def delete(
        self, resource: Resource, name: str, *, namespace: str = "", uid: str = "", **options: Any
    ) -> None:
        """Delete an object, with ``uid`` only that very one; raises ``NotFound``, ``Conflict``."""
        body = msgspec.json.encode({"preconditions": {"uid": uid}}) if uid else None
        await self.request("DELETE", resource.path(namespace, name), body=body, **options)

    async def patch(
        self,
        resource: Resource,
        name: str,
        patch: object,
        type_: type[T],
        *,
        namespace: str = "",
        subresource: str = "",
        content_type: str = MERGE_PATCH,
        **options: Any,
    ) -> T:
        """Patch an object; a merge patch with ``metadata.resourceVersion`` raises ``Conflict`` if it has
        changed."""
        path = resource.path(namespace, name, subresource)
        body = msgspec.json.encode(patch)
        return await self.json("PATCH", path, type_, body=body, content_type=content_type, **options)

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        *,
        query: Mapping[str, str],
        idle_timeout_s: float,
        connect_timeout_s: float | None = None,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """A watch: the lines of a 2xx answer, each at most ``max_object_bytes`` long, as they come.

        ``connect_timeout_s`` bounds the time to the answer's head, ``idle_timeout_s`` the silence between
        two reads.
        """
        connect_s = self.limits.timeout_s if connect_timeout_s is None else connect_timeout_s
        try:
            async with asyncio.timeout(connect_s):
                session, credential = await self._session_for_now()
                response = await session.get(
                    self._url(path, query),
                    headers=self._headers(credential, JSON),
                    timeout=aiohttp.ClientTimeout(total=None, sock_read=idle_timeout_s),
                    server_hostname=self.config.tls_server_name or None,
                    allow_redirects=False,
                )
        except TimeoutError as error:
            raise TransportError(f"GET {path}: no answer within {connect_s:g}s") from error
        except (aiohttp.ClientError, OSError) as error:
            self._note(error)
            raise TransportError(f"GET {path}: {error}") from error
        try:
            if response.status // 100 != 2:
                if response.status == 401:
                    self.config.credentials.invalidate()
                async with asyncio.timeout(connect_s):
                    body = await _read_bounded(response, 1 << 20)
                raise error_from_response(response.status, body, response.headers.get("Retry-After"))
            yield _lines(response, self.limits.max_object_bytes)
        except TimeoutError as error:
            raise TransportError(f"watch {path}: silent for {idle_timeout_s:g}s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise TransportError(f"watch {path}: {error}") from error
        finally:
            response.close()

    async def _once(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: bytes | None,
        content_type: str,
        max_bytes: int,
    ) -> bytes:
        session, credential = await self._session_for_now()
        try:
            async with session.request(
                method,
                self._url(path, query),
                data=body,
                headers=self._headers(credential, content_type),
                server_hostname=self.config.tls_server_name or None,
                allow_redirects=False,
            ) as response:
                answer = await _read_bounded(response, max_bytes)
                if response.status // 100 == 2:
                    return answer
                raise error_from_response(response.status, answer, response.headers.get("Retry-After"))
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            self._note(error)
            raise TransportError(f"{method} {path}: {error or type(error).__name__}") from error

    def _note(self, error: Exception) -> None:
        if isinstance(error, aiohttp.ClientSSLError):
            self._ca_in_doubt = True

    async def _in_turn(self, deadline: float, method: str, path: str, *request: Any) -> bytes:
        most_s = _WAITING_PART * (deadline - self._clock())
        try:
            await self._turns.take(most_s, urgent=method != "GET")
        except TimeoutError as error:
            most = f"{self.limits.qps:g} a second, {_AT_ONCE} at once"
            raise RateLimited(f"{method} {path}: not sent, too many requests wait ({most})") from error
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                return await self._once(method, path, *request)
        finally:
            self._turns.give_back()

    def _url(self, path: str, query: Mapping[str, str] | None) -> URL:
        text = self.config.server + path
        if query:
            text += "?" + urlencode(query)
        return URL(text, encoded=True)

    def _headers(self, credential: Credential, content_type: str) -> dict[str, str]:
        headers = {
            "Accept": JSON,
            "Accept-Encoding": "identity",
            "Content-Type": content_type,
            "User-Agent": self._user_agent,
        }
        if credential.authorization:
            if not credential.authorization.isprintable():
                raise CredentialError("the token or password holds line breaks or other control characters")
            headers["Authorization"] = credential.authorization
        return headers

    async def _session_for_now(self) -> tuple[aiohttp.ClientSession, Credential]:
        """The session for the current client certificate and CA; a new one when either was rotated."""
        credential = await self.config.credentials.current()
        async with self._session_lock:
            of_client = (credential.certificate_pem, credential.key_pem)
            known = self._session_material
            if self._session is not None and known is not None and known[1:] == of_client:
                if not self._ca_in_doubt:
                    return self._session, credential
                self._ca_in_doubt = False
                if known[0] == await asyncio.to_thread(self.config.read_ca):
                    return self._session, credential
            ca_pem = await asyncio.to_thread(self.config.read_ca)
            connector = aiohttp.TCPConnector(
                ssl=await asyncio.to_thread(self._tls_context, ca_pem, credential),
                limit=0,
                socket_factory=_socket_with_keepalive,
            )
            if self._session is not None:
                self._retired.append(self._session)
            self._session = aiohttp.ClientSession(
                connector=connector,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=1 << 18,
            )
            self._session_material = (ca_pem, *of_client)
            await self._close_retired()
            return self._session, credential

    async def _close_retired(self) -> None:
        """Close all but the newest retired session; its last requests may still be on their way."""
        while len(self._retired) > 1:
            await self._retired.pop(0).close()

    def _tls_context(self, ca_pem: bytes, credential: Credential) -> ssl.SSLContext | bool:
        if not self.config.server.startswith("https:"):
            return True
        try:
            context = ssl.create_default_context(cadata=ca_pem.decode("ascii") if ca_pem else None)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"the cluster's certificate authority is not a PEM bundle: {error}") from error
        if self.config.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if credential.certificate_pem:
            with tempfile.TemporaryDirectory(prefix="hami-tls-") as folder:
                # the ssl module takes certificate and key only as files; mode 0700, gone right after loading
                certificate, key = Path(folder, "crt"), Path(folder, "key")
                certificate.write_bytes(credential.certificate_pem)
                key.write_bytes(credential.key_pem)
                try:
                    context.load_cert_chain(certificate, key)
                except ssl.SSLError as error:
                    raise CredentialError(
                        f"the client certificate or its key cannot be used: {error}"
                    ) from error
        return context


def decode(data: bytes, type_: type[T]) -> T:
    """Decode JSON as ``type_``; raises ``DecodeError`` naming the path of the bad member."""
    try:
        return msgspec.json.decode(data, type=type_)
    except UNDECODABLE as error:
        raise DecodeError(f"unexpected answer of the API server: {error}") from error


async def _read_bounded(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    if response.content_length is not None and response.content_length > max_bytes:
        response.close()
        raise ResponseTooLarge(
            f"{response.url.path}: {response.content_length} bytes, at most {max_bytes} are read"
        )
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > max_bytes:
            response.close()
            raise ResponseTooLarge(f"{response.url.path}: more than {max_bytes} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


async def _lines(response: aiohttp.ClientResponse, max_bytes: int) -> AsyncIterator[bytes]:
    pending = bytearray()
    async for chunk in response.content.iter_any():
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            pending += chunk[start:end]
            if pending:
                yield bytes(pending)
                pending.clear()
            start = end + 1
        pending += chunk[start:]
        if len(pending) > max_bytes:
            raise ResponseTooLarge(f"{response.url.path}: a watch event of more than {max_bytes} bytes")
    if pending:
        yield bytes(pending)


def _socket_with_keepalive(address: Any) -> socket.socket:
    family, type_, protocol, *_ = address
    sock = socket.socket(family=family, type=type_, proto=protocol)
    if family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock


__all__ = ["JSON", "JSON_PATCH", "MERGE_PATCH", "ApiError", "Client", "Limits", "decode"]
