"""Discovery documents: aggregated (v2), the older lists, version and a minimal OpenAPI v3."""

from __future__ import annotations

from typing import Any

from hami.local.objects import Object
from hami.local.resources import Resource, ResourceTable

VERSION: Object = {
    "major": "1",
    "minor": "32",
    "gitVersion": "v1.32.0+hami-embedded",
    "gitCommit": "0000000000000000000000000000000000000000",
    "gitTreeState": "clean",
    "buildDate": "2025-01-01T00:00:00Z",
    "goVersion": "none",
    "compiler": "none",
    "platform": "linux/amd64",
}
VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
# subresource -> (verbs, kind of its body with group and version; None: the kind of the resource)
_SUBRESOURCES: dict[str, tuple[list[str], tuple[str, str, str] | None]] = {
    "status": (["get", "patch", "update"], None),
    "finalize": (["update"], None),
    "binding": (["create"], ("", "v1", "Binding")),
    "eviction": (["create"], ("policy", "v1", "Eviction")),
    "log": (["get"], None),
}


def aggregated(table: ResourceTable, *, core: bool) -> Object:
    """``APIGroupDiscoveryList`` for ``/api`` (``core``) or ``/apis``."""
    groups: dict[str, Object] = {}
    for (group, version), resources in table.group_versions().items():
        if (group == "") is not core:
            continue
        entry = groups.setdefault(group, {"metadata": {"name": group} if group else {}, "versions": []})
        entry["versions"].append(
            {
                "version": version,
                "freshness": "Current",
                "resources": [_aggregated_resource(resource) for resource in resources],
            }
        )
    return {
        "kind": "APIGroupDiscoveryList",
        "apiVersion": "apidiscovery.k8s.io/v2",
        "metadata": {},
        "items": list(groups.values()),
    }


def _aggregated_resource(resource: Resource) -> Object:
    found: Object = {
        "resource": resource.plural,
        "responseKind": _gvk(resource),
        "scope": "Namespaced" if resource.namespaced else "Cluster",
        "singularResource": resource.singular,
        "verbs": VERBS,
    }
    if resource.short_names:
        found["shortNames"] = list(resource.short_names)
    if resource.categories:
        found["categories"] = list(resource.categories)
    if resource.subresources:
        found["subresources"] = [
            {"subresource": name, "responseKind": _subresource_gvk(resource, name), "verbs": verbs}
            for name in resource.subresources
            for verbs, _ in (_SUBRESOURCES[name],)
        ]
    return found


def _gvk(resource: Resource) -> Object:
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def _subresource_gvk(resource: Resource, name: str) -> Object:
    body = _SUBRESOURCES[name][1]
    if body is None:
        return _gvk(resource)
    return {"group": body[0], "version": body[1], "kind": body[2]}


def api_versions(address: str) -> Object:
    """The answer to ``/api`` for clients that do not ask for aggregated discovery."""
    return {
        "kind": "APIVersions",
        "versions": ["v1"],
        "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": address}],
    }


def api_groups(table: ResourceTable) -> Object:
    """The answer to ``/apis`` for clients that do not ask for aggregated discovery."""
    groups = sorted({group for group, _ in table.group_versions() if group})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [api_group(table, g) for g in groups]}


def api_group(table: ResourceTable, group: str) -> Object:
    versions = [
        {"groupVersion": f"{group}/{version}", "version": version}
        for found, version in table.group_versions()
        if found == group
    ]
    return {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": group,
        "versions": versions,
        "preferredVersion": versions[0],
    }


def api_resources(resources: list[Resource]) -> Object:
    """``APIResourceList`` of one group and version."""
    entries: list[Object] = []
    for resource in resources:
        entry: Object = {
            "name": resource.plural,
            "singularName": resource.singular,
            "namespaced": resource.namespaced,
            "kind": resource.kind,
            "verbs": VERBS,
        }
        if resource.short_names:
            entry["shortNames"] = list(resource.short_names)
        if resource.categories:
            entry["categories"] = list(resource.categories)
        entries.append(entry)
        for name in resource.subresources:
            entries.append(
                {
                    "name": f"{resource.plural}/{name}",
                    "singularName": "",
                    "namespaced": resource.namespaced,
                    **_subresource_gvk(resource, name),
                    "verbs": _SUBRESOURCES[name][0],
                }
            )
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": resources[0].api_version,
        "resources": entries,
    }


def openapi_index(table: ResourceTable) -> Object:
    """The answer to ``/openapi/v3``."""
    paths = {
        resources[0].base_path[1:]: {"serverRelativeURL": f"/openapi/v3{resources[0].base_path}?hash=0"}
        for resources in table.group_versions().values()
    }
    return {"paths": paths}


def openapi_document(resources: list[Resource]) -> Object:
    """OpenAPI v3 of one group and version: enough for kubectl to leave validation to the server."""
    paths: Object = {}
    for resource in resources:
        scope = "/namespaces/{namespace}" if resource.namespaced else ""
        collection = f"{resource.base_path}{scope}/{resource.plural}"
        paths[collection] = {
            "get": _operation(resource, "list", []),
            "post": _operation(resource, "post", ["dryRun", "fieldManager", "fieldValidation"]),
        }
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
        "x-kubernetes-group-version-kind": _gvk(resource),
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
        "x-kubernetes-group-version-kind": [_gvk(resource)],
        "x-kubernetes-preserve-unknown-fields": True,
    }
