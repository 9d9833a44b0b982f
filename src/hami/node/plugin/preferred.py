"""Which fake ids kubelet should take, and how an allocation follows the ids it took. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from hami.node.plugin.inventory import physical_uuid
from hami.protocol.allocation import ContainerDevice, Slot


@dataclass(frozen=True, slots=True)
class Choice:
    """What kubelet can choose from for one container."""

    available: tuple[str, ...]
    must_include: tuple[str, ...]
    size: int


def preferred_ids(choice: Choice, cards: Sequence[str]) -> tuple[str, ...]:
    """Ids of the cards that the scheduler chose (``cards``: their UUIDs in allocation order).

    Empty where no such choice of exactly ``size`` ids exists; kubelet then chooses itself.
    """
    if choice.size <= 0 or len(cards) < choice.size:
        return ()
    chosen = list(choice.must_include)
    unaccounted = [physical_uuid(device_id) for device_id in choice.must_include]
    free = [device_id for device_id in choice.available if device_id not in set(choice.must_include)]
    for uuid in cards[: choice.size]:
        if uuid in unaccounted:
            unaccounted.remove(uuid)
            continue
        found = next((device_id for device_id in free if physical_uuid(device_id) == uuid), None)
        if found is None:
            return ()
        free.remove(found)
        chosen.append(found)
    return tuple(chosen) if len(chosen) == choice.size else ()


def preferred_for_containers(
    choices: Sequence[Choice], entries: Iterable[Slot]
) -> tuple[tuple[str, ...], ...]:
    """Answer for each container of the call, at its position; ``entries`` are the pod's non-empty slots in
    order.

    A container without an answer is ``()``; nothing follows the last container with an answer.
    """
    answers = [
        preferred_ids(choice, [device.uuid for device in entry])
        for choice, entry in zip(choices, entries, strict=False)
    ]
    while answers and not answers[-1]:
        answers.pop()
    return tuple(answers)


def align(slot: Slot, device_ids: Sequence[str]) -> Slot:
    """``slot`` in kubelet's order: memory and cores travel with the card they belong to.

    Ids without a matching card take the remaining devices in order, on the card that kubelet chose. The
    lengths are equal (the caller has checked).
    """
    remaining: list[ContainerDevice | None] = list(slot)
    aligned: list[ContainerDevice | None] = [None] * len(device_ids)
    uuids = [physical_uuid(device_id) for device_id in device_ids]
    for position, uuid in enumerate(uuids):
        for candidate, device in enumerate(remaining):
            if device is not None and device.uuid == uuid:
                aligned[position] = device
                remaining[candidate] = None
                break
    rest = iter([device for device in remaining if device is not None])
    return tuple(
        device if device is not None else msgspec.structs.replace(next(rest), uuid=uuid)
        for device, uuid in zip(aligned, uuids, strict=True)
    )
