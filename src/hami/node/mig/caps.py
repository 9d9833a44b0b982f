"""Device nodes of MIG instances: capability minors of ``/proc/driver/nvidia-caps/mig-minors``. Pure."""

from __future__ import annotations

import re
from typing import Final

from hami.node.errors import UnsafePathError
from hami.node.files import read_regular

FILE: Final = "/proc/driver/nvidia-caps/mig-minors"
_MAX_BYTES: Final = 1 << 20
_LINE: Final = re.compile(r"gpu(\d{1,6})/gi(\d{1,6})(?:/ci(\d{1,6}))?/access (\d{1,6})")

Minors = dict[tuple[int, int, int], int]
"""Minor of a capability by (minor of the card, GPU instance, compute instance); -1: of the GPU instance."""


def parse_minors(text: str) -> Minors:
    """The minors of instances; other lines (``config``, ``monitor``, unknown ones) are skipped."""
    found: Minors = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is not None:
            gpu, instance, compute, minor = match.groups()
            found[int(gpu), int(instance), -1 if compute is None else int(compute)] = int(minor)
    return found


def read_minors(path: str = FILE) -> Minors:
    """The minors of this node; none where the driver has no MIG."""
    try:
        return parse_minors(read_regular(path, _MAX_BYTES).decode("utf-8", "replace"))
    except (OSError, UnsafePathError):
        return {}


def instance_nodes(
    card_minor: int, gpu_instance: int, compute_instance: int, minors: Minors
) -> tuple[str, ...]:
    """Paths of the device nodes that a container needs for a MIG device: the card's and both capabilities
    (those that the driver names).
    """
    caps = (minors.get((card_minor, gpu_instance, number)) for number in (-1, compute_instance))
    return (
        f"/dev/nvidia{card_minor}",
        *(f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in caps if minor is not None),
    )
