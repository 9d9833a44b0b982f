"""Discovery documents: aggregated (v2), the older lists, and the version."""

from __future__ import annotations

from hami.local.api.objects import Object
from hami.local.api.resources import Resource, ResourceTable

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
# subresource -> (verbs, kind of its body with group and version; None: the kind of the resource)
_SUBRESOURCES: dict[str, tuple[list[str], tuple[str, str, str] | None]] = {
    "status": (["get", "patch", "update"], None),
    "finalize": (["update"], None),
    "binding": (["create"], ("", "v1", "Binding")),
    "eviction": (["create"], ("policy", "v1", "Eviction")),
    "log": (["get"], None),
    "exec": (["create", "get"], ("", "v1", "PodExecOptions")),
    "portforward": (["create", "get"], ("", "v1", "PodPortForwardOptions")),
    "token": (["create"], ("authentication.k8s.io", "v1", "TokenRequest")),
    "scale": (["get", "patch", "update"], ("autoscaling", "v1", "Scale")),
}


def aggregated_version(accept: str) -> str:
    """The first version of aggregated discovery that an Accept header asks for; empty for none."""
    for media in accept.replace(" ", "").split(","):
        parameters = dict(part.split("=", 1) for part in media.split(";")[1:] if "=" in part)
        if parameters.get("as") == "APIGroupDiscoveryList" and parameters.get("v") in ("v2", "v2beta1"):
            return parameters["v"]
    return ""


def aggregated(table: ResourceTable, *, core: bool, version: str = "v2") -> Object:
    """``APIGroupDiscoveryList`` for ``/api`` (``core``) or ``/apis``; ``version``: v2, or v2beta1 alike."""
    groups: dict[str, Object] = {}
    for (group, served), resources in table.group_versions().items():
        if (group == "") is not core:
            continue
        entry = groups.setdefault(group, {"metadata": {"name": group} if group else {}, "versions": []})
        entry["versions"].append(
            {
                "version": served,
                "freshness": "Current",
                "resources": [_aggregated_resource(resource) for resource in resources],
            }
        )
    return {
        "kind": "APIGroupDiscoveryList",
        "apiVersion": f"apidiscovery.k8s.io/{version}",
        "metadata": {},
        "items": list(groups.values()),
    }


def _aggregated_resource(resource: Resource) -> Object:
    found: Object = {
        "resource": resource.plural,
        "responseKind": gvk_of(resource),
        "scope": "Namespaced" if resource.namespaced else "Cluster",
        "singularResource": resource.singular,
        "verbs": list(resource.verbs),
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


def gvk_of(resource: Resource) -> Object:
    """Group, version and kind."""
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def _subresource_gvk(resource: Resource, name: str) -> Object:
    body = _SUBRESOURCES[name][1]
    if body is None:
        return gvk_of(resource)
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
            "verbs": list(resource.verbs),
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
