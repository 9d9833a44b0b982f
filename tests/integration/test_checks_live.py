"""`hami preflight` and `hami verify` against an API server: what they read, and how they end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hami.answers import inspection
from hami.answers.lists import list_plain
from hami.cli.main import main
from hami.kube.client import Client
from hami.kube.errors import Forbidden
from hami.kube.operations import Selection
from hami.kube.resources import DAEMON_SETS, Resource
from hami.local.api.apiserver import ApiServer
from hami.local.api.resources import NODES


async def _call(*words: str) -> Result:
    return await asyncio.to_thread(lambda: CliRunner().invoke(main, [*words], prog_name="hami"))


async def test_a_cluster_without_hami_is_judged_and_left_as_it_is(
    embedded_api: ApiServer, kubeconfig: Path
) -> None:
    await embedded_api.registry.create(NODES, "", {"metadata": {"name": "n1", "labels": {"gpu": "on"}}})
    before = embedded_api.store.get(NODES, "", "n1")
    ready = await _call("preflight", "--kubeconfig", str(kubeconfig))
    assert ready.exit_code == 0, ready.output
    assert "GPU nodes" in ready.output
    found = await _call("verify", "--kubeconfig", str(kubeconfig), "-o", "json")
    assert found.exit_code == 1
    answer = json.loads(found.output)
    assert answer["checks"][0] == {
        "name": "scheduler",
        "result": "fail",
        "found": "no pod",
        "fix": "helm status RELEASE; is this the right cluster, and --hami-namespace?",
    }
    assert [note.split(" cannot")[0] for note in answer["notes"]] == ["runtimeclasses"]
    assert embedded_api.store.get(NODES, "", "n1") == before


async def test_what_the_caller_may_not_list_is_unknown_and_told(
    embedded_api: ApiServer, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def without_daemonsets(
        client: Client, resource: Resource, selection: Selection | None = None
    ) -> list[dict[str, Any]]:
        if resource is DAEMON_SETS:
            raise Forbidden(403, "Forbidden", "alice may not list daemonsets")
        return await list_plain(client, resource, selection)

    monkeypatch.setattr(inspection, "list_plain", without_daemonsets)
    await embedded_api.registry.create(NODES, "", {"metadata": {"name": "n1", "labels": {"gpu": "on"}}})
    found = await _call("preflight", "--kubeconfig", str(kubeconfig))
    assert found.exit_code == 0, found.output
    assert "unknown: DaemonSets cannot be read" in found.output
    assert "alice may not list daemonsets" in found.output
    told = await _call("preflight", "--kubeconfig", str(kubeconfig), "-o", "json")
    notes = json.loads(told.output)["notes"]
    assert [note.split(" cannot")[0] for note in notes] == ["daemonsets", "runtimeclasses"]


async def test_a_label_that_is_none_is_a_wrong_command_line(
    embedded_api: ApiServer, kubeconfig: Path
) -> None:
    wrong = await _call("preflight", "--kubeconfig", str(kubeconfig), "--node-label", "gpu")
    assert wrong.exit_code == 2
    assert "KEY=VALUE" in wrong.output


async def test_an_api_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        "users: [{name: c, user: {}}]\ncontexts: [{name: c, context: {cluster: c, user: c}}]\n"
    )
    failed = await _call("verify", "--kubeconfig", str(config))
    assert failed.exit_code == 1
    assert "http://127.0.0.1:1 does not answer" in failed.output
