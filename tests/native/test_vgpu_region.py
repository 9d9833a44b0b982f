"""The shared region file: how it is made, joined, trusted and read."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from vgpu_harness import MIB, OUT_OF_MEMORY, SUCCESS, UNKNOWN, NativeBuild, Node, read_usage

from hami.protocol import region_layout as layout

ROOT = Path(__file__).resolve().parents[2]


def test_a_new_region_is_what_every_reader_expects(node: Node) -> None:
    """A12, A13."""
    uuid = "GPU-00000000-0000-0000-0000-00000000000a"
    node.settings["FAKEGPU_UUIDS"] = uuid
    shell = node.shell(
        prefix=("/bin/sh", "-c", 'umask 077; "$0" "$@"; umask'), CUDA_DEVICE_MEMORY_LIMIT_0="3000m",
        CUDA_DEVICE_SM_LIMIT="40", CUDA_TASK_PRIORITY="0",
    ).start()  # fmt: skip
    path = node.region()
    data = path.read_bytes()
    assert data[:12] == (19920718).to_bytes(4, "little") + b"\x01\x00\x00\x00\x02\x00\x00\x00"
    assert len(data) == 2_273_280
    assert path.stat().st_mode & 0o7777 == 0o666
    v1 = layout.V1
    assert v1.device_count.read(data) == 1
    assert v1.uuid.read(data)[:40] == uuid.encode()
    assert [v1.limit.read(data), v1.sm_limit.read(data)] == [3000 * MIB, 40]
    assert [v1.utilization_switch.read(data), v1.recent_kernel.read(data), v1.priority.read(data)] == [
        1,
        2,
        0,
    ]
    assert data[24:40] == data[2_008_920:2_008_936] == bytes([1, *[0] * 7, 128, *[0] * 7])
    assert data[layout.EXTENSION_OFFSET :][:8] == layout.EXTENSION_MAGIC
    assert shell.ask("quit") is not None


def test_a_slot_says_who_holds_what(node: Node) -> None:
    """A14, A67: this process is in the namespace that NVML counts in."""
    shell = node.shell().start()
    shell.must(f"alloc {3 * MIB}")
    data, slot = node.region().read_bytes(), layout.V1.procs.base(0)
    fields = layout.V1Slot
    assert fields.pid.read(data, slot) == shell.process.pid
    assert fields.status.read(data, slot) == layout.SLOT_RUNNING
    assert fields.used_data.read(data, slot) == fields.used_total.read(data, slot) == 3 * MIB
    assert fields.seqlock.read(data, slot) % 2 == 0
    total = layout.Extension.totals.read(data, layout.EXTENSION_OFFSET, 0)
    assert total == 3 * MIB
    in_initial = Path("/proc/self/ns/pid").stat().st_ino == 4026531836
    assert fields.hostpid.read(data, slot) == (shell.process.pid if in_initial else 0) or not in_initial


def test_the_header_and_the_python_module_describe_the_same_bytes() -> None:
    """A84: offsets that the C compiler sees equal those of the Python module."""
    source = (ROOT / "native/vgpu/generated/region_abi.h").read_text()
    asserted = {
        (struct, name): int(offset)
        for struct, name, offset in re.findall(r"offsetof\(struct vg_(\w+), (\w+)\) == (\d+)", source)
    }
    classes = {"region": layout.V1, "region_v0": layout.V0, "extension": layout.Extension,
               "ext_device": layout.ExtensionDevice, "ext_slot": layout.ExtensionSlot}  # fmt: skip
    checked = 0
    for (struct, name), offset in asserted.items():
        if struct in classes:
            assert getattr(classes[struct], name).offset == offset
            checked += 1
    assert checked > 60
    assert asserted["region", "sem_postinit"] == 2_008_920
    assert asserted["region", "proc_num"] == 2_008_896
    assert asserted["slot", "status"] == 1928
    assert (layout.V1.SIZE, layout.V0.SIZE, layout.V1Slot.SIZE) == (2_008_952, 1_197_896, 1960)


def denied(node: Node) -> None:
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m")
    assert shell.ask("init")[0] == UNKNOWN
    assert shell.ask(f"alloc {MIB}")[0] == UNKNOWN
    assert len([line for line in shell.stderr().splitlines() if str(node.region()) in line]) == 1


def planted(node: Node) -> Path:
    node.region().parent.mkdir()
    return node.region()


def test_a_planted_symlink_is_refused(node: Node) -> None:
    """A24."""
    target = node.directory / "target"
    target.write_bytes(b"keep me")
    planted(node).symlink_to(target)
    denied(node)
    assert target.read_bytes() == b"keep me"


def test_a_planted_fifo_is_refused(node: Node) -> None:
    """A24."""
    os.mkfifo(planted(node))
    denied(node)


def test_a_planted_directory_is_refused(node: Node) -> None:
    """A24."""
    planted(node).mkdir()
    denied(node)


def test_a_second_name_of_the_region_is_refused(node: Node) -> None:
    """A24."""
    other = node.directory / "other"
    other.write_bytes(bytes(layout.FILE_LENGTH))
    planted(node).hardlink_to(other)
    denied(node)
    assert other.read_bytes() == bytes(layout.FILE_LENGTH)


def test_an_old_region_is_left_alone(node: Node) -> None:
    """3.8: v0 at our path."""
    old = bytearray(layout.V0_MIN_LENGTH + 1)
    layout.V0.magic.write(old, layout.MAGIC)
    planted(node).write_bytes(old)
    denied(node)
    assert node.region().read_bytes() == old


def test_a_truncated_region_is_made_anew(node: Node) -> None:
    """A25."""
    planted(node).write_bytes(b"0123456789")
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    assert shell.ask(f"alloc {65 * MIB}")[0] == OUT_OF_MEMORY
    assert node.region().stat().st_size == layout.FILE_LENGTH


def test_a_region_of_hami_without_the_extension_is_extended(node: Node) -> None:
    """3.9: limits and slots that HAMi left are kept."""
    node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start().leave()
    data = node.region().read_bytes()[: layout.V1_MIN_LENGTH + 1]
    node.region().write_bytes(data)
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1g").start()
    assert shell.ask("info")[2] == 64 * MIB
    assert node.region().stat().st_size == layout.FILE_LENGTH


def test_an_extension_of_another_version_is_left_alone_and_limits_hold(node: Node) -> None:
    """A83."""
    node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1g").start().leave()
    data = bytearray(node.region().read_bytes())
    layout.Extension.version.write(data, 2, layout.EXTENSION_OFFSET)
    node.region().write_bytes(data)
    shells = [node.shell().start() for _ in range(4)]
    won = [shell.ask(f"alloc {300 * MIB}")[0] for shell in shells]
    assert sorted(won) == [SUCCESS, SUCCESS, SUCCESS, OUT_OF_MEMORY]
    assert sum(read_usage(node.region()).values()) == 900 * MIB
    assert node.region().read_bytes()[layout.EXTENSION_OFFSET :] == data[layout.EXTENSION_OFFSET :]


def test_a_region_is_made_where_new_files_belong_to_somebody_else(node: Node) -> None:
    node.preload.append(str(node.build.program("libvgpu_squash.so")))
    one = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    one.must(f"alloc {40 * MIB}")
    other = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    assert other.ask(f"alloc {40 * MIB}")[0] == OUT_OF_MEMORY
    assert node.region().stat().st_mode & 0o7777 == 0o666
    assert one.stderr() == ""


def test_where_no_region_can_be_made_limits_hold_for_the_process(node: Node) -> None:
    """A22."""
    shell = node.shell(
        CUDA_DEVICE_MEMORY_LIMIT_0="64m", CUDA_DEVICE_MEMORY_SHARED_CACHE="/proc/none/vgpu.cache"
    ).start()
    assert shell.ask(f"alloc {65 * MIB}")[0] == OUT_OF_MEMORY
    shell.must(f"alloc {64 * MIB}")
    assert len([line for line in shell.stderr().splitlines() if "/proc/none" in line]) == 1


@pytest.mark.parametrize(("policy", "result"), [("deny", UNKNOWN), ("open", SUCCESS)])
def test_what_happens_without_a_region_can_be_chosen(node: Node, policy: str, result: int) -> None:
    """A23."""
    shell = node.shell(
        CUDA_DEVICE_MEMORY_LIMIT_0="64m",
        CUDA_DEVICE_MEMORY_SHARED_CACHE="/proc/none/vgpu.cache",
        VGPU_FAILURE_POLICY=policy,
    )
    assert shell.ask("init")[0] == result


def test_a_limit_changed_at_run_time_is_in_force_at_once(node: Node) -> None:
    """Section 10: the tool writes limit[d]."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    assert shell.ask(f"alloc {65 * MIB}")[0] == OUT_OF_MEMORY
    with node.region().open("r+b") as stream:
        stream.seek(layout.V1.limit.offset)
        stream.write((128 * MIB).to_bytes(8, "little"))
    shell.must(f"alloc {65 * MIB}")


