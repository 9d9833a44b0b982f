"""The recorded cases against our code; another folder of cases is named by the environment ``HAMI_CASES``."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hami_cases import ours
from hami_cases.cases import GROUPS, NOW, OWN_FOLDER, Case, configured, load, with_times
from hami_cases.compare import difference, text_matches
from hami_cases.runner import Verdict, judge, judge_all, report

FOLDER = Path(os.environ.get("HAMI_CASES") or OWN_FOLDER)
ALL = list(load(FOLDER))


@pytest.mark.parametrize("group", [group for group in GROUPS if any(case.group == group for case in ALL)])
def test_no_recorded_case_of_the_group_fails(group: str) -> None:
    lines, failures = report(judge_all(case for case in ALL if case.group == group))
    assert not failures, "\n".join(lines)


def a_case(**changes: object) -> Case:
    found = next(case for case in load(OWN_FOLDER) if case.id == "codec-codec-0001")
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def test_a_wrong_answer_fails_and_is_reported_with_both_sides() -> None:
    case = a_case(answers=({"devices": [], "error": None},))
    lines, failures = report([judge(case)])
    assert failures == 1
    assert lines[0].startswith("FAILED codec-codec-0001")
    assert "DCU-1" in lines[3]
    assert lines[-1] == "0 passed, 1 failed, 0 undecided"


def test_a_difference_marked_as_ours_is_undecided_until_an_expectation_is_written_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = a_case(answers=({"devices": [], "error": None},), ours=("some document",))
    assert judge(case).verdict is Verdict.UNDECIDED
    right = a_case().answers[0]
    monkeypatch.setattr(ours, "_written", lambda group: {case.id: {"expect": right}})
    assert judge(case).verdict is Verdict.PASSED


def test_an_expectation_does_not_excuse_a_case_that_is_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    case = a_case(answers=({"devices": [], "error": None},))
    monkeypatch.setattr(ours, "_written", lambda group: {case.id: {"expect": a_case().answers[0]}})
    assert judge(case).verdict is Verdict.FAILED


def test_a_crash_of_our_code_is_a_failed_case() -> None:
    result = judge(a_case(input={"op": "no such operation"}))
    assert result.verdict is Verdict.FAILED
    assert "KeyError" in result.why


def test_a_case_of_a_vendor_that_nobody_knows_is_not_passed_over() -> None:
    case = a_case(id="codec-Unknown-0001", input={"op": "node-devices", "vendor": "Unknown", "node": {}})
    result = judge(case)
    assert result.verdict is Verdict.FAILED
    assert "Unknown" in result.why


def test_every_expectation_of_ours_belongs_to_a_marked_case() -> None:
    known = {case.id: case for case in load(OWN_FOLDER)}
    for group in GROUPS:
        for identifier, entry in ours.written(group).items():
            case = known[identifier]
            assert case.group == group
            assert case.ours or case.maybe_ours
            assert entry["why"]


def test_masked_times_match_times_only() -> None:
    assert text_matches("Requesting_<time>", "Requesting_2026-09-21 14:13:20")
    assert not text_matches("Requesting_<time>", "Requesting_soon")
    assert text_matches("<rfc3339>,a,b", "2026-09-21T14:13:20Z,a,b")
    assert text_matches("<unix-seconds>", str(NOW))
    assert difference({"a": "<unix-nanoseconds>"}, {"a": "12"})


def test_times_and_config_differences_are_filled_in() -> None:
    assert with_times({"x": ["@now-120|rfc3339@,ns,p"]}) == {"x": ["2026-09-21T14:11:20Z,ns,p"]}
    assert with_times("@now|unix@") == str(NOW)
    config = configured({"a": {"b": 1, "c": [{"d": 2}]}}, {"a/b": "__delete__", "a/c/0/d": 3, "e/f": 4})
    assert config == {"a": {"c": [{"d": 3}]}, "e": {"f": 4}}


def test_the_command_runs_a_folder_and_reports_failures_by_its_exit_status(tmp_path: Path) -> None:
    script = Path(__file__).with_name("run.py")
    good = {"id": "codec-codec-0001", "input": {"op": "pod-encode", "slots": [[]]}, "expect": {"text": ";"}}
    bad = good | {"id": "codec-codec-0002", "expect": {"text": ";;"}}
    (tmp_path / "codec").mkdir()
    (tmp_path / "codec" / "codec.json.gz").write_bytes(gzip.compress(json.dumps([good]).encode()))

    def run(folder: Path) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, str(script), str(folder)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.returncode, done.stdout

    assert run(tmp_path) == (
        0,
        "codec: 1 passed, 0 failed, 0 undecided\n1 passed, 0 failed, 0 undecided\n",
    )
    (tmp_path / "codec" / "more.json").write_text(json.dumps([bad]))
    code, text = run(tmp_path)
    assert code == 1
    assert text.endswith("1 passed, 1 failed, 0 undecided\n")
    assert run(tmp_path / "nothing")[0] == 2
