"""Server-side apply: each manager owns the fields it applied; conflicts, forcing, and removal of fields.

Fields are tracked from the first apply on: what an object had before belongs to ``before-first-apply``.
Pure; arguments stay unchanged.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hami.local.api import field_sets
from hami.local.api.errors import ApiError, bad_request, stale
from hami.local.api.field_sets import FieldSet, Path
from hami.local.api.merge_keys import is_atomic_map, is_set, key_of, list_keys
from hami.local.api.objects import Object, annotations_of, clone, meta, name_of, rfc3339, without_nulls
from hami.local.api.resources import Resource

FIRST = "before-first-apply"
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_IDENTITY = ("kind", "apiVersion")
_MAX_MANAGER = 128
_MAX_UPDATERS = 10  # entries of older updates beyond this are merged into one


class Applier:
    """One manager's applies to objects of ``resource``. Raises 422 for a manager without a usable name."""

    def __init__(
        self, resource: Resource, manager: str, *, force: bool, subresource: str, now: float
    ) -> None:
        if not manager or len(manager) > _MAX_MANAGER or not manager.isprintable():
            raise ApiError(
                422, "Invalid",
                'PatchOptions.meta.k8s.io "" is invalid: fieldManager: '
                + ("Required value: is required for apply patch" if not manager
                   else f"Invalid value: at most {_MAX_MANAGER} printable characters"),
            )  # fmt: skip
        self._resource = resource
        self._manager = manager
        self._force = force
        self._subresource = subresource
        self._now = now

    def created(self, applied: Object) -> Object:
        """A new object out of an applied one."""
        obj = self._checked(applied)
        meta(obj)["managedFields"] = [self._entry("Apply", self._fields(obj))]
        return obj

    def applied(self, current: Object, applied: Object) -> Object:
        """``current`` with ``applied`` merged in. Raises 409 for fields that others own with other values."""
        kind = self._resource.kind
        wanted = self._checked(applied)
        version = meta(wanted).pop("resourceVersion", None)
        if version and version != meta(current).get("resourceVersion"):
            raise stale(self._resource.group, self._resource.plural, name_of(current))
        entries = managers_of(current)
        if not entries:
            entries = [self._entry("Update", field_sets.fields_of(kind, current), FIRST)]
        new = self._fields(wanted)
        mine = next((item for item in entries if self._is_mine(item)), None)
        others = [item for item in entries if item is not mine]
        conflicts = self._conflicts(current, wanted, new, others)
        if conflicts and not (self._force or self._is_known_to_kubectl(current, conflicts)):
            raise conflict_error(conflicts)
        result: Object = clone(current)
        _merge_into(kind, result, {key: item for key, item in wanted.items() if key not in _IDENTITY})
        before = mine["fieldsV1"] if mine is not None else {}
        kept = _union_of(others)
        for path in field_sets.leaves(field_sets.difference(before, new)):
            if not field_sets.contains(kept, path):
                _remove(kind, result, path)
        for _, path in conflicts:
            _disown(others, path)
        entry = self._entry("Apply", new)
        if mine is not None and mine["fieldsV1"] == new:
            entry["time"] = mine.get("time", entry["time"])
        meta(result)["managedFields"] = [item for item in others if item["fieldsV1"]] + [entry]
        return result

    def _checked(self, applied: Object) -> Object:
        """A copy of what was sent without what an apply cannot set."""
        obj: Object = without_nulls(applied)
        if obj.get("apiVersion") != self._resource.api_version or obj.get("kind") != self._resource.kind:
            raise bad_request(
                f"an apply patch here needs apiVersion {self._resource.api_version!r} and kind "
                f"{self._resource.kind!r}, got {obj.get('apiVersion')!r} and {obj.get('kind')!r}"
            )
        if not isinstance(obj.get("metadata") or {}, dict):
            raise bad_request("metadata is not an object")
        if meta(obj).get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        if self._subresource == "status":
            obj = {field: obj[field] for field in (*_IDENTITY, "metadata", "status") if field in obj}
        elif self._resource.has_status:
            obj.pop("status", None)
        return obj

    def _fields(self, obj: Object) -> FieldSet:
        return field_sets.fields_of(self._resource.kind, obj)

    def _is_mine(self, entry: Object) -> bool:
        return (
            entry["manager"] == self._manager
            and entry["operation"] == "Apply"
            and (entry.get("subresource") or "") == self._subresource
        )

    def _entry(self, operation: str, fields: FieldSet, manager: str = "") -> Object:
        return make_entry(
            self._resource, manager or self._manager, operation, self._subresource, fields, self._now
        )

    def _conflicts(
        self, current: Object, wanted: Object, new: FieldSet, others: list[Object]
    ) -> list[tuple[str, Path]]:
        kind = self._resource.kind
        found: list[tuple[str, Path]] = []
        for path in field_sets.leaves(new):
            if path[-1].startswith(("k:", "v:")):
                continue
            theirs = [item for item in others if field_sets.contains(item["fieldsV1"], path)]
            if not theirs:
                continue
            live = field_sets.value_at(kind, current, path)
            mine = field_sets.value_at(kind, wanted, path)
            if live is not None and live != mine and not _merges_to_nothing(kind, path[-1], live, mine):
                found += [(_manager_name(item), path) for item in theirs]
        return found

    def _is_known_to_kubectl(self, current: Object, conflicts: list[tuple[str, Path]]) -> bool:
        """kubectl takes over from its own client-side apply: fields that its annotation has are its own."""
        text = annotations_of(current).get(LAST_APPLIED)
        if self._manager != "kubectl" or not text:
            return False
        try:
            last = msgspec.json.decode(text)
        except msgspec.DecodeError:
            return False
        if not isinstance(last, dict) or not isinstance(last.get("metadata") or {}, dict):
            return False
        kind = self._resource.kind
        known = field_sets.fields_of(kind, last)
        return all(
            field_sets.owns(known, path)
            and field_sets.value_at(kind, last, path) == field_sets.value_at(kind, current, path)
            for _, path in conflicts
        )


