"""Records Events in the embedded cluster, counting repeats in one object as Kubernetes clients do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from secrets import token_hex

from hami.local.api.errors import ApiError
from hami.local.api.objects import Object, clone, meta, name_of, namespace_of, rfc3339
from hami.local.api.registry import Registry
from hami.local.api.resources import EVENTS

_LOG = logging.getLogger(__name__)
_REMEMBERED = 4096
_MESSAGE_LIMIT = 1024


class Recorder:
    """Events of one component (``default-scheduler``, ``kubelet``). ``host`` names the node, if any."""

    def __init__(
        self, registry: Registry, clock: Callable[[], float], component: str, host: str = ""
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._source: dict[str, str] = {"component": component} | ({"host": host} if host else {})
        self._known: dict[tuple[str, ...], tuple[str, str]] = {}

    async def record(self, obj: Object, kind: str, reason: str, message: str) -> None:
        """Add or count one event about ``obj``. ``kind`` is Normal or Warning. Failures are logged only."""
        message = message[:_MESSAGE_LIMIT]
        namespace = namespace_of(obj) or "default"
        key = (str(meta(obj).get("uid")), kind, reason, message)
        try:
            known = self._known.get(key)
            if known is not None:
                current = self._registry.store.find(EVENTS, *known)
                if current is not None:
                    await self._registry.update(EVENTS, *known, self._count)
                    return
            created, _ = await self._registry.create(
                EVENTS, namespace, self._new(obj, namespace, kind, reason, message)
            )
        except ApiError as error:
            _LOG.info("event not recorded: %s", error)
            return
        if len(self._known) >= _REMEMBERED:
            self._known.pop(next(iter(self._known)))
        self._known[key] = (namespace, name_of(created))

    def _count(self, current: Object) -> Object:
        event: Object = clone(current)
        event["count"] = int(event.get("count") or 1) + 1
        event["lastTimestamp"] = rfc3339(self._clock())
        return event

    def _new(self, obj: Object, namespace: str, kind: str, reason: str, message: str) -> Object:
        now = rfc3339(self._clock())
        return {
            "metadata": {"name": f"{name_of(obj)[:200]}.{token_hex(8)}", "namespace": namespace},
            "involvedObject": {
                "kind": obj.get("kind"),
                "apiVersion": obj.get("apiVersion"),
                "namespace": namespace_of(obj),
                "name": name_of(obj),
                "uid": meta(obj).get("uid"),
                "resourceVersion": meta(obj).get("resourceVersion"),
            },
            "type": kind,
            "reason": reason,
            "message": message,
            "source": self._source,
            "reportingComponent": self._source["component"],
            "reportingInstance": self._source.get("host", ""),
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
