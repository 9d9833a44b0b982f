"""Strategic merge patch for the kinds that the embedded API server serves.

Lists of objects with a merge key are merged item by item, the others are replaced. Understood directives:
``$patch: delete|replace|merge``, ``$deleteFromPrimitiveList/<field>``, ``$setElementOrder/<field>``,
``$retainKeys``.
"""

from __future__ import annotations

from typing import Any

from hami.local.api.errors import bad_request
from hami.local.api.merge_keys import is_set, merge_key
from hami.local.api.objects import Object, clone

_ORDER = "$setElementOrder/"
_DELETE = "$deleteFromPrimitiveList/"


def strategic_merge(kind: str, target: Object, patch: Any) -> Object:
    """``target`` (an object of ``kind``) with ``patch`` merged in. Raises 400 for a malformed patch."""
    if not isinstance(patch, dict):
        raise bad_request("a strategic merge patch is an object")
    return _merge_object(kind, target, patch)


def _merge_object(kind: str, target: Any, patch: Object) -> Object:
    directive = patch.get("$patch")
    if directive == "replace":
        return {key: _plain(value) for key, value in patch.items() if value is not None and key != "$patch"}
    if directive == "delete":
        return {}
    if directive not in (None, "merge"):
        raise bad_request(f"unknown $patch directive {directive!r}")
    result: Object = dict(target) if isinstance(target, dict) else {}
    retain = patch.get("$retainKeys")
    if retain is not None:
        if not isinstance(retain, list):
            raise bad_request("$retainKeys is not a list")
        result = {key: value for key, value in result.items() if key in retain}
    for key, value in patch.items():
        if key.startswith(_DELETE):
            field = key[len(_DELETE) :]
            removed = value if isinstance(value, list) else [value]
            result[field] = [item for item in result.get(field) or [] if item not in removed]
        elif key.startswith("$"):
            continue
        elif value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = _merge_object(kind, result.get(key), value)
        elif isinstance(value, list):
            result[key] = _merge_list(kind, key, result.get(key), value)
        else:
            result[key] = value
    for key, order in patch.items():
        if key.startswith(_ORDER):
            field = key[len(_ORDER) :]
            if isinstance(result.get(field), list) and isinstance(order, list):
                result[field] = _ordered(_merge_key(kind, field, order), result[field], order)
    return result


def _merge_key(kind: str, field: str, items: list[Any]) -> str | None:
    key = merge_key(kind, field)
    # Status conditions and env are always objects; a list of plain values has no merge key.
    return key if items and all(isinstance(item, dict) for item in items) else None


def _merge_list(kind: str, field: str, target: Any, patch: list[Any]) -> list[Any]:
    current: list[Any] = list(target) if isinstance(target, list) else []
    if is_set(field):
        return current + [clone(item) for item in patch if item not in current]
    key = _merge_key(kind, field, patch)
    if key is None:
        return [_plain(item) for item in patch]
    if any(item.get("$patch") == "replace" and len(item) == 1 for item in patch):
        return [_plain(item) for item in patch if item.get("$patch") != "replace"]
    for item in patch:
        if key not in item:
            raise bad_request(f"map: {item} does not contain declared merge key: {key}")
        index = next(
            (i for i, known in enumerate(current) if isinstance(known, dict) and known.get(key) == item[key]),
            None,
        )
        if item.get("$patch") == "delete":
            if index is not None:
                del current[index]
        elif index is None:
            current.append(_plain(item))
        else:
            current[index] = _merge_object(kind, current[index], item)
    return current


def _ordered(key: str | None, items: list[Any], order: list[Any]) -> list[Any]:
    """``items`` with those that ``order`` names in that order; the others keep their place after them."""

    def identity(item: Any) -> Any:
        return item.get(key) if key and isinstance(item, dict) else item

    wanted = [identity(item) for item in order]
    named = [item for item in items if identity(item) in wanted]
    others = [item for item in items if identity(item) not in wanted]
    return sorted(named, key=lambda item: wanted.index(identity(item))) + others


def _plain(value: Any) -> Any:
    """A copy without directives and nulls: what a new object of a patch becomes."""
    if isinstance(value, dict):
        return {
            key: _plain(item) for key, item in value.items() if item is not None and not key.startswith("$")
        }
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
