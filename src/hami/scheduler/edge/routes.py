"""The routes of the scheduler's listeners and what each does with its bytes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from hami.protocol.admission import AdmissionAnswer, decode_review, encode_review
from hami.protocol.errors import ObjectError
from hami.protocol.extender import ExtenderFilterResult, encode_binding_result, encode_filter_result
from hami.scheduler.edge.extender import Extender
from hami.scheduler.edge.metrics import Metrics
from hami.scheduler.edge.server import Application, Post, Stream, empty
from hami.scheduler.edge.webhook import Webhook

MAX_REVIEW_BYTES = 8 << 20
"""Longest admission review: the API server takes objects of 3 MiB at most."""

log = logging.getLogger(__name__)


def scheduler_routes(
    extender: Extender,
    webhook: Webhook,
    gets: Mapping[str, Stream],
    max_body_bytes: int,
    *,
    remote_extender: bool = False,
) -> Application:
    """`/filter`, `/bind`, `/simulate`, `/webhook`, `/healthz`, `/readyz` and the further ``gets``.

    `/filter` and `/bind` reserve devices and bind pods for whoever asks, and kube-scheduler runs beside us:
    unless ``remote_extender`` is set, other hosts get dry runs only.
    """

    def filter_error(text: str) -> bytes:
        return encode_filter_result(ExtenderFilterResult(error=text))

    simulate = _verb(extender.simulate, filter_error)
    shared = {"/simulate": simulate, "/webhook": _review(webhook, max_body_bytes)}
    return Application(
        {
            "/filter": _verb(extender.filter, filter_error),
            "/bind": _verb(extender.bind, encode_binding_result),
            **shared,
        },
        {"/healthz": empty, "/readyz": empty, **gets},
        max_body_bytes,
        None if remote_extender else {"/filter": simulate, **shared},
    )


def metrics_routes(metrics: Metrics) -> Application:
    """`/metrics`."""
    return Application({}, {"/metrics": metrics.chunks}, 0)


def _verb(handle: Callable[[bytes], Awaitable[bytes]], error_body: Callable[[str], bytes]) -> Post:
    """An extender verb: kube-scheduler reads only bodies of status 200, so even a bug of ours becomes an
    `Error`."""

    async def post(body: bytes) -> tuple[int, bytes]:
        try:
            return 200, await handle(body)
        except Exception as error:
            log.exception("extender.failed")
            return 200, error_body(f"internal error: {type(error).__name__}")

    return post


def _review(webhook: Webhook, max_body_bytes: int) -> Post:
    """The webhook: a bug of ours denies the pod with an answer, whatever the failure policy says."""

    async def post(body: bytes) -> tuple[int, bytes]:
        try:
            request = decode_review(body, min(max_body_bytes, MAX_REVIEW_BYTES))
        except ObjectError as error:
            return 400, encode_binding_result(str(error))
        try:
            answer = webhook.review(request)
        except Exception as error:
            log.exception("webhook.failed", extra={"uid": request.uid})
            answer = AdmissionAnswer(False, f"internal error: {type(error).__name__}", 500)
        return 200, encode_review(request.uid, answer, request.api_version)

    return post
