"""The device config file as typed data (scheduler.md §3): one frozen dataclass per section.

A field's wire name stands in its metadata (sections are called as their fields); its annotation says what
the file may hold. An absent key takes the field's default (0, false, "" or empty), an absent section the
section's defaults.
"""

from dataclasses import dataclass, field
from typing import Any


def key(name: str, default: Any, bits: int = 32) -> Any:
    """A dataclass field that the file calls `name`; integers have `bits` bits."""
    return field(default=default, metadata={"key": name, "bits": bits})


@dataclass(frozen=True, slots=True)
class MigAllowlistEntry:
    """Profiles offered on cards whose NVML name contains one of `models`."""

    models: tuple[str, ...] = key("models", ())
    profiles: tuple[str, ...] = key("profiles", ())


@dataclass(frozen=True, slots=True)
class NvidiaConfig:
    """Section `nvidia`; memory is MiB, except that requests are multiplied by `memory_factor`."""

    resource_count_name: str = key("resourceCountName", "")
    resource_memory_name: str = key("resourceMemoryName", "")
    resource_percentage_name: str = key("resourceMemoryPercentageName", "")
    resource_core_name: str = key("resourceCoreName", "")
    resource_priority_name: str = key("resourcePriorityName", "")
    overwrite_env: bool = key("overwriteEnv", False)
    default_memory: int = key("defaultMemory", 0)
    default_cores: int = key("defaultCores", 0)
    default_count: int = key("defaultGPUNum", 0)
    memory_factor: int = key("memoryFactor", 0)  # 0 acts as 1
    split_count: int = key("deviceSplitCount", 0)
    memory_scaling: float = key("deviceMemoryScaling", 0.0)
    core_scaling: float = key("deviceCoreScaling", 0.0)
    preconfigured_memory: int = key("preConfiguredDeviceMemory", 0, 64)
    cuda_log_level: str = key("libCudaLogLevel", "")
    numa_topology: bool = key("enableNumaTopology", False)
    disable_core_limit: bool = key("disableCoreLimit", False)
    core_policy: str = key("gpuCorePolicy", "")
    runtime_class_name: str = key("runtimeClassName", "")
    mig_allowlist: tuple[MigAllowlistEntry, ...] = key("migProfileAllowlist", ())


@dataclass(frozen=True, slots=True)
class CambriconConfig:
    """Section `cambricon`."""

    resource_count_name: str = key("resourceCountName", "")
    resource_memory_name: str = key("resourceMemoryName", "")
    resource_core_name: str = key("resourceCoreName", "")
    memory_factor: int = key("memoryFactor", 256)  # MiB per unit; 0 acts as 256
    whole_card_memory_units: int = key("wholeCardMemoryUnits", 0)  # 0: not known
    allow_unsupported: bool = key("allowUnsupported", False)


@dataclass(frozen=True, slots=True)
class MthreadsConfig:
    """Section `mthreads`; the sizes are those of an MTT S4000 unless given."""

    resource_count_name: str = key("resourceCountName", "")
    resource_memory_name: str = key("resourceMemoryName", "")
    resource_core_name: str = key("resourceCoreName", "")
    memory_factor: int = key("memoryFactor", 512)  # MiB per unit; 0 acts as 512
    memory_units: int = key("memoryUnitsPerDevice", 96)
    core_units: int = key("coreUnitsPerDevice", 16)
    legal_slices: tuple[int, ...] = key("legalMemorySlices", (2, 4, 8, 16, 32, 64, 96))  # units
    allow_unsupported: bool = key("allowUnsupported", False)


@dataclass(frozen=True, slots=True)
class AmdConfig:
    """Section `amd`; memory is MiB."""

    resource_count_name: str = key("resourceCountName", "")
    resource_memory_name: str = key("resourceMemoryName", "")
    resource_core_name: str = key("resourceCoreName", "")
    allow_unsupported: bool = key("allowUnsupported", False)


@dataclass(frozen=True, slots=True)
class HygonConfig:
    """Section `hygon`."""

    resource_count_name: str = key("resourceCountName", "")
    resource_memory_name: str = key("resourceMemoryName", "")
    resource_core_name: str = key("resourceCoreName", "")
    memory_factor: int = key("memoryFactor", 0)  # 0 acts as 1
    allow_unsupported: bool = key("allowUnsupported", False)


