"""``hami top``: what is granted and what is used."""

from __future__ import annotations

import time

import click

from hami.cli.sources import Source, from_cluster, output_option, show


@click.command(name="top", short_help="What is granted to pods, and what they use.")
@click.argument("table", type=click.Choice(["nodes", "cards", "pods"]), default="nodes")
@click.option(
    "-w",
    "--watch",
    type=click.FloatRange(min=1),
    default=None,
    metavar="SECONDS",
    help="Show again and again, every so often.",
)
@output_option
@from_cluster
def command(source: Source, table: str, watch: float | None, output: str) -> None:
    """Show slots, memory and cores granted to pods against what there is, and what is really used.

    First the sums of the cluster, then one line per node (default), card or pod. USED and BUSY come from the
    monitors of the nodes and are "-" where none answers.
    """
    from hami.answers.render import top_lines
    from hami.answers.replay import Replay
    from hami.answers.top import top
    from hami.protocol.errors import HamiError

    if watch is not None and not source.is_live:
        raise click.UsageError("--watch needs a live cluster, a snapshot does not change")
    while True:
        snapshot = source.read(with_usage=True)
        try:
            found = top(Replay(snapshot), source.namespace)
        except HamiError as error:
            raise click.ClickException(str(error)) from error
        if watch is not None and output == "text":
            click.clear()
        show(top_lines(found, table), found, output)
        if watch is None:
            return
        time.sleep(watch)
