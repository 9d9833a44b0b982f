"""nvidia-ml-py, unmodified, on the simulated NVML."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakegpu_harness import MIB, Cards, wait_until

PROCESSES = """
    import json, pynvml as n
    n.nvmlInit()
    h = n.nvmlDeviceGetHandleByIndex(0)
    print(json.dumps([[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(h)]))
"""


@pytest.fixture
def cards(tmp_path: Path) -> Iterator[Cards]:
    made = Cards(
        tmp_path / "s", devices=3, model="A100-SXM4-80GB", memory_mib=8192, reserved_mib=192, context_mib=100
    )
    yield made
    made.close()


def hold(cards: Cards, **settings: object) -> int:
    """A process with 1,000 MiB on card 0; its PID."""
    holder = cards.start("alloc", "1000", "--hold", "60", **settings)
    assert cards.first(holder)["result"] == 0
    return holder.pid


def test_cards_are_described(cards: Cards) -> None:
    result = cards.python(
        """
        import json, pynvml as n
        n.nvmlInit()
        out = []
        for i in range(n.nvmlDeviceGetCount()):
            h = n.nvmlDeviceGetHandleByIndex(i)
            assert n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(h))) == i
            p = n.nvmlDeviceGetPciInfo(h)
            assert n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId(p.busId)) == i
            out.append([n.nvmlDeviceGetName(h), n.nvmlDeviceGetMinorNumber(h), p.busId, p.busIdLegacy,
                        list(n.nvmlDeviceGetMigMode(h)), list(n.nvmlDeviceGetCudaComputeCapability(h))])
        print(json.dumps(out))
        """
    )
    assert result[0] == ["NVIDIA A100-SXM4-80GB", 0, "00000000:10:00.0", "0000:10:00.0", [0, 0], [8, 0]]
    assert [row[1] for row in result] == [0, 1, 2]
    assert len({row[2] for row in result}) == 3


def test_memory_versions_1_and_2_agree_and_a_wrong_version_word_is_refused(cards: Cards) -> None:
    hold(cards)
    v1, v2, code = cards.python(
        """
        import ctypes, json, pynvml as n
        n.nvmlInit()
        h = n.nvmlDeviceGetHandleByIndex(0)
        a, b = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2)
        f = n._nvmlGetFunctionPointer("nvmlDeviceGetMemoryInfo_v2")
        c = n.c_nvmlMemory_v2_t()
        print(json.dumps([[a.total, a.free, a.used], [b.total, b.reserved, b.free, b.used],
                          f(h, ctypes.byref(c))]))
        """
    )
    assert v1 == [8192 * MIB, (8192 - 192 - 1100) * MIB, (192 + 1100) * MIB]
    assert v2 == [8192 * MIB, 192 * MIB, (8192 - 192 - 1100) * MIB, 1100 * MIB]
    assert code == 25


def test_processes_are_listed_by_host_pid_with_what_they_hold(cards: Cards) -> None:
    pid = hold(cards, pid_offset=70000)
    assert cards.python(PROCESSES) == [[pid + 70000, 1100 * MIB]]


def test_the_daemons_word_outranks_the_offset(cards: Cards) -> None:
    daemon = cards.start("serve", program="fakegpud")
    assert cards.first(daemon)["ready"] is True
    pid = hold(cards, pid_offset=70000)
    assert cards.python(PROCESSES) == [[pid, 1100 * MIB]]
    assert cards.stat()["processes"][0]["from_daemon"] is True


def test_convention_namespace_shows_own_pids_and_hides_other_namespaces(tmp_path: Path) -> None:
    cards = Cards(tmp_path / "s", pid_convention="namespace", context_mib=100)
    try:
        pid = hold(cards, pid_offset=70000, pid_namespace=11)
        assert cards.python(PROCESSES, pid_namespace=11) == [[pid, 1100 * MIB]]
        assert cards.python(PROCESSES, pid_namespace=12) == []
        assert cards.python(PROCESSES, pid_namespace=4026531836) == [[pid + 70000, 1100 * MIB]]
    finally:
        cards.close()


def test_the_process_list_follows_the_count_protocol(cards: Cards) -> None:
    hold(cards)
    result = cards.python(
        """
        import ctypes, json, pynvml as n
        n.nvmlInit()
        h = n.nvmlDeviceGetHandleByIndex(0)
        f = n._nvmlGetFunctionPointer("nvmlDeviceGetComputeRunningProcesses_v3")
        old = n._nvmlGetFunctionPointer("nvmlDeviceGetComputeRunningProcesses")
        count = ctypes.c_uint(0)
        codes = [f(h, ctypes.byref(count), None), count.value]
        words = (ctypes.c_uint * 8)(*([0xAA] * 8))
        count.value = 1
        codes += [old(h, ctypes.byref(count), words), count.value, words[4]]
        print(json.dumps(codes))
        """
    )
    assert result == [7, 1, 0, 1, 0xAA]  # the unversioned record has 16 bytes and not one more


def test_details_and_accounting_agree_with_the_process_list(cards: Cards) -> None:
    pid = hold(cards, pid_offset=70000) + 70000
    result = cards.python(
        f"""
        import json, pynvml as n
        n.nvmlInit()
        h = n.nvmlDeviceGetHandleByIndex(0)
        lists = [n.nvmlDeviceGetRunningProcessDetailList(h, n.nvmlProcessDetailList_v1, m) for m in range(4)]
        old, new = n.nvmlDeviceGetAccountingStats(h, {pid}), n.nvmlDeviceGetAccountingStats_v2(h, {pid})
        try:
            n.nvmlDeviceGetAccountingStats(h, 1)
        except n.NVMLError_NotFound as error:
            missing = error.value
        print(json.dumps([[[[p.pid, p.usedGpuMemory] for p in found] for found in lists],
                          n.nvmlDeviceGetAccountingMode(h), n.nvmlDeviceGetAccountingPids(h),
                          [old.maxMemoryUsage, old.isRunning], [new.pid, new.maxMemoryUsage, new.isRunning],
                          missing]))
        """
    )
    held = [[pid, 1100 * MIB]]
    assert result == [[held, [], [], held], 1, [pid], [1100 * MIB, 1], [pid, 1100 * MIB, 1], 6]


def busy(cards: Cards) -> Any:
    return cards.python(
        """
        import json, pynvml as n
        n.nvmlInit()
        h = n.nvmlDeviceGetHandleByIndex(0)
        try:
            own = [[p.pid, p.smUtil] for p in n.nvmlDeviceGetProcessUtilization(h, 0)]
        except n.NVMLError_NotFound:
            own = []
        print(json.dumps([n.nvmlDeviceGetUtilizationRates(h).gpu, own]))
        """
    )


def test_utilisation_shows_a_busy_card_and_who_keeps_it_busy(cards: Cards) -> None:
    assert busy(cards) == [0, []]
    flood = cards.start("launch", "--kernel-us", "20000", "--count", "100000")
    wait_until(lambda: busy(cards) == [100, [[flood.pid, 100]]], "a card that is busy all the time")
    flood.kill()
    flood.wait()
    wait_until(lambda: busy(cards) == [0, []], "an idle card after its only process died")


def test_an_xid_reaches_the_sets_that_asked_for_it_and_waits_time_out(cards: Cards) -> None:
    result = cards.python(
        """
        import json, os, subprocess, pynvml as n
        n.nvmlInit()
        s = n.nvmlEventSetCreate()
        for i in range(3):
            h = n.nvmlDeviceGetHandleByIndex(i)
            assert n.nvmlDeviceGetSupportedEventTypes(h) & n.nvmlEventTypeXidCriticalError
            n.nvmlDeviceRegisterEvents(h, n.nvmlEventTypeXidCriticalError, s)
        try:
            n.nvmlEventSetWait_v2(s, 20); early = True
        except n.NVMLError_Timeout:
            early = False
        clean = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        subprocess.run([os.environ["PROGRAM"], "xid", "1", "79"], check=True, env=clean)
        e = n.nvmlEventSetWait_v2(s, 5000)
        n.nvmlEventSetFree(s)
        print(json.dumps([early, n.nvmlDeviceGetIndex(e.device), e.eventType, e.eventData]))
        """,
        PROGRAM=cards.programs / "fakegpud",
    )
    assert result == [False, 1, 8, 79]


def test_a_lost_card_says_so(cards: Cards) -> None:
    cards.run("set", "1", "lost", "1", program="fakegpud")
    result = cards.python(
        """
        import json, pynvml as n
        n.nvmlInit()
        codes = []
        for i in range(3):
            try:
                n.nvmlDeviceGetHandleByIndex(i); codes.append(0)
            except n.NVMLError as error:
                codes.append(error.value)
        print(json.dumps(codes))
        """
    )
    assert result == [0, 15, 0]


def test_an_injected_fault_makes_one_init_fail(cards: Cards) -> None:
    result = cards.python(
        """
        import json, pynvml as n
        codes = []
        for _ in range(2):
            try:
                n.nvmlInit(); codes.append(n.nvmlDeviceGetCount())
            except n.NVMLError as error:
                codes.append(-error.value)
        print(json.dumps(codes))
        """,
        faults="nvmlInitWithFlags:1=9",
    )
    assert result == [-9, 3]


def test_topology_and_links(cards: Cards) -> None:
    result = cards.python(
        """
        import json, pynvml as n
        n.nvmlInit()
        a, b, c = (n.nvmlDeviceGetHandleByIndex(i) for i in range(3))
        ups = sum(n.nvmlDeviceGetNvLinkState(a, link) for link in range(12))
        peers = {n.nvmlDeviceGetNvLinkRemotePciInfo(a, link).busId for link in range(12)}
        levels = [n.nvmlDeviceGetTopologyCommonAncestor(a, x) for x in (b, c)]
        print(json.dumps([*levels, ups,
                          peers == {n.nvmlDeviceGetPciInfo(x).busId for x in (b, c)}]))
        """
    )
    assert result == [20, 50, 12, True]


LINKS = """
    import json, pynvml as n
    n.nvmlInit()
    cards = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
    index = {n.nvmlDeviceGetPciInfo(card).busId: i for i, card in enumerate(cards)}
    def peer(card, link):
        try:
            if not n.nvmlDeviceGetNvLinkState(card, link):
                return "down"
        except n.NVMLError as error:
            return -error.value
        name = n.nvmlDeviceGetNvLinkRemotePciInfo(card, link).busId
        kind = n.nvmlDeviceGetNvLinkRemoteDeviceType(card, link)
        return index[name] if kind == n.NVML_NVLINK_DEVICE_TYPE_GPU else f"{name} {kind}"
    peers = [[peer(card, link) for link in range(19)] for card in cards]
    levels = [[n.nvmlDeviceGetTopologyCommonAncestor(a, b) for b in cards] for a in cards]
    print(json.dumps([peers, levels]))
