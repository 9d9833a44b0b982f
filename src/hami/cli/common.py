"""What the subcommands share: how a switch is shown in ``--help``, how a process that cannot start ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn

import click

SWITCH = "true|false"
"""The metavar of a boolean that takes ``--flag``, ``--flag=true`` and ``--flag=false``."""


def fail(event: str, error: Exception) -> NoReturn:
    """End with exit code 1 and one log line, so that a log collector reads this line like every other."""
    logging.getLogger("hami.cli").error(event, extra={"reason": str(error)})
    raise SystemExit(1)


def node_process_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What every process of a node takes: ``kube_qps``, ``kube_burst`` and ``verbosity``."""
    for option in (
        click.option(
            "-v", "--v", "verbosity", metavar="N", default="0", help="Log level; 4 and more: debug."
        ),
        click.option(
            "--kube-burst",
            type=click.IntRange(min=1),
            default=100,
            show_default=True,
            help="Requests to Kubernetes at once.",
        ),
        click.option(
            "--kube-qps",
            type=click.FloatRange(min=0),
            default=50.0,
            show_default=True,
            help="Requests per second to Kubernetes.",
        ),
    ):
        command = option(command)
    return command
