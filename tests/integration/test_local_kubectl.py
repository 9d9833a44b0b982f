"""kubectl against the embedded cluster; where kubectl is missing, its requests are made by a stand-in."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from local_harness import Kubectl

from hami.local.api.apiserver import ApiServer
from hami.local.api.resources import PODS
from hami.local.kubelet.containers import Isolation
from hami.local.kubelet.kubelet import Kubelet, NodeConfig, NodeLogs
from hami.local.scheduling.scheduler_loop import Profile, SchedulerLoop

TABLE = ",".join(
    ["application/json;as=Table;v=v1;g=meta.k8s.io", "application/json;as=Table;v=v1beta1;g=meta.k8s.io",
     "application/json"]
)  # fmt: skip
STRATEGIC = "application/strategic-merge-patch+json"


class StandIn:
    """Makes the requests that kubectl makes for the commands of this module, with its headers."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def run(self, *words: str) -> tuple[int, str]:
        command, *rest = words
        handler = getattr(self, f"_{command}")
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0)) as session:
            self._session = session
            result: tuple[int, str] = await handler(*rest)
            return result

    async def _request(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self._session.request(method, self._url + path, **options) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith("{") else text

    @staticmethod
    def _path(kind: str, name: str = "") -> str:
        plural = {"pod": "pods", "node": "nodes", "event": "events"}.get(kind, kind)
        base = "/api/v1" if plural == "nodes" else "/api/v1/namespaces/default"
        return f"{base}/{plural}" + (f"/{name}" if name else "")

    async def _get(self, kind: str, *rest: str) -> tuple[int, str]:
        path = self._path(kind, rest[0] if rest and not rest[0].startswith("-") else "")
        code, answer = await self._request("GET", path, headers={"Accept": TABLE})
        if code != 200:
            return 1, f"Error from server ({answer['reason']}): {answer['message']}"
        shown = [column["name"].upper() for column in answer["columnDefinitions"]]
        rows = [" ".join(str(cell) for cell in row["cells"]) for row in answer["rows"]]
        return 0, "\n".join([" ".join(shown), *rows])

    async def _apply(self, _flag: str, file: str) -> tuple[int, str]:
        body = yaml.safe_load(await asyncio.to_thread(Path(file).read_text))
        name = body["metadata"]["name"]
        path = self._path("pods")
        code, _ = await self._request("GET", f"{path}/{name}")
        if code == 404:
            code, answer = await self._request(
                "POST", f"{path}?fieldManager=kubectl-client-side-apply&fieldValidation=Strict", json=body
            )
            return (0, f"pod/{name} created") if code == 201 else (1, str(answer))
        code, answer = await self._patch_with(f"{path}/{name}", {"metadata": body["metadata"]})
        return (0, f"pod/{name} configured") if code == 200 else (1, str(answer))

    async def _patch_with(self, path: str, body: Any) -> tuple[int, Any]:
        return await self._request("PATCH", path, data=json.dumps(body), headers={"Content-Type": STRATEGIC})

    async def _label(self, kind: str, name: str, pair: str) -> tuple[int, str]:
        key, _, value = pair.partition("=")
        code, answer = await self._patch_with(self._path(kind, name), {"metadata": {"labels": {key: value}}})
        return (0, f"{kind}/{name} labeled") if code == 200 else (1, str(answer))

    async def _cordon(self, name: str) -> tuple[int, str]:
        code, answer = await self._patch_with(self._path("node", name), {"spec": {"unschedulable": True}})
        return (0, f"node/{name} cordoned") if code == 200 else (1, str(answer))

    async def _describe(self, kind: str, name: str) -> tuple[int, str]:
        code, found = await self._request("GET", self._path(kind, name))
        selector = f"involvedObject.name%3D{name},involvedObject.uid%3D{found['metadata']['uid']}"
        _, events = await self._request("GET", f"{self._path('events')}?fieldSelector={selector}")
        lines = [f"{event['reason']} {event['message']}" for event in events["items"]]
        return (0 if code == 200 else 1), "\n".join([f"Name: {name}", "Events:", *lines])

    async def _logs(self, name: str, *_rest: str) -> tuple[int, str]:
        code, text = await self._request("GET", f"{self._path('pods', name)}/log?container=main&follow=true")
        return (0 if code == 200 else 1), text

    async def _wait(self, condition: str, target: str, _limit: str) -> tuple[int, str]:
        kind, _, name = target.partition("/")
        for _ in range(1000):
            code, found = await self._request("GET", self._path(kind, name))
            if condition == "--for=delete" and code == 404:
                return 0, f"{target} condition met"
            if condition == "--for=condition=Ready" and code == 200:
                conditions = found["status"].get("conditions") or []
                if {"Ready": "True"} in [{item["type"]: item["status"]} for item in conditions]:
                    return 0, f"{target} condition met"
            await asyncio.sleep(0.05)
        return 1, "error: timed out waiting for the condition"

    async def _delete(self, kind: str, name: str, *rest: str) -> tuple[int, str]:
        code, answer = await self._request("DELETE", self._path(kind, name), json={"gracePeriodSeconds": 1})
        if code != 200:
            return 1, f"Error from server ({answer['reason']}): {answer['message']}"
        await self._wait("--for=delete", f"{kind}/{name}", "")
        return 0, f'{kind} "{name}" deleted'


@pytest.fixture(params=["kubectl", "stand-in"])
async def run(
    request: pytest.FixtureRequest, embedded_api: ApiServer, kubeconfig: Path, kubectl: str | None
) -> AsyncIterator[Any]:
    """``run`` of kubectl (of the stand-in where it is missing) on a cluster of one node."""
    real = kubectl if request.param == "kubectl" else None
    with tempfile.TemporaryDirectory(prefix="hami-") as directory:
        node = NodeConfig("n1", Path(directory) / "n1", restart_backoff_s=0.05)
        kubelet = Kubelet(node, embedded_api.registry, time.time, Isolation.NONE)
        loop = SchedulerLoop(embedded_api.registry, time.time, [Profile("default-scheduler")])
        embedded_api.logs = NodeLogs(lambda: [kubelet])
        try:
            await kubelet.start()
            await loop.start()
            yield (Kubectl(real, kubeconfig) if real else StandIn(embedded_api.url)).run
        finally:
            await loop.stop()
            await kubelet.stop()


def manifest(directory: Path, name: str, script: str, labels: dict[str, str] | None = None) -> str:
    path = directory / f"{name}.yaml"
    container = {"name": "main", "image": "none", "command": ["sh", "-c", script]}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels or {"app": "test"}},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }
    path.write_text(yaml.safe_dump(body))
    return str(path)


