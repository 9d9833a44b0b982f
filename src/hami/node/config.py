"""Settings of the node plugin: device-config.yaml (``nvidia`` block), config.json of the node, explicit
flags.

Everything here is pure: bytes and values in, one immutable :class:`Settings` out. Precedence: an
explicitly given flag or environment variable, then config.json, then device-config.yaml, then the defaults
(device-plugin.md §2, §3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeVar

import msgspec
import yaml

from hami.node.errors import SettingsError
from hami.protocol.mig import profile_problem

MODES: Final = ("hami-core", "mig", "mps")
MODE_MIG: Final = "mig"
"""Instances are made for each pod (dynamic MIG)."""
MIG_STRATEGIES: Final = ("none", "single", "mixed")
"""How instances that an administrator made are offered (static MIG)."""
MAX_CONFIG_BYTES: Final = 4 << 20
_FOREIGN: Final = frozenset({"resources", "sharing"})
_SPLIT_RANGE: Final = (1, 1000)
_SCALING_MAX: Final = 100.0

CorePolicy = Literal["", "default", "force", "disable"]
ReservedEnv = Literal["warn", "deny", "ignore"]


class MigAllowed(msgspec.Struct, frozen=True):
    """MIG profiles for the cards whose NVML name contains one of ``models``."""

    models: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()


class SharedResource(msgspec.Struct, frozen=True):
    """How many pods share each device of a resource; at least 2."""

    name: str
    replicas: int


class TimeSlicing(msgspec.Struct, frozen=True, rename="camel"):
    """``sharing.timeSlicing`` of the device config: it counts for static MIG devices only."""

    resources: tuple[SharedResource, ...] = ()
    fail_requests_greater_than_one: bool = False

    def replicas(self, resource: str) -> int:
        """Replicas of each device of ``resource``, 0 where it is not shared."""
        return next((item.replicas for item in self.resources if item.name == resource), 0)


NOT_SHARED: Final = TimeSlicing()


class NvidiaConfig(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The keys of the ``nvidia`` block that the node reads; unknown keys are ignored.

    Memory in MiB; scalings are factors, > 0 and at most 100; ``device_split_count`` 1..1000.
    """

    resource_count_name: str = "nvidia.com/gpu"
    resource_priority_name: str = "nvidia.com/priority"
    device_split_count: int = 10
    device_memory_scaling: float = 1.0
    device_core_scaling: float = 1.0
    pre_configured_device_memory: int = 0
    lib_cuda_log_level: str | int = ""
    enable_numa_topology: bool = False
    disable_core_limit: bool = False
    gpu_core_policy: CorePolicy = ""
    reserved_env: ReservedEnv = "warn"
    mig_profile_allowlist: tuple[MigAllowed, ...] = ()


class _Filter(msgspec.Struct, frozen=True):
    uuid: tuple[str, ...] = ()
    index: tuple[int, ...] = ()


