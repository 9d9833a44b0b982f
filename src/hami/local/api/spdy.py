"""SPDY/3.1 framing as Kubernetes' port-forward needs it: streams, their headers, data, ends. Sans-I/O.

There is no flow control: the Go clients that speak this do not have it either.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hami.protocol.errors import HamiError

MAX_FRAME_BYTES = 1 << 20
MAX_HEADER_BYTES = 64 * 1024
_VERSION = 3
_SYN_STREAM, _SYN_REPLY, _RST_STREAM, _PING, _GOAWAY = 1, 2, 3, 6, 7
_FIN = 1
_CHUNK = 64 * 1024

# The dictionary of the header compression (SPDY/3, section 2.6.10.1): words with their length, then text.
_NAMES = (
    "options|head|post|put|delete|trace|accept|accept-charset|accept-encoding|accept-language|accept-rang"
    "es|age|allow|authorization|cache-control|connection|content-base|content-encoding|content-language|c"
    "ontent-length|content-location|content-md5|content-range|content-type|date|etag|expect|expires|from|"
    "host|if-match|if-modified-since|if-none-match|if-range|if-unmodified-since|last-modified|location|ma"
    "x-forwards|pragma|proxy-authenticate|proxy-authorization|range|referer|retry-after|server|te|trailer"
    "|transfer-encoding|upgrade|user-agent|vary|via|warning|www-authenticate|method|get|status|200 OK|ver"
    "sion|HTTP/1.1|url|public|set-cookie|keep-alive|origin"
)
_TEXT = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 "
    "Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 "
    "Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar "
    "Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, "
    "GMTchunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,"
    "text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)
DICTIONARY = (
    b"".join(struct.pack(">I", len(word)) + word.encode() for word in _NAMES.split("|")) + _TEXT.encode()
)


class SpdyError(HamiError):
    """The peer does not speak SPDY/3.1 as it should; the connection cannot go on."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The peer opened a stream; header names are in lower case."""

    stream: int
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes of a stream; ``last``: the peer sends no more of them."""

    stream: int
    data: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class Reset:
    """The peer gave up a stream."""

    stream: int


Event = Opened | Data | Reset


class SpdyConnection:
    """One side of a connection. ``receive`` gives what the peer did; the others give bytes to send.

    ``answers``: bytes that the protocol itself owes the peer (to pings); take and clear after ``receive``.
    """

    def __init__(self) -> None:
        self.answers = bytearray()
        self._pending = bytearray()
        self._inflate = zlib.decompressobj(zdict=DICTIONARY)
        self._deflate = zlib.compressobj(zdict=DICTIONARY)

    def receive(self, data: bytes) -> Iterator[Event]:
        """What the peer did, in order. Raises SpdyError."""
        self._pending += data
        while len(self._pending) >= 8:
            first, second = struct.unpack_from(">II", self._pending)
            flags, length = second >> 24, second & 0xFFFFFF
            if length > MAX_FRAME_BYTES:
                raise SpdyError(f"a frame of {length} bytes is larger than {MAX_FRAME_BYTES}")
            if len(self._pending) < 8 + length:
                return
            payload = bytes(self._pending[8 : 8 + length])
            del self._pending[: 8 + length]
            if first >> 31:
                yield from self._control(first >> 16 & 0x7FFF, first & 0xFFFF, flags, payload)
            else:
                yield Data(first & 0x7FFFFFFF, payload, bool(flags & _FIN))

    def _control(self, version: int, kind: int, flags: int, payload: bytes) -> Iterator[Event]:
        if version != _VERSION:
            raise SpdyError(f"SPDY version {version} is not {_VERSION}")
        if kind == _SYN_STREAM:
            if len(payload) < 10:
                raise SpdyError("a SYN_STREAM frame is too short")
            stream = struct.unpack_from(">I", payload)[0] & 0x7FFFFFFF
            yield Opened(stream, self._headers(payload[10:]))
            if flags & _FIN:
                yield Data(stream, b"", last=True)
        elif kind == _SYN_REPLY:
            if len(payload) < 4:
                raise SpdyError("a SYN_REPLY frame is too short")
            self._headers(payload[4:])  # keeps the compression in step
            if flags & _FIN:
                yield Data(struct.unpack_from(">I", payload)[0] & 0x7FFFFFFF, b"", last=True)
        elif kind == _RST_STREAM:
            if len(payload) != 8:
                raise SpdyError("a RST_STREAM frame has the wrong size")
            yield Reset(struct.unpack_from(">I", payload)[0] & 0x7FFFFFFF)
        elif kind == _PING:
            self.answers += _control_frame(_PING, 0, payload)

    def _headers(self, block: bytes) -> dict[str, str]:
        try:
            text = self._inflate.decompress(block, MAX_HEADER_BYTES + 1)
        except zlib.error as error:
            raise SpdyError(f"a header block cannot be decompressed: {error}") from error
        if len(text) > MAX_HEADER_BYTES or self._inflate.unconsumed_tail:
            raise SpdyError(f"a header block is larger than {MAX_HEADER_BYTES} bytes")
        headers: dict[str, str] = {}
        try:
            (count,) = struct.unpack_from(">I", text)
            position = 4
            for _ in range(count):
                pair: list[str] = []
                for _ in range(2):
                    (size,) = struct.unpack_from(">I", text, position)
                    position += 4
                    if position + size > len(text):
                        raise SpdyError("a header block ends too early")
                    pair.append(text[position : position + size].decode())
                    position += size
                headers[pair[0].lower()] = pair[1]
        except (struct.error, UnicodeDecodeError) as error:
            raise SpdyError(f"a header block is malformed: {error}") from error
        return headers

    def open(self, stream: int, headers: Mapping[str, str]) -> bytes:
        """Open a stream: odd numbers are the client's."""
        payload = struct.pack(">IIH", stream, 0, 0) + self._block(headers)
        return _control_frame(_SYN_STREAM, 0, payload)

    def reply(self, stream: int) -> bytes:
        """Accept a stream that the peer opened."""
        return _control_frame(_SYN_REPLY, 0, struct.pack(">I", stream) + self._block({}))

    @staticmethod
    def data(stream: int, data: bytes, *, last: bool = False) -> bytes:
        """Bytes for a stream; ``last`` ends our side of it."""
        frames = bytearray()
        chunks = [data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK)] or [b""]
        for index, chunk in enumerate(chunks):
            flags = _FIN if last and index == len(chunks) - 1 else 0
            frames += struct.pack(">II", stream, flags << 24 | len(chunk)) + chunk
        return bytes(frames)

    @staticmethod
    def reset(stream: int) -> bytes:
        """Give up a stream."""
        return _control_frame(_RST_STREAM, 0, struct.pack(">II", stream, 5))

    @staticmethod
    def goodbye() -> bytes:
        return _control_frame(_GOAWAY, 0, struct.pack(">II", 0, 0))

    def _block(self, headers: Mapping[str, str]) -> bytes:
        text = struct.pack(">I", len(headers))
        for name, value in headers.items():
            for part in (name.lower().encode(), value.encode()):
                text += struct.pack(">I", len(part)) + part
        return self._deflate.compress(text) + self._deflate.flush(zlib.Z_SYNC_FLUSH)


def _control_frame(kind: int, flags: int, payload: bytes) -> bytes:
    return struct.pack(">HHI", 1 << 15 | _VERSION, kind, flags << 24 | len(payload)) + payload
