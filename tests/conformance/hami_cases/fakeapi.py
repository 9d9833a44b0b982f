"""An API server of a few objects in memory, reached through our own client, that writes down what it is
asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hami.kube.client import Client, Limits
from hami.kube.errors import ApiError, error_from_response


class FakeApi(Client):
    """Nodes and pods by path. Resource versions never change, as in the recording.

    ``refusal`` is the text with which every Binding is refused; empty: they are accepted.
    """

    def __init__(
        self, nodes: Sequence[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]], refusal: str = ""
    ) -> None:
        self._objects: dict[str, Any] = {
            f"/api/v1/nodes/{node['metadata']['name']}": json.loads(json.dumps(node)) for node in nodes
        }
        for pod in pods:
            namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
            self._objects[f"/api/v1/namespaces/{namespace}/pods/{name}"] = json.loads(json.dumps(pod))
        self._refusal = refusal
        self.limits = Limits()
        self.actions: list[dict[str, Any]] = []

    def annotations(self, node: str) -> Mapping[str, str]:
        """Annotations of a node as they are now."""
        found: Mapping[str, str] = self._objects[f"/api/v1/nodes/{node}"]["metadata"].get("annotations") or {}
        return found

    async def request(self, method: str, path: str, *, body: bytes | None = None, **_: Any) -> bytes:
        """One request; anything but GET is written down."""
        target = path.removesuffix("/binding")
        found = self._objects.get(target)
        if found is None:
            raise _error(404, "NotFound", f'"{target.rpartition("/")[2]}" not found')
        if method == "GET":
            return json.dumps(found).encode()
        content = json.loads(body or b"{}")
        resource = "pods" if "/pods/" in target else "nodes"
        verb = "create" if method == "POST" else method.lower()
        self.actions.append(
            {"verb": verb, "resource": resource, "name": found["metadata"]["name"], "body": content}
        )
        if path.endswith("/binding"):
            if self._refusal:
                raise _error(403, "Forbidden", self._refusal)
            return b"{}"
        _merge(found["metadata"].setdefault("annotations", {}), content["metadata"].get("annotations") or {})
        return json.dumps(found).encode()


def _merge(annotations: dict[str, str], changes: Mapping[str, str | None]) -> None:
    for key, value in changes.items():
        if value is None:
            annotations.pop(key, None)
        else:
            annotations[key] = value


def _error(code: int, reason: str, message: str) -> ApiError:
    status = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
    return error_from_response(code, json.dumps(status).encode())
