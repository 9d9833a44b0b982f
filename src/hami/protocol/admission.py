"""AdmissionReview bodies (admission.k8s.io/v1): the request as we read it and the answer as we write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class AdmissionRequest(msgspec.Struct, frozen=True):
    """One admission request; ``object`` is the plain decoded object (patches are computed on it)."""

    uid: str
    operation: str
    namespace: str
    name: str
    object: dict[str, Any]
    dry_run: bool = False


class AdmissionAnswer(msgspec.Struct, frozen=True):
    """An answer: allowed with an optional JSON patch and warnings, or denied with a code and a message."""

    allowed: bool
    message: str = ""
    code: int = 0
    patch: Sequence[Mapping[str, Any]] = ()
    warnings: Sequence[str] = ()


def decode_review(body: bytes) -> AdmissionRequest:
    """The request of a review. Raises :class:`ObjectError`."""
    ...


def encode_review(uid: str, answer: AdmissionAnswer) -> bytes:
    """Body of the answer to the request with ``uid``."""
    ...
