"""Scoring weights, card scores and the order in which cards are tried (scheduler.md §7.1, §7.2)."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hami.protocol import keys
from hami.protocol.quantity import INT64_MAX, INT64_MIN
from hami.scheduler.core.answers import PlacementError, Weights
from hami.vendors.selection import policy_words
from hami.vendors.types import NO_PERCENT, Card, ContainerRequest, NodePolicy

BINPACK = "binpack"
SPREAD = "spread"
FRAGMENTATION = "fragmentation-aware"

# Sort keys of a card: ascending, the last card is tried first.
_Key = Callable[["ScoredCard"], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class ScoredCard:
    """A candidate, its inventory position and its score."""

    card: Card
    position: int
    score: float
    growth: float  # of unusable capacity with this request on it


_INTEGER = re.compile(r"[+-]?[0-9]{1,64}")
_SHOWN = 100  # characters of a text that is quoted in an error

_WORDS: dict[str, Callable[[ScoredCard], float]] = {
    "binpack": lambda one: one.score,
    "spread": lambda one: -one.score,
    "numa": lambda one: one.card.info.numa,
    FRAGMENTATION: lambda one: -one.growth,
}


def is_fragmentation_aware(node_policy: str, card_policy: str) -> bool:
    """Whether the mix of requests seen lately has a say in where the pod goes."""
    return node_policy == FRAGMENTATION or FRAGMENTATION in policy_words(card_policy)


def bonus_policy(node_policy: str) -> NodePolicy:
    """A node policy as the vendors' bonuses know it."""
    if node_policy == SPREAD:
        return "spread"
    return "binpack" if node_policy == BINPACK else "other"


def parse_weights(annotations: Mapping[str, str]) -> Weights:
    """Weights of a pod. Raises `PlacementError` with the first thing that is wrong, in HAMi's words."""
    text = annotations.get(keys.SCORING_WEIGHTS)
    if text is None:
        return Weights()
    found: dict[str, int] = {}
    entries = text.split(",")
    if len(entries) != 3:
        raise _bad_weights(text, "expected slot, core, and memory weights")
    for entry in entries:
        name, sign, number = (part.strip()[:_SHOWN] for part in entry.partition("="))
        if not sign:
            raise _bad_weights(text, "expected key=value entries")
        if name in found:
            raise _bad_weights(text, f'duplicate "{name}" weight')
        weight = int(number) if _INTEGER.fullmatch(number) else INT64_MAX + 1
        if not INT64_MIN <= weight <= INT64_MAX:
            raise _bad_weights(text, f'"{name}" weight must be an integer')
        if weight < 0:
            raise _bad_weights(text, f'"{name}" weight must not be negative')
        if name not in ("slot", "core", "memory"):
            raise _bad_weights(text, f'unknown weight "{name}"')
        found[name] = weight
    if not any(found.values()):
        raise _bad_weights(text, "at least one weight must be positive")
    return Weights(found["slot"], found["core"], found["memory"])


def card_score(card: Card, request: ContainerRequest, weights: Weights) -> float:
    """How full the card would be with this request on it: 10 x the weighted fractions of slots, cores and
    memory."""
    info, used = card.info, card.used
    if not (info.count and info.devcore and info.devmem):
        return 0.0
    if request.mem_percent not in (0, NO_PERCENT):
        memory = info.devmem * request.mem_percent // 100
    else:
        memory = request.memreq
    slots = (used.slots + 1) / info.count
    cores = (used.cores + request.cores) / info.devcore
    mem = (used.mem + memory) / info.devmem
    return 10.0 * (weights.slot * slots + weights.core * cores + weights.memory * mem)


def ordered(
    cards: Sequence[Card],
    request: ContainerRequest,
    weights: Weights,
    policy: str,
    *,
    numa_bind: bool,
    growths: Sequence[float] = (),
) -> list[Card]:
    """Cards in ascending preference: the last one is tried first; equal cards: the later inventory position
    wins. `growths`, for fragmentation-aware: per card, by how much its unusable capacity would grow."""
    scored = [
        ScoredCard(card, at, card_score(card, request, weights), growths[at] if growths else 0.0)
        for at, card in enumerate(cards)
    ]
    scored.sort(key=_sort_key(policy, numa_bind))
    return [one.card for one in scored]


@lru_cache(maxsize=256)
def _sort_key(policy: str, numa_bind: bool) -> _Key:
    if "," in policy:
        return _chain(policy, numa_bind)
    if policy == "numa":
        return lambda one: (one.card.info.numa, one.card.info.index)
    if policy == "mutex":
        return lambda one: (-one.card.used.slots, one.card.info.numa)
    if policy == "binpack":
        if numa_bind:
            return lambda one: (-one.card.info.numa, one.score)
        return lambda one: (one.score, one.card.info.numa)
    if policy == FRAGMENTATION:
        if numa_bind:
            return lambda one: (one.card.info.numa, -one.growth)
        return lambda one: (-one.growth, one.card.info.numa)
    if numa_bind:
        return lambda one: (one.card.info.numa, -one.score)
    return lambda one: (-one.score, one.card.info.numa)


def _chain(policy: str, numa_bind: bool) -> _Key:
    words = [word.strip() for word in policy.split(",")]
    if numa_bind:
        words = ["numa", *(word for word in words if word != "numa")]
    parts = [_WORDS[word] for word in dict.fromkeys(words) if word in _WORDS]
    if not parts:
        parts = [_WORDS["spread"]]
    return lambda one: (*(part(one) for part in parts), one.card.info.index)


def _bad_weights(text: str, problem: str) -> PlacementError:
    return PlacementError(f'invalid {keys.SCORING_WEIGHTS} annotation "{text[:_SHOWN]}": {problem}')
