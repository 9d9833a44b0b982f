"""Every annotation key, label, resource word and environment name that travels between components, once.

Keys that exist per vendor are in :data:`VENDOR_KEYS`; keys that depend on a configured chip (Ascend,
Iluvatar) come from :func:`ascend_keys` and :func:`iluvatar_keys`. All keys are case sensitive.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

# --- pods: written by the scheduler (inside the Binding) ----------------------------------------------------

ASSIGNED_NODE: Final = "hami.io/vgpu-node"
ASSIGNED_TIME: Final = "hami.io/vgpu-time"
BIND_PHASE: Final = "hami.io/bind-phase"
BIND_TIME: Final = "hami.io/bind-time"
MIG_ALLOCATIONS: Final = "hami.io/vgpu-mig-allocations"
ASSIGNED_NODE_LABEL: Final = "hami.io/vgpu-node"

BIND_ALLOCATING: Final = "allocating"
BIND_SUCCESS: Final = "success"
BIND_FAILED: Final = "failed"

# --- pods: written by the node plugin or by the scheduler later ---------------------------------------------

ALLOCATE_ERROR: Final = "hami.io/allocate-error"
REQUEUE: Final = "hami.io/requeue"
AMD_CU_ALLOCATED: Final = "hami.io/amd-cu-allocated"

# --- pods: written by users ---------------------------------------------------------------------------------

NODE_POLICY: Final = "hami.io/node-scheduler-policy"
CARD_POLICY: Final = "hami.io/gpu-scheduler-policy"
SCORING_WEIGHTS: Final = "hami.io/device-scoring-weights"
NVIDIA_USE_TYPE: Final = "nvidia.com/use-gputype"
NVIDIA_NO_USE_TYPE: Final = "nvidia.com/nouse-gputype"
NVIDIA_USE_UUID: Final = "nvidia.com/use-gpuuuid"
NVIDIA_NO_USE_UUID: Final = "nvidia.com/nouse-gpuuuid"
NVIDIA_MODE: Final = "nvidia.com/vgpu-mode"
NVIDIA_NUMA_BIND: Final = "nvidia.com/numa-bind"

# --- pods: labels -------------------------------------------------------------------------------------------

WEBHOOK_LABEL: Final = "hami.io/webhook"
WEBHOOK_IGNORE: Final = "ignore"
POD_GROUP_LABEL: Final = "scheduling.x-k8s.io/pod-group"
SCHEDULER_ROLE_LABEL: Final = "hami.io/scheduler-role"
ROLE_LEADER: Final = "leader"
ROLE_FOLLOWER: Final = "follower"
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
COMPONENT_SCHEDULER: Final = "hami-scheduler"
COMPONENT_PLUGIN: Final = "hami-device-plugin"

# --- nodes --------------------------------------------------------------------------------------------------

NODE_LOCK: Final = "hami.io/mutex.lock"
CAMBRICON_LOCK: Final = "cambricon.com/dsmlu.lock"
DEVICE_CORDON: Final = "hami.io/device-cordon"
ALLOCATION_MODE: Final = "hami.io/allocation-mode"
MODE_LOCK: Final = "lock"
MODE_EXACT: Final = "exact"
NODE_CONFIG_APPLIED: Final = "hami.io/node-config-applied"
NVIDIA_PAIR_SCORES: Final = "hami.io/node-nvidia-score"
INSTANCE_TYPE_LABEL: Final = "node.kubernetes.io/instance-type"

# --- environment of containers ------------------------------------------------------------------------------

ENV_VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
ENV_VISIBLE_NONE: Final = "none"
ENV_VISIBLE_VOLUME_MOUNTS: Final = "/var/run/nvidia-container-devices"
ENV_MEMORY_LIMIT: Final = "CUDA_DEVICE_MEMORY_LIMIT"
ENV_SM_LIMIT: Final = "CUDA_DEVICE_SM_LIMIT"
ENV_SHARED_CACHE: Final = "CUDA_DEVICE_MEMORY_SHARED_CACHE"
ENV_OVERSUBSCRIBE: Final = "CUDA_OVERSUBSCRIBE"
ENV_DISABLE_CONTROL: Final = "CUDA_DISABLE_CONTROL"
ENV_TASK_PRIORITY: Final = "CUDA_TASK_PRIORITY"
ENV_CORE_POLICY: Final = "GPU_CORE_UTILIZATION_POLICY"
ENV_LOG_LEVEL: Final = "LIBCUDA_LOG_LEVEL"
ENV_LOG_FILE: Final = "VGPU_LOG_FILE"
ENV_DEVICE_UUIDS: Final = "HAMI_DEVICE_UUIDS"
ENV_LIMITS_FORMAT: Final = "HAMI_LIMITS_FORMAT"
ENV_HOSTPID_BROKER: Final = "LIBVGPU_HOSTPID_BROKER"
ENV_ACTIVE_OOM_KILLER: Final = "ACTIVE_OOM_KILLER"
ENV_RECORD_KERNEL_INTERVAL: Final = "RECORD_KERNEL_INTERVAL"
ENV_FAILURE_POLICY: Final = "VGPU_FAILURE_POLICY"
ENV_CHARGE_RESIDUAL: Final = "VGPU_CHARGE_RESIDUAL"
ENV_NVML_PROCESSES: Final = "VGPU_NVML_PROCESSES"
ENV_HOSTPID_NODE_LOCK: Final = "VGPU_HOSTPID_NODE_LOCK"
ENV_GDRCOPY: Final = "NVIDIA_GDRCOPY"
ENV_GDS: Final = "NVIDIA_GDS"
ENV_MOFED: Final = "NVIDIA_MOFED"
ENV_IMEX_CHANNELS: Final = "NVIDIA_IMEX_CHANNELS"
ENV_ASCEND_VISIBLE_DEVICES: Final = "ASCEND_VISIBLE_DEVICES"
ENV_ILUVATAR_CONTAINER_NAME: Final = "SOL_CONTINER_NAME"  # sic, this is what its runtime reads

# --- environment of our own processes -----------------------------------------------------------------------

ENV_NODELOCK_EXPIRE: Final = "HAMI_NODELOCK_EXPIRE"
ENV_NODE_NAME: Final = "NODE_NAME"
ENV_HOOK_PATH: Final = "HOOK_PATH"
ENV_TOPOLOGY_SCORE: Final = "ENABLE_TOPOLOGY_SCORE"
ENV_POD_NAME: Final = "POD_NAME"
ENV_POD_NAMESPACE: Final = "POD_NAMESPACE"
ENV_HEALTH_RECOVERY: Final = "HAMI_HEALTH_RECOVERY"
ENV_HEALTH_TRANSIENT_XIDS: Final = "HAMI_HEALTH_TRANSIENT_XIDS"
ENV_HEALTH_QUIET_PERIOD: Final = "HAMI_HEALTH_QUIET_PERIOD"


def memory_limit_env(position: int) -> str:
    """Name of the memory limit of the device at ``position`` of the container's allocation."""
    return f"{ENV_MEMORY_LIMIT}_{position}"


