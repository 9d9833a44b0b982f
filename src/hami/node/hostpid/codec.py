"""Protocol version 1 of the host PID broker (WIRE, host-pid-broker.md §4). Pure.

A request has 8 bytes and an answer 12, integers unsigned in network byte order.
"""

from __future__ import annotations

import struct
from typing import Final

from hami.protocol.errors import ProtocolError

MAGIC: Final = b"HPID"
VERSION: Final = 1
GET_CALLERS_HOST_PID: Final = 1
SUCCESS: Final = 0
INVALID_REQUEST: Final = 1
MAX_PID: Final = 2**31 - 1
REQUEST_BYTES: Final = 8
ANSWER_BYTES: Final = 12

_ANSWER: Final = struct.Struct("!4sHHI")
REQUEST: Final = struct.pack("!4sHH", MAGIC, VERSION, GET_CALLERS_HOST_PID)
"""The only valid request."""
INVALID: Final = _ANSWER.pack(MAGIC, VERSION, INVALID_REQUEST, 0)
"""The answer to everything else of 8 bytes, whatever version it names."""


class BrokerProtocolError(ProtocolError):
    """Bytes that are no successful answer of a broker."""


def encode_answer(pid: int) -> bytes:
    """The successful answer for ``pid``, 1 to :data:`MAX_PID`; raises :class:`BrokerProtocolError`."""
    if not 1 <= pid <= MAX_PID:
        raise BrokerProtocolError(f"PID {pid} is not between 1 and {MAX_PID}")
    return _ANSWER.pack(MAGIC, VERSION, SUCCESS, pid)


def decode_answer(answer: bytes) -> int:
    """The PID of a full, well-formed and successful answer; raises :class:`BrokerProtocolError` for any other
    bytes.
    """
    if len(answer) != ANSWER_BYTES:
        raise BrokerProtocolError(f"an answer has {ANSWER_BYTES} bytes, not {len(answer)}")
    magic, version, status, pid = _ANSWER.unpack(answer)
    if magic != MAGIC:
        raise BrokerProtocolError(f"magic {magic.hex()} instead of {MAGIC.hex()}")
    if version != VERSION:
        raise BrokerProtocolError(f"version {version} instead of {VERSION}")
    if status != SUCCESS:
        raise BrokerProtocolError(f"status {status}")
    if not 1 <= pid <= MAX_PID:
        raise BrokerProtocolError(f"PID {pid} is not between 1 and {MAX_PID}")
    return int(pid)
