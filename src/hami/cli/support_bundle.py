"""``hami support-bundle``: one file for a bug report."""

from __future__ import annotations

import secrets
import time
from importlib.metadata import version as package_version
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hami.cli.connection import answered, cluster_options, connected
from hami.cli.output_file import write_file
from hami.cli.terminal import plain

if TYPE_CHECKING:
    from hami.answers.bundle import Bundle

_NOTES_SHOWN = 20


@click.command(name="support-bundle", short_help="One file to attach to a bug report.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default="hami-support.tar.gz")
@click.option(
    "--hash-names",
    is_flag=True,
    help="Replace the names of nodes, pods, namespaces and quotas, and addresses, by digests.",
)
@click.option(
    "--log-lines",
    type=click.IntRange(0, 100_000),
    default=2000,
    show_default=True,
    help="Last lines of each log; 0: no logs.",
)
@click.option(
    "--max-size",
    type=click.IntRange(1, 1024),
    default=64,
    show_default=True,
    metavar="MIB",
    help="Most that is collected, before it is compressed.",
)
@click.option(
    "--timeout",
    type=click.IntRange(5, 3600),
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="When to end with what there is.",
)
@click.option(
    "--hami-namespace", default="", metavar="NAMESPACE", help="Where HAMi is installed (default: found)."
)
@cluster_options
def command(
    file: Path,
    hash_names: bool,
    log_lines: int,
    max_size: int,
    timeout: int,
    hami_namespace: str,
    kubeconfig: Path | None,
    context: str,
) -> None:
    """Write FILE (default hami-support.tar.gz) with what somebody needs who is to find a fault.

    It holds what `hami snapshot`, `verify`, `preflight`, `locks` and `top` say, HAMi's own objects, events,
    the ends of its logs, and its metrics. Left out: Secrets, values of environment variables, annotations
    that are not HAMi's; keys, tokens and passwords in texts. Reads only, with the caller's rights; what
    cannot be read is said, here and in the file's README.txt. Look through it before you hand it on.
    """
    from hami.answers.gather import Wishes, gather

    salt = secrets.token_bytes(32) if hash_names else b""
    wishes = Wishes(hami_namespace, log_lines, max_size << 20, float(timeout), salt)
    now = time.time()

    async def read() -> Bundle:
        async with connected(kubeconfig, context) as client:
            return await gather(client, wishes, now, lambda text: click.echo(plain(text), err=True))

    bundle = answered(read)
    data = bundle.pack(now, package_version("hami"), renamed=hash_names)
    write_file(file, data)
    for note in bundle.notes[:_NOTES_SHOWN]:
        click.echo(f"note: {plain(note)}", err=True)
    if len(bundle.notes) > _NOTES_SHOWN:
        click.echo(f"note: {len(bundle.notes) - _NOTES_SHOWN} more are in README.txt", err=True)
    click.echo(f"{file}: {len(bundle.files)} files, {len(data)} bytes")
