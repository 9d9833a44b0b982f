"""Unmodified Python clients under libvgpu.so: nvidia-ml-py and cuda-bindings."""

from __future__ import annotations

import json
import sys

import pytest
from vgpu_harness import MIB, Node, Shell, wait_until

GIB = 1024 * MIB

NVML = """
import json, pynvml
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
info = pynvml.nvmlDeviceGetMemoryInfo(card)
second = pynvml.nvmlDeviceGetMemoryInfo(card, version=pynvml.nvmlMemory_v2)
print(json.dumps({
    "v1": [info.total, info.used, info.free],
    "v2": [second.total, second.used, second.free, second.reserved],
    "processes": [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(card)],
}))
"""

DRIVER = """
import json, os
from cuda.bindings import driver as cuda
def good(answer):
    assert answer[0] == cuda.CUresult.CUDA_SUCCESS, answer
    return answer[1:]
good(cuda.cuInit(0))
(context,) = good(cuda.cuDevicePrimaryCtxRetain(0))
good(cuda.cuCtxSetCurrent(context))
(block,) = good(cuda.cuMemAlloc(100 << 20))
free, total = good(cuda.cuMemGetInfo())
refused = int(cuda.cuMemAlloc(1 << 30)[0])
asynchronous = int(cuda.cuMemAllocAsync(1 << 30, 0)[0])
good(cuda.cuMemFree(block))
after, _ = good(cuda.cuMemGetInfo())
print(json.dumps([free, total, refused, asynchronous, after]))
"""


def test_nvml_shows_the_limit_and_the_container_s_own_use(node: Node) -> None:
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="4g").start()
    node.shell("neighbour").start().must(f"alloc {2 * GIB}")
    shell.must(f"alloc {GIB}")
    seen = json.loads(node.python(NVML))
    assert seen["v1"] == [4 * GIB, GIB, 3 * GIB]
    assert seen["v2"] == [4 * GIB, GIB, 3 * GIB, 0]
    assert seen["processes"] == [shell.process.pid]


def test_nvml_never_shows_more_use_than_the_limit(node: Node) -> None:
    """A43: the context is larger than the limit."""
    node.settings["FAKEGPU_CONTEXT_MIB"] = "400"
    node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="300m").start()
    assert json.loads(node.python(NVML))["v1"] == [300 * MIB, 300 * MIB, 0]


def test_nvml_without_a_limit_is_the_driver_s(node: Node) -> None:
    node.shell().start().must(f"alloc {GIB}")
    limited = json.loads(node.python(NVML))["v1"]
    assert limited == json.loads(node.python(NVML, LD_PRELOAD=""))["v1"]


@pytest.mark.parametrize("convention", ["host", "namespace"])
def test_an_nvml_client_takes_no_slot_and_sees_no_foreign_process(node: Node, convention: str) -> None:
    """4.5, A45."""
    node.settings["FAKEGPU_PID_CONVENTION"] = convention
    node.shell("neighbour").start()
    shell = node.shell().start()
    assert json.loads(node.python(NVML))["processes"] == [shell.process.pid]
    data = node.region().read_bytes()
    assert data.count((shell.process.pid).to_bytes(4, "little")) >= 1
    assert json.loads(node.python(NVML, VGPU_NVML_PROCESSES="host"))["processes"] != [shell.process.pid]


SCARCE = """
import ctypes, os, pynvml, resource
nvml = ctypes.CDLL("libnvidia-ml.so.1")
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
if os.fork() != 0:
    os._exit(os.wait()[1])
count, records = ctypes.c_uint(64), (ctypes.c_char * (64 * 32))()
resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
nvml.nvmlDeviceGetComputeRunningProcesses_v3(card, ctypes.byref(count), records)
print(set(bytes(records)) == {0})
"""


def test_who_has_no_descriptor_for_the_region_is_not_shown_other_tenants(node: Node) -> None:
    """A forked child opens the region anew."""
    node.shell("neighbour").start()
    assert node.python(SCARCE).strip() == "True"


RAW = """
import ctypes, json, pynvml
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
def call(name, *arguments):
    return pynvml._nvmlGetFunctionPointer("nvmlDeviceGet" + name)(card, *arguments)
"""
SAMPLES = (
    RAW
    + """
def sampled(count, room):
    count, records = ctypes.c_uint(count), (pynvml.c_nvmlProcessUtilizationSample_t * 4)()
    where = records if room else None
    result = call("ProcessUtilization", where, ctypes.byref(count), ctypes.c_ulonglong(0))
    return result, count.value, [r.pid for r in records]
def informed(count, room, version=pynvml.ProcessesUtilizationInfo_v1):
    records = (pynvml.c_nvmlProcessUtilizationInfo_v1_t * 4)()
    asked = pynvml.c_nvmlProcessesUtilizationInfo_v1_t(version, count, 0, records if room else None)
    result = call("ProcessesUtilizationInfo", ctypes.byref(asked))
    return result, asked.processSamplesCount, [r.pid for r in records]
print(json.dumps([ask(*room) for ask in (sampled, informed) for room in ((0, False), (1, True), (4, True))]
                 + [informed(4, True, pynvml.ProcessesUtilizationInfo_v1 + (1 << 24))]))
"""
)


