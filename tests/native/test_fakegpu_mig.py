"""MIG on the simulated driver: nvidia-ml-py unmodified, and the plugin's own steps on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakegpu_harness import Cards

START = """
    import json, pynvml as n
    from hami.node.errors import NvmlError
    from hami.node.mig.instances import MigCards
    from hami.node.mig.nvml import NvmlMig
    from hami.node.mig.plan import SliceKey
    from hami.node.nvml import NvmlSession
    from hami.protocol.inventory import MigPlacement

    session = NvmlSession()
    driver = NvmlMig(session)
    gpu = driver.gpus()[0]
    cards = MigCards(driver)
    made = []
    def make(word, start, size):
        each = cards.make(gpu, SliceKey(gpu.uuid, word, start, size), "pod", made.append)
        return [each.uuid, each.gpu_instance, each.compute_instance]
"""


@pytest.fixture
def cards(tmp_path: Path) -> Iterator[Cards]:
    made = Cards(tmp_path / "s", devices=2, model="A100-SXM4-40GB", context_mib=100)
    yield made
    made.close()


def test_a_card_is_divided_and_says_what_it_offers(cards: Cards) -> None:
    result = cards.python(
        START
        + """
    before = cards.is_divided(gpu)
    cards.divide(gpu)
    known = driver.profiles(gpu)
    print(json.dumps([before, cards.is_divided(gpu), [[p.number, p.id, p.name, p.slices, p.count,
        p.multiprocessors, p.memory_mib, [[x.start, x.size] for x in driver.placements(gpu, p)]]
        for p in known]]))
    """
    )
    assert result[:2] == [False, True]
    rows = {row[2]: row for row in result[2]}
    assert rows["1g.5gb"] == [0, 19, "1g.5gb", 1, 7, 14, 4864, [[start, 1] for start in range(7)]]
    assert rows["2g.10gb"] == [1, 14, "2g.10gb", 2, 3, 28, 9856, [[0, 2], [2, 2], [4, 2]]]
    assert rows["3g.20gb"][-1] == [[0, 4], [4, 4]]
    assert rows["7g.40gb"] == [4, 0, "7g.40gb", 7, 1, 98, 40192, [[0, 8]]]
    assert {"1g.5gb+me", "1g.10gb", "4g.20gb"} < set(rows)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("A100-SXM4-80GB", ["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"]),
        ("H100-80GB", ["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"]),
        ("H200", ["1g.18gb", "2g.35gb", "3g.71gb", "7g.141gb"]),
    ],
)
def test_profiles_have_the_names_of_the_model(tmp_path: Path, model: str, names: list[str]) -> None:
    cards = Cards(tmp_path / "s", model=model)
    found = cards.python(START + "\n    print(json.dumps([p.name for p in driver.profiles(gpu)]))")
    assert [name for name in found if name in names] == names


def test_a_card_without_mig_says_so(tmp_path: Path) -> None:
    cards = Cards(tmp_path / "s", model="L40S")
    result = cards.python(
        START
        + """
    try:
        cards.divide(gpu)
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error), cards.offer(gpu, ()).why]))
    """
    )
    assert result[0] == "MigError"
    assert "has no MIG" in result[1]


def test_instances_are_made_at_their_place_seen_and_destroyed(cards: Cards) -> None:
    result = cards.python(
        START
        + """
    cards.divide(gpu)
    one, two = make("1g", 6, 1), make("3g", 0, 4)
    seen = [[str(s.key.word), s.key.start, s.gpu_instance, list(s.compute), list(s.devices.values())]
            for s in cards.seen(gpu)]
    devices = [[d.index, d.uuid, d.slices, d.compute_slices, d.memory_mib] for d in driver.devices(gpu)]
    handle = n.nvmlDeviceGetHandleByUUID(one[0].encode())
    name = n.nvmlDeviceGetName(handle)
    parent = n.nvmlDeviceGetUUID(n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle))
    gone = cards.clear(gpu)
    print(json.dumps([one, two, seen, devices, name, parent == gpu.uuid, gone, len(cards.seen(gpu))]))
    """
    )
    one, two, seen, devices, name, is_parent, gone, left = result
    assert (one[1:], two[1:]) == ([7, 0], [1, 0])
    assert [one[0][:4], two[0][:4]] == ["MIG-", "MIG-"]
    assert seen == [["3g", 0, 1, [0], [two[0]]], ["1g", 6, 7, [0], [one[0]]]]
    assert devices == [[0, two[0], 3, 3, 19968], [1, one[0], 1, 1, 4864]]
    assert name == "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    assert is_parent
    assert (gone, left) == (2, 0)


def test_a_taken_place_and_one_that_is_not_offered_are_refused(cards: Cards) -> None:
    result = cards.python(
        START
        + """
    cards.divide(gpu)
    make("2g", 0, 2)
    out = []
    for place in (("1g", 1, 1), ("2g", 1, 2), ("8g", 0, 8)):
        try:
            make(*place)
        except Exception as error:
            out.append(str(error))
    profile = driver.profiles(gpu)[0]
    try:
        driver.create(gpu, profile, MigPlacement(1, 1))
    except NvmlError as error:
        out.append(str(error))
    print(json.dumps(out))
    """
    )
    assert "is taken by MIG instance 3" in result[0]
    assert "does not offer 2g at 1+2" in result[1]
    assert "no MIG profile 8g" in result[2]
    assert result[3] == "cannot make MIG instance 1g.5gb at 1+1 of GPU 0: Insufficient Resources"


def test_an_instance_with_a_process_is_busy_and_cannot_be_destroyed(cards: Cards) -> None:
    uuid, number, _ = cards.python(
        START + "\n    cards.divide(gpu)\n    make('1g', 5, 1)\n    print(json.dumps(make('1g', 6, 1)))"
    )
    holder = cards.start("alloc", "100", "--hold", "60", NVIDIA_VISIBLE_DEVICES=uuid)
    assert cards.first(holder)["result"] == 0
    ask = f"""
    instance = next(i for i in driver.instances(gpu) if i.id == {number})
    other = next(i for i in driver.instances(gpu) if i.id != {number})
    out = [driver.is_busy(gpu), driver.is_busy(gpu, {number}), driver.is_busy(gpu, other.id)]
    try:
        driver.destroy_compute(gpu, {number}, 0)
        driver.destroy(gpu, {number})
        out.append("destroyed")
    except NvmlError as error:
        out.append(error.code)
    print(json.dumps(out))
    """
    assert cards.python(START + ask) == [True, True, False, 19]
    holder.kill()
    holder.wait()
    assert cards.python(START + ask) == [False, False, False, "destroyed"]


def test_a_gpu_instance_goes_only_after_its_compute_instances(cards: Cards) -> None:
    result = cards.python(
        START
        + """
    cards.divide(gpu)
    _, number, compute = make("1g", 6, 1)
    try:
        driver.destroy(gpu, number)
    except NvmlError as error:
        print(json.dumps([error.code, len(driver.instances(gpu))]))
    """
    )
    assert result == [19, 1]


def test_a_mode_that_needs_a_reset_stays_pending(cards: Cards) -> None:
    cards.attempt("set", "0", "mig_needs_reset", "1", program="fakegpud")
    result = cards.python(
        START
        + """
    try:
        cards.divide(gpu)
    except Exception as error:
        mode = n.nvmlDeviceGetMigMode(session.handle(gpu))
        print(json.dumps([type(error).__name__, str(error), list(mode)]))
    """
    )
    assert result[0] == "MigError"
    assert "needs a GPU reset" in result[1]
    assert result[2] == [0, 1]


def test_a_card_in_use_is_not_divided(cards: Cards) -> None:
    holder = cards.start("alloc", "100", "--hold", "60", visible_devices="0")
    assert cards.first(holder)["result"] == 0
    result = cards.python(
        START
        + """
    try:
        cards.divide(gpu)
    except Exception as error:
        print(json.dumps([driver.is_busy(gpu), str(error)]))
    """
    )
    assert result[0] is True
    assert "In use by another client" in result[1]
    assert "end what uses the card" in result[1]


def test_an_event_names_its_instances(cards: Cards) -> None:
    result = cards.python(
        START
        + """
    import subprocess
    source, _ = session.watch([gpu])
    for words in (["7", "0"], []):
        subprocess.run(["fakegpud", "xid", "0", "79", *words], check=True)
    events = [source.wait(5) for _ in range(2)]
    print(json.dumps([[e.uuid == gpu.uuid, e.xid, e.gpu_instance, e.compute_instance] for e in events]))
    """,
        PATH=f"{cards.programs}:/usr/bin:/bin",
    )
    assert result == [[True, 79, 7, 0], [True, 79, None, None]]
