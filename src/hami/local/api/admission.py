"""Admission webhooks: which of them see a request, the call over HTTPS, and what their answers mean."""

from __future__ import annotations

import asyncio
import base64
import binascii
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from hami.local.api.errors import ApiError, internal
from hami.local.api.objects import Object, clone, dig, labels_of, meta
from hami.local.api.patch import json_patch
from hami.local.api.resources import ENDPOINTS, MUTATING_WEBHOOKS, NAMESPACES, VALIDATING_WEBHOOKS, Resource
from hami.local.api.selectors import matches_label_selector
from hami.local.api.store import Store

MAX_ANSWER_BYTES = 3 * 1024 * 1024


@dataclass(slots=True)
class AdmissionRequest:
    """One write that passes admission. ``obj`` is None for DELETE, ``old`` for CREATE."""

    resource: Resource
    operation: str
    namespace: str
    name: str
    obj: Object | None
    old: Object | None
    dry_run: bool = False
    subresource: str = ""
    user: str = "embedded-admin"
    options: Object = field(default_factory=dict)


@dataclass(slots=True)
class Admitted:
    """The object after every mutating webhook, and the warnings for the client."""

    obj: Object | None
    warnings: list[str]


class Webhooks:
    """Calls the webhooks that the store's configurations register. One client session for all of them."""

    def __init__(self, store: Store, new_uid: Callable[[], str]) -> None:
        self._store = store
        self._new_uid = new_uid
        self._session: aiohttp.ClientSession | None = None
        self._contexts: dict[str, ssl.SSLContext] = {}

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def admit(
        self, request: AdmissionRequest, normalise: Callable[[Object], None] | None = None
    ) -> Admitted:
        """Run mutating, then validating webhooks. ``normalise`` sets defaults after each change.

        Raises the refusal of a webhook (its own code, 403 otherwise), or 500 when a webhook with
        failurePolicy Fail cannot be asked.
        """
        warnings: list[str] = []
        if request.resource.group == "admissionregistration.k8s.io":
            return Admitted(request.obj, warnings)
        again: list[Object] = []
        for webhook in self._matching(MUTATING_WEBHOOKS, request):
            before = clone(request.obj)
            await self._mutate(webhook, request, warnings)
            if request.obj != before:
                if normalise is not None and request.obj is not None:
                    normalise(request.obj)
                await self._reinvoke(again, request, warnings, normalise)
            if webhook.get("reinvocationPolicy") == "IfNeeded":
                again.append(webhook)
        for webhook in self._matching(VALIDATING_WEBHOOKS, request):
            await self._ask(webhook, request, warnings)
        return Admitted(request.obj, warnings)

    async def _reinvoke(
        self,
        webhooks: list[Object],
        request: AdmissionRequest,
        warnings: list[str],
        normalise: Callable[[Object], None] | None,
    ) -> None:
        for webhook in webhooks:
            if _selected(webhook, request, self._namespace_labels(request)):
                await self._mutate(webhook, request, warnings)
                if normalise is not None and request.obj is not None:
                    normalise(request.obj)
        webhooks.clear()

    def _matching(self, kind: Resource, request: AdmissionRequest) -> list[Object]:
        """Webhooks in the order of configuration names; selectors look at the object as it came."""
        namespace_labels = self._namespace_labels(request)
        return [
            webhook
            for configuration in self._store.list(kind)
            for webhook in configuration.get("webhooks") or []
            if _selected(webhook, request, namespace_labels)
        ]

    def _namespace_labels(self, request: AdmissionRequest) -> dict[str, str] | None:
        if request.resource.key == "namespaces":
            return labels_of(request.obj or request.old or {})
        if not request.resource.namespaced:
            return None
        namespace = self._store.find(NAMESPACES, "", request.namespace)
        return labels_of(namespace) if namespace else {}

    async def _mutate(self, webhook: Object, request: AdmissionRequest, warnings: list[str]) -> None:
        answer = await self._ask(webhook, request, warnings)
        patch = answer.get("patch")
        if not patch:
            return
        if answer.get("patchType") != "JSONPatch":
            raise internal(
                f'admission webhook "{webhook["name"]}" answered with patchType {answer.get("patchType")!r}'
            )
        try:
            operations = msgspec.json.decode(base64.b64decode(patch, validate=True))
            request.obj = json_patch(request.obj, operations)
        except (binascii.Error, ValueError, TypeError, msgspec.DecodeError, ApiError) as error:
            raise internal(
                f'the patch of admission webhook "{webhook["name"]}" does not apply: {error}'
            ) from error

    async def _ask(self, webhook: Object, request: AdmissionRequest, warnings: list[str]) -> Object:
        """The webhook's ``response``; {} where it could not be asked and may be ignored."""
        uid = self._new_uid()
        try:
            answer = await self._post(webhook, _review(uid, request))
            response = _response_of(answer, uid)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, ssl.SSLError) as error:
            why = f"failed calling webhook {webhook['name']!r}: {_reason(error)}"
            if webhook.get("failurePolicy") == "Ignore":
                warnings.append(why)
                return {}
            raise internal(why) from error
        warnings.extend(str(warning) for warning in response.get("warnings") or [])
        if response.get("allowed") is True:
            return response
        status = response.get("status") or {}
        message = status.get("message") or status.get("reason") or "without explanation"
        text = f'admission webhook "{webhook["name"]}" denied the request'
        code = status.get("code")
        denied = ApiError(
            code if isinstance(code, int) and 400 <= code < 600 else 403,
            str(status.get("reason") or "Forbidden"),
            f"{text}: {message}" if status else f"{text} without explanation",
        )
        denied.warnings = tuple(warnings)
        raise denied

    async def _post(self, webhook: Object, review: Object) -> Any:
        url, server_name = self._address(webhook.get("clientConfig") or {})
        timeout = float(webhook.get("timeoutSeconds") or 10)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=64, force_close=False), auto_decompress=True
            )
        request = self._session.post(
            f"{url}?timeout={int(timeout)}s",
            data=msgspec.json.encode(review),
            headers={"Content-Type": "application/json", "Accept": "application/json"},
            ssl=self._context(dig(webhook, "clientConfig", "caBundle") or ""),
            server_hostname=server_name,
            timeout=aiohttp.ClientTimeout(total=timeout),
            allow_redirects=False,
        )
        async with asyncio.timeout(timeout), request as answer:
            if answer.status != 200:
                raise ValueError(f"the webhook answered with HTTP status {answer.status}")
            body = await answer.content.read(MAX_ANSWER_BYTES + 1)
            while not answer.content.at_eof() and len(body) <= MAX_ANSWER_BYTES:
                body += await answer.content.read(MAX_ANSWER_BYTES + 1 - len(body))
            if len(body) > MAX_ANSWER_BYTES:
                raise ValueError(f"the webhook answered with more than {MAX_ANSWER_BYTES} bytes")
            return msgspec.json.decode(body)

    def _address(self, client: Object) -> tuple[str, str | None]:
        """(URL, TLS server name) of ``clientConfig``; a service is resolved through its Endpoints."""
        if client.get("url"):
            return str(client["url"]), None
        service = client.get("service") or {}
        name, namespace = str(service.get("name")), str(service.get("namespace"))
        endpoints = self._store.find(ENDPOINTS, namespace, name)
        for subset in (endpoints or {}).get("subsets") or []:
            for address in subset.get("addresses") or []:
                for port in subset.get("ports") or []:
                    path = str(service.get("path") or "").lstrip("/")
                    host = f"https://{address['ip']}:{port['port']}/{path}"
                    return host, f"{name}.{namespace}.svc"
        raise ValueError(f'no endpoints available for service "{name}" in namespace "{namespace}"')

    def _context(self, bundle: str) -> ssl.SSLContext:
        context = self._contexts.get(bundle)
        if context is None:
            try:
                data = base64.b64decode(bundle, validate=True).decode("ascii")
                context = ssl.create_default_context(cadata=data or None)
            except (binascii.Error, UnicodeDecodeError, ssl.SSLError) as error:
                raise ValueError(f"the caBundle is unusable: {error}") from error
            if len(self._contexts) >= 32:
                self._contexts.clear()
            self._contexts[bundle] = context
        return context


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "context deadline exceeded"
    return str(error) or type(error).__name__


