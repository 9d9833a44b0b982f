"""Owner references: dependents go with their owners, wait for them, or are set free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from hami.local.api.errors import ApiError
from hami.local.api.objects import Object, meta, name_of, namespace_of
from hami.local.api.registry import FOREGROUND, ORPHAN, Change
from hami.local.api.resources import PODS, Resource
from hami.local.api.store import Event
from hami.local.controllers.common import is_deleting, owners_of, without_finalizer, without_owner
from hami.local.controllers.controller import Context, Controller, Key

_REMEMBERED = 50_000  # uids of owners that have gone, so that late dependents follow them


class GarbageCollector(Controller):
    """Keys are ("", uid of an owner). An owner that was never seen is taken to exist."""

    resource = PODS
    component = "garbage-collector"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._by_key = {
            resource.storage_key: resource
            for resource in context.registry.table.resources
            if not resource.stored_as
        }
        self._dependents: dict[str, set[tuple[str, str, str]]] = {}
        self._owners: dict[str, tuple[str, str, str]] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()

    def initial(self) -> Iterable[Key]:
        for storage_key, resource in self._by_key.items():
            for obj in self.store.list(resource):
                self._note(storage_key, obj)
        return [("", uid) for uid in self._dependents]

    def keys(self, storage_key: str, event: Event) -> Iterable[Key]:
        """The object itself as an owner, and the owners that it names."""
        if storage_key == "events":
            return []
        uid = str(meta(event.obj).get("uid"))
        if event.change == "DELETED":
            where = (storage_key, namespace_of(event.obj), name_of(event.obj))
            for owner in owners_of(event.obj):
                self._dependents.get(str(owner.get("uid")), set()).discard(where)
            waiting = self._owners.pop(uid, None) is not None or uid in self._dependents
            self._gone[uid] = None
            if len(self._gone) > _REMEMBERED:
                self._gone.popitem(last=False)
            owners = [("", str(owner.get("uid"))) for owner in owners_of(event.obj)]
            return [("", uid), *owners] if waiting else owners
        return self._note(storage_key, event.obj)

    def _note(self, storage_key: str, obj: Object) -> list[Key]:
        keys: list[Key] = []
        where = (storage_key, namespace_of(obj), name_of(obj))
        for owner in owners_of(obj):
            uid = str(owner.get("uid"))
            self._dependents.setdefault(uid, set()).add(where)
            if uid in self._gone:
                keys.append(("", uid))
        if is_deleting(obj) and {FOREGROUND, ORPHAN} & set(meta(obj).get("finalizers") or []):
            uid = str(meta(obj)["uid"])
            self._owners[uid] = where
            keys.append(("", uid))
        return keys

    async def sync(self, key: Key) -> float | None:
        uid = key[1]
        if uid in self._gone:
            for resource, obj in self._dependents_of(uid):
                await self._lose_owner(resource, obj, uid)
            self._dependents.pop(uid, None)
            return None
        where = self._owners.get(uid)
        owner = self._find(where) if where is not None else None
        if where is None or owner is None:
            return None
        finalizers = meta(owner).get("finalizers") or []
        if ORPHAN in finalizers:
            for resource, obj in self._dependents_of(uid):
                await self._drop_reference(resource, obj, uid)
            await self._drop_finalizer(where, ORPHAN)
        elif FOREGROUND in finalizers:
            left = self._dependents_of(uid)
            for resource, obj in left:
                if not is_deleting(obj):
                    await self.delete(resource, obj, "Foreground")
            blocking = [
                obj
                for _, obj in self._dependents_of(uid)
                if any(item.get("uid") == uid and item.get("blockOwnerDeletion") for item in owners_of(obj))
            ]
            if not blocking:
                await self._drop_finalizer(where, FOREGROUND)
        return None

    def _find(self, where: tuple[str, str, str]) -> Object | None:
        return self.store.find(self._by_key[where[0]], where[1], where[2])

    def _dependents_of(self, uid: str) -> list[tuple[Resource, Object]]:
        found: list[tuple[Resource, Object]] = []
        for where in sorted(self._dependents.get(uid, ())):
            obj = self._find(where)
            if obj is not None and any(owner.get("uid") == uid for owner in owners_of(obj)):
                found.append((self._by_key[where[0]], obj))
        return found

    async def _lose_owner(self, resource: Resource, obj: Object, uid: str) -> None:
        """The owner has gone: so does the dependent, unless it has others."""
        others = [owner for owner in owners_of(obj) if str(owner.get("uid")) not in self._gone]
        if others:
            await self._drop_reference(resource, obj, uid)
        elif not is_deleting(obj):
            await self.delete(resource, obj, "Background")

    async def _drop_reference(self, resource: Resource, obj: Object, uid: str) -> None:
        await self._update(resource, obj, lambda stored: without_owner(stored, uid))

    async def _drop_finalizer(self, where: tuple[str, str, str], finalizer: str) -> None:
        owner = self._find(where)
        if owner is not None:
            resource = self._by_key[where[0]]
            await self._update(resource, owner, lambda stored: without_finalizer(stored, finalizer))

    async def _update(self, resource: Resource, obj: Object, change: Change) -> None:
        try:
            await self.registry.update(resource, namespace_of(obj), name_of(obj), change)
        except ApiError as error:
            if error.code != 404:
                raise
