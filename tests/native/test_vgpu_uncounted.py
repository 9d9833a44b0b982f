"""Memory that admission does not see at once: managed on a full card, residual, pools, graphs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from vgpu_harness import MIB, OUT_OF_MEMORY, SUCCESS, Node, Shell, read_usage, wait_until

from hami.protocol import region_layout as layout

GIB = 1024 * MIB


def device_word(region: Path, field: layout.Number) -> int:
    """A number of device 0 in the extension."""
    base = layout.EXTENSION_OFFSET + layout.Extension.devices.offset
    return field.read(region.read_bytes(), base)


def events(region: Path) -> list[tuple[int, int]]:
    """Type and value of every event of the ring."""
    data = region.read_bytes()
    found = []
    for i in range(layout.Extension.next_event.read(data, layout.EXTENSION_OFFSET)):
        event = layout.Extension.events.base(i, layout.EXTENSION_OFFSET)
        found.append(
            (layout.ExtensionEvent.type.read(data, event), layout.ExtensionEvent.value.read(data, event))
        )
    return found


# ---- oversubscription --------------------------------------------------------------------------------------


def test_a73_what_the_card_has_no_room_for_becomes_managed_memory(node: Node) -> None:
    """A73: limit 20 GiB on a card of 16 GiB."""
    shell = node.shell(CUDA_OVERSUBSCRIBE="true", CUDA_DEVICE_MEMORY_LIMIT_0="20g").start()
    blocks = [shell.must(f"alloc {6 * GIB}") for _ in range(3)]
    assert read_usage(node.region()) == {shell.process.pid: 18 * GIB}
    assert shell.ask(f"alloc {3 * GIB}")[0] == OUT_OF_MEMORY
    assert shell.ask("info") == (SUCCESS, 2 * GIB, 20 * GIB)
    assert device_word(node.region(), layout.ExtensionDevice.oversubscribed) == 6 * GIB
    assert (layout.EVENT_MANAGED_FALLBACK, 6 * GIB) in events(node.region())
    for block in blocks:
        shell.must(f"free {block}")
    assert read_usage(node.region()) == {shell.process.pid: 0}
    assert device_word(node.region(), layout.ExtensionDevice.oversubscribed) == 0


def test_a_pitched_block_falls_back_too(node: Node) -> None:
    shell = node.shell(CUDA_OVERSUBSCRIBE="true", CUDA_DEVICE_MEMORY_LIMIT_0="20g").start()
    shell.must(f"alloc {15 * GIB}")
    result, _, pitch = shell.ask(f"pitch 1000 {2 * 1024 * 1024}")
    assert (result, pitch) == (SUCCESS, 1024)
    assert device_word(node.region(), layout.ExtensionDevice.oversubscribed) == 2 * GIB


def test_without_the_variable_the_card_is_the_end(node: Node) -> None:
    """And the reservation of the failed call is taken back."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="20g").start()
    shell.must(f"alloc {12 * GIB}")
    assert shell.ask(f"alloc {6 * GIB}")[0] == OUT_OF_MEMORY
    assert shell.ask("info")[2] < 20 * GIB
    totals = layout.Extension.totals.read(node.region().read_bytes(), layout.EXTENSION_OFFSET, 0)
    assert totals == 12 * GIB


def test_managed_bytes_of_a_killed_process_are_not_counted_for_ever(node: Node) -> None:
    env = {"CUDA_OVERSUBSCRIBE": "true", "CUDA_DEVICE_MEMORY_LIMIT_0": "20g"}
    victim, other = node.shell(extra=env).start(), node.shell(extra=env).start()
    victim.must(f"alloc {15 * GIB}")
    victim.must(f"alloc {4 * GIB}")
    assert device_word(node.region(), layout.ExtensionDevice.oversubscribed) == 4 * GIB
    victim.kill()
    other.must(f"alloc {2 * GIB}")
    assert device_word(node.region(), layout.ExtensionDevice.oversubscribed) == 0


