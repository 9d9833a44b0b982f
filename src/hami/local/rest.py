"""Requests on resources: path, query and body in, answer out. Lists, tables, watches and logs included."""

from __future__ import annotations

import base64
import secrets
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import yaml
from aiohttp import web

from hami.local import errors, patch, selectors, strategic, tables
from hami.local.errors import bad_request
from hami.local.objects import Object, dig, meta, parse_time
from hami.local.podlog import LogRequest, LogSource
from hami.local.registry import DeleteOptions, Registry
from hami.local.resources import PODS, Resource
from hami.local.scale import scale_of, scaled
from hami.local.watch import Watches

_SNAPSHOTS = 64  # unfinished paged lists that are remembered; older ones answer 410
_SUBRESOURCE_METHODS = {
    "status": ("GET", "PUT", "PATCH"), "finalize": ("PUT",), "binding": ("POST",), "eviction": ("POST",),
    "log": ("GET",), "scale": ("GET", "PUT", "PATCH"),
}  # fmt: skip


class _Snapshot:
    __slots__ = ("objects", "revision")

    def __init__(self, objects: list[Object], revision: int) -> None:
        self.objects = objects
        self.revision = revision


class Rest:
    """The resource handlers of one API server."""

    def __init__(self, registry: Registry, clock: Callable[[], float], bookmark_interval_s: float) -> None:
        self.logs: LogSource | None = None
        self._registry = registry
        self._store = registry.store
        self._clock = clock
        self._watches = Watches(registry.store, clock, bookmark_interval_s)
        self._snapshots: OrderedDict[str, _Snapshot] = OrderedDict()

    def open(self) -> None:
        self._watches.open()

    def close(self) -> None:
        self._watches.close()

    def drop_watches(self) -> None:
        self._watches.drop()

    async def handle(
        self, request: web.Request, group: str, version: str, parts: list[str]
    ) -> web.StreamResponse:
        """``parts`` is the path after group and version."""
        namespace: str | None = None
        if parts[0] == "namespaces" and len(parts) >= 3 and parts[2] not in ("status", "finalize"):
            namespace, parts = parts[1], parts[2:]
        if parts[0] == "watch":
            raise bad_request("use the query parameter watch=true")
        resource = self._registry.table.find(group, version, parts[0])
        if resource is None or len(parts) > 3 or (namespace is not None and not resource.namespaced):
            raise errors.no_such_path()
        if len(parts) == 1:
            return await self._collection(request, resource, namespace)
        if resource.namespaced and namespace is None:
            raise errors.no_such_path()
        if len(parts) == 3:
            return await self._subresource(request, resource, namespace or "", parts[1], parts[2])
        return await self._object(request, resource, namespace or "", parts[1])

    async def _collection(
        self, request: web.Request, resource: Resource, namespace: str | None
    ) -> web.StreamResponse:
        if request.method == "GET":
            if _flag(request, "watch"):
                view = _view(request)
                return await self._watches.stream(
                    request, resource, namespace, _predicate(request, resource), view
                )
            return self._list(request, resource, namespace)
        if request.method == "POST":
            if resource.namespaced and namespace is None:
                raise bad_request("an empty namespace may not be set during creation")
            obj, warnings = await self._registry.create(
                resource, namespace or "", await _body(request), dry_run=_dry_run(request)
            )
            return self._one(request, resource, obj, 201, warnings)
        if request.method == "DELETE":
            return await self._delete_collection(request, resource, namespace)
        raise errors.method_not_allowed(request.method)

    def _list(self, request: web.Request, resource: Resource, namespace: str | None) -> web.Response:
        limit = _number(request, "limit") or 0
        token = request.query.get("continue", "")
        if token:
            snapshot, start = self._resume(token)
        else:
            wanted = request.query.get("resourceVersion", "")
            if wanted and not wanted.isdigit():
                raise bad_request(f"Invalid value: {wanted!r}: resourceVersion is not a number")
            if wanted and int(wanted) > self._store.revision:
                raise errors.gateway_timeout(
                    f"Too large resource version: {wanted}, current: {self._store.revision}"
                )
            objects = self._store.list(resource, namespace)
            matches = _predicate(request, resource)
            if matches is not None:
                objects = [obj for obj in objects if matches(obj)]
            snapshot, start = _Snapshot(objects, self._store.revision), 0
        metadata: Object = {"resourceVersion": str(snapshot.revision)}
        page = snapshot.objects[start:]
        if limit and len(page) > limit:
            page = page[:limit]
            metadata["continue"] = self._remember(snapshot, start + limit)
            metadata["remainingItemCount"] = len(snapshot.objects) - start - limit
        include = _view(request)
        if include[0] == "Table":
            body = tables.table(resource, page, self._clock(), include=include[1], metadata=metadata)
        elif include[0] == "Metadata":
            body = {
                "kind": "PartialObjectMetadataList",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": metadata,
                "items": [tables.partial(obj) for obj in page],
            }
        else:
            body = {
                "kind": f"{resource.kind}List",
                "apiVersion": resource.api_version,
                "metadata": metadata,
                "items": page,
            }
        return _json(body)

    def _remember(self, snapshot: _Snapshot, position: int) -> str:
        key = next((k for k, known in self._snapshots.items() if known is snapshot), None)
        if key is None:
            key = secrets.token_hex(8)
            self._snapshots[key] = snapshot
            if len(self._snapshots) > _SNAPSHOTS:
                self._snapshots.popitem(last=False)
        return base64.urlsafe_b64encode(f"{key}:{position}".encode()).decode()

    def _resume(self, token: str) -> tuple[_Snapshot, int]:
        try:
            key, _, position = base64.urlsafe_b64decode(token.encode()).decode().partition(":")
            start = int(position)
        except ValueError as error:
            raise bad_request("continue key is not valid") from error
        snapshot = self._snapshots.get(key)
        if snapshot is None or not 0 <= start <= len(snapshot.objects):
            raise errors.expired(
                "The provided continue parameter is too old to display a consistent list result. You can "
                "start a new list without the continue parameter."
            )
        return snapshot, start

    def forget_pages(self) -> None:
        """Expire every continue token, as compaction does."""
        self._snapshots.clear()

    async def _delete_collection(
        self, request: web.Request, resource: Resource, namespace: str | None
    ) -> web.Response:
        if resource.namespaced and namespace is None:
            raise errors.method_not_allowed("DELETE")
        options = await self._delete_options(request)
        matches = _predicate(request, resource)
        gone: list[Object] = []
        for obj in self._store.list(resource, namespace):
            if matches is None or matches(obj):
                gone.append(
                    await self._registry.delete(resource, namespace or "", str(meta(obj)["name"]), options)
                )
        return _json(
            {
                "kind": f"{resource.kind}List",
                "apiVersion": resource.api_version,
                "metadata": {"resourceVersion": str(self._store.revision)},
                "items": gone,
            }
        )

    async def _object(
        self, request: web.Request, resource: Resource, namespace: str, name: str, subresource: str = ""
    ) -> web.StreamResponse:
        if request.method == "GET":
            if _flag(request, "watch"):
                raise bad_request("watch a collection with the field selector metadata.name")
            return self._one(request, resource, self._store.get(resource, namespace, name), 200, [])
        if request.method == "PUT":
            body = await _body(request)
            obj, warnings = await self._registry.update(
                resource, namespace, name, lambda _current: body, subresource=subresource,
                dry_run=_dry_run(request),
            )  # fmt: skip
            return self._one(request, resource, obj, 200, warnings)
        if request.method == "PATCH":
            change = await self._patch(request, resource)
            obj, warnings = await self._registry.update(
                resource, namespace, name, change, subresource=subresource, dry_run=_dry_run(request)
            )
            return self._one(request, resource, obj, 200, warnings)
        if request.method == "DELETE" and not subresource:
            options = await self._delete_options(request)
            obj = await self._registry.delete(resource, namespace, name, options)
            if self._store.find(resource, namespace, name) is not None:
                return _json(obj)
            details: Object = {"name": name, "kind": resource.plural, "uid": meta(obj).get("uid")}
            if resource.group:
                details["group"] = resource.group
            if resource is PODS:
                return _json(obj)
            return _json(_success(details))
        raise errors.method_not_allowed(request.method)

    async def _patch(self, request: web.Request, resource: Resource) -> Callable[[Object], Object]:
        content = request.content_type
        if content == "application/merge-patch+json":
            wanted = await _json_body(request)
            if not isinstance(wanted, dict):
                raise bad_request("a merge patch is an object")
            return lambda current: _as_object(patch.merge_patch(current, wanted))
        if content == "application/json-patch+json":
            operations = await _json_body(request)
            return lambda current: _as_object(patch.json_patch(current, operations))
        if content == "application/strategic-merge-patch+json":
            wanted = await _json_body(request)
            return lambda current: strategic.strategic_merge(resource.kind, current, wanted)
        raise errors.unsupported_media_type(content)

    async def _subresource(
        self, request: web.Request, resource: Resource, namespace: str, name: str, subresource: str
    ) -> web.StreamResponse:
        if subresource not in resource.subresources:
            raise errors.no_such_path()
        if request.method not in _SUBRESOURCE_METHODS[subresource]:
            raise errors.method_not_allowed(request.method)
        if subresource == "binding":
            self._registry.bind(namespace, name, await _body(request))
            return _json(_success(None), 201)
        if subresource == "eviction":
            await self._registry.evict(namespace, name, await _body(request))
            return _json(_success(None), 201)
        if subresource == "log":
            return await self._log(request, namespace, name)
        if subresource == "scale":
            return await self._scale(request, resource, namespace, name)
        return await self._object(request, resource, namespace, name, subresource)

    async def _scale(
        self, request: web.Request, resource: Resource, namespace: str, name: str
    ) -> web.Response:
        if request.method == "GET":
            return _json(scale_of(self._store.get(resource, namespace, name)))
        if request.method == "PUT":
            body = await _body(request)
            make: Callable[[Object], Object] = lambda _current: body  # noqa: E731
        else:
            make = await self._patch(request, resource)
        obj, _ = await self._registry.update(
            resource, namespace, name, lambda current: scaled(current, make(scale_of(current))),
            dry_run=_dry_run(request),
        )  # fmt: skip
        return _json(scale_of(obj))

    async def _log(self, request: web.Request, namespace: str, name: str) -> web.StreamResponse:
        pod = self._store.get(PODS, namespace, name)
        names = [
            str(container.get("name"))
            for field in ("initContainers", "containers")
            for container in dig(pod, "spec", field) or []
        ]
        container = request.query.get("container", "")
        if not container:
            regular = [str(item.get("name")) for item in dig(pod, "spec", "containers") or []]
            if len(regular) > 1:
                raise bad_request(
                    f"a container name must be specified for pod {name}, choose one of: {regular}"
                )
            container = regular[0]
        if container not in names:
            raise bad_request(f"container {container} is not valid for pod {name}")
        if not dig(pod, "spec", "nodeName"):
            raise bad_request(f"pod {name} does not have a host assigned")
        if self.logs is None:
            raise errors.internal("no kubelet serves logs here")
        now = self._clock()
        seconds = _number(request, "sinceSeconds")
        since = now - seconds if seconds is not None else parse_time(request.query.get("sinceTime", ""))
        chunks = self.logs.read_log(
            LogRequest(
                pod=pod,
                container=container,
                follow=_flag(request, "follow"),
                previous=_flag(request, "previous"),
                timestamps=_flag(request, "timestamps"),
                tail_lines=_number(request, "tailLines"),
                since=since,
                limit_bytes=_number(request, "limitBytes"),
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

    def _one(
        self, request: web.Request, resource: Resource, obj: Object, code: int, warnings: list[str]
    ) -> web.Response:
        view, include = _view(request)
        if view == "Table":
            metadata: Object = {"resourceVersion": meta(obj).get("resourceVersion", "")}
            body = tables.table(resource, [obj], self._clock(), include=include, metadata=metadata)
        else:
            body = tables.partial(obj) if view == "Metadata" else obj
        response = _json(body, code)
        for warning in warnings[:20]:
            text = " ".join(warning.split())[:1024].replace("\\", "\\\\").replace('"', '\\"')
            response.headers.add("Warning", f'299 - "{text}"')
        return response

    async def _delete_options(self, request: web.Request) -> DeleteOptions:
        body = await _body(request) if request.can_read_body else None
        return DeleteOptions(
            body,
            grace_s=_number(request, "gracePeriodSeconds"),
            dry_run=_dry_run(request),
            propagation=request.query.get("propagationPolicy", ""),
        )


def _view(request: web.Request) -> tuple[str, str]:
    """(``Table``, ``Metadata`` or ``Object``; what table rows carry): the first known media type wins."""
    for media in request.headers.get("Accept", "").split(","):
        parameters = {
            key.strip(): value.strip()
            for key, _, value in (part.partition("=") for part in media.split(";")[1:])
        }
        if media.split(";")[0].strip() not in ("application/json", "*/*", ""):
            continue
        if parameters.get("as") == "Table" and parameters.get("g") == "meta.k8s.io":
            if parameters.get("v") == "v1":
                return "Table", request.query.get("includeObject", "Metadata")
            continue
        if parameters.get("as", "").startswith("PartialObjectMetadata"):
            return "Metadata", ""
        break
    return "Object", ""


def _predicate(request: web.Request, resource: Resource) -> selectors.Predicate | None:
    found = [
        predicate
        for predicate in (
            selectors.label_predicate(request.query.get("labelSelector", "")),
            selectors.field_predicate(resource.key, request.query.get("fieldSelector", "")),
        )
        if predicate is not None
    ]
    if not found:
        return None
    return lambda obj: all(predicate(obj) for predicate in found)


def _flag(request: web.Request, name: str) -> bool:
    return request.query.get(name, "") in ("1", "t", "true", "True", "TRUE")


def _number(request: web.Request, name: str) -> int | None:
    text = request.query.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise bad_request(f"Invalid value: {name}={text!r} is not a number")
    return int(text)


def _dry_run(request: web.Request) -> bool:
    wanted = request.query.getall("dryRun", [])
    if any(value != "All" for value in wanted):
        raise bad_request(f"Invalid value: dryRun={wanted}; the only supported value is All")
    return bool(wanted)


async def _body(request: web.Request) -> Any:
    if request.content_type in ("application/yaml", "application/x-yaml"):
        try:
            return yaml.safe_load(await request.read())
        except yaml.YAMLError as error:
            raise bad_request(f"the body of the request is not YAML: {error}") from error
    if request.content_type not in ("application/json", "application/octet-stream"):
        raise errors.unsupported_media_type(request.content_type)
    return await _json_body(request)


async def _json_body(request: web.Request) -> Any:
    try:
        return msgspec.json.decode(await request.read())
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"the body of the request is not JSON: {error}") from error


def _as_object(value: Any) -> Object:
    if not isinstance(value, dict):
        raise bad_request("the patch does not leave an object")
    return value


def _success(details: Object | None) -> Object:
    body: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    if details:
        body["details"] = details
    return body


def _json(body: Any, code: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=code, content_type="application/json")
