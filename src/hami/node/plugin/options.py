"""What the device plugin was started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from hami.node.paths import HostPaths
from hami.node.plugin.answer import Delivery
from hami.node.plugin.health_rules import XidRules
from hami.node.plugin.recovery_rules import RecoveryRules
from hami.node.plugin.scores import PairScores

RETRY_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginOptions:
    """What the process was started with and a reload does not change."""

    paths: HostPaths
    kubelet_socket: str
    delivery: Delivery
    rules: XidRules
    fail_on_init_error: bool = True
    pass_device_specs: bool = False
    dev_root: str = ""
    imex_channels: tuple[str, ...] = ()
    imex_required: bool = False
    driver_root: str = ""
    """The driver's root as it is mounted here, where device nodes are looked for first."""
    driver_host_root: str = ""
    """The driver's root on the host."""
    cdi_hook: str = "/usr/bin/nvidia-ctk"
    """Path on the host of the program that CDI documents name as hook."""
    recovery: RecoveryRules = field(default_factory=RecoveryRules)
    pair_scores: PairScores = PairScores.OFF
    by_index: bool = False
    """Whether the runtime is told NVML indexes of cards instead of UUIDs."""
    retry_s: float = RETRY_S
    register_interval_s: float = 30.0
