"""The vendor engine: the same functions for every profile (README 3.4). Import them from here."""

from hami.vendors.annotate import annotations, node_bonus, pad, placed_annotations, read_allocation
from hami.vendors.discovery import node_devices, read_inventory, register_source
from hami.vendors.fit import card_healthy, card_need, fit, refuse_all
from hami.vendors.request import (
    admission_warnings,
    checked_request,
    container_request,
    containers_of,
    mutate_admission,
    pod_info,
    shape_of,
)
from hami.vendors.selection import cordoned_ids, policy_words
from hami.vendors.types import AdmissionRejected
from hami.vendors.usage import container_usage, effective, init_base, quota_use
from hami.vendors.vector import (
    card_reasons,
    first_failures,
    node_mask,
    passing,
    vector_exact,
    vector_needs,
)

__all__ = [
    "AdmissionRejected",
    "admission_warnings",
    "annotations",
    "card_healthy",
    "card_need",
    "card_reasons",
    "checked_request",
    "container_request",
    "container_usage",
    "containers_of",
    "cordoned_ids",
    "effective",
    "first_failures",
    "fit",
    "init_base",
    "mutate_admission",
    "node_bonus",
    "node_devices",
    "node_mask",
    "pad",
    "passing",
    "placed_annotations",
    "pod_info",
    "policy_words",
    "quota_use",
    "read_allocation",
    "read_inventory",
    "refuse_all",
    "register_source",
    "shape_of",
    "vector_exact",
    "vector_needs",
]
