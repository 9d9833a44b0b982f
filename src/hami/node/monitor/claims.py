"""What of a region's word counts (monitor.md §6.2, §8.2).

A workload can write any priority and any card into its region. It would stop its neighbours with them, put
numbers on their cards, and fill the metrics store with series of cards that nobody has. So its cards and its
priority are those in the limits file that the node wrote; without one its cards are those of the pod's
annotation, and the region's word stands only where nobody else knows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from hami.node.errors import UnsafePathError
from hami.node.files import read_regular
from hami.node.monitor.feedback import Activity
from hami.node.monitor.pods import PodInfo
from hami.node.monitor.region import Region
from hami.node.region.limits import parse_variables
from hami.protocol.keys import ENV_DEVICE_UUIDS, ENV_TASK_PRIORITY

_MAX_BYTES: Final = 1 << 16
_PRIORITY: Final = re.compile("-?[0-9]{1,9}")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Said:
    """What a limits file says: no cards, and no priority, where it does not say them."""

    cards: frozenset[str] = frozenset()
    priority: int | None = None


class LimitsFolder:
    """The limits files of a node, named like the cache directories. Blocking."""

    def __init__(self, path: str) -> None:
        self._path = path

    def read(self, names: Iterable[str]) -> dict[str, Said]:
        """What the files of these names say; without an entry: there is none."""
        found = {}
        for name in names:
            try:
                text = read_regular(f"{self._path}/{name}", _MAX_BYTES).decode("utf-8", "replace")
            except FileNotFoundError:
                continue
            except (OSError, UnsafePathError) as error:
                log.warning("limits.unreadable", extra={"file": name, "cause": str(error)})
                continue
            variables = parse_variables(text)
            cards = frozenset(variables.get(ENV_DEVICE_UUIDS, "").split(",")) - {""}
            priority = variables.get(ENV_TASK_PRIORITY, "")
            found[name] = Said(cards, int(priority) if _PRIORITY.fullmatch(priority) else None)
        return found


def cards_of(pod: PodInfo, container: str) -> frozenset[str]:
    """UUIDs of the cards and MIG instances that a container was given by its pod's annotations; none: that
    is not known.
    """
    cards = {device.uuid.partition("[")[0] for device in pod.devices(container) or ()}
    return frozenset(cards | {item.mig_uuid for name, item in pod.mig if name == container})


def own_devices(region: Region, given: frozenset[str]) -> Region:
    """The region without devices that are none of ``given``, whole if that is empty."""
    if not given:
        return region
    return replace(region, devices=tuple(device for device in region.devices if device.uuid in given))


def activity(region: Region, given: frozenset[str], priority: int | None) -> Activity:
    """A container for :func:`hami.node.monitor.feedback.judge`.

    ``given`` are its cards, none: that is not known; ``priority`` is that of its limits file, or None.
    """
    return Activity(
        region.all_uuids & given if given else region.all_uuids,
        region.recent_kernel,
        region.utilization_switch,
        region.priority if priority is None else priority,
        region.last_kernel,
    )
