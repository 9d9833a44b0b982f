"""What the subcommands of HAMi's processes share: their options, and how one that cannot start ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

import click
from click.decorators import FC

KLOG = (
    "add_dir_header",
    "alsologtostderr",
    "log_backtrace_at",
    "log_dir",
    "log_file",
    "log_file_max_size",
    "logtostderr",
    "one_output",
    "skip_headers",
    "skip_log_headers",
    "stderrthreshold",
    "vmodule",
)
"""Logging flags of HAMi's programs, for `ignored`."""


def switch(
    *names: str,
    text: str,
    default: bool | None = False,
    envvar: str | Sequence[str] | None = None,
    parse: Callable[[str], bool] | type[bool] = bool,
) -> Callable[[FC], FC]:
    """A boolean that takes ``--flag``, as in Go, ``--flag=true`` and ``--flag=false``."""
    return click.option(
        *names,
        type=parse,
        metavar="true|false",
        is_flag=False,
        flag_value="true",
        default=None if default is None else str(default).lower(),
        envvar=envvar,
        show_default=default is not None,
        help=text,
    )


def ignored(names: Sequence[str]) -> Callable[[FC], FC]:
    """Flags of HAMi that have no effect: accepted, with or without a value, and not shown."""

    def decorate(command: FC) -> FC:
        for name in names:
            command = click.option(f"--{name}", is_flag=False, flag_value="true", hidden=True)(command)
        return command

    return decorate


def _level(text: str) -> int:
    """A verbosity as klog takes it: ``4`` and, after ``-v``, ``=4``."""
    digits = text.removeprefix("=")
    if not (digits.isascii() and digits.isdigit()):
        raise click.BadParameter(f"{digits!r} is not a number")
    return int(digits)


verbosity_option = click.option(
    "-v", "--v", "verbosity", type=_level, metavar="N", default="0", help="Log level; 4 and more: debug."
)


def node_process_options(command: FC) -> FC:
    """What every process of a node takes: ``kube_qps``, ``kube_burst`` and ``verbosity``."""
    for option in (
        verbosity_option,
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


def run_node_process(verbosity: int, process: Callable[[], Coroutine[Any, Any, None]], failed: str) -> None:
    """Run a process of a node to its end; ``failed`` is the event of the log line when it cannot start."""
    from hami.kube.logs import level_from_verbosity, setup_logging
    from hami.protocol.errors import HamiError

    setup_logging(level_from_verbosity(verbosity))
    try:
        asyncio.run(process())
    except (HamiError, OSError) as error:
        fail(failed, error)


def fail(event: str, error: Exception) -> NoReturn:
    """End with exit code 1 and one log line, so that a log collector reads this line like every other."""
    logging.getLogger("hami.cli").error(event, extra={"reason": str(error)})
    raise SystemExit(1)
