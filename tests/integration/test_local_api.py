"""The embedded API server over HTTP: what kubectl and our own clients ask for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from local_harness import Client

from hami.local.api.apiserver import ApiServer

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"
AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json"
PODS = "/api/v1/namespaces/default/pods"


def pod(name: str, **metadata: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "cuda:12", "command": ["sleep", "1"]}
    return {"metadata": {"name": name, **metadata}, "spec": {"containers": [container]}}


def with_resources(**resources: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "a", "image": "i", "resources": resources}]}}


async def create(client: Client, name: str, **metadata: Any) -> Any:
    return await client.ok("POST", PODS, pod(name, **metadata))


@pytest.fixture
async def client(embedded_api: ApiServer) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=60.0)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        client = Client(embedded_api.url, session)
        yield client
        for response in client.watches:
            response.close()


class Watch:
    """An open watch; ``next()`` gives one event."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def next(self) -> Any:
        async with asyncio.timeout(60.0):
            line = await self._response.content.readline()
        return json.loads(line) if line else None

    async def change(self) -> tuple[str, str]:
        """The next event that is not a bookmark: (type, object name)."""
        while True:
            event = await self.next()
            assert event is not None, "the watch has ended"
            if event["type"] != "BOOKMARK":
                return event["type"], event["object"]["metadata"]["name"]


async def watch(client: Client, path: str, **headers: str) -> Watch:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await client.session.get(client.url + path, headers=names)
    client.watches.append(response)
    assert response.status == 200, await response.text()
    return Watch(response)


# --- discovery ---


@pytest.mark.parametrize("path", ["/healthz", "/livez", "/readyz"])
async def test_health_answers_ok(client: Client, path: str) -> None:
    assert await client("GET", path) == (200, "ok")


async def test_aggregated_discovery_lists_pods_with_their_subresources(client: Client) -> None:
    answer = await client.ok("GET", "/api", Accept=AGGREGATED)
    resources = {item["resource"]: item for item in answer["items"][0]["versions"][0]["resources"]}
    names = {found["subresource"] for found in resources["pods"]["subresources"]}
    assert {"status", "binding", "log", "eviction"} <= names
    assert resources["nodes"]["scope"] == "Cluster"


async def test_older_clients_get_resource_lists(client: Client) -> None:
    assert (await client.ok("GET", "/api"))["versions"] == ["v1"]
    groups = [group["name"] for group in (await client.ok("GET", "/apis"))["groups"]]
    assert "coordination.k8s.io" in groups
    names = [found["name"] for found in (await client.ok("GET", "/api/v1"))["resources"]]
    assert "pods/binding" in names


async def test_openapi_says_that_the_server_validates_fields(client: Client) -> None:
    index = await client.ok("GET", "/openapi/v3")
    document = await client.ok("GET", index["paths"]["api/v1"]["serverRelativeURL"])
    operation = document["paths"]["/api/v1/namespaces/{namespace}/pods/{name}"]["patch"]
    assert operation["x-kubernetes-group-version-kind"] == {"group": "", "version": "v1", "kind": "Pod"}
    assert "fieldValidation" in {parameter["name"] for parameter in operation["parameters"]}


async def test_an_unknown_path_is_a_status(client: Client) -> None:
    code, answer = await client("GET", "/api/v1/gadgets")
    assert (code, answer["kind"], answer["reason"]) == (404, "Status", "NotFound")


# --- objects ---