def test_samples_show_no_other_tenant(node: Node) -> None:
    """8.3, also where there is room for fewer records than the driver has."""
    neighbours = [node.shell("neighbour").start() for _ in range(2)]
    own = node.shell().start()
    node.shell().start()

    def flood(shell: Shell) -> None:
        shell.must("kernel 10000000")
        assert shell.process.stdin is not None
        shell.process.stdin.write("launchfor 600000 10 128\n")
        shell.process.stdin.flush()

    def seen(**env: str) -> list[object]:
        answers: list[object] = json.loads(node.python(SAMPLES, **env))
        return answers

    def all_busy(shells: list[Shell]) -> bool:
        answers = seen(VGPU_NVML_PROCESSES="host")
        return all(shell.process.pid in answers[i][2] for shell in shells for i in (2, 5))  # type: ignore[index]

    nobody, refused = [0, 0, 0, 0], [25, 4, [0, 0, 0, 0]]
    for shell in neighbours:
        flood(shell)
    wait_until(lambda: all_busy(neighbours))
    assert seen() == [[6, 0, nobody]] * 6 + [refused]

    flood(own)
    mine = [own.process.pid, 0, 0, 0]
    one = [[7, 2, nobody], [0, 1, mine], [0, 1, mine]]  # room for the idle one too, which may begin
    wait_until(lambda: all_busy([*neighbours, own]))
    wait_until(lambda: seen() == [*one, *one, refused])


LISTS = """
import json, pynvml
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
def stats(ask, pid):
    try:
        return ask(card, pid).maxMemoryUsage
    except pynvml.NVMLError_NotFound:
        return None
asks = [pynvml.nvmlDeviceGetAccountingStats, pynvml.nvmlDeviceGetAccountingStats_v2]
version = pynvml.nvmlProcessDetailList_v1
details = [pynvml.nvmlDeviceGetRunningProcessDetailList(card, version, mode) for mode in range(4)]
print(json.dumps({{
    "details": [[[p.pid, p.usedGpuMemory] for p in found] for found in details],
    "accounted": pynvml.nvmlDeviceGetAccountingPids(card),
    "stats": [[stats(ask, pid) for ask in asks] for pid in {pids}],
}}))
"""


@pytest.mark.parametrize("convention", ["host", "namespace"])
def test_no_list_of_processes_shows_other_tenants(node: Node, convention: str) -> None:
    """8.3: the details of processes and the accounting name the container's own ones alone."""
    node.settings["FAKEGPU_PID_CONVENTION"] = convention
    neighbour, shell = node.shell("neighbour").start(), node.shell().start()
    neighbour.must(f"alloc {2 * GIB}")
    shell.must(f"alloc {GIB}")
    own, other = shell.process.pid, neighbour.process.pid
    code = LISTS.format(pids=[own, other])
    held = [own, GIB]
    assert json.loads(node.python(code)) == {
        "details": [[held], [], [], [held]],
        "accounted": [own],
        "stats": [[GIB, GIB], [None, None]],
    }
    everybody = json.loads(node.python(code, VGPU_NVML_PROCESSES="host"))
    assert set(everybody["accounted"]) == {own, other}
    assert everybody["stats"] == [[GIB, GIB], [2 * GIB, 2 * GIB]]


NAMES = """
import json, os, sys, pynvml
pynvml.nvmlInit()
def name(pid):
    try:
        return pynvml.nvmlSystemGetProcessName(pid)
    except pynvml.NVMLError as error:
        return error.value
print(json.dumps([name(os.getpid()), name(1 << 22), name(0), sys.executable]))
"""


def test_the_name_of_a_process_is_the_one_that_the_container_shows(node: Node) -> None:
    """8.3. With the PID namespace of the container a PID means another process to the driver, or none."""
    own, absent, nobody, executable = json.loads(node.python(NAMES))
    assert own in (executable, sys.executable)
    assert (absent, nobody) == (6, 6)


LITTLE_ROOM = (
    RAW
    + """
def details(version, count, room):
    records = (pynvml.c_nvmlProcessDetail_v1_t * 4)()
    asked = pynvml.c_nvmlProcessDetailList_v1_t(version, 0, count, records if room else None)
    result = call("RunningProcessDetailList", ctypes.byref(asked))
    return result, asked.numProcArrayEntries, [r.pid for r in records]
def accounted(count, room):
    count, pids = ctypes.c_uint(count), (ctypes.c_uint * 4)()
    result = call("AccountingPids", ctypes.byref(count), pids if room else None)
    return result, count.value, list(pids)
good = pynvml.nvmlProcessDetailList_v1
print(json.dumps([details(good, 0, False), details(good, 1, True), details(good + (1 << 24), 4, True),
                  accounted(0, False), accounted(1, True)]))
"""
)


