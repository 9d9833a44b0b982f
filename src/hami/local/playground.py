"""``hami cluster``: an empty embedded cluster to try things on, until a command or the user ends it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hami.local.cluster import Cluster, ClusterConfig, GpuNode


async def run_playground(
    console: Console,
    native: Path,
    nodes: Sequence[GpuNode],
    command: Sequence[str],
    allocation_mode: str = "lock",
) -> int:
    """Open a cluster; run ``command`` on it with KUBECONFIG set, or wait until cancelled.

    Returns the command's exit status (127 if there is no such program, 126 if it cannot be run).
    Raises HamiError.
    """

    def progress(line: str) -> None:
        console.print(f"[dim]{line}[/dim]", highlight=False, soft_wrap=True)

    config = ClusterConfig(nodes, native, allocation_mode=allocation_mode)
    async with Cluster(config, progress) as cluster:
        if command:
            return await _run(console, command, cluster)
        console.print("The cluster is open until you press Ctrl-C. In another terminal:")
        lines = [f"export KUBECONFIG={cluster.kubeconfig}", "kubectl get nodes"]
        lines += [f"curl {node.metrics_url}/metrics    # {name}" for name, node in cluster.nodes.items()]
        urls = [f"--monitor-url {name}={node.metrics_url}/metrics" for name, node in cluster.nodes.items()]
        lines.append(" ".join((str(Path(sys.executable).with_name("hami")), "dashboard", *urls)))
        for line in lines:
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
        console.print(f"Logs of the components: {cluster.logs}", highlight=False, soft_wrap=True)
        await asyncio.Event().wait()
    return 0


async def _run(console: Console, command: Sequence[str], cluster: Cluster) -> int:
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    try:
        process = await asyncio.create_subprocess_exec(*command, env=environment)
    except OSError as error:
        console.print(
            f"cannot run {command[0]}: {error.strerror}", highlight=False, markup=False, soft_wrap=True
        )
        return 127 if isinstance(error, FileNotFoundError) else 126
    try:
        status = await process.wait()
    except asyncio.CancelledError:
        if process.returncode is None:
            process.terminate()
            await process.wait()
        raise
    return status if status >= 0 else 128 - status
