"""What a request asks for: the form of the answer, selectors, parameters, its body, its change."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from hami.local.api import errors, patch, selectors, strategic
from hami.local.api.documents import decode_json, decode_yaml
from hami.local.api.errors import ApiError, bad_request
from hami.local.api.objects import Object
from hami.local.api.registry import Change
from hami.local.api.resources import Resource

APPLY = "application/apply-patch+yaml"
_MAX_MANAGER = 128


def view(request: web.Request) -> tuple[str, str]:
    """(``Table``, ``Metadata`` or ``Object``; what table rows carry): the first known media type wins.

    Raises 406 where the client takes no JSON.
    """
    accepted = request.headers.get("Accept", "")
    understood = not accepted.strip()
    for media in accepted.split(","):
        parameters = {
            key.strip(): value.strip()
            for key, _, value in (part.partition("=") for part in media.split(";")[1:])
        }
        if media.split(";")[0].strip() not in ("application/json", "application/*", "*/*", ""):
            continue
        understood = True
        if parameters.get("as") == "Table" and parameters.get("g") == "meta.k8s.io":
            if parameters.get("v") == "v1":
                return "Table", request.query.get("includeObject", "Metadata")
            continue
        if parameters.get("as", "").startswith("PartialObjectMetadata"):
            return "Metadata", ""
        break
    if not understood:
        raise ApiError(
            406, "NotAcceptable",
            f"only application/json is served, which the Accept header does not allow: {accepted[:200]}",
        )  # fmt: skip
    return "Object", ""


def predicate(request: web.Request, resource: Resource) -> selectors.Predicate | None:
    found = [
        predicate
        for predicate in (
            selectors.label_predicate(request.query.get("labelSelector", "")),
            selectors.field_predicate(resource.key, request.query.get("fieldSelector", "")),
        )
        if predicate is not None
    ]
    if not found:
        return None
    return lambda obj: all(predicate(obj) for predicate in found)


def flag(request: web.Request, name: str) -> bool:
    return request.query.get(name, "") in ("1", "t", "true", "True", "TRUE")


def number(request: web.Request, name: str) -> int | None:
    text = request.query.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise bad_request(f"Invalid value: {name}={text!r} is not a number")
    return int(text)


def dry_run(request: web.Request) -> bool:
    wanted = request.query.getall("dryRun", [])
    if any(value != "All" for value in wanted):
        raise bad_request(f"Invalid value: dryRun={wanted}; the only supported value is All")
    return bool(wanted)


async def body(request: web.Request) -> Any:
    if request.content_type in ("application/yaml", "application/x-yaml"):
        return decode_yaml(await request.read())
    if request.content_type not in ("application/json", "application/octet-stream"):
        raise errors.unsupported_media_type(request.content_type)
    return await json_body(request)


async def json_body(request: web.Request) -> Any:
    return decode_json(await request.read())


async def change_of(request: web.Request, kind: str) -> Change:
    """The change that a PATCH of one of the three merging formats makes. Raises 400 and 415."""
    content = request.content_type
    if content == "application/merge-patch+json":
        wanted = await json_body(request)
        if not isinstance(wanted, dict):
            raise bad_request("a merge patch is an object")
        return lambda current: _as_object(patch.merge_patch(current, wanted))
    if content == "application/json-patch+json":
        operations = await json_body(request)
        return lambda current: _as_object(patch.json_patch(current, operations))
    if content == "application/strategic-merge-patch+json":
        wanted = await json_body(request)
        return lambda current: strategic.strategic_merge(kind, current, wanted)
    raise errors.unsupported_media_type(content)


def _as_object(value: Any) -> Object:
    if not isinstance(value, dict):
        raise bad_request("the patch does not leave an object")
    return value


async def applied(request: web.Request) -> Object:
    """The body of an apply patch: YAML, of which JSON is a part."""
    found = decode_yaml(await request.read())
    if not isinstance(found, dict):
        raise bad_request("the body of an apply patch is not an object")
    return found


def manager_of(request: web.Request) -> str:
    """Who owns the fields that the request sets: ``fieldManager``, else the program in User-Agent."""
    agent = request.headers.get("User-Agent", "").split("/")[0].strip()
    return request.query.get("fieldManager", "")[:_MAX_MANAGER] or agent[:_MAX_MANAGER] or "unknown"


def check_parameters(request: web.Request) -> None:
    """Raises 400 for a ``fieldValidation`` that is none, 422 for ``force`` outside of apply.

    Unknown fields are kept in every mode: there are no schemas here to tell them by.
    """
    wanted = request.query.get("fieldValidation", "")
    if wanted not in ("", "Ignore", "Warn", "Strict"):
        raise bad_request(f"invalid fieldValidation {wanted!r}: supported values: Ignore, Strict, Warn")
    if "force" in request.query and request.content_type != APPLY:
        raise ApiError(
            422, "Invalid",
            'PatchOptions.meta.k8s.io "" is invalid: force: Forbidden: may not be specified for non-apply '
            "patch",
        )  # fmt: skip
