"""Which allocation mode a node takes: ``--allocation-mode`` against what kubelet and runtime can. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from hami.node.errors import SettingsError
from hami.protocol.keys import MODE_EXACT, MODE_LOCK

MODE_AUTO: Final = "auto"
CHOICES: Final = (MODE_AUTO, MODE_LOCK, MODE_EXACT)
MIN_KUBELET: Final = (1, 31)
MIN_RUNTIMES: Final = {"containerd": (2, 0), "cri-o": (1, 28)}
_VERSION: Final = re.compile(r"v?(\d{1,6})\.(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why mode ``exact`` is not taken. ``known``: it cannot work; else the node only cannot show that it
    works, and an explicit ``exact`` is obeyed.
    """

    text: str
    known: bool


def version_obstacle(kubelet: str, runtime: str) -> Obstacle | None:
    """What stands against ``exact`` in ``status.nodeInfo`` (``v1.36.0``, ``containerd://2.4.0``)."""
    found = _version(kubelet)
    if found is None:
        return Obstacle(f"the kubelet's version {kubelet!r} is not known", known=False)
    if found < MIN_KUBELET:
        return Obstacle(f"the kubelet is {kubelet}, 1.31 or later is needed", known=True)
    name, _, text = runtime.partition("://")
    wanted = MIN_RUNTIMES.get(name)
    found = _version(text)
    if wanted is None or found is None:
        return Obstacle(f"the container runtime {runtime!r} is not known", known=False)
    if found < wanted:
        least = ".".join(map(str, wanted))
        return Obstacle(f"the container runtime is {runtime}, {name} {least} or later is needed", known=True)
    return None


def check_flags(mode: str, kubelet_socket: str) -> None:
    """Refuse what cannot work whatever the node is. Raises :class:`SettingsError`."""
    if mode not in CHOICES:
        raise SettingsError(f"--allocation-mode must be auto, lock or exact, not {mode!r}")
    if mode == MODE_EXACT and not kubelet_socket:
        raise SettingsError(
            "--allocation-mode=exact needs kubelet and cannot be used with an empty --kubelet-socket"
        )


def refusal(reason: str) -> SettingsError:
    """The error of an explicit ``exact`` on a node that cannot do it."""
    return SettingsError(
        f"--allocation-mode=exact cannot be used on this node: {reason}; use --allocation-mode=lock or auto"
    )


def _version(text: str) -> tuple[int, int] | None:
    match = _VERSION.match(text)
    return (int(match[1]), int(match[2])) if match else None
