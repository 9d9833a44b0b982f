"""For each quantity by itself a limit counts before a request of the same name (README R3,
nvidia-scheduling.md §5, §6), so a container may name one resource here and another there."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from vendor_fits import PROFILES, every_vendor

from hami.vendors.config import decode_config, load_profiles
from hami.vendors.engine import container_request, mutate_admission
from hami.vendors.types import AdmissionRejected, ContainerRequest, VendorProfile

Numbers = tuple[int, int, int, int] | None

COUNT, MEMORY, PERCENT, CORES = (
    f"nvidia.com/{name}" for name in ("gpu", "gpumem", "gpumem-percentage", "gpucores")
)
QUANTITIES = st.fixed_dictionaries(
    {},
    optional={
        COUNT: st.integers(1, 16),
        MEMORY: st.integers(0, 50_000),
        PERCENT: st.sampled_from([0, 1, 40, 100]),
        CORES: st.sampled_from([0, 30, 100]),
    },
)
SECTIONS = st.fixed_dictionaries(
    {
        "memoryFactor": st.sampled_from([1, 1024]),
        "defaultMemory": st.sampled_from([0, 2048]),
        "defaultCores": st.sampled_from([0, 30]),
        "defaultGPUNum": st.integers(0, 2),
    }
)
CHART = {"memoryFactor": 1, "defaultMemory": 0, "defaultCores": 0, "defaultGPUNum": 1}


def nvidia(section: Mapping[str, Any]) -> VendorProfile:
    names = dict(
        zip(
            ["Count", "Memory", "MemoryPercentage", "Core"],
            [COUNT, MEMORY, PERCENT, CORES],
            strict=True,
        )
    )
    named = {f"resource{word}Name": name for word, name in names.items()}
    return load_profiles(decode_config({"nvidia": {**named, **section}}))[0]


def container_of(limits: Mapping[str, Any], requests: Mapping[str, Any]) -> dict[str, Any]:
    texts = [{name: str(amount) for name, amount in amounts.items()} for amounts in (limits, requests)]
    return {"name": "main", "resources": {"limits": texts[0], "requests": texts[1]}}


def asked(p: VendorProfile, container: dict[str, Any]) -> ContainerRequest | str | None:
    """The request, or the refusal, of a pod's only container."""
    try:
        return container_request(p, container, {"spec": {"containers": [container]}})
    except AdmissionRejected as refusal:
        return str(refusal)


def generated(section: Mapping[str, int], amounts: Mapping[str, int]) -> Numbers:
    """Count, memory, percentage and cores of §6, from the amounts that count."""
    if COUNT not in amounts:
        return None
    memory = amounts.get(MEMORY, 0) * section["memoryFactor"]
    percent = amounts.get(PERCENT, 0) or 101
    if percent == 101 and not memory:
        memory, percent = (section["defaultMemory"], 101) if section["defaultMemory"] else (0, 100)
    return amounts[COUNT], memory, percent, amounts.get(CORES, section["defaultCores"])


def mutated(
    section: Mapping[str, int], limits: Mapping[str, int], requests: Mapping[str, int]
) -> dict[str, int]:
    """The limits after admission (§5, steps 4 and 5)."""
    made = dict(limits)
    if limits == {CORES: 100} and exclusive({}, requests):
        return made  # admitted before: the exclusive cores are our own
    sizes = {MEMORY, PERCENT, CORES} & limits.keys()
    if COUNT not in limits and sizes and section["defaultGPUNum"]:
        made[COUNT] = section["defaultGPUNum"]
    if exclusive(made, requests):
        made[CORES] = 100
    return made


def exclusive(limits: Mapping[str, int], requests: Mapping[str, int]) -> bool:
    amounts = {**requests, **limits}
    if COUNT not in amounts or CORES in amounts:
        return False
    return amounts[PERCENT] == 100 if PERCENT in amounts else MEMORY not in amounts


@settings(max_examples=200)
@given(SECTIONS, QUANTITIES, QUANTITIES)
def test_the_filter_reads_each_quantity_of_the_limits_else_of_the_requests(
    section: dict[str, int], limits: dict[str, int], requests: dict[str, int]
) -> None:
    found = asked(nvidia(section), container_of(limits, requests))
    assert not isinstance(found, str)
    numbers = found and (found.nums, found.memreq, found.mem_percent, found.cores)
    assert numbers == generated(section, {**requests, **limits})


@settings(max_examples=200)
@given(SECTIONS, QUANTITIES, QUANTITIES)
@example(CHART, {CORES: 30}, {COUNT: 2})
@example(CHART, {CORES: 100}, {COUNT: 2})
@example(CHART, {CORES: 100}, {COUNT: 2, MEMORY: 500})
@example(CHART, {CORES: 100}, {COUNT: 2, PERCENT: 40})
def test_admission_defaults_a_count_by_the_limits_and_cores_by_what_counts(
    section: dict[str, int], limits: dict[str, int], requests: dict[str, int]
) -> None:
    """`limits{gpucores}` with `requests{gpu: n}` gets a limit of the default count, which then counts."""
    p, container = nvidia(section), container_of(limits, requests)
    pod = {"spec": {"containers": [container]}}
    mutate_admission(p, container, pod, _Nothing())
    expected = mutated(section, limits, requests)
    assert container["resources"] == container_of(expected, requests)["resources"]
    before = copy.deepcopy(pod)
    mutate_admission(p, container, pod, _Nothing())
    assert pod == before, "a second call changes nothing"


@every_vendor
@settings(max_examples=40)
@given(data=st.data())
def test_of_every_vendor_each_quantity_is_looked_up_by_itself(p: VendorProfile, data: st.DataObject) -> None:
    names = sorted({*p.names.all(), *PROFILES[0].names.all()})
    amounts = st.dictionaries(st.sampled_from(names), st.integers(0, 200), max_size=len(names))
    limits, requests = data.draw(amounts, "limits"), data.draw(amounts, "requests")
    counting = limits if p.rules.lookup == "limits_only" else {**requests, **limits}
    assert asked(p, container_of(limits, requests)) == asked(p, container_of(counting, {}))


class _Nothing:
    """No inventory."""

    def kinds(self, common_word: str) -> tuple[()]:
        del common_word
        return ()
