"""Group ``webhook``: admission of one pod; objects are compared, not patches."""

from __future__ import annotations

import copy
from typing import Any

from hami.protocol.admission import AdmissionRequest
from hami.scheduler.edge.webhook import Webhook as Reviewer
from hami.scheduler.edge.webhook import WebhookSettings

from .cases import Case
from .compare import canonical_quantities, difference, pruned
from .scheduling import new_state
from .setup import profiles

_OWN_CODES = (400, 422)


class Webhook:
    """Group ``webhook``."""

    def run(self, case: Case) -> Any:
        """The answer, with the pod as it would be stored."""
        settings = WebhookSettings(
            scheduler_name=case.config.get("scheduler_name", "hami-scheduler"),
            force_overwrite=case.config.get("force_overwrite_default_scheduler", True),
        )
        pod = case.input["pod"]
        meta = pod["metadata"]
        answer = Reviewer(new_state(case), profiles(case), settings).review(
            AdmissionRequest(
                uid="review",
                operation="CREATE",
                namespace=meta.get("namespace", ""),
                name=meta.get("name", ""),
                object=copy.deepcopy(dict(pod)),
            )
        )
        if not answer.allowed:
            return {"allowed": False, "code": answer.code, "message": answer.message}
        got: dict[str, Any] = {"allowed": True, "message": answer.message}
        if answer.patch:
            got["pod"] = applied(copy.deepcopy(dict(pod)), answer.patch)
        else:
            got["unchanged"] = True
        return got

    def compare(self, expected: Any, got: Any, case: Case) -> str:
        """As recorded; a vendor's refusal is 400 or 422 instead of HAMi's 500 (scheduler.md §14)."""
        wanted, answer = _plain(expected, case), _plain(got, case)
        if "message" not in expected:
            answer.pop("message", None)
        if wanted.get("code") == 500 and answer.get("code") in _OWN_CODES and _has_own_codes(case):
            answer["code"] = 500
        return difference(wanted, answer)


def _has_own_codes(case: Case) -> bool:
    return any("400/422" in reason for reason in case.ours)


def _plain(answer: Any, case: Case) -> dict[str, Any]:
    """With the stored pod in one spelling; an unchanged pod is the pod that came in."""
    plain = dict(answer)
    if plain.pop("unchanged", False):
        plain["pod"] = case.input["pod"]
    if "pod" in plain:
        plain["pod"] = canonical_quantities(pruned(plain["pod"]))
    return plain


def applied(value: Any, operations: Any) -> Any:
    """``value`` after a JSON patch of add, remove and replace operations."""
    root = {"": value}
    for operation in operations:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")]
        target: Any = root
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target[part]
        if isinstance(target, list):
            _apply_to_list(target, last, operation)
        elif operation["op"] == "remove":
            del target[last]
        else:
            target[last] = operation["value"]
    return root[""]


def _apply_to_list(target: list[Any], last: str, operation: Any) -> None:
    position = len(target) if last == "-" else int(last)
    if operation["op"] == "add":
        target.insert(position, operation["value"])
    elif operation["op"] == "remove":
        del target[position]
    else:
        target[position] = operation["value"]
