"""Admission webhooks of the embedded API server, called over HTTPS."""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from hami.kube.certificates import create_authority, issue
from hami.local.api.apiserver import ApiServer
from hami.local.api.errors import ApiError
from hami.local.api.resources import (
    ENDPOINTS,
    MUTATING_WEBHOOKS,
    NAMESPACES,
    PODS,
    VALIDATING_WEBHOOKS,
    Resource,
)
from hami.local.serving import serving

Review = Callable[[Any], Any]


def allow(request: Any) -> Any:
    return {"allowed": True}


def patching(*operations: Any) -> Review:
    def review(request: Any) -> Any:
        patch = base64.b64encode(msgspec.json.encode(list(operations))).decode()
        return {"allowed": True, "patchType": "JSONPatch", "patch": patch}

    return review


class WebhookServer:
    """An HTTPS server whose answer a test sets; remembers the requests."""

    def __init__(self, url: str, bundle: str) -> None:
        self.url = url
        self.bundle = bundle
        self.review: Review = allow
        self.requests: list[Any] = []
        self.delay_s = 0.0

    async def handle(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        self.requests.append(body["request"])
        await asyncio.sleep(self.delay_s)
        response = {"uid": body["request"]["uid"], **self.review(body["request"])}
        answer = {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "response": response}
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    def configuration(self, name: str = "hook", **webhook: Any) -> Any:
        found = {
            "name": f"{name}.example.com",
            "clientConfig": {"url": f"{self.url}/webhook", "caBundle": self.bundle},
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "rules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
            ],
            **webhook,
        }
        return {"metadata": {"name": name}, "webhooks": [found]}


@pytest.fixture
async def hook(tmp_path: Path) -> AsyncIterator[WebhookServer]:
    authority = create_authority("test", time.time())
    pair = issue(authority, "hook", time.time(), hosts=["127.0.0.1", "hook.default.svc"])
    (tmp_path / "tls.crt").write_bytes(pair.certificate_pem)
    (tmp_path / "tls.key").write_bytes(pair.key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    app = web.Application()
    server = WebhookServer("", base64.b64encode(authority.certificate_pem).decode())
    app.router.add_post("/webhook", server.handle)
    async with serving(app, context) as port:
        server.url = f"https://127.0.0.1:{port}"
        yield server


async def install(api: ApiServer, configuration: Any, kind: Resource = MUTATING_WEBHOOKS) -> None:
    await api.registry.create(kind, "", configuration)


async def create(api: ApiServer, **metadata: Any) -> tuple[Any, list[str]]:
    body = {"metadata": {"name": "p", **metadata}, "spec": {"containers": [{"name": "a", "image": "i"}]}}
    return await api.registry.create(PODS, "default", body)


async def test_the_patch_of_a_webhook_is_in_the_stored_pod(
    embedded_api: ApiServer, hook: WebhookServer
) -> None:
    hook.review = patching({"op": "replace", "path": "/spec/schedulerName", "value": "hami-scheduler"})
    await install(embedded_api, hook.configuration())
    stored, _ = await create(embedded_api)
    assert stored["spec"]["schedulerName"] == "hami-scheduler"


async def test_the_review_carries_the_defaulted_pod_and_its_namespace(
    embedded_api: ApiServer, hook: WebhookServer
) -> None:
    await install(embedded_api, hook.configuration())
    await create(embedded_api)
    request = hook.requests[0]
    assert (request["operation"], request["namespace"], request["name"]) == ("CREATE", "default", "p")
    assert request["kind"] == {"group": "", "version": "v1", "kind": "Pod"}
    assert request["object"]["spec"]["schedulerName"] == "default-scheduler"
    assert request["oldObject"] is None


async def test_what_a_webhook_adds_is_defaulted_too(embedded_api: ApiServer, hook: WebhookServer) -> None:
    limits = {"nvidia.com/gpu": "1"}
    hook.review = patching({"op": "add", "path": "/spec/containers/0/resources", "value": {"limits": limits}})
    await install(embedded_api, hook.configuration())
    stored, _ = await create(embedded_api)
    assert stored["spec"]["containers"][0]["resources"]["requests"] == limits


async def test_a_denial_reaches_the_client_with_its_code_and_stores_nothing(
    embedded_api: ApiServer, hook: WebhookServer
) -> None:
    def deny(request: Any) -> Any:
        return {"allowed": False, "status": {"code": 403, "message": "container a is privileged"}}

    hook.review = deny
    await install(embedded_api, hook.configuration())
    with pytest.raises(ApiError) as refused:
        await create(embedded_api)
    assert refused.value.code == 403
    assert refused.value.message == (
        'admission webhook "hook.example.com" denied the request: container a is privileged'
    )
    assert embedded_api.store.list(PODS) == []


async def test_warnings_of_a_denial_are_headers_of_the_answer(
    embedded_api: ApiServer, hook: WebhookServer
) -> None:
    hook.review = lambda _request: {"allowed": False, "status": {"message": "no"}, "warnings": ['say "a\\b"']}
    await install(embedded_api, hook.configuration())
    body = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "a", "image": "i"}]}}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{embedded_api.url}/api/v1/namespaces/default/pods", json=body) as answer,
    ):
        assert answer.status == 403
        assert answer.headers.getall("Warning") == ['299 - "say \\"a\\\\b\\""']


async def test_warnings_are_passed_on(embedded_api: ApiServer, hook: WebhookServer) -> None:
    def warn(request: Any) -> Any:
        return {"allowed": True, "warnings": ["unknown policy"]}

    hook.review = warn
    await install(embedded_api, hook.configuration())
    _, warnings = await create(embedded_api)
    assert warnings == ["unknown policy"]


