"""Which kind of machine this is, and so where its cards are (device-plugin.md §5.1)."""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from hami.node.cdi.edits import CdiError
from hami.node.errors import NvmlError, SettingsError
from hami.node.nvml import GpuIdentity
from hami.node.plugin.cards import CardReader
from hami.node.plugin.inventory import Card

STRATEGIES: Final = ("auto", "nvml", "tegra")
_TEGRA_RELEASE: Final = "etc/nv_tegra_release"
_SOC_FAMILY: Final = "sys/devices/soc0/family"
_INTEGRATED: Final = re.compile(r"\(nvgpu\)|\bthor\b", re.IGNORECASE)
_FAMILY_CHARS: Final = 64

log = logging.getLogger(__name__)


class Platform(Enum):
    """Value: how messages name it."""

    NVML = "NVIDIA cards"
    WSL = "the Windows Subsystem for Linux"
    TEGRA = "a Tegra board"
    UNKNOWN = "a machine without NVML"

    @property
    def has_cards(self) -> bool:
        """Whether NVML shows cards that can be offered."""
        return self in (Platform.NVML, Platform.WSL)


@dataclass(frozen=True, slots=True)
class Signs:
    """What a machine shows of itself; ``names`` are those of NVML's devices, empty where it does not
    answer.
    """

    dxcore: bool
    tegra_files: bool
    nvml: bool
    names: tuple[str, ...] = ()


def check_strategy(strategy: str) -> None:
    """Refuse an unknown ``--device-discovery-strategy``. Raises :class:`SettingsError`."""
    if strategy not in STRATEGIES:
        raise SettingsError(
            f"--device-discovery-strategy {strategy!r} must be one of {', '.join(STRATEGIES)}"
        )


def choose(strategy: str, signs: Signs) -> Platform:
    """The platform for a discovery strategy. Pure."""
    if strategy == "tegra":
        return Platform.TEGRA
    if strategy == "nvml":
        return Platform.NVML
    if signs.dxcore:
        return Platform.WSL
    if (signs.tegra_files and not signs.nvml) or any(_INTEGRATED.search(name) for name in signs.names):
        return Platform.TEGRA
    return Platform.NVML if signs.nvml else Platform.UNKNOWN


def look(library: str, names: Callable[[], Sequence[str]], roots: Sequence[str] = ("",)) -> Signs:
    """The signs of this machine; blocking. ``library`` is NVML; ``names`` asks it for its devices, may raise
    :class:`NvmlError`, files are looked for below ``roots``.
    """
    try:
        found, nvml = tuple(names()), True
    except NvmlError as error:
        log.info("platform.no_names", extra={"cause": str(error)})
        found, nvml = (), loads(library)
    return Signs(loads("libdxcore.so"), any(_is_tegra(root) for root in roots), nvml, found)


def refuse_cdi(platform: Platform) -> None:
    """Refuse the CDI strategies where no documents can be made. Raises :class:`CdiError`."""
    if platform is not Platform.NVML:
        raise CdiError(
            f"the CDI device list strategies need NVIDIA cards with NVML, and this is {platform.value}; "
            "use --device-list-strategy=envvar"
        )


class NoCards(CardReader):
    """The reader of a machine whose cards cannot be offered."""

    def identities(self) -> tuple[GpuIdentity, ...]:
        return ()

    def read(self) -> tuple[Card, ...]:
        return ()


def loads(library: str) -> bool:
    """Whether a shared library can be loaded; it stays loaded."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _is_tegra(root: str) -> bool:
    if os.path.lexists(f"{root}/{_TEGRA_RELEASE}"):
        return True
    try:
        with Path(f"{root}/{_SOC_FAMILY}").open(encoding="utf-8", errors="replace") as file:
            return file.read(_FAMILY_CHARS).lower().startswith("tegra")
    except OSError:
        return False
