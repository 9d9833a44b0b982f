"""A changed device config is taken up by the running process (scheduler.md, "Go beyond" 9).

The state for the new profiles is made beside the one in force, from every object the informers list anew, and
takes its place in one step of the loop: before it every decision is made under the old config, after it under
the new one. A file that cannot be used changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from hami.kube.events import EventRecorder, EventType, ObjectRef
from hami.kube.mounted import CHECK_EVERY_S
from hami.protocol.errors import HamiError
from hami.protocol.views import Node, Pod, ResourceQuota
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge.device_config import DeviceConfigFile, Profiles
from hami.scheduler.edge.informers import Informers

log = logging.getLogger(__name__)
T = TypeVar("T")
Apply = Callable[[Profiles], Awaitable[None]]
"""Takes up these profiles; raises ``HamiError`` when it could not, and then nothing has changed."""


class ReloadError(HamiError):
    """A good config could not be taken up."""


class ConfigReload:
    """Looks at the file every few seconds and hands good changes on; tells of bad ones in the log, by an
    event on the scheduler's own pod and in ``failing``."""

    def __init__(self, source: DeviceConfigFile, recorder: EventRecorder, pod: ObjectRef | None) -> None:
        self.applied = 0
        self._source = source
        self._recorder = recorder
        self._pod = pod

    @property
    def failing(self) -> bool:
        """Whether the file holds what could not be taken up."""
        return self._source.differs

    async def run(self, apply: Apply) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            await self.check(apply)

    async def check(self, apply: Apply) -> None:
        """Look once, and do what the file says if it has changed."""
        try:
            parsed = await asyncio.to_thread(self._source.refreshed)
            if parsed is None:
                return
            await apply(parsed.profiles)
        except HamiError as error:
            cause = f"{error}; the config in force stays"
            log.warning("config.bad", extra={"cause": cause})
            self._tell("Warning", "DeviceConfigInvalid", cause)
            return
        self._source.accept(parsed)
        self.applied += 1
        log.info("config.reloaded", extra={"vendors": [one.common_word for one in parsed.profiles]})
        self._tell("Normal", "DeviceConfigReloaded", "the changed device config is in force")

    def _tell(self, kind: EventType, reason: str, text: str) -> None:
        if self._pod is not None:
            self._recorder.record(self._pod, kind, reason, text)


class Feed:
    """Tells a state that is being made of every object there is, and of every change, until it is stopped."""

    def __init__(
        self, informers: Informers, state: ClusterState, clock: Callable[[], float] = time.time
    ) -> None:
        self._informers = informers
        self._nodes = _Into[Node](
            lambda node: state.upsert_node(node, clock()), lambda node: state.delete_node(node.name)
        )
        self._quotas = _Into[ResourceQuota](
            state.upsert_quota, lambda quota: state.delete_quota(quota.namespace, quota.name)
        )
        self._pods = _Into[Pod](state.upsert_pod, lambda pod: state.delete_pod(pod.uid))

    async def until_complete(self) -> None:
        """Return once the state knows every object; raises ``ReloadError`` when it failed at one."""
        informers = self._informers
        await informers.nodes.tell(self._nodes)
        await informers.quotas.tell(self._quotas)
        await informers.pods.tell(self._pods)
        for into in (self._nodes, self._quotas, self._pods):
            if into.failure is not None:
                raise ReloadError(f"an object cannot be counted: {into.failure!r}") from into.failure

    def stop(self) -> None:
        """The state gets no more objects."""
        for informer in (self._informers.nodes, self._informers.quotas, self._informers.pods):
            informer.tell_no_more()


class _Into(Generic[T]):
    """An informer's handler that remembers the first failure."""

    def __init__(self, upsert: Callable[[T], object], delete: Callable[[T], object]) -> None:
        self.failure: Exception | None = None
        self._upsert = upsert
        self._delete = delete

    def on_add(self, obj: T) -> None:
        self._do(self._upsert, obj)

    def on_update(self, _old: T, obj: T) -> None:
        self._do(self._upsert, obj)

    def on_delete(self, obj: T) -> None:
        self._do(self._delete, obj)

    def _do(self, change: Callable[[T], object], obj: T) -> None:
        try:
            change(obj)
        except Exception as error:
            self.failure = self.failure or error
            raise
