"""Bodies of requests become plain JSON values, or an exact refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hami.local.api.documents import decode_json, decode_yaml
from hami.local.api.errors import ApiError
from hami.protocol.plain import MAX_DEPTH

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(values)
def test_json_and_yaml_mean_the_same(value: Any) -> None:
    assert decode_json(json.dumps(value).encode()) == value
    assert decode_yaml(json.dumps(value).encode()) == value
    assert decode_yaml(yaml.safe_dump(value).encode()) == value


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


def test_the_depth_is_bounded() -> None:
    decode_json(nested(MAX_DEPTH))
    for decode in (decode_json, decode_yaml):
        for depth in (MAX_DEPTH + 1, 500, 5000):
            with pytest.raises(ApiError) as refused:
                decode(nested(depth))
            assert refused.value.code == 400


def test_aliases_cannot_multiply_without_end() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(ApiError, match="more than"):
        decode_yaml("\n".join(lines).encode())


def test_an_alias_to_itself_is_refused() -> None:
    with pytest.raises(ApiError) as refused:
        decode_yaml(b"a: &a [*a]")
    assert refused.value.code == 400


@pytest.mark.parametrize(
    "text",
    [b"a: .nan", b"a: .inf", b"1: a", b"a: 2026-01-01", b"a: !!binary aGk=", b"a: !!set {x}", b"a: [",
     b"\xff", b'a: "\\ud800"', b'"\\ud800": 1', b'{"\\ud800": 1, x: 2}',
     b"a: !!python/object:os.system x", b'{"a": 1', b"a: 1\n---\nb: 2"],
)  # fmt: skip
def test_what_json_does_not_have_is_refused(text: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        decode_yaml(text)
    assert refused.value.code == 400


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"NaN", b'{"a": 1}{', b"'a'"])
def test_what_is_not_json_is_refused(text: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        decode_json(text)
    assert refused.value.code == 400


@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_or_a_refusal(data: bytes) -> None:
    for decode in (decode_json, decode_yaml):
        try:
            decode(data)
        except ApiError as error:
            assert error.code == 400  # noqa: PT017
