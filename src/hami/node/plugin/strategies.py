"""How containers are told of their devices: ``--device-list-strategy`` and what belongs to it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from hami.node.errors import SettingsError
from hami.node.plugin.answer import CdiDelivery

ENVVAR: Final = "envvar"
VOLUME_MOUNTS: Final = "volume-mounts"
CDI_ANNOTATIONS: Final = "cdi-annotations"
CDI_CRI: Final = "cdi-cri"
STRATEGIES: Final = (ENVVAR, VOLUME_MOUNTS, CDI_ANNOTATIONS, CDI_CRI)
_PREFIX: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/([A-Za-z0-9][-A-Za-z0-9_.]{0,5})?")
_MAX_PREFIX: Final = 200


def parse_strategies(values: Iterable[str]) -> tuple[str, ...]:
    """The strategies of repeated flags or comma lists, each once; none given: ``envvar``.

    Raises :class:`SettingsError` for an unknown one.
    """
    named = [name.strip() for value in values for name in value.split(",")]
    chosen = tuple(dict.fromkeys(name for name in named if name)) or (ENVVAR,)
    unknown = [name for name in chosen if name not in STRATEGIES]
    if unknown:
        raise SettingsError(
            f"--device-list-strategy: unknown {', '.join(unknown)}; known are {', '.join(STRATEGIES)}"
        )
    return chosen


def cdi_delivery(strategies: Iterable[str], prefix: str, extras: Iterable[str]) -> CdiDelivery | None:
    """What the CDI strategies ask for, None without one.

    ``extras`` are the kinds of GDRCopy, GDS and MOFED that are switched on. Raises :class:`SettingsError`
    for a prefix with which an annotation would have no valid key.
    """
    chosen = set(strategies)
    if not chosen & {CDI_ANNOTATIONS, CDI_CRI}:
        return None
    if len(prefix) > _MAX_PREFIX or not _PREFIX.fullmatch(prefix):
        raise SettingsError(
            f"--cdi-annotation-prefix {prefix!r} must begin an annotation's key, such as cdi.k8s.io/"
        )
    return CdiDelivery(
        annotations=CDI_ANNOTATIONS in chosen,
        cri=CDI_CRI in chosen,
        only=chosen <= {CDI_ANNOTATIONS, CDI_CRI},
        prefix=prefix,
        extras=tuple(extras),
    )


def check_id_strategy(strategy: str) -> None:
    """Refuse a ``--device-id-strategy`` that is unknown. Raises :class:`SettingsError`."""
    if strategy not in ("uuid", "index"):
        raise SettingsError(f"--device-id-strategy {strategy!r} must be uuid or index")
