"""Group ``request``: what each container slot asks of each vendor."""

from __future__ import annotations

from typing import Any

from hami.vendors import engine
from hami.vendors.types import AdmissionRejected

from .cases import Case
from .compare import difference
from .setup import profiles


def run(case: Case) -> Any:
    """Per slot the requests by vendor; a refused request becomes the member ``refused`` of its slot."""
    pod = case.input["pod"]
    slots = []
    for container in engine.containers_of(pod):
        slot: dict[str, Any] = {}
        for profile in profiles(case):
            try:
                found = engine.container_request(profile, container, pod)
            except AdmissionRejected as error:
                slot["refused"] = str(error)
                continue
            if found is not None:
                slot[profile.common_word] = {
                    "nums": found.nums,
                    "type": found.type,
                    "mem": found.memreq,
                    "mem_percent": found.mem_percent,
                    "cores": found.cores,
                }
        slots.append(slot)
    return {"requests": slots}


def compare(expected: Any, got: Any, case: Case) -> str:
    """As recorded."""
    return difference(expected, got)
