"""Pair scores of a node's GPUs, annotation ``hami.io/node-nvidia-score`` (WIRE, protocol.md §3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hami.protocol import _json
from hami.protocol.errors import PairScoreError

_NAMES = {"uuid": "uuid", "score": "score"}


def decode_pair_scores(text: str) -> dict[str, dict[str, int]]:
    """Scores ``uuid -> uuid -> score``; a missing pair counts as 0, ``null`` as nothing.

    Raises :class:`PairScoreError`.
    """
    plain = _json.load(text, PairScoreError, "pair score annotation")
    if plain is None:
        return {}
    if not isinstance(plain, list):
        raise PairScoreError("pair score annotation is no JSON array")
    return dict(_row(position, element) for position, element in enumerate(plain))


def encode_pair_scores(scores: Mapping[str, Mapping[str, int]]) -> str:
    """Annotation text, sorted by uuid."""
    rows = [{"uuid": uuid, "score": dict(sorted(row.items()))} for uuid, row in sorted(scores.items())]
    return msgspec.json.encode(rows).decode()


def _row(position: int, element: Any) -> tuple[str, dict[str, int]]:
    if not isinstance(element, dict):
        raise PairScoreError("not an object", f"$[{position}]")
    members = _json.in_known_case(element, _NAMES)
    uuid, score = members.get("uuid", ""), members.get("score", {})
    if not isinstance(uuid, str):
        raise PairScoreError("not a text", f"$[{position}].uuid")
    if not isinstance(score, dict):
        raise PairScoreError("not an object", f"$[{position}].score")
    score = {other: 0 if number is None else number for other, number in score.items()}
    for other, number in score.items():
        if type(number) is not int or abs(number) >= 2**63:
            raise PairScoreError("not an integer", f"$[{position}].score.{other}")
    return uuid, score
