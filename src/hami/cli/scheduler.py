"""`hami scheduler`: flags and environment of scheduler.md §1.1 (WIRE names), then the process itself."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from hami.cli.common import KLOG, fail, ignored, switch
from hami.protocol.durations import parse_duration
from hami.protocol.errors import DurationError, HamiError
from hami.protocol.keys import ENV_NODELOCK_EXPIRE, ENV_POD_NAME, ENV_POD_NAMESPACE

if TYPE_CHECKING:
    from hami.scheduler.edge.settings import SchedulerSettings

log = logging.getLogger("hami.scheduler")

_LEGACY = (
    "dcu-name",
    "dcu-memory",
    "dcu-cores",
    "cambricon-mlu-name",
    "cambricon-mlu-memory",
    "cambricon-mlu-cores",
    "mthreads-name",
    "mthreads-memory",
    "mthreads-cores",
    "metax-name",
    "metax-vcount",
    "metax-vcore",
    "metax-vmemory",
    "sgpu-topology-aware",
    "kunlun-name",
    "kunlun-vcount",
    "kunlun-vmemory",
    "enflame-gcu-resource-name",
    "enflame-drs-gcu-resource-name",
    "enflame-gcu-memory-resource-name",
    "enflame-gcu-core-resource-name",
    "enflame-vgcu-resource-name",
    "enflame-vgcu-legacy-resource-name",
    "enflame-vgcu-percentage-resource-name",
)
_TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_FALSE = frozenset({"0", "f", "F", "false", "FALSE", "False"})


def _duration(value: str) -> float:
    """Seconds of a Go duration."""
    try:
        return parse_duration(value)
    except DurationError as error:
        raise click.BadParameter(str(error)) from error


def _boolean(value: str) -> bool:
    """A Go boolean."""
    if value not in _TRUE | _FALSE:
        raise click.BadParameter(f"{value!r} is not true or false")
    return value in _TRUE


def _level(value: str) -> int:
    """klog's level; `-v=4` reaches us as `=4`."""
    text = value.removeprefix("=")
    if not text.lstrip("-").isdigit():
        raise click.BadParameter(f"{text!r} is not a number")
    return int(text)


_switch = partial(switch, parse=_boolean)


@click.group(invoke_without_command=True)
@click.option(
    "--http_bind", default="127.0.0.1:8080", show_default=True, help="Extender and webhook address."
)
@click.option("--cert_file", default="", help="TLS certificate; with --key_file: HTTPS, reloaded on change.")
@click.option("--key_file", default="", help="TLS key.")
@click.option(
    "--tls-secret",
    default="",
    metavar="NAMESPACE/NAME",
    help="Secret in which the scheduler makes and renews its own certificate.",
)
@click.option(
    "--tls-hosts", default="", metavar="NAME,...", help="Names and addresses that certificate is valid for."
)
@click.option(
    "--webhook-configuration",
    default="",
    metavar="NAME",
    help="Webhook configuration whose CA bundle follows that certificate.",
)
@click.option(
    "--scheduler-name", default="", help="Written to spec.schedulerName; also the source of events."
)
@click.option(
    "--node-scheduler-policy",
    default="binpack",
    show_default=True,
    metavar="POLICY",
    help="Node policy of pods that name none: binpack, spread, fragmentation-aware.",
)
@click.option(
    "--gpu-scheduler-policy",
    default="spread",
    show_default=True,
    metavar="POLICY",
    help="Card policy of pods that name none: spread, binpack, mutex, topology-aware, numa, "
    "fragmentation-aware.",
)
@click.option("--metrics-bind-address", default=":9395", show_default=True, help="Address of /metrics.")
@click.option("--node-label-selector", default="", metavar="K=V,...", help="Only nodes with these labels.")
@click.option(
    "--kube-qps", type=float, default=50.0, show_default=True, help="Requests per second to Kubernetes."
)
@click.option(
    "--kube-burst", type=int, default=100, show_default=True, help="Requests to Kubernetes at once."
)
@click.option("--kube-timeout", type=int, default=0, show_default=True, help="Seconds per request; 0: 30.")
@_switch("--profiling", text="Serve /debug/pprof/.")
@click.option(
    "--node-lock-timeout",
    type=_duration,
    metavar="DURATION",
    default=None,
    help="Age at which a node lock is stale; default $HAMI_NODELOCK_EXPIRE, else 5m.",
)
@click.option(
    "--node-lock-retry-timeout",
    type=_duration,
    metavar="DURATION",
    default="28s",
    show_default=True,
    help="How long members of a pod group wait for a locked node; above 25s counts as 25s, since "
    "kube-scheduler hangs up after 30s; 0: not at all.",
)
@_switch(
    "--force-overwrite-default-scheduler",
    default=True,
    text="The webhook also takes pods that name the default scheduler.",
)
@_switch("--leader-elect", text="Act only while the Lease names this host.")
@click.option(
    "--leader-elect-resource-name", default="", help="Lease of kube-scheduler, whose holder is the leader."
)
@click.option("--leader-elect-resource-namespace", default="", help="Namespace of the Lease.")
@_switch("--legacy-metrics", text="Also export the metric names used before 2.9.")
@click.option("--device-config-file", default="", metavar="FILE", help="device-config.yaml (required).")
@click.option(
    "--reservation-timeout",
    type=_duration,
    metavar="DURATION",
    default="15m",
    show_default=True,
    help="How long cards stay reserved for a pod that is never bound.",
)
@click.option(
    "--admission-privileged",
    type=click.Choice(["deny", "allow-unlimited"]),
    default="deny",
    show_default=True,
    help="Pods with a privileged container and a device.",
)
@click.option(
    "--max-request-bytes", type=int, default=32 << 20, show_default=True, help="Longest request body."
)
@_switch(
    "--remote-extender",
    text="Serve /bind and more than dry runs to other hosts too: whoever reaches the port can bind pods.",
)
@_switch("--debug", text="Accepted, no effect.")
@_switch("--enable-ascend", text="Schedule Ascend devices.")
@_switch("--enable-iluvatar", text="Schedule Iluvatar devices.")
@click.option(
    "-v", "--v", "verbosity", type=_level, metavar="N", default="0", help="Log level; 4 and more: debug."
)
@ignored(KLOG)
@ignored(_LEGACY)
@click.pass_context
def command(ctx: click.Context, /, **flags: Any) -> None:
    """Scheduler extender, admission webhook and metrics.

    Kubernetes is found by $KUBECONFIG, ~/.kube/config, or the service account of the pod.
    """
    if ctx.invoked_subcommand is not None:
        return
    # imported here so that `hami --help` stays instant
    from hami.kube.logs import level_from_verbosity, setup_logging

    setup_logging(level_from_verbosity(flags["verbosity"]))
    for name in _LEGACY:
        if flags.get(name.replace("-", "_")) is not None:
            log.warning(
                "flag.ignored", extra={"flag": f"--{name}", "advice": "set it in the device config file"}
            )
    _warn_of_policies(flags)
    try:
        _run(flags)
    except HamiError as error:
        fail("scheduler.failed", error)


