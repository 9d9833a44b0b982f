"""`hami support-bundle` as a user calls it, against an API server."""

from __future__ import annotations

import asyncio
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hami.cli.main import main
from hami.local.api.apiserver import ApiServer
from hami.local.api.resources import NODES, PODS

LABELS = {"app.kubernetes.io/component": "hami-scheduler"}


async def _call(*words: str) -> Result:
    arguments = ["support-bundle", *words]
    return await asyncio.to_thread(lambda: CliRunner().invoke(main, arguments, prog_name="hami"))


async def _install(api: ApiServer) -> None:
    await api.registry.create(NODES, "", {"metadata": {"name": "gpu-node-1", "labels": {"gpu": "on"}}})
    env = [{"name": "TOKEN", "value": "hunter2hunter2"}]
    spec: dict[str, Any] = {"containers": [{"name": "main", "image": "x", "command": ["true"], "env": env}]}
    await api.registry.create(
        PODS, "default", {"metadata": {"name": "hami-scheduler-1", "labels": LABELS}, "spec": spec}
    )


async def test_one_file_is_made_and_it_is_said_what_it_lacks(
    embedded_api: ApiServer, kubeconfig: Path, tmp_path: Path
) -> None:
    await _install(embedded_api)
    file = tmp_path / "report.tar.gz"
    done = await _call(str(file), "--kubeconfig", str(kubeconfig))
    assert done.exit_code == 0, done.output
    assert "1/7 installation and checks" in done.stderr
    assert "note: log of hami-scheduler-1/main: " in done.stderr
    assert done.stdout.startswith(f"{file}: ")
    with tarfile.open(file) as archive:
        texts = {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]
    assert not any(b"hunter2" in text for text in texts.values())
    (pod,) = json.loads(texts["hami-support/objects/pods.json"])
    assert pod["spec"]["containers"][0]["env"] == [{"name": "TOKEN", "value": "(removed)"}]
    assert b"log of hami-scheduler-1/main: " in texts["hami-support/README.txt"]


async def test_names_are_replaced_on_request(
    embedded_api: ApiServer, kubeconfig: Path, tmp_path: Path
) -> None:
    await _install(embedded_api)
    file = tmp_path / "report.tar.gz"
    done = await _call(str(file), "--kubeconfig", str(kubeconfig), "--hash-names")
    assert done.exit_code == 0, done.output
    with tarfile.open(file) as archive:
        texts = [archive.extractfile(entry).read() for entry in archive]  # type: ignore[union-attr]
    assert not any(b"gpu-node-1" in text for text in texts)


@pytest.mark.parametrize("words", [("--timeout", "1"), ("--max-size", "0"), ("--log-lines", "-1")])
async def test_limits_that_make_no_sense_are_a_wrong_command_line(words: tuple[str, ...]) -> None:
    assert (await _call(*words)).exit_code == 2


async def test_a_file_that_cannot_be_written_is_told(
    embedded_api: ApiServer, kubeconfig: Path, tmp_path: Path
) -> None:
    await _install(embedded_api)
    done = await _call(str(tmp_path / "absent" / "x"), "--kubeconfig", str(kubeconfig))
    assert done.exit_code == 1
    assert "No such file or directory" in done.output
