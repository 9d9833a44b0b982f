"""Connections of our HTTP servers that cost little, whoever opens them."""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_TIMEOUT_S = 15.0
MAX_HEAD_BYTES: Final = 64 << 10
_CHUNK_OVERHEAD: Final = 8  # bytes of the chunked encoding per byte of the body, at worst
_CHUNKED_BODY_BYTES: Final = 1 << 20
_HEAD_TOO_LONG: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections whose request head does not arrive within ``HEADER_TIMEOUT_S`` or is longer than
    ``MAX_HEAD_BYTES``: the parser itself would keep any amount of headers and trailers. Beyond
    ``max_connections`` those of other hosts that ask nothing go: each costs a descriptor.
    """

    max_connections = 512
    _quiet_since = 0.0
    _head_timer: asyncio.TimerHandle | None = None
    _chunk_bytes = 0  # of the data that is being parsed
    _other_bytes = 0  # of this message, without its body
    _body_bytes = 0
    _header_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_head_timer()
        if len(self.connections) > self.max_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        self._chunk_bytes = len(data)
        self._other_bytes += len(data)
        super().data_received(data)
        chunked = _CHUNK_OVERHEAD * min(self._body_bytes, _CHUNKED_BODY_BYTES)
        if self._header_bytes > MAX_HEAD_BYTES or self._other_bytes > MAX_HEAD_BYTES + chunked:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._other_bytes = self._chunk_bytes if self._chunk_bytes <= MAX_HEAD_BYTES else 0
        self._body_bytes = self._header_bytes = 0
        self._start_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes <= MAX_HEAD_BYTES:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._other_bytes = max(0, self._other_bytes - len(body))
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def _make_room(self) -> None:
        """Close a connection of another host that asks nothing in favour of this one, else this one: those
        that never asked anything go first, and of them the oldest.
        """
        silent = [one for one in self.connections if isinstance(one, BoundedProtocol) and one.is_silent]
        others = [one for one in silent if one is not self and not is_loopback(one.client)]
        victim = min(others, key=lambda one: (one.cycle is not None, one._quiet_since), default=None)
        if victim is not None:
            victim.transport.abort()
        elif not is_loopback(self.client):
            self.transport.abort()

    @property
    def is_silent(self) -> bool:
        """Whether no request has come whole that is not answered yet."""
        return self.cycle is None or self.cycle.response_complete

    def _refuse_head(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_HEAD_TOO_LONG)
            self.transport.close()
        else:
            self.transport.abort()

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._quiet_since = self.loop.time()
        self._head_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self.transport is not None:
            self.transport.close()


def is_loopback(client: tuple[str, int] | None) -> bool:
    """Whether a peer is on this machine; ``None``: it is not known."""
    if client is None:
        return False
    try:
        address = ipaddress.ip_address(client[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
