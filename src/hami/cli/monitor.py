"""``hami monitor``: metrics of the containers' device use on this node."""

from __future__ import annotations

import os
from importlib.metadata import version as package_version
from typing import Any

import click

from hami.cli.common import KLOG, ignored, node_process_options, run_node_process, switch
from hami.protocol.keys import ENV_HOOK_PATH, ENV_NODE_NAME

_REQUIRED = {
    ENV_HOOK_PATH: "the device plugin's folder on the host, usually /usr/local/vgpu",
    ENV_NODE_NAME: "the name of this node, fieldRef spec.nodeName",
}
_MIN_RESYNC_S = 60.0
_DEFAULT_RESYNC_S = 300.0


@click.group(name="monitor", invoke_without_command=True)
@click.option("--metrics-bind-address", default=":9394", show_default=True, help="Address of /metrics.")
@switch("--legacy-metrics", text="Also emit the metric names used before 2.9.")
@switch("--emit-allocated", default=True, text="Emit limits of containers that have not used CUDA yet.")
@switch(
    "--activity-from-last-kernel", default=True, text="Also judge activity by the time of the last kernel."
)
@click.option("--host-root", default="", help="Keep all host paths below this directory (tests, demo).")
@node_process_options
@ignored(KLOG)
@click.pass_context
def command(context: click.Context, /, **flags: Any) -> None:
    """Metrics of the containers' device use, and priorities.

    Needs $NODE_NAME and $HOOK_PATH (the plugin's folder on the host, usually /usr/local/vgpu). Kubernetes is
    found by $KUBECONFIG, ~/.kube/config, or the service account of the pod.
    """
    if context.invoked_subcommand is not None:
        return
    from hami.node.monitor.process import run_monitor

    run_node_process(flags["verbosity"], lambda: run_monitor(_process_config(flags)), "monitor.failed")


@command.command()
def version() -> None:
    """Print version, revision, build date, runtime, compiler and platform."""
    from hami.protocol.build import build_labels

    names = {"build_date": "build date", "go_version": "runtime"}
    for name, value in build_labels(package_version("hami")).items():
        click.echo(f"{names.get(name, name)}: {value}")


def _process_config(flags: dict[str, Any]) -> Any:
    import logging

    from hami.node.errors import SettingsError
    from hami.node.monitor.process import ProcessConfig
    from hami.node.monitor.service import MonitorOptions
    from hami.node.nvml import LIBRARY

    log = logging.getLogger(__name__)
    for name, meaning in _REQUIRED.items():
        if not os.environ.get(name):
            raise SettingsError(f"required environment variable {name} not set: {meaning}")
    given = [name for name in KLOG if flags[name] is not None]
    if given:
        log.info("flags.ignored", extra={"flags": given})
    shown = {name: str(value) for name, value in sorted(flags.items()) if name not in KLOG}
    log.info("flags", extra={"values": shown})
    return ProcessConfig(
        options=MonitorOptions(
            node=os.environ[ENV_NODE_NAME],
            grace_s=resync_seconds(os.environ.get("HAMI_RESYNC_INTERVAL")),
            legacy=flags["legacy_metrics"],
            emit_allocated=flags["emit_allocated"],
            activity_from_last_kernel=flags["activity_from_last_kernel"],
            pod_cgroups=not flags["host_root"],
        ),
        hook=os.environ[ENV_HOOK_PATH].rstrip("/"),
        host_root=flags["host_root"].rstrip("/"),
        nvml_library=LIBRARY,
        metrics_address=flags["metrics_bind_address"],
        kube_qps=flags["kube_qps"],
        kube_burst=flags["kube_burst"],
    )


def resync_seconds(text: str | None) -> float:
    """The grace age of old directories: a Go duration, at least 60 s, 5 min when absent or unreadable."""
    import logging

    from hami.protocol.durations import parse_duration
    from hami.protocol.errors import DurationError

    log = logging.getLogger(__name__)
    if text is None:
        return _DEFAULT_RESYNC_S
    try:
        seconds = parse_duration(text)
    except DurationError as error:
        log.warning("resync.bad", extra={"cause": str(error), "used_s": _DEFAULT_RESYNC_S})
        return _DEFAULT_RESYNC_S
    if seconds < _MIN_RESYNC_S:
        log.warning("resync.raised", extra={"given_s": seconds, "used_s": _MIN_RESYNC_S})
        return _MIN_RESYNC_S
    return seconds
