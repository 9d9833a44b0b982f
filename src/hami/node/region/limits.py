"""The limits file that the node wrote for a container, and what a limit in its region is worth beside it.

A program gets the smaller of the limit in the file and the limit in the region, where 0 counts as none, so
the region can only lower what the file allows (libvgpu.md §2.3). Without a file the region alone counts.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hami.node.errors import UnsafePathError
from hami.node.files import read_regular
from hami.node.paths import LIMITS_MOUNT
from hami.node.region.edit import RegionEditError
from hami.node.region.explain import size_text
from hami.node.region.view import Object
from hami.protocol import region_layout as layout

_MAX_BYTES: Final = 1 << 16
_MAX_DEVICES: Final = layout.MAX_DEVICES
_SHIFT: Final = {"": 0, "k": 10, "m": 20, "g": 30}
_SIZE: Final = re.compile(r"[ \t]*([0-9]+)(?:\.([0-9]+))?(?:([kmgKMG])i?[bB]?)?[ \t]*")
_DIGITS: Final = 20
_FRACTION: Final = 10
_OVERFLOW_UID: Final = 65534
MEMORY: Final = "CUDA_DEVICE_MEMORY_LIMIT"
CORES: Final = "CUDA_DEVICE_SM_LIMIT"


def parse_size(text: str) -> int | None:
    """Bytes of ``3000m``, ``1.5g``, ``1Gi``, as the library reads them (libvgpu.md §2.2); None for anything
    else and for 2^64 and above.
    """
    found = _SIZE.fullmatch(text)
    if found is None or len(found[1]) > _DIGITS:
        return None
    shift = _SHIFT[(found[3] or "").lower()]
    fraction = (found[2] or "")[:_FRACTION]
    size = (int(found[1]) << shift) + ((int(fraction or "0") << shift) // 10 ** len(fraction))
    return size if size < 1 << 64 else None


@dataclass(frozen=True, slots=True)
class LimitsFile:
    """The variables of a limits file."""

    path: Path
    variables: Mapping[str, str]

    def memory(self, device: Object) -> int:
        """Bytes that a device of a region is limited to, 0 = no limit."""
        sizes = (parse_size(self.variables[name]) for name in self.names(MEMORY, device))
        return next((size for size in sizes if size is not None), 0)

    def cores(self, device: Object) -> int:
        """Percent that a device of a region is limited to, 0 = no limit."""
        texts = (self.variables[name].strip() for name in self.names(CORES, device))
        percents = [int(text) for text in texts if re.fullmatch("[0-9]{1,7}", text)]
        return percents[0] if percents and percents[0] < layout.SM_LIMIT_NONE else 0

    @property
    def policy(self) -> str:
        """``default``, ``force`` or ``disable``."""
        return self.variables.get("GPU_CORE_UTILIZATION_POLICY", "").lower() or "default"

    def names(self, base: str, device: Object) -> list[str]:
        """The variables that limit a device, as far as they are set: its own first, then the one of all."""
        uuids = _uuids(self.variables.get("HAMI_DEVICE_UUIDS", ""))
        uuids = uuids or _uuids(self.variables.get("NVIDIA_VISIBLE_DEVICES", ""))
        place: int | None = device["index"]
        if uuids and device["uuid"]:
            place = uuids.index(device["uuid"]) if device["uuid"] in uuids else None
        names = [base] if place is None else [f"{base}_{place}", base]
        return [name for name in names if name in self.variables]


def _uuids(text: str) -> list[str]:
    """The devices in the order of the allocation; none unless all of them are whole UUIDs."""
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    whole = all(
        (len(entry) == 40 and entry.startswith("GPU-")) or entry.startswith("MIG-") for entry in entries
    )
    return entries if whole and len(entries) <= _MAX_DEVICES else []


def limits_file_of(region: Path) -> LimitsFile | None:
    """The limits file of a region's container: on the node beside the folder of its cache directory, in the
    container ``/overrideEnv``, there only if the library trusts it too. None if there is none.

    Raises :class:`UnsafePathError` for one on the node that is no file of this kind.
    """
    cache = region.parent.resolve()
    path = cache.parents[1] / "limits" / cache.name if len(cache.parents) > 1 else None
    if path is None or cache.parent.name != "containers" or not os.path.lexists(path):
        path = Path(LIMITS_MOUNT)
        if not _is_from_the_host(path):
            return None
    try:
        text = read_regular(str(path), _MAX_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise UnsafePathError(f"{path} cannot be read: {error.strerror}") from error
    return LimitsFile(path, parse_variables(text))


def parse_variables(text: str) -> dict[str, str]:
    """The lines ``KEY=VALUE`` of a limits file; of several with one key the last counts."""
    pairs = (row.strip().partition("=") for row in text.splitlines() if not row.lstrip().startswith("#"))
    return {key.strip(): value.strip() for key, found, value in pairs if found}


def _is_from_the_host(path: Path) -> bool:
    """A regular file of root's, mounted here read-only and by itself: no workload can have made it."""
    try:
        found, system = path.lstat(), os.statvfs(path)
        overflow = int(_text("/proc/sys/kernel/overflowuid") or _OVERFLOW_UID)
        mounts = _text("/proc/self/mountinfo").splitlines()
    except OSError:
        return False
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_uid in (0, overflow)
        and bool(system.f_flag & os.ST_RDONLY)
        and any(row.split(" ")[4:5] == [str(path)] for row in mounts)
    )


