"""``hami device-plugin``: offers the GPUs of this node to kubelet and answers its allocations."""

from __future__ import annotations

import os
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import click

from hami.cli.common import node_process_options, run_node_process, switch


@click.group(name="device-plugin", invoke_without_command=True)
@click.option(
    "--config-file",
    envvar="CONFIG_FILE",
    type=click.Path(path_type=Path),
    help="device-config.yaml (required).",
)
@click.option(
    "--node-config-file",
    type=click.Path(path_type=Path),
    default=Path("/config/config.json"),
    show_default=True,
    help="Settings of single nodes, in JSON; need not exist.",
)
@click.option(
    "--mig-strategy",
    envvar="MIG_STRATEGY",
    default="none",
    show_default=True,
    help="How MIG devices that are there are offered: none, single or mixed.",
)
@switch("--fail-on-init-error", envvar="FAIL_ON_INIT_ERROR", default=True, text="End when NVML is missing.")
@click.option(
    "--nvidia-driver-root",
    envvar="NVIDIA_DRIVER_ROOT",
    default="/",
    show_default=True,
    help="The driver's root on the host.",
)
@click.option(
    "--dev-root",
    "--nvidia-dev-root",
    envvar="NVIDIA_DEV_ROOT",
    default=None,
    help="Root of the device nodes on the host (default: the driver's root).",
)
@click.option(
    "--driver-root-ctr-path",
    "--container-driver-root",
    envvar=["DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"],
    default="/driver-root",
    show_default=True,
    help="Where the driver's root is mounted in this container.",
)
@switch("--pass-device-specs", envvar="PASS_DEVICE_SPECS", text="Also answer device nodes.")
@click.option(
    "--device-list-strategy",
    envvar="DEVICE_LIST_STRATEGY",
    default=("envvar",),
    multiple=True,
    help="envvar, volume-mounts, cdi-annotations, cdi-cri; repeatable or a comma list.",
)
@click.option(
    "--device-id-strategy",
    envvar="DEVICE_ID_STRATEGY",
    default="uuid",
    show_default=True,
    help="What the container runtime is told of cards: uuid or index.",
)
@switch("--gdrcopy-enabled", envvar="GDRCOPY_ENABLED", text="Give containers GDRCopy.")
@switch("--gds-enabled", envvar="GDS_ENABLED", text="Give containers GPUDirect Storage.")
@switch("--mofed-enabled", envvar="MOFED_ENABLED", text="Give containers the nodes of MOFED.")
@click.option(
    "--kubelet-socket",
    envvar="KUBELET_SOCKET",
    default=None,
    help="kubelet's registration socket (default: the usual path); empty: never register.",
)
@click.option(
    "--device-discovery-strategy",
    envvar="DEVICE_DISCOVERY_STRATEGY",
    default="auto",
    show_default=True,
    help="auto, nvml, or tegra (a Tegra board registers no card).",
)
@click.option(
    "--cdi-annotation-prefix",
    envvar="CDI_ANNOTATION_PREFIX",
    default="cdi.k8s.io/",
    show_default=True,
    help="Prefix of the annotations of cdi-annotations.",
)
@click.option(
    "--nvidia-cdi-hook-path",
    "--nvidia-ctk-path",
    envvar=["NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"],
    default="/usr/bin/nvidia-ctk",
    show_default=True,
    help="nvidia-ctk or nvidia-cdi-hook on the host, which CDI documents name as hook.",
)
@click.option(
    "--imex-channel-ids",
    envvar="IMEX_CHANNEL_IDS",
    default="",
    help="IMEX channels that containers get: 0, or none (default).",
)
@switch("--imex-required", envvar="IMEX_REQUIRED", text="Do not serve without these IMEX channels.")
@click.option("--node-name", envvar="NodeName", default=None, help="Overrides $NODE_NAME.")
@click.option(
    "--device-split-count",
    envvar="DEVICE_SPLIT_COUNT",
    type=int,
    default=None,
    help="Pods per card; overrides deviceSplitCount.",
)
@click.option(
    "--device-memory-scaling",
    envvar="DEVICE_MEMORY_SCALING",
    type=float,
    default=None,
    help="Memory offered per card, as a multiple of what it has; overrides deviceMemoryScaling.",
)
@click.option(
    "--device-cores-scaling",
    envvar="DEVICE_CORES_SCALING",
    type=float,
    default=None,
    help="Cores offered per card, as a multiple of 100 %; overrides deviceCoreScaling.",
)
@switch("--disable-core-limit", envvar="DISABLE_CORE_LIMIT", default=None, text="Never limit cores.")
@click.option("--resource-name", default=None, help="Overrides resourceCountName.")
@click.option(
    "--allocation-mode",
    default="auto",
    show_default=True,
    help="lock, exact (no node lock, needs CDI), or auto: exact where kubelet and runtime can do it.",
)
@click.option(
    "--scheduler-name",
    envvar="SCHEDULER_NAME",
    default="hami-scheduler",
    show_default=True,
    help="Named to users whose pod was not scheduled by it.",
)
@click.option(
    "--metrics-bind-address",
    default="",
    help="host:port of /metrics (the host PID broker's counters); empty: not served.",
)
@click.option("--host-root", default="", help="Keep all host paths below this directory (tests, demo).")
@switch("--limits-file", envvar="LIMITS_FILE", default=True, text="Mount a limits file into containers.")
@click.option(
    "--library",
    type=click.Path(path_type=Path),
    default=None,
    help="libvgpu.so that must be installed on the host (default: the packaged one, if there is one).",
)
@node_process_options
@click.pass_context
def command(context: click.Context, /, **flags: Any) -> None:
    """Offer the GPUs of this node to kubelet.

    Answers kubelet's allocations with environment and mounts, and writes the node's cards into annotations.
    Needs $NODE_NAME; Kubernetes is found by $KUBECONFIG, ~/.kube/config, or the service account of the pod.
    """
    if context.invoked_subcommand is not None:
        return
    from hami.node.plugin.process import run_device_plugin

    run_node_process(
        flags["verbosity"],
        lambda: run_device_plugin(_process_config(_with_file_flags(context, flags))),
        "plugin.failed",
    )


