"""Resources that show the objects of another one in a form of their own: events.k8s.io/v1 of core events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hami.local.api.objects import Object, meta
from hami.local.api.resources import EVENTS, EVENTS_V1, Resource

# field of events.k8s.io/v1 -> field of the core form
_EVENT_FIELDS = {
    "regarding": "involvedObject", "related": "related", "note": "message",
    "reportingController": "reportingComponent", "deprecatedSource": "source",
    "deprecatedFirstTimestamp": "firstTimestamp", "deprecatedLastTimestamp": "lastTimestamp",
    "deprecatedCount": "count",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class View:
    """Both directions of a form; neither changes its argument."""

    shown: Callable[[Object], Object]
    stored: Callable[[Object], Object]


def _rename(obj: Object, resource: Resource, names: dict[str, str]) -> Object:
    renamed = {names.get(field, field): value for field, value in obj.items()}
    return {**renamed, "kind": resource.kind, "apiVersion": resource.api_version, "metadata": {**meta(obj)}}


def _event_shown(event: Object) -> Object:
    return _rename(event, EVENTS_V1, {core: field for field, core in _EVENT_FIELDS.items()})


def _event_stored(event: Object) -> Object:
    stored = _rename(event, EVENTS, _EVENT_FIELDS)
    stored.setdefault("involvedObject", {})
    return stored


_VIEWS = {EVENTS_V1.key: View(_event_shown, _event_stored)}


def view_of(resource: Resource) -> View | None:
    """None for a resource that shows its objects as they are stored."""
    return _VIEWS.get(resource.key) if resource.stored_as else None