def _text(path: str) -> str:
    return Path(path).read_text("utf-8", errors="replace")


def check_limits(
    shown: Object,
    file: LimitsFile | None,
    memory: Sequence[tuple[int, int]],
    cores: Sequence[tuple[int, int]],
) -> None:
    """Raise :class:`RegionEditError` for limits that would have no effect beside the limits file.

    ``memory`` in bytes, 0 = none, ``cores`` in percent, each with its device.
    """
    if file is None:
        return
    if cores and file.policy == "disable":
        raise RegionEditError(
            f"{file.path} switches core limits off (GPU_CORE_UTILIZATION_POLICY=disable), and one in the "
            "region has no effect; nothing was changed. --disable-core-limit and gpuCorePolicy of the device "
            "plugin decide that for containers that start later"
        )
    devices = {device["index"]: device for device in shown["devices"]}
    for index, size in memory:
        most = file.memory(devices[index]) if index in devices else 0
        if most and (size == 0 or size > most):
            asked = size_text(size) if size else "no limit"
            raise _above(file, devices[index], MEMORY, asked, size_text(most))
    for index, percent in cores:
        most = file.cores(devices[index]) if index in devices else 0
        if most and percent > most:
            raise _above(file, devices[index], CORES, f"{percent} %", f"{most} %")


def _above(file: LimitsFile, device: Object, base: str, asked: str, most: str) -> RegionEditError:
    return RegionEditError(
        f"device {device['index']}: {asked} is above the {most} of {file.path}, and programs get the smaller "
        f"of the two; nothing was changed. Write another {file.names(base, device)[0]} into that file, on "
        "the node and in place: programs follow within a second, until the device plugin starts again and "
        "writes what the pod was given. For good, make the pod anew with a larger limit"
    )


def what_applies(
    shown: Object,
    file: LimitsFile | None,
    memory: Sequence[tuple[int, int]],
    cores: Sequence[tuple[int, int]],
) -> list[str]:
    """One sentence for each limit that was set: what programs get from now on; ``shown`` is the region."""
    devices = {device["index"]: device for device in shown["devices"]}
    lines = []
    for index, size in memory:
        limit = f"{size_text(size)} of memory" if size else "memory without a limit"
        most = file.memory(devices[index]) if file is not None and index in devices else 0
        beside = f"; {file.path} allows {size_text(most)}" if file is not None and most else ""
        lines.append(f"device {index}: programs get {limit} from now on{beside}")
    paced = shown["utilization_switch"] == 1 or (file is not None and file.policy == "force")
    for index, percent in cores:
        limit = f"{percent} % of the cores" if percent < layout.SM_LIMIT_NONE else "the cores without a limit"
        most = file.cores(devices[index]) if file is not None and index in devices else 0
        beside = f"; {file.path} allows {most} %" if file is not None and most else ""
        off = "" if paced else "; not paced while no other container uses the card, as now (monitor)"
        lines.append(f"device {index}: programs get {limit} from now on{beside}{off}")
    return lines
