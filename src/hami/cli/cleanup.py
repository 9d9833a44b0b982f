"""``hami cleanup``: removes what an uninstalled HAMi leaves in the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hami.cli.connection import answered, cluster_options, connected
from hami.cli.terminal import plain

if TYPE_CHECKING:
    from hami.kube.client import Client

NODE_LEFTOVERS = (
    "on each node, once no GPU pod runs there: /usr/local/vgpu (or below global.gpuHookPath), /tmp/vgpulock "
    "(after the host PID broker first: chattr -i /tmp/vgpulock/hostpid), /tmp/hami, /var/run/hami, "
    "/var/run/cdi/hami.io-vgpu-*.json, /var/run/cdi/k8s.device-plugin.nvidia.com-*.json"
)


@click.command(name="cleanup", short_help="Remove what helm uninstall leaves behind.")
@click.option("--dry-run", is_flag=True, help="Only list it.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--hami-namespace",
    default="kube-system",
    show_default=True,
    metavar="NAMESPACE",
    help="Where HAMi was installed.",
)
@click.option(
    "--release", default="hami", show_default=True, help="Name of its Helm release, or fullnameOverride."
)
@click.option("--scheduler-name", default="hami-scheduler", show_default=True, help="Name of its Lease.")
@cluster_options
def command(
    dry_run: bool,
    yes: bool,
    hami_namespace: str,
    release: str,
    scheduler_name: str,
    kubeconfig: Path | None,
    context: str,
) -> None:
    """Remove what `helm uninstall` leaves: annotations of nodes, the webhook's Secret, the Lease, and objects
    of the API server's admission.

    Refuses while HAMi is installed. A Secret or Lease of that name that HAMi did not make stays, and so do
    pods and the folders of nodes.
    """

    async def clean() -> None:
        async with connected(kubeconfig, context) as client:
            await _clean(client, (hami_namespace, release, scheduler_name), dry_run=dry_run, ask=not yes)

    answered(clean)


async def _clean(client: Client, names: tuple[str, str, str], *, dry_run: bool, ask: bool) -> None:
    from hami.answers.leftovers import find_leftovers, remove
    from hami.answers.render import leftover_line

    found = await find_leftovers(client, *names)
    for one in found:
        click.echo(plain(leftover_line(one)))
    going = [one for one in found if not one.hint]
    if going and not dry_run:
        if ask:
            click.confirm(f"Remove these {len(going)}?", abort=True)
        for one in going:
            await remove(client, one)
        click.echo(f"removed {len(going)}")
    if not going:
        click.echo(f"nothing is {'to be removed' if found else 'left'} in the cluster; ", nl=False)
    click.echo(NODE_LEFTOVERS)
