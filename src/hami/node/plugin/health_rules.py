"""Which XIDs make a card unhealthy (device-plugin.md §10.3). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BUILT_IN: Final = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs that an application causes itself and that say nothing about the card."""

_WORDS: Final = frozenset({"all", "xids"})


@dataclass(frozen=True, slots=True)
class XidRules:
    """Rules of ``DP_DISABLE_HEALTHCHECKS`` and ``DP_ENABLE_HEALTHCHECKS``."""

    disabled: frozenset[int] = BUILT_IN
    enabled: frozenset[int] = frozenset()
    disable_all: bool = False
    enable_all: bool = False

    @property
    def watching(self) -> bool:
        """Whether any XID can matter; false switches the whole watcher off."""
        return self.enable_all or bool(self.enabled) or not self.disable_all

    def ignores(self, xid: int) -> bool:
        """Whether ``xid`` leaves the card healthy."""
        if self.enable_all or xid in self.enabled:
            return False
        return xid in self.disabled or self.disable_all


def parse_rules(disable: str, enable: str) -> XidRules:
    """Rules from the two comma lists; anything but ``all``, ``xids`` and positive numbers is ignored."""
    off_numbers, off_all = _parse(disable)
    on_numbers, on_all = _parse(enable)
    return XidRules(BUILT_IN | off_numbers, on_numbers, off_all, on_all)


def _parse(text: str) -> tuple[frozenset[int], bool]:
    tokens = [token.strip().lower() for token in text.split(",")]
    numbers = frozenset(
        int(token) for token in tokens if token.isascii() and token.isdigit() and len(token) < 10
    )
    return numbers, any(token in _WORDS for token in tokens)
