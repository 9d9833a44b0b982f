"""The few verbs the project needs, on top of ``Client``: paged lists, bindings, metadata patches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

import msgspec

from hami.kube.client import Client, decode
from hami.kube.errors import DecodeError, ResponseTooLarge
from hami.kube.resources import PODS, Resource

PAGE_SIZE = 500
_PAGE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Selection:
    """Which objects of a kind: a namespace (empty: all) and selectors in Kubernetes' text form."""

    namespace: str = ""
    label_selector: str = ""
    field_selector: str = ""

    def query(self) -> dict[str, str]:
        """The selectors as query parameters."""
        pairs = {"labelSelector": self.label_selector, "fieldSelector": self.field_selector}
        return {key: value for key, value in pairs.items() if value}


def pods_of_node(name: str) -> Selection:
    """The pods bound to a node."""
    return Selection(field_selector=f"spec.nodeName={name}")


class _ListMeta(msgspec.Struct):
    resource_version: str = msgspec.field(default="", name="resourceVersion")
    continue_token: str = msgspec.field(default="", name="continue")


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Undecoded objects of one page and the resourceVersion of the whole list."""

    items: list[msgspec.Raw]
    resource_version: str


async def list_pages(
    client: Client, resource: Resource, selection: Selection | None = None, *, page_size: int = PAGE_SIZE
) -> AsyncGenerator[Page, None]:
    """A quorum-read list in pages; the next page is requested only after this one was consumed.

    All pages belong to one version. Raises ``Gone`` when the list took longer than the server keeps that
    version: start again. A page that is too large to read is asked for again with a quarter of the objects.
    """
    chosen = selection or Selection()
    path = resource.path(chosen.namespace)
    query = chosen.query()
    size = page_size
    while True:
        try:
            answer = await client.request(
                "GET",
                path,
                query=query | {"limit": str(size)},
                timeout_s=max(_PAGE_TIMEOUT_S, client.limits.timeout_s),
                max_bytes=client.limits.max_page_bytes,
            )
        except ResponseTooLarge:
            if size == 1:
                raise
            size = max(1, size // 4)
            continue
        parsed = decode(answer, _List)
        token = parsed.metadata.continue_token
        page = Page(parsed.items or [], parsed.metadata.resource_version)
        del answer, parsed
        yield page
        if not token:
            return
        if token == query.get("continue"):
            raise DecodeError(f"the list of {resource.plural} does not go on: the same token came twice")
        query["continue"] = token


async def read_ahead(pages: AsyncGenerator[Page, None]) -> AsyncGenerator[Page, None]:
    """The same pages, each asked for while the one before is being consumed. Close it when ending early."""
    following = asyncio.create_task(_next(pages))
    try:
        while (page := await following) is not None:
            following = asyncio.create_task(_next(pages))
            yield page
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await pages.aclose()


async def _next(pages: AsyncGenerator[Page, None]) -> Page | None:
    return await anext(pages, None)


async def fresh_version(client: Client, resource: Resource, selection: Selection | None = None) -> str:
    """The resourceVersion of a quorum read made now (one object is transferred at most)."""
    chosen = selection or Selection()
    query = chosen.query() | {"limit": "1"}
    answer = await client.json("GET", resource.path(chosen.namespace), _List, query=query)
    return answer.metadata.resource_version


async def bind_pod(
    client: Client,
    *,
    namespace: str,
    name: str,
    uid: str,
    node: str,
    annotations: Mapping[str, str],
    labels: Mapping[str, str],
    timeout_s: float | None = None,
) -> None:
    """POST one Binding: the node, the annotations and the labels reach the pod in one transaction.

    ``uid`` makes the API server refuse a pod that was recreated under the same name. Raises ``Conflict``
    when the pod is already bound (or its uid differs), other ``ApiError`` below 500 when refused,
    ``ServerError`` or ``TransportError`` when the outcome is unknown.
    """
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid,
            "annotations": dict(annotations),
            "labels": dict(labels),
        },
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }
    path = PODS.path(namespace, name, "binding")
    await client.request("POST", path, body=msgspec.json.encode(binding), timeout_s=timeout_s)


async def patch_metadata(
    client: Client,
    resource: Resource,
    name: str,
    *,
    namespace: str = "",
    annotations: Mapping[str, str | None] | None = None,
    labels: Mapping[str, str | None] | None = None,
    resource_version: str = "",
    uid: str = "",
    timeout_s: float | None = None,
) -> msgspec.Raw:
    """Merge-patch annotations and labels (None removes a key); the answer is the patched object, undecoded.

    With ``resource_version`` the API server answers ``Conflict`` if the object has changed since, with
    ``uid`` if it is another object of the same name.
    """
    metadata: dict[str, object] = {}
    if annotations is not None:
        metadata["annotations"] = dict(annotations)
    if labels is not None:
        metadata["labels"] = dict(labels)
    if resource_version:
        metadata["resourceVersion"] = resource_version
    if uid:
        metadata["uid"] = uid
    patch = {"metadata": metadata}
    return await client.patch(resource, name, patch, msgspec.Raw, namespace=namespace, timeout_s=timeout_s)
