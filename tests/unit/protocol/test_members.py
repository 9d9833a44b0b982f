"""Members of objects that nobody has validated."""

from types import MappingProxyType
from typing import Any

import pytest

from hami.protocol.members import map_of, objects_of


@pytest.mark.parametrize("found", [None, "text", 1, ["a"], True])
def test_a_member_of_another_kind_is_an_empty_map(found: Any) -> None:
    assert dict(map_of({"spec": found}, "spec")) == {}
    assert dict(map_of({}, "spec")) == {}


@pytest.mark.parametrize("found", [{"a": 1}, MappingProxyType({"a": 1})])
def test_a_map_is_given_as_it_is(found: Any) -> None:
    assert map_of({"spec": found}, "spec") is found


@pytest.mark.parametrize(
    ("found", "objects"),
    [(None, []), ("text", []), ({"a": {}}, []), ([{"a": 1}, None, "x", [], {"b": 2}], [{"a": 1}, {"b": 2}])],
)
def test_only_the_objects_of_a_list_are_given(found: Any, objects: list[Any]) -> None:
    assert objects_of({"containers": found}, "containers") == objects
