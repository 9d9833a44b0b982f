"""``hami explain``: why a pod is where it is, or why it waits."""

from __future__ import annotations

import click

from hami.cli.sources import Source, from_cluster, output_option, show


@click.command(name="explain", short_help="Why a pod waits, or is on its node and cards.")
@click.argument("pod", metavar="POD")
@click.option("--all", "every_node", is_flag=True, help="Name every node, not the first few of a group.")
@output_option
@from_cluster
def command(source: Source, pod: str, every_node: bool, output: str) -> None:
    """Say why POD (name, or namespace/name) is on its node and cards, or why it waits.

    For a pod that waits: one line per reason with the nodes it holds for and what their cards have left, and
    which single changes would make it fit; each is tried on a copy of the cluster in memory. Works without
    HAMi's scheduler: the command lists nodes, pods and quotas itself and decides with the scheduler's code.
    Decisions of the scheduler that are not bound yet are known to the scheduler only.
    """
    from hami.answers.explain import explain
    from hami.answers.render import explanation_lines
    from hami.answers.replay import Replay
    from hami.protocol.errors import HamiError

    namespace, slash, name = pod.removeprefix("pod/").rpartition("/")
    snapshot = source.read()
    try:
        found = explain(Replay(snapshot), namespace if slash else source.pod_namespace, name)
    except HamiError as error:
        raise click.ClickException(str(error)) from error
    show(explanation_lines(found, every_node=every_node), found, output)
