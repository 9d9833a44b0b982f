"""The host's limits file at /overrideEnv, in a user and mount namespace of the test's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from vgpu_harness import MIB, OUT_OF_MEMORY, Node, Shell, wait_until

from hami.protocol import region_layout as layout

GIB = 1024 * MIB

#: Arguments: new root directory, limits file, how it is offered, program. The new root has all of the old.
CONTAINER = """
set -e
root=$1 file=$2 how=$3
shift 3
mount -t tmpfs tmpfs "$root"
for entry in /*; do
    name=$root$entry
    if [ -L "$entry" ]; then cp -P "$entry" "$name"
    elif [ -d "$entry" ]; then mkdir "$name"; mount --rbind "$entry" "$name"
    fi
done
target=$root/overrideEnv
case $how in
plain) cp "$file" "$target" ;;
link) touch "$root/elsewhere"; mount --bind "$file" "$root/elsewhere"
      mount -o remount,bind,ro "$root/elsewhere"; ln -s elsewhere "$target" ;;
directory) mkdir "$target"; mount --bind "$(dirname "$file")" "$target" ;;
*) touch "$target"; mount --bind "$file" "$target"; mount -o "remount,bind,$how" "$target" ;;
esac
exec chroot "$root" "$@"
"""


def limits_file(node: Node, *lines: str) -> Path:
    """A limits file as the plugin writes it: it also names the region."""
    path = node.directory / "limits" / "file"
    path.parent.mkdir(exist_ok=True)
    path.write_text(content(node, *lines))
    return path


def content(node: Node, *lines: str) -> str:
    return "\n".join([*lines, f"CUDA_DEVICE_MEMORY_SHARED_CACHE={host_region(node)}", ""])


def host_region(node: Node) -> Path:
    return node.directory / "host.cache"


def entered(node: Node, file: Path, how: str) -> tuple[str, ...]:
    """The command that runs what follows it in a new container."""
    root = node.directory / f"root{len(list(node.directory.glob('root*')))}"
    root.mkdir()
    unshare = ("unshare", "--user", "--map-root-user", "--mount")
    return (*unshare, "sh", "-c", CONTAINER, "sh", str(root), str(file), how)


def container(node: Node, file: Path, how: str = "ro", **env: str) -> Shell:
    return node.shell(prefix=entered(node, file, how), extra=env).start()


def test_the_file_sets_the_limits(node: Node) -> None:
    """A8."""
    shell = container(node, limits_file(node, "HAMI_LIMITS_FORMAT=1", "CUDA_DEVICE_MEMORY_LIMIT_0=256m"))
    assert shell.ask(f"alloc {257 * MIB}")[0] == OUT_OF_MEMORY
    shell.must(f"alloc {256 * MIB}")


def test_the_file_beats_everything_in_the_environment(node: Node) -> None:
    """A10, A85: a variable that the file does not name is ignored as well."""
    shell = container(
        node,
        limits_file(node, "CUDA_DEVICE_MEMORY_LIMIT_0=256m", "CUDA_DEVICE_SM_LIMIT=30"),
        CUDA_DEVICE_MEMORY_LIMIT_0="8g",
        CUDA_DEVICE_SM_LIMIT_0="100",
        CUDA_TASK_PRIORITY="0",
        GPU_CORE_UTILIZATION_POLICY="disable",
    )
    assert shell.ask("info")[2] == 256 * MIB
    data = host_region(node).read_bytes()
    assert layout.V1.sm_limit.read(data) == 30
    assert layout.V1.priority.read(data) == 1
    device = layout.EXTENSION_OFFSET + layout.Extension.devices.offset
    assert layout.ExtensionDevice.core_limit.read(data, device) == 30
    assert not node.region().exists()


@pytest.mark.parametrize("how", ["plain", "rw", "link", "directory"])
def test_a_file_that_the_workload_could_have_made_is_ignored(node: Node, how: str) -> None:
    """A9."""
    file = limits_file(node, "CUDA_DEVICE_MEMORY_LIMIT_0=8g")
    shell = container(node, file, how, CUDA_DEVICE_MEMORY_LIMIT_0="64m", LIBCUDA_LOG_LEVEL="2")
    assert shell.ask("info")[2] == 64 * MIB
    assert len([line for line in shell.stderr().splitlines() if "/overrideEnv" in line]) == 1


def test_the_smaller_of_file_and_region_counts(node: Node) -> None:
    """A87."""
    shell = container(node, limits_file(node, "CUDA_DEVICE_MEMORY_LIMIT_0=256m"))
    for limit, expected in ((8 * GIB, 256 * MIB), (128 * MIB, 128 * MIB)):
        with host_region(node).open("r+b") as stream:
            stream.seek(layout.V1.limit.offset)
            stream.write(limit.to_bytes(8, "little"))
        assert shell.ask("info")[2] == expected


def test_a_file_rewritten_in_place_comes_into_force(node: Node) -> None:
    """A86: up and down while the process runs."""
    file = limits_file(node, "CUDA_DEVICE_MEMORY_LIMIT_0=256m")
    shell = container(node, file)
    shell.must("kernel 1000")
    for limit in (512, 128):
        with file.open("r+") as stream:
            stream.truncate(0)
            stream.write(content(node, f"CUDA_DEVICE_MEMORY_LIMIT_0={limit}m"))

        def holds(limit: int = limit) -> bool:
            shell.must("launch 1 1 32")
            now: int = shell.ask("info")[2]
            assert now in (128 * MIB, 256 * MIB, 512 * MIB)
            return now == limit * MIB

        wait_until(holds)


@pytest.mark.parametrize("tool", ["c", "python"])
@pytest.mark.parametrize("how", ["ro", "plain"])
def test_the_tools_set_no_limit_above_a_file_that_the_library_trusts(node: Node, tool: str, how: str) -> None:
    shell = container(node, limits_file(node, "CUDA_DEVICE_MEMORY_LIMIT_0=256m"))
    file = limits_file(node, "CUDA_DEVICE_MEMORY_LIMIT_0=256m")
    command = [str(node.build.directory / "vgpu-region"), "--file"]
    if tool == "python":
        command = [sys.executable, "-c", "from hami.cli.main import main; main()", "region"]
    for size, allowed in (("257m", how == "plain"), ("128m", True)):
        done = subprocess.run(
            [*entered(node, file, how), *command, str(host_region(node)), "--set-limit", f"0={size}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode == 0) == allowed, done.stderr
        assert allowed or "257 MiB is above the 256 MiB of" in done.stderr
    assert shell.ask("info")[2] == 128 * MIB
