"""What a program says about itself in ``hami_build_info`` and ``version`` (monitor.md §6.4)."""

from __future__ import annotations

import platform
from typing import Final

UNKNOWN: Final = "unknown"
_MACHINES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


def build_labels(version: str) -> dict[str, str]:
    """HAMi's label names (WIRE) with our values; ``version`` without ``v``, machines by their Go names."""
    machine = platform.machine()
    return {
        "version": f"v{version}",
        "revision": UNKNOWN,
        "build_date": UNKNOWN,
        "go_version": f"python{platform.python_version()}",
        "compiler": platform.python_implementation().lower(),
        "platform": f"{platform.system().lower()}/{_MACHINES.get(machine, machine)}",
    }
