# ruff: noqa: N818 -- named after the reasons of the API server
"""Typed errors of the Kubernetes client.

``ApiError`` and its subclasses are answers of the API server; ``TransportError`` means that no complete
answer came, so that the outcome of a write is unknown.
"""

from __future__ import annotations

import msgspec

from hami.protocol.errors import HamiError

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what was expected; the last for nesting beyond all reason."""


class KubeError(HamiError):
    """Anything that goes wrong between us and the API server."""


class ConfigError(KubeError):
    """The client configuration is missing, unreadable or asks for something unsupported."""


class CredentialError(KubeError):
    """No credential could be obtained (unreadable token file, failing exec plugin)."""


class TransportError(KubeError):
    """No complete answer: connection refused or lost, time-out. Whether a write happened is unknown."""


class RateLimited(KubeError):
    """Not sent: the client's own limit left no room for the request in time."""


class ResponseTooLarge(KubeError):
    """The answer is longer than the caller allows; nothing of it was used."""


class DecodeError(KubeError):
    """The answer is not what the API promises (not JSON, or a field of another type)."""


class ApiError(KubeError):
    """An answer of the API server with a status outside 2xx.

    ``status`` is the HTTP status, ``reason`` and ``message`` come from the Status object (empty if there
    was none), ``retry_after_s`` is the server's wish in seconds (None: none stated).
    """

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(
            f"{status} {reason or 'error'}: {message}" if message else f"{status} {reason or 'error'}"
        )
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


class BadRequest(ApiError):
    """400."""


class Unauthorized(ApiError):
    """401: the credential is missing, wrong or expired."""


class Forbidden(ApiError):
    """403: RBAC or admission refuses."""


class NotFound(ApiError):
    """404."""


class Conflict(ApiError):
    """409: another resourceVersion, or the object is already bound."""


class AlreadyExists(Conflict):
    """409 with reason AlreadyExists."""


class Gone(ApiError):
    """410: the resourceVersion or the continue token has expired; list again."""


class Invalid(ApiError):
    """422: the object does not validate."""


class TooManyRequests(ApiError):
    """429: not processed; may be sent again after ``retry_after_s``."""


class ServerError(ApiError):
    """5xx: whether a write happened is unknown."""


UNPROCESSED = (TooManyRequests, CredentialError, RateLimited)
"""The API server has surely not worked on a request that ends with one of these."""


_BY_STATUS: dict[int, type[ApiError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: TooManyRequests,
}


class _Details(msgspec.Struct, rename="camel"):
    retry_after_seconds: float = 0


class Status(msgspec.Struct):
    """The members of a ``v1.Status`` that we read."""

    reason: str | None = None
    message: str | None = None
    code: int | None = None
    details: _Details | None = None


_status_decoder = msgspec.json.Decoder(Status, strict=False)
_MAX_REASON_CHARS = 100
_MAX_MESSAGE_CHARS = 2000


def error_from_response(status: int, body: bytes, retry_after: str | None = None) -> ApiError:
    """The typed error of an answer; any body is accepted, one that is no Status becomes the message (cut)."""
    try:
        parsed = _status_decoder.decode(body)
    except UNDECODABLE:
        parsed = Status(message=body[:_MAX_MESSAGE_CHARS].decode("utf-8", "replace").strip())
    return error_from_status(status, parsed, _retry_after_s(retry_after, parsed))


def error_from_status(status: int, parsed: Status, retry_after_s: float | None = None) -> ApiError:
    """The typed error of a decoded Status, e.g. of a watch's ERROR event."""
    kind = _BY_STATUS.get(status, ServerError if status >= 500 else ApiError)
    reason, message = (parsed.reason or "")[:_MAX_REASON_CHARS], (parsed.message or "")[:_MAX_MESSAGE_CHARS]
    if status == 409 and reason == "AlreadyExists":
        kind = AlreadyExists
    return kind(status, reason, message, retry_after_s)


def _retry_after_s(header: str | None, parsed: Status) -> float | None:
    if header is not None and header.strip().isascii() and header.strip().isdigit():
        return min(float(header.strip()[:9]), 3600.0)
    if parsed.details is not None and parsed.details.retry_after_seconds > 0:
        return min(parsed.details.retry_after_seconds, 3600.0)
    return None
