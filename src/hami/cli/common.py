"""What the subcommands share: how a switch is shown in ``--help``, how a process that cannot start ends."""

from __future__ import annotations

import logging
from typing import NoReturn

SWITCH = "true|false"
"""The metavar of a boolean that takes ``--flag``, ``--flag=true`` and ``--flag=false``."""


def fail(event: str, error: Exception) -> NoReturn:
    """End with exit code 1 and one log line, so that a log collector reads this line like every other."""
    logging.getLogger("hami.cli").error(event, extra={"reason": str(error)})
    raise SystemExit(1)
