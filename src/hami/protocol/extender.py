"""Bodies of kube-scheduler's extender calls (WIRE, scheduler.md §2.2): read in any case, written in exactly one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from hami.protocol.views import Pod


class ExtenderArgs(msgspec.Struct, frozen=True):
    """A filter request. ``nodes`` (undecoded node objects) is set for a dry run, ``node_names`` otherwise."""

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


def decode_filter_args(body: bytes) -> ExtenderArgs:
    """A filter request. Raises :class:`ObjectError`, whose message is the text to answer as ``Error``."""
    ...


def decode_binding_args(body: bytes) -> ExtenderBindingArgs:
    """A bind request. Raises :class:`ObjectError`, whose message is the text to answer as ``Error``."""
    ...


def encode_filter_result(result: ExtenderFilterResult) -> bytes:
    """Body of a filter answer. ``%`` in the error text is replaced, since kube-scheduler formats it."""
    ...


def encode_binding_result(error: str) -> bytes:
    """Body of a bind answer; an empty ``error`` means success."""
    ...
