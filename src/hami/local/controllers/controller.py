"""The base of the controllers, and the manager that feeds each with the keys of what has changed."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hami.local.api.errors import ApiError
from hami.local.api.objects import Object, clone, meta, name_of, namespace_of
from hami.local.api.recorder import Recorder
from hami.local.api.registry import DeleteOptions, Registry
from hami.local.api.resources import PODS, Resource
from hami.local.api.selectors import matches_label_selector
from hami.local.api.store import Event
from hami.local.controllers.common import controller_of

_LOG = logging.getLogger(__name__)
_FIRST_RETRY_S = 0.05
_MAX_RETRY_S = 30.0

Key = tuple[str, str]
"""(namespace, name); the garbage collector uses ("", uid)."""


@dataclass(frozen=True, slots=True)
class Context:
    """What every controller works with; ``clock`` gives seconds since the epoch."""

    registry: Registry
    clock: Callable[[], float]


class Controller(ABC):
    """Brings what exists in line with the spec of the objects of ``resource``."""

    resource: Resource
    component: str

    def __init__(self, context: Context) -> None:
        self.registry = context.registry
        self.store = context.registry.store
        self.clock = context.clock
        self.recorder = Recorder(context.registry, context.clock, self.component)

    def keys(self, storage_key: str, event: Event) -> Iterable[Key]:
        """What to look at again after ``event``."""
        if storage_key == self.resource.key:
            # Status is what controllers write themselves: to look again at once would be a tight loop.
            return [(namespace_of(event.obj), name_of(event.obj))] if _beyond_status(event) else []
        if storage_key == PODS.key:
            return self.owner_keys(event)
        return []

    def initial(self) -> Iterable[Key]:
        """What to look at when the controller starts."""
        return [(namespace_of(obj), name_of(obj)) for obj in self.store.list(self.resource)]

    @abstractmethod
    async def sync(self, key: Key) -> float | None:
        """Look at one object; the seconds after which to look again without a change, if any."""

    def owner_keys(self, event: Event) -> list[Key]:
        """The objects of ``resource`` that control the changed object, or may adopt it."""
        found: list[Key] = []
        for obj in (event.obj, event.previous):
            reference = controller_of(obj) if obj is not None else None
            if reference is not None and self._is_mine(reference):
                found.append((namespace_of(event.obj), str(reference.get("name"))))
        if not found and controller_of(event.obj) is None and event.change != "DELETED":
            labels = meta(event.obj).get("labels") or {}
            found = [
                (namespace_of(owner), name_of(owner))
                for owner in self.store.list(self.resource, namespace_of(event.obj))
                if matches_label_selector(owner["spec"].get("selector"), labels)
            ]
        return found

    def _is_mine(self, reference: Object) -> bool:
        group = str(reference.get("apiVersion") or "").rpartition("/")[0]
        return reference.get("kind") == self.resource.kind and group == self.resource.group

    async def write_status(self, obj: Object, status: Object) -> None:
        """Store ``status`` if it differs and the object is still the same one."""
        uid = meta(obj)["uid"]
        stored = self.store.find(self.resource, namespace_of(obj), name_of(obj))
        if stored is None or meta(stored)["uid"] != uid or stored.get("status") == status:
            return

        def change(current: Object) -> Object:
            return {**clone(current), "status": status} if meta(current)["uid"] == uid else current

        await self.registry.update(
            self.resource, namespace_of(obj), name_of(obj), change, subresource="status"
        )

    async def delete(self, resource: Resource, obj: Object, propagation: str = "") -> None:
        """Delete ``obj``; one that has gone, or another of its name, is left alone."""
        options = DeleteOptions({"preconditions": {"uid": meta(obj)["uid"]}}, propagation=propagation)
        try:
            await self.registry.delete(resource, namespace_of(obj), name_of(obj), options)
        except ApiError as error:
            if error.code not in (404, 409):
                raise


def _beyond_status(event: Event) -> bool:
    """Whether something else than the status has changed."""
    if event.previous is None or event.change != "MODIFIED":
        return True
    return _essence(event.previous) != _essence(event.obj)


def _essence(obj: Object) -> tuple[Object, Object]:
    metadata = {
        field: value
        for field, value in meta(obj).items()
        if field not in ("resourceVersion", "managedFields")
    }
    return metadata, obj.get("spec") or {}


class _Runner:
    """The queue and task of one controller: a key waits once, failures are tried again later and later."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self._queue: dict[Key, None] = {}
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        for key in self.controller.initial():
            self.add(key)
        self._task = asyncio.create_task(self._run(), name=self.controller.component)

    async def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def add(self, key: Key) -> None:
        self._queue[key] = None
        self._wake.set()

    def add_later(self, key: Key, delay_s: float) -> None:
        """Of several delays for one key the last one counts."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

        def due() -> None:
            self._timers.pop(key, None)
            self.add(key)

        self._timers[key] = asyncio.get_running_loop().call_later(delay_s, due)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            while self._queue:
                key = next(iter(self._queue))
                del self._queue[key]
                await self._sync(key)
            await self._wake.wait()

    async def _sync(self, key: Key) -> None:
        try:
            again = await self.controller.sync(key)
        except ApiError as error:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            _LOG.debug("%s: %s/%s: %s", self.controller.component, *key, error)
            self.add_later(key, min(_FIRST_RETRY_S * 2 ** min(failures, 20), _MAX_RETRY_S))
            return
        except asyncio.CancelledError:
            raise
        except Exception:
            self._failures[key] = self._failures.get(key, 0) + 1
            _LOG.exception("%s failed on %s/%s", self.controller.component, *key)
            self.add_later(key, _MAX_RETRY_S)
            return
        self._failures.pop(key, None)
        if again is not None:
            self.add_later(key, max(again, 0.01))


class ControllerManager:
    """Runs ``controllers`` between ``start`` and ``stop``; each has a task of its own."""

    def __init__(self, context: Context, controllers: Sequence[Controller]) -> None:
        self._store = context.registry.store
        self._controllers = controllers
        self._runners: list[_Runner] = []
        self._cancel: Callable[[], None] | None = None

    def start(self) -> None:
        self._runners = [_Runner(controller) for controller in self._controllers]
        self._cancel = self._store.subscribe(self._observe)
        for runner in self._runners:
            runner.start()

    async def stop(self) -> None:
        if self._cancel is not None:
            self._cancel()
            self._cancel = None
        await asyncio.gather(*(runner.stop() for runner in self._runners))
        self._runners = []

    def _observe(self, storage_key: str, event: Event) -> None:
        for runner in self._runners:
            try:
                keys = list(runner.controller.keys(storage_key, event))
            except Exception:  # the change is stored already: whoever made it is not to blame
                _LOG.exception("%s cannot read a change of %s", runner.controller.component, storage_key)
                continue
            for key in keys:
                runner.add(key)
