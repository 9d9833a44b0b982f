"""What the pod's and the node's annotations say about single cards (README R10, nvidia-scheduling.md §9.4).

Texts come from users: parsing never fails, and results are cached by text, because one pod meets thousands
of nodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from hami.protocol import keys
from hami.vendors.types import Rules

MAX_STEERING_TEXT: Final = 16 * 1024
"""Longest annotation that may steer a placement: the check of a card must not depend on what users write."""

_REMEMBERED: Final = 512  # texts of up to MAX_STEERING_TEXT characters
_TRUE: Final = frozenset({"1", "t", "T", "TRUE", "true", "True"})


@dataclass(frozen=True, slots=True)
class Selection:
    """A pod's constraints on cards of one vendor; None or () means no constraint."""

    use_ids: tuple[frozenset[str], ...] = ()  # a card must be in each
    no_use_ids: frozenset[str] = frozenset()
    use_types: tuple[str, ...] | None = None  # lower-cased substrings, or "=" + the whole type
    no_use_types: tuple[str, ...] = ()
    modes: frozenset[str] | None = None
    numa_bound: bool = False

    def allows_id(self, card_id: str) -> bool:
        """Whether the use and no-use lists admit the card."""
        return card_id not in self.no_use_ids and all(card_id in ids for ids in self.use_ids)

    def allows_mode(self, mode: str) -> bool:
        """Whether cards in this sharing mode are accepted; a card without a mode always is."""
        return self.modes is None or not mode or mode in self.modes

    def allows_model(self, card_type: str, mode: str) -> bool:
        """Whether type lists and accepted modes admit a card of this registered type and mode."""
        return self.allows_mode(mode) and _type_passes(self.use_types, self.no_use_types, card_type)


def steering_keys(rules: Rules) -> tuple[str, ...]:
    """The pod annotations that `select` reads for the vendor with these rules."""
    single = (rules.use_type, rules.no_use_type, rules.mode, rules.numa_bind)
    return (*rules.use_uuid, *rules.no_use_uuid, *filter(None, single))


def select(rules: Rules, annotations: Mapping[str, str]) -> Selection:
    """The constraints that `annotations` put on cards of the vendor with these rules."""
    if not annotations:
        return _NO_CONSTRAINT
    get = annotations.get
    return _selection(
        tuple(get(key, "") for key in rules.use_uuid),
        tuple(get(key, "") for key in rules.no_use_uuid),
        get(rules.use_type, "") if rules.use_type else "",
        get(rules.no_use_type, "") if rules.no_use_type else "",
        get(rules.mode, "") if rules.mode else "",
        get(rules.numa_bind, "") if rules.numa_bind else "",
    )


def cordoned_ids(node_annotations: Mapping[str, str]) -> frozenset[str]:
    """Ids of the cards that take no new pods, for every vendor."""
    text = node_annotations.get(keys.DEVICE_CORDON)
    return _ids(text) if text else frozenset()


def policy_words(value: str) -> frozenset[str]:
    """The trimmed words of a card policy, as `FitContext.policy` wants them."""
    return _ids(value)


@lru_cache(maxsize=_REMEMBERED)
def _selection(
    use_ids: tuple[str, ...],
    no_use_ids: tuple[str, ...],
    use_types: str,
    no_use_types: str,
    modes: str,
    numa_bind: str,
) -> Selection:
    return Selection(
        tuple(_ids(text) for text in use_ids if text.strip()),
        frozenset[str]().union(*(_ids(text) for text in no_use_ids)),
        _type_tokens(use_types) if use_types.strip() else None,
        _type_tokens(no_use_types),
        _ids(modes) if modes.strip() else None,
        numa_bind in _TRUE,
    )


_NO_CONSTRAINT: Final = Selection()


@lru_cache(maxsize=_REMEMBERED)
def _ids(text: str) -> frozenset[str]:
    return frozenset(item for raw in text.split(",") if (item := raw.strip()))


def _type_tokens(text: str) -> tuple[str, ...]:
    return tuple(item for raw in text.split(",") if (item := raw.strip().lower()))


@lru_cache(maxsize=4096)
def _type_passes(use: tuple[str, ...] | None, no_use: tuple[str, ...], card_type: str) -> bool:
    lowered = card_type.lower()
    return (use is None or _any_matches(use, lowered)) and not _any_matches(no_use, lowered)


def _any_matches(tokens: tuple[str, ...], lowered: str) -> bool:
    return any(
        token[1:].strip() == lowered if token.startswith("=") else token in lowered for token in tokens
    )
