"""Answers as text for a terminal: tables with two blanks between columns, as kubectl prints them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hami.answers.checks import Check
from hami.answers.explain import Explanation, Refusal, Room, Score
from hami.answers.leftovers import Leftover
from hami.answers.locks import Locks, NodeLock
from hami.answers.simulate import Simulated
from hami.answers.top import CardRow, GroupRow, PodRow, Share, Top
from hami.protocol.durations import format_duration

NAMES_SHOWN = 4


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table, left-aligned, no blanks at line ends."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[at]) for row in table) for at in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


# --- explain ----------------------------------------------------------------------------------------------


def explanation_lines(found: Explanation, *, every_node: bool = False) -> list[str]:
    """An explanation; `every_node` lists all names of a group instead of the first few."""
    lines = [f"Pod {found.pod} ({found.phase})", f"  {found.summary}"]
    lines += [f"  asks    {line}" for line in found.asks]
    if found.policy:
        lines.append(f"  policy  {found.policy}")
    if found.last_word:
        lines.append(f"  kube-scheduler's last word: {found.last_word}")
    if found.refusals:
        lines += ["", "Why not"]
        for refusal in found.refusals:
            lines += _refusal_lines(refusal, every_node=every_node)
    if found.scores:
        lines += ["", "Nodes that fit, best first"]
        shown = found.scores if every_node else found.scores[: 5 * NAMES_SHOWN]
        lines += [f"  {line}" for line in columns(("NODE", "SCORE"), _score_rows(shown))]
    if found.cards:
        lines += ["", "Cards there (* chosen; use without this pod)"]
        header = ("", "CARD", "MODEL", "SLOTS", "MEMORY MiB", "CORES", "THIS POD TAKES")
        rows = [
            ("*" if one.chosen else "", one.id, one.model, one.slots, one.memory, one.cores, one.taken)
            for one in found.cards
        ]
        lines += [f"  {line}" for line in columns(header, rows)]
    if found.changes:
        lines += ["", "What would help (each tried on a copy of the cluster)"]
        lines += [f"  - {change}" for change in found.changes]
    return [*lines, *_note_lines(found.notes)]


def _score_rows(scores: Iterable[Score]) -> Iterable[Sequence[str]]:
    return ((one.node, f"{one.score:.2f}") for one in scores)


def _refusal_lines(refusal: Refusal, *, every_node: bool) -> list[str]:
    count = len(refusal.nodes)
    names = refusal.nodes if every_node else refusal.nodes[:NAMES_SHOWN]
    more = f" and {count - len(names)} more" if count > len(names) else ""
    noun = "node" if count == 1 else "nodes"
    lines = [f"  {count} {noun}: {refusal.reason}", f"      {', '.join(names)}{more}"]
    lines += [f"      {_room(room)}" for room in refusal.room]
    return [*lines, *(f"      {line}" for line in refusal.advice)]


def _room(room: Room) -> str:
    free = [f"{_range(room.free_slots)} slots"]
    free += [f"{_range(room.free_memory)} MiB"] if room.free_memory else []
    free += [f"{_range(room.free_cores)} cores"] if room.free_cores else []
    return (
        f"{room.vendor}: {_range(room.cards)} cards, {_range(room.healthy)} usable; most free on one card: "
        f"{', '.join(free)}"
    )


def _range(pair: tuple[int, int]) -> str:
    low, high = pair
    return str(low) if low == high else f"{low} to {high}"


# --- top --------------------------------------------------------------------------------------------------


def top_lines(found: Top, table: str) -> list[str]:
    """One of the tables `nodes`, `cards`, `pods`, below the cluster's sums."""
    lines = columns(_GROUP_HEADER[1:], (_group(row)[1:] for row in found.cluster))
    if table == "nodes":
        body = columns(_GROUP_HEADER, map(_group, found.nodes))
    elif table == "cards":
        body = columns(_CARD_HEADER, map(_card, found.cards))
    else:
        body = columns(_POD_HEADER, map(_pod, found.pods))
    return [*lines, "", *body, *_note_lines(found.notes)]


