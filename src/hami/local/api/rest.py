"""Requests on resources: path, query and body in, answer out. Lists, tables, watches and logs included."""

from __future__ import annotations

import base64
import secrets
from collections import OrderedDict
from collections.abc import Callable

from aiohttp import web

from hami.local.api import errors, requests, reviews, strategy, tables
from hami.local.api.apply import Applier
from hami.local.api.errors import bad_request
from hami.local.api.objects import Object, meta
from hami.local.api.registry import DeleteOptions, Registry
from hami.local.api.resources import PODS, VERBS, Resource
from hami.local.api.responses import json_response, success
from hami.local.api.subresources import OBJECT_METHODS, Subresources
from hami.local.api.tokens import Tokens
from hami.local.api.watch import Watches

_SNAPSHOTS = 64  # unfinished paged lists that are remembered; older ones answer 410


class _Snapshot:
    __slots__ = ("objects", "revision")

    def __init__(self, objects: list[Object], revision: int) -> None:
        self.objects = objects
        self.revision = revision


class Rest:
    """The resource handlers of one API server."""

    def __init__(
        self, registry: Registry, clock: Callable[[], float], bookmark_interval_s: float, tokens: Tokens
    ) -> None:
        self.subresources = Subresources(registry, clock, tokens)
        self._tokens = tokens
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
        requests.check_parameters(request)
        if resource.verbs != VERBS:
            return await self._ask(request, resource, parts)
        if len(parts) == 1:
            return await self._collection(request, resource, namespace)
        if resource.namespaced and namespace is None:
            raise errors.no_such_path()
        if len(parts) == 3:
            return await self._subresource(request, resource, namespace or "", parts[1], parts[2])
        return await self._object(request, resource, namespace or "", parts[1])

    async def _ask(self, request: web.Request, resource: Resource, parts: list[str]) -> web.Response:
        """A review: only POST on its collection."""
        if len(parts) != 1:
            raise errors.no_such_path()
        if request.method != "POST":
            raise errors.method_not_allowed(request.method)
        user = self._tokens.user_of(request.headers.get("Authorization", ""))
        if user is None:
            raise errors.unauthorized()
        return json_response(reviews.answer(resource, await requests.body(request), user, self._tokens), 201)

    async def _collection(
        self, request: web.Request, resource: Resource, namespace: str | None
    ) -> web.StreamResponse:
        if request.method == "GET":
            if requests.flag(request, "watch"):
                view = requests.view(request)
                return await self._watches.stream(
                    request, resource, namespace, requests.predicate(request, resource), view
                )
            return self._list(request, resource, namespace)
        if request.method == "POST":
            if resource.namespaced and namespace is None:
                raise bad_request("an empty namespace may not be set during creation")
            obj, warnings = await self._registry.create(
                resource, namespace or "", await requests.body(request), dry_run=requests.dry_run(request)
            )
            return self._one(request, resource, obj, 201, warnings)
        if request.method == "DELETE":
            return await self._delete_collection(request, resource, namespace)
        raise errors.method_not_allowed(request.method)

    def _list(self, request: web.Request, resource: Resource, namespace: str | None) -> web.Response:
        limit = requests.number(request, "limit") or 0
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
            matches = requests.predicate(request, resource)
            if matches is not None:
                objects = [obj for obj in objects if matches(obj)]
            snapshot, start = _Snapshot(objects, self._store.revision), 0
        metadata: Object = {"resourceVersion": str(snapshot.revision)}
        page = snapshot.objects[start:]
        if limit and len(page) > limit:
            page = page[:limit]
            metadata["continue"] = self._remember(snapshot, start + limit)
            metadata["remainingItemCount"] = len(snapshot.objects) - start - limit
        include = requests.view(request)
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
        return json_response(body)

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
        matches = requests.predicate(request, resource)
        gone: list[Object] = []
        for obj in self._store.list(resource, namespace):
            if matches is None or matches(obj):
                gone.append(
                    await self._registry.delete(resource, namespace or "", str(meta(obj)["name"]), options)
                )
        return json_response(
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
            if requests.flag(request, "watch"):
                raise bad_request("watch a collection with the field selector metadata.name")
            return self._one(request, resource, self._store.get(resource, namespace, name), 200, [])
        if request.method == "PUT":
            body = await requests.body(request)
            obj, warnings = await self._registry.update(
                resource, namespace, name, lambda _current: body, subresource=subresource,
                dry_run=requests.dry_run(request), manager=requests.manager_of(request),
            )  # fmt: skip
            return self._one(request, resource, obj, 200, warnings)
        if request.method == "PATCH":
            if request.content_type == requests.APPLY:
                return await self._apply(request, resource, namespace, name, subresource)
            change = await requests.change_of(request, resource.kind)
            obj, warnings = await self._registry.update(
                resource, namespace, name, change, subresource=subresource,
                dry_run=requests.dry_run(request), manager=requests.manager_of(request),
            )  # fmt: skip
            return self._one(request, resource, obj, 200, warnings)
        if request.method == "DELETE" and not subresource:
            options = await self._delete_options(request)
            obj = await self._registry.delete(resource, namespace, name, options)
            if self._store.find(resource, namespace, name) is not None:
                return json_response(obj)
            details: Object = {"name": name, "kind": resource.plural, "uid": meta(obj).get("uid")}
            if resource.group:
                details["group"] = resource.group
            if resource is PODS:
                return json_response(obj)
            return json_response(success(details))
        raise errors.method_not_allowed(request.method)

    async def _subresource(
        self, request: web.Request, resource: Resource, namespace: str, name: str, subresource: str
    ) -> web.StreamResponse:
        if subresource not in resource.subresources:
            raise errors.no_such_path()
        methods = OBJECT_METHODS.get(subresource)
        if methods is None:
            return await self.subresources.handle(request, resource, namespace, name, subresource)
        if request.method not in methods:
            raise errors.method_not_allowed(request.method)
        return await self._object(request, resource, namespace, name, subresource)

    async def _apply(
        self, request: web.Request, resource: Resource, namespace: str, name: str, subresource: str
    ) -> web.Response:
        """Server-side apply: creates the object where there is none."""
        applier = Applier(
            resource, request.query.get("fieldManager", ""), force=requests.flag(request, "force"),
            subresource=subresource, now=self._clock(),
        )  # fmt: skip
        wanted = await requests.applied(request)
        dry_run = requests.dry_run(request)
        if self._store.find(resource, namespace, name) is None and not subresource:
            body = strategy.check_identity(resource, applier.created(wanted), namespace, name)
            obj, warnings = await self._registry.create(resource, namespace, body, dry_run=dry_run)
            return self._one(request, resource, obj, 201, warnings)
        obj, warnings = await self._registry.update(
            resource, namespace, name, lambda current: applier.applied(current, wanted),
            subresource=subresource, dry_run=dry_run, manager=None,
        )  # fmt: skip
        return self._one(request, resource, obj, 200, warnings)

    def _one(
        self, request: web.Request, resource: Resource, obj: Object, code: int, warnings: list[str]
    ) -> web.Response:
        view, include = requests.view(request)
        if view == "Table":
            metadata: Object = {"resourceVersion": meta(obj).get("resourceVersion", "")}
            body = tables.table(resource, [obj], self._clock(), include=include, metadata=metadata)
        else:
            body = tables.partial(obj) if view == "Metadata" else obj
        return json_response(body, code, warnings)

    async def _delete_options(self, request: web.Request) -> DeleteOptions:
        body = await requests.body(request) if request.can_read_body else None
        return DeleteOptions(
            body,
            grace_s=requests.number(request, "gracePeriodSeconds"),
            dry_run=requests.dry_run(request),
            propagation=request.query.get("propagationPolicy", ""),
        )
