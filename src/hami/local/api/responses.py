"""JSON answers and the ``Status`` of success."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from hami.local.api.objects import Object


def json_response(body: Any, code: int = HTTPStatus.OK, warnings: Sequence[str] = ()) -> web.Response:
    """``warnings`` become headers, as kubectl shows them."""
    response = web.Response(body=msgspec.json.encode(body), status=code, content_type="application/json")
    for warning in warnings[:20]:
        text = " ".join(warning.split())[:1024].replace("\\", "\\\\").replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{text}"')
    return response


def success(details: Object | None) -> Object:
    """A ``Status`` that says Success."""
    body: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    if details:
        body["details"] = details
    return body