@command.command()
def version() -> None:
    """Print version, revision, build date, language version, compiler and platform."""
    click.echo(f"Version: {metadata.version('hami')}")
    click.echo("Revision: unknown")
    click.echo("BuildDate: unknown")
    click.echo(f"PythonVersion: {platform.python_version()}")
    click.echo(f"Compiler: {sys.implementation.name}")
    click.echo(f"Platform: {sys.platform}/{platform.machine()}")


def _warn_of_policies(flags: dict[str, Any]) -> None:
    """HAMi takes any word here, so a wrong one must not stop the scheduler; nor must it pass unseen."""
    from hami.scheduler.edge.webhook import CARD_POLICIES, NODE_POLICIES

    for name, known in (("node-scheduler-policy", NODE_POLICIES), ("gpu-scheduler-policy", CARD_POLICIES)):
        words = [word.strip() for word in flags[name.replace("-", "_")].split(",")]
        unknown = [word for word in words if word not in known]
        if unknown:
            log.warning(
                "flag.unknown_policy", extra={"flag": f"--{name}", "unknown": unknown, "known": known}
            )


def _run(flags: dict[str, Any]) -> None:
    import uvloop

    from hami.kube.config import load_config
    from hami.scheduler.edge.app import run_scheduler
    from hami.scheduler.edge.device_config import DeviceConfigFile

    settings = _settings(flags, dict(os.environ))
    source = DeviceConfigFile(
        settings.device_config_file,
        enable_ascend=settings.enable_ascend,
        enable_iluvatar=settings.enable_iluvatar,
    )
    profiles = source.load()
    config = load_config()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_scheduler(settings, config, profiles, source))


def _settings(flags: dict[str, Any], environ: dict[str, str]) -> SchedulerSettings:
    from hami.scheduler.edge.settings import (
        SchedulerSettings,
        SettingsError,
        lock_timeout,
        parse_secret,
        parse_selector,
    )

    if not flags["device_config_file"]:
        raise SettingsError("--device-config-file is required: give it the path of a device-config.yaml")
    lease = None
    if flags["leader_elect"]:
        lease = (flags["leader_elect_resource_namespace"], flags["leader_elect_resource_name"])
        if not all(lease):
            raise SettingsError(
                "--leader-elect needs --leader-elect-resource-name and --leader-elect-resource-namespace"
            )
    privileged: Literal["deny", "allow-unlimited"] = flags["admission_privileged"]
    return SchedulerSettings(
        device_config_file=Path(flags["device_config_file"]),
        hostname=socket.gethostname(),
        http_bind=flags["http_bind"],
        metrics_bind_address=flags["metrics_bind_address"],
        cert_file=Path(flags["cert_file"]) if flags["cert_file"] else None,
        key_file=Path(flags["key_file"]) if flags["key_file"] else None,
        tls_secret=parse_secret(flags["tls_secret"]),
        tls_hosts=tuple(host for host in flags["tls_hosts"].split(",") if host),
        webhook_configuration=flags["webhook_configuration"],
        scheduler_name=flags["scheduler_name"],
        node_policy=flags["node_scheduler_policy"],
        card_policy=flags["gpu_scheduler_policy"],
        node_selector=parse_selector(flags["node_label_selector"]),
        kube_qps=flags["kube_qps"],
        kube_burst=flags["kube_burst"],
        kube_timeout_s=float(flags["kube_timeout"] or 30),
        node_lock_timeout_s=lock_timeout(flags["node_lock_timeout"], environ.get(ENV_NODELOCK_EXPIRE, "")),
        node_lock_retry_s=flags["node_lock_retry_timeout"],
        reservation_timeout_s=flags["reservation_timeout"],
        force_overwrite=flags["force_overwrite_default_scheduler"],
        privileged=privileged,
        lease=lease,
        pod_name=environ.get(ENV_POD_NAME, ""),
        pod_namespace=environ.get(ENV_POD_NAMESPACE, ""),
        legacy_metrics=flags["legacy_metrics"],
        profiling=flags["profiling"],
        enable_ascend=flags["enable_ascend"],
        enable_iluvatar=flags["enable_iluvatar"],
        max_request_bytes=flags["max_request_bytes"],
        remote_extender=flags["remote_extender"],
    )
