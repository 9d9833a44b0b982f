"""``hami preflight``: is this cluster ready for an installation?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hami.cli.checking import checks_of_cluster

if TYPE_CHECKING:
    from hami.answers.checks import Check, Objects


@click.command(name="preflight", short_help="Is this cluster ready for an installation?")
@click.option(
    "--node-label",
    default="gpu=on",
    show_default=True,
    metavar="KEY=VALUE",
    help="Label of the nodes that are to get the device plugin.",
)
@checks_of_cluster
def command(objects: Objects, node_label: str) -> list[Check]:
    """Look at a cluster before HAMi is installed: one line per check, with what to do.

    Reads only. The exit status is 1 if a check failed.
    """
    from hami.answers.checks import preflight

    key, equals, value = node_label.partition("=")
    if not (key and equals):
        raise click.BadParameter(f"{node_label!r} is not KEY=VALUE", param_hint="--node-label")
    return preflight(objects, {key: value})
