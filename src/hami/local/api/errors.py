"""Errors of the embedded API server: each is one Kubernetes ``Status`` with its HTTP code and reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hami.protocol.errors import HamiError


class ApiError(HamiError):
    """A refusal that the API server answers as a ``Status`` object.

    ``code`` is the HTTP status, ``reason`` the machine-readable word of ``metav1.StatusReason``;
    ``warnings`` are what admission webhooks said beside it.
    """

    def __init__(
        self, code: int, reason: str, message: str, *, details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details
        self.warnings: Sequence[str] = ()

    def status(self) -> dict[str, Any]:
        """The ``Status`` object that clients decode."""
        body: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        if self.details:
            body["details"] = self.details
        return body


def _details(group: str, plural: str, name: str) -> dict[str, Any]:
    details: dict[str, Any] = {"name": name, "kind": plural}
    if group:
        details["group"] = group
    return details


def _qualified(group: str, plural: str) -> str:
    return f"{plural}.{group}" if group else plural


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def unauthorized() -> ApiError:
    return ApiError(401, "Unauthorized", "Unauthorized")


def forbidden(group: str, plural: str, name: str, why: str) -> ApiError:
    return ApiError(
        403,
        "Forbidden",
        f'{_qualified(group, plural)} "{name}" is forbidden: {why}',
        details=_details(group, plural, name),
    )


def not_found(group: str, plural: str, name: str) -> ApiError:
    return ApiError(
        404,
        "NotFound",
        f'{_qualified(group, plural)} "{name}" not found',
        details=_details(group, plural, name),
    )


def no_such_path() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource", details={})


def method_not_allowed(verb: str) -> ApiError:
    return ApiError(
        405, "MethodNotAllowed", f"the server does not allow this method on the requested resource: {verb}"
    )


def already_exists(group: str, plural: str, name: str) -> ApiError:
    return ApiError(
        409,
        "AlreadyExists",
        f'{_qualified(group, plural)} "{name}" already exists',
        details=_details(group, plural, name),
    )


def conflict(group: str, plural: str, name: str, why: str) -> ApiError:
    return ApiError(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {_qualified(group, plural)} "{name}": {why}',
        details=_details(group, plural, name),
    )


def stale(group: str, plural: str, name: str) -> ApiError:
    return conflict(
        group,
        plural,
        name,
        "the object has been modified; please apply your changes to the latest version and try again",
    )


def expired(message: str) -> ApiError:
    return ApiError(410, "Expired", message)


def unsupported_media_type(got: str) -> ApiError:
    return ApiError(
        415,
        "UnsupportedMediaType",
        f"the body of the request was in an unknown format: {got or 'no Content-Type'}; send JSON",
    )


def invalid(kind: str, group: str, name: str, causes: list[tuple[str, str]]) -> ApiError:
    """422: ``causes`` are (field path, what is wrong)."""
    shown = [f"{field}: {why}" for field, why in causes]
    text = shown[0] if len(shown) == 1 else "[" + ", ".join(shown) + "]"
    details: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "causes": [{"reason": "FieldValueInvalid", "message": why, "field": field} for field, why in causes],
    }
    if group:
        details["group"] = group
    return ApiError(422, "Invalid", f'{_qualified(group, kind)} "{name}" is invalid: {text}', details=details)


def internal(message: str) -> ApiError:
    return ApiError(500, "InternalError", f"Internal error occurred: {message}")


def gateway_timeout(message: str) -> ApiError:
    return ApiError(504, "Timeout", message)
