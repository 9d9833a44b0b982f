"""Exact arithmetic on Kubernetes quantities for node fit and quota, in thousandths."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from hami.local.api.objects import Object, dig

_QUANTITY = re.compile(
    r"^([+-]?)(\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?\d{1,3})?$"
)
_PLAIN_DIGITS = 40
_SCALE: dict[str, Fraction] = {
    "": Fraction(1), "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000),
    "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12),
    "P": Fraction(10**15), "E": Fraction(10**18), "Ki": Fraction(2**10), "Mi": Fraction(2**20),
    "Gi": Fraction(2**30), "Ti": Fraction(2**40), "Pi": Fraction(2**50), "Ei": Fraction(2**60),
}  # fmt: skip


def milli(quantity: Any) -> int:
    """``quantity`` in thousandths, rounded up. Raises ValueError where it is not a quantity."""
    text = str(quantity).strip()
    if text.isascii() and text.isdigit() and len(text) < _PLAIN_DIGITS:
        return int(text) * 1000
    found = _QUANTITY.match(text)
    if found is None:
        raise ValueError(f"{quantity!r} is not a quantity")
    suffix = found[3] or ""
    scale = _SCALE.get(suffix)
    if scale is None:
        scale = Fraction(10) ** int(suffix[1:])
    number = Fraction(found[2]) * scale * 1000
    if found[1] == "-":
        number = -number
    return -((-number.numerator) // number.denominator)


def plain(thousandths: int) -> str:
    """The shortest text of an amount: ``2``, ``1500m``."""
    return str(thousandths // 1000) if thousandths % 1000 == 0 else f"{thousandths}m"


def _of(container: Object, side: str) -> dict[str, int]:
    return {name: milli(amount) for name, amount in (dig(container, "resources", side) or {}).items()}


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, 0) + amount


def _max(total: dict[str, int], other: Mapping[str, int]) -> None:
    for name, amount in other.items():
        total[name] = max(total.get(name, 0), amount)


def pod_amounts(pod: Object, side: str = "requests") -> dict[str, int]:
    """What the pod needs of each resource, in thousandths: the effective request of Kubernetes.

    Sidecars (init containers with restartPolicy Always) run beside all that start after them.
    """
    spec = pod.get("spec") or {}
    total: dict[str, int] = {}
    for container in spec.get("containers") or []:
        _add(total, _of(container, side))
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.get("initContainers") or []:
        if container.get("restartPolicy") == "Always":
            _add(sidecars, _of(container, side))
            _max(peak, sidecars)
        else:
            together = dict(sidecars)
            _add(together, _of(container, side))
            _max(peak, together)
    _add(total, sidecars)
    _max(total, peak)
    for name, amount in (spec.get("overhead") or {}).items():
        if side == "requests" or name in total:
            total[name] = total.get(name, 0) + milli(amount)
    return total


def sum_amounts(pods: Iterable[Object], side: str = "requests") -> dict[str, int]:
    total: dict[str, int] = {}
    for pod in pods:
        _add(total, pod_amounts(pod, side))
    return total
