"""A versioned object store with a watch log: what etcd and the watch cache are to a real API server.

Pure: no clock, no I/O. Objects are plain dicts and are never changed once stored; every change makes one
revision, and each revision is one entry of the log of its resource.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from hami.local.api.errors import already_exists, expired, not_found, stale
from hami.local.api.objects import Object, meta
from hami.local.api.resources import Resource
from hami.local.api.views import View, view_of

Change = Literal["ADDED", "MODIFIED", "DELETED"]


@dataclass(frozen=True, slots=True)
class Event:
    """One change: ``obj`` after it (the last state for DELETED), ``previous`` before it."""

    change: Change
    revision: int
    obj: Object
    previous: Object | None


class _Shelf:
    """Objects and log of one resource."""

    __slots__ = ("compacted", "log", "objects", "revisions")

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.log: list[Event] = []
        self.revisions: list[int] = []
        self.compacted = 0


class Store:
    """Objects of every resource under one revision counter.

    ``history`` is how many changes per resource a watch can resume over; older ones give 410 Expired.
    """

    def __init__(self, *, history: int = 20_000) -> None:
        if history < 1:
            raise ValueError("history must be at least 1")
        self._history = history
        self._shelves: dict[str, _Shelf] = {}
        self._listeners: list[Callable[[str, Event], None]] = []
        self.revision = 0

    def subscribe(self, listener: Callable[[str, Event], None]) -> Callable[[], None]:
        """Call ``listener(storage key, event)`` after each change; returns what ends that."""
        self._listeners.append(listener)

        def cancel() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return cancel

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """The stored object itself: do not change it. Raises 404."""
        found = self.find(resource, namespace, name)
        if found is None:
            raise not_found(resource.group, resource.plural, name)
        return found

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        found = self._shelf(resource).objects.get((namespace, name))
        view = view_of(resource)
        return found if found is None or view is None else view.shown(found)

    def list(self, resource: Resource, namespace: str | None = None) -> list[Object]:
        """Objects in (namespace, name) order; ``namespace`` None means all."""
        shelf = self._shelf(resource)
        keys = sorted(key for key in shelf.objects if namespace is None or key[0] == namespace)
        view = view_of(resource)
        if view is not None:
            return [view.shown(shelf.objects[key]) for key in keys]
        return [shelf.objects[key] for key in keys]

    def create(self, resource: Resource, obj: Object) -> Object:
        """Store a new object (owned by the store from now on). Raises 409 AlreadyExists."""
        shelf = self._shelf(resource)
        if self._key(obj) in shelf.objects:
            raise already_exists(resource.group, resource.plural, self._key(obj)[1])
        return self._change(shelf, resource, "ADDED", obj, None)

    def update(self, resource: Resource, obj: Object) -> Object:
        """Replace an object; a ``metadata.resourceVersion`` that is not the stored one raises 409."""
        shelf = self._shelf(resource)
        return self._change(shelf, resource, "MODIFIED", obj, self._current(shelf, resource, obj))

    def delete(self, resource: Resource, obj: Object) -> Object:
        """Remove the object that ``obj`` names; ``obj`` is its last state. Raises 404 and 409 as update."""
        shelf = self._shelf(resource)
        return self._change(shelf, resource, "DELETED", obj, self._current(shelf, resource, obj))

    def _change(
        self, shelf: _Shelf, resource: Resource, change: Change, obj: Object, previous: Object | None
    ) -> Object:
        """Put the object on the shelf or take it off, and tell everybody; what a reader sees of it."""
        view = view_of(resource)
        stored = obj if view is None else view.stored(obj)
        self._record(shelf, change, stored, previous)
        if change == "DELETED":
            del shelf.objects[self._key(stored)]
        else:
            shelf.objects[self._key(stored)] = stored
        self._tell(resource, shelf.log[-1])
        return stored if view is None else view.shown(stored)

    def _current(self, shelf: _Shelf, resource: Resource, wanted: Object) -> Object:
        """The stored object that ``wanted`` names. Raises 404, and 409 as `check_version`."""
        namespace, name = self._key(wanted)
        stored = shelf.objects.get((namespace, name))
        if stored is None:
            raise not_found(resource.group, resource.plural, name)
        self.check_version(resource, stored, wanted)
        return stored

    @staticmethod
    def check_version(resource: Resource, stored: Object, wanted: Object) -> None:
        """409 if ``wanted`` carries a resourceVersion or uid other than that of ``stored``."""
        ours, theirs = meta(stored), meta(wanted)
        for field in ("resourceVersion", "uid"):
            if theirs.get(field) and theirs[field] != ours.get(field):
                raise stale(resource.group, resource.plural, str(ours.get("name", "")))

    def events_since(self, resource: Resource, revision: int) -> Iterator[Event]:
        """Changes after ``revision``, oldest first. Raises 410 when the log no longer reaches back."""
        shelf = self._shelf(resource)
        if revision < shelf.compacted:
            raise expired(f"too old resource version: {revision} ({shelf.compacted})")
        events = shelf.log[bisect_right(shelf.revisions, revision) :]
        view = view_of(resource)
        if view is not None:
            return (_seen_through(view, event) for event in events)
        return iter(events)

    def compact(self, revision: int | None = None) -> None:
        """Forget the log up to ``revision`` (default: all of it); older watches get 410."""
        upto = self.revision if revision is None else min(revision, self.revision)
        for shelf in self._shelves.values():
            self._cut(shelf, bisect_right(shelf.revisions, upto))
            shelf.compacted = max(shelf.compacted, upto)

    def _shelf(self, resource: Resource) -> _Shelf:
        shelf = self._shelves.get(resource.storage_key)
        if shelf is None:
            shelf = self._shelves[resource.storage_key] = _Shelf()
        return shelf

    @staticmethod
    def _key(obj: Object) -> tuple[str, str]:
        metadata = meta(obj)
        return str(metadata.get("namespace") or ""), str(metadata["name"])

    def _record(self, shelf: _Shelf, change: Change, obj: Object, previous: Object | None) -> None:
        self.revision += 1
        meta(obj)["resourceVersion"] = str(self.revision)
        shelf.log.append(Event(change, self.revision, obj, previous))
        shelf.revisions.append(self.revision)
        if len(shelf.log) > self._history + self._history // 4:
            excess = len(shelf.log) - self._history
            shelf.compacted = shelf.revisions[excess - 1]
            self._cut(shelf, excess)

    @staticmethod
    def _cut(shelf: _Shelf, count: int) -> None:
        del shelf.log[:count]
        del shelf.revisions[:count]

    def _tell(self, resource: Resource, event: Event) -> None:
        for listener in tuple(self._listeners):
            listener(resource.storage_key, event)


def _seen_through(view: View, event: Event) -> Event:
    previous = None if event.previous is None else view.shown(event.previous)
    return Event(event.change, event.revision, view.shown(event.obj), previous)
