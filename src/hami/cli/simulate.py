"""``hami simulate``: would these pods fit, and where."""

from __future__ import annotations

from typing import TextIO

import click

from hami.cli.sources import Source, from_cluster, output_option, show


class _NoAnswer(click.ClickException):
    """An error that scripts can tell from "does not fit"."""

    exit_code = 2


@click.command(name="simulate", short_help="Where the pods of a YAML file would go.")
@click.argument("spec", type=click.File(encoding="utf-8"), metavar="SPEC")
@output_option
@from_cluster
def command(source: Source, spec: TextIO, output: str) -> None:
    """Place the pods of SPEC (a YAML file, "-" for standard input) on a copy of the cluster in memory.

    SPEC holds Pods, Deployments, StatefulSets, ReplicaSets or Jobs; workloads stand for all their replicas.
    Admission, kube-scheduler's own node checks, quota and HAMi's policies are applied; nothing is written to
    the cluster. Exit status: 0 when all pods fit, 1 when some do not, 2 when there is no answer.
    """
    from hami.answers.render import simulation_lines
    from hami.answers.replay import Replay
    from hami.answers.simulate import MAX_SPEC_BYTES, pods_of_spec, simulate
    from hami.protocol.errors import HamiError

    try:
        pods = pods_of_spec(spec.read(MAX_SPEC_BYTES + 1), source.pod_namespace)
        found = simulate(Replay(source.read()), pods)
    except UnicodeDecodeError as error:
        raise _NoAnswer(f"the spec is not UTF-8 text: {error}") from error
    except HamiError as error:
        raise _NoAnswer(str(error)) from error
    except click.ClickException as error:
        raise _NoAnswer(error.message) from error
    show(simulation_lines(found), found, output)
    if found.fits < len(found.pods):
        raise SystemExit(1)
