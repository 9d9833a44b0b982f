"""Pods and cards of all kinds of vendors in `hami explain`, `top`, `simulate` and in snapshots: what they
count, in their own units, and nothing where they count nothing.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hami.answers.explain import explain
from hami.answers.hashing import hash_names
from hami.answers.redact import Redaction
from hami.answers.render import explanation_lines, simulation_lines, top_lines
from hami.answers.replay import Replay
from hami.answers.simulate import simulate
from hami.answers.snapshot import CardUse, ContainerUse, Settings, Snapshot, encode_snapshot
from hami.answers.top import Share, top

CONFIG = (Path(__file__).parents[2] / "conformance" / "cases" / "device-config-default.json").read_text()
NOW = 1_787_400_000.0
Amounts = Mapping[str, str]


def node(
    name: str, amounts: Amounts, annotations: Amounts | None = None, labels: Amounts | None = None
) -> dict[str, Any]:
    """A node that reports these amounts."""
    status = {**amounts, "cpu": "8", "pods": "110"}
    return {
        "metadata": {
            "name": name,
            "annotations": {"example.com/foreign": "secret", **(annotations or {})},
            "labels": {"kubernetes.io/hostname": name, **(labels or {})},
        },
        "spec": {},
        "status": {"capacity": status, "allocatable": status},
    }


def card(kind: str, **parts: Any) -> str:
    """A register annotation with one card."""
    plain = {"id": f"{kind.split()[0]}-0", "count": 4, "devcore": 100, "type": kind, "health": True}
    return json.dumps([{**plain, **parts}])


def pod(name: str, limits: Amounts, annotations: Amounts | None = None) -> dict[str, Any]:
    """A new pod of one container."""
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "annotations": dict(annotations or {}),
        },
        "spec": {
            "schedulerName": "hami-scheduler",
            "containers": [{"name": "main", "resources": {"limits": dict(limits), "requests": dict(limits)}}],
        },
        "status": {"phase": "Pending"},
    }


DRS = json.dumps(
    {"devices": [{"index": "0", "minor": "4", "capacity": 6}], "profiles": {"3g.24gb": "2", "6g.48gb": "3"}}
)
NODES = [
    node(
        "aws",
        {"aws.amazon.com/neuron": "2", "aws.amazon.com/neuroncore": "4"},
        labels={"node.kubernetes.io/instance-type": "inf2.8xlarge"},
    ),
    node(
        "amd",
        {"amd.com/gpu": "4"},
        {"hami.io/node-amd-register": card("AMD MI300X", devmem=196608, devcore=304)},
    ),
    node("gcu", {"enflame.com/gcu": "2"}),
    node("drs", {"enflame.com/drs-gcu": "6"}, {"enflame.com/gcu-drs-capacity": DRS}),
    node(
        "vastai",
        {"vastaitech.com/va": "1"},
        {"hami.io/node-va-register": card("Vastai", count=1, devmem=32768)},
    ),
    node("mthreads", {"mthreads.com/sgpu-core": "16", "mthreads.com/sgpu-memory": "96"}),
    node(
        "hard",
        {"huawei.com/Ascend310P": "7"},
        {"hami.io/node-register-Ascend310P": card("Ascend310P", count=7, devmem=21527, devcore=8)},
    ),
    node(
        "soft",
        {"huawei.com/Ascend910B3": "4"},
        {
            "hami.io/node-register-Ascend910B3": card("Ascend910B3", devmem=65536),
            "hami-vnpu-core": "true",
        },
    ),
    node("kunlun", {"kunlunxin.com/xpu": "8"}),
    node("metax", {"metax-tech.com/gpu": "2"}),
]
SOFT = {"huawei.com/vnpu-mode": "hami-core"}
PODS = [
    pod("aws", {"aws.amazon.com/neuroncore": "1"}),
    pod("amd", {"amd.com/gpu": "1", "amd.com/gpumem": "1024", "amd.com/gpucores": "25"}),
    pod("gcu", {"enflame.com/gcu": "1"}),
    pod("drs", {"enflame.com/drs-gcu": "3"}),
    pod("vastai", {"vastaitech.com/va": "1"}),
    pod(
        "mthreads",
        {"mthreads.com/vgpu": "1", "mthreads.com/sgpu-memory": "32", "mthreads.com/sgpu-core": "8"},
    ),
    pod("hard", {"huawei.com/Ascend310P": "1", "huawei.com/Ascend310P-memory": "6144"}),
    pod(
        "soft",
        {
            "huawei.com/Ascend910B3": "1",
            "huawei.com/Ascend910B3-memory": "8192",
            "huawei.com/Ascend910B3-core": "40",
        },
        SOFT,
    ),
    pod("kunlun", {"kunlunxin.com/xpu": "2"}),
    pod("metax", {"metax-tech.com/gpu": "1"}),
]


def snapshot(*pods: dict[str, Any]) -> Snapshot:
    """All nodes, and these pods."""
    settings = Settings(enable_ascend=True, enable_iluvatar=True)
    return Snapshot(NOW, settings, CONFIG, NODES, list(pods), [])


def running() -> Snapshot:
    """All nodes, each with its pod."""
    replay = Replay(snapshot())
    simulate(replay, PODS)
    return snapshot(*(dict(one) for one in replay.pods.values()))


TAKEN = {
    "aws": ("aws-AWSNeuron-1: 1 cores",),
    "amd": ("AMD-0: 1024 MiB, 76 cores",),
    "gcu": ("gcu-GCU-1: 100 cores",),
    "drs": ("drs-enflame-drs-0: 24576 MiB, 50 cores",),
    "vastai": ("Vastai-0: 1 slot",),
    "mthreads": ("mthreads-mthreads-0: 16384 MiB, 8 cores",),
    "hard": ("Ascend310P-0: 6144 MiB",),
    "soft": ("Ascend910B3-0: 8192 MiB, 40 cores",),
    "kunlun": ("kunlun-kunlun-0: 98304 MiB, 100 cores", "kunlun-kunlun-1: 98304 MiB, 100 cores"),
    "metax": ("metax-metax-1: 65536 MiB, 100 cores",),
}


def test_a_simulation_says_what_each_vendor_counts() -> None:
    found = simulate(Replay(snapshot()), PODS)
    assert found.fits == len(PODS), simulation_lines(found)
    assert {one.node: one.cards for one in found.pods} == TAKEN


NONE = Share(0, 0)
GRANTED = {  # memory in MiB, cores in the vendor's unit
    "AWSNeuron": (NONE, Share(1, 4)),
    "AMD": (Share(1024, 196608), Share(76, 304)),
    "GCU": (NONE, Share(100, 200)),
    "Enflame": (Share(24576, 49152), Share(50, 100)),
    "Vastai": (NONE, NONE),
    "Mthreads": (Share(16384, 49152), Share(8, 16)),
    "Ascend310P": (Share(6144, 21527), NONE),
    "Ascend910B3": (Share(8192, 65536), Share(40, 100)),
    "kunlun": (Share(2 * 98304, 8 * 98304), Share(200, 800)),
    "Metax-GPU": (Share(65536, 131072), Share(100, 200)),
}


def test_the_tables_count_cores_and_not_bits_of_masks() -> None:
    found = top(Replay(running()))
    assert {row.vendor: (row.memory, row.cores) for row in found.cluster} == GRANTED
    pods = {row.vendor: (row.memory, row.cores) for row in found.pods}
    assert pods == {
        word: (memory.granted if memory.total else None, cores.granted if cores.total else None)
        for word, (memory, cores) in GRANTED.items()
    }
    lines = {
        line.split()[0]: line.split() for line in top_lines(found, "pods") if line.startswith("default/")
    }
    assert lines["default/vastai"][4:6] == ["-", "-"]
    assert lines["default/aws"][4:6] == ["-", "1"]
    nodes = {line.split()[0]: line for line in top_lines(found, "nodes") if line}
    assert nodes["aws"].split()[2:8] == ["2", "1", "1/4", "-", "1/4", "25%"]
    assert nodes["vastai"].split()[4:7] == ["1/1", "-", "-"]


def test_a_held_card_that_no_node_registers_any_more_still_counts_its_cores() -> None:
    whole = running()
    away = [one for one in whole.nodes if one["metadata"]["name"] != "aws"]
    left = [{**node("aws", {}), "metadata": {"name": "aws"}}]
    found = top(Replay(replace(whole, nodes=[*away, *left])))
    (row,) = [row for row in found.pods if row.vendor == "AWSNeuron"]
    assert (row.memory, row.cores) == (None, 1)


ASKED = {
    "aws": "main: 1 cores of AWSNeuron",
    "amd": "main: 1 x AMD, each 1024 MiB, 25 % of the compute units",
    "gcu": "main: 1 x GCU",
    "drs": "main: 1 x Enflame of 3 slices",
    "vastai": "main: 1 x Vastai",
    "mthreads": "main: 1 x Mthreads, each 16384 MiB, 8 cores",
    "hard": "main: 1 x Ascend310P, each 6144 MiB, 0 cores",
    "soft": "main: 1 x Ascend910B3, each 8192 MiB, 40 cores",
    "kunlun": "main: 2 x kunlun",
    "metax": "main: 1 x Metax-GPU",
}


@pytest.mark.parametrize("name", ASKED)
def test_an_explanation_names_the_cards_and_what_the_pod_takes_of_them(name: str) -> None:
    found = explain(Replay(running()), "default", name)
    assert found.asks == (ASKED[name],)
    assert found.node == name
    chosen = [f"{one.id}: {one.taken}" for one in found.cards if one.chosen]
    assert chosen == list(TAKEN[name])


@pytest.mark.parametrize(
    ("limits", "room", "change"),
    [
        (
            {"aws.amazon.com/neuroncore": "4"},
            "AWSNeuron: 2 cards, 2 usable; most free on one card: 2 slots, 2 cores",
            "ask for aws.amazon.com/neuroncore: 2 instead of 4: fits on aws",
        ),
        (
            {"amd.com/gpu": "1", "amd.com/gpucores": "90"},
            "AMD: 1 cards, 1 usable; most free on one card: 3 slots, 195584 MiB, 228 cores",
            "once pod default/amd has ended it fits on amd",
        ),
        (
            {"vastaitech.com/va": "1"},
            "Vastai: 1 cards, 1 usable; most free on one card: 0 slots",
            "once pod default/vastai has ended it fits on vastai",
        ),
        (
            {"kunlunxin.com/xpu": "8"},
            "kunlun: 8 cards, 8 usable; most free on one card: 100 slots, 98304 MiB, 100 cores",
            "ask for kunlunxin.com/xpu: 4 instead of 8: fits on kunlun",
        ),
        (
            {"mthreads.com/vgpu": "1", "mthreads.com/sgpu-memory": "96", "mthreads.com/sgpu-core": "4"},
            "Mthreads: 1 cards, 1 usable; most free on one card: 99 slots, 32768 MiB, 8 cores",
            "ask for mthreads.com/sgpu-memory: 64 instead of 96: fits on mthreads",
        ),
    ],
)
def test_what_is_left_and_what_would_help_are_said_in_the_vendors_units(
    limits: Amounts, room: str, change: str
) -> None:
    whole = running()
    found = explain(Replay(replace(whole, pods=[*whole.pods, pod("late", limits)])), "default", "late")
    text = explanation_lines(found)
    assert f"      {room}" in text
    assert f"  - {change}" in text


def test_an_amount_that_admission_denies_is_no_advice() -> None:
    whole = running()
    for limits in (
        {"mthreads.com/vgpu": "1", "mthreads.com/sgpu-memory": "96", "mthreads.com/sgpu-core": "4"},
        {"amd.com/gpu": "1", "amd.com/gpucores": "90"},
    ):
        late = pod("late", limits)
        found = explain(Replay(replace(whole, pods=[*whole.pods, late])), "default", "late")
        for line in found.changes:
            if line.startswith("ask for"):
                name, amount = line.removeprefix("ask for ").split(" instead")[0].split(": ")
                (tried,) = simulate(Replay(whole), [pod("tried", {**limits, name: amount})]).pods
                assert tried.node, line


def test_a_node_made_for_other_pods_says_its_sizes_in_its_own_units() -> None:
    huge = pod("huge", {"amd.com/gpu": "1", "amd.com/gpumem": "999999"})
    dies = pod("dies", {"vastaitech.com/va": "2"})
    replay = Replay(snapshot(huge, dies))
    assert explain(replay, "default", "huge").changes[-1].endswith("AMD card has 196608 MiB and 304 cores")
    assert explain(replay, "default", "dies").changes[-1].endswith("Vastai card has 1 slots")


def redacted(whole: Snapshot) -> Snapshot:
    """As `hami snapshot` would write it."""
    redaction = Redaction(Replay(whole).profiles)
    return replace(
        whole,
        nodes=[redaction.node(one) for one in whole.nodes],
        pods=[redaction.pod(one) for one in whole.pods],
    )


def test_a_snapshot_keeps_what_vendors_read_and_nothing_of_others() -> None:
    whole = running()
    kept = redacted(whole)
    assert b"secret" not in gzip.decompress(encode_snapshot(kept))
    before, after = Replay(whole), Replay(kept)
    assert [top(after).cards, top(after).pods] == [top(before).cards, top(before).pods]
    waiting = pod("late", {**PODS[7]["spec"]["containers"][0]["resources"]["limits"]}, SOFT)
    more = [*kept.pods, Redaction(before.profiles).pod(waiting)]
    assert explain(Replay(replace(kept, pods=more)), "default", "late").node == "soft"


def test_hashed_names_leave_no_node_name_in_ids_of_cards_and_the_tables_stay() -> None:
    whole = running()
    names = {one["metadata"]["name"]: f"{one['metadata']['name']}-of-ours" for one in whole.nodes}
    text = encode_snapshot(redacted(whole))
    plain = gzip.decompress(text).decode()
    for name, new in names.items():  # names of nodes that can be looked for in a text
        plain = plain.replace(f'"{name}"', f'"{new}"').replace(f"{name}-{name}-", f"{new}-{name}-")
        for suffix in ("AWSNeuron", "GCU", "enflame-drs"):
            plain = plain.replace(f'"{name}-{suffix}', f'"{new}-{suffix}')
            plain = plain.replace(f";{name}-{suffix}", f";{new}-{suffix}")
    named = json.loads(plain)
    named["pods"][0]["metadata"]["annotations"]["aws.amazon.com/use-neuron-uuid"] = "aws-of-ours-AWSNeuron-1"
    named["nodes"][1]["metadata"]["annotations"]["hami.io/mutex.lock"] = "2026-08-22T10:00:00Z,team,our-pod"
    ours = replace(
        whole,
        nodes=named["nodes"],
        pods=named["pods"],
        cards_use=[CardUse("metax-of-ours-metax-1", float(1 << 30), 5.0)],
        containers_use=[
            ContainerUse("default", "metax", "main", "metax-of-ours-metax-1", float(1 << 30), 5.0)
        ],
    )
    hashed = hash_names(ours, b"salt")
    assert "of-ours" not in gzip.decompress(encode_snapshot(hashed)).decode()
    assert "our-pod" not in gzip.decompress(encode_snapshot(hashed)).decode()
    before, after = top(Replay(ours)), top(Replay(hashed))
    assert sorted((row.vendor, row.memory, row.cores, row.used_memory or 0) for row in after.nodes) == sorted(
        (row.vendor, row.memory, row.cores, row.used_memory or 0) for row in before.nodes
    )
    assert {row.vendor: (row.memory, row.cores, row.used_memory) for row in after.pods} == {
        row.vendor: (row.memory, row.cores, row.used_memory) for row in before.pods
    }
    assert len({row.node for row in after.pods} - {row.node for row in after.nodes}) == 0


def test_a_hashed_id_of_a_card_that_is_gone_says_no_name_either() -> None:
    whole = redacted(running())
    gone = [one for one in whole.nodes if one["metadata"]["name"] != "kunlun"]
    hashed = hash_names(replace(whole, nodes=gone), b"salt")
    (holder,) = [one for one in hashed.pods if "hami.io/kunlun-allocated" in one["metadata"]["annotations"]]
    annotations = holder["metadata"]["annotations"]
    assert not annotations["hami.io/kunlun-allocated"].startswith("kunlun-")
    assert holder["spec"]["nodeName"] == annotations["hami.io/vgpu-node"]