_GROUP_HEADER = (
    "NODE",
    "VENDOR",
    "CARDS",
    "PODS",
    "SLOTS",
    "MEMORY MiB",
    "",
    "CORES",
    "",
    "USED MiB",
    "BUSY",
)
_CARD_HEADER = (
    "NODE", "CARD", "MODEL", "STATE", "PODS", "SLOTS", "MEMORY MiB", "", "CORES", "", "USED MiB", "BUSY",
)  # fmt: skip
_POD_HEADER = ("POD", "NODE", "VENDOR", "CARDS", "MEMORY MiB", "CORES", "USED MiB", "BUSY")


def _group(row: GroupRow) -> tuple[str, ...]:
    cards = str(row.cards) if row.healthy == row.cards else f"{row.healthy}/{row.cards} healthy"
    return (
        row.node,
        row.vendor,
        cards,
        str(row.pods),
        _share(row.slots)[0],
        *_share(row.memory),
        *_share(row.cores),
        _or_dash(row.used_memory),
        _percent(row.utilization),
    )


def _card(row: CardRow) -> tuple[str, ...]:
    return (
        row.node,
        row.id,
        row.model,
        "healthy" if row.healthy else "unhealthy",
        str(len(row.pods)),
        _share(row.slots)[0],
        *_share(row.memory),
        *_share(row.cores),
        _or_dash(row.used_memory),
        _percent(row.utilization),
    )


def _pod(row: PodRow) -> tuple[str, ...]:
    return (
        row.pod,
        row.node,
        row.vendor,
        str(row.cards),
        _or_dash(row.memory),
        _or_dash(row.cores),
        _or_dash(row.used_memory),
        _percent(row.utilization),
    )


def _share(share: Share) -> tuple[str, str]:
    if not share.total:
        return "-", ""
    return f"{share.granted}/{share.total}", f"{100 * share.granted // share.total}%"


def _or_dash(amount: int | None) -> str:
    return "-" if amount is None else str(amount)


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0f}%"


# --- simulate ---------------------------------------------------------------------------------------------


def simulation_lines(found: Simulated) -> list[str]:
    """A line per pod, and the sum."""
    rows = [(one.pod, one.node or "-", "; ".join(one.cards) or one.reason) for one in found.pods]
    lines = columns(("POD", "NODE", "CARDS, OR WHY NOT"), rows)
    return [*lines, "", f"{found.fits} of {len(found.pods)} pods fit", *_note_lines(found.notes)]


def _note_lines(notes: Sequence[str]) -> list[str]:
    return ["", *(f"note: {note}" for note in notes)] if notes else []


# --- checks -----------------------------------------------------------------------------------------------


def check_lines(checks: Sequence[Check], notes: Sequence[str]) -> list[str]:
    """One line per check, and what to do where there is something."""
    rows = [(one.name, one.result, one.found, one.fix) for one in checks]
    return [*columns(("CHECK", "RESULT", "FOUND", "DO"), rows), *_note_lines(notes)]


# --- locks ------------------------------------------------------------------------------------------------


def lock_lines(found: Locks) -> list[str]:
    """One line per lock."""
    if not found.locks:
        return ["no node is locked", *_note_lines(found.notes)]
    header = ("NODE", "LOCK", "HOLDER", "AGE", "STATE", "WHY")
    return [*columns(header, map(_lock_row, found.locks)), *_note_lines(found.notes)]


def _lock_row(lock: NodeLock) -> tuple[str, ...]:
    age = "-" if lock.age_s is None else format_duration(int(lock.age_s))
    return lock.node, lock.key, lock.holder or "-", age, lock.state, lock.why


# --- leftovers --------------------------------------------------------------------------------------------


def leftover_line(found: Leftover) -> str:
    """One object in a line; of a node only annotations go."""
    name = f"{found.namespace}/{found.name}" if found.namespace else found.name
    what = f": annotations {', '.join(found.annotations)}" if found.annotations else ""
    return f"{found.kind} {name}{what}" + (f" (stays: {found.hint})" if found.hint else "")