@command.command()
def version() -> None:
    """Print the version."""
    click.echo(f"NVIDIA Device Plugin version: v{package_version('hami')}")


def _with_file_flags(context: click.Context, flags: dict[str, Any]) -> dict[str, Any]:
    """Flags and environment over ``flags`` and ``imex`` of the configuration file over defaults."""
    import logging

    from hami.node.plugin.file_flags import merged_flags, read_file_flags

    if flags["config_file"] is None:
        return flags
    log = logging.getLogger(__name__)
    found = read_file_flags(flags["config_file"])
    for warning in found.warnings:
        log.warning("config.without_effect", extra={"cause": warning})
    default = click.core.ParameterSource.DEFAULT
    merged, taken = merged_flags(
        flags, lambda name: context.get_parameter_source(name) is default, found.values
    )
    if taken:
        log.info("config.flags", extra={name: str(merged[name]) for name in taken})
    return merged


def _process_config(flags: dict[str, Any]) -> Any:
    from hami.node.config import Overrides, check_mig_strategy
    from hami.node.errors import SettingsError
    from hami.node.exact.mode import check_flags
    from hami.node.nvml import resolve_library
    from hami.node.paths import DEFAULT_HOOK_PATH, HostPaths
    from hami.node.plugin.health_rules import parse_rules
    from hami.node.plugin.imex import parse_channels
    from hami.node.plugin.library import packaged_library
    from hami.node.plugin.options import PluginOptions
    from hami.node.plugin.platform import check_strategy
    from hami.node.plugin.process import ProcessConfig
    from hami.node.plugin.scores import parse_switch
    from hami.node.plugin.strategies import check_id_strategy
    from hami.protocol import keys
    from hami.protocol.durations import parse_duration
    from hami.protocol.lock import DEFAULT_LOCK_TIMEOUT

    if flags["config_file"] is None:
        raise SettingsError(
            "--config-file ($CONFIG_FILE) is required: give it the path of a device-config.yaml"
        )
    node_name = flags["node_name"] or os.environ.get(keys.ENV_NODE_NAME, "")
    if not node_name:
        raise SettingsError(
            "the name of this node is missing: set $NODE_NAME (fieldRef spec.nodeName) or --node-name"
        )
    hook = os.environ.get(keys.ENV_HOOK_PATH) or DEFAULT_HOOK_PATH
    paths = HostPaths(flags["host_root"].rstrip("/"), hook.rstrip("/"), f"v{package_version('hami')}")
    kubelet_socket = paths.kubelet_socket(flags["kubelet_socket"])
    check_flags(flags["allocation_mode"], kubelet_socket)
    check_id_strategy(flags["device_id_strategy"])
    check_strategy(flags["device_discovery_strategy"])
    check_mig_strategy(flags["mig_strategy"])
    expiry = os.environ.get(keys.ENV_NODELOCK_EXPIRE)
    return ProcessConfig(
        node_name=node_name,
        device_config=flags["config_file"],
        node_config=flags["node_config_file"],
        given=Overrides(
            split_count=flags["device_split_count"],
            memory_scaling=flags["device_memory_scaling"],
            core_scaling=flags["device_cores_scaling"],
            disable_core_limit=flags["disable_core_limit"],
            resource_name=flags["resource_name"],
            mig_strategy=None if flags["mig_strategy"] == "none" else flags["mig_strategy"],
        ),
        options=PluginOptions(
            paths=paths,
            kubelet_socket=kubelet_socket,
            delivery=_delivery(flags),
            rules=parse_rules(
                os.environ.get("DP_DISABLE_HEALTHCHECKS", ""), os.environ.get("DP_ENABLE_HEALTHCHECKS", "")
            ),
            recovery=_recovery(),
            fail_on_init_error=flags["fail_on_init_error"],
            pass_device_specs=flags["pass_device_specs"],
            pair_scores=parse_switch(os.environ.get(keys.ENV_TOPOLOGY_SCORE, "")),
            dev_root=flags["dev_root"] or flags["nvidia_driver_root"],
            by_index=flags["device_id_strategy"] == "index",
            imex_channels=parse_channels(flags["imex_channel_ids"]),
            imex_required=flags["imex_required"],
            driver_root=flags["driver_root_ctr_path"],
            driver_host_root=flags["nvidia_driver_root"],
            cdi_hook=flags["nvidia_cdi_hook_path"],
        ),
        library=flags["library"] or (packaged_library() if packaged_library().exists() else None),
        nvml_library=resolve_library(flags["driver_root_ctr_path"]),
        lock_timeout_s=parse_duration(expiry) if expiry else DEFAULT_LOCK_TIMEOUT,
        kube_qps=flags["kube_qps"],
        kube_burst=flags["kube_burst"],
        allocation_mode=flags["allocation_mode"],
        scheduler_name=flags["scheduler_name"],
        discovery=flags["device_discovery_strategy"],
        metrics_address=flags["metrics_bind_address"],
    )


