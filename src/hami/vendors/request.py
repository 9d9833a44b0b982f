"""What a container asks of a vendor: webhook mutation, and the request the scheduler sees (README R2, R3,
R14).

Both read canonical quantities, so what admission accepted is what the filter accounts for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from hami.protocol import quantity
from hami.protocol.errors import QuantityError
from hami.protocol.members import NO_MEMBERS, map_of, objects_of
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

PERCENT: Final = "must be an integer between 0 and 100, percent of one card"
WHOLE_CARD: Final = 100
"""Percent of a card's cores."""


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
        request = checked_request(p, container, pod)  # what the filter would refuse is denied here
        if request is not None and not p.rules.allow_unsupported:
            _deny_further_containers(p, container, pod)
    return uses


def admission_warnings(
    p: VendorProfile, container: Mapping[str, Any], pod: Mapping[str, Any]
) -> Sequence[str]:
    """What the user should know of an admitted container's request. Raises `AdmissionRejected`."""
    if p.hooks.advise is None:
        return ()
    request = container_request(p, container, pod)
    return () if request is None else p.hooks.advise(container, request, p)


def _deny_further_containers(p: VendorProfile, container: Mapping[str, Any], pod: Mapping[str, Any]) -> None:
    """Raise `AdmissionRejected` for a container that this vendor's node plugin cannot serve beside others
    (R14, D13). At filter time such pods are placed, as HAMi places them.
    """
    rules, names, who = p.rules, p.names, container.get("name")
    if rules.containers == "any":
        return
    spec = map_of(pod, "spec")
    if rules.containers == "one_regular" and any(
        one is container for one in objects_of(spec, "initContainers")
    ):
        raise AdmissionRejected(
            f"init container {who} asks for {names.count}: the device plugin serves regular containers only"
        )
    read = limit_of if rules.lookup == "limits_only" else resource_of
    first = next((one for one in containers_of(pod) if read(one, names.count) is not None), container)
    if first is not container:
        raise AdmissionRejected(
            f"containers {first.get('name')} and {who} both ask for {names.count}: the device plugin serves "
            "one container of a pod"
        )


def checked_request(
    p: VendorProfile, container: Mapping[str, Any], pod: Mapping[str, Any]
) -> ContainerRequest | None:
    """The container's request, as `container_request`, if the vendor's node side can serve it in this pod.

    Asked at admission, and again at filter time of pods that may have come past the webhook. Raises
    `AdmissionRejected`.
    """
    raw = read_resources(p, container)
    if raw is None:
        return None
    request = _parsed(p, raw, pod)
    if p.hooks.check is not None:
        p.hooks.check(container, request, pod, p)
    if request is not None and p.rules.slices_one_card and not p.rules.allow_unsupported:
        _deny_shares_of_several(p, request, container)
    return request


def _deny_shares_of_several(
    p: VendorProfile, request: ContainerRequest, container: Mapping[str, Any]
) -> None:
    names = p.names
    share = request.cores < WHOLE_CARD and resource_of(container, names.cores) is not None
    if request.nums == 1 or not (request.memreq or share):
        return
    shares = " and ".join(name for name in (names.memory, names.cores) if name)
    raise AdmissionRejected(
        f"container {container.get('name')} asks for {request.nums} {names.count} with a share of each, but "
        f"the device plugin gives shares of one card only: ask for one card, or for whole cards without "
        f"{shares}"
    )


def container_request(
    p: VendorProfile, container: Mapping[str, Any], pod: Mapping[str, Any]
) -> ContainerRequest | None:
    """The container's request, or None when it names none of this vendor.

    Raises `AdmissionRejected` for a request that is present but invalid: at admission it denies the pod, at
    filter time it fails every node.
    """
    raw = read_resources(p, container)
    return None if raw is None else _parsed(p, raw, pod)


def _parsed(p: VendorProfile, raw: RawRequest, pod: Mapping[str, Any]) -> ContainerRequest | None:
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
    resources = map_of(container, "resources")
    limits = map_of(resources, "limits")
    requests = map_of(resources, "requests") if p.rules.lookup == "limits_then_requests" else NO_MEMBERS
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
    for name in names.also_counted:
        if (found := read(name)) is not None:
            extra[name] = found
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


