"""Bodies of kube-scheduler's extender calls (WIRE, scheduler.md §2.2).

Keys are read in any case, as Go does, and written in exactly one. Node objects of a dry run stay undecoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from hami.protocol.errors import ObjectError
from hami.protocol.views import MAX_OBJECT_BYTES, Pod, decode

_T = TypeVar("_T")


class ExtenderArgs(msgspec.Struct, frozen=True):
    """A filter request: ``nodes`` (undecoded objects) is set for a dry run, else ``node_names`` alone."""

    pod: Pod
    pod_object: msgspec.Raw
    nodes: tuple[msgspec.Raw, ...] | None
    node_names: tuple[str, ...] | None


class ExtenderBindingArgs(msgspec.Struct, frozen=True):
    """A bind request."""

    pod_name: str
    pod_namespace: str
    pod_uid: str
    node: str


class ExtenderFilterResult(msgspec.Struct, frozen=True):
    """A filter answer; ``None`` members are written as null."""

    nodes: Sequence[msgspec.Raw] | None = None
    node_names: Sequence[str] | None = None
    failed_nodes: Mapping[str, str] | None = None
    failed_and_unresolvable_nodes: Mapping[str, str] | None = None
    error: str = ""


MISSING_POD: Final = "extender args missing pod"
MISSING_NODES: Final = "extender args missing nodes"


def decode_filter_args(body: bytes, max_bytes: int = MAX_OBJECT_BYTES) -> ExtenderArgs:
    """A filter request. Raises :class:`ObjectError`, whose text is the ``Error`` to answer."""
    members = _members(body, "filter request", max_bytes)
    pod_object = members.get("pod")
    if pod_object is None:
        raise ObjectError(MISSING_POD)
    nodes, names = members.get("nodes"), members.get("nodenames")
    if nodes is None and names is None:
        raise ObjectError(MISSING_NODES)
    items = None
    if nodes is not None:
        raw_items = _members(nodes, "node list", max_bytes).get("items")
        items = () if raw_items is None else tuple(_convert(raw_items, list[msgspec.Raw], "Nodes.items"))
    return ExtenderArgs(
        pod=decode(pod_object, Pod, max_bytes),
        pod_object=pod_object.copy(),
        nodes=None if items is None else tuple(item.copy() for item in items),
        node_names=None if names is None else tuple(_convert(names, list[str], "NodeNames")),
    )


def decode_binding_args(body: bytes, max_bytes: int = 64 * 1024) -> ExtenderBindingArgs:
    """A bind request. Raises :class:`ObjectError`, whose text is the ``Error`` to answer."""
    members = _members(body, "bind request", max_bytes)
    words = {
        name: _convert(members[name.lower()], str, name) if name.lower() in members else ""
        for name in ("PodName", "PodNamespace", "PodUID", "Node")
    }
    return ExtenderBindingArgs(words["PodName"], words["PodNamespace"], words["PodUID"], words["Node"])


def encode_filter_result(result: ExtenderFilterResult) -> bytes:
    """Body of a filter answer. ``%`` in the error is replaced: kube-scheduler takes the text for a format."""
    nodes = None if result.nodes is None else {"metadata": {}, "items": list(result.nodes)}
    return msgspec.json.encode(
        {
            "Nodes": nodes,
            "NodeNames": None if result.node_names is None else list(result.node_names),
            "FailedNodes": _plain(result.failed_nodes),
            "FailedAndUnresolvableNodes": _plain(result.failed_and_unresolvable_nodes),
            "Error": _harmless(result.error),
        }
    )


def encode_binding_result(error: str) -> bytes:
    """Body of a bind answer; an empty ``error`` means success."""
    return msgspec.json.encode({"Error": _harmless(error)})


def _members(data: bytes | msgspec.Raw, what: str, max_bytes: int) -> dict[str, msgspec.Raw]:
    """Members of a JSON object by lower-case name, without nulls; the last of equal names wins."""
    if len(memoryview(data)) > max_bytes:
        raise ObjectError(f"{what} is over the limit of {max_bytes} bytes")
    members = _convert(data, dict[str, msgspec.Raw], what)
    return {name.lower(): raw for name, raw in members.items() if not _is_null(raw)}


def _is_null(raw: msgspec.Raw) -> bool:
    view = memoryview(raw)
    return len(view) == 4 and bytes(view) == b"null"


def _convert(data: bytes | msgspec.Raw, kind: type[_T], what: str) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ObjectError(f"invalid {what}: {_harmless(str(error))}") from None


def _plain(mapping: Mapping[str, str] | None) -> dict[str, Any] | None:
    return None if mapping is None else dict(mapping)


def _harmless(text: str) -> str:
    return text.replace("%", " percent")
