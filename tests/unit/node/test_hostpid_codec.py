"""Bytes of the host PID protocol (host-pid-broker.md §4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.node.hostpid.codec import (
    INVALID,
    MAX_PID,
    REQUEST,
    BrokerProtocolError,
    decode_answer,
    encode_answer,
)
from hami.node.hostpid.gate import gate_is_on
from hami.protocol.keys import ENV_HOSTPID_BROKER

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[2] / "vectors/hostpid.json").read_text("utf-8")
)


def test_the_bytes_of_the_specification() -> None:
    assert bytes.fromhex("48504944 0001 0001") == REQUEST
    assert encode_answer(43210) == bytes.fromhex("48504944 0001 0000 0000A8CA")
    assert bytes.fromhex("48504944 0001 0001 00000000") == INVALID
    assert VECTORS["client_request"] == REQUEST.hex()


@pytest.mark.parametrize("vector", VECTORS["answers"], ids=lambda vector: vector["name"])
def test_p22_only_a_successful_answer_gives_a_pid(vector: dict[str, Any]) -> None:
    answer = bytes.fromhex(vector["bytes"])
    if isinstance(vector["result"], int):
        assert decode_answer(answer) == vector["result"]
        assert encode_answer(vector["result"]) == answer
    else:
        with pytest.raises(BrokerProtocolError):
            decode_answer(answer)


@given(st.integers(1, MAX_PID))
def test_an_answer_carries_its_pid(pid: int) -> None:
    assert decode_answer(encode_answer(pid)) == pid


@given(st.integers().filter(lambda pid: not 1 <= pid <= MAX_PID))
def test_what_is_no_pid_is_never_answered(pid: int) -> None:
    with pytest.raises(BrokerProtocolError):
        encode_answer(pid)


@given(st.binary(max_size=24))
def test_arbitrary_bytes_are_an_answer_only_if_they_are_the_answer_to_their_pid(data: bytes) -> None:
    try:
        pid = decode_answer(data)
    except BrokerProtocolError:
        return
    assert encode_answer(pid) == data


@pytest.mark.parametrize("value", ["", "0", "true", "TRUE", "yes", "01", "1 ", " 1", "1\n", "١", None])
def test_s1_only_the_string_1_turns_the_broker_on(value: str | None) -> None:
    assert not gate_is_on({} if value is None else {ENV_HOSTPID_BROKER: value})
    assert gate_is_on({ENV_HOSTPID_BROKER: "1"})
