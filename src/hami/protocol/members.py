"""Members of plain objects whose members may be anything: nobody has validated them yet."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

NO_MEMBERS: Final[Mapping[str, Any]] = MappingProxyType({})
_MAPPINGS: Final = (dict, Mapping)  # plain ones are recognised fast


def map_of(obj: Mapping[str, Any], member: str) -> Mapping[str, Any]:
    """A member that is a map; an empty one for anything else."""
    found = obj.get(member)
    return found if isinstance(found, _MAPPINGS) else NO_MEMBERS


def objects_of(obj: Mapping[str, Any], member: str) -> list[dict[str, Any]]:
    """The objects of a member that is a list."""
    found = obj.get(member)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