def test_absurd_numbers_in_the_region_do_no_harm(node: Node) -> None:
    """3.8: everything in the file is in reach of the workload."""
    first = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    with node.region().open("r+b") as stream:
        stream.seek(layout.V1.proc_num.offset)
        stream.write((2**31 - 1).to_bytes(4, "little"))
    second = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    second.must(f"alloc {32 * MIB}")
    assert first.ask(f"alloc {33 * MIB}")[0] == OUT_OF_MEMORY


def test_a_refusal_is_counted_and_recorded(node: Node) -> None:
    """7.8."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    assert shell.ask(f"alloc {65 * MIB}")[0] == OUT_OF_MEMORY
    data, ext = node.region().read_bytes(), layout.EXTENSION_OFFSET
    assert layout.ExtensionDevice.refusals.read(data, ext + layout.Extension.devices.offset) == 1
    event = ext + layout.Extension.events.offset
    assert layout.ExtensionEvent.sequence.read(data, event) == 1
    assert layout.ExtensionEvent.type.read(data, event) == layout.EVENT_REFUSAL
    assert layout.ExtensionEvent.value.read(data, event) == 65 * MIB
    assert layout.ExtensionEvent.pid.read(data, event) == shell.process.pid


def test_many_processes_that_start_at_once_get_slots_of_their_own(node: Node) -> None:
    """A77, smaller."""
    shells = [node.shell() for _ in range(24)]
    for shell in shells:
        assert shell.process.stdin is not None
        shell.process.stdin.write("init\nretain 0\nalloc 1048576\n")
        shell.process.stdin.flush()
    for shell in shells:
        assert shell.process.stdout is not None
        for _ in range(3):
            assert shell.process.stdout.readline().split()[0] == str(SUCCESS)
    assert read_usage(node.region()) == {shell.process.pid: MIB for shell in shells}


def crowd(native: NativeBuild, region: Path, how: str, count: int) -> tuple[int, int]:
    """Different slots that so many processes had, and places of the region in use."""
    done = subprocess.run(
        [str(native.program("vgpu_crowd")), str(region), how, str(count)],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    different, places = done.stdout.split()
    return int(different), int(places)


@pytest.mark.parametrize("count", [1000, 1024])
def test_a_thousand_processes_at_once_get_slots_of_their_own(
    native: NativeBuild, tmp_path: Path, count: int
) -> None:
    """A124: also when every slot is taken."""
    different, places = crowd(native, tmp_path / "crowd.cache", "together", count)
    assert different == count
    assert count <= places <= 1024


def test_slots_of_the_killed_are_used_again(native: NativeBuild, tmp_path: Path) -> None:
    """A124: two thousand are killed and replaced, one after another, and nobody sweeps."""
    _, places = crowd(native, tmp_path / "crowd.cache", "replaced", 2000)
    assert places <= 64


def test_a_process_that_execs_gives_its_old_slot_up(node: Node) -> None:
    """A57: the new image's numbers start at 0, the old ones do not block it."""
    code = (
        "import ctypes, os, sys\n"
        "cuda = ctypes.CDLL('libcuda.so.1')\n"
        "context, block = ctypes.c_void_p(), ctypes.c_uint64()\n"
        "assert cuda.cuInit(0) == 0\n"
        "assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0\n"
        "assert cuda.cuCtxSetCurrent(context) == 0\n"
        "size = ctypes.c_size_t(64 << 20)\n"
        "assert cuda.cuMemAlloc_v2(ctypes.byref(block), size) == 0\n"
        "if len(sys.argv) == 1:\n"
        "    os.execv(sys.executable, [sys.executable, __file__, 'again'])\n"
        "print('both')\n"
    )
    script = node.directory / "twice.py"
    script.write_text(code)
    done = node.run(sys.executable, str(script), CUDA_DEVICE_MEMORY_LIMIT_0="64m")
    assert done.stdout == "both\n", done.stderr