def sm_limit_env(position: int) -> str:
    """Name of the core limit of the device at ``position`` of the container's allocation."""
    return f"{ENV_SM_LIMIT}_{position}"


# --- vendors ------------------------------------------------------------------------------------------------


class VendorKeys(msgspec.Struct, frozen=True):
    """The annotation keys of one vendor (by its common word). ``""`` where the vendor has no such key."""

    common_word: str
    allocated: str
    to_allocate: str = ""
    register: str = ""
    handshake: str = ""


NVIDIA: Final = "NVIDIA"
AMD: Final = "AMD"

VENDOR_KEYS: Final[Mapping[str, VendorKeys]] = MappingProxyType(
    {
        keys.common_word: keys
        for keys in (
            VendorKeys(
                NVIDIA,
                "hami.io/vgpu-devices-allocated",
                "hami.io/vgpu-devices-to-allocate",
                "hami.io/node-nvidia-register",
                "hami.io/node-handshake",
            ),
            VendorKeys(
                "MLU",
                "hami.io/cambricon-mlu-devices-allocated",
                "hami.io/cambricon-mlu-devices-to-allocate",
            ),
            VendorKeys(
                "DCU",
                "hami.io/dcu-devices-allocated",
                "hami.io/dcu-devices-to-allocate",
                "hami.io/node-dcu-register",
                "hami.io/node-handshake-dcu",
            ),
            VendorKeys(
                "GCU", "hami.io/enflame-gcu-devices-allocated", "hami.io/enflame-gcu-devices-to-allocate"
            ),
            VendorKeys(
                "Enflame", "hami.io/enflame-vgpu-devices-allocated", register="enflame.com/gcu-drs-capacity"
            ),
            VendorKeys(
                "Mthreads",
                "hami.io/mthreads-vgpu-devices-allocated",
                "hami.io/mthreads-vgpu-devices-to-allocate",  # readers know it, nobody writes it
            ),
            VendorKeys(
                "Metax-GPU", "hami.io/metax-gpu-devices-allocated", "hami.io/metax-gpu-devices-to-allocate"
            ),
            VendorKeys(
                "Metax-SGPU",
                "hami.io/metax-sgpu-devices-allocated",
                "hami.io/metax-sgpu-devices-to-allocate",
                "metax-tech.com/node-gpu-devices",
            ),
            VendorKeys("kunlun", "hami.io/kunlun-allocated"),
            VendorKeys(
                "XPU",
                "hami.io/xpu-devices-allocated",
                "hami.io/xpu-devices-to-allocate",
                "hami.io/node-register-xpu",
                "hami.io/node-handshake-xpu",
            ),
            VendorKeys("AWSNeuron", "hami.io/aws-neuron-devices-allocated"),
            VendorKeys(
                "AMD",
                "hami.io/amd-devices-allocated",
                "hami.io/amd-devices-to-allocate",
                "hami.io/node-amd-register",
            ),
            VendorKeys(
                "Vastai",
                "hami.io/Vastai-devices-allocated",
                "hami.io/Vastai-devices-to-allocate",
                "hami.io/node-va-register",
                "hami.io/node-handshake-va",
            ),
            VendorKeys(
                "Biren",
                "hami.io/Biren-devices-allocated",
                "hami.io/Biren-devices-to-allocate",
                "hami.io/node-biren-register",
                "hami.io/node-handshake-biren",
            ),
        )
    }
)
"""Vendors with fixed keys, in the order of vendors/README.md table 2.1."""


