"""``hami demo``: two pods share a simulated GPU on an embedded cluster; no Kubernetes, GPU or root."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="demo")
@click.option("--keep", is_flag=True, help="Leave the cluster open for kubectl until Ctrl-C.")
@click.option(
    "--native",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Folder that `make native` made (default: build/native of this checkout).",
)
def command(keep: bool, native: Path | None) -> None:
    """Show two pods sharing one simulated GPU.

    Each stays within its own limits; a third waits for memory. Takes a few seconds.
    """
    from rich.console import Console

    from hami.local.cluster import default_native
    from hami.local.demo import run_demo
    from hami.local.foreground import INTERRUPTED, run_in_foreground
    from hami.protocol.errors import HamiError

    try:
        status = run_in_foreground(run_demo(Console(), (native or default_native()).resolve(), keep=keep))
    except HamiError as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(0 if keep and status == INTERRUPTED else status)