@dataclass(frozen=True, slots=True)
class MetaxConfig:
    """Section `metax`: whole cards (`Metax-GPU`) and shares (`Metax-SGPU`)."""

    resource_count_name: str = key("resourceCountName", "")
    resource_vcount_name: str = key("resourceVCountName", "")
    resource_vmemory_name: str = key("resourceVMemoryName", "")
    resource_vcore_name: str = key("resourceVCoreName", "")
    topology_aware: bool = key("sgpuTopologyAware", False)


@dataclass(frozen=True, slots=True)
class EnflameConfig:
    """Section `enflame`: whole cards (`GCU`) and DRS slices (`Enflame`), the latter with fallback names."""

    resource_gcu_name: str = key("resourceNameGCU", "")
    resource_drs_name: str = key("resourceNameDRSGCU", "")
    resource_memory_name: str = key("resourceNameGCUMemory", "")
    resource_core_name: str = key("resourceNameGCUCore", "")
    legacy_vgcu_name: str = key("resourceNameVGCU", "")
    legacy_percentage_name: str = key("resourceNameVGCUPercentage", "")

    @property
    def drs_name(self) -> str:
        """Name of the DRS resource in effect."""
        return self.resource_drs_name or self.legacy_vgcu_name or "enflame.com/drs-gcu"


@dataclass(frozen=True, slots=True)
class KunlunConfig:
    """Section `kunlun`: whole cards (`kunlun`) and shares (`XPU`)."""

    resource_count_name: str = key("resourceCountName", "")
    resource_vcount_name: str = key("resourceVCountName", "")
    resource_vmemory_name: str = key("resourceVMemoryName", "")
    strict_counts: bool | None = key("strictCounts", None)  # None: for whole cards, not for shares
    max_vfs: int = key("maxVFsPerNode", 24)  # 0: no limit
    multi_container_idx: str = key("multiContainerIdx", "concat")  # concat or last


@dataclass(frozen=True, slots=True)
class NeuronConfig:
    """Section `awsneuron`."""

    resource_count_name: str = key("resourceCountName", "")
    resource_core_name: str = key("resourceCoreName", "")


@dataclass(frozen=True, slots=True)
class VastaiConfig:
    """Section `vastai`."""

    resource_count_name: str = key("resourceCountName", "")


@dataclass(frozen=True, slots=True)
class BirenConfig:
    """Section `biren`; the further names are those under which the plugin counts parts of cards (SVI)."""

    resource_count_name: str = key("resourceCountName", "")
    svi_names: tuple[str, ...] = key("sviResourceNames", ("birentech.com/1-2-gpu", "birentech.com/1-4-gpu"))


@dataclass(frozen=True, slots=True)
class IluvatarConfig:
    """One item of `iluvatars`: one chip."""

    chip_name: str = key("chipName", "")
    common_word: str = key("commonWord", "")
    resource_count_name: str = key("resourceCountName", "")
    resource_memory_name: str = key("resourceMemoryName", "")
    resource_core_name: str = key("resourceCoreName", "")
    memory_factor: int = key("memoryFactor", 256)  # MiB per vMem; 0 acts as 256
    default_cores: int = key("defaultCores", 0)  # percent, where a container names none
    discovery: str = key("discovery", "auto")  # auto, annotation or capacity
    allow_unsupported: bool = key("allowUnsupported", False)


@dataclass(frozen=True, slots=True)
class AscendTemplate:
    """One vNPU template of a chip."""

    name: str = key("name", "")
    memory: int = key("memory", 0)  # MiB
    ai_core: int = key("aiCore", 0)
    ai_cpu: int = key("aiCPU", 0)


@dataclass(frozen=True, slots=True)
class AscendChip:
    """One item of `vnpus.configs`: one chip."""

    chip_name: str = key("chipName", "")
    common_word: str = key("commonWord", "")
    resource_count_name: str = key("resourceName", "")
    resource_memory_name: str = key("resourceMemoryName", "")
    resource_core_name: str = key("resourceCoreName", "")
    memory_allocatable: int = key("memoryAllocatable", 0, 64)  # MiB
    memory_capacity: int = key("memoryCapacity", 0, 64)  # MiB
    memory_factor: int = key("memoryFactor", 0)  # 0 acts as 1
    ai_core: int = key("aiCore", 0)
    ai_cpu: int = key("aiCPU", 0)
    templates: tuple[AscendTemplate, ...] = key("templates", ())
    runtime_class_name: str = key("runtimeClassName", "")
    overwrite_env: bool = key("overwriteEnv", False)
    super_pod: bool = key("superPod", False)


