"""Reason codes of a fit and their text. Users and tools match on them, so they never change."""

from collections.abc import Mapping

# Reason codes; users and tools match on them.
NOT_HEALTHY = "CardNotHealth"
CORDONED = "CardCordoned"
TYPE_MISMATCH = "CardTypeMismatch"
ID_MISMATCH = "CardUuidMismatch"
OUT_OF_SLOTS = "CardTimeSlicingExhausted"
EXCLUSIVE = "ExclusiveDeviceAllocateConflict"
QUOTA_NOT_FIT = "ResourceQuotaNotFit"
INSUFFICIENT_MEMORY = "CardInsufficientMemory"
INSUFFICIENT_CORES = "CardInsufficientCore"
EXHAUSTED = "CardComputeUnitsExhausted"
NUMA_NOT_FIT = "NumaNotFit"
MIG_INFEASIBLE = "CardMigTopologyInfeasible"
MODE_NOT_FIT = "ModeNotFit"
CARD_UNHEALTHY = "CardUnhealthy"  # Metax sGPU
QOS_MISMATCH = "CardQosPolicyMismatch"
APP_CLASS_MISMATCH = "CardAppClassMismatch"
VENDOR_RULE = "CardNotFoundCustomFilterRule"
INSUFFICIENT_CARDS = "AllocatedCardsInsufficientRequest"
NODE_INSUFFICIENT = "NodeInsufficientDevice"
INTERNAL_ERROR = "InternalError"


_WITHOUT_COUNT = frozenset({NODE_INSUFFICIENT, INTERNAL_ERROR})


def reasons_text(reasons: Mapping[str, int], total: int) -> str:
    """`"<n>/<total> <Code>"` items sorted as text, joined by ", "; whole-node codes stand without a count."""
    return ", ".join(
        sorted(
            code if code in _WITHOUT_COUNT else f"{count}/{total} {code}" for code, count in reasons.items()
        )
    )
