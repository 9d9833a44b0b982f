"""docs/adding-a-vendor.md works as it stands: its made-up vendor is scheduled with its data alone."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from vendor_desk import NOW, Desk, limits_of, pod

from hami.vendors.config import ConfigError, decode_config, load_profiles, parse_config
from hami.vendors.types import VendorProfile

PAGE = Path(__file__).parents[3] / "docs" / "adding-a-vendor.md"
MOST_LINES = 80
NPU, MEMORY, CORES = "acme.example/npu", "acme.example/npu-memory", "acme.example/npu-cores"


def block(language: str) -> str:
    """The first block of the page in this language."""
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def acme() -> VendorProfile:
    return load_profiles(parse_config(block("yaml")))[-1]


@pytest.fixture
def desk(acme: VendorProfile) -> Desk:
    """Node n1 with the card of the page and a second one."""
    desk = Desk(acme)
    (card,) = yaml.safe_load(block("json"))
    desk.registered("n1", card, {**card, "id": "ACME-1", "index": 1}, capacity={NPU: 8})
    return desk


def test_the_description_is_short() -> None:
    assert len(block("yaml").splitlines()) < MOST_LINES


def test_its_pods_share_cards_and_carry_its_annotations(desk: Desk) -> None:
    obj = pod({NPU: 1, MEMORY: 8, CORES: 25}, inits=[{}])
    stored = desk.admitted(obj)
    assert stored["spec"]["schedulerName"] == "hami-scheduler"
    assert desk.numbers(stored) == (1, 8192, 0, 25)
    written = desk.written(obj)
    assert written["acme.example/allocated"] == ";ACME-1,Acme,8192,25:;"
    assert written["acme.example/to-allocate"] == written["acme.example/allocated"]
    desk.bind(obj)
    assert desk.used("n1")["ACME-1"].mem == 8192
    assert desk.refused(pod({NPU: 1, MEMORY: 33}, name="q")) == "2/2 CardInsufficientMemory"
    assert desk.allocated(pod({NPU: 1}, name="r")) == "ACME-0,Acme,32768,0:;"


def test_its_requests_are_denied_with_the_unit(desk: Desk) -> None:
    assert "the unit is 1024 MiB" in desk.denied(pod({NPU: 1, MEMORY: "64Gi"}))
    desk.quota({MEMORY: 4})
    assert "exceeding resource quota" in desk.denied(pod({NPU: 1, MEMORY: 8}))


def test_its_annotations_are_not_for_users(desk: Desk) -> None:
    obj = pod({NPU: 1}, annotations={"acme.example/allocated": "ACME-0,Acme,1,0:;"})
    assert "acme.example/allocated" not in desk.admitted(obj)["metadata"]["annotations"]
    assert limits_of(obj) == {NPU: "1"}


def test_its_plugin_is_asked_whether_it_lives(acme: VendorProfile) -> None:
    desk = Desk(acme)
    (card,) = yaml.safe_load(block("json"))
    outcome = desk.registered("n1", card, capacity={NPU: 4})
    ((node, changes),) = outcome.patches
    assert node == "n1"
    assert str(changes["acme.example/node-handshake"]).startswith("Requesting_")
    silent = {"acme.example/node-handshake": "Requesting_2026-08-22 09:58:00"}
    desk.registered("n1", card, annotations=silent, capacity={NPU: 4}, allocatable={NPU: 0}, now=NOW)
    assert desk.cards("n1") == []
    assert acme.rules.lock == "hami"


def test_names_follow_from_the_word_where_none_is_given() -> None:
    document = {"profiles": [{"commonWord": "Acme", "resourceCountName": NPU, "registerFormat": "capacity"}]}
    profile = load_profiles(decode_config(document))[-1]
    desk = Desk(profile)
    desk.node("n1", capacity={NPU: 2})
    assert [card.id for card in desk.cards("n1")] == ["n1-Acme-0", "n1-Acme-1"]
    assert (
        desk.written(pod({NPU: 2}))["hami.io/Acme-devices-allocated"]
        == "n1-Acme-1,Acme,0,0:n1-Acme-0,Acme,0,0:;"
    )


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ({"commonWord": "", "resourceCountName": NPU}, "profiles[0].commonWord is ''"),
        ({"commonWord": "A,B", "resourceCountName": NPU}, "profiles[0].commonWord is 'A,B'"),
        ({"commonWord": "Acme"}, "profiles[0].resourceCountName is empty"),
        (
            {"commonWord": "Acme", "resourceCountName": NPU, "registerFormat": "yaml"},
            "profiles[0].registerFormat is 'yaml', it must be json, csv or capacity",
        ),
        ({"commonWord": "DCU", "resourceCountName": NPU}, "is used by both hygon and profiles[0]"),
        (
            {"commonWord": "Acme", "resourceCountName": NPU, "cards": {"slots": "x"}},
            "profiles[0].cards.slots must be",
        ),
    ],
)
def test_a_description_that_cannot_work_is_refused_with_its_path(item: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        decode_config({"profiles": [item]})
    assert any(problem in text for text in refused.value.problems), refused.value.problems
