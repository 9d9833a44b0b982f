"""The answer to one container of an Allocate call: environment, mounts in their order, limits file. Pure.

WIRE: names, values and order of device-plugin.md §7.5 and §7.7 and of host-pid-broker.md §8.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hami.node.config import Settings
from hami.node.paths import (
    BROKER_DIRECTORY,
    LIMITS_MOUNT,
    LOCK_HOSTPID,
    LOCK_PARENT,
    PRELOAD,
    HostPaths,
    container_directory,
)
from hami.protocol import keys
from hami.protocol.allocation import Slot
from hami.protocol.quantity import as_int64
from hami.protocol.views import Container

DEVICE_MOUNTS: Final = keys.ENV_VISIBLE_VOLUME_MOUNTS
LIMITS_FORMAT: Final = "1"
_TRUE: Final = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_DEFAULT_PRIORITY: Final = "1"


@dataclass(frozen=True, slots=True)
class Mount:
    """One bind mount of a container."""

    container_path: str
    host_path: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """One device node of a container, always ``rw``."""

    container_path: str
    host_path: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What kubelet is told about one container."""

    env: Mapping[str, str]
    mounts: tuple[Mount, ...]
    devices: tuple[DeviceNode, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Choices of this plugin process that go into every answer.

    ``broker`` is the gate of the host PID broker; ``volume_mounts`` the device list strategy of that name;
    ``extras`` environment switches (GDS, MOFED, GDRCopy); ``device_nodes`` what ``--pass-device-specs``
    adds, by UUID and for ``""`` the control nodes.
    """

    broker: bool = False
    limits_file: bool = True
    volume_mounts: bool = False
    extras: Mapping[str, str]
    device_nodes: Mapping[str, tuple[DeviceNode, ...]]


@dataclass(frozen=True, slots=True)
class HostFiles:
    """Host paths found right before the answer: the library, and the license if there is one."""

    library: str
    license: bool


def cache_path(paths: HostPaths, name: str) -> str:
    """Path of a region file inside the container; ``name`` is a random UUID."""
    return f"{paths.vgpu}/{name}.cache"


def limits_table(
    devices: Slot, container: Container, settings: Settings, cache: str, delivery: Delivery
) -> dict[str, str]:
    """The closed list of device-plugin.md §7.5, complete and with defaults: what the library obeys."""
    table = {
        keys.ENV_LIMITS_FORMAT: LIMITS_FORMAT,
        keys.ENV_DEVICE_UUIDS: ",".join(device.uuid for device in devices),
        keys.ENV_MEMORY_LIMIT: "0",
        keys.ENV_SM_LIMIT: str(devices[0].usedcores),
        keys.ENV_SHARED_CACHE: cache,
        keys.ENV_OVERSUBSCRIBE: "true" if settings.memory_scaling > 1 else "false",
        keys.ENV_CORE_POLICY: "disable" if settings.disable_core_limit else settings.core_policy,
        keys.ENV_TASK_PRIORITY: _priority(container, settings.priority_resource),
        keys.ENV_HOSTPID_BROKER: "1" if delivery.broker else "0",
        keys.ENV_ACTIVE_OOM_KILLER: "0",
        keys.ENV_RECORD_KERNEL_INTERVAL: "1",
        keys.ENV_FAILURE_POLICY: "private",
        keys.ENV_CHARGE_RESIDUAL: "report",
        keys.ENV_NVML_PROCESSES: "own",
    }
    for position, device in enumerate(devices):
        table[keys.memory_limit_env(position)] = f"{device.usedmem}m"
        table[keys.sm_limit_env(position)] = str(device.usedcores)
    if settings.log_level:
        table[keys.ENV_LOG_LEVEL] = settings.log_level
    return table


def limits_text(table: Mapping[str, str]) -> bytes:
    """Content of the limits file: sorted ``KEY=VALUE`` lines."""
    return "".join(f"{key}={table[key]}\n" for key in sorted(table)).encode()


def build_answer(
    devices: Slot,
    container: Container,
    pod_uid: str,
    limits: Mapping[str, str],
    settings: Settings,
    paths: HostPaths,
    files: HostFiles,
    delivery: Delivery,
) -> Answer:
    """The whole answer for one container; ``limits`` is its :func:`limits_table`."""
    ids = tuple(dict.fromkeys(device.uuid for device in devices))
    env = _base_env(ids, delivery)
    env.update(_limit_env(devices, limits, settings))
    mounts = [*_base_mounts(ids, delivery)]
    directory = container_directory(pod_uid, container.name)
    mounts.append(Mount(f"{paths.vgpu}/libvgpu.so", files.library, True))
    mounts.append(Mount(paths.vgpu, f"{paths.containers}/{directory}", False))
    env, mounts = integrate_broker(env, mounts, delivery.broker, paths)
    if not control_disabled(container):
        mounts.append(Mount(PRELOAD, paths.preload, True))
    if files.license:
        mounts.append(Mount("/tmp/license", paths.host(f"{paths.vgpu}/license"), True))  # noqa: S108
        mounts.append(Mount("/usr/bin/vgpuvalidator", paths.host(f"{paths.vgpu}/vgpuvalidator"), True))
    if delivery.limits_file:
        mounts.append(Mount(LIMITS_MOUNT, f"{paths.limits}/{directory}", True))
    nodes = delivery.device_nodes
    specs = [*nodes.get("", ()), *(node for uuid in ids for node in nodes.get(uuid, ()))]
    return Answer(env, tuple(mounts), tuple(dict.fromkeys(specs)))


def integrate_broker(
    env: Mapping[str, str], mounts: Sequence[Mount], gate: bool, paths: HostPaths
) -> tuple[dict[str, str], list[Mount]]:
    """Put the lock parent and, with the gate on, the broker into an answer (host-pid-broker.md §8).
    Idempotent.
    """
    result_env = {key: value for key, value in env.items() if key != keys.ENV_HOSTPID_BROKER}
    parent = Mount(LOCK_PARENT, paths.host(LOCK_PARENT), False)
    result = _canonical(mounts, parent)
    if not gate:
        return result_env, [mount for mount in result if _target(mount) != LOCK_HOSTPID]
    broker = Mount(LOCK_HOSTPID, paths.host(BROKER_DIRECTORY), True)
    result = _canonical(result, broker)
    if result.index(parent) > result.index(broker):
        result.remove(parent)
        result.insert(result.index(broker), parent)
    result_env[keys.ENV_HOSTPID_BROKER] = "1"
    return result_env, result


def control_disabled(container: Container) -> bool:
    """Whether the container's own ``CUDA_DISABLE_CONTROL`` has a true value (first one that is true
    counts).
    """
    return any(
        entry.name == keys.ENV_DISABLE_CONTROL and (entry.value or "") in _TRUE
        for entry in container.env or ()
    )


def reserved_variables(container: Container, limits: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the closed list that the pod sets itself, sorted.

    What the webhook writes (priority and core policy) is not the pod's own doing and does not count.
    """
    webhook = {keys.ENV_TASK_PRIORITY, keys.ENV_CORE_POLICY, keys.ENV_LOG_LEVEL}
    own = {entry.name for entry in container.env or ()}
    return tuple(sorted((own & limits.keys()) - webhook))