def _response_of(answer: Any, uid: str) -> Object:
    response = answer.get("response") if isinstance(answer, dict) else None
    if not isinstance(response, dict):
        raise ValueError("the webhook's answer has no response")  # noqa: TRY004 - a refusal, not a bug
    if response.get("uid") != uid:
        raise ValueError(f"the webhook's answer has uid {response.get('uid')!r}, expected {uid!r}")
    return response


def _review(uid: str, request: AdmissionRequest) -> Object:
    resource = request.resource
    gvk = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    gvr = {"group": resource.group, "version": resource.version, "resource": resource.plural}
    body: Object = {
        "uid": uid,
        "kind": gvk,
        "resource": gvr,
        "requestKind": gvk,
        "requestResource": gvr,
        "name": request.name,
        "operation": request.operation,
        "userInfo": {"username": request.user, "groups": ["system:masters", "system:authenticated"]},
        "object": request.obj,
        "oldObject": request.old,
        "dryRun": request.dry_run,
        "options": request.options or None,
    }
    if resource.namespaced:
        body["namespace"] = request.namespace
    if request.subresource:
        body["subResource"] = body["requestSubResource"] = request.subresource
    return {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": body}


def _selected(webhook: Object, request: AdmissionRequest, namespace_labels: dict[str, str] | None) -> bool:
    if not any(_rule_matches(rule, request) for rule in webhook.get("rules") or []):
        return False
    if namespace_labels is not None and not matches_label_selector(
        webhook.get("namespaceSelector") or {}, namespace_labels
    ):
        return False
    selector = webhook.get("objectSelector") or {}
    return any(
        obj is not None and matches_label_selector(selector, labels_of(obj))
        for obj in (request.obj, request.old)
    )


def _rule_matches(rule: Object, request: AdmissionRequest) -> bool:
    def within(field: str, value: str) -> bool:
        allowed = rule.get(field) or []
        return "*" in allowed or value in allowed

    resource = request.resource
    path = f"{resource.plural}/{request.subresource}" if request.subresource else resource.plural
    resources = rule.get("resources") or []
    names = {path, "*/*"}
    if request.subresource:
        names |= {f"{resource.plural}/*", f"*/{request.subresource}"}
    else:
        names |= {"*", f"{resource.plural}/*"}
    scope = rule.get("scope") or "*"
    return (
        within("operations", request.operation)
        and within("apiGroups", resource.group)
        and within("apiVersions", resource.version)
        and any(name in resources for name in names)
        and (scope == "*" or scope == ("Namespaced" if resource.namespaced else "Cluster"))
    )


def admission_name(obj: Object) -> str:
    """``request.name``: empty while the server has still to make it up from generateName."""
    return str(meta(obj).get("name") or "")
