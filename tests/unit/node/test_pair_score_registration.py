"""Pair scores on the node: when they are computed, written, and what happens when NVML fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from node_cards import U1, U2

from hami.kube.errors import ServerError
from hami.node.config import Settings
from hami.node.errors import NvmlError, TopologyError
from hami.node.nvml import NvLink
from hami.node.plugin.board import Board
from hami.node.plugin.cards import CardReader
from hami.node.plugin.registration import REGISTER, Registrar
from hami.node.plugin.scores import PairScores, ScoreKeeper
from hami.protocol.inventory import DeviceInfo

GIB = 1 << 30
TWO = [(U1, "NVIDIA A", GIB), (U2, "NVIDIA A", GIB)]
SCORES = "hami.io/node-nvidia-score"
LINKED = f'[{{"uuid":"{U1}","score":{{"{U2}":220}}}},{{"uuid":"{U2}","score":{{"{U1}":220}}}}]'
MakeNvml = Callable[..., Any]
Until = Callable[..., Awaitable[None]]


@pytest.fixture
def nvml(make_nvml: MakeNvml) -> Any:
    """Two cards of one CPU with two NVLinks between them."""
    made = make_nvml(TWO)
    made.links = {U1: [NvLink("00000000:01:00.0")] * 2, U2: [NvLink("00000000:00:00.0")] * 2}
    return made


def registrar(
    cluster: Any, nvml: Any, demand: PairScores = PairScores.REQUIRED, board: Board | None = None, **more: Any
) -> Registrar:
    return Registrar(
        cluster,
        CardReader(nvml),
        board or Board(),
        more.pop("settings", Settings()),
        pair_scores=demand,
        **more,
    )


async def test_scores_are_written_with_the_registration_in_one_patch(cluster: Any, nvml: Any) -> None:
    await registrar(cluster, nvml).once()
    ((_, patch),) = cluster.patches
    assert {REGISTER, SCORES} <= set(patch)
    assert patch[SCORES] == LINKED
    assert cluster.events == []


async def test_an_unchanged_inventory_is_asked_and_written_once(cluster: Any, nvml: Any) -> None:
    loop = registrar(cluster, nvml)
    for _ in range(10):
        await loop.once()
    assert len(cluster.patches) == 1
    assert nvml.link_questions == 2


async def test_a_changed_inventory_is_scored_again(cluster: Any, nvml: Any) -> None:
    board = Board()
    loop = registrar(cluster, nvml, board=board)
    await loop.once()
    nvml.links = {U1: [], U2: []}
    await loop.once()
    assert cluster.node_annotations[SCORES] == LINKED
    board.mark_unhealthy([U1], "XID 74")
    await loop.once()
    assert cluster.node_annotations[SCORES] == LINKED.replace("220", "20")


async def test_deleted_or_edited_scores_come_back_and_other_spelling_stays(cluster: Any, nvml: Any) -> None:
    loop = registrar(cluster, nvml)
    await loop.once()
    for other in ("", "garbage", LINKED.replace("220", "221")):
        cluster.node_annotations[SCORES] = other
        await loop.once()
        assert cluster.node_annotations[SCORES] == LINKED
    del cluster.node_annotations[SCORES]
    await loop.once()
    spaced = cluster.node_annotations[SCORES].replace(",", ", ")
    cluster.node_annotations[SCORES] = spaced
    await loop.once()
    assert cluster.node_annotations[SCORES] == spaced


async def test_scores_whose_patch_failed_are_written_by_the_next_round(cluster: Any, nvml: Any) -> None:
    cluster.fail_node_patches = [ServerError(503, "", "busy")]
    loop = registrar(cluster, nvml)
    with pytest.raises(ServerError):
        await loop.once()
    await loop.once()
    assert cluster.node_annotations[SCORES] == LINKED


async def test_switched_off_nothing_is_asked_and_old_scores_stay(cluster: Any, nvml: Any) -> None:
    cluster.node_annotations[SCORES] = "[]"
    await registrar(cluster, nvml, PairScores.OFF).once()
    assert cluster.node_annotations[SCORES] == "[]"
    assert nvml.link_questions == 0


async def test_r9_a_link_error_writes_nothing_and_is_tried_again(
    cluster: Any, nvml: Any, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    good, nvml.links[U2] = nvml.links[U2], NvmlError("cannot read the NVLinks of GPU 1", 999)
    board = Board()
    running = asyncio.create_task(registrar(cluster, nvml, board=board).run())
    try:
        await until(lambda: [record.message for record in caplog.records] == ["register.failed"])
        assert cluster.patches == []
        nvml.links[U2] = good
        board.mark_unhealthy([U2], "XID 74")  # wakes the loop in the middle of its pause
        await until(lambda: SCORES in cluster.node_annotations)
    finally:
        running.cancel()
    assert len(cluster.patches) == 1


async def test_unless_required_a_link_error_leaves_the_cards_registered(
    cluster: Any, nvml: Any, caplog: pytest.LogCaptureFixture
) -> None:
    good, nvml.links[U2] = nvml.links[U2], NvmlError("cannot read the NVLinks of GPU 1", 999)
    loop = registrar(cluster, nvml, PairScores.IF_POSSIBLE)
    for _ in range(3):
        await loop.once()
    assert U1 in cluster.node_annotations[REGISTER]
    assert SCORES not in cluster.node_annotations
    assert [record.message for record in caplog.records].count("topology.no_scores") == 1
    nvml.links[U2] = good
    await loop.once()
    assert cluster.node_annotations[SCORES] == LINKED


@pytest.mark.parametrize("failing", ["links", "ancestors"])
async def test_a_lost_card_is_registered_as_unhealthy_and_without_scores(
    cluster: Any, nvml: Any, failing: str
) -> None:
    loop = registrar(cluster, nvml)
    await loop.once()
    lost = NvmlError("GPU is lost", 15)
    nvml.cards[1] = (U2, "NVIDIA A", lost)
    if failing == "links":
        nvml.links[U2] = lost
    else:
        nvml.ancestors = {(U1, U2): lost, (U2, U1): lost}
    await loop.once()
    assert cluster.node_annotations[REGISTER].count('"health":true') == 1
    assert (
        cluster.node_annotations[SCORES] == f'[{{"uuid":"{U1}","score":{{}}}},{{"uuid":"{U2}","score":{{}}}}]'
    )
    assert cluster.events == []


async def test_an_unknown_common_ancestor_is_an_error_of_the_node(cluster: Any, nvml: Any) -> None:
    nvml.ancestors[U1, U2] = 45
    with pytest.raises(TopologyError, match="unknown common ancestor 45"):
        await registrar(cluster, nvml).once()
    assert cluster.patches == []


async def test_an_unknown_common_ancestor_does_not_end_the_loop(
    cluster: Any, nvml: Any, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.ancestors[U1, U2] = 45
    board = Board()
    running = asyncio.create_task(registrar(cluster, nvml, board=board).run())
    try:
        await until(lambda: "register.failed" in [record.message for record in caplog.records])
        del nvml.ancestors[U1, U2]
        board.mark_unhealthy([U2], "XID 74")
        await until(lambda: SCORES in cluster.node_annotations)
    finally:
        running.cancel()


async def test_only_registered_cards_are_asked_and_scored(cluster: Any, nvml: Any) -> None:
    nvml.links[U2] = NvmlError("broken", 999)
    await registrar(cluster, nvml, settings=Settings(excluded_indexes=frozenset({1}))).once()
    assert cluster.node_annotations[SCORES] == f'[{{"uuid":"{U1}","score":{{}}}}]'


async def test_t2_an_nvlink_of_one_end_scores_nothing_and_raises_an_event_an_hour(
    cluster: Any, nvml: Any
) -> None:
    nvml.links[U2] = []
    now = [0.0]
    keeper = ScoreKeeper(cluster, CardReader(nvml), PairScores.REQUIRED, clock=lambda: now[0])

    def devices(count: int) -> list[DeviceInfo]:
        return [
            DeviceInfo(id=uuid, count=count, devmem=1024, devcore=100, type="A", health=True)
            for uuid in (U1, U2)
        ]

    assert await keeper.scores(devices(1)) == {U1: {U2: 0}, U2: {U1: 0}}
    ((about, reason, text),) = cluster.events
    assert (about, reason) == ("node", "AsymmetricGPUP2PLink")
    assert text == (
        f"asymmetric P2P link data, these pairs score 0: {U1} sees 2 kinds of link to {U2}, "
        "which sees 1 kind of link back"
    )
    now[0] = 3599.0
    await keeper.scores(devices(2))
    assert len(cluster.events) == 1
    now[0] = 3600.0
    await keeper.scores(devices(3))
    assert len(cluster.events) == 2
