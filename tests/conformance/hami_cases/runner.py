"""Asks our code every case and judges the answers (decisions, row 79)."""

from __future__ import annotations

import enum
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from . import codec, ours, request
from .allocate import Allocate
from .bind import Bind
from .cases import Case
from .compare import short
from .register import Register
from .scheduling import Accounting, Filter
from .webhook import Webhook


class Group(Protocol):
    """How one group is asked and judged."""

    def run(self, case: Case) -> Any:
        """Our answer, in the form of the records."""
        ...

    def compare(self, expected: Any, got: Any, case: Case) -> str:
        """The first difference, or ``""``."""
        ...


GROUPS: dict[str, Group] = {
    "codec": codec,
    "request": request,
    "webhook": Webhook(),
    "register": Register(),
    "filter": Filter(),
    "accounting": Accounting(),
    "allocate": Allocate(),
    "bind": Bind(),
}


class Verdict(enum.Enum):
    """What became of a case."""

    PASSED = "passed"
    FAILED = "failed"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Result:
    """One case judged. ``why``: the difference; ``got`` our answer, for failures."""

    case: Case
    verdict: Verdict
    why: str = ""
    got: Any = None


def judge_all(cases: Iterable[Case]) -> Iterator[Result]:
    """Results in the order of ``cases``."""
    return (judge(case) for case in cases)


def judge(case: Case) -> Result:
    """One case; one marked ``ours`` passes with the record or with our own expectation, else stays open."""
    try:
        return _judge(case)
    except Exception as error:  # a crash of our code is a failed case, not the end of the run
        place = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error} ({place.name}, line {place.lineno} of {place.filename})"
        return Result(case, Verdict.FAILED, why)


def _judge(case: Case) -> Result:
    group = GROUPS[case.group]
    got = group.run(case)
    answers = [*case.answers, *ours.expectations(case)]
    differences = [group.compare(answer, got, case) for answer in answers if not _is_crash(answer)]
    if any(not found for found in differences):
        return Result(case, Verdict.PASSED)
    why = differences[-1] if differences else "HAMi crashes here and no expectation of ours is written down"
    marked = bool(case.ours or case.maybe_ours)
    return Result(case, Verdict.UNDECIDED if marked else Verdict.FAILED, why, got)


def _is_crash(answer: Any) -> bool:
    return isinstance(answer, dict) and answer.get("crash") is True


def report(results: Iterable[Result], *, show_undecided: bool = False) -> tuple[list[str], int]:
    """Report lines (failures, one line per group, the total) and the number of failures."""
    lines: list[str] = []
    counts: dict[str, dict[Verdict, int]] = {}
    for result in results:
        case = result.case
        counts.setdefault(case.group, dict.fromkeys(Verdict, 0))[result.verdict] += 1
        if result.verdict is Verdict.FAILED:
            lines += [
                f"FAILED {case.id}: {case.what}",
                f"  difference: {result.why}",
                f"  expected:   {_all_answers(case)}",
                f"  got:        {short(result.got)}",
            ]
        elif result.verdict is Verdict.UNDECIDED and show_undecided:
            marks = "; ".join((*case.ours, *case.maybe_ours))
            lines.append(f"undecided {case.id}: {case.what}: {result.why} [{marks}]")
    total = dict.fromkeys(Verdict, 0)
    for group, per_verdict in counts.items():
        lines.append(f"{group}: {_sentence(per_verdict)}")
        for verdict, number in per_verdict.items():
            total[verdict] += number
    lines.append(_sentence(total))
    return lines, total[Verdict.FAILED]


def _sentence(counts: dict[Verdict, int]) -> str:
    return ", ".join(f"{number} {verdict.value}" for verdict, number in counts.items())


def _all_answers(case: Case) -> str:
    return " or ".join(short(answer) for answer in case.answers)
