"""``hami monitor``: metrics of the containers' device use on this node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from importlib.metadata import version as package_version
from typing import Any

import click
from click.decorators import FC

from hami.cli.common import SWITCH, fail, node_process_options
from hami.protocol.keys import ENV_HOOK_PATH, ENV_NODE_NAME

_KLOG = (
    "logtostderr",
    "vmodule",
    "stderrthreshold",
    "alsologtostderr",
    "log_dir",
    "log_file",
    "log_file_max_size",
    "add_dir_header",
    "skip_headers",
    "one_output",
    "skip_log_headers",
    "log_backtrace_at",
)
_REQUIRED = {
    ENV_HOOK_PATH: "the device plugin's folder on the host, usually /usr/local/vgpu",
    ENV_NODE_NAME: "the name of this node, fieldRef spec.nodeName",
}
_MIN_RESYNC_S = 60.0
_DEFAULT_RESYNC_S = 300.0


def _switch(name: str, default: bool, text: str) -> Callable[[FC], FC]:
    """A boolean that takes ``--flag``, ``--flag=true`` and ``--flag=false``."""
    return click.option(
        name,
        type=bool,
        metavar=SWITCH,
        is_flag=False,
        flag_value="true",
        default=str(default).lower(),
        show_default=True,
        help=text,
    )


def _klog(command: FC) -> FC:
    """HAMi's logging flags: accepted and ignored."""
    for name in _KLOG:
        command = click.option(f"--{name}", f"klog_{name}", is_flag=False, flag_value="true", hidden=True)(
            command
        )
    return command


@click.group(name="monitor", invoke_without_command=True)
@click.option("--metrics-bind-address", default=":9394", show_default=True, help="Address of /metrics.")
@_switch("--legacy-metrics", False, "Also emit the metric names used before 2.9.")
@_switch("--emit-allocated", True, "Emit limits of containers that have not used CUDA yet.")
@_switch("--activity-from-last-kernel", True, "Also judge activity by the time of the last kernel.")
@click.option("--host-root", default="", help="Keep all host paths below this directory (tests, demo).")
@node_process_options
@_klog
@click.pass_context
def command(context: click.Context, /, **flags: Any) -> None:
    """Metrics of the containers' device use, and priorities.

    Needs $NODE_NAME and $HOOK_PATH (the plugin's folder on the host, usually /usr/local/vgpu). Kubernetes is
    found by $KUBECONFIG, ~/.kube/config, or the service account of the pod.
    """
    if context.invoked_subcommand is not None:
        return
    from hami.kube.logs import level_from_verbosity, setup_logging
    from hami.node.monitor.process import run_monitor
    from hami.protocol.errors import HamiError

    text = flags["verbosity"].removeprefix("=")
    if not (text.isascii() and text.isdigit()):
        raise click.BadParameter(f"{text!r} is not a number", param_hint="-v")
    setup_logging(level_from_verbosity(int(text)))
    try:
        asyncio.run(run_monitor(_process_config(flags)))
    except (HamiError, OSError) as error:
        fail("monitor.failed", error)


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
    ignored = sorted(name for name in _KLOG if flags.get(f"klog_{name}") is not None)
    if ignored:
        log.info("flags.ignored", extra={"flags": ignored})
    shown = {name: str(value) for name, value in sorted(flags.items()) if not name.startswith("klog_")}
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
        address=flags["metrics_bind_address"],
        hook=os.environ[ENV_HOOK_PATH].rstrip("/"),
        host_root=flags["host_root"].rstrip("/"),
        nvml_library=LIBRARY,
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
