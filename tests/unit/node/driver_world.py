"""A driver's root as an installation leaves it, with empty files."""

from __future__ import annotations

from pathlib import Path

VERSION = "570.86.15"
LIBRARIES = ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler", "libGLX_nvidia")
FOLDER = "usr/lib/x86_64-linux-gnu"


def touch(root: Path, *paths: str) -> None:
    """Empty files below ``root``, with their folders."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()


def install_driver(root: Path, version: str = VERSION, folder: str = FOLDER) -> Path:
    """Libraries, ``nvidia-smi``, a socket, firmware, device nodes and the toolkit's hook; the result is the
    root.
    """
    touch(root, *(f"{folder}/{name}.so.{version}" for name in LIBRARIES))
    (root / folder / "libcuda.so.1").unlink(missing_ok=True)
    (root / folder / "libcuda.so.1").symlink_to(f"libcuda.so.{version}")
    touch(root, f"{folder}/libc.so.6", f"{folder}/vdpau/libvdpau_nvidia.so.{version}")
    touch(root, "usr/bin/nvidia-smi", "usr/bin/nvidia-ctk", "run/nvidia-persistenced/socket")
    touch(root, f"lib/firmware/nvidia/{version}/gsp_ga10x.bin", f"lib/firmware/nvidia/{version}/LICENSE")
    touch(root, "dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia0", "dev/nvidia1")
    return root