async def test_a_created_pod_has_identity_defaults_and_limits_as_requests(client: Client) -> None:
    body = pod("p")
    body["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 1, "cpu": "0.5"}}
    created = await client.ok("POST", PODS, body)
    assert created["metadata"]["namespace"] == "default"
    assert created["metadata"]["uid"]
    assert created["status"]["phase"] == "Pending"
    assert created["spec"]["schedulerName"] == "default-scheduler"
    requests = created["spec"]["containers"][0]["resources"]["requests"]
    assert requests == {"nvidia.com/gpu": "1", "cpu": "500m"}


async def test_a_name_is_made_up_from_generate_name(client: Client) -> None:
    created = await client.ok("POST", PODS, {**pod("x"), "metadata": {"generateName": "web-"}})
    assert created["metadata"]["name"].startswith("web-")
    assert len(created["metadata"]["name"]) == 9


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"metadata": {"name": "Not_Valid"}}, 422, "metadata.name"),
        ({"metadata": {}}, 422, "name or generateName is required"),
        ({"metadata": {"name": "p", "labels": {"a": "b c"}}}, 422, "metadata.labels"),
        ({"metadata": {"name": "p", "annotations": {"a": 1}}}, 400, "is not a string"),
        ({"metadata": {"name": "p", "namespace": "other"}}, 400, "does not match the namespace"),
        ({"spec": {"containers": []}}, 422, "spec.containers"),
        (with_resources(limits={"cpu": "x"}), 400, "quantities must match"),
        (with_resources(limits={"g/h": "500m"}), 422, "must be an integer"),
        (with_resources(requests={"g/h": "1"}), 422, "Limit must be set"),
        ({"kind": "Node"}, 400, "cannot be handled as Pod"),
        ({"spec": {"containers": 7}}, 400, "malformed"),
    ],
)  # fmt: skip
async def test_a_bad_pod_is_refused_with_the_reason(
    client: Client, change: dict[str, Any], code: int, text: str
) -> None:
    got, answer = await client("POST", PODS, {**pod("p"), **change})
    assert got == code
    assert text in answer["message"]
    assert (await client.ok("GET", PODS))["items"] == []


@pytest.mark.parametrize(
    ("body", "content", "code"),
    [(b"{", "application/json", 400), (b"\x00", "application/vnd.kubernetes.protobuf", 415),
     (b"[]", "application/json", 400), (b"a: [", "application/yaml", 400)],
)  # fmt: skip
async def test_a_bad_body_is_refused(client: Client, body: bytes, content: str, code: int) -> None:
    got, answer = await client("POST", PODS, body, content=content)
    assert (got, answer["kind"]) == (code, "Status")


async def test_yaml_is_accepted(client: Client) -> None:
    text = b"metadata: {name: p}\nspec:\n  containers: [{name: a, image: i}]\n"
    assert (await client.ok("POST", PODS, text, content="application/yaml"))["metadata"]["name"] == "p"


async def test_a_missing_namespace_is_not_found(client: Client) -> None:
    code, answer = await client("POST", "/api/v1/namespaces/nowhere/pods", pod("p"))
    assert (code, answer["message"]) == (404, 'namespaces "nowhere" not found')


async def test_an_update_with_an_old_version_is_a_conflict(client: Client) -> None:
    old = await create(client, "p")
    await client.ok("PUT", f"{PODS}/p", {**old, "metadata": {**old["metadata"], "labels": {"a": "1"}}})
    code, answer = await client("PUT", f"{PODS}/p", {**old, "metadata": {**old["metadata"], "labels": {}}})
    assert (code, answer["reason"]) == (409, "Conflict")


async def test_a_patch_with_an_old_version_is_a_conflict(client: Client) -> None:
    old = await create(client, "p")
    merge = "application/merge-patch+json"
    await client.ok("PATCH", f"{PODS}/p", {"metadata": {"labels": {"a": "1"}}}, content=merge)
    body = {"metadata": {"resourceVersion": old["metadata"]["resourceVersion"], "labels": {"a": "2"}}}
    code, answer = await client("PATCH", f"{PODS}/p", body, content=merge)
    assert (code, answer["reason"]) == (409, "Conflict")


@pytest.mark.parametrize(
    ("content", "body"),
    [
        ("application/merge-patch+json", {"metadata": {"annotations": {"a": "b"}}}),
        ("application/strategic-merge-patch+json", {"metadata": {"annotations": {"a": "b"}}}),
        (
            "application/json-patch+json",
            [{"op": "add", "path": "/metadata/annotations", "value": {"a": "b"}}],
        ),
    ],
)
async def test_every_patch_format_changes_annotations(client: Client, content: str, body: Any) -> None:
    await create(client, "p")
    changed = await client.ok("PATCH", f"{PODS}/p", body, content=content)
    assert changed["metadata"]["annotations"] == {"a": "b"}


async def test_an_unknown_patch_format_is_refused(client: Client) -> None:
    await create(client, "p")
    code, _ = await client("PATCH", f"{PODS}/p", {}, content="application/strange")
    assert code == 415


async def test_a_change_that_changes_nothing_makes_no_new_version(client: Client) -> None:
    old = await create(client, "p", labels={"a": "b"})
    same = await client.ok(
        "PATCH", f"{PODS}/p", {"metadata": {"labels": {"a": "b"}}}, content="application/merge-patch+json"
    )
    assert same["metadata"]["resourceVersion"] == old["metadata"]["resourceVersion"]


