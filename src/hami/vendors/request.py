"""What a container asks of a vendor: webhook mutation, and the request the scheduler sees (README R2, R3,
R14).

Both read canonical quantities, so what admission accepted is what the filter accounts for.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from hami.protocol import quantity
from hami.protocol.errors import QuantityError
from hami.vendors.types import (
    INT32_MAX,
    AdmissionRejected,
    ContainerRequest,
    InventoryView,
    PodInfo,
    PodShape,
    RawRequest,
    SlotKind,
    VendorProfile,
)

_EMPTY: Final[Mapping[str, Any]] = MappingProxyType({})
_MAPPINGS: Final = (dict, Mapping)  # plain ones are recognised fast


def mutate_admission(
    p: VendorProfile, container: dict[str, Any], pod: dict[str, Any], inventory: InventoryView
) -> bool:
    """Whether the container uses this vendor; sets its defaults.

    Called once per container, init containers first. May change only the container's resources and env, the
    pod's annotations and `spec.runtimeClassName`; a second call changes nothing more. Raises
    `AdmissionRejected`.
    """
    if p.hooks.admit is not None:
        uses = p.hooks.admit(container, pod, p, inventory)
    else:
        uses = bool(p.names.count) and limit_of(container, p.names.count) is not None
    if uses:
        container_request(p, container, pod)  # what the filter would refuse is denied here
    return uses


def container_request(
    p: VendorProfile, container: Mapping[str, Any], pod: Mapping[str, Any]
) -> ContainerRequest | None:
    """The container's request, or None when it names none of this vendor.

    Raises `AdmissionRejected` for a request that is present but invalid: at admission it denies the pod, at
    filter time it fails every node.
    """
    raw = read_resources(p, container)
    if raw is None:
        return None
    if p.hooks.parse is not None:
        return p.hooks.parse(raw, annotations_of(pod), p)
    return parse_standard(p, raw)


def parse_standard(p: VendorProfile, raw: RawRequest) -> ContainerRequest | None:
    """The request of a vendor without special rules: count, memory per card, cores."""
    names = p.names
    if raw.count is None:
        return None
    nums = count_of(names.count, raw.count, raw.container)
    memory = 0
    if raw.memory is not None:
        memory = memory_of(names.memory, raw.memory, names.memory_factor, raw.container)
    cores = p.rules.default_cores
    if raw.cores is not None:
        cores = cores_of(names.cores, raw.cores, raw.container)
    percent = 0 if memory else p.rules.omitted_percent
    return ContainerRequest(nums, p.common_word, memory, percent, cores)


def read_resources(p: VendorProfile, container: Mapping[str, Any]) -> RawRequest | None:
    """The quantities the container names of this vendor, or None when there is none at all."""
    resources = _mapping(container, "resources")
    limits = _mapping(resources, "limits")
    requests = _mapping(resources, "requests") if p.rules.lookup == "limits_then_requests" else _EMPTY
    if not limits and not requests:
        return None
    names = p.names

    def read(name: str) -> Any:
        if not name:
            return None
        found = limits.get(name)
        return requests.get(name) if found is None else found

    count, memory, cores = read(names.count), read(names.memory), read(names.cores)
    extra = {word: found for word, name in names.extra.items() if (found := read(name)) is not None}
    if count is None and memory is None and cores is None and not extra:
        return None
    return RawRequest(count, memory, cores, extra, str(container.get("name", "")))


# --- quantities -----------------------------------------------------------------------------------------


def integer(text: Any) -> int | None:
    """The plain integer a quantity stands for once the API server has written it, or None."""
    if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 19:
        return int(text)
    try:
        number, ok = quantity.as_int64(quantity.canonical(text))
    except QuantityError:
        return None
    return number if ok else None


def count_of(name: str, text: Any, container: str) -> int:
    """A device count, 1..int32. Raises `AdmissionRejected`."""
    number = integer(text)
    if number is None or not 0 < number <= INT32_MAX:
        raise invalid(name, text, container, f"must be an integer between 1 and {INT32_MAX}")
    return number


def memory_of(name: str, text: Any, factor: int, container: str) -> int:
    """A memory request in MiB (the user's value times `factor`), 0..int32. Raises `AdmissionRejected`."""
    number = integer(text)
    top = INT32_MAX // factor
    if number is None or not 0 <= number <= top:
        unit = "MiB" if factor == 1 else f"{factor} MiB"
        rule = f"the unit is {unit}, must be an integer between 0 and {top}{_hint(text, factor)}"
        raise invalid(name, text, container, rule)
    return number * factor


def cores_of(name: str, text: Any, container: str) -> int:
    """A core request, 0..int32. Raises `AdmissionRejected`."""
    number = integer(text)
    if number is None or not 0 <= number <= INT32_MAX:
        raise invalid(name, text, container, "must be an integer between 0 and 100, percent of one card")
    return number


def invalid(name: str, text: Any, container: object, rule: str) -> AdmissionRejected:
    """The denial of a quantity: what, where, and what would be accepted."""
    return AdmissionRejected(f"invalid {name} value {str(text)[:40]} in container {container}: {rule}")


def _hint(text: Any, factor: int) -> str:
    try:
        wanted = quantity.value(text)
    except QuantityError:
        return ""
    mib = wanted // (1 << 20) // factor
    return f" (for {text} of memory write {mib})" if 0 < mib <= INT32_MAX // factor else ""


# --- pods, whatever they may hold: the API server has not validated a pod when its webhooks see it --------


def annotations_of(pod: Mapping[str, Any]) -> Mapping[str, str]:
    """The pod's annotations that are text. Takes a constant time: it is asked once per container."""
    found = _mapping(_mapping(pod, "metadata"), "annotations")
    return _Texts(found) if found else _EMPTY


class _Texts(Mapping[str, str]):
    """A view of those members of an object that are text."""

    __slots__ = ("_members",)

    def __init__(self, members: Mapping[str, Any]) -> None:
        self._members = members

    def __getitem__(self, key: str) -> str:
        text = self._members[key]
        if not isinstance(text, str):
            raise KeyError(key)
        return text

    def __iter__(self) -> Iterator[str]:
        return (key for key, text in self._members.items() if isinstance(text, str))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def containers_of(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The pod's containers in slot order: init containers, then regular ones."""
    spec = _mapping(pod, "spec")
    return [*_objects(spec, "initContainers"), *_objects(spec, "containers")]


def shape_of(pod: Mapping[str, Any]) -> PodShape:
    """The pod's container slots."""
    spec = _mapping(pod, "spec")
    inits, apps = _objects(spec, "initContainers"), _objects(spec, "containers")
    kinds = [SlotKind.SIDECAR if c.get("restartPolicy") == "Always" else SlotKind.INIT for c in inits]
    kinds.extend(SlotKind.APP for _ in apps)
    return PodShape(tuple(kinds), tuple(str(c.get("name", "")) for c in (*inits, *apps)))


def pod_info(pod: Mapping[str, Any]) -> PodInfo:
    """What fit, vector needs and annotations may know of the pod."""
    metadata = _mapping(pod, "metadata")
    return PodInfo(
        str(metadata.get("uid", "")),
        str(metadata.get("namespace", "")),
        str(metadata.get("name", "")),
        dict(annotations_of(pod)),
        shape_of(pod),
    )


def _mapping(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = parent.get(key)
    return found if isinstance(found, _MAPPINGS) else _EMPTY


def _objects(parent: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    found = parent.get(key)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


# --- helpers of admission hooks ---------------------------------------------------------------------------


def limit_of(container: Mapping[str, Any], name: str) -> Any:
    """The container's limit of a resource, or None."""
    return _mapping(_mapping(container, "resources"), "limits").get(name) if name else None


def resource_of(container: Mapping[str, Any], name: str) -> Any:
    """The container's limit of a resource, else its request, or None."""
    found = limit_of(container, name)
    if found is not None or not name:
        return found
    return _mapping(_mapping(container, "resources"), "requests").get(name)


def set_limit(container: dict[str, Any], name: str, value: int) -> None:
    """Write a limit, creating the maps on the way."""
    resources = child(container, "resources")
    child(resources, "limits")[name] = str(value)


def child(parent: dict[str, Any], key: str) -> dict[str, Any]:
    """The object under `key`, created when there is none."""
    found = parent.get(key)
    if not isinstance(found, dict):
        found = parent[key] = {}
    return found


def append_env(container: dict[str, Any], name: str, value: str, *, wins: Callable[[Any], bool]) -> None:
    """Append an environment variable unless the last entry of that name satisfies `wins`."""
    last = next((entry for entry in reversed(_objects(container, "env")) if entry.get("name") == name), None)
    if last is None or not wins(last):
        env = container.get("env")
        container["env"] = [*(env if isinstance(env, list) else ()), {"name": name, "value": value}]


def any_value(_entry: Any) -> bool:
    """For `append_env`: a value the user has set is never overridden."""
    return True
