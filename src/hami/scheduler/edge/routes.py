"""The routes of the scheduler's listeners and what each does with its bytes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from hami.kube.bugs import BugLog
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
    bugs: BugLog | None = None,
) -> Application:
    """`/filter`, `/bind`, `/simulate`, `/webhook`, `/healthz`, `/readyz` and the further ``gets``.

    `/filter` and `/bind` reserve devices and bind pods for whoever asks, and kube-scheduler runs beside us:
    unless ``remote_extender`` is set, other hosts get dry runs only.
    """
    bugs = bugs or BugLog(log)

    def filter_error(text: str) -> bytes:
        return encode_filter_result(ExtenderFilterResult(error=text))

    simulate = verb("/simulate", extender.simulate, filter_error, bugs)
    shared = {"/simulate": simulate, "/webhook": review("/webhook", webhook, max_body_bytes, bugs)}
    return Application(
        {
            "/filter": verb("/filter", extender.filter, filter_error, bugs),
            "/bind": verb("/bind", extender.bind, encode_binding_result, bugs),
            **shared,
        },
        {"/healthz": empty, "/readyz": empty, **gets},
        max_body_bytes,
        None if remote_extender else {"/filter": simulate, **shared},
        bugs,
    )


def metrics_routes(metrics: Metrics, bugs: BugLog | None = None) -> Application:
    """`/metrics`."""
    return Application({}, {"/metrics": metrics.chunks}, 0, bugs=bugs)


def verb(
    route: str,
    handle: Callable[[bytes], Awaitable[bytes]],
    error_body: Callable[[str], bytes],
    bugs: BugLog,
) -> Post:
    """An extender verb: kube-scheduler reads only bodies of status 200, so even a bug of ours becomes an
    `Error`."""

    async def post(body: bytes) -> tuple[int, bytes]:
        try:
            return 200, await handle(body)
        except Exception as error:
            bugs.note("extender.failed", error, route=route, pod=_pod_in(body))
            return 200, error_body(f"internal error: {type(error).__name__}")

    return post


def review(route: str, webhook: Webhook, max_body_bytes: int, bugs: BugLog) -> Post:
    """The webhook: a bug of ours denies the pod with an answer, whatever the failure policy says."""

    async def post(body: bytes) -> tuple[int, bytes]:
        try:
            request = decode_review(body, min(max_body_bytes, MAX_REVIEW_BYTES))
        except ObjectError as error:
            return 400, encode_binding_result(str(error))
        try:
            answer = webhook.review(request)
        except Exception as error:
            pod = f"{request.namespace}/{_name_of(request.object)}"
            bugs.note("webhook.failed", error, route=route, pod=pod, uid=request.uid)
            answer = AdmissionAnswer(False, f"internal error: {type(error).__name__}", 500)
        return 200, encode_review(request.uid, answer, request.api_version)

    return post


def _name_of(pod: object) -> str:
    metadata = pod.get("metadata") if isinstance(pod, dict) else None
    if not isinstance(metadata, dict):
        return ""
    return str(metadata.get("name") or metadata.get("generateName") or "")


def _pod_in(body: bytes) -> str:
    """Namespace and name of the pod that an extender request is about, as far as that can be told."""
    try:
        members = {key.lower(): value for key, value in msgspec.json.decode(body).items()}
        if "podname" in members:
            return f"{members.get('podnamespace')}/{members['podname']}"
        metadata = members["pod"]["metadata"]
        return f"{metadata.get('namespace')}/{metadata.get('name')}"
    except Exception:
        return ""
