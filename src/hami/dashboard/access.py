"""Who may see what: nobody is asked, a proxy has asked, or Kubernetes is asked (TokenReview and
SubjectAccessReview on listing pods)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import msgspec

from hami.dashboard.errors import AccessError
from hami.dashboard.scope import EVERYTHING, Scope
from hami.kube.client import Client
from hami.kube.errors import KubeError

Mode = Literal["none", "kubernetes", "header"]

REMEMBERED_S: Final = 60.0
_REFUSED_S: Final = 10.0
_READERS: Final = 256
_MAX_TOKEN: Final = 8192
_MAX_NAMESPACES: Final = 1000
_AT_ONCE: Final = 8
_TIMEOUT_S: Final = 10.0
_TOKEN_REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"  # noqa: S105 - a path
_ACCESS_REVIEWS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"

log = logging.getLogger(__name__)


class Access(Protocol):
    """Decides about one request by its headers (lower-case names)."""

    def reader(self, headers: Mapping[str, str]) -> str:
        """Who asks, as far as that can be believed without asking anybody; "": only the address tells."""
        ...

    async def scope(self, headers: Mapping[str, str], namespaces: Callable[[], Iterable[str]]) -> Scope:
        """What the reader may see of these namespaces. Raises `AccessError`."""
        ...


class NoCheck:
    """Whoever reaches the port sees everything."""

    def reader(self, headers: Mapping[str, str]) -> str:  # noqa: ARG002
        """Nobody by name."""
        return ""

    async def scope(self, headers: Mapping[str, str], namespaces: Callable[[], Iterable[str]]) -> Scope:  # noqa: ARG002
        """Everything."""
        return EVERYTHING


class ProxyHeader:
    """A proxy in front names the user in a header; nobody else must reach the port."""

    def __init__(self, header: str) -> None:
        self._header = header.lower()

    def reader(self, headers: Mapping[str, str]) -> str:
        """Whom the proxy names: all its readers come from one address."""
        return headers.get(self._header, "").strip()[:256]

    async def scope(self, headers: Mapping[str, str], namespaces: Callable[[], Iterable[str]]) -> Scope:  # noqa: ARG002
        """Everything, for whom the proxy has named."""
        if not headers.get(self._header, "").strip():
            raise AccessError(401, f"the header {self._header} of the authenticating proxy is missing")
        return EVERYTHING


class _User(msgspec.Struct, rename="camel"):
    username: str = ""
    uid: str = ""
    groups: list[str] = []
    extra: dict[str, list[str]] = {}


class _TokenStatus(msgspec.Struct, rename="camel"):
    authenticated: bool = False
    user: _User | None = None


class _TokenReview(msgspec.Struct):
    status: _TokenStatus = msgspec.field(default_factory=_TokenStatus)


class _AccessStatus(msgspec.Struct):
    allowed: bool = False


class _AccessReview(msgspec.Struct):
    status: _AccessStatus = msgspec.field(default_factory=_AccessStatus)


@dataclass(slots=True)
class _Reader:
    """What is known of a token, until when."""

    until: float
    user: _User | None
    everywhere: bool
    namespaces: dict[str, bool]
    lock: asyncio.Lock


class Kubernetes:
    """A bearer token that the cluster knows; a namespace is shown to those who may list its pods."""

    def __init__(self, client: Client, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._readers: OrderedDict[bytes, _Reader] = OrderedDict()
        self._gate = asyncio.Semaphore(_AT_ONCE)

    def reader(self, headers: Mapping[str, str]) -> str:  # noqa: ARG002
        """Nobody by name: a token is not believed before Kubernetes has been asked."""
        return ""

    async def scope(self, headers: Mapping[str, str], namespaces: Callable[[], Iterable[str]]) -> Scope:
        """The namespaces of the reader. What Kubernetes said counts for a minute."""
        token = _token(headers)
        key = hashlib.sha256(token.encode()).digest()  # tokens themselves are not kept
        reader = self._readers.get(key)
        if reader is None:
            reader = _Reader(0.0, None, False, {}, asyncio.Lock())
            self._readers[key] = reader
            while len(self._readers) > _READERS:
                self._readers.popitem(last=False)
        self._readers.move_to_end(key)
        try:
            async with reader.lock:
                return await self._judge(reader, token, namespaces)
        except KubeError as error:
            log.warning("access.failed", extra={"reason": str(error)})
            raise AccessError(503, "Kubernetes cannot be asked who you are; try again") from error

    async def _judge(self, reader: _Reader, token: str, namespaces: Callable[[], Iterable[str]]) -> Scope:
        now = self._clock()
        if reader.until <= now:
            user = await self._user(token)
            reader.user, reader.namespaces = user, {}
            reader.everywhere = user is not None and await self._may_list(user, "")
            reader.until = now + (REMEMBERED_S if user is not None else _REFUSED_S)
        user = reader.user
        if user is None:
            raise AccessError(401, "Kubernetes does not know this token")
        if reader.everywhere:
            return EVERYTHING
        wanted = sorted(namespaces())[:_MAX_NAMESPACES]
        unknown = [name for name in wanted if name not in reader.namespaces]
        answers = await asyncio.gather(*(self._may_list(user, name) for name in unknown))
        reader.namespaces.update(zip(unknown, answers, strict=True))
        return Scope(frozenset(name for name in wanted if reader.namespaces[name]))

    async def _user(self, token: str) -> _User | None:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
        review: _TokenReview = await self._ask(_TOKEN_REVIEWS, body, _TokenReview)
        status = review.status
        return status.user if status.authenticated and status.user and status.user.username else None

    async def _may_list(self, user: _User, namespace: str) -> bool:
        what = {"verb": "list", "resource": "pods", "namespace": namespace}
        spec: dict[str, Any] = {"user": user.username, "groups": user.groups, "resourceAttributes": what}
        if user.uid:
            spec["uid"] = user.uid
        if user.extra:
            spec["extra"] = user.extra
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        review: _AccessReview = await self._ask(_ACCESS_REVIEWS, body, _AccessReview)
        return review.status.allowed

    async def _ask(self, path: str, body: Mapping[str, Any], kind: type[Any]) -> Any:
        async with self._gate:
            return await self._client.json(
                "POST", path, kind, body=msgspec.json.encode(body), timeout_s=_TIMEOUT_S
            )


def _token(headers: Mapping[str, str]) -> str:
    word, _, token = headers.get("authorization", "").partition(" ")
    token = token.strip()
    if word.lower() != "bearer" or not token:
        raise AccessError(401, "a bearer token of this cluster is needed")
    if len(token) > _MAX_TOKEN or not token.isascii() or not token.isprintable():
        raise AccessError(401, "this is no token of Kubernetes")
    return token
