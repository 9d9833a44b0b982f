"""All objects of one kind, as the API server writes them."""

from __future__ import annotations

from typing import Any

import msgspec

from hami.answers.errors import AnswerError
from hami.kube.client import Client
from hami.kube.operations import Selection, list_pages
from hami.kube.resources import Resource


async def list_plain(
    client: Client, resource: Resource, selection: Selection | None = None
) -> list[dict[str, Any]]:
    """Mappings with a mapping ``metadata``; raises :class:`AnswerError` where the server lists anything else,
    and the client's errors."""
    found = [
        msgspec.json.decode(item)
        async for page in list_pages(client, resource, selection)
        for item in page.items
    ]
    if not all(isinstance(one, dict) and isinstance(one.get("metadata"), dict) for one in found):
        raise AnswerError(f"the API server's list of {resource.plural} holds something else")
    return found
