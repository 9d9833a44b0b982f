"""Why a pod is where it is, or why it waits: one answer for one pod of a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hami.answers.amounts import Share, asked_text, cores_share, memory_share, taken_text
from hami.answers.changes import helpful_changes
from hami.answers.replay import Object, Replay
from hami.protocol.errors import HamiError
from hami.scheduler.core.answers import CardUsage, Placement, PodRequest
from hami.scheduler.core.texts import UNREGISTERED, codes
from hami.vendors import reasons
from hami.vendors.selection import cordoned_ids
from hami.vendors.types import Allocation, ContainerDevice, VendorProfile

ADVICE: Mapping[str, str] = {
    UNREGISTERED: "its device plugin has registered no card, or the node has not the label that "
    "HAMi is limited to; look at the device plugin's log there",
    reasons.NODE_INSUFFICIENT: "the node has fewer cards of this vendor than the pod asks for",
    reasons.NOT_HEALTHY: "cards are unhealthy, or the device plugin has not answered for a minute",
    reasons.CARD_UNHEALTHY: "cards are unhealthy",
    reasons.MODE_NOT_FIT: "no card works in the sharing mode that the pod asks for",
    reasons.QOS_MISMATCH: "cards are shared under another QoS policy than the pod asks for",
    reasons.APP_CLASS_MISMATCH: "cards hold pods of another application class",
    reasons.VENDOR_RULE: "a rule of this vendor leaves these cards out; see its page in the documentation",
    reasons.CORDONED: "cards are taken out of service by the node's annotation hami.io/device-cordon",
    reasons.TYPE_MISMATCH: "the pod's annotations on card types leave these cards out",
    reasons.ID_MISMATCH: "the pod's annotations on card ids leave these cards out",
    reasons.OUT_OF_SLOTS: "as many tasks as a card takes (deviceSplitCount) are there, or kubelet counts no "
    "free device",
    reasons.EXCLUSIVE: "the pod wants whole cards, or a card is held whole, or policy mutex keeps pods apart",
    reasons.QUOTA_NOT_FIT: "the quota of the namespace leaves less than the pod asks for",
    reasons.INSUFFICIENT_MEMORY: "cards have less free memory than the pod asks for",
    reasons.INSUFFICIENT_CORES: "cards have fewer free cores than the pod asks for",
    reasons.EXHAUSTED: "all cores of cards are given away, and the pod asks for some without a number",
    reasons.NUMA_NOT_FIT: "not enough fitting cards on one NUMA node",
    reasons.MIG_INFEASIBLE: "no free place for a MIG instance of this size",
    reasons.INSUFFICIENT_CARDS: "fewer cards fit than the pod asks for",
}
"""What a reason code means, for people (scheduler.md §8)."""


@dataclass(frozen=True, slots=True)
class Room:
    """What cards of one vendor have left; each is the best of a node, as the range over a group of nodes."""

    vendor: str
    cards: tuple[int, int]
    healthy: tuple[int, int]
    free_slots: tuple[int, int]
    free_memory: tuple[int, int] | None  # MiB; None: this vendor counts none
    free_cores: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nodes that cannot take the pod for the same reason."""

    reason: str
    nodes: tuple[str, ...]
    room: tuple[Room, ...]
    advice: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """A node that fits; which end is better depends on the policy."""

    node: str
    score: float


@dataclass(frozen=True, slots=True)
class ChosenCard:
    """A card of the pod's node, without the pod itself, and what the pod takes of it."""

    id: str
    model: str
    chosen: bool
    slots: str  # used/total
    memory: str  # MiB
    cores: str
    taken: str  # by this pod


