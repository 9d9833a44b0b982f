"""Where things lie on the host and in a container.

``--host-root DIR`` moves every host path below DIR and makes our own effective UID the trusted owner
there, so that the demo and the tests need no root (decision 52). Paths inside a container never move.
"""

from __future__ import annotations

import os
import posixpath
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hami.node.errors import SettingsError

KUBELET_SOCKET: Final = "/var/lib/kubelet/device-plugins/kubelet.sock"
CDI_DIRECTORY: Final = "/var/run/cdi"
LOCK_PARENT: Final = "/tmp/vgpulock"  # noqa: S108 - the name is part of the protocol, its checks are in lockparent.py
LOCK_HOSTPID: Final = "/tmp/vgpulock/hostpid"  # noqa: S108
BROKER_DIRECTORY: Final = "/var/run/hami/hostpid"
MIG_LOCK_NAME: Final = "hami-mig-apply.lock"
PRELOAD: Final = "/etc/ld.so.preload"
LIMITS_MOUNT: Final = "/overrideEnv"
DEFAULT_HOOK_PATH: Final = "/usr/local"


@dataclass(frozen=True, slots=True)
class HostPaths:
    """Paths of one plugin or monitor process. ``root`` is empty or an absolute directory without trailing
    slash.

    ``hook`` is HOOK_PATH as the device plugin has it (``/usr/local``), ``version`` that of the library it
    installs.
    """

    root: str = ""
    hook: str = DEFAULT_HOOK_PATH
    version: str = "unknown"
    library_version: str = ""
    """Name of the library's version directory where it differs from ``version``."""

    def __post_init__(self) -> None:
        if self.root and (not self.root.startswith("/") or self.root.endswith("/")):
            raise SettingsError("--host-root must be an absolute directory without a trailing slash")
        if not self.hook.startswith("/") or self.hook.endswith("/"):
            raise SettingsError(f"HOOK_PATH {self.hook!r} must be an absolute path without a trailing slash")

    @property
    def trusted_uid(self) -> int:
        """Owner that host directories must have: root, below ``--host-root`` our own effective UID."""
        return os.geteuid() if self.root else 0

    def host(self, path: str) -> str:
        """``path`` on the host as this process and the runtime reach it."""
        return self.root + path

    @property
    def vgpu(self) -> str:
        """``<H>/vgpu``, the same name on the host (before ``host()``) and in a container."""
        return f"{self.hook}/vgpu"

    @property
    def containers(self) -> str:
        """Host directory with one cache directory per container."""
        return self.host(f"{self.vgpu}/containers")

    @property
    def limits(self) -> str:
        """Host directory with one limits file per container."""
        return self.host(f"{self.vgpu}/limits")

    @property
    def checkpoint(self) -> str:
        """Host file with the first answer of each container."""
        return self.host(f"{self.vgpu}/allocations.json")

    @property
    def preload(self) -> str:
        """Host file that becomes ``/etc/ld.so.preload`` in containers."""
        return self.host(f"{self.vgpu}/ld.so.preload")

    @property
    def library_folder(self) -> str:
        """``<H>/vgpu/lib`` with one directory per version (before ``host()``)."""
        return f"{self.vgpu}/lib"

    @property
    def library_candidates(self) -> tuple[str, ...]:
        """Host paths of the library, best first: our own layout, then HAMi's names (device-plugin.md §7.7,
        §12).
        """
        names = (
            f"{self.library_folder}/{self.library_version or self.version}/libvgpu.so",
            f"{self.vgpu}/libvgpu.so.{self.version}",
            f"{self.vgpu}/libvgpu.so",
        )
        return tuple(self.host(name) for name in names)

    def kubelet_socket(self, given: str | None) -> str:
        """The kubelet socket for the flag value ``given`` (None: not given; empty: never register).

        Raises :class:`SettingsError` when ``--host-root`` is used with a socket outside of it.
        """
        if given == "":
            return ""
        if not self.root:
            return given or KUBELET_SOCKET
        socket = given or self.host(KUBELET_SOCKET)
        inside = Path(os.path.realpath(self.root))
        if not Path(os.path.realpath(Path(socket).parent)).is_relative_to(inside):
            raise SettingsError(
                f"--host-root {self.root} cannot be used with the kubelet socket {socket}: "
                "it lies outside of it"
            )
        return socket


def pod_resources_socket(kubelet_socket: str) -> str:
    """The PodResources socket of the kubelet whose device plugin socket is given."""
    return posixpath.join(posixpath.dirname(posixpath.dirname(kubelet_socket)), "pod-resources/kubelet.sock")


def container_directory(pod_uid: str, container: str) -> str:
    """Name of a container's cache directory and limits file (WIRE with the monitor)."""
    return f"{pod_uid}_{container}"
