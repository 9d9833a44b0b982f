"""SPDY framing: streams, headers and data survive; a peer that does not keep to it is refused."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.local.api.spdy import (
    DICTIONARY,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    Data,
    Opened,
    Reset,
    SpdyConnection,
    SpdyError,
)

names = st.text(st.characters(codec="utf-8", categories=["Ll", "Nd"]), min_size=1, max_size=12)
headers = st.dictionaries(names, st.text(max_size=30), max_size=6)


def test_the_header_dictionary_is_that_of_spdy_3() -> None:
    assert len(DICTIONARY) == 1423
    assert zlib.adler32(DICTIONARY) == 0xE3C6A7C2


@given(first=headers, second=headers, data=st.binary(max_size=200_000), cut=st.integers(1, 100_000))
def test_streams_arrive_as_they_were_sent_however_the_bytes_are_cut(
    first: dict[str, str], second: dict[str, str], data: bytes, cut: int
) -> None:
    client, server = SpdyConnection(), SpdyConnection()
    wire = client.open(1, first) + client.open(3, second) + client.data(1, data, last=True) + client.reset(3)
    events = [
        event for start in range(0, len(wire), cut) for event in server.receive(wire[start : start + cut])
    ]
    opened = [event for event in events if isinstance(event, Opened)]
    lower = [{name.lower(): value for name, value in pairs.items()} for pairs in (first, second)]
    assert [(event.stream, dict(event.headers)) for event in opened] == [(1, lower[0]), (3, lower[1])]
    chunks = [event for event in events if isinstance(event, Data)]
    assert b"".join(event.data for event in chunks) == data
    assert [event.last for event in chunks] == [False] * (len(chunks) - 1) + [True]
    assert events[-1] == Reset(3)


def test_replies_keep_the_compression_in_step() -> None:
    client, server = SpdyConnection(), SpdyConnection()
    for stream in (1, 3, 5):
        events = list(server.receive(client.open(stream, {"port": "80"})))
        assert events == [Opened(stream, {"port": "80"})]
        assert list(client.receive(server.reply(stream))) == []


def test_a_ping_is_owed_an_answer() -> None:
    server = SpdyConnection()
    ping = struct.pack(">HHII", 0x8003, 6, 4, 7)
    assert list(server.receive(ping)) == []
    assert bytes(server.answers) == ping


def control(kind: int, payload: bytes, version: int = 3) -> bytes:
    return struct.pack(">HHI", 0x8000 | version, kind, len(payload)) + payload


def block(text: bytes) -> bytes:
    packer = zlib.compressobj(zdict=DICTIONARY)
    return packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH)


@pytest.mark.parametrize(
    "wire",
    [
        control(1, b"\0" * 10, version=2),
        control(1, b"\0" * 9),
        control(1, b"\0" * 10 + b"not zlib"),
        control(1, b"\0" * 10 + block(struct.pack(">II", 1, 99) + b"short")),
        control(1, b"\0" * 10 + block(struct.pack(">I", 1 << 31))),
        control(1, b"\0" * 10 + block(b"\0" * (MAX_HEADER_BYTES + 1))),
        control(1, b"\0" * 10 + block(struct.pack(">II", 1, 1) + b"\xff" + struct.pack(">I", 0))),
        control(2, b"\0"),
        control(3, b"\0"),
        struct.pack(">II", 1, MAX_FRAME_BYTES + 1),
    ],
)
def test_a_peer_that_does_not_keep_to_it_is_refused(wire: bytes) -> None:
    with pytest.raises(SpdyError):
        list(SpdyConnection().receive(wire))


@given(st.binary(max_size=400))
def test_any_bytes_give_events_or_a_refusal(wire: bytes) -> None:
    connection = SpdyConnection()
    try:
        for event in connection.receive(wire):
            assert isinstance(event, Opened | Data | Reset)
    except SpdyError as error:
        assert str(error)  # noqa: PT017