def _recovery() -> Any:
    from hami.node.plugin.recovery_rules import parse_recovery
    from hami.protocol import keys
    from hami.protocol.durations import parse_duration

    quiet = os.environ.get(keys.ENV_HEALTH_QUIET_PERIOD, "")
    return parse_recovery(
        os.environ.get(keys.ENV_HEALTH_RECOVERY, ""),
        os.environ.get(keys.ENV_HEALTH_TRANSIENT_XIDS, ""),
        parse_duration(quiet) if quiet else None,
    )


def _delivery(flags: dict[str, Any]) -> Any:
    from hami.node.cdi import kinds
    from hami.node.hostpid.gate import gate_is_on
    from hami.node.plugin.answer import Delivery
    from hami.node.plugin.strategies import VOLUME_MOUNTS, cdi_delivery, parse_strategies
    from hami.protocol import keys

    switches = {
        kinds.GDRCOPY: (keys.ENV_GDRCOPY, flags["gdrcopy_enabled"]),
        kinds.GDS: (keys.ENV_GDS, flags["gds_enabled"]),
        kinds.MOFED: (keys.ENV_MOFED, flags["mofed_enabled"]),
    }
    strategies = parse_strategies(flags["device_list_strategy"])
    extras = [kind for kind, (_, on) in switches.items() if on]
    return Delivery(
        broker=gate_is_on(os.environ),
        hostpid_node_lock=os.environ.get(keys.ENV_HOSTPID_NODE_LOCK) == "1",
        limits_file=flags["limits_file"],
        volume_mounts=VOLUME_MOUNTS in strategies,
        extras={switches[kind][0]: "enabled" for kind in extras},
        device_nodes={},
        cdi=cdi_delivery(strategies, flags["cdi_annotation_prefix"], extras),
    )