def ascend_keys(common_word: str) -> VendorKeys:
    """Keys of one configured Ascend chip, for example ``Ascend910B4``."""
    return VendorKeys(
        common_word,
        f"hami.io/{common_word}-devices-allocated",
        f"hami.io/{common_word}-devices-to-allocate",
        f"hami.io/node-register-{common_word}",
        f"hami.io/node-handshake-{common_word}",
    )


def iluvatar_keys(common_word: str) -> VendorKeys:
    """Keys of one configured Iluvatar chip, for example ``MR-V100``. The word order of the register key
    differs.
    """
    return VendorKeys(
        common_word,
        f"hami.io/{common_word}-devices-allocated",
        f"hami.io/{common_word}-devices-to-allocate",
        f"hami.io/node-{common_word}-register",
        f"hami.io/node-handshake-{common_word}",
    )


def ascend_extra_key(common_word: str) -> str:
    """Key under which the Ascend plugin finds the chosen chips and templates."""
    return f"huawei.com/{common_word}"


ILUVATAR_ASSIGNED: Final = "iluvatar.ai/gpu-assigned"
ILUVATAR_PREDICATE_TIME: Final = "iluvatar.ai/predicate-time"
ILUVATAR_INDEX_PREFIX: Final = "iluvatar.ai/predicate-gpu-idx-"
"""With the position of the container: the indices of its cards."""

VENDOR_EXTRA_KEYS: Final[frozenset[str]] = frozenset(
    {
        "CAMBRICON_DSMLU_ASSIGNED",
        "CAMBRICON_DSMLU_ASSIGHED",
        "CAMBRICON_DSMLU_PROFILE",
        "mthreads.com/gpu-index",
        "mthreads.com/predicate-node",
        "mthreads.com/predicate-time",
        "metax-tech.com/gpu-devices-allocated",
        "metax-tech.com/predicate-time",
        "enflame.com/gcu-assigned",
        "enflame.com/gcu-assigned-time",
        "enflame.com/gcu-assigned-index",
        "enflame.com/gcu-assigned-id",
        "enflame.com/gcu-assigned-minor",
        "enflame.com/gcu-request-size",
        "assigned-containers",
        "BAIDU_COM_DEVICE_IDX",
        ILUVATAR_ASSIGNED,
        ILUVATAR_PREDICATE_TIME,
        "AWS_NEURON_IDS",
        "NEURON_ALLOC_TIME",
        "NEURON_ALLOCATED",
        "aws.amazon.com/predicate-node",
        "NEURON_RESOURCE_TYPE",
        "predicate-time",
    }
)
"""Keys that the scheduler writes for third-party plugins besides the two allocation keys (protocol.md §6.1).
"""


def protected_annotations(vendors: Mapping[str, VendorKeys]) -> frozenset[str]:
    """Annotation keys that only the scheduler and the node plugins may set (protocol.md §15).

    ``vendors`` are the vendors in use by common word; chips of :func:`ascend_keys` add their own extra key.
    """
    fixed = {
        ASSIGNED_NODE,
        ASSIGNED_TIME,
        BIND_PHASE,
        BIND_TIME,
        MIG_ALLOCATIONS,
        ALLOCATE_ERROR,
        AMD_CU_ALLOCATED,
    }
    per_vendor = {key for keys in vendors.values() for key in (keys.allocated, keys.to_allocate) if key}
    extras = {ascend_extra_key(word) for word in vendors if word.startswith("Ascend")}
    return frozenset(fixed | per_vendor | extras | VENDOR_EXTRA_KEYS)


PROTECTED_LABELS: Final[frozenset[str]] = frozenset({ASSIGNED_NODE_LABEL})
"""Pod labels that only the scheduler may set."""
