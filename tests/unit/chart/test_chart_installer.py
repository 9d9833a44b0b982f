"""The init container that puts the library on the host (chart.md §11, §20)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from hami.cli import install_library

_HOLDER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("mapped", flush=True)
sys.stdin.readline()
print(len(held), held[:3].decode(), held[-3:].decode(), flush=True)
"""


def _install(source: Path, root: Path) -> Path:
    arguments = ["--library", str(source), "--host-root", str(root)]
    result = CliRunner().invoke(install_library.command, arguments, env={"HOOK_PATH": "/usr/local"})
    assert result.exit_code == 0, result.output
    return Path(result.output.strip())


def test_case_32_a_process_that_has_the_old_library_mapped_lives_on(tmp_path: Path) -> None:
    root = tmp_path / "host"
    vgpu = root / "usr/local/vgpu"
    vgpu.mkdir(parents=True)
    hami = vgpu / "libvgpu.so.v2.10.0"
    hami.write_bytes(b"hami")
    source = tmp_path / "libvgpu.so"
    source.write_bytes(b"old" + bytes(1 << 20) + b"old")
    old = _install(source, root)
    inodes = old.stat().st_ino, hami.stat().st_ino
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(old)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    try:
        assert holder.stdout.readline() == "mapped\n"
        source.write_bytes(b"new")
        new = _install(source, root)
        assert new != old
        assert new.read_bytes() == b"new"
        assert (old.stat().st_ino, hami.stat().st_ino) == inodes
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == f"{(1 << 20) + 6} old old\n"
        assert holder.wait(timeout=30) == 0
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()


def test_case_34_a_folder_that_cannot_be_written_names_the_value_to_change(tmp_path: Path) -> None:
    source = tmp_path / "libvgpu.so"
    source.write_bytes(b"one")
    # nobody makes folders there, not even root
    result = CliRunner().invoke(
        install_library.command, ["--library", str(source)], env={"HOOK_PATH": "/sys/fs"}
    )
    assert result.exit_code == 1
    assert "cannot install the library" in result.output
    assert "global.gpuHookPath" in result.output
