"""``hami snapshot``: the cluster's state for a bug report, or to ask questions of later."""

from __future__ import annotations

import secrets
from pathlib import Path

import click

from hami.cli.output_file import write_file
from hami.cli.sources import Source, from_cluster
from hami.cli.terminal import plain


@click.command(name="snapshot", short_help="All that placement depends on, as one file.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default="hami-snapshot.json.gz")
@click.option(
    "--hash-names", is_flag=True, help="Replace the names of nodes, namespaces, pods and quotas by digests."
)
@from_cluster
def command(source: Source, file: Path, hash_names: bool) -> None:
    """Write FILE (default hami-snapshot.json.gz) with all that placement depends on, to attach to a report.

    It holds nodes, pods and quotas reduced to what the scheduler reads, the device config, the scheduler's
    policies and the usage the monitors report. Left out: environment variables, volumes, images, commands,
    labels of pods, annotations that are neither HAMi's nor a device vendor's. `hami explain`, `top` and
    `simulate` answer from it with --snapshot FILE.
    """
    from hami.answers.hashing import hash_names as hashed
    from hami.answers.snapshot import encode_snapshot

    snapshot = source.read(with_usage=True)
    if hash_names:
        snapshot = hashed(snapshot, secrets.token_bytes(32))
    data = encode_snapshot(snapshot)
    write_file(file, data)
    for note in snapshot.notes:
        click.echo(f"note: {plain(note)}", err=True)
    click.echo(
        f"{file}: {len(snapshot.nodes)} nodes, {len(snapshot.pods)} pods, {len(snapshot.quotas)} quotas, "
        f"{len(data)} bytes"
    )
