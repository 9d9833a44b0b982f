"""The patch formats of the API: JSON merge patch (RFC 7386) and JSON patch (RFC 6902).

Strategic merge patch is in ``strategic``. All functions leave their arguments unchanged.
"""

from __future__ import annotations

from typing import Any

from hami.local.api.errors import ApiError, bad_request
from hami.local.api.objects import Object, clone

MAX_OPERATIONS = 10_000  # the limit of a real API server
_REQUIRED = {
    "add": "value", "replace": "value", "test": "value", "move": "from", "copy": "from", "remove": "path",
}  # fmt: skip


def merge_patch(target: Any, patch: Any) -> Any:
    """``target`` with ``patch`` merged in: null deletes, objects merge, all else replaces."""
    if not isinstance(patch, dict):
        return clone(patch)
    result: Object = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def json_patch(target: Any, operations: Any) -> Any:
    """``target`` after every operation in order.

    Raises 400 for a malformed patch and 422 where an operation does not apply; nothing is applied then.
    """
    if not isinstance(operations, list):
        raise bad_request("a JSON patch is a list of operations")
    if len(operations) > MAX_OPERATIONS:
        raise ApiError(
            413,
            "RequestEntityTooLarge",
            f"The allowed maximum operations in a JSON patch is {MAX_OPERATIONS}, got {len(operations)}",
        )
    document = clone(target)
    for index, operation in enumerate(operations):
        document = _apply(document, index, operation)
    return document


def _apply(document: Any, index: int, operation: Any) -> Any:
    if not isinstance(operation, dict):
        raise bad_request(f"operation {index} of the JSON patch is not an object")
    op = operation.get("op")
    if op not in _REQUIRED:
        raise bad_request(f"operation {index} of the JSON patch has the unknown op {op!r}")
    if not isinstance(operation.get("path"), str) or _REQUIRED[op] not in operation:
        raise bad_request(f"operation {index} of the JSON patch ({op}) lacks path or {_REQUIRED[op]}")
    path = _tokens(operation["path"], index)
    if op == "test":
        if not _same(_read(document, path, index), operation["value"]):
            raise _inapplicable(index, f"test of {operation['path']} failed")
        return document
    if op == "remove":
        return _remove(document, path, index)
    if op == "replace":
        _read(document, path, index)
        return _put(document, path, clone(operation["value"]), index, insert=False)
    if op == "add":
        return _put(document, path, clone(operation["value"]), index, insert=True)
    source = _tokens(operation["from"], index)
    value = clone(_read(document, source, index))
    if op == "move":
        if path[: len(source)] == source and len(path) > len(source):
            raise _inapplicable(index, "cannot move a value into itself")
        document = _remove(document, source, index)
    return _put(document, path, value, index, insert=True)


def _same(left: Any, right: Any) -> bool:
    """JSON equality: true is not 1, as it is in Python."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)


def _inapplicable(index: int, why: str) -> ApiError:
    return ApiError(422, "Invalid", f"the server rejected our request: JSON patch operation {index}: {why}")


def _tokens(pointer: Any, index: int) -> list[str]:
    if not isinstance(pointer, str) or (pointer and not pointer.startswith("/")):
        raise bad_request(f"operation {index} of the JSON patch has the malformed pointer {pointer!r}")
    return [token.replace("~1", "/").replace("~0", "~") for token in pointer.split("/")[1:]]


def _position(token: str, length: int, index: int) -> int:
    if not token.isascii() or not token.isdigit() or (len(token) > 1 and token[0] == "0"):
        raise _inapplicable(index, f"{token!r} is not a list index")
    position = int(token)
    if position >= length:
        raise _inapplicable(index, f"list index {token} is out of range")
    return position


def _read(document: Any, path: list[str], index: int) -> Any:
    for token in path:
        if isinstance(document, dict) and token in document:
            document = document[token]
        elif isinstance(document, list):
            document = document[_position(token, len(document), index)]
        else:
            raise _inapplicable(index, f"there is no {'/' + '/'.join(path)}")
    return document


def _remove(document: Any, path: list[str], index: int) -> Any:
    _read(document, path, index)
    if not path:
        return None
    parent = _read(document, path[:-1], index)
    if isinstance(parent, dict):
        del parent[path[-1]]
    else:
        del parent[_position(path[-1], len(parent), index)]
    return document


def _put(document: Any, path: list[str], value: Any, index: int, *, insert: bool) -> Any:
    if not path:
        return value
    parent = _read(document, path[:-1], index)
    token = path[-1]
    if isinstance(parent, dict):
        parent[token] = value
    elif not isinstance(parent, list):
        raise _inapplicable(index, f"the parent of {'/' + '/'.join(path)} is not an object or a list")
    elif not insert:
        parent[_position(token, len(parent), index)] = value
    elif token == "-":  # noqa: S105 - RFC 6901's name of the place after the last element
        parent.append(value)
    else:
        parent.insert(_position(token, len(parent) + 1, index), value)
    return document
