"""Core limits of libvgpu.so, measured by the simulated card's own engine time."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
from vgpu_harness import SUCCESS, Node, Shell, wait_until

from hami.protocol import region_layout as layout

WINDOW_MS = 2500
BURST_S = 0.5


@dataclass(frozen=True)
class Spent:
    """Seconds of the card that a container got, and of the wall clock that it took."""

    card: float
    wall: float

    def is_about(self, percent: int) -> bool:
        """The bucket's contract: an idle bucket allows half a second of wall time at once, then the limit.

        It holds on a busy machine too, where the program may be late: then it gets less, never more.
        """
        limit = percent / 100
        return limit * self.wall / 3 < self.card < limit * (self.wall + BURST_S) * 1.15 + 0.05

    def is_unlimited(self) -> bool:
        return self.card > 0.4 * self.wall


def spend(node: Node, shells: list[Shell], container: str = "a") -> Spent:
    """What the container gets while all of `shells` launch without a pause."""
    before, start = node.engine_ns().get(container, 0), time.monotonic()
    for shell in shells:
        assert shell.process.stdin is not None
        shell.process.stdin.write(f"launchfor {WINDOW_MS} 10 128\n")
        shell.process.stdin.flush()
    for shell in shells:
        assert shell.process.stdout is not None
        assert shell.process.stdout.readline().split()[0] == str(SUCCESS)
    return Spent((node.engine_ns()[container] - before) / 1e9, time.monotonic() - start)


def launcher(
    node: Node, container: str = "a", *, ns: int = 100_000, extra: dict[str, str] | None = None, **env: str
) -> Shell:
    shell = node.shell(container, extra={**(extra or {}), **env}).start()
    shell.must(f"kernel {ns}")
    return shell


@pytest.mark.parametrize("ns", [10_000, 100_000, 5_000_000])
@pytest.mark.parametrize("limit", [20, 50])
def test_the_card_spends_about_the_limit_on_the_container(node: Node, limit: int, ns: int) -> None:
    """A59."""
    spent = spend(node, [launcher(node, ns=ns, CUDA_DEVICE_SM_LIMIT=str(limit))])
    assert spent.is_about(limit), spent


def test_a_program_that_never_synchronises_has_few_launches_under_way(node: Node) -> None:
    """A130: the driver's own queue, at its longest."""
    spend(node, [launcher(node, ns=10_000_000, CUDA_DEVICE_SM_LIMIT="30")])
    (process,) = node.driver_state()["processes"]
    assert 1 < process["on"][0]["most_queued"] <= 8


def test_threads_that_are_cancelled_while_they_wait_leave_the_limit_in_force(node: Node) -> None:
    """What they were to be measured by is there for others afterwards."""
    shell = launcher(node, ns=5_000_000, CUDA_DEVICE_SM_LIMIT="20")
    shell.must("launchfor 1500 10 128")
    shell.must("sync")
    shell.must("cancel 8 0")
    shell.must("kernel 5000001")
    spent = spend(node, [shell])
    assert spent.is_about(20), spent


def test_two_processes_of_a_container_share_the_limit(node: Node) -> None:
    """A59."""
    shells = [launcher(node, CUDA_DEVICE_SM_LIMIT="30") for _ in range(2)]
    spent = spend(node, shells)
    assert spent.is_about(30), spent


def test_two_containers_get_their_own_shares(node: Node) -> None:
    """9.6: a neighbour stretches what is measured; the factor from NVML corrects it."""
    one = launcher(node, "a", ns=2_000_000, CUDA_DEVICE_SM_LIMIT="20")
    other = launcher(node, "b", ns=2_000_000, CUDA_DEVICE_SM_LIMIT="60")
    assert other.process.stdin is not None
    other.process.stdin.write("launchfor 6000 10 128\n")
    other.process.stdin.flush()
    one.must("launchfor 2500 10 128")
    spent = spend(node, [one])
    assert spent.is_about(20), spent
    device = layout.EXTENSION_OFFSET + layout.Extension.devices.offset
    factor = layout.ExtensionDevice.g.read(node.region("a").read_bytes(), device) / layout.G_ONE
    assert 1 / 64 <= factor < 0.95


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"CUDA_DEVICE_SM_LIMIT": "0"},
        {"GPU_CORE_UTILIZATION_POLICY": "disable", "CUDA_DEVICE_SM_LIMIT": "20"},
    ],
)
def test_without_a_limit_nothing_is_slowed(node: Node, env: dict[str, str]) -> None:
    """A61."""
    assert spend(node, [launcher(node, extra=env)]).is_unlimited()