"""


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize(("model", "links"), [("V100-SXM2-16GB", 6), ("A100-SXM4-40GB", 12), ("H200", 18)])
def test_both_ends_know_every_link_and_links_are_divided_evenly(
    tmp_path: Path, devices: int, model: str, links: int
) -> None:
    peers, _ = Cards(tmp_path / "s", devices=devices, model=model).python(LINKS)
    counts = [[row.count(other) for other in range(devices)] for row in peers]
    assert counts == [list(column) for column in zip(*counts, strict=True)]
    assert [row.count("down") for row in peers] == [0 if devices > 1 else links] * devices
    others = [count for one, row in enumerate(counts) for two, count in enumerate(row) if one != two]
    assert not others or max(others) - min(others) <= 1
    assert [row[links:] for row in peers] == [[-3] * (18 - links) + [-2]] * devices


def test_cards_without_nvlink_are_no_peers(tmp_path: Path) -> None:
    peers, _ = Cards(tmp_path / "s", devices=3, model="T4,A100-SXM4-40GB").python(LINKS)
    assert [set(row) for row in peers] == [{-3, -2}, {2, -3, -2}, {1, -3, -2}]


def test_links_and_common_ancestors_are_settings(tmp_path: Path) -> None:
    settings = {"nvlinks": "0-1:2, 2>3:1,0-s:1,1-9:1,0-2:17,x", "pcie": "0-1:10,2>3:30"}
    cards = Cards(tmp_path / "s", devices=4, model="L40S", **settings)
    peers, levels = cards.python(LINKS)
    down = [row.count("down") for row in peers]
    used = [[x for x in row if x not in (-3, -2)] for row in peers]
    assert used == [[1, 1, "00000000:C4:00.0 2"], [0, 0], [3], []]
    assert down == [0, 0, 0, 0]
    assert levels == [[0, 10, 50, 50], [10, 0, 50, 50], [50, 50, 0, 30], [50, 50, 20, 0]]


@pytest.mark.parametrize(("value", "expected"), [("none", "down"), ("switch", "00000000:C4:00.0 2")])
def test_links_to_switches_and_no_links(tmp_path: Path, value: str, expected: str) -> None:
    peers, _ = Cards(tmp_path / "s", devices=2, model="H200", nvlinks=value).python(LINKS)
    assert peers == [[expected] * 18 + [-2]] * 2