def _base_env(ids: Sequence[str], delivery: Delivery) -> dict[str, str]:
    visible = DEVICE_MOUNTS if delivery.volume_mounts else ",".join(ids)
    return {keys.ENV_VISIBLE_DEVICES: visible, **delivery.extras}


def _base_mounts(ids: Sequence[str], delivery: Delivery) -> list[Mount]:
    if not delivery.volume_mounts:
        return []
    return [Mount(f"{DEVICE_MOUNTS}/{device_id}", "/dev/null", False) for device_id in ids]


def _limit_env(devices: Slot, limits: Mapping[str, str], settings: Settings) -> dict[str, str]:
    names = [keys.memory_limit_env(position) for position in range(len(devices))]
    names += [keys.ENV_SM_LIMIT, keys.ENV_DEVICE_UUIDS, keys.ENV_SHARED_CACHE]
    if len({device.usedcores for device in devices}) > 1:
        names += [keys.sm_limit_env(position) for position in range(len(devices))]
    if settings.memory_scaling > 1:
        names.append(keys.ENV_OVERSUBSCRIBE)
    if settings.log_level:
        names.append(keys.ENV_LOG_LEVEL)
    if settings.disable_core_limit:
        names.append(keys.ENV_CORE_POLICY)
    return {name: limits[name] for name in names}


def _priority(container: Container, resource: str) -> str:
    quantity = container.limits.get(resource)
    if quantity is None:
        return _DEFAULT_PRIORITY
    number, whole = as_int64(quantity)
    return str(number) if whole else _DEFAULT_PRIORITY


def _canonical(mounts: Sequence[Mount], wanted: Mount) -> list[Mount]:
    """``mounts`` with exactly one entry for the target of ``wanted``: in the first one's place, else at
    the end.
    """
    result: list[Mount] = []
    placed = False
    for mount in mounts:
        if _target(mount) != _normal(wanted.container_path):
            result.append(mount)
        elif not placed:
            result.append(wanted)
            placed = True
    return result if placed else [*result, wanted]


def _target(mount: Mount) -> str:
    return _normal(mount.container_path)


def _normal(path: str) -> str:
    return posixpath.normpath("/" + path.lstrip("/"))
