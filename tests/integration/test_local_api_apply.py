"""Apply, scale, reviews, tokens and views over HTTP, as clients ask for them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from local_harness import Client, until

from hami.local.api.apiserver import ApiServer
from hami.local.api.resources import DEFAULT_TABLE, SERVICEACCOUNTS, VERBS

APPLY = "application/apply-patch+yaml"
MAPS = "/api/v1/namespaces/default/configmaps"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"


@pytest.fixture
async def client(embedded_api: ApiServer) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0)) as session:
        yield Client(embedded_api.url, session)


def config(**data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": data}


def deployment(replicas: int | None = 1) -> dict[str, Any]:
    container = {"name": "main", "image": "none", "command": ["sleep", "1"]}
    spec: dict[str, Any] = {
        "selector": {"matchLabels": {"app": "web"}},
        "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [container]}},
    }
    if replicas is not None:
        spec["replicas"] = replicas
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": spec}


async def apply(client: Client, path: str, body: Any, manager: str, query: str = "") -> tuple[int, Any]:
    return await client("PATCH", f"{path}?fieldManager={manager}{query}", body, content=APPLY)


# --- apply ---


async def test_apply_creates_then_changes(client: Client) -> None:
    code, created = await apply(client, f"{MAPS}/c", config(a="1"), "one")
    assert code == 201
    assert created["metadata"]["managedFields"][0]["manager"] == "one"
    code, changed = await apply(client, f"{MAPS}/c", config(b="2"), "one")
    assert (code, changed["data"]) == (200, {"b": "2"})


async def test_yaml_can_be_applied(client: Client) -> None:
    text = b"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {a: '1'}\n"
    assert (await apply(client, f"{MAPS}/c", text, "one"))[0] == 201


async def test_a_conflict_is_reported_and_can_be_forced(client: Client) -> None:
    await apply(client, f"{MAPS}/c", config(a="1"), "one")
    code, refused = await apply(client, f"{MAPS}/c", config(a="2"), "two")
    assert (code, refused["reason"]) == (409, "Conflict")
    assert refused["details"]["causes"][0]["reason"] == "FieldManagerConflict"
    assert (await client.ok("GET", f"{MAPS}/c"))["data"] == {"a": "1"}
    code, forced = await apply(client, f"{MAPS}/c", config(a="2"), "two", "&force=true")
    assert (code, forced["data"]) == (200, {"a": "2"})


async def test_a_field_changed_by_scaling_belongs_to_who_scaled(client: Client) -> None:
    await apply(client, f"{DEPLOYMENTS}/web", deployment(1), "one")
    merge = "application/merge-patch+json"
    await client.ok(
        "PATCH", f"{DEPLOYMENTS}/web/scale?fieldManager=hpa", {"spec": {"replicas": 4}}, content=merge
    )
    code, refused = await apply(client, f"{DEPLOYMENTS}/web", deployment(1), "one")
    assert code == 409
    assert 'conflict with "hpa"' in refused["message"]
    code, left = await apply(client, f"{DEPLOYMENTS}/web", deployment(None), "one")
    assert (code, left["spec"]["replicas"]) == (200, 4)


async def test_an_apply_that_changes_nothing_makes_no_new_version(client: Client) -> None:
    _, first = await apply(client, f"{MAPS}/c", config(a="1"), "one")
    _, again = await apply(client, f"{MAPS}/c", config(a="1"), "one")
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


async def test_a_dry_run_applies_nothing(client: Client) -> None:
    assert (await apply(client, f"{MAPS}/c", config(a="1"), "one", "&dryRun=All"))[0] == 201
    assert (await client("GET", f"{MAPS}/c"))[0] == 404


async def test_status_is_applied_through_its_subresource(client: Client) -> None:
    await apply(client, f"{DEPLOYMENTS}/web", deployment(0), "one")
    body = {**deployment(5), "status": {"replicas": 7}}
    code, changed = await apply(client, f"{DEPLOYMENTS}/web/status", body, "two")
    assert code == 200
    assert changed["status"]["replicas"] == 7
    assert changed["spec"]["replicas"] == 0


@pytest.mark.parametrize(
    ("path", "body", "query", "code", "text"),
    [
        ("c", config(a="1"), "", 422, "fieldManager: Required value"),
        ("other", config(a="1"), "fieldManager=x", 400, "does not match the name on the URL"),
        ("c", {**config(), "kind": "Secret"}, "fieldManager=x", 400, "needs apiVersion"),
        ("c", b"[", "fieldManager=x", 400, "is not YAML"),
        ("c", b"7", "fieldManager=x", 400, "not an object"),
        ("c", config(a="1"), "fieldManager=x&fieldValidation=Maybe", 400, "fieldValidation"),
    ],
)  # fmt: skip
async def test_a_bad_apply_is_refused_and_nothing_stored(
    client: Client, path: str, body: Any, query: str, code: int, text: str
) -> None:
    got, answer = await client("PATCH", f"{MAPS}/{path}?{query}", body, content=APPLY)
    assert got == code
    assert text in answer["message"]
    names = [item["metadata"]["name"] for item in (await client.ok("GET", MAPS))["items"]]
    assert path not in names


async def test_force_is_only_for_apply(client: Client) -> None:
    await client.ok("POST", MAPS, config(a="1"))
    code, answer = await client("PATCH", f"{MAPS}/c?force=true", {}, content="application/merge-patch+json")
    assert code == 422
    assert "force" in answer["message"]


async def test_unknown_fields_are_kept_with_strict_validation(client: Client) -> None:
    body = {**config(a="1"), "unknown": {"x": 1}}
    created = await client.ok("POST", f"{MAPS}?fieldValidation=Strict&fieldManager=kubectl", body)
    assert created["unknown"] == {"x": 1}


# --- media types ---


PROTOBUF = "application/vnd.kubernetes.protobuf"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_protobuf_bodies_are_refused_with_a_status(client: Client, method: str) -> None:
    await client.ok("POST", MAPS, config(a="1"))
    path = MAPS if method == "POST" else f"{MAPS}/c"
    code, answer = await client(method, path, b"k8s\0x", content=PROTOBUF)
    assert (code, answer["kind"], answer["reason"]) == (415, "Status", "UnsupportedMediaType")
    assert (await client.ok("GET", f"{MAPS}/c"))["data"] == {"a": "1"}


async def test_json_is_answered_where_it_is_one_of_the_accepted_forms(client: Client) -> None:
    assert (await client.ok("GET", MAPS, Accept=f"{PROTOBUF}, application/json"))["kind"] == "ConfigMapList"
    code, answer = await client("GET", MAPS, Accept=PROTOBUF)
    assert (code, answer["reason"]) == (406, "NotAcceptable")


# --- discovery of what was added ---


async def test_every_kind_has_an_openapi_document_with_a_validating_patch(client: Client) -> None:
    index = (await client.ok("GET", "/openapi/v3"))["paths"]
    for resource in DEFAULT_TABLE.resources:
        if resource.verbs != VERBS:
            continue
        document = await client.ok("GET", index[resource.base_path[1:]]["serverRelativeURL"])
        kinds = {
            operation["patch"]["x-kubernetes-group-version-kind"]["kind"]: operation["patch"]
            for operation in document["paths"].values()
            if "patch" in operation
        }
        parameters = {parameter["name"] for parameter in kinds[resource.kind]["parameters"]}
        assert {"fieldValidation", "force"} <= parameters


@pytest.mark.parametrize(
    ("accept", "version"),
    [
        ("application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json", "v2"),
        (
            "application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json",
            "v2beta1",
        ),
        ("application/json", ""),
    ],
)
async def test_discovery_is_in_the_version_that_the_client_knows(
    client: Client, accept: str, version: str
) -> None:
    for path in ("/api", "/apis"):
        async with client.session.get(client.url + path, headers={"Accept": accept}) as answer:
            found = await answer.json(content_type=None)
            content = answer.headers["Content-Type"]
        if version:
            assert found["apiVersion"] == f"apidiscovery.k8s.io/{version}"
            assert f"v={version};" in content
        else:
            assert found["kind"] in ("APIVersions", "APIGroupList")


async def test_reviews_are_discovered_as_create_only(client: Client) -> None:
    found = await client.ok("GET", "/apis/authorization.k8s.io/v1")
    assert {tuple(item["verbs"]) for item in found["resources"]} == {("create",)}
    assert (await client("GET", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"))[0] == 405


# --- scale ---


async def test_a_deployment_is_scaled_through_its_subresource(client: Client) -> None:
    await client.ok("POST", DEPLOYMENTS, deployment(0))
    scale = await client.ok("GET", f"{DEPLOYMENTS}/web/scale")
    assert (scale["apiVersion"], scale["spec"]["replicas"]) == ("autoscaling/v1", 0)
    scale["spec"]["replicas"] = 2
    assert (await client.ok("PUT", f"{DEPLOYMENTS}/web/scale", scale))["spec"]["replicas"] == 2
    assert (await client("PUT", f"{DEPLOYMENTS}/web/scale", scale))[0] == 409
    assert (await client.ok("GET", f"{DEPLOYMENTS}/web"))["spec"]["replicas"] == 2


# --- RBAC and reviews ---


async def test_rbac_objects_are_stored_and_shown(client: Client) -> None:
    base = "/apis/rbac.authorization.k8s.io/v1"
    await client.ok("POST", f"{base}/clusterroles", {"metadata": {"name": "hami:edit"}, "rules": []})
    binding = {
        "metadata": {"name": "hami"}, "subjects": [],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "hami:edit"},
    }  # fmt: skip
    await client.ok("POST", f"{base}/clusterrolebindings", binding)
    table = await client.ok("GET", f"{base}/clusterrolebindings", Accept=TABLE)
    assert table["rows"][0]["cells"][:2] == ["hami", "ClusterRole/hami:edit"]


async def test_can_i_is_answered(client: Client) -> None:
    body = {"spec": {"resourceAttributes": {"verb": "get", "resource": "pods", "namespace": "default"}}}
    answer = await client.ok("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
    assert answer["status"]["allowed"] is True
    local = "/apis/authorization.k8s.io/v1/namespaces/default/localsubjectaccessreviews"
    assert (await client("POST", local, {"spec": {**body["spec"], "user": "jane"}}))[0] == 201


async def test_a_service_accounts_token_is_its_identity() -> None:
    server = ApiServer(token="secret")
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            client = Client(server.url, session)
            await until(lambda: server.store.find(SERVICEACCOUNTS, "default", "default"))
            admin = {"Authorization": "Bearer secret"}
            path = "/api/v1/namespaces/default/serviceaccounts/default/token"
            made = await client.ok("POST", path, {"spec": {"expirationSeconds": 600}}, **admin)
            token = made["status"]["token"]
            reviews = "/apis/authentication.k8s.io/v1"
            found = await client.ok("POST", f"{reviews}/tokenreviews", {"spec": {"token": token}}, **admin)
            assert found["status"]["user"]["username"] == "system:serviceaccount:default:default"
            own = {"Authorization": f"Bearer {token}"}
            me = await client.ok("POST", f"{reviews}/selfsubjectreviews", {}, **own)
            assert me["status"]["userInfo"]["username"] == "system:serviceaccount:default:default"
            assert (await client("GET", MAPS, Authorization=f"Bearer {token}x"))[0] == 401
    finally:
        await server.stop()


# --- events.k8s.io ---


async def test_events_are_one_list_in_two_forms(client: Client) -> None:
    core, newer = "/api/v1/namespaces/default/events", "/apis/events.k8s.io/v1/namespaces/default/events"
    event = {
        "metadata": {"name": "e"}, "regarding": {"kind": "Pod", "name": "p", "namespace": "default"},
        "note": "hello", "reason": "Tested", "type": "Normal", "action": "Testing",
        "reportingController": "test", "reportingInstance": "i", "eventTime": "2026-01-01T00:00:00.000000Z",
    }  # fmt: skip
    created = await client.ok("POST", newer, event)
    assert (created["apiVersion"], created["note"]) == ("events.k8s.io/v1", "hello")
    old = await client.ok("GET", f"{core}?fieldSelector=involvedObject.name%3Dp")
    assert [item["message"] for item in old["items"]] == ["hello"]
    merge = "application/merge-patch+json"
    await client.ok("PATCH", f"{core}/e", {"message": "changed", "count": 3}, content=merge)
    found = await client.ok("GET", f"{newer}?fieldSelector=regarding.name%3Dp,reason%3DTested")
    assert [(item["note"], item["deprecatedCount"]) for item in found["items"]] == [("changed", 3)]
    table = await client.ok("GET", newer, Accept=TABLE)
    assert "changed" in json.dumps(table["rows"][0]["cells"])


async def test_a_watch_of_the_newer_form_sees_core_events(client: Client) -> None:
    path = "/apis/events.k8s.io/v1/events?watch=true&timeoutSeconds=5"
    async with client.session.get(client.url + path) as stream:
        body = {"metadata": {"name": "e"}, "involvedObject": {"name": "p"}, "message": "hello"}
        await client.ok("POST", "/api/v1/namespaces/default/events", body)
        seen = json.loads(await stream.content.readline())
        assert (seen["type"], seen["object"]["note"]) == ("ADDED", "hello")
        assert seen["object"]["apiVersion"] == "events.k8s.io/v1"