@pytest.mark.parametrize(
    "failure", ["wrong authority", "too late", "wrong uid", "nobody listens", "bad patch"]
)
async def test_a_webhook_that_cannot_be_asked_fails_the_request(
    embedded_api: ApiServer, hook: WebhookServer, failure: str
) -> None:
    configuration = hook.configuration(failurePolicy="Fail", timeoutSeconds=1)
    client = configuration["webhooks"][0]["clientConfig"]
    if failure == "wrong authority":
        other = create_authority("other", time.time())
        client["caBundle"] = base64.b64encode(other.certificate_pem).decode()
    elif failure == "too late":
        hook.delay_s = 5.0
    elif failure == "wrong uid":
        hook.review = lambda request: {"allowed": True, "uid": "x"}
    elif failure == "nobody listens":
        client["url"] = "https://127.0.0.1:9/webhook"
    else:
        hook.review = patching({"op": "remove", "path": "/no/such/path"})
    await install(embedded_api, configuration)
    with pytest.raises(ApiError) as refused:
        await create(embedded_api)
    assert refused.value.code == 500
    assert "hook.example.com" in refused.value.message
    assert embedded_api.store.list(PODS) == []


async def test_with_failure_policy_ignore_the_request_goes_on(
    embedded_api: ApiServer, hook: WebhookServer
) -> None:
    configuration = hook.configuration(failurePolicy="Ignore")
    configuration["webhooks"][0]["clientConfig"]["url"] = "https://127.0.0.1:9/webhook"
    await install(embedded_api, configuration)
    stored, warnings = await create(embedded_api)
    assert stored["metadata"]["name"] == "p"
    assert "hook.example.com" in warnings[0]


IGNORE = {"matchExpressions": [{"key": "hami.io/webhook", "operator": "NotIn", "values": ["ignore"]}]}


async def test_the_object_selector_leaves_marked_pods_alone(
    embedded_api: ApiServer, hook: WebhookServer
) -> None:
    await install(embedded_api, hook.configuration(objectSelector=IGNORE))
    await create(embedded_api, labels={"hami.io/webhook": "ignore"})
    assert hook.requests == []


async def test_the_namespace_selector_leaves_marked_namespaces_alone(
    embedded_api: ApiServer, hook: WebhookServer
) -> None:
    await install(embedded_api, hook.configuration(namespaceSelector=IGNORE))
    labels = {"hami.io/webhook": "ignore"}
    await embedded_api.registry.update(
        NAMESPACES, "", "default", lambda old: {**old, "metadata": {**old["metadata"], "labels": labels}}
    )
    await create(embedded_api)
    assert hook.requests == []


async def test_other_operations_are_not_sent(embedded_api: ApiServer, hook: WebhookServer) -> None:
    await install(embedded_api, hook.configuration())
    await create(embedded_api)
    await embedded_api.registry.delete(PODS, "default", "p")
    assert [request["operation"] for request in hook.requests] == ["CREATE"]


async def test_a_service_is_reached_through_its_endpoints(
    embedded_api: ApiServer, hook: WebhookServer
) -> None:
    port = int(hook.url.rpartition(":")[2])
    subsets = [{"addresses": [{"ip": "127.0.0.1"}], "ports": [{"port": port}]}]
    await embedded_api.registry.create(
        ENDPOINTS, "default", {"metadata": {"name": "hook"}, "subsets": subsets}
    )
    service = {"name": "hook", "namespace": "default", "path": "/webhook"}
    client = {"service": service, "caBundle": hook.bundle}
    await install(embedded_api, hook.configuration(clientConfig=client))
    await create(embedded_api)
    assert len(hook.requests) == 1


async def test_validating_webhooks_see_the_mutated_pod(embedded_api: ApiServer, hook: WebhookServer) -> None:
    def review(request: Any) -> Any:
        if "seen" in (request["object"]["metadata"].get("labels") or {}):
            return {"allowed": False, "status": {"message": "seen"}}
        return patching({"op": "add", "path": "/metadata/labels", "value": {"seen": "1"}})(request)

    hook.review = review
    await install(embedded_api, hook.configuration())
    await install(embedded_api, hook.configuration(), VALIDATING_WEBHOOKS)
    with pytest.raises(ApiError, match="denied the request: seen"):
        await create(embedded_api)


async def test_an_earlier_webhook_is_asked_again_if_it_wants(
    embedded_api: ApiServer, hook: WebhookServer
) -> None:
    def review(request: Any) -> Any:
        labels = request["object"]["metadata"].get("labels") or {}
        if len(hook.requests) == 2:
            return patching({"op": "add", "path": "/metadata/labels", "value": {"late": "1"}})(request)
        return {"allowed": True, "warnings": [",".join(sorted(labels))]}

    hook.review = review
    await install(embedded_api, hook.configuration("a", reinvocationPolicy="IfNeeded"))
    await install(embedded_api, hook.configuration("b"))
    _, warnings = await create(embedded_api)
    assert warnings == ["", "late"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"clientConfig": {"url": "http://127.0.0.1/x"}}, "https"),
        ({"clientConfig": {}}, "exactly one of url or service"),
        ({"failurePolicy": "Maybe"}, "failurePolicy"),
        ({"timeoutSeconds": 31}, "between 1 and 30"),
        ({"admissionReviewVersions": ["v9"]}, "must include v1"),
        ({"matchConditions": [{"name": "x"}]}, "CEL"),
    ],
)
async def test_a_bad_configuration_is_refused(
    embedded_api: ApiServer, hook: WebhookServer, change: Any, text: str
) -> None:
    with pytest.raises(ApiError, match=text) as refused:
        await install(embedded_api, hook.configuration(**change))
    assert refused.value.code == 422
