"""The Grafana dashboard shows series that our programs export, in their units (monitor.md §11)."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hami.node.monitor.series import HELP
from hami.scheduler.edge import metric_texts

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "dashboards/hami.json").read_text("utf-8")
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
FRACTION = "hami_node_gpu_memory_allocated_ratio"
CARD = {"node", "device_uuid", "device_index", "device_type"}
CONTAINER = {"namespace", "pod", "container"}
EXPORTED = {
    *HELP,
    *(family.name for family in metric_texts.NODE_FAMILIES),
    *(family.name for family in metric_texts.POD_FAMILIES),
    *(metric_texts.QUOTA_USED.name, metric_texts.QUOTA_LIMIT.name),
}


def labels_of(metric: str) -> set[str]:
    """The labels by which a panel may select or name a series."""
    if metric.startswith("hami_resource_quota"):
        return {"namespace", "quota_name"}
    if metric.startswith(("hami_vgpu", "hami_container")):
        return {*CONTAINER, "vdevice_index", "device_uuid"}
    return CARD


def metrics(text: str) -> set[str]:
    return set(re.findall(r"\bhami_\w+", text))


def test_every_series_of_the_dashboard_is_exported() -> None:
    used = set().union(*map(metrics, EXPRESSIONS))
    variables = {item["name"]: item.get("definition", "") for item in DASHBOARD["templating"]["list"]}
    used |= metrics(" ".join(variables.values()))
    assert used <= EXPORTED
    assert list(variables) == ["datasource", "node", "namespace"]
    wanted = {"hami_vgpu_blocked", "hami_vgpu_core_limit_enforced", "hami_resource_quota_used"}
    assert wanted <= used


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_a_panel_selects_and_names_by_labels_that_its_series_have(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        selected = set(re.findall(r"[{(,]\s*(\w+)(?:=~|[,)])", target["expr"]))
        named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        for metric in metrics(target["expr"]):
            assert (selected - {"10"}) | named <= labels_of(metric), metric
        assert target["datasource"]["uid"] == "${datasource}"


def test_percent_is_percent_and_the_one_fraction_is_scaled() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            ratio = "_ratio" in target["expr"] or target["expr"].startswith("100 *")
            assert (panel["fieldConfig"]["defaults"]["unit"] == "percent") == ratio, panel["title"]
    scaled = [text for text in EXPRESSIONS if FRACTION in text]
    assert scaled
    assert all(text.startswith(f"100 * {FRACTION}") for text in scaled)


def test_panels_lie_side_by_side() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
