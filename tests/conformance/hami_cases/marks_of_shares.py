"""Marks that cases of vendors with shares of cards lack (see `marks`): admission rules of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Plain = Mapping[str, Any]


def slices_of_several_cards(plain: Plain, device_config: Plain) -> bool:
    """Shares of several cards in one container, of vendors whose plugin cannot give them (D13)."""
    for names in (device_config.get("hygon") or {}, *(device_config.get("iluvatars") or ())):
        for limits, _ in _containers(plain, names):
            memory = limits.get(names.get("resourceMemoryName"))
            cores = _number(limits.get(names.get("resourceCoreName", ""), 100))
            share_of_cores = "iluvatar" not in names.get("resourceCountName", "") and cores < 100
            if _count(limits, names) > 1 and (memory is not None or share_of_cores):
                return True
    return False


def second_container(plain: Plain, device_config: Plain) -> bool:
    """A second AMD or Cambricon container (D13)."""
    amd, cambricon = device_config.get("amd") or {}, device_config.get("cambricon") or {}
    shares = [limits for limits in map(_limits_of, _all(plain)) if limits.keys() & set(amd.values())]
    several = plain["id"].startswith("webhook-") and len(shares) > 1
    return several or len(list(_containers(plain, cambricon))) > 1


def requests_follow_limits(plain: Plain, device_config: Plain) -> bool:
    """Limits that the webhook sets beside requests of another value: the API server wants them equal."""
    for names in (device_config.get("mthreads") or {}, *(device_config.get("iluvatars") or ())):
        for limits, requests in _containers(plain, names):
            overwritten = {names.get("resourceMemoryName"), names.get("resourceCoreName")} & requests.keys()
            if overwritten and (_count(limits, names) > 1 or names.get("resourceMemoryName") not in limits):
                return True
    return False


def cores_of_no_usual_device(plain: Plain, device_config: Plain) -> bool:
    """An odd number of NeuronCores: kept until the node says how many a device has."""
    names = device_config.get("awsneuron") or {}
    name = names.get("resourceCoreName")
    found = [
        _number(resources[name])
        for container in _all(plain)
        for resources in (container.get("limits") or {}, container.get("requests") or {})
        if name in resources and names.get("resourceCountName") not in resources
    ]
    return plain["id"].startswith("request-AWSNeuron") and any(one > 1 and one % 2 for one in found)


def _containers(plain: Plain, names: Plain) -> Iterator[tuple[Plain, Plain]]:
    """Limits and requests of the containers of a webhook case that name the count resource."""
    if plain["id"].startswith("webhook-"):
        for resources in _all(plain):
            limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
            if names.get("resourceCountName") in {*limits, *requests}:
                yield limits, requests


def _all(plain: Plain) -> Iterator[Plain]:
    spec = (plain["input"].get("pod") or {}).get("spec") or {}
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        yield container.get("resources") or {}


def _limits_of(resources: Plain) -> Plain:
    return resources.get("limits") or {}


def _count(limits: Plain, names: Plain) -> int:
    return _number(limits.get(names.get("resourceCountName", ""), 0))


def _number(text: Any) -> int:
    return int(text) if str(text).isdigit() else 0
