"""``hami install-library``: puts libvgpu.so and ld.so.preload on the host (an init container runs it)."""

from __future__ import annotations

import errno
import os
from importlib.metadata import version as package_version
from pathlib import Path

import click

_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


def _advice(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
        return "; set the chart value global.gpuHookPath to a folder of the host that can be written"
    if isinstance(error, FileNotFoundError):
        return "; a checkout has no packaged library: `make native` and --library build/native/libvgpu.so"
    return ""


@click.command(name="install-library")
@click.option(
    "--library", type=click.Path(path_type=Path), help="File to install (default: the packaged one)."
)
@click.option("--host-root", default="", help="Keep all host paths below this directory (tests, demo).")
def command(library: Path | None, host_root: str) -> None:
    """Install libvgpu.so on this host.

    Puts this version below $HOOK_PATH/vgpu; does nothing if it is there already.
    """
    from hami.node.paths import DEFAULT_HOOK_PATH, HostPaths
    from hami.node.plugin.library import install, packaged_library
    from hami.protocol.errors import HamiError

    try:
        hook = (os.environ.get("HOOK_PATH") or DEFAULT_HOOK_PATH).rstrip("/")
        paths = HostPaths(host_root.rstrip("/"), hook, f"v{package_version('hami')}")
        placed = install(library or packaged_library(), paths)
    except (HamiError, OSError) as error:
        raise click.ClickException(f"cannot install the library: {error}{_advice(error)}") from error
    click.echo(placed.library_candidates[0])
