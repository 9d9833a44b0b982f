"""`hami locks` on an API server: what it lists, and which locks it removes."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hami.answers import locks as answers
from hami.cli.main import main
from hami.kube import resources
from hami.kube.client import Client
from hami.local.api.apiserver import ApiServer
from hami.local.api.resources import DEPLOYMENTS, NODES, PODS
from hami.protocol.keys import NODE_LOCK
from hami.protocol.lock import LockOwner, format_lock

LABELS = {"app.kubernetes.io/component": "hami-scheduler"}


async def _call(kubeconfig: Path, *words: str, text: str = "") -> Result:
    arguments = ["locks", "--kubeconfig", str(kubeconfig), *words]
    return await asyncio.to_thread(lambda: CliRunner().invoke(main, arguments, input=text, prog_name="hami"))


async def _lock(api: ApiServer, node: str, pod: str, age_s: float = 10.0) -> str:
    text = format_lock(LockOwner("default", pod), time.time() - age_s)
    metadata = {"name": node, "annotations": {NODE_LOCK: text, "other.io/kept": "1"}}
    await api.registry.create(NODES, "", {"metadata": metadata})
    return text


async def _pod(api: ApiServer, name: str) -> None:
    spec = {"containers": [{"name": "main", "image": "x", "command": ["true"]}]}
    await api.registry.create(PODS, "default", {"metadata": {"name": name}, "spec": spec})


def _annotations(api: ApiServer, node: str) -> dict[str, str]:
    found: dict[str, str] = api.store.get(NODES, "", node)["metadata"]["annotations"]
    return found


async def test_locks_are_listed_with_what_became_of_their_pods(
    embedded_api: ApiServer, kubeconfig: Path
) -> None:
    await _pod(embedded_api, "waits")
    await _lock(embedded_api, "n1", "waits")
    await _lock(embedded_api, "n2", "gone")
    await embedded_api.registry.create(NODES, "", {"metadata": {"name": "n3"}})
    listed = await _call(kubeconfig)
    assert listed.exit_code == 0, listed.output
    header, first, second = listed.output.splitlines()
    assert header.split() == ["NODE", "LOCK", "HOLDER", "AGE", "STATE", "WHY"]
    assert first.startswith(
        "n1    hami.io/mutex.lock  default/waits  10s  held   the pod is about to be bound"
    )
    assert second == "n2    hami.io/mutex.lock  default/gone   10s  stale  the pod does not exist"
    answer = json.loads((await _call(kubeconfig, "-o", "json")).output)
    assert [(one["node"], one["state"]) for one in answer["locks"]] == [("n1", "held"), ("n2", "stale")]
    assert answer["timeout_s"] == 300.0


async def test_the_schedulers_own_age_of_a_stale_lock_counts(
    embedded_api: ApiServer, kubeconfig: Path
) -> None:
    await _pod(embedded_api, "waits")
    await _lock(embedded_api, "n1", "waits", age_s=100.0)
    env = [{"name": "HAMI_NODELOCK_EXPIRE", "value": "1m"}]
    container = {"name": "extender", "image": "i", "command": ["scheduler"], "env": env}
    spec = {
        "replicas": 0,
        "selector": {"matchLabels": LABELS},
        "template": {"metadata": {"labels": LABELS}, "spec": {"containers": [container]}},
    }
    body = {"metadata": {"name": "hami-scheduler", "labels": LABELS}, "spec": spec}
    await embedded_api.registry.create(DEPLOYMENTS, "default", body)
    assert "older than 1m0s" in (await _call(kubeconfig)).output
    assert " held " in (await _call(kubeconfig, "--node-lock-timeout", "10m")).output


async def test_a_stale_lock_is_removed_once_that_is_confirmed(
    embedded_api: ApiServer, kubeconfig: Path
) -> None:
    await _lock(embedded_api, "n1", "gone")
    refused = await _call(kubeconfig, "--release", "n1", text="n\n")
    assert refused.exit_code == 1
    assert NODE_LOCK in _annotations(embedded_api, "n1")
    done = await _call(kubeconfig, "--release", "n1", text="y\n")
    assert done.exit_code == 0, done.output
    assert "is stale by default/gone since" in done.output
    assert done.output.endswith("released 1\n")
    assert _annotations(embedded_api, "n1") == {"other.io/kept": "1"}
    again = await _call(kubeconfig, "--release", "n1")
    assert (again.exit_code, again.output) == (0, "node n1 is not locked\n")


async def test_a_lock_that_is_needed_is_removed_by_force_only(
    embedded_api: ApiServer, kubeconfig: Path
) -> None:
    await _pod(embedded_api, "waits")
    text = await _lock(embedded_api, "n1", "waits")
    kept = await _call(kubeconfig, "--release", "n1", "--yes")
    assert kept.exit_code == 1
    assert "is held by default/waits since" in kept.output
    assert "--force removes it all the same" in kept.output
    assert _annotations(embedded_api, "n1")[NODE_LOCK] == text
    forced = await _call(kubeconfig, "--release", "n1", "--force", "--yes", "-o", "json")
    assert forced.exit_code == 0, forced.output
    assert [one["holder"] for one in json.loads(forced.output)["locks"]] == ["default/waits"]
    assert NODE_LOCK not in _annotations(embedded_api, "n1")


async def test_another_lock_that_came_meanwhile_stays(
    embedded_api: ApiServer, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _lock(embedded_api, "n1", "gone")
    taken = format_lock(LockOwner("default", "next"), time.time())
    release = answers.release

    async def late(client: Client, lock: answers.NodeLock) -> bool:
        patch: dict[str, Any] = {"metadata": {"annotations": {NODE_LOCK: taken}}}
        await client.patch(resources.NODES, "n1", patch, dict)
        return await release(client, lock)

    monkeypatch.setattr(answers, "release", late)
    done = await _call(kubeconfig, "--release", "n1", "--yes")
    assert done.exit_code == 1
    assert "has changed and was left" in done.output
    assert _annotations(embedded_api, "n1")[NODE_LOCK] == taken


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--force",), 2, "--force and --yes are for --release NODE"),
        (("--release", "n9", "--yes"), 1, "no node n9"),
        (("--release", "n9", "-o", "json"), 2, "give --yes"),
        (("--node-lock-timeout", "soon"), 2, "invalid duration 'soon'"),
        (("--node-lock-timeout", "0"), 2, "not above 0"),
    ],
)
async def test_what_cannot_be_done_is_said(
    embedded_api: ApiServer, kubeconfig: Path, words: tuple[str, ...], code: int, text: str
) -> None:
    found = await _call(kubeconfig, *words)
    assert (found.exit_code, text in found.output) == (code, True), found.output