def test_the_forced_policy_ignores_the_shared_switch(node: Node) -> None:
    """A61: under the default policy the switch turns the limit off."""
    shells = {
        policy: launcher(node, policy, GPU_CORE_UTILIZATION_POLICY=policy, CUDA_DEVICE_SM_LIMIT="20")
        for policy in ("force", "default")
    }
    for policy in shells:
        with node.region(policy).open("r+b") as stream:
            stream.seek(layout.V1.utilization_switch.offset)
            stream.write(bytes(4))
    assert spend(node, [shells["force"]], "force").is_about(20)
    assert spend(node, [shells["default"]], "default").is_unlimited()


def test_a_blocked_container_pauses_and_goes_on(node: Node) -> None:
    """A62: the monitor's word stops launches at any limit."""
    shell = launcher(node)
    shell.must("launch 1 1 32")
    with node.region().open("r+b", buffering=0) as stream:
        stream.seek(layout.V1.recent_kernel.offset)
        stream.write((-1).to_bytes(4, "little", signed=True))
        assert shell.process.stdin is not None
        assert shell.process.stdout is not None
        shell.process.stdin.write("launch 1 1 32\n")
        shell.process.stdin.flush()
        slot = layout.EXTENSION_OFFSET + layout.Extension.slots.offset
        flags = layout.ExtensionSlot.flags
        wait_until(
            lambda: bool(flags.read(node.region().read_bytes(), slot) & layout.SLOT_FLAG_PRIORITY_BLOCKED)
        )
        stream.seek(layout.V1.recent_kernel.offset)
        stream.write(bytes(4))
    assert shell.process.stdout.readline().split()[0] == str(SUCCESS)


def test_launches_show_activity_without_a_limit(node: Node) -> None:
    """A63."""
    shell = launcher(node)
    with node.region().open("r+b", buffering=0) as stream:
        stream.seek(layout.V1.recent_kernel.offset)
        stream.write((1).to_bytes(4, "little"))
    shell.must("launch 1 1 32")
    assert layout.V1.recent_kernel.read(node.region().read_bytes()) == layout.RECENT_KERNEL_ACTIVE


def test_throttled_time_is_published(node: Node) -> None:
    shell = launcher(node, CUDA_DEVICE_SM_LIMIT="10")
    shell.must("launchfor 1500 10 128")
    data = node.region().read_bytes()
    device = layout.EXTENSION_OFFSET + layout.Extension.devices.offset
    assert layout.ExtensionDevice.throttled.read(data, device) > 100_000_000
    assert layout.ExtensionDevice.core_limit.read(data, device) == 10


@pytest.mark.parametrize("env", [{}, {"CUDA_DEVICE_SM_LIMIT": "50"}])
def test_the_leader_writes_what_nvml_shows_into_the_slots(node: Node, env: dict[str, str]) -> None:
    """9.6: use and memory of each process for the monitor, with or without a core limit (B65, B66)."""
    node.settings["FAKEGPU_CONTEXT_MIB"] = "100"
    shell = launcher(node, extra=env)
    slot = layout.V1.procs.base(0)

    def shown(field: layout.Number) -> int:
        return field.read(node.region().read_bytes(), slot)

    for _ in range(40):
        shell.must("launchfor 500 10 128")
        if shown(layout.V1Slot.util_sm) > 10:
            break
    assert 10 < shown(layout.V1Slot.util_sm) <= 100
    assert shown(layout.V1Slot.monitorused) == 100 * 1024 * 1024
    wait_until(lambda: shown(layout.V1Slot.util_sm) == 0)  # the program is idle


