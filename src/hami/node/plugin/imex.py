"""IMEX channels, by which GPUs of several nodes share memory (device-plugin.md §8.5)."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from typing import Final

from hami.node.errors import SettingsError

NODE: Final = "/dev/nvidia-caps-imex-channels/channel{}"

log = logging.getLogger(__name__)


def parse_channels(text: str) -> tuple[str, ...]:
    """The channels of ``--imex-channel-ids``: none, or channel 0. Raises :class:`SettingsError`."""
    channels = text.strip().removeprefix("[").removesuffix("]").strip()
    if channels not in ("", "0"):
        raise SettingsError(f"--imex-channel-ids {text!r}: only 0, or nothing, is possible")
    return (channels,) if channels else ()


def available(channels: Sequence[str], roots: Sequence[str], required: bool) -> tuple[str, ...]:
    """Those of ``channels`` whose character device is below one of ``roots``.

    One that is missing is left out with a warning; if it is ``required``: :class:`SettingsError`.
    """
    found = []
    for channel in channels:
        path = NODE.format(channel)
        if any(_is_character_device(f"{root.rstrip('/')}{path}") for root in roots):
            found.append(channel)
        elif required:
            raise SettingsError(f"IMEX channel {channel} is required, but {path} is no character device here")
        else:
            log.warning("imex.missing", extra={"channel": channel, "path": path})
    return tuple(found)


def _is_character_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)  # noqa: PTH116
    except OSError:
        return False