async def test_apply_wait_get_logs_describe_delete(run: Any, tmp_path: Path) -> None:
    script = "trap 'exit 0' TERM; echo hello; while :; do sleep 0.05; done"
    file = manifest(tmp_path, "web", script)
    code, output = await run("apply", "-f", file)
    assert code == 0, output
    assert "pod/web created" in output
    code, output = await run("wait", "--for=condition=Ready", "pod/web", "--timeout=90s")
    assert code == 0, output
    code, output = await run("get", "pods")
    assert code == 0
    assert "STATUS" in output
    assert "Running" in output
    code, output = await run("describe", "pod", "web")
    assert code == 0
    assert "Successfully assigned default/web to n1" in output
    code, output = await run("delete", "pod", "web")
    assert code == 0, output
    assert 'pod "web" deleted' in output
    code, output = await run("get", "pod", "web")
    assert code == 1
    assert "NotFound" in output


async def test_logs_of_a_finished_pod(run: Any, tmp_path: Path) -> None:
    file = manifest(tmp_path, "once", "sleep 0.2; echo line one; echo line two")
    assert (await run("apply", "-f", file))[0] == 0
    async with asyncio.timeout(60.0):
        while True:
            code, output = await run("get", "pod", "once")
            assert code == 0
            if "Completed" in output:
                break
            await asyncio.sleep(0.05)
    assert (await run("logs", "once"))[1].split("\n")[:2] == ["line one", "line two"]


async def test_a_changed_manifest_is_applied_again(run: Any, tmp_path: Path, embedded_api: ApiServer) -> None:
    await run("apply", "-f", manifest(tmp_path, "web", "sleep 60", {"app": "one"}))
    code, output = await run("apply", "-f", manifest(tmp_path, "web", "sleep 60", {"app": "two"}))
    assert code == 0, output
    assert "configured" in output
    code, output = await run("label", "pod", "web", "tier=front")
    assert code == 0, output
    labels = embedded_api.store.get(PODS, "default", "web")["metadata"]["labels"]
    assert labels == {"app": "two", "tier": "front"}


async def test_a_cordoned_node_shows_it(run: Any) -> None:
    code, output = await run("cordon", "n1")
    assert code == 0, output
    assert "Ready,SchedulingDisabled" in (await run("get", "nodes"))[1]
