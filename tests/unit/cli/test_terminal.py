"""What strangers wrote never steers an administrator's terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from hami.answers.snapshot import Settings, Snapshot, encode_snapshot
from hami.cli.main import main
from hami.cli.terminal import plain, plain_json

EVIL = "e\x1b]0;owned\x07\x9b31m\u202e\u2028\nnote: all is well"


@given(st.text())
def test_a_line_has_only_printable_characters(text: str) -> None:
    assert plain(text).isprintable()
    if text.isprintable():
        assert plain(text) == text


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_keeps_its_meaning(value: Any) -> None:
    shown = plain_json(json.dumps(value, indent=1, ensure_ascii=False))
    assert json.loads(shown) == value
    assert all(line.isprintable() for line in shown.split("\n"))


def hami(*words: str, text: str | None = None) -> Result:
    return CliRunner().invoke(main, [*words], input=text, prog_name="hami", color=True)


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A cluster in which everybody who can write a text has written an escape sequence."""
    register = [
        {"id": f"c{EVIL}", "count": 10, "devmem": 8000, "devcore": 100, "type": f"T{EVIL}", "health": True}
    ]
    notes = {
        "hami.io/node-nvidia-register": json.dumps(register),
        "hami.io/node-handshake": "Reported_now",
    }
    node: dict[str, Any] = {"metadata": {"name": f"n{EVIL}", "annotations": notes}, "spec": {}, "status": {}}
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "9000"}
    condition = {"type": "PodScheduled", "status": "False", "message": EVIL}
    waits = {
        "metadata": {"name": "waits", "namespace": "default", "uid": "u"},
        "spec": {
            "schedulerName": "hami-scheduler",
            "containers": [{"name": EVIL, "resources": {"limits": limits}}],
        },
        "status": {"phase": EVIL, "conditions": [condition]},
    }
    broken = {"metadata": {"name": EVIL}, "spec": 7}
    path = tmp_path / "evil.json.gz"
    snapshot = Snapshot(1_787_400_000.0, Settings(), "", [node], [waits, broken], [], notes=[EVIL])
    path.write_bytes(encode_snapshot(snapshot))
    return str(path)


@pytest.mark.parametrize("output", ["text", "json"])
@pytest.mark.parametrize(
    "words", [("explain", "waits"), ("top", "nodes"), ("top", "cards"), ("simulate", "-")], ids=" ".join
)
def test_no_text_of_the_cluster_reaches_the_terminal_as_a_control_character(
    file: str, words: tuple[str, ...], output: str
) -> None:
    spec = json.dumps(
        {
            "kind": "Pod",
            "metadata": {"name": EVIL},
            "spec": {"containers": [{"name": "m", "resources": {"limits": {"nvidia.com/gpu": 1}}}]},
        }
    )
    result = hami(*words, "--snapshot", file, "-o", output, text=spec)
    assert result.exit_code == (words[0] == "simulate"), result.output
    assert all(line.isprintable() for line in result.output.split("\n")), result.output
    assert "\nnote: all is well" not in result.output
    assert "owned" in result.output


def test_an_error_is_one_line_without_control_characters(file: str) -> None:
    result = hami(
        "simulate", "-", "--snapshot", file, text=f"kind: Job\nmetadata: {{name: {EVIL!r}}}\nspec: {{}}"
    )
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.isprintable()


def test_notes_of_a_snapshot_are_plain_and_no_link_is_written_through(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = hami("snapshot", str(tmp_path / "out.gz"), "--snapshot", file)
    assert result.exit_code == 0
    assert all(line.isprintable() for line in result.output.split("\n"))
    victim = tmp_path / "victim"
    victim.write_text("keep")
    monkeypatch.setattr("os.getpid", lambda: 4711)
    (tmp_path / ".out.gz.4711").symlink_to(victim)
    result = hami("snapshot", str(tmp_path / "out.gz"), "--snapshot", file)
    assert result.exit_code == 1
    assert ".out.gz.4711 exists" in result.output
    assert victim.read_text("utf-8") == "keep"