def track_update(
    resource: Resource, before: Object, after: Object, manager: str, subresource: str, now: float
) -> None:
    """Note in ``after`` (changed in place) who owns what an update changed. Untracked objects stay so."""
    entries = managers_of(after) or managers_of(before)
    if not entries:
        meta(after).pop("managedFields", None)
        return
    new, gone = field_sets.changed(resource.kind, before, after)
    mine: Object | None = None
    for entry in entries:
        lost = field_sets.union(new, gone)
        is_mine = entry["manager"] == manager and entry["operation"] == "Update" and (
            (entry.get("subresource") or "") == subresource
        )  # fmt: skip
        if is_mine:
            mine = entry
            entry["fieldsV1"] = field_sets.difference(entry["fieldsV1"], gone)
        else:
            entry["fieldsV1"] = field_sets.difference(entry["fieldsV1"], lost)
    if new:
        if mine is None:
            mine = make_entry(resource, manager, "Update", subresource, {}, now)
            entries.append(mine)
        mine["fieldsV1"] = field_sets.union(mine["fieldsV1"], new)
        mine["time"] = rfc3339(now)
    left = [entry for entry in entries if entry["fieldsV1"]]
    meta(after)["managedFields"] = _limited(left)


def _limited(entries: list[Object]) -> list[Object]:
    """At most ``_MAX_UPDATERS`` update entries: the oldest ones become one."""
    updates = [item for item in entries if item["operation"] == "Update"]
    updates.sort(key=lambda item: str(item.get("time")))
    surplus = updates[: max(len(updates) - _MAX_UPDATERS, 0)]
    if not surplus:
        return entries
    surplus.append(updates[len(surplus)])
    merged = {**surplus[0], "manager": "ancient-changes", "fieldsV1": _union_of(surplus)}
    return [merged, *(item for item in entries if not any(item is old for old in surplus))]


def managers_of(obj: Object) -> list[Object]:
    """A copy of the entries of ``managedFields``; malformed ones are left out."""
    found = meta(obj).get("managedFields")
    if not isinstance(found, list):
        return []
    return [
        {**item, "fieldsV1": item["fieldsV1"]}
        for item in found
        if isinstance(item, dict)
        and isinstance(item.get("manager"), str)
        and item.get("operation") in ("Apply", "Update")
        and field_sets.is_field_set(item.get("fieldsV1"))
    ]


