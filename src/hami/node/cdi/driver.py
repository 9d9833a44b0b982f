"""What a container needs of NVIDIA's driver, found in the driver's root: libraries, programs, sockets,
device nodes.

Compute, video and graphics parts of the driver; not the modules of an X server.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hami.node.cdi import kinds
from hami.node.cdi.edits import BindMount, CdiError, Edits, Hook, Node
from hami.node.nvml import LIBRARY_FOLDERS
from hami.node.pci import sysfs_folder

CONTROL_NODES: Final = (
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidia-modeset",
)
_FILE_OPTIONS: Final = ("ro", "nosuid", "nodev", "rbind", "rprivate")
_SOCKET_OPTIONS: Final = ("nosuid", "nodev", "noexec", "rbind", "rprivate")
_PROGRAMS: Final = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
)
_SOCKETS: Final = ("run/nvidia-persistenced/socket", "run/nvidia-fabricmanager/socket")
_DATA: Final = (
    "usr/share/nvidia/nvoptix.bin",
    "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    "usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
    "usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json",
    "usr/share/vulkan/icd.d/nvidia_icd.json",
    "usr/share/vulkan/implicit_layer.d/nvidia_layers.json",
    "etc/vulkan/icd.d/nvidia_icd.json",
    "etc/vulkan/implicit_layer.d/nvidia_layers.json",
)
_FIRMWARE: Final = ("lib/firmware/nvidia", "usr/lib/firmware/nvidia")
_LINKS: Final = (("libcuda.so.1", "libcuda.so"), ("libnvidia-opticalflow.so.1", "libnvidia-opticalflow.so"))
"""Links that programs look for and that no package of the image brings: what it leads to, its name."""
_VERSIONED: Final = re.compile(r"libcuda\.so\.(\d+(?:\.\d+)+)")
_MAX_FILES: Final = 4096

_EXTRA_NODES: Final = {
    kinds.GDRCOPY: ("gdrdrv",),
    kinds.GDS: ("nvidia-fs*",),
    kinds.MOFED: ("infiniband/uverbs*", "infiniband/rdma_cm"),
}
_EXTRA_FILES: Final = {kinds.GDS: ("run/udev", "etc/cufile.json")}


@dataclass(frozen=True, slots=True)
class DriverRoots:
    """Where driver and device nodes are, each as seen ``here`` and on the ``host``; no trailing slashes, so
    that a host's root is empty. ``hook`` is the path on the host of ``nvidia-ctk`` or ``nvidia-cdi-hook``.
    """

    here: str
    host: str
    dev_here: str
    dev_host: str
    hook: str


def driver_edits(roots: DriverRoots) -> Edits:
    """What every container with a card gets; blocking. Raises :class:`CdiError` that says what to do."""
    folder, version = _libraries(roots)
    _check_hook(roots)
    libraries = [f"{folder}/{name}" for name in _names(roots, folder) if name.endswith(f".so.{version}")]
    vdpau = f"{folder}/vdpau/libvdpau_nvidia.so.{version}"
    firmware = [
        f"{place}/{version}/{name}"
        for place in _FIRMWARE
        for name in _names(roots, f"{place}/{version}")
        if name.startswith("gsp") and name.endswith(".bin")
    ]
    programs = [f"usr/bin/{name}" for name in _PROGRAMS]
    files = _there(roots, (*libraries, vdpau, *programs, *firmware, *_DATA))
    mounts = [_mount(roots, path, _FILE_OPTIONS) for path in files]
    mounts += [_mount(roots, path, _SOCKET_OPTIONS) for path in _there(roots, _SOCKETS)]
    folders = [f"/{folder}"] + ([f"/{folder}/vdpau"] if vdpau in files else [])
    return Edits(
        # A runtime that reads the variable itself adds nothing then.
        env={"NVIDIA_VISIBLE_DEVICES": "void"},
        nodes=nodes_there(roots, (path.removeprefix("/dev/") for path in CONTROL_NODES)),
        mounts=tuple(mounts),
        hooks=(
            _hook(roots, "create-symlinks", "--link", _links(folder, libraries)),
            _hook(roots, "update-ldcache", "--folder", folders),
        ),
    )


def card_edits(roots: DriverRoots, paths: Iterable[str], bus_id: str = "", sysfs: str = "/sys") -> Edits:
    """What one card adds: its device ``paths``, and by its PCI bus id the nodes of the graphics stack that
    are there.
    """
    nodes = tuple(Node(path, f"{roots.dev_host}{path}") for path in paths)
    return Edits(nodes=nodes + nodes_there(roots, (f"dri/{name}" for name in _drm_names(bus_id, sysfs))))


def extra_edits(kind: str, roots: DriverRoots) -> Edits:
    """What GDRCopy, GDS or MOFED add; nothing where the node does not have it."""
    nodes = nodes_there(roots, _EXTRA_NODES[kind])
    if not nodes:
        return Edits()
    files = _there(roots, _EXTRA_FILES.get(kind, ()))
    return Edits(nodes=nodes, mounts=tuple(_mount(roots, path, _FILE_OPTIONS) for path in files))


def nodes_there(roots: DriverRoots, patterns: Iterable[str]) -> tuple[Node, ...]:
    """The nodes below ``/dev`` that are there, in the order of the patterns, then of their names."""
    base = Path(f"{roots.dev_here}/dev")
    found = [f"/dev/{path.relative_to(base)}" for pattern in patterns for path in sorted(base.glob(pattern))]
    return tuple(Node(path, f"{roots.dev_host}{path}") for path in found[:_MAX_FILES])


def _libraries(roots: DriverRoots) -> tuple[str, str]:
    """The folder of the driver's libraries, relative to its root, and the driver's version."""
    for folder in LIBRARY_FOLDERS:
        versions = {
            match[1]
            for name in _names(roots, folder)
            if (match := _VERSIONED.fullmatch(name)) and not Path(roots.here, folder, name).is_symlink()
        }
        chosen = versions if len(versions) < 2 else versions & {_linked_version(roots, folder)}
        if chosen:
            return folder, chosen.pop()
        if versions:
            raise CdiError(
                f"{roots.here}/{folder} holds libcuda.so of the drivers {' and '.join(sorted(versions))}, "
                "and libcuda.so.1 is a link to none of them: run ldconfig on the host"
            )
    raise CdiError(
        f"no libcuda.so of a driver below {roots.here}: the CDI strategies need the driver's root mounted "
        "there (chart: devicePlugin.nvidiaDriverRoot, / or /run/nvidia/driver)"
    )


def _linked_version(roots: DriverRoots, folder: str) -> str:
    """The version that ``libcuda.so.1`` leads to, empty where it is no link to one."""
    try:
        target = os.path.basename(os.readlink(f"{roots.here}/{folder}/libcuda.so.1"))  # noqa: PTH115, PTH119
    except OSError:
        return ""
    match = _VERSIONED.fullmatch(target)
    return match[1] if match else ""


def _check_hook(roots: DriverRoots) -> None:
    """The hook must be there where the host's own root can be seen; the runtime would start no container."""
    if not roots.host and not os.path.lexists(f"{roots.here}{roots.hook}"):
        raise CdiError(
            f"{roots.hook} is not on this node, and no container would start without it: install the NVIDIA "
            "Container Toolkit, or set --nvidia-cdi-hook-path (chart: devicePlugin.nvidiaHookPath)"
        )