class NodeOverride(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of config.json; None: the key is absent and the value below it stays."""

    name: str
    operatingmode: str = ""
    devicesplitcount: int | None = None
    devicememoryscaling: float | None = None
    devicecorescaling: float | None = None
    preconfigureddevicememory: int | None = None
    libcudaloglevel: str | None = None
    enablenumatopology: bool | None = None
    filterdevices: _Filter | None = None
    enablegetpreferredallocation: bool = False


class _NodeConfig(msgspec.Struct, frozen=True):
    nodeconfig: tuple[NodeOverride, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything the plugin obeys until the next reload. Memory in MiB, ``log_level`` empty: not set."""

    resource_name: str = "nvidia.com/gpu"
    priority_resource: str = "nvidia.com/priority"
    mode: str = "hami-core"
    split_count: int = 10
    memory_scaling: float = 1.0
    core_scaling: float = 1.0
    preconfigured_memory_mib: int = 0
    log_level: str = ""
    numa_topology: bool = False
    disable_core_limit: bool = False
    core_policy: str = "default"
    reserved_env: ReservedEnv = "warn"
    preferred_allocation: bool = False
    excluded_uuids: frozenset[str] = frozenset()
    excluded_indexes: frozenset[int] = frozenset()
    mig_strategy: str = "none"
    mig_allowlist: tuple[MigAllowed, ...] = ()
    sharing: TimeSlicing = NOT_SHARED
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each setting that is not a default came from, for the log line at start."""

    @property
    def socket_name(self) -> str:
        """File name of the plugin's socket: ``nvidia-<name>.sock`` for ``<prefix>/<name>`` (WIRE)."""
        return socket_name(self.resource_name)

    @property
    def is_dynamic_mig(self) -> bool:
        """Whether MIG instances are made for each pod."""
        return self.mode == MODE_MIG

    @property
    def is_static_mig(self) -> bool:
        """Whether MIG instances that are there are offered."""
        return self.mig_strategy != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Flags or environment variables that were given explicitly; None: not given."""

    split_count: int | None = None
    memory_scaling: float | None = None
    core_scaling: float | None = None
    disable_core_limit: bool | None = None
    resource_name: str | None = None
    mig_strategy: str | None = None


def socket_name(resource: str) -> str:
    """File name of the socket of a resource: ``nvidia-<name>.sock`` for ``<prefix>/<name>`` (WIRE)."""
    return f"nvidia-{resource.rpartition('/')[2]}.sock"


def check_mig_strategy(name: str) -> None:
    """Raises :class:`SettingsError` for an unknown one."""
    if name not in MIG_STRATEGIES:
        raise SettingsError(f"--mig-strategy {name!r} must be one of {', '.join(MIG_STRATEGIES)}")


def parse_device_config(text: bytes) -> NvidiaConfig:
    """The ``nvidia`` block of device-config.yaml. Raises :class:`SettingsError` naming the key and the
    reason.

    The file may also carry ``version`` (``v1`` or absent) for NVIDIA's own plugin; any other version is an
    error.
    """
    document = yaml_mapping(text)
    version = document.get("version", "v1")
    if version != "v1":
        raise SettingsError(f"device config: version {version!r} is not supported, only v1")
    block = document.get("nvidia")
    if block is None:
        raise SettingsError("device config: the block 'nvidia' is missing")
    config = _convert(block, NvidiaConfig, "device config, nvidia")
    _check_ranges(config.device_split_count, config.device_memory_scaling, config.device_core_scaling)
    if config.pre_configured_device_memory < 0:
        raise SettingsError("device config: preConfiguredDeviceMemory must not be negative")
    if not config.resource_count_name.rpartition("/")[2]:
        raise SettingsError("device config: resourceCountName must not be empty")
    _check_allowlist(config.mig_profile_allowlist)
    return config


def parse_sharing(text: bytes) -> TimeSlicing:
    """``sharing.timeSlicing`` of device-config.yaml. Raises :class:`SettingsError`."""
    sharing = yaml_mapping(text).get("sharing")
    slicing = sharing.get("timeSlicing") if isinstance(sharing, dict) else None
    if slicing is None:
        return NOT_SHARED
    parsed = _convert(slicing, TimeSlicing, "device config, sharing.timeSlicing")
    for item in parsed.resources:
        if not 2 <= item.replicas <= _SPLIT_RANGE[1]:
            raise SettingsError(
                f"device config: sharing.timeSlicing of {item.name} has {item.replicas} replicas, "
                f"it must be 2..{_SPLIT_RANGE[1]}"
            )
    return parsed


def foreign_sections(text: bytes, mig_strategy: str = "none") -> tuple[str, ...]:
    """Sections for NVIDIA's own plugin in device-config.yaml that have no effect here, sorted.

    ``sharing`` has one for static MIG devices.
    """
    foreign = _FOREIGN if mig_strategy == "none" else _FOREIGN - {"sharing"}
    return tuple(sorted(foreign & yaml_mapping(text).keys()))


def parse_node_overrides(text: bytes, node_name: str) -> tuple[NodeOverride, ...]:
    """The entries of config.json for ``node_name``, in order. Key names match case-insensitively.

    Raises :class:`SettingsError` for anything but the schema, an unknown operating mode and values out of
    range.
    """
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"node config: {error}") from error
    parsed = _convert(_lower_keys(document), _NodeConfig, "node config")
    entries = tuple(entry for entry in parsed.nodeconfig if entry.name == node_name)
    for entry in entries:
        if entry.operatingmode and entry.operatingmode not in MODES:
            raise SettingsError(f"node config: unknown operatingmode {entry.operatingmode!r}")
        _check_ranges(entry.devicesplitcount, entry.devicememoryscaling, entry.devicecorescaling)
        if entry.preconfigureddevicememory is not None and entry.preconfigureddevicememory < 0:
            raise SettingsError("node config: preconfigureddevicememory must not be negative")
    return entries


def build_settings(
    config: NvidiaConfig,
    overrides: Sequence[NodeOverride],
    given: Overrides,
    sharing: TimeSlicing = NOT_SHARED,
) -> Settings:
    """Combine the three sources. Raises :class:`SettingsError` for explicit values out of range."""
    sources: dict[str, str] = {}
    settings = Settings(
        resource_name=config.resource_count_name,
        priority_resource=config.resource_priority_name,
        split_count=config.device_split_count,
        memory_scaling=config.device_memory_scaling,
        core_scaling=config.device_core_scaling,
        preconfigured_memory_mib=config.pre_configured_device_memory,
        log_level=str(config.lib_cuda_log_level),
        numa_topology=config.enable_numa_topology,
        disable_core_limit=config.disable_core_limit,
        core_policy=config.gpu_core_policy or "default",
        reserved_env=config.reserved_env,
        mig_allowlist=config.mig_profile_allowlist,
        sharing=sharing,
        sources=sources,
    )
    for entry in overrides:
        settings = _apply_override(settings, entry, sources)
    _check_ranges(given.split_count, given.memory_scaling, given.core_scaling)
    explicit = {
        "split_count": given.split_count,
        "memory_scaling": given.memory_scaling,
        "core_scaling": given.core_scaling,
        "disable_core_limit": given.disable_core_limit,
        "resource_name": given.resource_name,
        "mig_strategy": given.mig_strategy,
    }
    chosen = {name: value for name, value in explicit.items() if value is not None}
    sources.update(dict.fromkeys(chosen, "flag or environment"))
    settings = replace(settings, **chosen)  # type: ignore[arg-type]
    check_mig_strategy(settings.mig_strategy)
    if settings.is_dynamic_mig and settings.is_static_mig:
        raise SettingsError(
            f"operatingmode mig makes MIG instances for each pod and --mig-strategy={settings.mig_strategy} "
            "offers those that are there: a node can do one of them, set the other to hami-core or none"
        )
    return settings


def _apply_override(settings: Settings, entry: NodeOverride, sources: dict[str, str]) -> Settings:
    values: dict[str, Any] = {
        "mode": entry.operatingmode or None,
        "split_count": entry.devicesplitcount,
        "memory_scaling": entry.devicememoryscaling,
        "core_scaling": entry.devicecorescaling,
        "preconfigured_memory_mib": entry.preconfigureddevicememory,
        "log_level": entry.libcudaloglevel,
        "numa_topology": entry.enablenumatopology,
        # The switch counts from the last entry, set or not.
        "preferred_allocation": entry.enablegetpreferredallocation,
    }
    if entry.filterdevices is not None:
        values["excluded_uuids"] = frozenset(entry.filterdevices.uuid)
        values["excluded_indexes"] = frozenset(entry.filterdevices.index)
    chosen = {name: value for name, value in values.items() if value is not None}
    sources.update(dict.fromkeys(chosen, "node config"))
    return replace(settings, **chosen)


def _check_allowlist(entries: Sequence[MigAllowed]) -> None:
    for position, entry in enumerate(entries):
        where = f"device config: migProfileAllowlist[{position}]"
        if not entry.models or not entry.profiles:
            raise SettingsError(f"{where} needs at least one model and one profile")
        for profile in entry.profiles:
            if problem := profile_problem(profile):
                raise SettingsError(f"{where} names profile {profile!r}, {problem}")


def _check_ranges(split: int | None, memory_scaling: float | None, core_scaling: float | None) -> None:
    if split is not None and not _SPLIT_RANGE[0] <= split <= _SPLIT_RANGE[1]:
        raise SettingsError(f"device split count {split} is outside {_SPLIT_RANGE[0]}..{_SPLIT_RANGE[1]}")
    for name, value in (("memory", memory_scaling), ("core", core_scaling)):
        if value is not None and not 0 < value <= _SCALING_MAX:
            raise SettingsError(
                f"device {name} scaling {value} must be above 0 and at most {_SCALING_MAX:.0f}"
            )


def yaml_mapping(text: bytes) -> dict[str, Any]:
    """device-config.yaml as a mapping. Raises :class:`SettingsError`."""
    if len(text) > MAX_CONFIG_BYTES:
        raise SettingsError(f"device config: longer than {MAX_CONFIG_BYTES} bytes")
    try:
        document = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise SettingsError(f"device config: not YAML: {error}") from error
    except (LookupError, AttributeError) as error:  # what PyYAML raises for "!!bool x", "!!int ''"
        raise SettingsError(f"device config: a value does not fit its tag: {error}") from error
    if not isinstance(document, dict):
        raise SettingsError("device config: a mapping is expected")
    return document


_T = TypeVar("_T")


def _convert(value: object, kind: type[_T], where: str) -> _T:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, TypeError) as error:
        raise SettingsError(f"{where}: {error}") from error


def _lower_keys(value: object, depth: int = 0) -> object:
    if depth > 8:
        raise SettingsError("node config: nested too deeply")
    lower: Callable[[object], object] = lambda item: _lower_keys(item, depth + 1)  # noqa: E731
    if isinstance(value, dict):
        # null is what HAMi's programs take for an absent key
        return {str(key).lower(): lower(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [lower(item) for item in value]
    return value