# ---- residual ----------------------------------------------------------------------------------------------


def with_modules(node: Node, policy: str, limit: str = "256m") -> Shell:
    """A process that holds 50 MiB which no hook sees."""
    node.settings["FAKEGPU_MODULE_KIB"] = str(50 * 1024)
    shell = node.shell(VGPU_CHARGE_RESIDUAL=policy, CUDA_DEVICE_MEMORY_LIMIT_0=limit).start()
    shell.must("kernel 1000")
    return shell


def residual(node: Node) -> int:
    return device_word(node.region(), layout.ExtensionDevice.residual)


def test_a96_residual_memory_is_reported(node: Node) -> None:
    """A96, policy `report`."""
    shells = [with_modules(node, "report") for _ in range(2)]
    wait_until(lambda: residual(node) == 100 * MIB)
    assert sum(read_usage(node.region()).values()) == 0
    shells[0].must(f"alloc {256 * MIB}")


def test_a96_residual_memory_is_charged(node: Node) -> None:
    """A96, policy `charge`: each process takes its own at its next hooked call."""
    shells = [with_modules(node, "charge") for _ in range(2)]
    wait_until(lambda: residual(node) == 100 * MIB)

    def charged() -> bool:
        for shell in shells:
            shell.ask("launch 1 1 32")
            shell.ask("info")
        return sum(read_usage(node.region()).values()) == 100 * MIB

    wait_until(charged)
    data = node.region().read_bytes()
    assert layout.V1Slot.used_module.read(data, layout.V1.procs.base(0)) == 50 * MIB
    assert shells[0].ask(f"alloc {157 * MIB}")[0] == OUT_OF_MEMORY
    shells[0].must(f"alloc {156 * MIB}")
    shells[0].must("reset 0")
    wait_until(lambda: sum(read_usage(node.region()).values()) == 50 * MIB)


def test_residual_memory_can_be_ignored(node: Node) -> None:
    shell = with_modules(node, "off")
    used = layout.V1Slot.monitorused
    wait_until(lambda: used.read(node.region().read_bytes(), layout.V1.procs.base(0)) >= 50 * MIB)
    assert residual(node) == 0
    shell.must(f"alloc {256 * MIB}")


def test_the_killer_ends_who_holds_most_of_what_was_never_asked_for(node: Node) -> None:
    """7.8: measured use above the limit and a tenth, only with both variables set."""
    node.settings["FAKEGPU_MODULE_KIB"] = str(50 * 1024)
    env = {"VGPU_CHARGE_RESIDUAL": "charge", "ACTIVE_OOM_KILLER": "1", "CUDA_DEVICE_MEMORY_LIMIT_0": "120m"}
    small, large = node.shell(extra=env).start(), node.shell(extra=env).start()
    small.must("kernel 1000")
    large.must("kernel 1000")
    large.must("kernel 1000")
    large.process.wait(timeout=100)
    assert large.process.returncode == -9
    small.must("launch 1 1 32")
    assert f"process {large.process.pid} " in small.stderr() + large.stderr()


def test_without_its_variable_nobody_is_killed(node: Node) -> None:
    """B52: off whatever HAMi's default says."""
    shell = with_modules(node, "charge", "20m")
    used = layout.V1Slot.monitorused
    wait_until(lambda: used.read(node.region().read_bytes(), layout.V1.procs.base(0)) >= 50 * MIB)
    time.sleep(5)
    shell.must("launch 1 1 32")


# ---- pools -------------------------------------------------------------------------------------------------

POOLS = f"""
from cuda.bindings import driver as cuda
MIB = {MIB}
def good(result):
    assert result[0] == 0, result[0]
    return result[1] if len(result) == 2 else result[1:]
good(cuda.cuInit(0))
device = good(cuda.cuDeviceGet(0))
context = good(cuda.cuDevicePrimaryCtxRetain(device))
good(cuda.cuCtxSetCurrent(context))
def pool(kind=cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE):
    props = cuda.CUmemPoolProps()
    props.allocType = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.location.type = kind
    props.location.id = 0
    return cuda.cuMemPoolCreate(props)
def take(pool, size):
    return cuda.cuMemAllocFromPoolAsync(size, pool, 0)
"""


