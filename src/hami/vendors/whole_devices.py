"""What vendors have in common whose devices are given whole, and registered by their plugins as JSON: nobody
counts memory or cores of them (vendors/biren.md, vendors/vastai.md).
"""

from typing import Final

from hami.protocol.keys import VendorKeys
from hami.vendors.types import Register, Rules

CHECKS: Final = frozenset({"health", "cordon", "type", "id", "slots", "mutex"})


def rules_of(own: VendorKeys, domain: str) -> Rules:
    """The rules of such a vendor; `domain` is that of its users' annotations."""
    return Rules(
        Register("json", own.register, devcore=100),
        to_allocate=own.to_allocate,
        allocated=own.allocated,
        handshake=own.handshake,
        cleanup=own.handshake,
        use_uuid=(f"{domain}/use-gpuuuid",),
        no_use_uuid=(f"{domain}/nouse-gpuuuid",),
        checks=CHECKS,
        record_mem=0,
        shows_memory=False,
        shows_cores=False,
        rebuild="longer_of_both_keys",
    )