def charged_ns(node: Node) -> int:
    """What the bucket of the card was charged, without the factor."""
    device = layout.EXTENSION_OFFSET + layout.Extension.devices.offset
    return layout.ExtensionDevice.charged.read(node.region().read_bytes(), device)


def test_a_host_thread_that_is_away_during_a_launch_is_charged_no_card_time(node: Node) -> None:
    """The card waited for the host between the events; what it did is known from the other launches."""
    shell = launcher(node, extra={"FAKEGPU_DELAY_US": "cuLaunchKernel=20000"}, CUDA_DEVICE_SM_LIMIT="90")
    for _ in range(20):
        shell.must("launch 1 10 128")
        shell.must("sync")
    assert 20 * 100_000 / 2 < charged_ns(node) < 40_000_000  # the host was away for 400 ms


@pytest.mark.parametrize("away", ["cuEventRecord", "cuLaunchKernel"])
def test_a_host_that_is_away_at_every_launch_longer_than_the_kernel_takes_is_limited(
    node: Node, away: str
) -> None:
    """Nobody can tell then what the card did between the events: not nothing, however often it is so."""
    shell = launcher(
        node, ns=5_000_000, extra={"FAKEGPU_DELAY_US": f"{away}=6000"}, CUDA_DEVICE_SM_LIMIT="10"
    )
    spent = [spend(node, [shell]) for _ in range(2)]
    assert sum(each.card for each in spent) < 0.2 * sum(each.wall for each in spent), spent


def test_work_that_was_queued_before_the_card_came_to_it_is_charged_whole(node: Node) -> None:
    """However long the host took to queue it. Each launch is of a size never seen before."""
    delayed = {"FAKEGPU_DELAY_US": "cuLaunchKernel=20000"}
    shell = launcher(node, ns=300_000_000, extra=delayed, CUDA_DEVICE_SM_LIMIT="90")
    for size in range(5):
        shell.must(f"launch 1 {1 << size} 32")
    shell.must("sync")
    shell.must("launch 1 64 32")
    assert charged_ns(node) >= 5 * 295_000_000


def test_a_launch_that_waits_while_its_context_goes_touches_none_of_its_events(node: Node) -> None:
    """They went with the context: a driver may end a program that still names them."""
    log = node.directory / "calls"
    code = """
import ctypes, os, threading, time
from hami.protocol import region_layout as layout
cuda = ctypes.CDLL("libcuda.so.1")
def good(result):
    assert result == 0, result
context, module, kernel = (ctypes.c_void_p() for _ in range(3))
good(cuda.cuInit(0))
good(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
good(cuda.cuCtxSetCurrent(context))
good(cuda.cuModuleLoadData(ctypes.byref(module), b"image"))
good(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"spin_ms_100"))
def launching():
    good(cuda.cuCtxSetCurrent(context))
    while cuda.cuLaunchKernel(kernel, 10, 1, 1, 128, 1, 1, 0, None, None, None) == 0:
        pass
thread = threading.Thread(target=launching)
thread.start()
region = open(os.environ["CUDA_DEVICE_MEMORY_SHARED_CACHE"], "rb")
def waits():
    region.seek(0)
    slot = layout.EXTENSION_OFFSET + layout.Extension.slots.offset
    return layout.ExtensionSlot.flags.read(region.read(), slot) & layout.SLOT_FLAG_CORE_LIMITED
while not waits():
    time.sleep(0.001)
good(cuda.cuDevicePrimaryCtxReset_v2(0))
os.truncate(os.environ["FAKEGPU_CALL_LOG"], 0)
thread.join()
print([line.split()[-1] for line in open(os.environ["FAKEGPU_CALL_LOG"]) if "cuEvent" in line])
"""
    found = node.python(code, CUDA_DEVICE_SM_LIMIT="5", FAKEGPU_CALL_LOG=str(log))
    assert found.strip() == "[]"