def test_every_pool_counts_however_many_there_are(node: Node) -> None:
    """7.3: 200 pools of 32 MiB each."""
    code = (
        POOLS
        + """
pools = [good(pool()) for _ in range(200)]
blocks = [good(take(p, 1024)) for p in pools[:-1]]
print(int(take(pools[-1], 1024)[0]), len(blocks))
for p, b in zip(pools, blocks):
    good(cuda.cuMemFreeAsync(b, 0))
    good(cuda.cuMemPoolTrimTo(p, 0))
for p in pools:
    good(cuda.cuMemPoolDestroy(p))
print(good(cuda.cuMemAlloc(6368 * MIB)) is not None)
"""
    )
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="6368m").split() == ["2", "199", "True"]


def test_unused_memory_of_pools_makes_room_for_plain_memory(node: Node) -> None:
    """7.8: before a refusal the process trims its own pools."""
    code = (
        POOLS
        + """
mine = good(pool())
block = good(take(mine, 40 * MIB))
good(cuda.cuMemPoolSetAttribute(mine, cuda.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                                cuda.cuuint64_t(1 << 40)))
good(cuda.cuMemFreeAsync(block, 0))
good(cuda.cuCtxSynchronize())
reserved = cuda.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
print(int(good(cuda.cuMemPoolGetAttribute(mine, reserved))))
print(int(cuda.cuMemAlloc(60 * MIB)[0]))
"""
    )
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").split() == [str(64 * MIB), "0"]


def test_a_refused_process_makes_the_others_trim_their_pools(node: Node) -> None:
    """7.8: at their next hooked call."""
    holder = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    block = holder.must(f"async {40 * MIB}")
    holder.must(f"freeasync {block}")
    assert read_usage(node.region()) == {holder.process.pid: 64 * MIB}
    other = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    assert other.ask(f"alloc {60 * MIB}")[0] == OUT_OF_MEMORY
    holder.must("alloc 512")
    other.must(f"alloc {60 * MIB}")


@pytest.mark.parametrize("kind", ["HOST", "HOST_NUMA"])
def test_a_pool_of_host_memory_is_not_counted(node: Node, kind: str) -> None:
    """7.2: never refused, never charged; the driver's answer is given back whatever it is."""
    code = (
        POOLS
        + f"""
answer, mine = pool(cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_{kind})
result = int(take(mine, 65 * MIB)[0]) if answer == 0 else int(answer)
print(result)
"""
    )
    limited = node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m")
    assert limited == node.python(code, container="b", LD_PRELOAD="")
    assert limited.strip() != str(OUT_OF_MEMORY)


def test_memory_nodes_of_graphs_are_counted_until_they_are_trimmed(node: Node) -> None:
    """7.2: what the device keeps for graphs, as a pool."""
    code = (
        POOLS
        + """
import json, sys
graph = good(cuda.cuGraphCreate(0))
parameters = cuda.CUDA_MEM_ALLOC_NODE_PARAMS()
parameters.poolProps.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
parameters.bytesize = 40 * MIB
good(cuda.cuGraphAddMemAllocNode(graph, None, 0, parameters))
executable = good(cuda.cuGraphInstantiate(graph, 0))
cuda.cuGraphLaunch(executable, 0)
print(good(cuda.cuMemGetInfo())[0] // MIB, int(cuda.cuMemAlloc(65 * MIB)[0]))
good(cuda.cuDeviceGraphMemTrim(device))
print(int(cuda.cuMemAlloc(65 * MIB)[0]), good(cuda.cuMemGetInfo())[0] // MIB)
"""
    )
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="128m").split() == ["64", "2", "0", "63"]
