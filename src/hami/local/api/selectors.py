"""Label and field selectors: the text forms of the query string and the object form of webhooks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hami.local.api.errors import bad_request
from hami.local.api.objects import Object, dig, labels_of

_SET_TERM = re.compile(r"^\s*(\S+)\s+(in|notin)\s*\(([^()]*)\)\s*$")
_EQUAL_TERM = re.compile(r"^\s*([^\s=!]+)\s*(==|=|!=)\s*([^\s=!]*)\s*$")
_KEY = re.compile(r"^\s*(!?)\s*([A-Za-z0-9][A-Za-z0-9_./-]*)\s*$")
_LIST_END = 4096  # a selector longer than this is refused

Predicate = Callable[[Object], bool]


@dataclass(frozen=True, slots=True)
class Requirement:
    """One term of a label selector. ``operator``: in, notin, exists, notexists, gt, lt."""

    key: str
    operator: str
    values: frozenset[str]

    def matches(self, labels: Mapping[str, str]) -> bool:
        if self.operator == "exists":
            return self.key in labels
        if self.operator == "notexists":
            return self.key not in labels
        if self.operator == "in":
            return self.key in labels and labels[self.key] in self.values
        return self.key not in labels or labels[self.key] not in self.values


def parse_label_selector(text: str) -> tuple[Requirement, ...]:
    """The terms of ``a=b,c in (d,e),!f``; all must hold. Raises 400 for anything else."""
    if len(text) > _LIST_END:
        raise bad_request("unable to parse requirement: the selector is too long")
    return tuple(_parse_term(term) for term in _split(text))


def _split(text: str) -> list[str]:
    terms: list[str] = []
    depth = start = 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            terms.append(text[start:index])
            start = index + 1
    terms.append(text[start:])
    return terms if text.strip() else []


def _parse_term(term: str) -> Requirement:
    found = _SET_TERM.match(term)
    if found:
        values = frozenset(value.strip() for value in found[3].split(","))
        return Requirement(found[1], found[2], values)
    found = _EQUAL_TERM.match(term)
    if found:
        return Requirement(found[1], "notin" if found[2] == "!=" else "in", frozenset({found[3]}))
    found = _KEY.match(term)
    if found:
        return Requirement(found[2], "notexists" if found[1] else "exists", frozenset())
    raise bad_request(f"unable to parse requirement: {term.strip()!r}")


def label_predicate(text: str) -> Predicate | None:
    """A predicate on objects, None for an empty selector."""
    terms = parse_label_selector(text)
    if not terms:
        return None
    return lambda obj: all(term.matches(labels_of(obj)) for term in terms)


_FIELDS: dict[str, frozenset[str]] = {
    "pods": frozenset(
        {"spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName",
         "status.phase", "status.podIP", "status.nominatedNodeName"}
    ),
    "events": frozenset(
        {"involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
         "involvedObject.apiVersion", "involvedObject.resourceVersion", "involvedObject.fieldPath",
         "reason", "reportingComponent", "source", "type"}
    ),
    "events.events.k8s.io": frozenset(
        {"regarding.kind", "regarding.namespace", "regarding.name", "regarding.uid", "regarding.apiVersion",
         "regarding.resourceVersion", "regarding.fieldPath", "reason", "reportingController", "type"}
    ),
    "nodes": frozenset({"spec.unschedulable"}),
    "replicasets.apps": frozenset({"status.replicas"}),
    "jobs.batch": frozenset({"status.successful"}),
    "namespaces": frozenset({"status.phase"}),
    "secrets": frozenset({"type"}),
}  # fmt: skip


def _field_value(obj: Object, path: str) -> str:
    if path == "status.successful":
        return str(dig(obj, "status", "succeeded") or 0)
    if path == "source":
        return str(dig(obj, "source", "component") or "")
    value = dig(obj, *path.split("."))
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "false" if path == "spec.unschedulable" else ""
    return str(value)


def field_predicate(resource_key: str, text: str) -> Predicate | None:
    """A predicate for ``a=b,c!=d`` on the fields that the resource supports; 400 for any other field."""
    if len(text) > _LIST_END:
        raise bad_request("unable to parse field selector: it is too long")
    allowed = {"metadata.name", "metadata.namespace"} | _FIELDS.get(resource_key, frozenset())
    terms: list[tuple[str, bool, str]] = []
    for piece in text.split(","):
        if not piece.strip():
            continue
        found = re.match(r"^\s*([A-Za-z.]+)\s*(==|=|!=)(.*)$", piece)
        if not found:
            raise bad_request(f"invalid selector: {piece!r}; can't understand it")
        if found[1] not in allowed:
            raise bad_request(f"field label not supported: {found[1]}")
        terms.append((found[1], found[2] != "!=", found[3]))
    if not terms:
        return None
    return lambda obj: all((_field_value(obj, path) == value) == same for path, same, value in terms)


def matches_label_selector(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """``metav1.LabelSelector`` against labels: None matches nothing, an empty selector everything."""
    if selector is None:
        return False
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for expression in selector.get("matchExpressions") or []:
        operator = {"In": "in", "NotIn": "notin", "Exists": "exists", "DoesNotExist": "notexists"}.get(
            expression.get("operator", "")
        )
        if operator is None:
            return False
        term = Requirement(expression.get("key", ""), operator, frozenset(expression.get("values") or ()))
        if not term.matches(labels):
            return False
    return True
