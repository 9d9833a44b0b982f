"""AdmissionReview bodies (admission.k8s.io/v1 and v1beta1): the request as we read it and the answer as we
write it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from hami.protocol.errors import ObjectError
from hami.protocol.views import MAX_OBJECT_BYTES, decode


class AdmissionRequest(msgspec.Struct, frozen=True, rename="camel"):
    """One admission request; ``object`` is the plain decoded object, on which patches are computed."""

    uid: str = ""
    operation: str = ""
    namespace: str = ""
    name: str = ""
    object: dict[str, Any] | None = None
    dry_run: bool | None = None
    api_version: str = "admission.k8s.io/v1"  # of the review: the answer is given in the same


class AdmissionAnswer(msgspec.Struct, frozen=True):
    """An answer: allowed with an optional JSON patch and warnings, or denied with a code and a message."""

    allowed: bool
    message: str = ""
    code: int = 0
    patch: Sequence[Mapping[str, Any]] = ()
    warnings: Sequence[str] = ()


class AdmissionReview(msgspec.Struct, frozen=True, rename="camel"):
    api_version: Literal["admission.k8s.io/v1", "admission.k8s.io/v1beta1"] = "admission.k8s.io/v1"
    request: AdmissionRequest | None = None


def decode_review(body: bytes, max_bytes: int = MAX_OBJECT_BYTES) -> AdmissionRequest:
    """The request of a review. Raises :class:`ObjectError`, also when the review holds no request."""
    review = decode(body, AdmissionReview, max_bytes)
    if review.request is None:
        raise ObjectError("admission review without a request")
    return msgspec.structs.replace(review.request, api_version=review.api_version)


def encode_review(uid: str, answer: AdmissionAnswer, api_version: str = "admission.k8s.io/v1") -> bytes:
    """Body of the answer to the request with ``uid``, in the version of its review."""
    response: dict[str, Any] = {"uid": uid, "allowed": answer.allowed}
    if answer.message or answer.code:
        response["status"] = {"code": answer.code or 200, "message": answer.message}
    if answer.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(msgspec.json.encode(answer.patch)).decode()
    if answer.warnings:
        response["warnings"] = list(answer.warnings)
    return msgspec.json.encode({"apiVersion": api_version, "kind": "AdmissionReview", "response": response})
