"""What the log has said already: every look meets the same trouble again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

AGAIN_S: Final = 600.0


class Told:
    """Lets a cause through when it is new for its name, and again after ten minutes. Pure."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[str, float]] = {}

    def is_due(self, name: str, cause: str, now: float) -> bool:
        """Whether to log ``cause`` now (a clock in seconds); counts as logged then."""
        before, at = self._told.get(name, ("", 0.0))
        if before == cause and now - at < AGAIN_S:
            return False
        self._told[name] = cause, now
        return True

    def retain(self, names: Collection[str]) -> None:
        """Forget all others: their trouble is over."""
        self._told = {name: told for name, told in self._told.items() if name in names}
