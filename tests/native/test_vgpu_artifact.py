"""What libvgpu.so is as a file, and that it is invisible to programs without CUDA."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from vgpu_harness import FORBIDDEN, MIB, NativeBuild, Node, declared_symbols

ROOT = Path(__file__).resolve().parents[2]
VGPU = ROOT / "native" / "vgpu"


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("generator", ["gen_hooks.py", "gen_region.py"])
def test_generated_files_are_up_to_date(generator: str) -> None:
    done = subprocess.run(
        [sys.executable, str(VGPU / "gen" / generator), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_exactly_the_declared_symbols_are_exported(native: NativeBuild) -> None:
    exported = {
        line.split()[-1] for line in output("nm", "-D", "--defined-only", str(native.libvgpu)).splitlines()
    }
    assert exported == declared_symbols()


def test_libc_is_the_only_dependency(native: NativeBuild) -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d", str(native.libvgpu)))
    assert [name for name in needed if not re.match(r"lib(asan|ubsan|tsan)", name)] == ["libc.so.6"]


def test_the_library_has_no_versions_no_text_relocations_and_no_executable_stack(native: NativeBuild) -> None:
    """A named version node would leave dlsym unhooked without a word."""
    sections = output("readelf", "-SW", str(native.libvgpu))
    assert ".gnu.version_d" not in sections
    assert "TEXTREL" not in output("readelf", "-d", str(native.libvgpu))
    stack = [
        line for line in output("readelf", "-lW", str(native.libvgpu)).splitlines() if "GNU_STACK" in line
    ]
    assert len(stack) == 1
    assert "RWE" not in stack[0]


def test_nothing_runs_when_the_library_is_loaded(native: NativeBuild) -> None:
    """The only entry of the start-up array is the compiler's own frame_dummy."""
    names = output("nm", str(native.libvgpu))
    assert not re.search(r"_GLOBAL__sub_I|constructor", names)
    size = re.search(r"\(INIT_ARRAYSZ\)\s+(\d+)", output("readelf", "-d", str(native.libvgpu)))
    assert size is None or int(size.group(1)) <= 8 or "__asan" in names or "__ubsan" in names


def test_thread_local_storage_is_small(native: NativeBuild) -> None:
    tls = [
        line
        for line in output("readelf", "-lW", str(native.libvgpu)).splitlines()
        if line.strip().startswith("TLS")
    ]
    assert len(tls) == 1
    assert int(tls[0].split()[5], 16) <= 64


def test_the_library_never_ends_or_changes_its_process(native: NativeBuild) -> None:
    used = {
        line.split()[-1].split("@")[0] for line in output("nm", "-D", "-u", str(native.libvgpu)).splitlines()
    }
    assert not used & FORBIDDEN


def test_the_filter_behind_dlsym_is_not_instrumented(native: NativeBuild) -> None:
    """An instrumented dlsym crashes the sanitizers at start."""
    code = output("objdump", "-d", "--no-show-raw-insn", str(native.libvgpu))
    body = re.search(r"<vg_dlsym_filter>:\n(.*?)\n\n", code, re.S)
    assert body is not None
    assert "__asan" not in body.group(1)
    assert "__ubsan" not in body.group(1)


def test_a_program_of_today_reaches_our_dlsym(native: NativeBuild, node: Node) -> None:
    """A26: this interpreter asks for dlsym of glibc 2.34 or newer; ctypes goes through it."""
    code = (
        "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); me = ctypes.CDLL(None);"
        "at = ctypes.cast(cuda.cuMemAlloc_v2, ctypes.c_void_p).value;"
        "lines = [l.split() for l in open('/proc/self/maps')];"
        "print(next(l[-1] for l in lines if int(l[0].split('-')[0], 16) <= at < int(l[0].split('-')[1], 16)))"
    )
    assert node.python(code).strip() == str(native.libvgpu)


def test_a_function_that_is_not_hooked_is_the_drivers_own(native: NativeBuild, node: Node) -> None:
    """A27."""
    code = (
        "import ctypes; cuda = ctypes.CDLL('libcuda.so.1');"
        "at = ctypes.cast(cuda.cuMemcpyHtoD_v2, ctypes.c_void_p).value;"
        "lines = [l.split() for l in open('/proc/self/maps')];"
        "print(next(l[-1] for l in lines if int(l[0].split('-')[0], 16) <= at < int(l[0].split('-')[1], 16)))"
    )
    assert node.python(code).strip() == str(native.driver / "libcuda.so.1")


