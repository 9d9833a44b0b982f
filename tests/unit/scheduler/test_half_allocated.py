"""The memory of pods that are still being allocated, in a cluster whose nodes come and go."""

from __future__ import annotations

from typing import Any

from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.scheduler.core.answers import Reservation
from hami.scheduler.edge.half_allocated import WAIT_S, HalfAllocated
from hami.vendors.config import decode_config, load_profiles

WORD = "Ascend910B3"


def reservation(node: str) -> Reservation:
    slot: Any = ("device",)
    return Reservation(f"u-{node}", "default", f"p-{node}", node, {WORD: (slot, slot)}, {}, {}, (), 0.0)


def test_what_is_over_is_not_kept_for_nodes_that_never_see_a_pod_again() -> None:
    now = [0.0]
    chip = {"chipName": "910B3", "commonWord": WORD, "resourceName": f"huawei.com/{WORD}"}
    profiles = load_profiles(decode_config({"vnpus": {"configs": [chip]}}), enable_ascend=True)
    client = Client(ClientConfig("http://unused"), Limits(qps=0))
    half = HalfAllocated(client, {one.common_word: one for one in profiles}, lambda: now[0])
    for number in range(100):
        half.binding(reservation(f"n{number}"))
        now[0] += WAIT_S / 10
    assert "n99" in half._last
    assert len(half._last) <= 10
