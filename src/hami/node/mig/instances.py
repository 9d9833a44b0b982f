"""The steps on one card: divide it, make an instance at one place, destroy it again. Blocking."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from hami.node.config import MigAllowed
from hami.node.errors import AllocateError, MigError, NvmlError, NvmlUnsupportedError
from hami.node.mig.driver import MigDriver, MigMode, overlapping
from hami.node.mig.plan import RESOLVE, Managed, Seen, SliceKey
from hami.node.mig.profiles import Offer, allowed, offer, profile_of, word_of
from hami.node.nvml import GpuIdentity
from hami.protocol.inventory import MigPlacement

Applying = Callable[[], AbstractContextManager[None]]
"""Wraps a change of MIG mode: others are asked to keep away from NVML meanwhile."""
_ASK_ADMIN: Final = "reset it with nothing running on it (nvidia-smi --gpu-reset -i {0}), or reboot the node"

log = logging.getLogger(__name__)


class MigCards:
    """MIG of single cards; every method raises :class:`NvmlError` where the driver refuses."""

    def __init__(self, driver: MigDriver, applying: Applying = nullcontext) -> None:
        self._driver = driver
        self._applying = applying

    def gpus(self) -> tuple[GpuIdentity, ...]:
        """All cards, by index."""
        return self._driver.gpus()

    def offer(self, gpu: GpuIdentity, entries: Sequence[MigAllowed]) -> Offer:
        """What the card is registered with; without profiles and with the reason where it offers none."""
        driver = self._driver
        if not allowed(gpu.name, entries):
            return offer(gpu.name, entries, (), lambda _: ())
        try:
            if not driver.mode(gpu).current:
                return Offer(why="it is not divided by MIG")
            known = driver.profiles(gpu)
            return offer(gpu.name, entries, known, lambda profile: driver.placements(gpu, profile))
        except NvmlUnsupportedError:
            return Offer(why="it has no MIG")

    def is_busy(self, gpu: GpuIdentity) -> bool:
        """Whether anything runs on the card."""
        return self._driver.is_busy(gpu)

    def is_divided(self, gpu: GpuIdentity) -> bool:
        """Whether MIG is on, and stays on: see :meth:`divide` for the errors."""
        mode = self._mode(gpu)
        if mode.current and not mode.pending:
            raise MigError(
                f"GPU {gpu.index} ({gpu.uuid}) is divided by MIG only until its next reset; "
                f"keep it so with: nvidia-smi -i {gpu.index} -mig 1"
            )
        if mode.pending and not mode.current:
            raise MigError(
                f"GPU {gpu.index} ({gpu.uuid}) needs a GPU reset before MIG is on: "
                f"{_ASK_ADMIN.format(gpu.index)}"
            )
        return mode.current

    def divide(self, gpu: GpuIdentity) -> None:
        """Switch MIG on where it is off. Raises :class:`MigError` where that needs somebody's hand."""
        if self.is_divided(gpu):
            return
        log.info("mig.divide", extra={"gpu": gpu.uuid})
        with self._applying():
            try:
                self._driver.enable(gpu)
            except NvmlError as error:
                raise MigError(
                    f"{error}; end what uses the card (other monitoring too), or "
                    f"{_ASK_ADMIN.format(gpu.index)}"
                ) from error
        if not self.is_divided(gpu):
            raise MigError(
                f"GPU {gpu.index} ({gpu.uuid}) is not divided by MIG although the driver agreed: "
                f"{_ASK_ADMIN.format(gpu.index)}"
            )

    def clear(self, gpu: GpuIdentity) -> int:
        """Destroy every instance of the card, which nobody uses; how many there were."""
        found = self._driver.instances(gpu)
        for instance in found:
            self._destroy(gpu, instance.id, instance.compute)
        return len(found)

    def seen(self, gpu: GpuIdentity) -> tuple[Seen, ...]:
        """The instances on the card; none where it is not divided."""
        words = {profile.id: word_of(profile) for profile in self._driver.profiles(gpu)}
        uuids: dict[int, dict[int, str]] = {}
        for device in self._driver.devices(gpu):
            uuids.setdefault(device.gpu_instance, {})[device.compute_instance] = device.uuid
        return tuple(
            Seen(
                SliceKey(
                    gpu.uuid,
                    words.get(each.profile_id, f"profile {each.profile_id}"),
                    each.placement.start,
                    each.placement.size,
                ),
                each.id,
                each.compute,
                uuids.get(each.id, {}),
            )
            for each in self._driver.instances(gpu)
        )

    def has(self, gpu: GpuIdentity, each: Managed) -> bool:
        """Whether a finished instance of ours is still on the card, with its MIG device."""
        return any(
            item.gpu_instance == each.gpu_instance
            and item.key == each.key
            and each.uuid in item.devices.values()
            for item in self.seen(gpu)
        )

    def make(self, gpu: GpuIdentity, key: SliceKey, owner: str, begun: Callable[[Managed], None]) -> Managed:
        """Make an instance at exactly this place, with one compute instance that fills it.

        ``begun`` hears of the unfinished instance as soon as there is something to destroy; on an error after
        that the caller destroys it. Raises :class:`AllocateError` for a place that the driver does not offer.
        """
        driver = self._driver
        profile = profile_of(key.word, driver.profiles(gpu))
        if profile is None:
            raise AllocateError(f"{RESOLVE}: GPU {gpu.index} ({gpu.name}) has no MIG profile {key.word}")
        place = MigPlacement(key.start, key.size)
        places = driver.placements(gpu, profile)
        if place not in places:
            offered = ", ".join(f"{item.start}+{item.size}" for item in places) or "none"
            raise AllocateError(f"{RESOLVE}: the driver does not offer {key}; its places are {offered}")
        self._check_free(gpu, key, place)
        number = driver.create(gpu, profile, place)
        unfinished = Managed(key, number, owners=frozenset({owner}))
        begun(unfinished)
        compute = driver.create_compute(gpu, number, profile)
        for device in driver.devices(gpu):
            if (device.gpu_instance, device.compute_instance) == (number, compute):
                return Managed(key, number, compute, device.uuid, unfinished.owners)
        raise NvmlError(f"GPU {gpu.index} shows no MIG device for the new instance {number} ({key})")

    def unmake(self, gpu: GpuIdentity, each: Managed) -> bool:
        """Destroy an instance of ours: compute instances first. False: processes run on it, nothing was done.

        An instance that is not the one that was made (its id, place or UUID tells) is left alone and counts
        as destroyed.
        """
        mine = next((item for item in self.seen(gpu) if item.gpu_instance == each.gpu_instance), None)
        if mine is None or not _is_same(each, mine):
            log.warning("mig.gone", extra={"instance": each.gpu_instance, "place": str(each.key)})
            return True
        if self._driver.is_busy(gpu, each.gpu_instance):
            return False
        self._destroy(gpu, mine.gpu_instance, mine.compute)
        return True

    def _check_free(self, gpu: GpuIdentity, key: SliceKey, place: MigPlacement) -> None:
        for other in overlapping(place, self._driver.instances(gpu)):
            where = f"{other.placement.start}+{other.placement.size}"
            raise AllocateError(
                f"{RESOLVE}: {key} is taken by MIG instance {other.id} at {where}, which this plugin has not "
                f"made; when nothing needs it, destroy it with: {how_to_destroy(gpu, other.id)}"
            )

    def _destroy(self, gpu: GpuIdentity, instance: int, compute: Sequence[int]) -> None:
        for number in compute:
            self._driver.destroy_compute(gpu, instance, number)
        self._driver.destroy(gpu, instance)

    def _mode(self, gpu: GpuIdentity) -> MigMode:
        try:
            return self._driver.mode(gpu)
        except NvmlUnsupportedError as error:
            raise MigError(f"GPU {gpu.index} ({gpu.name}) has no MIG: use operatingmode hami-core") from error


def how_to_destroy(gpu: GpuIdentity, instance: int) -> str:
    """The commands for an instance that is not ours."""
    smi = f"nvidia-smi mig -i {gpu.index}"
    return f"{smi} -dci -gi {instance}; {smi} -dgi -gi {instance}"


def _is_same(each: Managed, seen: Seen) -> bool:
    if each.key != seen.key:
        return False
    return not each.uuid or not seen.devices or each.uuid in seen.devices.values()
