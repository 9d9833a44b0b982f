"""What `hami preflight` and `hami verify` share: which cluster, and one table of findings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hami.cli.connection import answered, cluster_options, connected
from hami.cli.sources import output_option, show

if TYPE_CHECKING:
    from hami.answers.checks import Check, Objects


def checks_of_cluster(command: Callable[..., list[Check]]) -> Callable[..., None]:
    """Give a command, which makes findings of `objects`, the options of a cluster.

    A failed check is exit status 1.
    """

    @functools.wraps(command)
    def checked(
        kubeconfig: Path | None, context: str, hami_namespace: str, output: str, **options: Any
    ) -> None:
        from hami.answers.render import check_lines

        objects = answered(lambda: _inspect(kubeconfig, context, hami_namespace))
        found = command(objects=objects, **options)
        show(check_lines(found, objects.notes), {"checks": found, "notes": objects.notes}, output)
        if any(one.result == "fail" for one in found):
            raise SystemExit(1)

    decorated: Callable[..., None] = checked
    where = click.option(
        "--hami-namespace", default="", metavar="NAMESPACE", help="Where HAMi is (default: found)."
    )
    for option in (output_option, where, cluster_options):
        decorated = option(decorated)
    return decorated


async def _inspect(kubeconfig: Path | None, context: str, namespace: str) -> Objects:
    from hami.answers.inspection import inspect

    async with connected(kubeconfig, context) as client:
        return await inspect(client, namespace)
