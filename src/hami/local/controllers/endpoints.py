"""Endpoints of Services with a selector, and the ``default`` ServiceAccount of each namespace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hami.local.api.errors import ApiError
from hami.local.api.objects import Object, clone, dig, labels_of, meta, name_of, namespace_of
from hami.local.api.resources import ENDPOINTS, NAMESPACES, PODS, SERVICEACCOUNTS, SERVICES
from hami.local.api.store import Event
from hami.local.controllers.common import is_active, is_deleting, ready_since
from hami.local.controllers.controller import Controller, Key

_MANAGED = "endpoints.kubernetes.io/managed-by"


class EndpointsController(Controller):
    """Writes the addresses of the pods that a Service selects into the Endpoints of its name."""

    resource = SERVICES
    component = "endpoints-controller"

    def keys(self, storage_key: str, event: Event) -> Iterable[Key]:
        if storage_key == PODS.key:
            both = [labels_of(event.obj), labels_of(event.previous or event.obj)]
            return [
                (namespace_of(service), name_of(service))
                for service in self.store.list(SERVICES, namespace_of(event.obj))
                if any(_selects(service, labels) for labels in both)
            ]
        return super().keys(storage_key, event)

    async def sync(self, key: Key) -> float | None:
        service = self.store.find(SERVICES, *key)
        stored = self.store.find(ENDPOINTS, *key)
        if service is None:
            if stored is not None and labels_of(stored).get(_MANAGED) == self.component:
                await self.delete(ENDPOINTS, stored)
            return None
        if not dig(service, "spec", "selector"):
            return None  # whoever made the service looks after its Endpoints
        pods = [
            pod
            for pod in self.store.list(PODS, key[0])
            if _selects(service, labels_of(pod)) and is_active(pod)
        ]
        found = subsets(service, pods)
        body: Object = {
            "metadata": {
                "name": key[1], "namespace": key[0],
                "labels": {**labels_of(service), _MANAGED: self.component},
            },
            "subsets": found,
        }  # fmt: skip
        if stored is None:
            await self.registry.create(ENDPOINTS, key[0], body)
        elif (stored.get("subsets") or []) != found or labels_of(stored) != body["metadata"]["labels"]:

            def change(current: Object) -> Object:
                changed: Object = clone(current)
                meta(changed)["labels"] = body["metadata"]["labels"]
                changed["subsets"] = found
                return changed

            await self.registry.update(ENDPOINTS, *key, change)
        return None


def _selects(service: Object, labels: Object) -> bool:
    selector = dig(service, "spec", "selector")
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


def subsets(service: Object, pods: Sequence[Object]) -> list[Object]:
    """``subsets`` of Endpoints: pods with the same resolved ports share one."""
    groups: dict[str, tuple[list[Object], Object]] = {}
    for pod in pods:
        address = dig(pod, "status", "podIP")
        if not address:
            continue
        ports = _ports(service, pod)
        wanted = dig(service, "spec", "ports") or []
        if wanted and not ports:
            continue
        entry: Object = {
            "ip": address,
            "targetRef": {"kind": "Pod", "namespace": namespace_of(pod), "name": name_of(pod),
                          "uid": meta(pod).get("uid")},
        }  # fmt: skip
        if dig(pod, "spec", "nodeName"):
            entry["nodeName"] = pod["spec"]["nodeName"]
        _, subset = groups.setdefault(repr(ports), (ports, {}))
        published = dig(service, "spec", "publishNotReadyAddresses")
        side = "addresses" if published or ready_since(pod) is not None else "notReadyAddresses"
        subset.setdefault(side, []).append(entry)
    return [{**subset, "ports": ports} if ports else subset for ports, subset in groups.values()]


def _ports(service: Object, pod: Object) -> list[Object]:
    found: list[Object] = []
    for port in dig(service, "spec", "ports") or []:
        number = _number(port.get("targetPort", port.get("port")), pod)
        if number is None:
            continue
        entry: Object = {"port": number, "protocol": port.get("protocol", "TCP")}
        if port.get("name"):
            entry["name"] = port["name"]
        found.append(entry)
    return found


def _number(target: Any, pod: Object) -> int | None:
    """A port number, or that of the container port of this name."""
    if isinstance(target, int):
        return target
    for container in dig(pod, "spec", "containers") or []:
        for port in container.get("ports") or []:
            if port.get("name") == target and isinstance(port.get("containerPort"), int):
                return int(port["containerPort"])
    return None


class ServiceAccountsController(Controller):
    """Makes the ``default`` ServiceAccount of every namespace."""

    resource = NAMESPACES
    component = "serviceaccount-controller"

    def keys(self, storage_key: str, event: Event) -> Iterable[Key]:
        if storage_key == SERVICEACCOUNTS.key and event.change == "DELETED":
            return [("", namespace_of(event.obj))]
        return [("", name_of(event.obj))] if storage_key == NAMESPACES.key else []

    async def sync(self, key: Key) -> float | None:
        namespace = self.store.find(NAMESPACES, "", key[1])
        if namespace is None or is_deleting(namespace):
            return None
        if self.store.find(SERVICEACCOUNTS, key[1], "default") is None:
            try:
                await self.registry.create(SERVICEACCOUNTS, key[1], {"metadata": {"name": "default"}})
            except ApiError as error:
                if error.code != 409:
                    raise
        return None
