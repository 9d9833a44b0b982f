"""Would these pods fit, and where: a spec's pods placed one after the other on a copy of the cluster."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import yaml

from hami.answers.amounts import taken_text
from hami.answers.errors import AnswerError
from hami.answers.replay import Replay
from hami.answers.shapes import check_pod
from hami.local.api.patch import json_patch
from hami.protocol.admission import AdmissionRequest
from hami.protocol.errors import HamiError
from hami.protocol.plain import problem_of
from hami.scheduler.core.answers import NoFit, Placement
from hami.scheduler.edge.webhook import Webhook, WebhookSettings

MAX_SPEC_BYTES: Final = 8 << 20
MAX_PODS: Final = 10_000
MAX_VALUES: Final = 5_000_000
_REPLICATED: Final = ("Deployment", "ReplicaSet", "StatefulSet", "ReplicationController")
_REASONS_SHOWN: Final = 3


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """As kubectl reads YAML: a date is text."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:timestamp"]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


@dataclass(frozen=True, slots=True)
class Placed:
    """One simulated pod."""

    pod: str  # namespace/name
    node: str  # "" for nowhere
    cards: tuple[str, ...]  # "<id>: <MiB> MiB, <cores> cores", or what else the vendor counts
    reason: str  # why nowhere


@dataclass(frozen=True, slots=True)
class Simulated:
    """The outcome, in the order of the spec."""

    pods: tuple[Placed, ...]
    fits: int
    notes: tuple[str, ...] = ()


