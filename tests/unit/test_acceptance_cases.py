"""`tests/acceptance.toml` and `tests/known_faults.toml` are complete and name only tests that exist."""

import ast
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).parent.parent
_RANGE = re.compile(r"(?P<prefix>[A-Za-z.]*)(?P<first>\d+)(?:-(?P=prefix)(?P<last>\d+))?")
_NODE_ID = re.compile(r"(?P<file>[\w/]+\.py)::(?P<name>(?:\w+::)?\w+)(?:\[(?P<parameters>.+)\])?")
_LEAST_REASON = 12
"""Characters. Shorter reasons explain nothing."""


def _documents() -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    for name in ("acceptance.toml", "known_faults.toml"):
        content = tomllib.loads((_TESTS / name).read_text("utf-8"))
        assert not set(content) & set(tables), "a table is in both files"
        tables |= content
    return tables


def _expanded(ids: list[str]) -> Iterator[str]:
    for item in ids:
        match = _RANGE.fullmatch(item)
        assert match, f"no id and no range: {item!r}"
        first, last = int(match["first"]), int(match["last"] or match["first"])
        assert first <= last, f"empty range: {item!r}"
        yield from (f"{match['prefix']}{number}" for number in range(first, last + 1))


@functools.cache
def _names_and_ids(file: str) -> tuple[frozenset[str], frozenset[str]]:
    """The tests of a file, methods as `Class::test`, and what it gives as `id=` of parameters."""
    tree = ast.parse((_TESTS / file).read_bytes())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = {node.name for node in tree.body if isinstance(node, functions)}
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        names |= {f"{owner.name}::{node.name}" for node in owner.body if isinstance(node, functions)}
    # Hypothesis runs a state machine as `TestStates = Machine.TestCase`, whose only test is runTest.
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Attribute)
            and node.value.attr == "TestCase"
        ):
            names |= {f"{target.id}::runTest" for target in node.targets if isinstance(target, ast.Name)}
    ids = {
        str(node.value.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "id" and isinstance(node.value, ast.Constant)
    }
    return frozenset(names), frozenset(ids)


def _tests_of(cases: Mapping[str, str | list[str]]) -> Iterator[tuple[str, str]]:
    for case, tests in cases.items():
        assert tests, f"case {case} names no test"
        for test in [tests] if isinstance(tests, str) else tests:
            yield case, test


def _problem_of(test: str) -> str:
    """Why `test` is no test of ours, or ""."""
    match = _NODE_ID.fullmatch(test)
    if match is None:
        return "not a pytest name"
    if not (_TESTS / match["file"]).is_file():
        return "no such file"
    names, ids = _names_and_ids(match["file"])
    short = match["name"].rpartition("::")[2]
    if match["name"] not in names or not short.startswith(("test_", "runTest")):
        return "no such test"
    if match["parameters"] is not None and match["parameters"] not in ids:
        return "no such parameters"
    return ""


@pytest.mark.parametrize("table", sorted(_documents()))
def test_every_case_of_the_document_is_listed_exactly_once(table: str) -> None:
    content = _documents()[table]
    assert set(content) <= {"document", "ids", "cases", "excluded"}
    assert content["document"].endswith(".md")
    wanted = list(_expanded(content["ids"]))
    listed = [*content.get("cases", {}), *content.get("excluded", {})]
    assert sorted(wanted) == sorted(set(wanted)), "an id is in two ranges"
    assert sorted(listed) == sorted(wanted)


@pytest.mark.parametrize("table", sorted(_documents()))
def test_every_named_test_exists(table: str) -> None:
    named = _tests_of(_documents()[table].get("cases", {}))
    problems = {f"{case}: {test}": problem for case, test in named if (problem := _problem_of(test))}
    assert problems == {}


@pytest.mark.parametrize("table", sorted(_documents()))
def test_every_excluded_case_has_a_reason(table: str) -> None:
    excluded = _documents()[table].get("excluded", {})
    assert [case for case, reason in excluded.items() if len(reason.strip()) < _LEAST_REASON] == []


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        ("unit/test_acceptance_cases.py::test_names_that_lead_nowhere_are_found", ""),
        (
            "unit/test_acceptance_cases.py::test_names_that_lead_nowhere_are_found[no brackets]",
            "no such parameters",
        ),
        ("unit/test_acceptance_cases.py::test_not_written", "no such test"),
        ("unit/test_acceptance_cases.py::_problem_of", "no such test"),
        ("unit/test_not_written.py::test_x", "no such file"),
        ("test_x", "not a pytest name"),
    ],
)
def test_names_that_lead_nowhere_are_found(test: str, problem: str) -> None:
    assert _problem_of(test) == problem


def test_ranges_are_expanded() -> None:
    assert list(_expanded(["1-3", "A9-A11", "M1"])) == ["1", "2", "3", "A9", "A10", "A11", "M1"]
