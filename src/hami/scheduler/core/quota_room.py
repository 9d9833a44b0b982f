"""What a namespace's quota leaves for a pod before its cards are known (scheduler.md §9.3)."""

from hami.scheduler.core.answers import PodRequest
from hami.scheduler.core.hosts import effective_amount
from hami.scheduler.core.world import World
from hami.vendors.types import ContainerRequest, InventoryView, VendorProfile


def shortage(world: World, inventory: InventoryView, request: PodRequest) -> str:
    """What the quota misses for the amounts that the request itself says, in words; "": nothing.

    Amounts in recorded units (memory: MiB). Advisory: the fit checks again with what the chosen cards give.
    """
    for word in request.vendors:
        profile = world.profiles[word]
        left = world.quota.view(request.info.namespace, profile)
        uses = [_use(profile, slot.get(word), inventory) for slot in request.slots]
        needs = [effective_amount(request.info.shape, (use[position] for use in uses)) for position in (0, 1)]
        if not any(needs):
            continue
        for position, (need, room) in enumerate(zip(needs, (left.mem_left, left.cores_left), strict=True)):
            if room is not None and need > room:
                resource = (profile.names.memory, profile.names.cores)[position]
                return (
                    f"{resource}: {need} asked, {max(room, 0)} left of the quota limits.{resource} "
                    f"in namespace {request.info.namespace}"
                )
    return ""


def _use(
    profile: VendorProfile, wanted: ContainerRequest | None, inventory: InventoryView
) -> tuple[int, int]:
    if wanted is None:
        return 0, 0
    if profile.hooks.admission_use is not None:
        return profile.hooks.admission_use(wanted, inventory)
    return wanted.memreq * wanted.nums, wanted.cores * wanted.nums
