"""Resources that are only asked: who a token belongs to, and whether somebody may do something.

The embedded server stores RBAC objects but lets every known user do everything; the answers say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hami.local.api.errors import bad_request, invalid
from hami.local.api.objects import Object
from hami.local.api.resources import (
    ACCESS_REVIEWS,
    LOCAL_ACCESS_REVIEWS,
    SELF_ACCESS_REVIEWS,
    SELF_RULES_REVIEWS,
    SELF_SUBJECT_REVIEWS,
    TOKENREVIEWS,
    Resource,
)
from hami.local.api.tokens import AUDIENCE, Tokens, User

_REASON = "the embedded API server lets every known user do everything"


def answer(resource: Resource, body: Any, user: User, tokens: Tokens) -> Object:
    """``body`` with its status. Raises 400 for what is not an object and 422 for what cannot be asked."""
    if not isinstance(body, dict) or not isinstance(body.get("spec") or {}, dict):
        raise bad_request("the body of the request is not a review")
    if body.get("kind", resource.kind) != resource.kind:
        raise bad_request(f"{body.get('kind')} cannot be handled as {resource.kind}")
    spec: Object = body.get("spec") or {}
    return {
        "kind": resource.kind,
        "apiVersion": resource.api_version,
        "metadata": body.get("metadata") or {},
        "spec": spec,
        "status": _ANSWERS[resource.key](resource, spec, user, tokens),
    }


def _token(_resource: Resource, spec: Object, _user: User, tokens: Tokens) -> Object:
    token = spec.get("token")
    if not token or not isinstance(token, str):
        raise bad_request("token is required for TokenReview in authentication")
    found = tokens.verify(token)
    wanted = spec.get("audiences") or [AUDIENCE]
    if found is None:
        return {"authenticated": False, "error": "invalid bearer token", "user": {}}
    shared = [item for item in wanted if item in found.audiences]
    if not shared:
        return {"authenticated": False, "error": f"token audiences {list(found.audiences)} is invalid for "
                                                 f"the target audiences {wanted}", "user": {}}  # fmt: skip
    return {"authenticated": True, "user": found.info(), "audiences": shared}


def _self(_resource: Resource, _spec: Object, user: User, _tokens: Tokens) -> Object:
    return {"userInfo": user.info()}


def _access(resource: Resource, spec: Object, _user: User, _tokens: Tokens) -> Object:
    kinds = [field for field in ("resourceAttributes", "nonResourceAttributes") if spec.get(field)]
    if len(kinds) != 1:
        raise invalid(
            resource.kind, resource.group, "",
            [("spec.resourceAttributes",
              "Invalid value: exactly one of nonResourceAttributes or resourceAttributes must be specified")],
        )  # fmt: skip
    if resource is not SELF_ACCESS_REVIEWS and not spec.get("user") and not spec.get("groups"):
        raise invalid(
            resource.kind, resource.group, "",
            [("spec.user", "Invalid value: at least one of user or group must be specified")],
        )  # fmt: skip
    return {"allowed": True, "reason": _REASON}


def _rules(_resource: Resource, _spec: Object, _user: User, _tokens: Tokens) -> Object:
    return {
        "resourceRules": [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}],
        "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
        "incomplete": False,
    }


_ANSWERS: dict[str, Callable[[Resource, Object, User, Tokens], Object]] = {
    TOKENREVIEWS.key: _token,
    SELF_SUBJECT_REVIEWS.key: _self,
    ACCESS_REVIEWS.key: _access,
    LOCAL_ACCESS_REVIEWS.key: _access,
    SELF_ACCESS_REVIEWS.key: _access,
    SELF_RULES_REVIEWS.key: _rules,
}
