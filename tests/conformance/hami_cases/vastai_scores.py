"""Printed scores of Vastai nodes: HAMi adds the share of dies on one AIC (0 to 1 a container) as it is, ours
10,000 times the mean of the containers, negative under spread (D3, vendors/vastai.md §7.4).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hami.protocol import keys
from hami.protocol.allocation import decode_allocation
from hami.scheduler.core.state import ClusterState

from .cases import Case

_SCORES = re.compile(r"nodes fit\((.*)\)$")
_SCORE = re.compile(r":-?[0-9.]+(?=[,)])")
_WEIGHT = 10_000
_ROUNDED = 0.0052
"""What two digits after the point leave open."""


def difference_of_scores(wanted: Any, got: Any, case: Case, state: ClusterState) -> str:
    """Where our scores are not what the record's mean with our weight, or ``""``; one event line each."""
    meta = case.input["pod"]["metadata"]
    policy = (meta.get("annotations") or {}).get(
        keys.NODE_POLICY, case.config.get("node_scheduler_policy", "binpack")
    )
    containers = _containers_with_dies(got)
    ours, theirs = _scores(got), _scores(wanted)
    for name, score in theirs.items():
        cards = state.node_usage(name).cards
        base = 10 * sum(card.used.slots for card in cards) / sum(card.info.count for card in cards)
        share = (score - base) / containers
        shown = (ours[name] - base) / (-_WEIGHT if policy == "spread" else _WEIGHT)
        if abs(shown - share) > _ROUNDED:
            return f"score of {name} is {ours[name]}, expected {base:.2f} and {share:.2f} x {_WEIGHT}"
    return ""


def without_scores(answer: Any) -> Any:
    """The answer without printed scores."""
    return {**answer, "events": [_SCORE.sub("", line) for line in answer.get("events") or ()]}


def _scores(answer: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for line in answer.get("events") or ():
        match = _SCORES.search(line)
        for part in match[1].split(",") if match else ():
            name, _, score = part.rpartition(":")
            found[name] = float(score)
    return found


def _containers_with_dies(answer: Mapping[str, Any]) -> int:
    annotations = (answer.get("patch") or {}).get("annotations") or {}
    text = annotations.get(keys.VENDOR_KEYS["Vastai"].allocated, "")
    return max(sum(1 for slot in decode_allocation(text) if slot), 1)
