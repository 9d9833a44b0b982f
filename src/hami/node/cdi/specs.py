"""The CDI documents of a node: one per kind of device, made anew at every start of the plugin."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hami.node.cdi import kinds
from hami.node.cdi.driver import DriverRoots, card_edits, driver_edits, extra_edits
from hami.node.cdi.edits import Edits, build_spec, merged, qualified

OUR_FILES: Final = frozenset(kinds.file_of(kind) for kind in (kinds.GPU, kinds.IMEX, *kinds.EXTRAS))
"""Files that nobody else writes; those that are not made any more go."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CardDevice:
    """A card as runtimes know it: its UUID or index, its device nodes, its PCI bus id."""

    name: str
    paths: tuple[str, ...]
    bus_id: str = ""


@dataclass(frozen=True, slots=True)
class Specs:
    """``files`` by name; ``edits`` by qualified name, with what the whole document brings; ``extras`` the
    kinds of those that this node has.
    """

    files: Mapping[str, bytes]
    edits: Mapping[str, Edits]
    extras: tuple[str, ...]


def make_specs(
    cards: Sequence[CardDevice],
    channels: Mapping[str, str],
    extras: Sequence[str],
    roots: DriverRoots,
    sysfs: str = "/sys",
) -> Specs:
    """Documents for the cards, the IMEX channels (device path by name) and the wanted extras; blocking.

    An extra that the node does not have is left out with a log line. Raises :class:`CdiError`.
    """
    files: dict[str, bytes] = {}
    edits: dict[str, Edits] = {}

    def add(kind: str, devices: Mapping[str, Edits], common: Edits | None = None) -> None:
        files[kinds.file_of(kind)] = build_spec(kind, devices, common)
        for name, own in devices.items():
            edits[qualified(kind, name)] = merged((common or Edits(), own))

    if cards:
        common = driver_edits(roots)
        add(
            kinds.GPU,
            {card.name: card_edits(roots, card.paths, card.bus_id, sysfs) for card in cards},
            common,
        )
    if channels:
        add(kinds.IMEX, {name: card_edits(roots, (path,)) for name, path in channels.items()})
    found = []
    for kind in extras:
        extra = extra_edits(kind, roots)
        if extra:
            add(kind, {kinds.ALL: extra})
            found.append(kind)
        else:
            log.warning("cdi.kind_without_devices", extra={"kind": kind, "root": roots.dev_here or "/"})
    return Specs(files, edits, tuple(found))