async def test_status_is_written_only_through_its_subresource(client: Client) -> None:
    old = await create(client, "p")
    changed = await client.ok("PUT", f"{PODS}/p", {**old, "status": {"phase": "Running"}})
    assert changed["status"]["phase"] == "Pending"
    body = {"status": {"phase": "Running"}, "spec": {"nodeName": "sneaky"}}
    merge = "application/merge-patch+json"
    changed = await client.ok("PATCH", f"{PODS}/p/status", body, content=merge)
    assert changed["status"]["phase"] == "Running"
    assert "nodeName" not in changed["spec"]


async def test_a_pods_node_cannot_be_set_by_an_update(client: Client) -> None:
    await create(client, "p")
    merge = "application/merge-patch+json"
    code, answer = await client("PATCH", f"{PODS}/p", {"spec": {"nodeName": "n1"}}, content=merge)
    assert code == 422
    assert "nodeName" in answer["message"]


async def test_dry_run_stores_nothing(client: Client) -> None:
    await client.ok("POST", f"{PODS}?dryRun=All", pod("p"))
    assert (await client("GET", f"{PODS}/p"))[0] == 404


# --- lists and tables ---


async def test_lists_are_selected_by_label_and_field(client: Client) -> None:
    await create(client, "a", labels={"app": "x"})
    await create(client, "b", labels={"app": "y"})
    by_label = await client.ok("GET", f"{PODS}?labelSelector=app%3Dx")
    by_field = await client.ok("GET", f"{PODS}?fieldSelector=metadata.name%3Db")
    assert [item["metadata"]["name"] for item in by_label["items"]] == ["a"]
    assert [item["metadata"]["name"] for item in by_field["items"]] == ["b"]