def pods_of_spec(text: str, namespace: str = "default") -> list[dict[str, Any]]:
    """The pods that the objects of a YAML text stand for, workloads with all their replicas.

    Raises `AnswerError` for a text that is no such thing.
    """
    if len(text) > MAX_SPEC_BYTES:
        raise AnswerError(f"the spec has {len(text)} characters, at most {MAX_SPEC_BYTES} are read")
    try:
        documents = [one for one in yaml.load_all(text, Loader=_Loader) if one is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise AnswerError(f"the spec is not YAML: {' '.join(str(error).split())}") from error
    pods: list[dict[str, Any]] = []
    values = 0
    for document in documents:
        problem = problem_of(document)
        if problem:
            raise AnswerError(f"the spec {problem}")
        for template, name, count in _templates(document):
            values += count * _values_of(template["spec"])
            if len(pods) + count > MAX_PODS:
                raise AnswerError(f"the spec stands for more than {MAX_PODS} pods")
            if values > MAX_VALUES:
                raise AnswerError(
                    f"the spec stands for pods with more than {MAX_VALUES} values in all: leave out what is "
                    "not needed for placement, or simulate fewer replicas"
                )
            pods.extend(
                _pod(template, f"{name}-{at}" if count > 1 else name, namespace) for at in range(count)
            )
    if not pods:
        raise AnswerError("the spec holds no pod: give Pods, Deployments, StatefulSets, ReplicaSets or Jobs")
    return pods


def simulate(replay: Replay, pods: list[dict[str, Any]]) -> Simulated:
    """Admit and place the pods in order; each sees the ones before it. Changes only the replayed cluster.

    They are all placed as if new: the admission webhook's defaults and refusals hold, kube-scheduler's own
    checks too, its order of nodes with equal devices not.
    """
    settings = replay.snapshot.settings
    webhook = Webhook(replay.state, replay.profiles, WebhookSettings(settings.scheduler_name))
    found = tuple(_one(replay, webhook, pod) for pod in pods)
    return Simulated(found, sum(bool(one.node) for one in found), tuple(replay.skipped))


def _one(replay: Replay, webhook: Webhook, pod: dict[str, Any]) -> Placed:
    metadata = pod["metadata"]
    who = f"{metadata['namespace']}/{metadata['name']}"
    answer = webhook.review(AdmissionRequest(namespace=metadata["namespace"], object=pod))
    if not answer.allowed:
        return Placed(who, "", (), f"refused at admission: {answer.message}{_more(answer.warnings)}")
    admitted = json_patch(pod, [dict(step) for step in answer.patch])
    away = replay.unfit(admitted)
    candidates = [name for name in replay.nodes if name not in away]
    try:
        found = replay.place(admitted, candidates)
    except HamiError as error:
        return Placed(who, "", (), str(error))
    if found is None:
        return Placed(who, "", (), "asks for no device that HAMi manages")
    if isinstance(found, NoFit):
        return Placed(who, "", (), _why(found, away))
    replay.take(_bound(admitted, found, replay.now))
    return Placed(who, found.node, _cards(replay, found), "")


def _bound(pod: dict[str, Any], found: Placement, now: float) -> dict[str, Any]:
    metadata = pod["metadata"]
    annotations = {**(metadata.get("annotations") or {}), **found.reservation.binding_annotations(now)}
    return {
        **pod,
        "metadata": {**metadata, "annotations": annotations, "labels": dict(found.reservation.labels)},
        "spec": {**pod["spec"], "nodeName": found.node},
        "status": {"phase": "Running"},
    }


def _cards(replay: Replay, found: Placement) -> tuple[str, ...]:
    infos = {(one.vendor, one.info.id): one.info for one in replay.state.node_usage(found.node).cards}
    return tuple(
        f"{device.uuid}: {taken_text(replay.by_word[word], infos[word, device.uuid], device)}"
        for word, allocation in found.reservation.allocations.items()
        for slot in allocation
        for device in slot
    )


def _why(found: NoFit, away: Mapping[str, str]) -> str:
    texts = Counter([*found.failed.values(), *found.unresolvable.values()])
    texts.update(f"kept away by kube-scheduler: {reason}" for reason in away.values())
    parts = [f"{count} nodes: {text}" for text, count in texts.most_common(_REASONS_SHOWN)]
    return "; ".join(parts) or "the cluster has no node"


def _more(warnings: Any) -> str:
    return "".join(f"; {warning}" for warning in warnings)


def _templates(document: Any) -> Iterator[tuple[dict[str, Any], str, int]]:
    """(pod template, name, number of pods) of one object."""
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        raise AnswerError("an object of the spec has no kind")
    kind = document["kind"]
    spec = document.get("spec")
    name = str(_mapping(document.get("metadata")).get("name") or "pod")
    if kind == "List" and isinstance(document.get("items"), list):
        for item in document["items"]:
            yield from _templates(item)
        return
    if not isinstance(spec, dict):
        return
    if kind == "Pod":
        yield document, name, 1
    elif kind in _REPLICATED:
        yield _inner(document, spec, kind, name), name, _count(spec.get("replicas", 1), kind, name)
    elif kind == "Job":
        yield _inner(document, spec, kind, name), name, _count(spec.get("parallelism", 1), kind, name)


def _inner(document: dict[str, Any], spec: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    template = spec.get("template")
    if not isinstance(template, dict) or not isinstance(template.get("spec"), dict):
        raise AnswerError(f"{kind} {name} has no spec.template.spec")
    inner = dict(_mapping(template.get("metadata")))
    inner["namespace"] = _mapping(document.get("metadata")).get("namespace")
    return {"metadata": inner, "spec": template["spec"]}


def _count(value: Any, kind: str, name: str) -> int:
    if value is None:
        return 1
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_PODS:
        raise AnswerError(f"{kind} {name} asks for {str(value)[:20]} pods, 0 to {MAX_PODS} are simulated")
    return value


def _pod(template: dict[str, Any], name: str, namespace: str) -> dict[str, Any]:
    metadata = dict(_mapping(template.get("metadata")))
    metadata["name"] = name
    metadata["namespace"] = str(metadata.get("namespace") or namespace)
    metadata["uid"] = f"simulated-{metadata['namespace']}-{name}"
    spec = copy.deepcopy(template["spec"])
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": spec,
        "status": {"phase": "Pending"},
    }
    check_pod(pod)
    for member in ("initContainers", "containers"):
        for container in spec.get(member) or []:
            _default_requests(container)
    return pod


def _default_requests(container: dict[str, Any]) -> None:
    """What the API server does: a resource that has only a limit is requested as much."""
    resources = container.get("resources") or {}
    if resources.get("limits"):
        resources["requests"] = {**resources["limits"], **(resources.get("requests") or {})}


def _values_of(value: Any) -> int:
    """How many values a document has; one that `problem_of` has found nothing wrong with."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_values_of, inner))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
