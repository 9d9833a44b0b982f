"""OpenAPI v3 documents: enough for kubectl to leave the validation of fields to this server.

Each kind has a PATCH with ``x-kubernetes-group-version-kind`` and the query parameter ``fieldValidation``.
Strategic merge patch is not offered as a body of it, so that kubectl takes the merge keys it has built in.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from hami.local.api.discovery import VERSION, gvk_of
from hami.local.api.objects import Object
from hami.local.api.resources import VERBS, Resource, ResourceTable


def openapi_index(table: ResourceTable) -> Object:
    """The answer to ``/openapi/v3``."""
    paths: Object = {}
    for resources in table.group_versions().values():
        document = msgspec.json.encode(openapi_document(resources))
        path = resources[0].base_path
        digest = hashlib.sha256(document).hexdigest()[:32]
        paths[path[1:]] = {"serverRelativeURL": f"/openapi/v3{path}?hash={digest}"}
    return {"paths": paths}


def openapi_document(resources: list[Resource]) -> Object:
    """OpenAPI v3 of one group and version: enough for kubectl to leave validation to the server."""
    paths: Object = {}
    for resource in resources:
        scope = "/namespaces/{namespace}" if resource.namespaced else ""
        collection = f"{resource.base_path}{scope}/{resource.plural}"
        paths[collection] = {
            "post": _operation(resource, "post", ["dryRun", "fieldManager", "fieldValidation"])
        }
        if resource.verbs != VERBS:
            continue
        paths[collection]["get"] = _operation(resource, "list", [])
        paths[f"{collection}/{{name}}"] = {
            "get": _operation(resource, "get", []),
            "put": _operation(resource, "put", ["dryRun", "fieldManager", "fieldValidation"]),
            "patch": _operation(resource, "patch", ["dryRun", "fieldManager", "fieldValidation", "force"]),
            "delete": _operation(resource, "delete", ["dryRun", "gracePeriodSeconds", "propagationPolicy"]),
        }
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": VERSION["gitVersion"]},
        "paths": paths,
        "components": {
            "schemas": {_schema_name(resource): _schema(resource) for resource in resources},
        },
    }


def _operation(resource: Resource, action: str, parameters: list[str]) -> Object:
    content: Any = {
        "application/json": {"schema": {"$ref": f"#/components/schemas/{_schema_name(resource)}"}}
    }
    return {
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": gvk_of(resource),
        "parameters": [
            {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
            for name in parameters
        ],
        "responses": {"200": {"description": "OK", "content": content}},
    }


def _schema_name(resource: Resource) -> str:
    group = ".".join(["io.k8s.api", *(resource.group.split(".")[:1] if resource.group else ["core"])])
    return f"{group}.{resource.version}.{resource.kind}"


def _schema(resource: Resource) -> Object:
    return {
        "type": "object",
        "description": f"{resource.kind} as the Kubernetes API defines it.",
        "x-kubernetes-group-version-kind": [gvk_of(resource)],
        "x-kubernetes-preserve-unknown-fields": True,
    }
