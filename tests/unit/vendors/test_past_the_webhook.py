"""Pods that came past the webhook (its failurePolicy is Ignore): the filter refuses what no node side can
serve, in the words of the admission (vendors/README.md R14).
"""

from typing import Any

import pytest
from vendor_desk import Desk, pod

Lab = Any
NEURON, CORE = "aws.amazon.com/neuron", "aws.amazon.com/neuroncore"
B3 = "huawei.com/Ascend910B3"
DRS, GCU_MEMORY, GCU_CORES = "enflame.com/drs-gcu", "enflame.com/gcu-memory", "enflame.com/gcu-core"
SGPU, VCORE = "metax-tech.com/sgpu", "metax-tech.com/vcore"
CLASS, QOS = "metax-tech.com/sgpu-app-class", "metax-tech.com/sgpu-qos-policy"
VGPU, SLICE = "mthreads.com/vgpu", "mthreads.com/sgpu-memory"
CHIP = "iluvatar.ai/BI-V150"
DCU, DCU_MEMORY, DCU_CORES = "hygon.com/dcunum", "hygon.com/dcumem", "hygon.com/dcucores"


@pytest.mark.parametrize(
    ("word", "obj"),
    [
        pytest.param("AWSNeuron", pod({NEURON: 1}, {CORE: 1}), id="devices and cores"),
        pytest.param("AWSNeuron", pod({CORE: 1}, inits=[{NEURON: 1}]), id="devices of an init container"),
        pytest.param("Ascend910B3", pod({B3: 1, f"{B3}-memory": 70000}), id="memory of no card"),
        pytest.param("Ascend910B3", pod({B3: 2, f"{B3}-memory": 1000}), id="parts of two cards"),
        pytest.param("Ascend910B3", pod({B3: 1, f"{B3}-core": 10}), id="cores of a template"),
        pytest.param("Enflame", pod({DRS: 2147483648}), id="too many slices"),
        pytest.param("Enflame", pod({DRS: "500m"}), id="half a slice"),
        pytest.param("Enflame", pod({DRS: 0}), id="no slice"),
        pytest.param("Enflame", pod({GCU_MEMORY: 3000000000}), id="too much memory"),
        pytest.param("Enflame", pod({GCU_MEMORY: 1, GCU_CORES: 101}), id="more than a card"),
        pytest.param("Metax-SGPU", pod({SGPU: 1}, annotations={CLASS: "oNLine"}), id="class"),
        pytest.param("Metax-SGPU", pod({SGPU: 2}, annotations={CLASS: "online"}), id="two online"),
        pytest.param("Metax-SGPU", pod({SGPU: 1}, annotations={QOS: "fair"}), id="policy"),
        pytest.param(
            "Metax-SGPU", pod({SGPU: 1, VCORE: 101}, annotations={CLASS: "online"}), id="cores of online"
        ),
        pytest.param("Mthreads", pod({VGPU: 1, SLICE: 3}), id="size of no slice"),
        pytest.param("DCU", pod({DCU: 2, DCU_MEMORY: 1000}), id="memory of two cards"),
        pytest.param("DCU", pod({DCU: 2, DCU_CORES: 50}), id="cores of two cards"),
        pytest.param("BI-V150", pod({f"{CHIP}-vgpu": 2, f"{CHIP}.vMem": 64}), id="vMem"),
    ],
)
def test_the_filter_says_what_admission_says(lab: Lab, word: str, obj: dict[str, Any]) -> None:
    desk = Desk(lab.vendor(word))
    assert refusal(desk, obj) == desk.denied(obj)


def refusal(desk: Desk, obj: dict[str, Any]) -> str:
    """Why the filter lets no node serve the pod, whatever cards there are; else ""."""
    request = desk.state.parse(obj)
    return "" if request is None else request.invalid


@pytest.mark.parametrize("unsupported", [True, False])
def test_shares_of_several_cards_where_the_administrator_allows_them(lab: Lab, unsupported: bool) -> None:
    desk = Desk(lab.vendor("DCU", {"hygon/allowUnsupported": unsupported}))
    assert bool(refusal(desk, pod({DCU: 2, DCU_MEMORY: 1000}))) is not unsupported
    assert not refusal(desk, pod({DCU: 2}))


def test_several_cards_to_which_admission_would_have_added_cores(lab: Lab) -> None:
    """They ask for no share."""
    desk = Desk(lab.vendor("BI-V150"))
    assert not refusal(desk, pod({f"{CHIP}-vgpu": 2}))


def test_no_node_serves_a_pod_that_mixes_devices_and_cores(lab: Lab) -> None:
    desk = Desk(lab.vendor("AWSNeuron"))
    desk.node("n1", capacity={NEURON: 6, CORE: 12})
    assert desk.refused(pod({NEURON: 1}, {CORE: 1})) == f"cannot mix {NEURON} and {CORE} in one pod"
