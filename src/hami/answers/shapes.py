"""The parts of objects that kube-scheduler's own checks read, with the types they must have.

The API server guarantees these types; a file of a user does not.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from hami.answers.errors import AnswerError
from hami.local.scheduling.amounts import milli

Amounts = dict[str, str | int | float]
T = TypeVar("T")


class _Shape(msgspec.Struct, rename="camel"):
    pass


class _Toleration(_Shape):
    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None


class _Expression(_Shape):
    key: str
    operator: str
    values: list[str] | None = None


class _Term(_Shape):
    match_expressions: list[_Expression] | None = None
    match_fields: list[_Expression] | None = None


class _Terms(_Shape):
    node_selector_terms: list[_Term] | None = None


class _NodeAffinity(_Shape):
    required: _Terms | None = msgspec.field(
        default=None, name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class _Affinity(_Shape):
    node_affinity: _NodeAffinity | None = None


class _Resources(_Shape):
    limits: Amounts | None = None
    requests: Amounts | None = None


class _Container(_Shape):
    name: str = ""
    resources: _Resources | None = None
    restart_policy: str | None = None


class _PodSpec(_Shape):
    node_name: str | None = None
    node_selector: dict[str, str] | None = None
    tolerations: list[_Toleration] | None = None
    affinity: _Affinity | None = None
    overhead: Amounts | None = None
    init_containers: list[_Container] | None = None
    containers: list[_Container] | None = None


class _Metadata(_Shape):
    name: str
    namespace: str = ""
    uid: str = ""
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None


class _Pod(_Shape):
    metadata: _Metadata
    spec: _PodSpec | None = None


class _Taint(_Shape):
    key: str | None = None
    value: str | None = None
    effect: str | None = None


class _NodeSpec(_Shape):
    unschedulable: bool | None = None
    taints: list[_Taint] | None = None


class _NodeStatus(_Shape):
    allocatable: Amounts | None = None


class _Node(_Shape):
    metadata: _Metadata
    spec: _NodeSpec | None = None
    status: _NodeStatus | None = None


def check_pod(pod: object) -> None:
    """Raises `AnswerError` for what cannot be a pod, with the path of the first wrong member."""
    spec = _convert(pod, _Pod, "pod").spec
    if spec is None:
        return
    _check_amounts(spec.overhead)
    for container in (*(spec.init_containers or ()), *(spec.containers or ())):
        if container.resources is not None:
            _check_amounts(container.resources.limits)
            _check_amounts(container.resources.requests)


def check_node(node: object) -> None:
    """Raises `AnswerError` for what cannot be a node, with the path of the first wrong member."""
    status = _convert(node, _Node, "node").status
    if status is not None:
        _check_amounts(status.allocatable)


def _convert(obj: object, kind: type[T], what: str) -> T:
    try:
        return msgspec.convert(obj, kind)
    except msgspec.ValidationError as error:
        raise AnswerError(f"no {what}: {error}") from None


def _check_amounts(amounts: Amounts | None) -> None:
    for name, amount in (amounts or {}).items():
        try:
            milli(amount)
        except ValueError as error:
            raise AnswerError(f"{name}: {error}") from None
