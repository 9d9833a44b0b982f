"""kubectl as a process, and a stand-in that makes its requests: for the tests of workloads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from local_harness import TUNNEL, Kubectl, Tunnel, reaped

from hami.local.api.apiserver import ApiServer
from hami.local.api.apply import LAST_APPLIED
from hami.local.api.objects import dig
from hami.local.api.resources import DAEMONSETS, DEFAULT_TABLE, DEPLOYMENTS, NODES, PODS, VERBS, Resource

APPLY = "application/apply-patch+yaml"
STRATEGIC = "application/strategic-merge-patch+json"
MERGE = "application/merge-patch+json"
AGENT = {"User-Agent": "kubectl/v1.32.4 (linux/amd64) kubernetes/a87cd6f", "Accept": "application/json"}


class StandIn:
    """Makes the requests of the kubectl commands of this module. ``run`` gives (exit status, output)."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        kinds = [found for found in DEFAULT_TABLE.resources if found.verbs == VERBS and not found.stored_as]
        self._names: dict[str, Resource] = {
            name: found
            for found in kinds
            for name in (found.kind, found.singular, found.plural, *found.short_names)
        }

    async def run(self, *words: str) -> tuple[int, str]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0), headers=AGENT) as session:
            self._session = session
            handler = getattr(self, "_" + words[0])
            result: tuple[int, str] = await handler(*words[1:])
            return result

    async def _ask(self, method: str, path: str, body: Any = None, content: str = "") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content or "application/json"} if data is not None else {}
        async with self._session.request(method, self._api.url + path, data=data, headers=headers) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith("{") else text

    @staticmethod
    def _path(resource: Resource, name: str = "", namespace: str = "default") -> str:
        scope = f"/namespaces/{namespace}" if resource.namespaced else ""
        return f"{resource.base_path}{scope}/{resource.plural}" + (f"/{name}" if name else "")

    def _target(self, words: tuple[str, ...]) -> tuple[Resource, str, list[str]]:
        """(kind, name, flags) of ``KIND NAME`` or ``KIND/NAME``."""
        plain = [word for word in words if not word.startswith("-")]
        flags = [word for word in words if word.startswith("-")]
        kind, _, name = plain[0].partition("/")
        return self._names[kind], name or (plain[1] if len(plain) > 1 else ""), flags

    @staticmethod
    def _error(answer: Any) -> tuple[int, str]:
        return 1, f"Error from server ({answer['reason']}): {answer['message']}"

    async def _apply(self, *words: str) -> tuple[int, str]:
        text = await asyncio.to_thread(Path(words[words.index("-f") + 1]).read_text)
        lines: list[str] = []
        for body in yaml.safe_load_all(text):
            if body is None:
                continue
            resource, name = self._names[body["kind"]], body["metadata"]["name"]
            path = self._path(resource, name, body["metadata"].get("namespace", "default"))
            shown = f"{resource.singular}{'.' + resource.group if resource.group else ''}/{name}"
            if "--server-side" in words:
                force = "true" if "--force-conflicts" in words else "false"
                query = f"fieldManager=kubectl&fieldValidation=Strict&force={force}"
                code, answer = await self._ask("PATCH", f"{path}?{query}", body, APPLY)
                if code >= 300:
                    return self._error(answer)
                lines.append(f"{shown} serverside-applied")
                continue
            annotations = body["metadata"].get("annotations") or {}
            body["metadata"]["annotations"] = {**annotations, LAST_APPLIED: json.dumps(body)}
            code, answer = await self._ask("GET", path)
            query = "fieldManager=kubectl-client-side-apply&fieldValidation=Strict"
            if code == 404:
                collection = path.rpartition("/")[0]
                code, answer = await self._ask("POST", f"{collection}?{query}", body)
                word = "created"
            else:
                code, answer = await self._ask("PATCH", f"{path}?{query}", body, STRATEGIC)
                word = "configured"
            if code >= 300:
                return self._error(answer)
            lines.append(f"{shown} {word}")
        return 0, "\n".join(lines)

    async def _rollout(self, *words: str) -> tuple[int, str]:
        assert words[0] == "status"
        resource, name, _ = self._target(words[1:])
        path = self._path(resource, name)
        for _ in range(1200):
            code, found = await self._ask("GET", path)
            if code != 200:
                return self._error(found)
            status, spec = found["status"], found["spec"]
            fresh = status.get("observedGeneration") == found["metadata"]["generation"]
            if resource is DAEMONSETS:
                wanted = status.get("desiredNumberScheduled")
                counts = {status.get("updatedNumberScheduled", 0), status.get("numberAvailable", 0)}
            else:
                wanted = spec["replicas"]
                fields = ("updatedReplicas", "replicas", "availableReplicas")
                counts = {status.get(field, 0) for field in fields}
            if fresh and counts == {wanted}:
                return 0, f'"{name}" successfully rolled out'
            await asyncio.sleep(0.05)
        return 1, "error: timed out waiting for the condition"

    async def _wait(self, *words: str) -> tuple[int, str]:
        resource, name, flags = self._target(words)
        kind = next(flag.removeprefix("--for=condition=") for flag in flags if flag.startswith("--for"))
        for _ in range(1200):
            _, found = await self._ask("GET", self._path(resource, name))
            for condition in dig(found, "status", "conditions") or []:
                if condition["type"].lower() == kind.lower() and condition["status"] == "True":
                    return 0, f"{name} condition met"
            await asyncio.sleep(0.05)
        return 1, "error: timed out waiting for the condition"

    async def _scale(self, *words: str) -> tuple[int, str]:
        resource, name, flags = self._target(words)
        replicas = next(int(flag.partition("=")[2]) for flag in flags if flag.startswith("--replicas"))
        path = f"{self._path(resource, name)}/scale"
        code, answer = await self._ask("PATCH", path, {"spec": {"replicas": replicas}}, MERGE)
        return (0, f"{name} scaled") if code == 200 else self._error(answer)

    async def _delete(self, *words: str) -> tuple[int, str]:
        resource, name, flags = self._target(words)
        policy = next(
            (flag.partition("=")[2] for flag in flags if flag.startswith("--cascade")), "background"
        )
        path = self._path(resource, name)
        code, answer = await self._ask("DELETE", path, {"propagationPolicy": policy.capitalize()})
        if code != 200:
            return self._error(answer)
        for _ in range(1200):
            if (await self._ask("GET", path))[0] == 404:
                return 0, f'"{name}" deleted'
            await asyncio.sleep(0.05)
        return 1, "error: timed out waiting for the condition"

    async def _drain(self, *words: str) -> tuple[int, str]:
        node = words[0]
        await self._ask("PATCH", self._path(NODES, node), {"spec": {"unschedulable": True}}, STRATEGIC)
        _, pods = await self._ask("GET", f"/api/v1/pods?fieldSelector=spec.nodeName%3D{node}")
        for pod in pods["items"]:
            owners = [owner["kind"] for owner in pod["metadata"].get("ownerReferences") or []]
            if "DaemonSet" in owners:
                continue
            name = pod["metadata"]["name"]
            body = {
                "apiVersion": "policy/v1", "kind": "Eviction",
                "metadata": {"name": name, "namespace": pod["metadata"]["namespace"]}, "deleteOptions": {},
            }  # fmt: skip
            code, answer = await self._ask("POST", f"{self._path(PODS, name)}/eviction", body)
            if code >= 300:
                return self._error(answer)
        return 0, f"node/{node} drained"

    async def _create(self, *_words: str) -> tuple[int, str]:
        """``kubectl create deployment`` sends protobuf."""
        code, answer = await self._ask(
            "POST", self._path(DEPLOYMENTS), b"k8s\0body", "application/vnd.kubernetes.protobuf"
        )
        return (0, "created") if code == 201 else (1, f"error: failed to create: {answer['message']}")

    async def _exec(self, *words: str) -> tuple[int, str]:
        pod, command = words[0], words[words.index("--") + 1 :]
        query = "&".join(["stdout=true", "stderr=true", *(f"command={word}" for word in command)])
        output, status = b"", {}
        async with self._session.ws_connect(
            f"{self._api.url}{self._path(PODS, pod)}/exec?{query}", protocols=("v5.channel.k8s.io",)
        ) as socket:
            async for message in socket:
                if message.data[0] == 3:
                    status = json.loads(message.data[1:])
                else:
                    output += message.data[1:]
        causes = dig(status, "details", "causes") or [{"message": "0"}]
        return int(causes[0]["message"]), output.decode()

    @asynccontextmanager
    async def forward(self, pod: str, port: int) -> AsyncIterator[Callable[[bytes], Awaitable[bytes]]]:
        url = f"{self._api.url}{self._path(PODS, pod)}/portforward"
        async with (
            aiohttp.ClientSession(headers=AGENT) as session,
            session.ws_connect(url, protocols=(TUNNEL,)) as socket,
        ):
            tunnel = Tunnel(socket)

            async def fetch(request: bytes) -> bytes:
                error, data = await tunnel.connect(port, "0")
                await tunnel.send(data, request)
                await tunnel.until_ended(error, data)
                return tunnel.data[data]

            yield fetch


class RealKubectl(Kubectl):
    """kubectl, with its port-forward as a process beside the test."""

    @asynccontextmanager
    async def forward(self, pod: str, port: int) -> AsyncIterator[Callable[[bytes], Awaitable[bytes]]]:
        process = await asyncio.create_subprocess_exec(
            self._program, "port-forward", f"pod/{pod}", f"0:{port}", "--address", "127.0.0.1",
            env=self._environment, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        async with reaped(process):
            assert process.stdout is not None
            async with asyncio.timeout(60.0):
                line = (await process.stdout.readline()).decode()
            local = int(line.split(" -> ")[0].rpartition(":")[2])

            async def fetch(request: bytes) -> bytes:
                reader, writer = await asyncio.open_connection("127.0.0.1", local)
                writer.write(request)
                async with asyncio.timeout(60.0):
                    answer = await reader.read()
                writer.close()
                return answer

            yield fetch