@dataclass(frozen=True, slots=True)
class Explanation:
    """All there is to say about one pod's placement."""

    pod: str  # namespace/name
    phase: str
    node: str  # where it is, or would go now; "" for nowhere
    placed: bool
    summary: str
    asks: tuple[str, ...] = ()  # one line per container
    policy: str = ""
    last_word: str = ""  # kube-scheduler's condition
    refusals: tuple[Refusal, ...] = ()
    scores: tuple[Score, ...] = ()  # best first
    cards: tuple[ChosenCard, ...] = ()
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def explain(replay: Replay, namespace: str, name: str) -> Explanation:
    """Judge a pod on the cluster as it is without it. Raises `AnswerError` for a pod that is not there."""
    pod = replay.pod(namespace, name)
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    node = str(spec.get("nodeName") or "")
    who, phase = f"{namespace}/{name}", str(status.get("phase") or "Unknown")
    last_word = "" if node else _last_word(status.get("conditions") or [])
    notes = (*replay.snapshot.notes, *replay.skipped)

    base = Explanation(who, phase, node, bool(node), "", last_word=last_word, notes=notes)

    if phase in ("Succeeded", "Failed"):
        return replace(base, summary="The pod has ended: it holds no device.")
    try:
        request = replay.request(pod)
    except HamiError as error:
        return replace(base, summary=f"The pod cannot be judged: {error}.")
    if request is None:
        names = ", ".join(sorted(profile.names.count for profile in replay.profiles))
        return replace(base, summary=f"The pod asks for no device that HAMi manages ({names}).")
    policy = f"node {request.node_policy}, card {request.card_policy}"
    base = replace(base, asks=_asks(replay, request), policy=policy)
    if request.invalid:
        return replace(base, summary=f"No node can serve this request: {request.invalid}.")
    if node:
        return _placed(
            replay,
            pod,
            request,
            replace(base, summary=f"The pod is on node {node}."),
        )
    stranger = _stranger(replay, str(spec.get("schedulerName") or ""))
    away = replay.unfit(pod)
    candidates = [one for one in replay.nodes if one not in away]
    try:
        found = replay.place(pod, candidates)
    except HamiError as error:
        return replace(base, summary=f"The pod cannot be judged: {error}.")
    kept = _kept_away(away)
    if isinstance(found, Placement):
        replay.state.release(found.reservation.uid)
        summary = stranger or f"Fits now: the scheduler would take node {found.node}."
        cards = _cards(replay, found.node, request, dict(found.reservation.allocations))
        return replace(
            base, node=found.node, summary=summary, scores=_scores(found), cards=cards, refusals=kept
        )
    assert found is not None
    texts = {**found.failed, **found.unresolvable}
    summary = stranger or f"No node fits: {len(texts)} judged, {len(away)} kept away by kube-scheduler."
    return replace(
        base,
        summary=summary,
        refusals=(*_refusals(replay, request, texts), *kept),
        changes=helpful_changes(replay, pod, away),
    )


def _placed(replay: Replay, pod: Object, request: PodRequest, base: Explanation) -> Explanation:
    """A pod that has its node: its cards, and how the nodes would compare if it were placed now."""
    held = next((one for one in replay.state.pods() if one.uid == request.info.uid), None)
    if held is None:
        text = f"The pod is on node {base.node}, but holds no device there: it was bound without HAMi."
        return replace(base, summary=text)
    allocations = dict(held.allocations)
    replay.drop(pod)
    waiting = {**pod, "spec": {key: it for key, it in (pod.get("spec") or {}).items() if key != "nodeName"}}
    away = replay.unfit(waiting)
    try:
        found = replay.place(waiting, [one for one in replay.nodes if one not in away])
    except HamiError:
        found = None
    scores: tuple[Score, ...] = ()
    summary = base.summary
    if isinstance(found, Placement):
        replay.state.release(found.reservation.uid)
        scores = _scores(found)
        if found.node != base.node:
            summary += f" Placed now, without it on the cluster, it would go to {found.node}."
    cards = _cards(replay, base.node, request, allocations)
    replay.take(pod)
    return replace(base, summary=summary, scores=scores, cards=cards)


def _last_word(conditions: Sequence[Mapping[str, object]]) -> str:
    for condition in conditions:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("message") or condition.get("reason") or "")
    return ""


def _stranger(replay: Replay, scheduler: str) -> str:
    own = replay.snapshot.settings.scheduler_name
    if not own or scheduler == own:
        return ""
    return (
        f"Its schedulerName is {scheduler or 'default-scheduler'}, not {own}: HAMi never sees it. The "
        "admission webhook did not take it when it was created (label hami.io/webhook=ignore on the pod or "
        "its namespace, or the webhook was down): delete the pod and create it again."
    )


def _asks(replay: Replay, request: PodRequest) -> tuple[str, ...]:
    lines = []
    for name, slot in zip(request.info.shape.names, request.slots, strict=True):
        for word, wanted in slot.items():
            lines.append(f"{name}: {asked_text(replay.by_word[word], wanted)}")
    return tuple(lines)