def test_a_symbol_that_no_library_has_stays_unknown(node: Node) -> None:
    """A28: feature probing stays truthful."""
    code = (
        "import ctypes\n"
        "other = ctypes.CDLL('libc.so.6')\n"
        "for name in ('cuMemAllocAsync', 'cuNoSuch', 'nvmlNoSuch', 'cudnnCreate', 'curl_easy_init'):\n"
        "    try:\n        getattr(other, name)\n"
        "    except AttributeError:\n        continue\n"
        "    print(name)\n"
    )
    assert node.python(code) == ""


def test_a_shell_sees_nothing_of_the_library(node: Node) -> None:
    """A37, A38: no output, no file, no thread; the driver is not there at all."""
    done = node.run("/bin/sh", "-c", "exit 7", LD_LIBRARY_PATH="", CUDA_DEVICE_MEMORY_LIMIT_0="1m")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    assert not node.region().exists()


def test_a_program_that_loads_the_driver_and_does_not_start_it_leaves_no_trace(node: Node) -> None:
    code = (
        "import ctypes, os; ctypes.CDLL('libcuda.so.1').cuMemAlloc_v2;"
        "print(len(os.listdir('/proc/self/task')))"
    )
    assert node.python(code).strip() == "1"
    assert not node.region().exists()


def test_a_missing_driver_is_reported_as_the_driver_would(node: Node) -> None:
    """4.4: a hook without a driver function never jumps through NULL."""
    code = "import ctypes; print(ctypes.CDLL(None).cuInit(0), ctypes.CDLL(None).nvmlInit_v2())"
    assert node.python(code, LD_LIBRARY_PATH="").split() == ["3", "12"]


def test_a_statically_linked_program_is_unharmed(native: NativeBuild, node: Node) -> None:
    done = node.run(str(native.program("vgpu_static")), CUDA_DEVICE_MEMORY_LIMIT_0="1m")
    assert (done.returncode, done.stderr) == (5, "")


def test_next_lookups_of_other_preloads_keep_their_meaning(native: NativeBuild, node: Node) -> None:
    """A30: RTLD_NEXT is relative to the caller and does not change when it is asked again."""
    env = node.environment()
    preload = f"{native.libvgpu}:{native.program('libvgpu_next.so')}"
    done = node.run("/bin/true", LD_PRELOAD=f"{env['LD_PRELOAD'].removesuffix(str(native.libvgpu))}{preload}")
    assert (done.returncode, done.stderr) == (0, "next ok\n")


def test_stdout_and_stderr_stay_empty_in_normal_use(node: Node) -> None:
    """A75."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m", CUDA_DEVICE_SM_LIMIT="50").start()
    shell.must(f"alloc {MIB}")
    assert shell.leave() == 0
    assert shell.stderr() == ""


def test_signal_handlers_masks_and_the_umask_stay_as_they_are(node: Node) -> None:
    """A58, and 3.4: the umask of the process is never touched."""
    code = """
import ctypes, os, signal
signal.signal(signal.SIGUSR1, lambda *_: None)
def state():
    rows = (line.split() for line in open("/proc/self/status"))
    found = {row[0]: row[1] for row in rows if row[0] in ("Umask:", "SigCgt:", "SigIgn:", "SigBlk:")}
    # libc itself takes signals 32 and 33 when it makes the first thread
    return {key: int(value, 16) & 0x7fffffff for key, value in found.items()}, dict(os.environ)
cuda, context, before = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), state()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
print(before == state())
"""
    assert node.python(code) == "True\n"


def test_errno_survives_the_hooks(node: Node) -> None:
    code = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1", use_errno=True)
context, block = ctypes.c_void_p(), ctypes.c_uint64()
results = []
for call in (
    lambda: cuda.cuInit(0),
    lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
    lambda: cuda.cuCtxSetCurrent(context),
    lambda: cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(65 << 20)),
    lambda: cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(1 << 20)),
    lambda: cuda.cuMemFree_v2(block),
):
    ctypes.set_errno(77)
    results.append((call(), ctypes.get_errno()))
print(json.dumps(results))
"""
    env = {"CUDA_DEVICE_MEMORY_LIMIT_0": "64m", "LIBCUDA_LOG_LEVEL": "0"}
    answers = node.python(code, **env)
    plain = node.python(code, LD_PRELOAD="", **env)
    assert [e for _, e in json.loads(answers)] == [e for _, e in json.loads(plain)]
    assert [r for r, _ in json.loads(answers)] == [0, 0, 0, 2, 0, 0]