def amount_of(text: Any) -> tuple[int, str]:
    """A quantity's value, rounded up, and how it is written in canonical form; -1 and "" for what is none."""
    try:
        written = quantity.canonical(text)
        return quantity.value(written), written
    except QuantityError:
        return -1, ""


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


def cores_of(name: str, text: Any, container: str, rule: str = PERCENT) -> int:
    """A core request, 0..int32; `rule` says what is accepted. Raises `AdmissionRejected`."""
    number = integer(text)
    if number is None or not 0 <= number <= INT32_MAX:
        raise invalid(name, text, container, rule)
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
    found = map_of(map_of(pod, "metadata"), "annotations")
    return _Texts(found) if found else NO_MEMBERS


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
    spec = map_of(pod, "spec")
    return [*objects_of(spec, "initContainers"), *objects_of(spec, "containers")]


def shape_of(pod: Mapping[str, Any]) -> PodShape:
    """The pod's container slots."""
    spec = map_of(pod, "spec")
    inits, apps = objects_of(spec, "initContainers"), objects_of(spec, "containers")
    kinds = [SlotKind.SIDECAR if c.get("restartPolicy") == "Always" else SlotKind.INIT for c in inits]
    kinds.extend(SlotKind.APP for _ in apps)
    return PodShape(tuple(kinds), tuple(str(c.get("name", "")) for c in (*inits, *apps)))


def pod_info(pod: Mapping[str, Any]) -> PodInfo:
    """What fit, vector needs and annotations may know of the pod."""
    metadata = map_of(pod, "metadata")
    return PodInfo(
        str(metadata.get("uid", "")),
        str(metadata.get("namespace", "")),
        str(metadata.get("name", "")),
        dict(annotations_of(pod)),
        shape_of(pod),
    )


# --- helpers of admission hooks ---------------------------------------------------------------------------


def limit_of(container: Mapping[str, Any], name: str) -> Any:
    """The container's limit of a resource, or None."""
    return map_of(map_of(container, "resources"), "limits").get(name) if name else None


def request_of(container: Mapping[str, Any], name: str) -> Any:
    """The container's request of a resource, or None."""
    return map_of(map_of(container, "resources"), "requests").get(name) if name else None


def resource_of(container: Mapping[str, Any], name: str) -> Any:
    """The container's limit of a resource, else its request, or None."""
    found = limit_of(container, name)
    if found is not None or not name:
        return found
    return map_of(map_of(container, "resources"), "requests").get(name)


def set_limit(container: dict[str, Any], name: str, value: int) -> None:
    """Write a limit, creating the maps on the way."""
    resources = child(container, "resources")
    child(resources, "limits")[name] = str(value)


def align_request(container: dict[str, Any], name: str, value: int) -> None:
    """Write a request where the container has one: the API server wants it equal to the limit."""
    if request_of(container, name) is not None:
        child(child(container, "resources"), "requests")[name] = str(value)


def default_runtime_class(pod: dict[str, Any], name: str) -> None:
    """Give a pod that names no runtime class the one ``name``, if there is one."""
    spec = child(pod, "spec")
    if name and not spec.get("runtimeClassName"):
        spec["runtimeClassName"] = name


def child(parent: dict[str, Any], key: str) -> dict[str, Any]:
    """The object under `key`, created when there is none."""
    found = parent.get(key)
    if not isinstance(found, dict):
        found = parent[key] = {}
    return found


def append_env(container: dict[str, Any], name: str, value: str, *, wins: Callable[[Any], bool]) -> None:
    """Append an environment variable unless the last entry of that name satisfies `wins`."""
    last = next(
        (entry for entry in reversed(objects_of(container, "env")) if entry.get("name") == name), None
    )
    if last is None or not wins(last):
        env = container.get("env")
        container["env"] = [*(env if isinstance(env, list) else ()), {"name": name, "value": value}]


def any_value(_entry: Any) -> bool:
    """For `append_env`: a value the user has set is never overridden."""
    return True
