"""Names of NVIDIA's devices towards runtimes (WIRE, device-plugin.md §8.3, §8.4)."""

from __future__ import annotations

from typing import Final

VENDOR: Final = "k8s.device-plugin.nvidia.com"
GPU: Final = f"{VENDOR}/gpu"
IMEX: Final = f"{VENDOR}/imex-channel"
GDRCOPY: Final = f"{VENDOR}/gdrcopy"
GDS: Final = f"{VENDOR}/gds"
MOFED: Final = f"{VENDOR}/mofed"
EXTRAS: Final = (GDRCOPY, GDS, MOFED)
"""In the order in which containers are given them."""
ALL: Final = "all"
"""Name of the one device of an extra."""


def file_of(kind: str) -> str:
    """File name of the document of ``kind``: ``<vendor>-<class>.json``."""
    return f"{kind.replace('/', '-')}.json"
