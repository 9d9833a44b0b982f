"""Faults of the field in region, locks, processes and memory accounting (libvgpu.md 16.2, 16.3)."""

from __future__ import annotations

from vgpu_harness import MIB, OUT_OF_MEMORY, SUCCESS, Node, poke, read_usage

from hami.protocol import region_layout as layout


def test_b20_b21_semaphores_that_a_killed_process_holds_are_nobody_s_concern(node: Node) -> None:
    """Both at 0 with an owner that does not exist: they are never waited on."""
    node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start().leave()
    region = node.region()
    poke(region, layout.V1.sem.offset, bytes(8))
    poke(region, layout.V1.sem_postinit.offset, bytes(8))
    poke(region, layout.V1.owner_pid.offset, (2**22 - 1).to_bytes(8, "little"))
    shell = node.shell().start()
    shell.must(f"alloc {64 * MIB}")
    assert shell.ask("alloc 1")[0] == OUT_OF_MEMORY
    assert region.read_bytes()[layout.V1.sem.offset :][:8] == bytes(8)


def test_b24_b25_an_odd_sequence_lock_stops_no_reader_and_does_not_stay(node: Node) -> None:
    """A writer of HAMi that was killed in the middle leaves it odd."""
    shell, other = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start(), node.shell().start()
    at = layout.V1.procs.base(0) + layout.V1Slot.seqlock.offset
    poke(node.region(), at, (7).to_bytes(8, "little"))
    assert other.ask("info") == (SUCCESS, 64 * MIB, 64 * MIB)
    other.must(f"alloc {MIB}")
    for command in (f"alloc {MIB}", f"alloc {MIB}", "alloc 512"):
        shell.must(command)
        assert layout.V1Slot.seqlock.read(node.region().read_bytes(), layout.V1.procs.base(0)) % 2 == 0


def test_b32_a_process_that_joins_does_not_look_like_a_launch(node: Node) -> None:
    node.shell().start().leave()
    poke(node.region(), layout.V1.last_kernel_time.offset, (1234).to_bytes(8, "little"))
    node.shell().start().leave()
    assert layout.V1.last_kernel_time.read(node.region().read_bytes()) == 1234


def test_b34_more_cards_than_the_region_has_places(node: Node) -> None:
    """The 17th and later are not limited and overwrite nothing."""
    node.settings["FAKEGPU_DEVICES"] = "20"
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT="64m").start(15)
    assert shell.ask(f"alloc {65 * MIB}")[0] == OUT_OF_MEMORY
    shell.must(f"alloc {64 * MIB}")
    shell.must("retain 18")
    shell.must(f"alloc {65 * MIB}")
    data = node.region().read_bytes()
    assert layout.V1.device_count.read(data) == 16
    assert [layout.V1.limit.read(data, 0, d) for d in range(16)] == [64 * MIB] * 16
    assert [layout.V1.sm_limit.read(data, 0, d) for d in range(16)] == [100] * 16
    assert [layout.V1Slot.used_total.read(data, layout.V1.procs.base(0), d) for d in (14, 15)] == [
        0,
        64 * MIB,
    ]


def test_b39_a_failed_call_in_stream_order_leaves_no_charge(node: Node) -> None:
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m", FAKEGPU_FAULTS="cuMemAllocAsync:*=999").start()
    for _ in range(10):
        assert shell.ask(f"async {40 * MIB}")[0] == 999
    shell.must(f"alloc {64 * MIB}")
    assert read_usage(node.region()) == {shell.process.pid: 64 * MIB}


def test_b41_without_a_context_the_driver_answers_and_physical_memory_counts_where_it_is(node: Node) -> None:
    node.settings["FAKEGPU_DEVICES"] = "2"
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT="64m")
    shell.must("init")
    assert shell.ask(f"alloc {MIB}")[0] == 201
    shell.must(f"create {32 * MIB} 1 1")
    assert shell.ask(f"create {64 * MIB} 1 1")[0] == OUT_OF_MEMORY
    assert read_usage(node.region()) == {shell.process.pid: 0}
    assert read_usage(node.region(), 1) == {shell.process.pid: 32 * MIB}


def test_b44_a_second_process_sees_what_the_first_has_left(node: Node) -> None:
    first = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    first.must(f"alloc {40 * MIB}")
    assert node.shell().start().ask("info") == (SUCCESS, 24 * MIB, 64 * MIB)


def test_b49_what_programs_ask_about_pointers_and_host_memory_is_not_hooked(node: Node) -> None:
    code = """
import ctypes
libc = ctypes.CDLL(None)
libc.dlsym.restype = ctypes.c_void_p
names = ("cuPointerGetAttribute", "cuPointerGetAttributes", "cuMemHostAlloc", "cuMemAllocHost_v2",
         "cuMemHostRegister_v2", "cuIpcOpenMemHandle_v2", "cuImportExternalMemory", "cuMemcpyDtoH_v2")
driver = ctypes.CDLL("libcuda.so.1")
maps = [line.split() for line in open("/proc/self/maps") if "libvgpu" in line]
def ours(name):
    at = libc.dlsym(ctypes.c_void_p(driver._handle), name.encode())
    assert at, name
    return any(int(r[0].split("-")[0], 16) <= at < int(r[0].split("-")[1], 16) for r in maps)
print([name for name in (*names, "cuMemAlloc_v2") if ours(name)])
"""
    assert node.python(code) == "['cuMemAlloc_v2']\n"


def test_b50_a_context_that_could_not_be_made_is_not_charged(node: Node) -> None:
    node.settings["FAKEGPU_CONTEXT_MIB"] = "100"
    shell = node.shell(FAKEGPU_FAULTS="cuDevicePrimaryCtxRetain:1=2")
    shell.must("init")
    assert shell.ask("retain 0")[0] == 2
    assert read_usage(node.region()) == {shell.process.pid: 0}
    shell.must("retain 0")
    assert read_usage(node.region()) == {shell.process.pid: 100 * MIB}


def test_b57_a_forked_child_that_frees_its_parent_s_memory_changes_no_number(node: Node) -> None:
    code = f"""
import ctypes, os
cuda = ctypes.CDLL("libcuda.so.1")
context, block = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t({48 * MIB})) == 0
child = os.fork()
if child == 0:
    os._exit(cuda.cuMemFree_v2(block) == 0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t({17 * MIB})))
print(cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t({16 * MIB})))
"""
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").split() == ["0", "2", "0"]


def test_b59_a_card_whose_memory_nvml_does_not_know_has_the_limit(node: Node) -> None:
    code = """
import ctypes
nvml = ctypes.CDLL("libnvidia-ml.so.1")
device, memory = ctypes.c_void_p(), (ctypes.c_uint64 * 3)()
assert nvml.nvmlInit_v2() == 0
assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
print(nvml.nvmlDeviceGetMemoryInfo(device, memory), list(memory))
"""
    faults = {"FAKEGPU_FAULTS": "nvmlDeviceGetMemoryInfo:*=3", "FAKEGPU_CONTEXT_MIB": "0"}
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    shell.must(f"alloc {16 * MIB}")
    assert node.python(code, **faults) == f"0 [{64 * MIB}, {48 * MIB}, {16 * MIB}]\n"
