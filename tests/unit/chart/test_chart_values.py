"""Values, schema, documentation and versions of the chart agree. Needs no helm."""

from __future__ import annotations

import json
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts/hami"
TOOL = runpy.run_path(str(ROOT / "tools/chart_values.py"))
RENAMED = {"scheduler.kubeScheduler.imageTag", "devicePlugin.monitorctrPath", "mockDevicePlugin.tag"}
"""Known to the schema only so that the templates can say what to use instead."""
HEADINGS = {"USER-SUPPLIED VALUES"}
"""What helm itself writes into a values file, which is no value."""


def _values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    return found


def _schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    return found


def _properties(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for key, inner in schema["properties"].items():
        yield f"{prefix}{key}", inner
        if "properties" in inner:
            yield from _properties(inner, f"{prefix}{key}.")


def test_the_schema_knows_exactly_the_values_that_there_are() -> None:
    closed = {path for path, inner in _properties(_schema()) if "properties" not in inner}
    wanted = TOOL["leaves"](_values(), TOOL["documented"]((CHART / "values.yaml").read_text("utf-8")))
    assert closed - RENAMED - HEADINGS == set(wanted)


def test_the_schema_refuses_unknown_keys_everywhere() -> None:
    schema = _schema()
    assert schema["additionalProperties"] is False
    for path, inner in _properties(schema):
        if "properties" in inner:
            # an umbrella chart's own globals reach every chart below it
            assert inner["additionalProperties"] is (path == "global"), path


def test_the_page_of_the_values_is_up_to_date() -> None:
    wanted = TOOL["page"]((CHART / "values.yaml").read_text("utf-8"))
    assert (ROOT / "docs/values.md").read_text("utf-8") == wanted, "run tools/chart_values.py"


def test_a_key_without_its_comment_is_found() -> None:
    with pytest.raises(TOOL["UndocumentedError"], match=r"new\.key"):
        TOOL["page"]("# -- Known\nknown: 1\nnew:\n  key: 2\n")
    with pytest.raises(TOOL["UndocumentedError"], match="no key follows"):
        TOOL["page"]("# -- Nothing\n\nknown: 1\n")


def test_chart_images_and_package_have_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert _values()["global"]["imageTag"] == f"v{version}"
