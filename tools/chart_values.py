"""Writes docs/values.md from charts/hami/values.yaml: each `# -- text` above a key is its row.

usage: chart_values.py [--check]      with --check: say what would change, and exit 1
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
VALUES = ROOT / "charts/hami/values.yaml"
PAGE = ROOT / "docs/values.md"
_KEY = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z][\w-]*):")
_SHOWN = 60
"""Longest default that is printed, in characters."""
_HEAD = """# Values of the chart

Made from the comments of [values.yaml](../charts/hami/values.yaml) by `tools/chart_values.py`.
Keys and defaults are those of HAMi 2.10, except where a row says "(new)" or "in HAMi". Unknown keys are
refused. [values-hardened.yaml](../charts/hami/values-hardened.yaml) is a stricter set.

| key | default | meaning |
|---|---|---|
"""


class UndocumentedError(Exception):
    """Keys without a comment, or comments without a key."""


def documented(text: str) -> dict[str, str]:
    """Path -> text of every key that has a comment; raises `UndocumentedError` where a comment has no key."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    comment = ""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("# -- "):
            comment = stripped[5:]
            continue
        match = _KEY.match(line)
        if match is None or stripped.startswith("#"):
            if comment:
                raise UndocumentedError(f"line {number}: no key follows the comment")
            continue
        indent = len(match["indent"])
        while path and path[-1][0] >= indent:
            path.pop()
        path.append((indent, match["key"]))
        if comment:
            found[".".join(key for _, key in path)] = comment
            comment = ""
    return found


def leaves(value: dict[str, Any], known: dict[str, str], prefix: str = "") -> dict[str, Any]:
    """Path -> default of every key that is a value of its own: it has a comment, or is no mapping."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        path = f"{prefix}{key}"
        if isinstance(inner, dict) and path not in known:
            found |= leaves(inner, known, f"{path}.")
        else:
            found[path] = inner
    return found


def page(text: str) -> str:
    """The whole page for a values.yaml; raises `UndocumentedError`."""
    comments = documented(text)
    defaults = leaves(yaml.safe_load(text), comments)
    missing = sorted(set(defaults) ^ set(comments))
    if missing:
        raise UndocumentedError(f"without a comment, or without a key: {', '.join(missing)}")
    rows = []
    for path, default in defaults.items():
        shown = json.dumps(default, ensure_ascii=False)
        shown = "see values.yaml" if len(shown) > _SHOWN else f"`{shown}`"
        rows.append(f"| `{path}` | {shown} | {comments[path].replace('|', '&#124;')} |\n")
    return _HEAD + "".join(rows)


def main(arguments: list[str]) -> int:
    """Write the page, or compare it."""
    wanted = page(VALUES.read_text("utf-8"))
    if arguments == ["--check"]:
        if PAGE.exists() and PAGE.read_text("utf-8") == wanted:
            return 0
        print(f"{PAGE} does not fit {VALUES}: run tools/chart_values.py", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
