"""The documents name things that exist, and explain what users meet."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hami.vendors import reasons

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCES = "\n".join(path.read_text() for path in sorted((ROOT / "src" / "hami").rglob("*.py")))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
    absent = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert absent == []


def test_every_reason_of_a_pending_pod_is_explained() -> None:
    codes = {value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)} - {
        reasons.INTERNAL_ERROR
    }
    assert [code for code in sorted(codes) if f"`{code}`" not in TROUBLESHOOTING] == []


def test_explained_events_are_written_somewhere() -> None:
    events = re.findall(r"^\| `([a-z_]+\.[a-z_]+)`", TROUBLESHOOTING, re.MULTILINE)
    events += re.findall(r"`(HAMi[A-Za-z]+)`", TROUBLESHOOTING)
    assert events
    assert [event for event in events if f'"{event}"' not in SOURCES] == []


def test_files_of_the_examples_are_all_listed() -> None:
    text = (ROOT / "docs" / "getting-started.md").read_text()
    assert [
        path.name for path in sorted((ROOT / "examples").iterdir()) if f"examples/{path.name}" not in text
    ] == []
