"""What is granted and what is used: cluster, nodes, cards, pods."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hami.answers.amounts import Share, cores_share, memory_share, unregistered
from hami.answers.replay import Replay
from hami.protocol.inventory import DeviceInfo
from hami.vendors.types import Usage, VendorProfile

__all__ = ["CardRow", "GroupRow", "PodRow", "Share", "Top", "top"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GroupRow:
    """The cards of one vendor on one node, or in the whole cluster (`node` "")."""

    node: str
    vendor: str
    cards: int
    healthy: int
    pods: int
    slots: Share
    memory: Share  # MiB
    cores: Share  # percent of a card, or the vendor's unit
    used_memory: int | None  # MiB in use by whomever; None: no monitor says
    utilization: float | None  # percent of all cards


@dataclass(frozen=True, slots=True)
class CardRow:
    """One card."""

    node: str
    vendor: str
    id: str
    model: str
    healthy: bool
    slots: Share
    memory: Share  # MiB
    cores: Share
    pods: tuple[str, ...]  # namespace/name
    used_memory: int | None  # MiB
    utilization: float | None  # percent


@dataclass(frozen=True, slots=True)
class PodRow:
    """One pod that holds devices."""

    pod: str  # namespace/name
    node: str
    vendor: str
    cards: int
    memory: int | None  # MiB granted, over all its cards; None: this vendor counts none
    cores: int | None
    used_memory: int | None  # MiB
    utilization: float | None  # percent, over all its cards


@dataclass(frozen=True, slots=True)
class Top:
    """All three tables and the sums."""

    cluster: tuple[GroupRow, ...]
    nodes: tuple[GroupRow, ...]
    cards: tuple[CardRow, ...]
    pods: tuple[PodRow, ...]
    notes: tuple[str, ...] = ()


def top(replay: Replay, namespace: str = "") -> Top:
    """Every table; `namespace` limits the pods shown, not what cards and nodes have granted."""
    cards = _cards(replay)
    by_node: dict[tuple[str, str], list[CardRow]] = {}
    by_vendor: dict[str, list[CardRow]] = {}
    for row in cards:
        by_node.setdefault((row.node, row.vendor), []).append(row)
        by_vendor.setdefault(row.vendor, []).append(row)
    return Top(
        tuple(_group("", vendor, rows) for vendor, rows in sorted(by_vendor.items())),
        tuple(_group(node, vendor, rows) for (node, vendor), rows in sorted(by_node.items())),
        cards,
        _pods(replay, namespace),
        (*replay.snapshot.notes, *replay.skipped),
    )


def _cards(replay: Replay) -> tuple[CardRow, ...]:
    holders: dict[tuple[str, str], list[str]] = {}
    for pod in replay.state.pods():
        for cards in pod.effective.values():
            for card in cards:
                holders.setdefault((pod.node, card), []).append(f"{pod.namespace}/{pod.name}")
    used = {one.device: one for one in replay.snapshot.cards_use}
    profiles = replay.by_word
    rows = []
    for node in sorted(replay.state.usage(), key=lambda one: one.name):
        for one in node.cards:
            real = used.get(one.info.id)
            pods = tuple(sorted(holders.get((node.name, one.info.id), ())))
            rows.append(
                CardRow(
                    node.name,
                    one.vendor,
                    one.info.id,
                    one.info.type,
                    one.healthy,
                    Share(one.used.slots, one.info.count),
                    memory_share(profiles[one.vendor], one.info, one.used),
                    cores_share(profiles[one.vendor], one.info, one.used),
                    pods,
                    None if real is None else int(real.memory) // _MIB,
                    None if real is None else real.utilization,
                )
            )
    return tuple(rows)


def _group(node: str, vendor: str, rows: list[CardRow]) -> GroupRow:
    utilization = [row.utilization for row in rows if row.utilization is not None]
    return GroupRow(
        node,
        vendor,
        len(rows),
        sum(row.healthy for row in rows),
        len({pod for row in rows for pod in row.pods}),
        _sum(row.slots for row in rows),
        _sum(row.memory for row in rows),
        _sum(row.cores for row in rows),
        _total(row.used_memory for row in rows),
        sum(utilization) / len(utilization) if utilization else None,
    )


def _sum(shares: Iterable[Share]) -> Share:
    found = list(shares)
    return Share(sum(one.granted for one in found), sum(one.total for one in found))


def _total(amounts: Iterable[int | None]) -> int | None:
    found = [amount for amount in amounts if amount is not None]
    return sum(found) if found else None


def _pods(replay: Replay, namespace: str) -> tuple[PodRow, ...]:
    used: dict[tuple[str, str], dict[str, tuple[int, float]]] = {}
    for one in replay.snapshot.containers_use:
        cards = used.setdefault((one.namespace, one.pod), {})
        memory, busy = cards.get(one.device, (0, 0.0))
        cards[one.device] = (memory + int(one.memory) // _MIB, busy + one.utilization)
    infos = {(node.name, one.info.id): one.info for node in replay.state.usage() for one in node.cards}
    rows = []
    for pod in replay.state.pods():
        if namespace and pod.namespace != namespace:
            continue
        real = used.get((pod.namespace, pod.name), {})
        for vendor, shares in pod.effective.items():
            mine = [real[card] for card in shares if card in real]
            held = [
                (infos.get((pod.node, card)) or unregistered(card, use), use) for card, use in shares.items()
            ]
            rows.append(
                PodRow(
                    f"{pod.namespace}/{pod.name}",
                    pod.node,
                    vendor,
                    len(shares),
                    *_granted(replay.by_word[vendor], held),
                    sum(memory for memory, _ in mine) if mine else None,
                    sum(busy for _, busy in mine) if mine else None,
                )
            )
    return tuple(sorted(rows, key=lambda row: (row.pod, row.vendor)))


def _granted(p: VendorProfile, cards: list[tuple[DeviceInfo, Usage]]) -> tuple[int | None, int | None]:
    memory, cores = (
        _sum(share(p, info, use) for info, use in cards) for share in (memory_share, cores_share)
    )
    return memory.granted if memory.total else None, cores.granted if cores.total else None
