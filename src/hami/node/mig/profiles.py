"""What a card offers for dynamic MIG: the allow list against what the driver knows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hami.node.config import MigAllowed
from hami.node.mig.driver import GpuProfile
from hami.protocol.inventory import MigPlacement, MigProfile
from hami.protocol.mig import profile_word

NUMBERS: Final = {"1g": 0, "2g": 1, "3g": 2, "4g": 3, "7g": 4, "8g": 5, "6g": 6}
"""NVML's number of the profile that a label selects by its slices (device-plugin.md §11.2)."""
_WORDS: Final = {number: word for word, number in NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class Offer:
    """What a card is registered with: profiles, and ``count``, the most instances of one of them. A card
    without profiles is left out, ``why`` says why.
    """

    profiles: tuple[MigProfile, ...] = ()
    count: int = 0
    why: str = ""


def allowed(model: str, entries: Iterable[MigAllowed]) -> tuple[str, ...]:
    """The profile labels for a card with this NVML name: those of the first entry of which a model is part of
    the name; empty when there is none.
    """
    return next((entry.profiles for entry in entries if any(part in model for part in entry.models)), ())


def offer(
    model: str,
    entries: Iterable[MigAllowed],
    known: Sequence[GpuProfile],
    placements: Callable[[GpuProfile], Sequence[MigPlacement]],
) -> Offer:
    """The allowed profiles that the driver knows, in the order of the allow list.

    ``core`` is percent of the largest slice profile's multiprocessors, rounded up. What ``placements`` raises
    is passed on.
    """
    labels = allowed(model, entries)
    if not labels:
        return Offer(why=f"no entry of migProfileAllowlist matches model {model!r}")
    plain = {profile.number: profile for profile in known if profile.number in _WORDS}
    most = max((profile.multiprocessors for profile in plain.values()), default=0)
    found: dict[int, MigProfile] = {}
    for label in labels:
        number = NUMBERS.get(profile_word(label), -1)
        profile = plain.get(number)
        if profile is None or number in found:
            continue
        places = tuple(placements(profile))
        if places:
            core = -(-100 * profile.multiprocessors // most) if most else 0
            found[number] = MigProfile(label, profile.memory_mib, core, profile.slices, places)
    if not found:
        return Offer(why=f"the driver knows none of the profiles {', '.join(labels)} of migProfileAllowlist")
    return Offer(tuple(found.values()), max(plain[number].count for number in found))


def word_of(profile: GpuProfile) -> str:
    """How instances of ``profile`` are known here: its slices, or its whole name where a label cannot select
    it.
    """
    return _WORDS.get(profile.number) or profile.name or f"profile {profile.number}"


def profile_of(word: str, known: Iterable[GpuProfile]) -> GpuProfile | None:
    """The profile that a label selects."""
    number = NUMBERS.get(word)
    return next((profile for profile in known if profile.number == number), None)
