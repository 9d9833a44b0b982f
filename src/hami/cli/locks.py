"""``hami locks``: who holds the nodes' locks, and how to get rid of one that nobody needs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hami.cli.connection import answered, cluster_options, connected
from hami.cli.sources import output_option, show
from hami.cli.terminal import plain

if TYPE_CHECKING:
    from hami.answers.locks import Locks, NodeLock
    from hami.kube.client import Client


@click.command(name="locks", short_help="Who holds the node locks, how long, and does the pod live?")
@click.option("--release", "node", metavar="NODE", help="Remove the locks of this node that nobody needs.")
@click.option("--force", is_flag=True, help="With --release: also a lock whose pod is still being started.")
@click.option("--yes", is_flag=True, help="With --release: do not ask.")
@click.option(
    "--node-lock-timeout",
    metavar="DURATION",
    help="Age at which a lock is stale (default: as the scheduler's Deployment has it, else 5m).",
)
@cluster_options
@output_option
def command(
    node: str | None,
    force: bool,
    yes: bool,
    node_lock_timeout: str | None,
    kubeconfig: Path | None,
    context: str,
    output: str,
) -> None:
    """List the locks of all nodes: holder, age, and whether the holder still needs it.

    A stale lock needs no help: the next pod on that node takes it over. --release removes the locks of one
    node at once; one whose pod is being started only with --force, because the device plugin could then give
    two pods each other's cards. In allocation mode `exact` there are no locks.
    """
    if node is None and (force or yes):
        raise click.UsageError("--force and --yes are for --release NODE")
    if node is not None and output == "json" and not yes:
        raise click.UsageError("--release with -o json does not ask: give --yes")
    limit_s = _seconds(node_lock_timeout)

    async def look() -> Locks:
        from hami.answers.locks import find_locks

        async with connected(kubeconfig, context) as client:
            found = await find_locks(client, time.time(), limit_s, node or "")
            if node is not None:
                await _release(client, found, force=force, ask=not yes)
            return found

    from hami.answers.render import lock_lines

    found = answered(look)
    if node is None:
        show(lock_lines(found), found, output)
    elif output == "json" or not found.locks:
        show([f"node {node} is not locked"], found, output)
    else:
        click.echo(f"released {len(found.locks)}")


async def _release(client: Client, found: Locks, *, force: bool, ask: bool) -> None:
    """Remove these locks. Raises `AnswerError` when one is needed, or is no longer what it was."""
    from hami.answers.errors import AnswerError
    from hami.answers.locks import release

    needed = [lock for lock in found.locks if lock.state != "stale"]
    if needed and not force:
        told = "; ".join(map(_told, needed))
        raise AnswerError(f"{told}. Nothing was removed; --force removes it all the same")
    if ask and found.locks:
        for lock in found.locks:
            click.echo(plain(_told(lock)))
        click.confirm(f"Remove {'this lock' if len(found.locks) == 1 else 'these locks'}?", abort=True)
    for lock in found.locks:
        if not await release(client, lock):
            raise AnswerError(f"{lock.key} of node {lock.node} has changed and was left: look again")


def _told(lock: NodeLock) -> str:
    held = f" by {lock.holder}" if lock.holder else ""
    since = f" since {lock.since}" if lock.since else ""
    return f"{lock.key} of node {lock.node} is {lock.state}{held}{since}: {lock.why}"


def _seconds(text: str | None) -> float | None:
    from hami.protocol.durations import parse_duration
    from hami.protocol.errors import DurationError

    try:
        seconds = None if text is None else parse_duration(text)
    except DurationError as error:
        raise click.BadParameter(str(error), param_hint="--node-lock-timeout") from error
    if seconds is not None and seconds <= 0:
        raise click.BadParameter(f"{text} is not above 0", param_hint="--node-lock-timeout")
    return seconds
