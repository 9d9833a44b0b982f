"""Registration loop, health watcher and what kubelet is shown (device-plugin.md §15.3, §15.4)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_cards import U1, U2

from hami.kube.errors import ServerError
from hami.node.config import Settings
from hami.node.errors import NvmlError, NvmlUnsupportedError
from hami.node.nvml import XidEvent, numa_node
from hami.node.plugin.board import Board
from hami.node.plugin.cards import CardReader
from hami.node.plugin.health import HealthWatcher
from hami.node.plugin.health_rules import BUILT_IN, XidRules, parse_rules
from hami.node.plugin.registration import REGISTER, Registrar
from hami.node.plugin.scores import PairScores

GIB = 1 << 30
MakeNvml = Callable[..., Any]
Until = Callable[..., Awaitable[None]]
TWO = [(U1, "NVIDIA A", GIB), (U2, "NVIDIA A", GIB)]


def registrar(cluster: Any, nvml: Any, board: Board | None = None) -> Registrar:
    return Registrar(cluster, CardReader(nvml), board or Board(), Settings(), interval_s=0.01)


async def test_r8_an_unchanged_inventory_is_written_once(cluster: Any, make_nvml: MakeNvml) -> None:
    loop = registrar(cluster, make_nvml(TWO))
    for _ in range(10):
        await loop.once()
    assert len(cluster.patches) == 1


async def test_r7_a_deleted_or_edited_annotation_comes_back(cluster: Any, make_nvml: MakeNvml) -> None:
    loop = registrar(cluster, make_nvml(TWO))
    await loop.once()
    text = cluster.node_annotations.pop(REGISTER)
    await loop.once()
    assert cluster.node_annotations[REGISTER] == text
    for other in ("garbage", "[]", text.replace('"count":10', '"count":11')):
        cluster.node_annotations[REGISTER] = other
        await loop.once()
        assert cluster.node_annotations[REGISTER] == text


async def test_the_same_devices_written_differently_are_left_alone(cluster: Any, make_nvml: MakeNvml) -> None:
    loop = registrar(cluster, make_nvml(TWO))
    await loop.once()
    spaced = cluster.node_annotations[REGISTER].replace(",", ", ")
    cluster.node_annotations[REGISTER] = spaced
    await loop.once()
    assert cluster.node_annotations[REGISTER] == spaced


async def test_the_node_says_how_it_allocates(cluster: Any, make_nvml: MakeNvml) -> None:
    cluster.node_annotations["hami.io/allocation-mode"] = "exact"
    await registrar(cluster, make_nvml(TWO)).once()
    assert cluster.node_annotations["hami.io/allocation-mode"] == "lock"


async def test_the_node_shows_which_configuration_is_in_force(cluster: Any, make_nvml: MakeNvml) -> None:
    applied = ["0123456789abcdef"]
    board, reader = Board(), CardReader(make_nvml(TWO))
    loop = Registrar(cluster, reader, board, Settings(), applied=lambda: applied[0])
    await loop.once()
    assert cluster.node_annotations["hami.io/node-config-applied"] == "0123456789abcdef"
    applied[0] = ""
    await loop.once()
    assert "hami.io/node-config-applied" not in cluster.node_annotations


async def test_r6_a_failed_patch_is_tried_again(cluster: Any, make_nvml: MakeNvml) -> None:
    cluster.fail_node_patches = [ServerError(503, "", "busy")]
    loop = registrar(cluster, make_nvml(TWO))
    with pytest.raises(ServerError):
        await loop.once()
    await loop.once()
    assert U1 in cluster.node_annotations[REGISTER]


async def test_d9_a_sick_card_loses_its_health_at_once(
    cluster: Any, make_nvml: MakeNvml, until: Until
) -> None:
    board = Board()
    loop = Registrar(cluster, CardReader(make_nvml(TWO)), board, Settings(), interval_s=3600)
    running = asyncio.create_task(loop.run())
    try:
        await until(lambda: REGISTER in cluster.node_annotations)
        board.mark_unhealthy([U1], "XID 79")
        await until(lambda: cluster.node_annotations[REGISTER].count('"health":true') == 1)
    finally:
        running.cancel()


@pytest.mark.parametrize("pair_scores", list(PairScores))
async def test_without_the_driver_the_node_shows_its_cards_as_sick_until_it_is_back(
    cluster: Any, make_nvml: MakeNvml, pair_scores: PairScores
) -> None:
    nvml, board = make_nvml(TWO), Board()
    right: list[bool] = []
    loop = Registrar(
        cluster,
        CardReader(nvml),
        board,
        Settings(),
        pair_scores=pair_scores,
        registered=lambda: right.append(True),
    )
    await loop.once()
    text = cluster.node_annotations[REGISTER]
    assert text.count('"health":true') == 2
    nvml.list_error = NvmlError("driver not loaded", 9)
    with pytest.raises(NvmlError):
        await loop.once()
    assert "health" not in cluster.node_annotations[REGISTER]
    assert not any(card.healthy for card in board.cards), "kubelet hears the same"
    assert len(right) == 1, "an alert watches how long ago that was"
    nvml.list_error = None
    await loop.once()
    assert cluster.node_annotations[REGISTER] == text


async def test_a_driver_that_was_never_there_registers_nothing(cluster: Any, make_nvml: MakeNvml) -> None:
    nvml = make_nvml(TWO)
    nvml.list_error = NvmlError("driver not loaded", 9)
    with pytest.raises(NvmlError):
        await registrar(cluster, nvml).once()
    assert cluster.patches == []


async def test_no_cards_are_registered_as_an_empty_list(cluster: Any, make_nvml: MakeNvml) -> None:
    await registrar(cluster, make_nvml([])).once()
    assert cluster.node_annotations[REGISTER] == "[]"


def test_a_card_that_fails_is_unhealthy_with_the_memory_last_seen(make_nvml: MakeNvml) -> None:
    nvml = make_nvml([(U1, "NVIDIA A", GIB), (U2, "NVIDIA B", NvmlUnsupportedError("no", 3))])
    reader = CardReader(nvml)
    assert [(card.memory_bytes, card.healthy) for card in reader.read()] == [(GIB, True), (None, True)]
    nvml.cards[0] = (U1, "NVIDIA A", NvmlError("lost", 15))
    assert [(card.memory_bytes, card.healthy) for card in reader.read()] == [(GIB, False), (None, True)]


def test_the_numa_node_is_read_by_the_short_bus_id(tmp_path: Any) -> None:
    folder = tmp_path / "bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    assert numa_node("00000000:3B:00.0", str(tmp_path)) == 1
    (folder / "numa_node").write_text("-1\n")
    assert numa_node("00000000:3B:00.0", str(tmp_path)) == 0
    assert numa_node("00000000:AA:00.0", str(tmp_path)) == 0


@pytest.mark.parametrize(
    ("disable", "enable", "watching", "ignored", "counted"),
    [
        ("", "", True, [13, 31, 43, 45, 68, 109], [79, 48]),
        ("79", "", True, [79, 31], [48]),
        ("all", "", False, [48, 79], []),
        ("xids", "", False, [48], []),
        ("all", "48", True, [79, 31], [48]),
        ("all", "all", True, [], [13, 79]),
        ("", "all", True, [], [13]),
        ("", "31", True, [13], [31]),
        (" 12 ,x,-3", "", True, [12, 13], [3, 79]),
    ],
)
def test_h1_h3_h4_h5_h6_h7_xid_rules(
    disable: str, enable: str, watching: bool, ignored: list[int], counted: list[int]
) -> None:
    rules = parse_rules(disable, enable)
    assert rules.watching is watching
    assert all(rules.ignores(xid) for xid in ignored)
    assert not any(rules.ignores(xid) for xid in counted)


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_gives_rules(disable: str, enable: str) -> None:
    assert parse_rules(disable, enable).disabled >= BUILT_IN


class Watching:
    """A running health watcher on a board with two cards."""

    def __init__(self, nvml: Any, rules: XidRules | None = None) -> None:
        self.nvml = nvml
        self.board = Board()
        self.board.show(CardReader(nvml).read())
        self.watcher = HealthWatcher(
            nvml, nvml.gpus(), rules or XidRules(), self.board, wait_s=0.01, backoff_s=(0.01, 0.02)
        )

    async def __aenter__(self) -> Watching:
        self.watcher.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.watcher.stop()


async def test_h2_a_critical_xid_makes_its_card_unhealthy(make_nvml: MakeNvml, until: Until) -> None:
    nvml = make_nvml(TWO)
    nvml.xids = [XidEvent(U1, 31), XidEvent("GPU-foreign", 79), XidEvent(U1, 79)]
    async with Watching(nvml) as watching:
        await until(lambda: set(watching.board.faults) == {U1})
        assert [card.healthy for card in watching.board.cards] == [False, True]
        assert watching.board.faults[U1] == "XID 79"
    assert nvml.closed_sources == 1


async def test_a_program_that_causes_errors_without_end_does_not_fill_the_log(
    make_nvml: MakeNvml, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = make_nvml(TWO)
    nvml.xids = [XidEvent(U1, 31), XidEvent(U1, 13)] * 50 + [XidEvent(U1, 79)] * 2
    async with Watching(nvml):
        await until(lambda: not nvml.xids)
    told = [vars(record)["xid"] for record in caplog.records if record.message == "health.xid"]
    assert told == [31, 13, 79, 79]


async def test_an_event_without_a_card_hits_all(make_nvml: MakeNvml, until: Until) -> None:
    nvml = make_nvml(TWO)
    nvml.xids = [XidEvent("", 79)]
    async with Watching(nvml) as watching:
        await until(lambda: set(watching.board.faults) == {U1, U2})


async def test_a_card_that_cannot_be_watched_is_unhealthy(make_nvml: MakeNvml, until: Until) -> None:
    nvml = make_nvml(TWO)
    nvml.unwatched = (U2,)
    async with Watching(nvml) as watching:
        await until(lambda: set(watching.board.faults) == {U2})


async def test_h9_a_broken_event_set_is_opened_again_with_pauses(make_nvml: MakeNvml, until: Until) -> None:
    nvml = make_nvml(TWO)
    nvml.wait_error = NvmlError("broken", 999)
    async with Watching(nvml) as watching:
        await until(lambda: set(watching.board.faults) == {U1, U2})
        version = watching.board.version
        await until(lambda: nvml.closed_sources >= 3)
        assert watching.board.version == version


async def test_the_board_tells_every_reader_the_newest_state(make_nvml: MakeNvml) -> None:
    board = Board()
    readers = [asyncio.create_task(board.wait_beyond(0)) for _ in range(2)]
    await asyncio.sleep(0)
    board.show(CardReader(make_nvml(TWO)).read())
    board.mark_unhealthy([U1], "XID 79")
    assert await asyncio.gather(*readers) == [2, 2]
    board.mark_unhealthy([U1], "again")
    assert board.version == 2
    assert board.faults == {U1: "XID 79"}