async def test_pages_show_one_moment_even_if_objects_change_in_between(client: Client) -> None:
    for name in "abcde":
        await create(client, name)
    first = await client.ok("GET", f"{PODS}?limit=2")
    await create(client, "aa")
    await client.ok("DELETE", f"{PODS}/e")
    names = [item["metadata"]["name"] for item in first["items"]]
    token = first["metadata"]["continue"]
    while token:
        page = await client.ok("GET", f"{PODS}?limit=2&continue={token}")
        assert page["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
        names += [item["metadata"]["name"] for item in page["items"]]
        token = page["metadata"].get("continue", "")
    assert names == ["a", "b", "c", "d", "e"]
    assert first["metadata"]["remainingItemCount"] == 3


async def test_an_expired_page_token_is_gone(client: Client, embedded_api: ApiServer) -> None:
    for name in "abc":
        await create(client, name)
    token = (await client.ok("GET", f"{PODS}?limit=1"))["metadata"]["continue"]
    embedded_api.expire()
    code, answer = await client("GET", f"{PODS}?limit=1&continue={token}")
    assert (code, answer["reason"]) == (410, "Expired")


async def test_a_table_has_kubectls_columns(client: Client) -> None:
    await create(client, "p")
    answer = await client.ok("GET", PODS, Accept=TABLE)
    assert answer["kind"] == "Table"
    assert [column["name"] for column in answer["columnDefinitions"]][:5] == [
        "Name", "Ready", "Status", "Restarts", "Age",
    ]  # fmt: skip
    assert answer["rows"][0]["cells"][:4] == ["p", "0/1", "Pending", "0"]


# --- watch ---


async def test_a_watch_sends_the_present_state_then_changes(client: Client) -> None:
    await create(client, "a")
    seen = await watch(client, f"{PODS}?watch=true")
    assert await seen.change() == ("ADDED", "a")
    await create(client, "b")
    assert await seen.change() == ("ADDED", "b")
    await client.ok("DELETE", f"{PODS}/a")
    assert await seen.change() == ("DELETED", "a")


async def test_a_watch_resumes_after_its_resource_version(client: Client) -> None:
    await create(client, "a")
    version = (await client.ok("GET", PODS))["metadata"]["resourceVersion"]
    await create(client, "b")
    seen = await watch(client, f"{PODS}?watch=true&resourceVersion={version}")
    assert await seen.change() == ("ADDED", "b")


async def test_a_watch_with_a_selector_sees_objects_come_and_go(client: Client) -> None:
    await create(client, "a", labels={"on": "no"})
    seen = await watch(client, f"{PODS}?watch=true&labelSelector=on%3Dyes")
    for value in ("yes", "no"):
        await client.ok(
            "PATCH", f"{PODS}/a", {"metadata": {"labels": {"on": value}}},
            content="application/merge-patch+json",
        )  # fmt: skip
    assert [await seen.change(), await seen.change()] == [("ADDED", "a"), ("DELETED", "a")]


async def test_a_watch_from_before_compaction_gets_410(client: Client, embedded_api: ApiServer) -> None:
    await create(client, "a")
    await create(client, "b")
    embedded_api.expire()
    seen = await watch(client, f"{PODS}?watch=true&resourceVersion=1")
    event = await seen.next()
    assert (event["type"], event["object"]["code"]) == ("ERROR", 410)
    assert await seen.next() is None


async def test_bookmarks_carry_the_newest_version(client: Client) -> None:
    version = (await client.ok("GET", PODS))["metadata"]["resourceVersion"]
    seen = await watch(client, f"{PODS}?watch=true&allowWatchBookmarks=true&resourceVersion={version}")
    await client.ok("POST", "/api/v1/nodes", {"metadata": {"name": "n"}})
    while True:
        event = await seen.next()
        assert event["type"] == "BOOKMARK"
        if int(event["object"]["metadata"]["resourceVersion"]) > int(version):
            break


async def test_a_watch_ends_at_its_time_out(client: Client) -> None:
    seen = await watch(client, f"{PODS}?watch=true&timeoutSeconds=1")
    assert await seen.next() is None


async def test_send_initial_events_is_refused_so_that_clients_fall_back(client: Client) -> None:
    code, answer = await client("GET", f"{PODS}?watch=true&sendInitialEvents=true")
    assert (code, answer["reason"]) == (422, "Invalid")


async def test_dropped_watches_end_and_can_be_opened_again(client: Client, embedded_api: ApiServer) -> None:
    seen = await watch(client, f"{PODS}?watch=true")
    embedded_api.drop_watches()
    assert await seen.next() is None
    again = await watch(client, f"{PODS}?watch=true")
    await create(client, "a")
    assert await again.change() == ("ADDED", "a")


async def test_a_watch_can_be_a_table(client: Client) -> None:
    await create(client, "a")
    seen = await watch(client, f"{PODS}?watch=true", Accept=TABLE)
    event = await seen.next()
    assert event["object"]["kind"] == "Table"
    assert event["object"]["rows"][0]["cells"][0] == "a"


# --- binding, deletion ---


def binding(node: str = "n1", **metadata: Any) -> dict[str, Any]:
    return {"metadata": metadata, "target": {"kind": "Node", "name": node}}


async def test_a_binding_sets_node_annotations_and_labels_in_one_change(client: Client) -> None:
    created = await create(client, "p")
    seen = await watch(client, f"{PODS}?watch=true&resourceVersion={created['metadata']['resourceVersion']}")
    body = binding(annotations={"hami.io/x": "1"}, labels={"hami.io/vgpu-node": "n1"})
    assert (await client("POST", f"{PODS}/p/binding", body))[0] == 201
    event = await seen.next()
    assert event["object"]["spec"]["nodeName"] == "n1"
    assert event["object"]["metadata"]["annotations"] == {"hami.io/x": "1"}
    assert event["object"]["metadata"]["labels"] == {"hami.io/vgpu-node": "n1"}
    conditions = {item["type"]: item["status"] for item in event["object"]["status"]["conditions"]}
    assert conditions["PodScheduled"] == "True"


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        (binding(uid="another"), 409, "UID"),
        ({"metadata": {}}, 422, "target.name"),
        (binding(labels={"a": "b c"}), 422, "metadata.labels"),
    ],
)
async def test_a_bad_binding_changes_nothing(
    client: Client, body: dict[str, Any], code: int, text: str
) -> None:
    before = await create(client, "p")
    got, answer = await client("POST", f"{PODS}/p/binding", body)
    assert got == code
    assert text in answer["message"]
    assert await client.ok("GET", f"{PODS}/p") == before


async def test_a_second_binding_is_a_conflict(client: Client) -> None:
    await create(client, "p")
    await client.ok("POST", f"{PODS}/p/binding", binding("n1"))
    code, answer = await client("POST", f"{PODS}/p/binding", binding("n2"))
    assert code == 409
    assert 'already assigned to node "n1"' in answer["message"]


async def test_an_unbound_pod_is_deleted_at_once(client: Client) -> None:
    await create(client, "p")
    await client.ok("DELETE", f"{PODS}/p")
    assert (await client("GET", f"{PODS}/p"))[0] == 404