def _hook(roots: DriverRoots, name: str, flag: str, values: Sequence[str]) -> Hook:
    program = os.path.basename(roots.hook)  # noqa: PTH119
    words = [program, *(() if program == "nvidia-cdi-hook" else ("hook",)), name]
    return Hook(roots.hook, tuple(words) + tuple(word for value in values for word in (flag, value)))


def _links(folder: str, libraries: Sequence[str]) -> list[str]:
    """``target::link`` for libraries that are there; the programs' own names lead to those with a version."""
    there = {os.path.basename(path).partition(".so.")[0] for path in libraries}  # noqa: PTH119
    return [f"{target}::/{folder}/{link}" for target, link in _LINKS if link.removesuffix(".so") in there]


def _names(roots: DriverRoots, folder: str) -> list[str]:
    """Names in a folder of the driver's root, sorted; none where it is not there."""
    try:
        names = sorted(os.listdir(f"{roots.here}/{folder}"))  # noqa: PTH208
    except OSError:
        return []
    return names


def _there(roots: DriverRoots, paths: Sequence[str]) -> list[str]:
    """Those of the paths, relative to the driver's root, that are there, each once."""
    found = [path for path in dict.fromkeys(paths) if os.path.exists(f"{roots.here}/{path}")]  # noqa: PTH110
    if len(found) > _MAX_FILES:
        raise CdiError(f"the driver below {roots.here} has more than {_MAX_FILES} files")
    return found


def _mount(roots: DriverRoots, path: str, options: tuple[str, ...]) -> BindMount:
    return BindMount(f"/{path}", f"{roots.host}/{path}", options)


def _drm_names(bus_id: str, sysfs: str) -> list[str]:
    """``card0`` and ``renderD128`` of a PCI device; none without a graphics driver."""
    if not bus_id:
        return []
    try:
        names = os.listdir(f"{sysfs_folder(bus_id, sysfs)}/drm")  # noqa: PTH208
    except OSError:
        return []
    return sorted(name for name in names if name.startswith(("card", "renderD")))
