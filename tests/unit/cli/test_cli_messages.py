"""What the commands say: their help, and the one line with which a process that cannot start ends."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hami.cli import device_plugin, monitor, scheduler
from hami.cli.main import main
from hami.kube.logs import setup_logging

SERVERS = {
    "scheduler": scheduler.command,
    "device-plugin": device_plugin.command,
    "monitor": monitor.command,
}
MAIN = [sys.executable, "-c", "from hami.cli.main import main; main(prog_name='hami')"]


def run(*words: str, **environment: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and log lines of a process that ends by itself; each line must be a JSON object."""
    clean = {name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH")}
    done = subprocess.run(
        [*MAIN, *words], env={**clean, "HOME": "/nonexistent", **environment},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == ""
    return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]


@pytest.fixture
def device_config(tmp_path: Path) -> Path:
    path = tmp_path / "device-config.yaml"
    path.write_text("nvidia: {resourceCountName: nvidia.com/gpu}\n")
    return path


@pytest.mark.parametrize("name", SERVERS)
def test_every_option_is_explained(name: str) -> None:
    shown = [
        option for option in SERVERS[name].params if isinstance(option, click.Option) and not option.hidden
    ]
    assert [option.opts for option in shown if not option.help] == []


@pytest.mark.parametrize("name", SERVERS)
def test_no_help_shows_a_name_of_the_program_text(name: str) -> None:
    text = CliRunner().invoke(SERVERS[name], ["--help"]).output
    assert re.findall(r"--\S+ _[A-Z]+", text) == []
    assert re.findall(r"default:\s+(True|False)", text) == []
    assert "true|false" in text


def test_the_list_of_commands_is_not_cut_off() -> None:
    lines = CliRunner().invoke(main, ["--help"]).output.partition("Commands:")[2].splitlines()
    assert [line for line in lines if line.endswith("...")] == []


@pytest.mark.parametrize(
    ("words", "environment", "event", "reason"),
    [
        (["scheduler"], {}, "scheduler.failed", "--device-config-file is required"),
        (["device-plugin"], {}, "plugin.failed", "--config-file ($CONFIG_FILE) is required"),
        (["device-plugin", "--config-file", "x"], {}, "plugin.failed", "cannot read x: No such file"),
        (["device-plugin", "--config-file", "empty.yaml"], {}, "plugin.failed", "set $NODE_NAME"),
        (["monitor"], {}, "monitor.failed", "HOOK_PATH not set: the device plugin's folder"),
        (["monitor"], {"HOOK_PATH": "/x"}, "monitor.failed", "NODE_NAME not set: the name of this node"),
        (
            ["device-plugin", "--config-file", "empty.yaml", "--device-list-strategy", "y"],
            {"NODE_NAME": "n"},
            "plugin.failed",
            "unknown y; known are envvar",
        ),
    ],
)  # fmt: skip
def test_a_process_that_cannot_start_says_why_in_one_log_line(
    words: list[str],
    environment: dict[str, str],
    event: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "empty.yaml").write_text("{}")
    monkeypatch.chdir(tmp_path)
    status, lines = run(*words, **environment)
    assert (status, [line["event"] for line in lines]) == (1, [event])
    assert reason in lines[0]["reason"]


def test_a_bad_device_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "device-config.yaml"
    path.write_text("nvidia: {deviceSplitCount: many}\n")
    status, lines = run("scheduler", "--device-config-file", str(path))
    assert (status, lines[-1]["event"]) == (1, "scheduler.failed")
    assert lines[-1]["reason"].startswith(
        f"--device-config-file {path}: device config: nvidia.deviceSplitCount"
    )


def test_an_unknown_policy_is_reported(device_config: Path) -> None:
    _, lines = run(
        "scheduler", "--device-config-file", str(device_config), "--node-scheduler-policy", "binpak",
        "--gpu-scheduler-policy", "numa, spraed",
    )  # fmt: skip
    found = {line["flag"]: line["unknown"] for line in lines if line["event"] == "flag.unknown_policy"}
    assert found == {"--node-scheduler-policy": ["binpak"], "--gpu-scheduler-policy": ["spraed"]}


def test_the_default_policies_are_known(device_config: Path) -> None:
    _, lines = run("scheduler", "--device-config-file", str(device_config))
    assert [line["event"] for line in lines] == ["scheduler.failed"]  # there is no Kubernetes here


def test_a_library_s_chatter_is_no_event(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    for name in ("uvicorn", "grpc"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    setup_logging(logging.DEBUG)
    try:
        logging.getLogger("grpc._cython.cygrpc").debug("Loaded running loop")
        logging.getLogger("uvicorn.error").info("Started server process [%d]", 1)
        logging.getLogger("uvicorn.error").warning("Exceeded [%d]", 1, extra={"color_message": "\x1b[36m%d"})
    finally:
        logging.captureWarnings(capture=False)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["Exceeded [1]"]
    assert "color_message" not in lines[0]


def test_a_file_that_is_no_region_is_named(tmp_path: Path) -> None:
    file = tmp_path / "other.cache"
    file.write_bytes(b"x" * 4096)
    result = CliRunner().invoke(main, ["region", str(file)])
    assert (result.exit_code, result.output) == (1, f"Error: {file}: magic flag not matched\n")


def test_a_checkout_without_a_packaged_library_is_told_where_one_is(tmp_path: Path) -> None:
    words = ["install-library", "--library", str(tmp_path / "absent.so"), "--host-root", str(tmp_path)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "absent.so" in result.output
    assert "--library build/native/libvgpu.so" in result.output


def test_every_line_of_the_list_of_commands_is_whole() -> None:
    text = CliRunner().invoke(main, ["--help"]).output
    assert len(text.splitlines()) > len(SERVERS)
    assert [line for line in text.splitlines() if line.startswith("  ") and line.endswith("...")] == []


def test_the_plugin_of_kubectl_is_named_as_it_is_called() -> None:
    text = CliRunner().invoke(main, ["explain", "--help"], prog_name="kubectl-hami").output
    assert text.startswith("Usage: kubectl hami explain ")
