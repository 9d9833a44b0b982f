"""``hami dashboard``: the web page."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import click

from hami.cli.common import fail, verbosity_option
from hami.cli.connection import cluster_options

_EPILOG = """\b
Examples:
  hami dashboard                          # on http://127.0.0.1:8080/, from your kubeconfig
  hami dashboard --bind 127.0.0.1:0       # any free port; it is printed
  hami dashboard --bind :8080 --auth kubernetes --allowed-host gpus.example.org
"""


@click.command(
    name="dashboard", short_help="A read-only web page: cards, pods, and why pods wait.", epilog=_EPILOG
)
@click.option(
    "--bind",
    default="127.0.0.1:8080",
    show_default=True,
    metavar="HOST:PORT",
    help="Address to listen on; port 0 takes a free one. Without a host: every address of this machine.",
)
@click.option(
    "--allowed-host",
    multiple=True,
    metavar="NAME",
    help="A name, beside localhost and addresses, by which browsers may reach the page; repeatable. Requests "
    "for other names are refused, so that no foreign site can read through your browser.",
)
@click.option(
    "--auth",
    type=click.Choice(["none", "kubernetes", "header"]),
    default="none",
    show_default=True,
    help="none: whoever reaches the port sees everything. kubernetes: a bearer token of the cluster is "
    "needed, and shows the pods of the namespaces in which its owner may list pods. header: a proxy in front "
    "has authenticated, see --auth-header; nobody else must reach the port.",
)
@click.option(
    "--auth-header",
    default="X-Forwarded-User",
    show_default=True,
    metavar="NAME",
    help="Header in which the proxy names the user; requests without it are refused.",
)
@click.option(
    "--monitors",
    type=click.Choice(["auto", "direct", "proxy", "none"]),
    default="auto",
    show_default=True,
    help="How the nodes' monitors are asked what is really used. direct: at their pods' addresses; proxy: "
    "through the API server, which takes the permission pods/proxy; auto: direct inside the cluster, else "
    "proxy; none: usage is not shown.",
)
@click.option(
    "--monitor-url",
    multiple=True,
    metavar="NODE=URL",
    help="Ask this node's monitor there; repeatable (an embedded cluster prints its URLs).",
)
@click.option("--prometheus-url", default="", metavar="URL", help="Prometheus to read older history from.")
@click.option("--cluster-name", default="", metavar="NAME", help="Shown on the page and in the API.")
@click.option(
    "--hami-namespace", default="", metavar="NAMESPACE", help="Where HAMi is installed (default: found)."
)
@click.option(
    "--device-config-file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="device-config.yaml (default: from HAMi's ConfigMap).",
)
@click.option(
    "--scheduler-name", default="", metavar="NAME", help="As the scheduler's flag (default: found)."
)
@click.option("--node-scheduler-policy", default="", metavar="POLICY", help="As the scheduler's flag.")
@click.option("--gpu-scheduler-policy", default="", metavar="POLICY", help="As the scheduler's flag.")
@click.option("--node-label-selector", default="", metavar="K=V,...", help="As the scheduler's flag.")
@click.option("--enable-ascend", is_flag=True, help="As the scheduler's flag.")
@click.option("--enable-iluvatar", is_flag=True, help="As the scheduler's flag.")
@verbosity_option
@cluster_options
def command(kubeconfig: Path | None, context: str, verbosity: int, **flags: Any) -> None:
    """Serve one web page about the cluster's cards: what is granted and used, which pod holds which part of
    which card, and why pods wait, with what would help. It only reads: it lists and watches nodes, pods and
    quotas, and asks the nodes' monitors. It needs no Prometheus.

    GET /api/v1/summary, nodes, devices, workloads, pending, quotas and history give the same as JSON;
    /healthz, /readyz and /metrics are about the process itself.
    """
    from hami.cli.connection import config_of
    from hami.dashboard.process import DashboardSettings, run_dashboard
    from hami.kube.logs import level_from_verbosity, setup_logging
    from hami.protocol.errors import HamiError

    setup_logging(level_from_verbosity(verbosity))
    url = flags["prometheus_url"]
    if url and not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} is no http:// or https:// URL", param_hint="--prometheus-url")
    inside = (
        kubeconfig is None and not os.environ.get("KUBECONFIG") and "KUBERNETES_SERVICE_HOST" in os.environ
    )
    way: Any = flags["monitors"] if flags["monitors"] != "auto" else "direct" if inside else "proxy"
    settings = DashboardSettings(
        bind=flags["bind"],
        allowed_hosts=flags["allowed_host"],
        auth=flags["auth"],
        auth_header=flags["auth_header"],
        monitors=way,
        monitor_urls=_urls_by_node(flags["monitor_url"]),
        hami_namespace=flags["hami_namespace"],
        prometheus_url=url,
        cluster=flags["cluster_name"],
        device_config_file=flags["device_config_file"],
        scheduler_flags=_scheduler_flags(flags),
    )
    try:
        asyncio.run(run_dashboard(settings, config_of(kubeconfig, context), listening=_say(flags["bind"])))
    except (HamiError, OSError) as error:
        fail("dashboard.failed", error)


def _scheduler_flags(given: dict[str, Any]) -> dict[str, str]:
    """What the caller knows of the scheduler's own flags."""
    texts = ("scheduler_name", "node_scheduler_policy", "gpu_scheduler_policy", "node_label_selector")
    found = {name.replace("_", "-"): str(given[name]) for name in texts if given[name]}
    for name in ("enable_ascend", "enable_iluvatar"):
        if given[name]:
            found[name.replace("_", "-")] = "true"
    return found


def _urls_by_node(pairs: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        node, _, url = pair.partition("=")
        if not node or not url.startswith(("http://", "https://")):
            raise click.BadParameter(f"{pair!r} is not NODE=http://…", param_hint="--monitor-url")
        found[node] = url
    return found


def _say(bind: str) -> Any:
    """Tells the reader where the page is."""
    host = bind.rpartition(":")[0] or "127.0.0.1"
    return lambda port: click.echo(f"The dashboard is at http://{host}:{port}/ (Ctrl-C ends it)", err=True)