async def test_a_bound_pod_waits_for_its_kubelet(client: Client) -> None:
    await create(client, "p")
    await client.ok("POST", f"{PODS}/p/binding", binding())
    marked = await client.ok("DELETE", f"{PODS}/p", {"gracePeriodSeconds": 7})
    assert marked["metadata"]["deletionGracePeriodSeconds"] == 7
    assert (await client("POST", f"{PODS}/p/binding", binding()))[0] == 409
    await client.ok("DELETE", f"{PODS}/p?gracePeriodSeconds=0")
    assert (await client("GET", f"{PODS}/p"))[0] == 404


async def test_a_finalizer_keeps_the_object_until_it_is_removed(client: Client) -> None:
    await create(client, "p", finalizers=["example.com/wait"])
    await client.ok("DELETE", f"{PODS}/p")
    assert (await client.ok("GET", f"{PODS}/p"))["metadata"]["deletionTimestamp"]
    merge = "application/merge-patch+json"
    await client.ok("PATCH", f"{PODS}/p", {"metadata": {"finalizers": None}}, content=merge)
    assert (await client("GET", f"{PODS}/p"))[0] == 404


async def test_a_precondition_protects_a_younger_object_of_the_same_name(client: Client) -> None:
    await create(client, "p")
    code, answer = await client("DELETE", f"{PODS}/p", {"preconditions": {"uid": "older"}})
    assert (code, answer["reason"]) == (409, "Conflict")


async def test_deleting_a_namespace_removes_what_is_in_it(client: Client) -> None:
    await client.ok("POST", "/api/v1/namespaces", {"metadata": {"name": "team"}})
    await client.ok("POST", "/api/v1/namespaces/team/pods", pod("p"))
    await client.ok("DELETE", "/api/v1/namespaces/team")
    assert (await client("GET", "/api/v1/namespaces/team"))[0] == 404
    assert (await client.ok("GET", "/api/v1/pods"))["items"] == []


async def test_an_eviction_deletes_the_pod(client: Client) -> None:
    await create(client, "p")
    await client.ok("POST", f"{PODS}/p/eviction", {"metadata": {"name": "p"}})
    assert (await client("GET", f"{PODS}/p"))[0] == 404


async def test_a_collection_is_deleted_by_selector(client: Client) -> None:
    await create(client, "a", labels={"x": "1"})
    await create(client, "b")
    await client.ok("DELETE", f"{PODS}?labelSelector=x%3D1")
    assert [item["metadata"]["name"] for item in (await client.ok("GET", PODS))["items"]] == ["b"]


# --- quota, access ---


async def test_a_quota_on_device_requests_is_enforced_and_its_use_shown(client: Client) -> None:
    quotas = "/api/v1/namespaces/default/resourcequotas"
    hard = {"requests.nvidia.com/gpu": "1"}
    await client.ok("POST", quotas, {"metadata": {"name": "q"}, "spec": {"hard": hard}})
    body = pod("a")
    body["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    await client.ok("POST", PODS, body)
    assert (await client.ok("GET", f"{quotas}/q"))["status"]["used"] == hard
    code, answer = await client("POST", PODS, {**body, "metadata": {"name": "b"}})
    assert code == 403
    assert (
        "exceeded quota: q, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=1"
        in (answer["message"])
    )
    await client.ok("DELETE", f"{PODS}/a")
    assert (await client("POST", PODS, {**body, "metadata": {"name": "b"}}))[0] == 201


async def test_with_a_token_other_requests_are_unauthorized() -> None:
    server = ApiServer(token="secret")
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            client = Client(server.url, session)
            assert (await client("GET", PODS))[0] == 401
            assert (await client("GET", PODS, Authorization="Bearer secret"))[0] == 200
    finally:
        await server.stop()


async def test_a_restarted_server_is_found_at_its_address_with_its_objects(
    client: Client, embedded_api: ApiServer
) -> None:
    await create(client, "p")
    url = embedded_api.url
    await embedded_api.restart()
    assert embedded_api.url == url
    assert (await client.ok("GET", f"{PODS}/p"))["metadata"]["name"] == "p"


async def test_a_stopped_server_keeps_its_objects(client: Client, embedded_api: ApiServer) -> None:
    await create(client, "p")
    await embedded_api.stop()
    await embedded_api.start()
    again = Client(embedded_api.url, client.session)
    assert (await again.ok("GET", f"{PODS}/p"))["metadata"]["name"] == "p"
