"""Hygon DCU: shares of one card, or whole cards (vendors/hygon.md)."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hami.protocol import keys
from hami.vendors.request import WHOLE_CARD, resource_of
from hami.vendors.schema import DeviceConfig
from hami.vendors.types import ContainerRequest, Hooks, Register, ResourceNames, Rules, VendorProfile
from hami.vendors.usage import STANDARD
from hami.vendors.vector import STANDARD_CHECKS, always_exact, standard_needs

_KEYS: Final = keys.VENDOR_KEYS["DCU"]


def build(device_config: DeviceConfig) -> tuple[VendorProfile, ...]:
    """The profile of section `hygon`."""
    config = device_config.hygon
    names = ResourceNames.of(config)
    rules = Rules(
        Register("csv", _KEYS.register),
        to_allocate=_KEYS.to_allocate,
        allocated=_KEYS.allocated,
        handshake=_KEYS.handshake,
        cleanup=_KEYS.handshake,
        use_uuid=("hygon.com/use-gpuuuid",),
        no_use_uuid=("hygon.com/nouse-gpuuuid",),
        use_type="hygon.com/use-dcutype",
        no_use_type="hygon.com/nouse-dcutype",
        default_cores=WHOLE_CARD,
        slices_one_card=True,
        allow_unsupported=config.allow_unsupported,
    )
    profile = VendorProfile(
        _KEYS.common_word,
        names,
        rules,
        STANDARD_CHECKS,
        standard_needs,
        always_exact,
        STANDARD,
        hooks=Hooks(advise=advise),
    )
    return (profile,)


def advise(container: Mapping[str, Any], request: ContainerRequest, p: VendorProfile) -> Sequence[str]:
    """A memory share without cores takes all cores: most users expect to share the card."""
    if not request.memreq or resource_of(container, p.names.cores) is not None:
        return ()
    text = (
        f"container {container.get('name')}: {p.names.memory} without {p.names.cores} takes all cores of the "
        f"card, nobody else can use it: set {p.names.cores} to share it"
    )
    return (text,)
