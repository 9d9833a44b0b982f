"""``hami cluster``: an embedded cluster of simulated GPU nodes with HAMi on it, for kubectl."""

from __future__ import annotations

from pathlib import Path

import click

MODELS = (
    "A100-SXM4-40GB", "A100-SXM4-80GB", "H100-80GB", "H200", "L40S", "T4", "V100-SXM2-16GB", "V100-SXM2-32GB",
)  # fmt: skip


@click.command(name="cluster", context_settings={"ignore_unknown_options": True})
@click.option("--nodes", type=click.IntRange(1, 32), default=1, show_default=True, help="GPU nodes.")
@click.option("--cards", type=click.IntRange(1, 16), default=1, show_default=True, help="Cards of a node.")
@click.option(
    "--model", type=click.Choice(MODELS), default=MODELS[0], show_default=True, help="Of the cards."
)
@click.option(
    "--native",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Folder that `make native` made (default: build/native of this checkout).",
)
@click.option(
    "--allocation-mode",
    type=click.Choice(("lock", "exact")),
    default="lock",
    show_default=True,
    help="How the nodes' device plugins find the pod of an allocation.",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def command(
    nodes: int, cards: int, model: str, native: Path | None, allocation_mode: str, words: tuple[str, ...]
) -> None:
    """Open an embedded cluster for kubectl.

    Until Ctrl-C; or run COMMAND on it with KUBECONFIG set, and end with the exit status of COMMAND.
    """
    from rich.console import Console

    from hami.local.cluster import GpuNode, default_native
    from hami.local.foreground import INTERRUPTED, run_in_foreground
    from hami.local.playground import run_playground
    from hami.protocol.errors import HamiError

    wanted = [GpuNode(f"gpu-node-{index + 1}", cards=cards, model=model) for index in range(nodes)]
    folder = (native or default_native()).resolve()
    try:
        status = run_in_foreground(
            run_playground(Console(stderr=True), folder, wanted, words, allocation_mode)
        )
    except HamiError as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(0 if not words and status == INTERRUPTED else status)
