"""JSON answers and the ``Status`` of success."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from hami.local.objects import Object


def json_response(body: Any, code: int = HTTPStatus.OK) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=code, content_type="application/json")


def success(details: Object | None) -> Object:
    """A ``Status`` that says Success."""
    body: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    if details:
        body["details"] = details
    return body