def _scores(found: Placement) -> tuple[Score, ...]:
    return tuple(Score(name, score) for name, score in reversed(found.scores))


def _kept_away(away: Mapping[str, str]) -> tuple[Refusal, ...]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in sorted(away.items()):
        by_reason.setdefault(reason, []).append(name)
    return tuple(
        Refusal(reason, tuple(names), (), ("kube-scheduler does not offer these nodes",))
        for reason, names in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
    )


def _refusals(replay: Replay, request: PodRequest, texts: Mapping[str, str]) -> tuple[Refusal, ...]:
    by_reason: dict[str, list[str]] = {}
    for name, text in sorted(texts.items()):
        by_reason.setdefault(text, []).append(name)
    registered = frozenset(replay.state.node_names())
    return tuple(
        Refusal(text, tuple(names), _room(replay, request, registered.intersection(names)), _advice(text))
        for text, names in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
    )


def _advice(text: str) -> tuple[str, ...]:
    found = codes(text) or tuple(text.split(", "))
    return tuple(f"{code}: {ADVICE[code]}" for code in found if code in ADVICE)


def _room(replay: Replay, request: PodRequest, names: frozenset[str]) -> tuple[Room, ...]:
    rooms = []
    for word in request.vendors:
        nodes = [_best(replay, name, word) for name in names]
        if nodes:
            counts = [_spread(column) for column in zip(*(counts for counts, _, _ in nodes), strict=True)]
            memory = [amount for _, amount, _ in nodes if amount is not None]
            cores = [amount for _, _, amount in nodes if amount is not None]
            free = (_spread(amounts) if amounts else None for amounts in (memory, cores))
            rooms.append(Room(word, *counts, *free))
    return tuple(rooms)


def _spread(amounts: Sequence[int]) -> tuple[int, int]:
    return min(amounts), max(amounts)


def _best(replay: Replay, name: str, word: str) -> tuple[tuple[int, int, int], int | None, int | None]:
    """Cards, healthy ones, and the most free slots, MiB and cores among those that can be used."""
    profile = replay.by_word[word]
    cards = [one for one in replay.state.node_usage(name).cards if one.vendor == word]
    node = replay.state.node(name)
    cordoned = cordoned_ids(node.annotations) if node is not None else frozenset()
    usable = [one for one in cards if one.healthy and one.info.id not in cordoned]
    memory = [memory_share(profile, one.info, one.used) for one in usable]
    cores = [cores_share(profile, one.info, one.used) for one in usable]
    slots = max((one.info.count - one.used.slots for one in usable), default=0)
    return (
        (len(cards), len(usable), slots),
        _most_left(memory) if profile.rules.shows_memory else None,
        _most_left(cores) if profile.rules.shows_cores else None,
    )


def _most_left(shares: Iterable[Share]) -> int | None:
    """The most that is left; 0 where no card can be used, None where cards count nothing."""
    found = list(shares)
    counted = [share.left for share in found if share.total]
    return max(counted) if counted else None if found else 0


def _cards(
    replay: Replay, node: str, request: PodRequest, allocations: Mapping[str, Allocation]
) -> tuple[ChosenCard, ...]:
    """The node's cards of the vendors asked, chosen ones first."""
    if node not in replay.state.node_names():
        return ()
    devices: dict[tuple[str, str], list[ContainerDevice]] = {}
    for word, allocation in allocations.items():
        for slot in allocation:
            for device in slot:
                devices.setdefault((word, device.uuid), []).append(device)
    shown = [one for one in replay.state.node_usage(node).cards if one.vendor in request.vendors]
    shown.sort(key=lambda one: ((one.vendor, one.info.id) not in devices, one.vendor, one.info.index))
    return tuple(
        _chosen(replay.by_word[one.vendor], one, devices.get((one.vendor, one.info.id), [])) for one in shown
    )


def _chosen(p: VendorProfile, one: CardUsage, devices: list[ContainerDevice]) -> ChosenCard:
    info, used = one.info, one.used
    return ChosenCard(
        info.id,
        info.type,
        bool(devices),
        f"{used.slots}/{info.count}",
        _of(memory_share(p, info, used)),
        _of(cores_share(p, info, used)),
        " + ".join(taken_text(p, info, device) for device in devices),
    )


def _of(share: Share) -> str:
    return f"{share.granted}/{share.total}" if share.total else "-"
