"""Texts of refusals and events, and what can be read back from them (scheduler.md §8, §12)."""

import heapq
from collections.abc import Iterable, Mapping
from functools import lru_cache

from hami.vendors.reasons import ID_MISMATCH, NODE_INSUFFICIENT, TYPE_MISMATCH

UNREGISTERED = "node unregistered"
NAMES_SHOWN = 20  # node names in one event text

_MODE_MISMATCH = "ModeNotFit"
_SELECTION = frozenset({TYPE_MISMATCH, ID_MISMATCH, _MODE_MISMATCH})


@lru_cache(maxsize=4096)
def codes(text: str) -> tuple[str, ...]:
    """The codes of a counted reason text (`<n>/<m> <Code>, ...`); () for a plain text."""
    found = []
    for item in text.split(", "):
        count, blank, code = item.partition(" ")
        if not blank or "/" not in count or not count.replace("/", "", 1).isdigit() or " " in code:
            return ()
        found.append(code)
    return tuple(found)


@lru_cache(maxsize=4096)
def is_unresolvable(text: str) -> bool:
    """Whether preemption cannot help a node with this reason."""
    if text in (UNREGISTERED, NODE_INSUFFICIENT):
        return True
    found = codes(text)
    return bool(found) and _SELECTION.issuperset(found)


def failure_messages(reasons: Mapping[str, str]) -> tuple[str, ...]:
    """Texts of the `FilteringFailed` events for node -> reason: one per counted code, then the summary."""
    by_text: dict[str, list[str]] = {}
    for name, text in reasons.items():
        by_text.setdefault(text, []).append(name)
    by_code: dict[str, list[str]] = {}
    for text, names in by_text.items():
        for code in codes(text):
            by_code.setdefault(code, []).extend(names)
    lines = [f"{len(names)} nodes {code}({_shown(names)})" for code, names in sorted(by_code.items())]
    return (*lines, f"no available node, {len(reasons)} nodes do not meet")


def success_message(
    node: str, not_fit: int, fits: int, scores: Iterable[tuple[str, float]], *, exact: bool
) -> str:
    """Text of the `FilteringSucceed` event; scores worst first, best last."""
    shown = ",".join(f"{name}:{score:.2f}" for name, score in scores)
    if exact:
        return f"find fit node({node}), {not_fit} nodes not fit, {fits} nodes fit({shown})"
    return f"find fit node({node}), at least {not_fit} nodes not fit, up to {fits} nodes fit({shown})"


def _shown(names: list[str]) -> str:
    first = heapq.nsmallest(NAMES_SHOWN, names)
    more = len(names) - len(first)
    return ",".join(first) + (f",…and {more} more" if more else "")
