"""Which objects of a cluster are HAMi's, by the labels of its chart, and what its scheduler is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hami.protocol.keys import COMPONENT_LABEL, COMPONENT_PLUGIN, COMPONENT_SCHEDULER
from hami.protocol.members import map_of, objects_of

SCHEDULERS: Final = f"{COMPONENT_LABEL}={COMPONENT_SCHEDULER}"
"""Label selectors."""
PLUGINS: Final = f"{COMPONENT_LABEL}={COMPONENT_PLUGIN}"
SCHEDULERS_AND_PLUGINS: Final = f"{COMPONENT_LABEL} in ({COMPONENT_SCHEDULER}, {COMPONENT_PLUGIN})"

Object = Mapping[str, Any]


def component_of(obj: Object) -> str:
    """Which program of an installation it belongs to, "" where to none."""
    return str(map_of(map_of(obj, "metadata"), "labels").get(COMPONENT_LABEL, ""))


def is_of_chart(obj: Object) -> bool:
    """Whether HAMi's chart has made it."""
    return str(map_of(map_of(obj, "metadata"), "labels").get("helm.sh/chart", "")).startswith("hami-")


def words_of(container: Object) -> list[Any]:
    """Command and arguments."""
    return [*(container.get("command") or []), *(container.get("args") or [])]


def containers_of_template(workload: Object) -> list[dict[str, Any]]:
    """The containers of the pods that a Deployment or DaemonSet makes."""
    return objects_of(map_of(map_of(map_of(workload, "spec"), "template"), "spec"), "containers")


def scheduler_containers(deployment: Object) -> Iterator[dict[str, Any]]:
    """The containers that run `hami scheduler`."""
    for container in containers_of_template(deployment):
        if "scheduler" in words_of(container)[:2]:
            yield container