def make_entry(
    resource: Resource, manager: str, operation: str, subresource: str, fields: FieldSet, now: float
) -> Object:
    entry: Object = {
        "manager": manager,
        "operation": operation,
        "apiVersion": resource.api_version,
        "time": rfc3339(now),
        "fieldsType": "FieldsV1",
        "fieldsV1": fields,
    }
    if subresource:
        entry["subresource"] = subresource
    return entry


def conflict_error(conflicts: list[tuple[str, Path]]) -> ApiError:
    """409 in the words by which kubectl recognises an apply conflict."""
    by_manager: dict[str, list[str]] = {}
    for manager, path in conflicts:
        by_manager.setdefault(manager, []).append(field_sets.shown(path))
    plural = "s" if len(conflicts) > 1 else ""
    parts = []
    for manager, paths in sorted(by_manager.items()):
        if len(paths) == 1:
            parts.append(f"conflict with {manager}: {paths[0]}")
        else:
            parts.append(f"conflicts with {manager}:\n" + "\n".join(f"- {path}" for path in paths))
    count = len(conflicts)
    message = f"Apply failed with {count} conflict{plural}: " + "\n".join(parts)
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {manager}",
         "field": field_sets.shown(path)}
        for manager, path in conflicts
    ]  # fmt: skip
    return ApiError(409, "Conflict", message, details={"causes": causes})


def _manager_name(entry: Object) -> str:
    text = f'"{entry["manager"]}"'
    if entry.get("subresource"):
        text += f' with subresource "{entry["subresource"]}"'
    if entry["operation"] == "Update":
        text += f" using {entry.get('apiVersion')}"
    return text


def _union_of(entries: list[Object]) -> FieldSet:
    fields: FieldSet = {}
    for entry in entries:
        fields = field_sets.union(fields, entry["fieldsV1"])
    return fields


def _disown(entries: list[Object], path: Path) -> None:
    """Take one field from every entry."""
    lost: FieldSet = {}
    field_sets.add(lost, path)
    for entry in entries:
        entry["fieldsV1"] = field_sets.difference(entry["fieldsV1"], lost)


def _merges_to_nothing(kind: str, member: str, live: Any, applied: Any) -> bool:
    """Whether ``applied`` is an empty map or list that leaves what is in ``live`` alone."""
    field = member[2:]
    if applied == {} and isinstance(live, dict):
        return not is_atomic_map(field)
    return applied == [] and isinstance(live, list) and (is_set(field) or bool(list_keys(kind, field, live)))


def _merge_into(kind: str, live: Object, applied: Object) -> None:
    """Merge a map into another one in place; what is not in ``applied`` stays."""
    for field, value in applied.items():
        current = live.get(field)
        if isinstance(value, dict) and isinstance(current, dict) and not is_atomic_map(field):
            _merge_into(kind, current, value)
        elif isinstance(value, list) and isinstance(current, list):
            live[field] = _merge_list(kind, field, current, value)
        else:
            live[field] = clone(value)


def _merge_list(kind: str, field: str, live: list[Any], applied: list[Any]) -> list[Any]:
    if is_set(field):
        return live + [clone(item) for item in applied if item not in live]
    keys = list_keys(kind, field, applied or live)
    if not keys or (live and not list_keys(kind, field, live)):
        return list(clone(applied))
    merged = list(live)
    for item in applied:
        wanted = key_of(keys, item)
        found = next((known for known in merged if key_of(keys, known) == wanted), None)
        if found is None:
            merged.append(clone(item))
        else:
            _merge_into(kind, found, item)
    return merged


def _remove(kind: str, obj: Object, path: Path) -> None:
    """Remove the value or list item at ``path`` and the maps that are empty without it."""
    parents: list[tuple[Any, str]] = []
    here: Any = obj
    for depth, name in enumerate(path):
        value = field_sets.value_at(kind, obj, path[: depth + 1])
        if value is None:
            return
        parents.append((here, name))
        here = value
    for depth in range(len(parents) - 1, -1, -1):
        parent, name = parents[depth]
        value = field_sets.value_at(kind, obj, path[: depth + 1])
        if depth < len(parents) - 1 and value:
            return
        if isinstance(parent, dict):
            parent.pop(name[2:], None)
        elif name.startswith("v:"):
            parent.remove(value)
        else:
            parent[:] = [item for item in parent if item is not value]
