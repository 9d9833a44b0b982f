"""The embedded API server: HTTP on a loopback port over :class:`hami.local.api.registry.Registry`."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import yaml
from aiohttp import web

from hami.local.api import discovery, errors, openapi
from hami.local.api.errors import ApiError
from hami.local.api.node_services import NodeServices
from hami.local.api.objects import Object
from hami.local.api.registry import Registry
from hami.local.api.resources import DEFAULT_TABLE, ResourceTable
from hami.local.api.responses import json_response
from hami.local.api.rest import Rest
from hami.local.api.store import Store
from hami.local.api.tokens import Tokens
from hami.local.controllers import default_controllers
from hami.local.controllers.controller import Context
from hami.local.serving import LoopbackServer

_LOG = logging.getLogger(__name__)
MAX_BODY_BYTES = 3 * 1024 * 1024

Intercept = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


class ApiServer:
    """One API server on 127.0.0.1; ``await start()``, then ``url``; ``await stop()`` ends every watch.

    The controllers (workloads, garbage collection, endpoints) run from start to stop.

    ``token``: when set, requests need it, or the token of a ServiceAccount, as bearer token (401
    otherwise). ``tls``: serve HTTPS.
    ``bookmark_interval_s``: how often a watch that allows bookmarks gets one.
    ``intercept``: for fault tests; an answer that it returns is sent instead of the real one.
    ``seen`` holds the last 10,000 requests as (method, path with query).
    """

    def __init__(
        self,
        *,
        table: ResourceTable = DEFAULT_TABLE,
        clock: Callable[[], float] = time.time,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        history: int = 20_000,
        bookmark_interval_s: float = 10.0,
    ) -> None:
        self.store = Store(history=history)
        self.registry = Registry(self.store, table, clock)
        self.table = table
        self.intercept: Intercept | None = None
        self.seen: deque[tuple[str, str]] = deque(maxlen=10_000)
        self._token = token
        self._tls = tls
        self._controllers = default_controllers(Context(self.registry, clock))
        self._tokens = Tokens(self.store, clock, token)
        self._rest = Rest(self.registry, clock, bookmark_interval_s, self._tokens)
        self._server: LoopbackServer | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """``http://127.0.0.1:PORT``; valid between start and stop."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    @property
    def logs(self) -> NodeServices | None:
        """Who answers ``pods/log``, ``exec`` and ``portforward``."""
        return self._rest.subresources.logs

    @logs.setter
    def logs(self, source: NodeServices | None) -> None:
        self._rest.subresources.logs = source

    async def start(self, port: int = 0) -> None:
        """Listen on 127.0.0.1; port 0 takes a free one."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._server = LoopbackServer(app, 2.0, self._tls)
        self._port = await self._server.start(port)
        self._rest.open()
        self._controllers.start()

    async def stop(self) -> None:
        """End all watches and connections. The store stays as it is; ``start`` serves it again."""
        await self._controllers.stop()
        self._rest.close()
        if self._server is not None:
            await self._server.stop()
            self._server = None
        await self.registry.webhooks.close()

    async def restart(self) -> None:
        """Stop, and listen on the same port again, which no other program can get in between."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(("127.0.0.1", self._port))
            await self.stop()
            await self.start(self._port)

    def drop_watches(self) -> None:
        """End every open watch, as a real API server does at its time-out."""
        self._rest.drop_watches()

    def expire(self) -> None:
        """Compact the history: older watches and page tokens are answered with 410 from now on."""
        self.store.compact()
        self._rest.forget_pages()

    def kubeconfig(self, namespace: str = "default") -> str:
        """A kubeconfig (YAML) for this server."""
        user: Object = {"token": self._token} if self._token else {}
        cluster: Object = {"server": self.url}
        if self._tls:
            cluster["insecure-skip-tls-verify"] = True
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "hami-embedded", "cluster": cluster}],
                "users": [{"name": "hami-embedded", "user": user}],
                "contexts": [
                    {
                        "name": "hami-embedded",
                        "context": {
                            "cluster": "hami-embedded", "user": "hami-embedded", "namespace": namespace,
                        },
                    }
                ],
                "current-context": "hami-embedded",
            },
            sort_keys=False,
        )  # fmt: skip

    def write_kubeconfig(self, path: Path, namespace: str = "default") -> None:
        """Write :meth:`kubeconfig` readable by its owner only."""
        path.touch(mode=0o600)
        path.write_text(self.kubeconfig(namespace))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.method, request.path_qs))
        try:
            if self.intercept is not None:
                answer = await self.intercept(request)
                if answer is not None:
                    return answer
            if self._tokens.user_of(request.headers.get("Authorization", "")) is None:
                raise errors.unauthorized()  # noqa: TRY301
            return await self._route(request)
        except ApiError as error:
            return json_response(error.status(), error.code, error.warnings)
        except (web.HTTPException, asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            _LOG.exception("request failed: %s %s", request.method, request.path_qs)
            return json_response(errors.internal("see the log of the API server").status(), 500)

    async def _route(self, request: web.Request) -> web.StreamResponse:
        parts = [part for part in request.match_info["path"].split("/") if part]
        if request.method == "GET" and len(parts) < 4:
            document = self._document(parts, request)
            if document is not None:
                return document
        if len(parts) >= 3 and parts[0] == "api":
            return await self._rest.handle(request, "", parts[1], parts[2:])
        if len(parts) >= 4 and parts[0] == "apis":
            return await self._rest.handle(request, parts[1], parts[2], parts[3:])
        if parts[:2] == ["openapi", "v3"] and len(parts) > 3:
            return self._openapi(parts[2:])
        raise errors.no_such_path()

    def _document(self, parts: list[str], request: web.Request) -> web.Response | None:
        """Health, version and discovery; None where the path is none of them."""
        versions = self.table.group_versions()
        aggregated = discovery.aggregated_version(request.headers.get("Accept", ""))
        match parts:
            case ["healthz" | "livez" | "readyz", *_]:
                return web.Response(text="ok")
            case ["version"]:
                return json_response(discovery.VERSION)
            case ["api" | "apis"] if aggregated:
                response = json_response(
                    discovery.aggregated(self.table, core=parts == ["api"], version=aggregated)
                )
                response.headers["Content-Type"] = (
                    f"application/json;g=apidiscovery.k8s.io;v={aggregated};as=APIGroupDiscoveryList"
                )
                return response
            case ["api"]:
                return json_response(discovery.api_versions(f"127.0.0.1:{self._port}"))
            case ["apis"]:
                return json_response(discovery.api_groups(self.table))
            case ["api", version] if ("", version) in versions:
                return json_response(discovery.api_resources(versions[("", version)]))
            case ["apis", group] if any(group == known for known, _ in versions if known):
                return json_response(discovery.api_group(self.table, group))
            case ["apis", group, version] if (group, version) in versions:
                return json_response(discovery.api_resources(versions[(group, version)]))
            case ["openapi", "v3"]:
                return json_response(openapi.openapi_index(self.table))
        return None

    def _openapi(self, parts: list[str]) -> web.Response:
        for resources in self.table.group_versions().values():
            if resources[0].base_path == "/" + "/".join(parts):
                return json_response(openapi.openapi_document(resources))
        raise errors.no_such_path()