def test_lists_ask_for_the_room_of_the_own_records_alone(node: Node) -> None:
    node.shell("neighbour").start()
    own = {node.shell().start().process.pid for _ in range(2)}
    answers = json.loads(node.python(LITTLE_ROOM))
    assert [answer[:2] for answer in answers] == [[7, 2], [7, 2], [25, 4], [7, 2], [7, 2]]
    assert {pid for answer in answers for pid in answer[2]} <= {0} | own


def test_a_list_that_does_not_fit_asks_for_more_room(node: Node) -> None:
    """A46: capacity 0 and NULL."""
    node.shell().start()
    code = """
import ctypes, pynvml
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
count = ctypes.c_uint(0)
ask = ctypes.CDLL("libnvidia-ml.so.1").nvmlDeviceGetComputeRunningProcesses_v3
print(ask(card, ctypes.byref(count), None), count.value)
"""
    assert node.python(code).split() == ["7", "1"]


def test_nvml_that_failed_once_is_asked_again(node: Node) -> None:
    """A69."""
    code = """
import ctypes, pynvml
print(ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2())
pynvml.nvmlInit()
print(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)
"""
    out = node.python(code, FAKEGPU_FAULTS="nvmlInit_v2:1=9,nvmlInit_v2:2=9", CUDA_DEVICE_MEMORY_LIMIT_0="1g")
    assert out.split() == ["9", str(GIB)]


def test_cuda_bindings_meet_the_limit(node: Node) -> None:
    seen = json.loads(node.python(DRIVER, CUDA_DEVICE_MEMORY_LIMIT_0="512m"))
    assert seen == [412 * MIB, 512 * MIB, 2, 2, 512 * MIB]


LOOKUPS = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
real = cuda.cuGetProcAddress_v2
maps = [line.split() for line in open("/proc/self/maps")]
def owner(at):
    for line in maps:
        low, high = (int(x, 16) for x in line[0].split("-"))
        if low <= at < high:
            return line[-1].rsplit("/", 1)[-1]
    return None
out = []
for name, version, flags in json.loads({requests!r}):
    at, status = ctypes.c_void_p(), ctypes.c_int(-1)
    result = real(name.encode(), ctypes.byref(at), version, ctypes.c_uint64(flags), ctypes.byref(status))
    out.append([result, status.value, owner(at.value) if at.value else None, at.value])
print(json.dumps(out))
"""


def look_up(node: Node, requests: list[tuple[str, int, int]], **env: str) -> list[list[object]]:
    answer: list[list[object]] = json.loads(node.python(LOOKUPS.format(requests=json.dumps(requests)), **env))
    return answer


def test_versions_and_streams_select_the_hook(node: Node) -> None:
    """A31, A33: each variant is a function of its own."""
    requests = [("cuMemAlloc", version, 0) for version in (2000, 3020, 12000)]
    requests += [("cuLaunchKernel", 7000, flags) for flags in (0, 1, 2)]
    rows = look_up(node, requests)
    base, second, newer, plain, legacy, thread = rows
    assert {row[2] for row in rows} == {"libvgpu.so"}
    assert base[3] != second[3] == newer[3]
    assert plain[3] == legacy[3] != thread[3]


def test_answers_that_are_not_hooks_are_exactly_the_driver_s(node: Node) -> None:
    """A32, A34."""
    requests = [("", 0, 0), ("noSuch", 13000, 0), ("cuMemAlloc", 1, 0), ("cuMemcpyHtoD", 3020, 0),
                ("cuMemPrefetchAsync", 8000, 0), ("cuGetExportTable", 3000, 0)]  # fmt: skip
    ours, plain = look_up(node, requests), look_up(node, requests, LD_PRELOAD="")
    assert [row[:3] for row in ours] == [row[:3] for row in plain]


def test_the_look_up_function_finds_itself_by_version(node: Node) -> None:
    first, second = look_up(node, [("cuGetProcAddress", 11030, 0), ("cuGetProcAddress", 12000, 0)])
    assert first[2] == second[2] == "libvgpu.so"
    assert first[3] != second[3]


def test_a_wrong_structure_version_is_the_driver_s_to_refuse(node: Node) -> None:
    """A44."""
    code = """
import ctypes, pynvml
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
info = (ctypes.c_uint64 * 5)(0, 7, 7, 7, 7)
print(ctypes.CDLL("libnvidia-ml.so.1").nvmlDeviceGetMemoryInfo_v2(card, info), list(info))
"""
    env = {"CUDA_DEVICE_MEMORY_LIMIT_0": "1g"}
    assert node.python(code, **env) == node.python(code, **env, LD_PRELOAD="")


def test_the_export_table_is_the_driver_s_and_starts_nothing(node: Node) -> None:
    """A36."""
    code = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
table = ctypes.c_void_p()
print(cuda.cuGetExportTable(ctypes.byref(table), b"0123456789abcdef"), table.value)
"""
    assert node.python(code) == node.python(code, LD_PRELOAD="")
    assert not node.region().exists()