@dataclass(frozen=True, slots=True)
class AscendConfig:
    """Section `vnpus`."""

    soft_mode: bool = key("hamiVnpuCore", False)
    chips: tuple[AscendChip, ...] = key("configs", ())
    memory_scope: str = key("hamiCoreMemoryScope", "perCard")  # perCard or total
    strict_mode: bool = key("strictMode", False)
    check_template_units: bool = key("checkTemplateUnits", False)
    allow_unsupported: bool = key("allowUnsupported", False)


@dataclass(frozen=True, slots=True)
class CapacityConfig:
    """Cards of a vendor that the capacity of the count resource stands for; memory is MiB."""

    slots: int = key("slots", 1)
    cores: int = key("cores", 100)
    memory: int = key("memory", 0)


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """One item of `profiles`: a vendor on the standard engine, described by data alone.

    An annotation that is not named takes the name in brackets, with the common word in place of CW.
    """

    common_word: str = key("commonWord", "")
    resource_count_name: str = key("resourceCountName", "")
    resource_memory_name: str = key("resourceMemoryName", "")
    resource_core_name: str = key("resourceCoreName", "")
    memory_factor: int = key("memoryFactor", 0)  # 0 acts as 1
    default_cores: int = key("defaultCores", 0)
    register_format: str = key("registerFormat", "json")  # json, csv or capacity
    register_annotation: str = key("registerAnnotation", "")  # [hami.io/node-CW-register]
    handshake_annotation: str = key("handshakeAnnotation", "")  # none: the node counts as alive
    allocated_annotation: str = key("allocatedAnnotation", "")  # [hami.io/CW-devices-allocated]
    to_allocate_annotation: str = key("toAllocateAnnotation", "")  # [hami.io/CW-devices-to-allocate]
    use_uuid_annotation: str = key("useUUIDAnnotation", "")  # [hami.io/use-CW-uuid]
    no_use_uuid_annotation: str = key("noUseUUIDAnnotation", "")  # [hami.io/no-use-CW-uuid]
    use_type_annotation: str = key("useTypeAnnotation", "")  # none
    no_use_type_annotation: str = key("noUseTypeAnnotation", "")  # none
    node_lock: bool = key("nodeLock", False)  # the plugin finds its pod by the node lock
    counted_by_kubelet: bool = key("countedByKubelet", True)  # the node reports the count resource
    # for registerFormat capacity
    cards: CapacityConfig = field(default_factory=CapacityConfig, metadata={"key": "cards"})


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """The whole file. `warnings` tells what was ignored."""

    nvidia: NvidiaConfig = field(default_factory=NvidiaConfig)
    cambricon: CambriconConfig = field(default_factory=CambriconConfig)
    hygon: HygonConfig = field(default_factory=HygonConfig)
    enflame: EnflameConfig = field(default_factory=EnflameConfig)
    mthreads: MthreadsConfig = field(default_factory=MthreadsConfig)
    metax: MetaxConfig = field(default_factory=MetaxConfig)
    kunlun: KunlunConfig = field(default_factory=KunlunConfig)
    awsneuron: NeuronConfig = field(default_factory=NeuronConfig)
    amd: AmdConfig = field(default_factory=AmdConfig)
    vastai: VastaiConfig = field(default_factory=VastaiConfig)
    biren: BirenConfig = field(default_factory=BirenConfig)
    vnpus: AscendConfig = field(default_factory=AscendConfig)
    iluvatars: tuple[IluvatarConfig, ...] = ()
    profiles: tuple[ProfileConfig, ...] = ()
    warnings: tuple[str, ...] = field(default=(), metadata={"key": None})


BUILTIN = DeviceConfig(
    nvidia=NvidiaConfig(
        resource_count_name="nvidia.com/gpu",
        resource_memory_name="nvidia.com/gpumem",
        resource_percentage_name="nvidia.com/gpumem-percentage",
        resource_core_name="nvidia.com/gpucores",
        resource_priority_name="nvidia.com/priority",
        default_count=1,
    )
)
"""Used when no file is given (tests, simulation)."""
