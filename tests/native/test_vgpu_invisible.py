"""Programs in a container whose `/etc/ld.so.preload` names the library: nobody without CUDA may notice it.

The file acts on every program, also on those that start without an environment or with another user's rights,
where `LD_PRELOAD` does not reach. Each test has a mount namespace of its own with its own `/etc`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hostpid_harness import needs_root, unshare
from vgpu_harness import Node

CONTAINER = """
set -e
cp -a /etc/. "$1"
mount --bind "$1" /etc
if [ -n "$3" ]; then
    mkdir -p /etc/ld.so.conf.d
    echo "$3" > /etc/ld.so.conf.d/driver.conf
    ldconfig -X
fi
echo "$2" > /etc/ld.so.preload
shift 3
exec "$@"
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(node: Node, tmp_path: Path) -> Run:
    """Runs a command in the container: `driver` puts the simulated driver where programs find it."""

    def start(*command: str, driver: bool = False, **env: str) -> subprocess.CompletedProcess[str]:
        etc = tmp_path / "etc"
        etc.mkdir(exist_ok=True)
        folder = str(node.build.driver) if driver else ""
        prefix = (*unshare(), "sh", "-c", CONTAINER, "sh", str(etc), str(node.build.libvgpu), folder)
        return subprocess.run(
            [*prefix, *command],
            env={"PATH": os.environ["PATH"], **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return start


def outcome(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


def test_the_container_really_loads_the_library(node: Node, run: Run) -> None:
    done = run("/bin/sh", "-c", "grep -c libvgpu.so /proc/self/maps")
    assert int(done.stdout) > 0, done.stderr


def test_programs_without_an_environment_see_nothing(run: Run) -> None:
    assert outcome(run("env", "-i", "/bin/sh", "-c", "exit 7")) == (7, "", "")
    assert outcome(run("env", "-i", "/bin/echo", "here")) == (0, "here\n", "")


def test_a_statically_linked_program_runs(node: Node, run: Run) -> None:
    assert outcome(run(str(node.build.program("vgpu_static")))) == (5, "", "")


def test_shells_that_start_shells_see_nothing(run: Run) -> None:
    """Four at each level, four levels deep: 340 shells, each a child of one that was just made."""
    code = (
        'f() { [ "$1" -eq 0 ] && exit 0; for _ in 1 2 3 4; do (f $(($1 - 1))) & done; wait; }; f 4; /bin/true'
    )
    assert outcome(run("/bin/sh", "-c", code)) == (0, "", "")
    nested = 'n=$1; [ $n -eq 0 ] || exec /bin/sh -c "$0" "$0" $((n - 1))'
    assert outcome(run("/bin/sh", "-c", nested, nested, "100")) == (0, "", "")


def test_threads_descriptors_and_files_of_a_program_stay_as_they_are(run: Run, tmp_path: Path) -> None:
    region = tmp_path / "vgpu.cache"
    code = (
        "import os; print(len(os.listdir('/proc/self/task')),"
        "sorted(int(name) for name in os.listdir('/proc/self/fd'))[:-1])"
    )
    done = run("python3", "-c", code, CUDA_DEVICE_MEMORY_SHARED_CACHE=str(region), CUDA_DEVICE_SM_LIMIT="5")
    assert outcome(done) == (0, "1 [0, 1, 2]\n", "")
    assert not region.exists()


PROGRAM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>
#include <sys/auxv.h>
int main(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver != NULL ? driver : RTLD_DEFAULT, "cuInit");
    printf("%d %ld %d\\n", (int)geteuid(), (long)getauxval(AT_SECURE), init != NULL ? init(0) : -1);
    return 0;
}
"""


@pytest.fixture
def set_user_id(tmp_path: Path) -> Path:
    """A program with another user's rights that starts CUDA."""
    needs_root("a set-user-ID program")
    for parent in (tmp_path, *tmp_path.parents):
        if parent != Path("/") and parent.stat().st_uid == os.geteuid():
            parent.chmod(parent.stat().st_mode | 0o055)
    (tmp_path / "program.c").write_text(PROGRAM)
    program = tmp_path / "program"
    subprocess.run(["gcc", "-o", str(program), str(tmp_path / "program.c"), "-ldl"], check=True)
    os.chown(program, 65534, 65534)
    program.chmod(0o4755)
    return program


def test_a_set_user_id_program_takes_nothing_from_its_environment(
    run: Run, node: Node, set_user_id: Path, tmp_path: Path
) -> None:
    """13: no file where its caller says, no log, no limit of its choice; the program itself works."""
    target = tmp_path / "writable"
    target.mkdir()
    target.chmod(0o777)
    state = node.state
    state.chmod(0o777)
    node.directory.chmod(0o755)
    names = {
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(target / "vgpu.cache"),
        "CUDA_DEVICE_MEMORY_LIMIT_0": "abc",
        "VGPU_LOG_FILE": str(target / "log"),
        "LIBCUDA_LOG_LEVEL": "4",
        "FAKEGPU_STATE": str(state),
    }
    assert outcome(run(str(set_user_id), driver=True, **names)) == (0, "65534 1 0\n", "")
    assert list(target.iterdir()) == []


def test_a_set_user_id_program_without_a_driver_is_told_so(run: Run, set_user_id: Path) -> None:
    assert outcome(run(str(set_user_id))) == (0, "65534 1 3\n", "")
