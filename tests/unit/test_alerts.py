"""Alert rules: they are made of series that our programs export, and each is explained (operations.md §9)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "charts/hami/files/alerts.yaml").read_text("utf-8")
GROUPS: list[dict[str, Any]] = yaml.safe_load(TEXT)["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
PAGE = (ROOT / "docs/alerts.md").read_text("utf-8")
METRICS = (ROOT / "docs/metrics.md").read_text("utf-8")
SCRAPED = {"instance", "job"}
CARD = {"node", "device_uuid", "device_index", "device_type"}
CONTAINER = {"namespace", "pod", "container"}
FUNCTIONS = {"absent", "sum", "count", "increase", "rate", "histogram_quantile", "time"}
WORDS = {"by", "on", "unless", "and", "or", "le"}


def metrics(text: str) -> set[str]:
    return set(re.findall(r"\bhami_\w+", text))


def labels_of(metric: str) -> set[str]:
    """The labels of a series."""
    if metric.startswith("hami_hostpid") or metric in ("hami_vgpu_blocked", "hami_vgpu_core_limit_enforced"):
        return CONTAINER
    if metric.startswith(("hami_vgpu", "hami_container")):
        return {*CONTAINER, "vdevice_index", "device_uuid"}
    if metric.startswith(("hami_scheduler", "hami_monitor")):
        return {"le"}
    return CARD


def left_after(expression: str) -> set[str]:
    """The labels that the value of an expression still has."""
    if re.match(r"(sum|count|absent)\b", expression) or "histogram_quantile" in expression:
        by = re.search(r"^(?:sum|count) by \(([\w, ]+)\)", expression)
        return set(by[1].replace(" ", "").split(",")) if by else set()
    return set.intersection(*(labels_of(metric) for metric in metrics(expression))) | SCRAPED


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_a_rule_is_made_of_metrics_that_are_documented(rule: dict[str, Any]) -> None:
    named = {re.sub(r"_(bucket|count|sum)$", "", name) for name in metrics(rule["expr"])}
    assert named
    assert sorted(name for name in named if f"`{name}`" not in METRICS) == []


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_a_rule_selects_and_tells_by_labels_that_are_there(rule: dict[str, Any]) -> None:
    expression = rule["expr"]
    selected = set(re.findall(r"[{,]\s*(\w+)=~?", expression))
    grouped = {
        name for found in re.findall(r"\b(?:by|on) \(([\w, ]+)\)", expression) for name in found.split(", ")
    }
    there = set.union(*(labels_of(metric) for metric in metrics(expression)))
    assert selected | grouped <= there
    told = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert told <= left_after(expression)


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_a_rule_is_well_formed(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"HAMi[A-Z]\w+", rule["alert"])
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert re.fullmatch(r"\d+[mh]", rule.get("for", "1m"))
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    expression = re.sub(r'"[^"]*"', "", rule["expr"])
    assert expression.count("(") == expression.count(")")
    words = set(re.findall(r"(?<![\w$.])[a-z_]+(?=\s*\()", expression)) - WORDS
    assert words <= FUNCTIONS
    assert ("$value" in rule["annotations"]["description"]) == (
        "{{ $value" in rule["annotations"]["description"]
    )


def test_every_alert_has_its_part_of_the_page_and_leads_there() -> None:
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert headings == [rule["alert"] for rule in RULES]
    assert [rule["annotations"]["runbook"] for rule in RULES] == [
        f"docs/alerts.md#{name.lower()}" for name in headings
    ]


def test_log_events_and_events_that_the_page_names_are_written_somewhere() -> None:
    sources = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "src/hami").rglob("*.py")))
    named = re.findall(r"`([a-z_]+\.[a-z_]+)`", PAGE)
    named += re.findall(r"`((?:HAMi|Card|Registration|Binding)[A-Z][A-Za-z]+)`", PAGE)
    assert len(named) > 5
    assert [name for name in named if f'"{name}"' not in sources and not name.endswith(".com")] == []


def test_what_operations_names_is_watched() -> None:
    watched = set().union(*(metrics(rule["expr"]) for rule in RULES))
    assert {
        "hami_scheduler_leader", "hami_scheduler_synced", "hami_scheduler_bind_failures",
        "hami_gpu_unhealthy",
        "hami_scheduler_filter_duration_seconds_bucket", "hami_scheduler_oldest_node_lock_seconds",
        "hami_vgpu_oom_total", "hami_monitor_last_update_timestamp_seconds", "hami_vgpu_memory_limit_bytes",
        "hami_scheduler_certificate_expiry_timestamp_seconds", "hami_container_last_kernel_elapsed_seconds",
        "hami_host_gpu_memory_total_bytes",
    } <= watched  # fmt: skip
