"""The subresources that are not the object itself: binding, eviction, log, exec, scale, token and so on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from hami.local.api import channels, errors, portforward, requests
from hami.local.api.errors import bad_request
from hami.local.api.node_services import ExecRequest, NodeServices
from hami.local.api.objects import Object, dig, name_of, parse_time
from hami.local.api.podlog import LogRequest
from hami.local.api.registry import Registry
from hami.local.api.resources import PODS, SERVICEACCOUNTS, Resource
from hami.local.api.responses import json_response, success
from hami.local.api.scale import scale_of, scaled
from hami.local.api.tokens import Tokens

OBJECT_METHODS = {"status": ("GET", "PUT", "PATCH"), "finalize": ("PUT",)}
"""Subresources that show the object, with their methods; ``Rest`` serves them."""

Handler = Callable[[web.Request, Resource, str, str], Awaitable[web.StreamResponse]]


class Subresources:
    """``logs``: who answers for the pods of the nodes; None where no kubelet runs."""

    def __init__(self, registry: Registry, clock: Callable[[], float], tokens: Tokens) -> None:
        self.logs: NodeServices | None = None
        self._registry = registry
        self._store = registry.store
        self._clock = clock
        self._tokens = tokens
        self._handlers: dict[str, tuple[tuple[str, ...], Handler]] = {
            "binding": (("POST",), self._bind),
            "eviction": (("POST",), self._evict),
            "log": (("GET",), self._log),
            "exec": (("GET", "POST"), self._exec),
            "portforward": (("GET", "POST"), self._forward),
            "scale": (("GET", "PUT", "PATCH"), self._scale),
            "token": (("POST",), self._token),
        }

    async def handle(
        self, request: web.Request, resource: Resource, namespace: str, name: str, subresource: str
    ) -> web.StreamResponse:
        """Answer one request on ``subresource``, which ``resource`` has. Raises 405."""
        methods, handler = self._handlers[subresource]
        if request.method not in methods:
            raise errors.method_not_allowed(request.method)
        return await handler(request, resource, namespace, name)

    async def _bind(
        self, request: web.Request, _resource: Resource, namespace: str, name: str
    ) -> web.StreamResponse:
        self._registry.bind(namespace, name, await requests.body(request))
        return json_response(success(None), 201)

    async def _evict(
        self, request: web.Request, _resource: Resource, namespace: str, name: str
    ) -> web.StreamResponse:
        await self._registry.evict(namespace, name, await requests.body(request))
        return json_response(success(None), 201)

    async def _token(
        self, request: web.Request, _resource: Resource, namespace: str, name: str
    ) -> web.StreamResponse:
        account = self._store.get(SERVICEACCOUNTS, namespace, name)
        return json_response(self._tokens.request(account, await requests.body(request)), 201)

    async def _scale(
        self, request: web.Request, resource: Resource, namespace: str, name: str
    ) -> web.StreamResponse:
        if request.method == "GET":
            return json_response(scale_of(self._store.get(resource, namespace, name)))
        if request.method == "PATCH":
            make = await requests.change_of(request, "Scale")
        else:
            body = await requests.body(request)

            def make(_current: Object) -> Object:
                return body  # type: ignore[no-any-return]

        obj, _ = await self._registry.update(
            resource, namespace, name, lambda current: scaled(current, make(scale_of(current))),
            dry_run=requests.dry_run(request), manager=requests.manager_of(request),
        )  # fmt: skip
        return json_response(scale_of(obj))

    def _services(self, pod: Object) -> NodeServices:
        """Who answers for ``pod``. Raises 400 for a pod without a node."""
        if not dig(pod, "spec", "nodeName"):
            raise bad_request(f"pod {name_of(pod)} does not have a host assigned")
        if self.logs is None:
            raise errors.internal("no kubelet runs here")
        return self.logs

    async def _exec(
        self, request: web.Request, _resource: Resource, namespace: str, name: str
    ) -> web.StreamResponse:
        pod = self._store.get(PODS, namespace, name)
        wanted = ExecRequest(
            pod=pod,
            container=_container_of(request, pod),
            command=tuple(request.query.getall("command", [])),
            tty=requests.flag(request, "tty"),
            stdin=requests.flag(request, "stdin"),
        )
        if not wanted.command:
            raise bad_request("you must specify at least 1 command for the container")
        services = self._services(pod)
        channels.check_upgrade(request, channels.PROTOCOLS)
        return await channels.serve_exec(request, await services.start_exec(wanted), tty=wanted.tty)

    async def _forward(
        self, request: web.Request, _resource: Resource, namespace: str, name: str
    ) -> web.StreamResponse:
        pod = self._store.get(PODS, namespace, name)
        services = self._services(pod)
        texts = [text for item in request.query.getall("ports", []) for text in item.split(",")]
        if not all(text.isascii() and text.isdigit() and 0 < int(text[:6]) < 65536 for text in texts):
            raise bad_request(f"ports {texts} are not all between 1 and 65535")
        channels.check_upgrade(request, portforward.PROTOCOLS)
        return await portforward.serve(
            request, lambda port: services.connect(pod, port), [int(text) for text in texts]
        )

    async def _log(
        self, request: web.Request, _resource: Resource, namespace: str, name: str
    ) -> web.StreamResponse:
        pod = self._store.get(PODS, namespace, name)
        container = _container_of(request, pod)
        services = self._services(pod)
        now = self._clock()
        seconds = requests.number(request, "sinceSeconds")
        since = now - seconds if seconds is not None else parse_time(request.query.get("sinceTime", ""))
        chunks = services.read_log(
            LogRequest(
                pod=pod,
                container=container,
                follow=requests.flag(request, "follow"),
                previous=requests.flag(request, "previous"),
                timestamps=requests.flag(request, "timestamps"),
                tail_lines=requests.number(request, "tailLines"),
                since=since,
                limit_bytes=requests.number(request, "limitBytes"),
            )
        )
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        response.enable_chunked_encoding()
        first = await anext(chunks, None)
        await response.prepare(request)
        if first is not None:
            await response.write(first)
            async for chunk in chunks:
                await response.write(chunk)
        await response.write_eof()
        return response


def _container_of(request: web.Request, pod: Object) -> str:
    """The container that the request names, or the only one. Raises 400."""
    regular = [str(item.get("name")) for item in dig(pod, "spec", "containers") or []]
    inits = [str(item.get("name")) for item in dig(pod, "spec", "initContainers") or []]
    wanted = request.query.get("container", "")
    if not wanted and len(regular) > 1:
        raise bad_request(
            f"a container name must be specified for pod {name_of(pod)}, choose one of: {regular}"
        )
    container = wanted or regular[0]
    if container not in inits + regular:
        raise bad_request(f"container {container} is not valid for pod {name_of(pod)}")
    return container
