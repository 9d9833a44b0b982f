"""The answer to one container of an Allocate call: environment, mounts in their order, limits file. Pure.

WIRE: names, values and order of device-plugin.md §7.5 and §7.7 and of host-pid-broker.md §8.
"""

from __future__ import annotations

import posixpath
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from hami.node.cdi import kinds
from hami.node.cdi.edits import Edits, merged, qualified
from hami.node.config import Settings
from hami.node.errors import AllocateError
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

IMEX: Final = "imex"
"""Key of the device nodes of IMEX channels."""
DEVICE_MOUNTS: Final = keys.ENV_VISIBLE_VOLUME_MOUNTS
_CDI_KEY: Final = "nvidia-device-plugin_"
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
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Annotations of the container towards the runtime (strategy ``cdi-annotations``)."""
    cdi_devices: tuple[str, ...] = ()
    """Qualified CDI names (strategy ``cdi-cri``)."""


def _random_id() -> str:
    return str(uuid.uuid4())


@dataclass(frozen=True, slots=True, kw_only=True)
class CdiDelivery:
    """The CDI strategies that are on, at least one of ``annotations`` and ``cri``; ``only``: no other one is.

    ``extras`` are the kinds of GDRCopy, GDS and MOFED that every container gets. ``edits`` is what the
    documents in the CDI directory hold, by qualified name: mode ``exact`` puts it into a container's own
    document.
    """

    annotations: bool = False
    cri: bool = False
    only: bool = False
    prefix: str = "cdi.k8s.io/"
    extras: tuple[str, ...] = ()
    edits: Mapping[str, Edits] = field(default_factory=dict)
    new_id: Callable[[], str] = _random_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Choices of this plugin process that go into every answer.

    ``broker`` is the gate of the host PID broker; ``hostpid_node_lock``, of effect only with it, lets one
    process of the node at a time look for its host PID where the broker fails; ``volume_mounts`` the device
    list strategy of that name; ``extras`` environment switches (GDS, MOFED, GDRCopy); ``device_nodes`` what
    ``--pass-device-specs`` adds, by UUID and for ``""`` the control nodes; ``indexes`` the NVML indexes by
    UUID where the runtime is told those (``--device-id-strategy=index``), None: it is told UUIDs; ``imex``
    channels that containers get; ``cdi`` the CDI strategies, None: none is on;
    ``dev_root`` the root of device nodes on the host.
    """

    broker: bool = False
    hostpid_node_lock: bool = False
    limits_file: bool = True
    volume_mounts: bool = False
    extras: Mapping[str, str]
    device_nodes: Mapping[str, tuple[DeviceNode, ...]]
    indexes: Mapping[str, str] | None = None
    imex: tuple[str, ...] = ()
    cdi: CdiDelivery | None = None
    dev_root: str = ""


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
    if delivery.broker and delivery.hostpid_node_lock:
        table[keys.ENV_HOSTPID_NODE_LOCK] = "1"
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
    base = base_response([device.uuid for device in devices], delivery)
    env = {**base.env, **_limit_env(devices, limits, settings)}
    mounts = [*base.mounts]
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
    return replace(base, env=env, mounts=tuple(mounts))


def base_response(uuids: Sequence[str], delivery: Delivery) -> Answer:
    """What hands devices to the runtime, without anything of HAMi (device-plugin.md §8.1). Each device
    counts once.

    With CDI strategies alone the names are all; a strategy beside them adds its own way.
    """
    cards = tuple(dict.fromkeys(uuids))
    ids = _runtime_ids(cards, delivery)
    annotations, names = _cdi_injection(ids, delivery)
    if delivery.cdi is not None and delivery.cdi.only:
        return Answer({}, (), (), annotations, names)
    nodes = delivery.device_nodes
    specs = [
        *nodes.get("", ()),
        *(node for uuid in cards for node in nodes.get(uuid, ())),
        *nodes.get(IMEX, ()),
    ]
    return Answer(
        _base_env(ids, delivery),
        tuple(_base_mounts(ids, delivery)),
        tuple(dict.fromkeys(specs)),
        annotations,
        names,
    )


def cdi_names(uuids: Sequence[str], delivery: Delivery) -> tuple[str, ...]:
    """The qualified names of these devices, of the IMEX channels and of the extras, in this order; none
    without a CDI strategy.
    """
    return _cdi_names(_runtime_ids(tuple(dict.fromkeys(uuids)), delivery), delivery)


def inlined_edits(uuids: Sequence[str], delivery: Delivery) -> Edits:
    """What the documents of the CDI directory would add for these devices, as one. Raises
    :class:`AllocateError` for a device that none of them describes.
    """
    if delivery.cdi is None:
        return Edits()
    names = cdi_names(uuids, delivery)
    missing = [name for name in names if name not in delivery.cdi.edits]
    if missing:
        raise AllocateError(f"no CDI document describes {', '.join(missing)}")
    return merged(delivery.cdi.edits[name] for name in names)


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


def _runtime_ids(cards: tuple[str, ...], delivery: Delivery) -> tuple[str, ...]:
    if delivery.indexes is None:
        return cards
    return tuple(delivery.indexes[uuid] for uuid in cards if uuid in delivery.indexes)


def _cdi_names(ids: Sequence[str], delivery: Delivery) -> tuple[str, ...]:
    if delivery.cdi is None:
        return ()
    return (
        *(qualified(kinds.GPU, id_) for id_ in ids),
        *(qualified(kinds.IMEX, channel) for channel in delivery.imex),
        *(qualified(kind, kinds.ALL) for kind in delivery.cdi.extras),
    )


def _cdi_injection(ids: Sequence[str], delivery: Delivery) -> tuple[dict[str, str], tuple[str, ...]]:
    """The annotations and the CDI devices of the strategies that are on; nothing to inject: neither."""
    cdi = delivery.cdi
    names = _cdi_names(ids, delivery)
    if cdi is None or not names:
        return {}, ()
    annotations = {f"{cdi.prefix}{_CDI_KEY}{cdi.new_id()}": ",".join(names)} if cdi.annotations else {}
    return annotations, names if cdi.cri else ()


def _base_env(ids: Sequence[str], delivery: Delivery) -> dict[str, str]:
    visible = DEVICE_MOUNTS if delivery.volume_mounts else ",".join(ids)
    env = {keys.ENV_VISIBLE_DEVICES: visible, **delivery.extras}
    if delivery.imex and not delivery.volume_mounts:
        env[keys.ENV_IMEX_CHANNELS] = ",".join(delivery.imex)
    return env


def _base_mounts(ids: Sequence[str], delivery: Delivery) -> list[Mount]:
    if not delivery.volume_mounts:
        return []
    names = [*ids, *(f"imex/{channel}" for channel in delivery.imex)]
    return [Mount(f"{DEVICE_MOUNTS}/{name}", "/dev/null", False) for name in names]


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
