"""Our own expectations for cases marked ``ours``: written down per id in
``tests/conformance/ours/<group>.json`` and ``<group>.<vendor>.json``.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from .cases import Case

FOLDER = Path(__file__).resolve().parent.parent / "ours"


def expectations(case: Case) -> list[Any]:
    """Answers that the specification asks for where it differs from the record."""
    if not (case.ours or case.maybe_ours):
        return []
    written = _written(case.group).get(case.id)
    return [] if written is None else [written["expect"]]


@cache
def _written(group: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted((*FOLDER.glob(f"{group}.json"), *FOLDER.glob(f"{group}.*.json"))):
        found.update(json.loads(path.read_text()))
    return found


def written(group: str) -> dict[str, Any]:
    """Everything written down for a group: id -> ``{"why": place in the spec, "expect": answer}``."""
    return _written(group)
