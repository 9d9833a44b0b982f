"""Core limits of libvgpu.so, measured by the simulated card's own engine time."""

from __future__ import annotations

import time

import pytest
from vgpu_harness import SUCCESS, Node, Shell

from hami.protocol import region_layout as layout

WINDOW_MS = 1500


def share(node: Node, shells: list[Shell], container: str = "a") -> float:
    """Percent of the card's time that the container gets while all of `shells` launch without a pause."""
    for shell in shells:  # the burst that an idle bucket allows is spent first
        assert shell.process.stdin is not None
        shell.process.stdin.write(f"launchfor 700 10 128\nlaunchfor {WINDOW_MS} 10 128\n")
        shell.process.stdin.flush()
    for shell in shells:
        assert shell.process.stdout is not None
        shell.process.stdout.readline()
    before, start = node.engine_ns()[container], time.monotonic()
    for shell in shells:
        assert shell.process.stdout is not None
        assert shell.process.stdout.readline().split()[0] == str(SUCCESS)
    return (node.engine_ns()[container] - before) / (time.monotonic() - start) / 1e7


def is_about(limit: int, measured: float) -> bool:
    """Never much more than the limit; on a busy machine a program may not reach it."""
    return limit / 2 < measured < limit + 8


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
    assert is_about(limit, share(node, [launcher(node, ns=ns, CUDA_DEVICE_SM_LIMIT=str(limit))]))


def test_two_processes_of_a_container_share_the_limit(node: Node) -> None:
    """A59."""
    shells = [launcher(node, CUDA_DEVICE_SM_LIMIT="30") for _ in range(2)]
    assert is_about(30, share(node, shells))


def test_two_containers_get_their_own_shares(node: Node) -> None:
    """9.6: a neighbour stretches what is measured; the factor from NVML corrects it."""
    one = launcher(node, "a", ns=2_000_000, CUDA_DEVICE_SM_LIMIT="20")
    other = launcher(node, "b", ns=2_000_000, CUDA_DEVICE_SM_LIMIT="60")
    assert other.process.stdin is not None
    other.process.stdin.write("launchfor 6000 10 128\n")
    other.process.stdin.flush()
    one.must("launchfor 2500 10 128")
    assert is_about(20, share(node, [one]))
    device = layout.EXTENSION_OFFSET + layout.Extension.devices.offset
    factor = layout.ExtensionDevice.g.read(node.region("a").read_bytes(), device) / layout.G_ONE
    assert 1 / 64 <= factor < 0.95


@pytest.mark.parametrize(
    "env", [{}, {"GPU_CORE_UTILIZATION_POLICY": "disable", "CUDA_DEVICE_SM_LIMIT": "20"}]
)
def test_without_a_limit_nothing_is_slowed(node: Node, env: dict[str, str]) -> None:
    """A61."""
    assert share(node, [launcher(node, extra=env)]) > 60


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
    assert share(node, [shells["force"]], "force") < 35
    assert share(node, [shells["default"]], "default") > 60


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
        time.sleep(0.3)
        flags = layout.ExtensionSlot.flags.read(
            node.region().read_bytes(), layout.EXTENSION_OFFSET + layout.Extension.slots.offset
        )
        assert flags & layout.SLOT_FLAG_PRIORITY_BLOCKED
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


def test_the_leader_writes_what_nvml_shows_into_the_slots(node: Node) -> None:
    """9.6: utilisation and memory of each process, for the monitor."""
    node.settings["FAKEGPU_CONTEXT_MIB"] = "100"
    shell = launcher(node, CUDA_DEVICE_SM_LIMIT="50")
    slot, seen = layout.V1.procs.base(0), []
    for _ in range(20):
        shell.must("launchfor 500 10 128")
        data = node.region().read_bytes()
        seen.append(layout.V1Slot.util_sm.read(data, slot))
        if seen[-1] > 10:
            break
    assert 10 < seen[-1] <= 100
    assert layout.V1Slot.monitorused.read(data, slot) == 100 * 1024 * 1024