def test_no_descriptor_of_the_region_stays_open(node: Node) -> None:
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    shell.must(f"alloc {MIB}")
    shell.ask(f"alloc {65 * MIB}")
    open_files = {
        str(fd.readlink()) for fd in Path(f"/proc/{shell.process.pid}/fd").iterdir() if fd.is_symlink()
    }
    assert str(node.region()) not in open_files
    assert subprocess.run(["true"], check=False).returncode == 0


def test_a_descriptor_of_the_program_with_the_number_of_the_region_s_survives_a_fork(node: Node) -> None:
    node.preload.append(str(node.build.program("libvgpu_fork_at_close.so")))
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    assert shell.stderr() == "the child has it\n"


def test_a_signal_handler_may_fork_while_the_region_is_being_locked(node: Node) -> None:
    """The handler's thread has the lock that a fork waits for."""
    node.preload.append(str(node.build.program("libvgpu_fork_in_lock.so")))
    code = f"""
import ctypes, signal
signal.alarm(60)
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
print(*(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) for size in ({65 * MIB}, {MIB})))
"""
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").split() == ["2", "0"]


def beside_the_library(node: Node, names: list[str]) -> list[str]:
    """Answers of a program with an empty environment; regions of these names lie beside the library."""
    folder = node.directory / "vgpu"
    folder.mkdir()
    library = shutil.copy(node.build.libvgpu, folder)
    for name in names:
        other = node.shell(
            CUDA_DEVICE_MEMORY_LIMIT_0="64m", CUDA_DEVICE_MEMORY_SHARED_CACHE=str(folder / name)
        ).start()
        assert other.leave() == 0
    done = subprocess.run(
        [str(node.build.program("vgpu_shell"))],
        input="init\nretain 0\ninfo\n",
        env={
            "LD_PRELOAD": library,
            "LD_LIBRARY_PATH": str(node.build.driver),
            "FAKEGPU_STATE": str(node.state),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split()


def test_a_program_without_environment_joins_the_region_beside_the_library(node: Node) -> None:
    """A11."""
    assert beside_the_library(node, ["a.cache"])[-1] == str(64 * MIB)
