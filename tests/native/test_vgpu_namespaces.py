"""Host PIDs from inside PID namespaces, with drivers of both conventions."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hostpid_harness import host_side, inside
from vgpu_harness import MIB, Node

from hami.protocol import region_layout as layout

NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")

NVML = """
import json, pynvml
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
print(json.dumps([p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(card)]))
"""
ACCOUNTING = """
import json, pynvml
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
def held(pid):
    try:
        return pynvml.nvmlDeviceGetAccountingStats(card, pid).maxMemoryUsage
    except pynvml.NVMLError_NotFound:
        return None
details = pynvml.nvmlDeviceGetRunningProcessDetailList(card, pynvml.nvmlProcessDetailList_v1, 0)
print(json.dumps([[p.pid for p in details], pynvml.nvmlDeviceGetAccountingPids(card),
                  [held(pid) for pid in {pids}]]))
"""


@pytest.fixture
def served(node: Node) -> Iterator[Node]:
    """The node with the driver's host side, which knows every client's host PID; contexts take 300 MiB."""
    node.settings["FAKEGPU_CONTEXT_MIB"] = "300"
    with host_side(node.build, node):
        yield node


def slot(node: Node, container: str) -> tuple[int, int]:
    """PID and host PID in the first slot of a container's region."""
    data, base = node.region(container).read_bytes(), layout.V1.procs.base(0)
    return layout.V1Slot.pid.read(data, base), layout.V1Slot.hostpid.read(data, base)


def test_the_host_pid_is_found_by_the_driver_s_list(served: Node) -> None:
    """11, method 3: the one PID that is new on the card is ours; cuInit alone looks for nothing."""
    served.shell("neighbour", prefix=NAMESPACE).start()
    shell = served.shell("a", prefix=NAMESPACE)
    shell.must("init")
    assert slot(served, "a") == (1, 0)
    shell.must("retain 0")
    assert slot(served, "a") == (1, inside(shell))


def test_a_context_is_measured_inside_a_namespace(served: Node) -> None:
    """7.5."""
    shell = served.shell("a", prefix=NAMESPACE, CUDA_DEVICE_MEMORY_LIMIT_0="1g").start()
    shell.must(f"alloc {100 * MIB}")
    assert shell.ask("info")[1:] == ((1024 - 400) * MIB, 1024 * MIB)


def test_a_neighbour_whose_host_pid_is_the_own_pid_counts_for_nothing(served: Node) -> None:
    neighbour = served.shell("neighbour").start()
    neighbour.must(f"alloc {1000 * MIB}")
    pid = neighbour.process.pid
    start = 'echo $(($0 - 1)) > /proc/sys/kernel/ns_last_pid; "$@"; exit $?'
    prefix = (*NAMESPACE, "/bin/sh", "-c", start, str(pid))
    shell = served.shell("a", prefix=prefix, CUDA_DEVICE_MEMORY_LIMIT_0="1g").start()
    own, on_host = slot(served, "a")
    assert own == pid
    assert on_host not in (0, pid)
    assert shell.ask("info")[1:] == ((1024 - 300) * MIB, 1024 * MIB)


def test_a_driver_that_names_pids_of_the_namespace_is_recognised(node: Node) -> None:
    """A94: then the kernel's number stays unknown, and no namespace PID is taken for it."""
    node.settings["FAKEGPU_PID_CONVENTION"] = "namespace"
    shell = node.shell("a", prefix=NAMESPACE).start()
    assert slot(node, "a") == (1, 0)
    data = node.region("a").read_bytes()
    flags = layout.Extension.flags.read(data, layout.EXTENSION_OFFSET)
    assert flags == layout.FLAG_NVML_SETTLED | layout.FLAG_NVML_OWN_NAMESPACE
    shell.must(f"alloc {MIB}")


def test_the_process_list_names_the_container_s_pids(served: Node) -> None:
    """A45: neither the neighbour nor a host PID is shown."""
    served.shell("neighbour", prefix=NAMESPACE).start()
    served.shell("a", prefix=NAMESPACE).start()
    assert json.loads(served.python(NVML, "a")) == [1]


def test_accounting_knows_the_container_s_pids(served: Node) -> None:
    """8.3: and no host PID, neither the neighbour's nor its own."""
    neighbour = served.shell("neighbour", prefix=NAMESPACE).start()
    shell = served.shell("a", prefix=NAMESPACE).start()
    code = ACCOUNTING.format(pids=[1, inside(shell), inside(neighbour)])
    assert json.loads(served.python(code, "a")) == [[1], [1], [300 * MIB, None, None]]


def test_a68_two_processes_that_start_together_get_no_wrong_pid(served: Node) -> None:
    """Two new PIDs at once: each process stores its own or none."""
    for attempt in range(4):
        shells = [served.shell(f"c{attempt}{which}", prefix=NAMESPACE) for which in "ab"]
        for shell in shells:
            assert shell.process.stdin is not None
            shell.process.stdin.write("init\nretain 0\n")
            shell.process.stdin.flush()
        for shell in shells:
            assert shell.process.stdout is not None
            for _ in range(2):
                assert shell.process.stdout.readline().split()[0] == "0"
        for which, shell in zip("ab", shells, strict=True):
            assert slot(served, f"c{attempt}{which}")[1] in (0, inside(shell))
