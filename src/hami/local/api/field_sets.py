"""Sets of fields of an object in the form of ``managedFields[].fieldsV1``. Pure; arguments stay unchanged.

A set is a dict: ``f:name`` a field, ``k:{...}`` a list item by its keys, ``v:...`` an item of a set of plain
values, ``.`` the item itself. A member without further members is a whole value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hami.local.api.merge_keys import is_atomic_map, is_set, key_of, list_keys
from hami.local.api.objects import Object

FieldSet = dict[str, Any]
Path = tuple[str, ...]

_UNOWNED_METADATA = frozenset(
    {"name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "selfLink",
     "deletionTimestamp", "deletionGracePeriodSeconds", "managedFields", "generateName"}
)  # fmt: skip


def fields_of(kind: str, obj: Object) -> FieldSet:
    """Every field that a manager may own."""
    found: FieldSet = {}
    for field, value in obj.items():
        if field in ("kind", "apiVersion"):
            continue
        if field == "metadata":
            value = {key: item for key, item in value.items() if key not in _UNOWNED_METADATA}
            if not value:
                continue
        if value is not None:
            found[f"f:{field}"] = _members(kind, field, value)
    return found


def _members(kind: str, field: str, value: Any) -> FieldSet:
    return {name: members for name, _, members in _children(kind, field, value)}


def _children(kind: str, field: str, value: Any) -> Iterator[tuple[str, Any, FieldSet]]:
    """(member, its value, its own members) of a map or a list that merges."""
    if isinstance(value, dict) and not is_atomic_map(field):
        for key, item in value.items():
            if item is not None:
                yield f"f:{key}", item, _members(kind, key, item)
    elif isinstance(value, list) and is_set(field):
        for item in value:
            yield f"v:{_text(item)}", item, {}
    elif isinstance(value, list):
        keys = list_keys(kind, field, value)
        for item in value if keys else ():
            yield f"k:{_text(key_of(keys, item))}", item, {".": {}, **_members(kind, "", item)}


def _text(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def is_field_set(value: Any) -> bool:
    """Whether ``value`` has the form of a set: objects all the way, with members of the known kinds."""
    return isinstance(value, dict) and all(
        (name == "." or name[:2] in ("f:", "k:", "v:")) and is_field_set(members)
        for name, members in value.items()
    )


def leaves(fields: FieldSet, path: Path = ()) -> Iterator[Path]:
    """The paths of whole values and of list items."""
    for name, members in fields.items():
        if name == ".":
            yield path
        elif members:
            yield from leaves(members, (*path, name))
        else:
            yield (*path, name)


def contains(fields: FieldSet, path: Path) -> bool:
    """Whether the set has a member at ``path``: the value itself or something inside it."""
    for name in path:
        if name not in fields:
            return False
        fields = fields[name]
    return True


def owns(fields: FieldSet, path: Path) -> bool:
    """Whether ``path`` is a leaf of the set."""
    for name in path:
        if name not in fields:
            return False
        fields = fields[name]
    return not fields or "." in fields


def union(left: FieldSet, right: FieldSet) -> FieldSet:
    merged = dict(left)
    for name, members in right.items():
        merged[name] = union(merged[name], members) if name in merged else members
    return merged


def difference(left: FieldSet, right: FieldSet) -> FieldSet:
    """The leaves of ``left`` that are not leaves of ``right``."""
    rest: FieldSet = {}
    for name, members in left.items():
        if name not in right:
            rest[name] = members
        elif members:
            inner = difference(members, right[name])
            if inner:
                rest[name] = inner
        elif right[name] and "." not in right[name]:
            rest[name] = members
    return rest


def changed(kind: str, before: Object, after: Object) -> tuple[FieldSet, FieldSet]:
    """(fields whose value is new or another one, fields that are gone) between two states."""
    old, new = fields_of(kind, before), fields_of(kind, after)
    gone = difference(old, new)
    found: FieldSet = {}
    for path in leaves(new):
        was = owns(old, path)
        if was and path[-1].startswith("k:"):
            continue  # a list item that stays: its fields say whether they have changed
        if not was or value_at(kind, before, path) != value_at(kind, after, path):
            add(found, path)
    return found, gone


def add(fields: FieldSet, path: Path) -> None:
    """Put a leaf into ``fields`` (changed in place)."""
    for name in path:
        fields = fields.setdefault(name, {})
    if path[-1].startswith("k:"):
        fields["."] = {}


def value_at(kind: str, obj: Any, path: Path) -> Any:
    """The value at ``path``; None where there is none."""
    field = ""
    for name in path:
        found = next((child for child in _direct(kind, field, obj) if child[0] == name), None)
        if found is None:
            return None
        obj = found[1]
        field = name[2:] if name.startswith("f:") else ""
    return obj


def _direct(kind: str, field: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"f:{key}", item) for key, item in value.items())
    elif isinstance(value, list) and is_set(field):
        yield from ((f"v:{_text(item)}", item) for item in value)
    elif isinstance(value, list):
        keys = list_keys(kind, field, value)
        yield from ((f"k:{_text(key_of(keys, item))}", item) for item in value if keys)


def shown(path: Path) -> str:
    """The path as conflicts name it: ``.spec.template.spec.containers[name="a"].image``."""
    text = ""
    for name in path:
        if name.startswith("f:"):
            text += f".{name[2:]}"
        elif name.startswith("k:"):
            keys: Object = msgspec.json.decode(name[2:])
            text += "[" + ",".join(f"{key}={_text(value)}" for key, value in keys.items()) + "]"
        else:
            text += f"[={name[2:]}]"
    return text
