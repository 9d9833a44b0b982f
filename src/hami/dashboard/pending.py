"""Why a pod waits, as the page shows it: the explanation of `hami explain`, with suggestions and events."""

from __future__ import annotations

import msgspec

from hami.answers.explain import ADVICE, Explanation, Refusal, explain
from hami.answers.replay import Replay
from hami.dashboard.store import FrozenObjects
from hami.dashboard.view import NOT_OURS
from hami.scheduler.core.texts import codes
from hami.vendors import reasons

MAX_NODES_NAMED = 50
MAX_REFUSALS = 100


class PodEvent(msgspec.Struct, frozen=True, rename="camel"):
    """Something Kubernetes has said about the pod."""

    reason: str
    message: str
    count: int
    last: str


class ReasonCount(msgspec.Struct, frozen=True, rename="camel"):
    """A reason of a group of nodes, in words."""

    code: str
    sentence: str


class NodeReason(msgspec.Struct, frozen=True, rename="camel"):
    """Nodes that refuse the pod for the same reasons."""

    text: str  # counts and codes, as kube-scheduler is told
    node_count: int
    nodes: tuple[str, ...]  # the first of them
    reasons: tuple[ReasonCount, ...]


class Explained(msgspec.Struct, frozen=True, rename="camel"):
    """All there is to say about a waiting pod."""

    namespace: str
    pod: str
    phase: str
    scheduler: str
    patched: bool  # by the webhook
    note: str
    summary: str
    being_bound: bool
    asks: tuple[str, ...]
    last_word: str
    nodes: tuple[NodeReason, ...]
    suggestions: tuple[str, ...]
    changes: tuple[str, ...]  # each tried on a copy of the cluster; may name pods of other namespaces
    would_go_to: str
    events: tuple[PodEvent, ...] = ()
    notes: tuple[str, ...] = ()


def explain_pending(objects: FrozenObjects, namespace: str, name: str) -> Explained:
    """Judge one pod in a state of its own. Raises `HamiError`; takes time on large clusters."""
    replay = Replay(objects.snapshot())
    pod = replay.pod(namespace, name)
    found = explain(replay, namespace, name)
    scheduler = str((pod.get("spec") or {}).get("schedulerName") or "")
    ours = objects.settings.scheduler_name
    patched = not ours or scheduler == ours
    fits = bool(found.node) and not found.placed
    return Explained(
        namespace,
        name,
        found.phase,
        scheduler,
        patched,
        "" if patched else NOT_OURS,
        found.summary,
        fits and patched,
        found.asks,
        found.last_word,
        tuple(_reason(one) for one in found.refusals[:MAX_REFUSALS]),
        _suggestions(replay, found),
        found.changes,
        found.node if not found.placed else "",
        notes=found.notes,
    )


def narrowed(found: Explained) -> Explained:
    """Without what may name pods of namespaces that the reader may not see."""
    return msgspec.structs.replace(found, changes=(), notes=())


def _reason(refusal: Refusal) -> NodeReason:
    found = codes(refusal.reason) or tuple(refusal.reason.split(", "))
    return NodeReason(
        refusal.reason,
        len(refusal.nodes),
        refusal.nodes[:MAX_NODES_NAMED],
        tuple(ReasonCount(code, ADVICE.get(code, "kube-scheduler keeps the pod away")) for code in found),
    )


def _suggestions(replay: Replay, found: Explanation) -> tuple[str, ...]:
    said = {code for one in found.refusals for code in codes(one.reason)}
    return _largest(replay) if reasons.INSUFFICIENT_MEMORY in said else ()


def _largest(replay: Replay) -> tuple[str, ...]:
    """The card with the most memory: more than that no pod gets on one card."""
    cards = [(one.info.devmem, node.name, one.info) for node in replay.state.usage() for one in node.cards]
    if not cards:
        return ()
    memory, node, info = max(cards, key=lambda card: (card[0], card[1], card[2].id))
    return (
        f"the largest card is {info.type} {info.id} on {node} with {memory} MiB: ask for no more than it has",
    )
