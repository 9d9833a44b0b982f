"""Marks that recorded cases lack: where the specification plainly asks for something else than HAMi answered
although the case is not marked ``ours``. Each rule looks at the input only and names its place in the
specification.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hami.protocol import keys

from . import marks_of_shares

Plain = Mapping[str, Any]


def missing_marks(plain: Plain, device_config: Plain) -> tuple[str, ...]:
    """Places in the specification that want another answer to this case."""
    return tuple(place for place, rule in _RULES if rule(plain, device_config))


def _limits(plain: Plain) -> Iterator[Mapping[str, Any]]:
    spec = (plain["input"].get("pod") or {}).get("spec") or {}
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        yield (container.get("resources") or {}).get("limits") or {}


def _odd_910c(plain: Plain, device_config: Plain) -> bool:
    """An odd number of 910C dies without superPod."""
    chips = (device_config.get("vnpus") or {}).get("configs") or ()
    names = {
        chip["resourceName"]
        for chip in chips
        if chip.get("commonWord") == "Ascend910C" and not chip.get("superPod")
    }
    counts = [limits[name] for limits in _limits(plain) for name in names & limits.keys()]
    return plain["id"].startswith("webhook-") and any(
        str(count).isdigit() and int(count) > 1 and int(count) % 2 for count in counts
    )


def _bonus_under_spread(plain: Plain, _device_config: Plain) -> bool:
    """The scores in the event carry the bonus with the other sign."""
    meta = (plain["input"].get("pod") or {}).get("metadata") or {}
    policy = (plain.get("config") or {}).get("node_scheduler_policy", "")
    policy = (meta.get("annotations") or {}).get(keys.NODE_POLICY, policy)
    bonus = any(plain["id"].startswith(f"filter-{word}") for word in ("Ascend910", "kunlun"))
    return bonus and policy == "spread"


def _ranked_by_new_cards_only(plain: Plain, _device_config: Plain) -> bool:
    """Whole Kunlun cards beside others in use: HAMi ranks by the new ones alone."""
    return plain["id"].startswith("filter-kunlun") and bool(plain["input"].get("pods"))


def _unhealthy_kunlun(plain: Plain, _device_config: Plain) -> bool:
    """A refusal of a Kunlun node with an unhealthy card."""
    answers = plain.get("expect_any") or [plain["expect"]]
    nodes = plain["input"].get("nodes") or ()
    texts = [(node["metadata"].get("annotations") or {}).get(_XPU_REGISTER, "[]") for node in nodes]
    cards = [card for text in texts if text.startswith("[") for card in json.loads(text)]
    refused = any("NumaNotFit" in json.dumps(answer) for answer in answers)
    return plain["id"].startswith("filter-XPU") and refused and any(not card.get("health") for card in cards)


_XPU_REGISTER = keys.VENDOR_KEYS["XPU"].register

_RULES: tuple[tuple[str, Callable[[Plain, Plain], bool]], ...] = (
    ("vendors/ascend.md §4: odd counts of 910C dies are denied (D13)", _odd_910c),
    (
        "vendors/hygon.md §4, iluvatar.md §4: shares of several cards are denied (D13)",
        marks_of_shares.slices_of_several_cards,
    ),
    (
        "vendors/amd.md §9, cambricon.md §9: one container of a pod (D13)",
        marks_of_shares.second_container,
    ),
    (
        "vendors/iluvatar.md §4, mthreads.md §4: requests follow the limits that are set",
        marks_of_shares.requests_follow_limits,
    ),
    (
        "vendors/awsneuron.md §6: a number of cores is split on the node",
        marks_of_shares.cores_of_no_usual_device,
    ),
    ("vendors/kunlun.md §6.4: ranking by the union", _ranked_by_new_cards_only),
    ("vendors/kunlun.md §5: CardNotHealth is counted next to NumaNotFit", _unhealthy_kunlun),
    (
        "scheduler.md §7.4, vendors/README.md R15: topology bonus changes sign under spread",
        _bonus_under_spread,
    ),
)
