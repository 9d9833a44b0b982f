"""AWS Neuron: the acceptance cases of vendors/awsneuron.md §12."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vendor_desk import NOW, Desk, pod

from hami.protocol.allocation import ContainerDevice
from hami.vendors.engine import node_devices
from hami.vendors.neuron_cores import NeuronAlgebra, lowest_free

Lab = Any
COUNT, CORE = "aws.amazon.com/neuron", "aws.amazon.com/neuroncore"
ALLOCATED = "hami.io/aws-neuron-devices-allocated"
TYPE = "node.kubernetes.io/instance-type"
MUTEX = {"hami.io/gpu-scheduler-policy": "mutex"}


def devices(number: Any) -> dict[str, Any]:
    return {COUNT: number}


def cores(number: Any) -> dict[str, Any]:
    return {CORE: number}


class Cluster(Desk):
    """Nodes of EC2 instance types."""

    def instance(self, name: str, kind: str | None, number: int, size: int = 2) -> None:
        """A node with so many devices of `size` cores."""
        labels = {} if kind is None else {TYPE: kind}
        self.node(name, labels=labels, capacity={COUNT: number, CORE: number * size})

    def busy(self, node: str, *indices: int, mask: int = 3) -> None:
        """Devices in use."""
        for index in indices:
            self.hold(f"busy-{index}-{mask}", node, f"{node}-AWSNeuron-{index},AWSNeuron,0,{mask}:;")

    def ids(self, obj: dict[str, Any]) -> str:
        return self.written(obj)["AWS_NEURON_IDS"]


@pytest.fixture
def desk(lab: Lab) -> Cluster:
    return Cluster(lab.vendor("AWSNeuron"))


@pytest.fixture
def n1(desk: Cluster) -> Cluster:
    """Node n1: Inf2 with six devices of two cores."""
    desk.instance("n1", "inf2.24xlarge", 6)
    return desk


def test_case_1_the_devices_of_the_capacity(n1: Cluster) -> None:
    found = n1.cards("n1")
    assert [one.id for one in found] == [f"n1-AWSNeuron-{index}" for index in range(6)]
    assert {(one.count, one.devcore, one.devmem, one.type) for one in found} == {(2, 3, 0, "AWSNeuron")}
    assert found[0].custom == {"AWSNodeType": "inf2.24xlarge"}


def test_case_2_every_node_has_its_own_geometry(n1: Cluster) -> None:
    n1.instance("i1", "inf1.xlarge", 1, size=4)
    assert [(one.count, one.devcore) for one in n1.cards("i1")] == [(4, 15)]
    assert n1.cards("n1")[0].devcore == 3


def test_case_3_no_capacity_drops_the_devices(n1: Cluster) -> None:
    n1.node("n1", capacity={COUNT: 0, CORE: 12})
    assert n1.cards("n1") == []


def test_a_node_without_cores_serves_whole_devices_only(desk: Cluster) -> None:
    desk.node("n1", capacity={COUNT: 2})
    assert [(one.count, one.devcore) for one in desk.cards("n1")] == [(1, 1), (1, 1)]
    assert desk.ids(pod(devices(1))) == "1"
    assert desk.refused(pod(cores(1))) == "2/2 CardInsufficientCore"


def test_a_label_that_comes_later_is_noticed(desk: Cluster) -> None:
    desk.instance("n1", None, 6)
    assert desk.refused(pod(devices(3))) == "1/6 NumaNotFit"
    desk.instance("n1", "inf2.24xlarge", 6)
    assert desk.ids(pod(devices(3))) == "0,1,2"


@pytest.mark.parametrize(
    ("resources", "text"),
    [
        pytest.param({"limits": devices("0")}, f"{COUNT} must be greater than 0", id="4"),
        pytest.param({"limits": cores("500m")}, f"{CORE} must be an integer", id="5"),
        pytest.param({"limits": cores("3")}, f"{CORE} must be 1 or a multiple of 2, got 3", id="6"),
        pytest.param({"requests": devices("2147483648")}, f"{COUNT} must not exceed 2147483647", id="8"),
        pytest.param({"limits": cores("4294967295")}, f"{CORE} must not exceed 4294967294", id="cores"),
        pytest.param({"limits": cores("-1")}, f"{CORE} must be greater than 0", id="negative"),
    ],
)
def test_invalid_amounts_are_denied(n1: Cluster, resources: dict[str, Any], text: str) -> None:
    assert n1.denied(pod({"name": "a", "resources": resources})) == text


def test_more_devices_than_an_int32_are_denied(desk: Cluster) -> None:
    desk.node("one", capacity={COUNT: 4, CORE: 4})
    text = f"{CORE} needs 4294967294 devices, which exceeds the maximum of 2147483647"
    assert desk.denied(pod(cores("4294967294"))) == text


def test_case_7_a_device_of_four_cores_serves_three(n1: Cluster) -> None:
    n1.instance("i1", "inf1.xlarge", 1, size=4)
    assert n1.review(pod(cores(3))).allowed
    answer = n1.written(pod(cores(3)))
    assert answer[ALLOCATED] == "i1-AWSNeuron-0,AWSNeuron,0,7:;"
    n1.state.delete_node("i1")
    assert n1.refused(pod(cores(3))) == "6/6 CardInsufficientCore"


def test_case_9_cores_are_devices_of_the_usual_size_until_the_node_is_known(desk: Cluster) -> None:
    assert desk.numbers(pod(cores(6))) == (3, 0, 0, 2)
    assert desk.numbers(pod(cores(1))) == (1, 0, 0, 1)
    assert desk.numbers(pod(cores(2))) == (1, 0, 0, 2)
    assert desk.numbers(pod(devices(5))) == (5, 0, 0, 0)


def test_cases_10_and_11_two_pods_share_the_last_device(n1: Cluster) -> None:
    for name, mask, ids in (("a", 1, "10"), ("b", 2, "11")):
        obj = pod(cores(1), name=name)
        written = n1.written(obj)
        assert written[ALLOCATED] == f"n1-AWSNeuron-5,AWSNeuron,0,{mask}:;"
        assert written["AWS_NEURON_IDS"] == ids
        assert written["NEURON_RESOURCE_TYPE"] == CORE
        assert written["NEURON_ALLOCATED"] == "false"
        assert written["NEURON_ALLOC_TIME"] == f"{int(NOW)}000000000"
        assert written["aws.amazon.com/predicate-node"] == "n1"
        n1.bind(obj)


def test_case_12_too_few_cores_are_left_on_every_device(n1: Cluster) -> None:
    n1.busy("n1", 5, mask=1)
    n1.busy("n1", 0, 1, 2, 3, 4)
    n1.busy("n1", 4, mask=1)
    assert n1.refused(pod(cores(2))) == "1/6 CardTimeSlicingExhausted, 5/6 CardInsufficientCore"


@pytest.mark.parametrize(
    ("kind", "number", "busy", "asked", "ids"),
    [
        pytest.param("inf2.24xlarge", 6, (1,), 3, "2,3,4", id="13"),
        pytest.param("trn1.32xlarge", 16, (1,), 8, "8,9,10,11,12,13,14,15", id="15"),
        pytest.param("inf2.48xlarge", 12, (0, 5), 5, "6,7,8,9,10", id="inf2"),
        pytest.param("trn1.32xlarge", 16, (1,), 4, "4,5,6,7", id="trn1"),
        pytest.param("trn1.32xlarge", 16, (3, 7), 4, "8,9,10,11", id="trn1 two blocks"),
        pytest.param("Inf2.odd", 6, (0,), 2, "1,2", id="capital letter"),
    ],
)
def test_several_devices_are_neighbours(
    desk: Cluster, kind: str, number: int, busy: tuple[int, ...], asked: int, ids: str
) -> None:
    desk.instance("n1", kind, number)
    desk.busy("n1", *busy)
    written = desk.written(pod(devices(asked)))
    assert written["AWS_NEURON_IDS"] == ids
    assert "NEURON_RESOURCE_TYPE" not in written
    assert written[ALLOCATED].count("AWSNeuron,0,3") == asked, "all cores of each"


@pytest.mark.parametrize(
    ("kind", "number", "busy", "asked"),
    [
        pytest.param("trn1.32xlarge", 16, (), 2, id="14"),
        pytest.param(None, 16, (), 5, id="19"),
        pytest.param("inf2.48xlarge", 12, tuple(range(2, 10)), 4, id="no wrap-around"),
        pytest.param("trn1.32xlarge", 16, (1, 9), 8, id="no aligned block"),
    ],
)
def test_without_a_block_there_is_no_fit(
    desk: Cluster, kind: str | None, number: int, busy: tuple[int, ...], asked: int
) -> None:
    desk.instance("n1", kind, number)
    desk.busy("n1", *busy)
    assert desk.refused(pod(devices(asked))) == f"1/{number} NumaNotFit"


def test_case_16_mutex_does_not_hand_out_a_device_twice(desk: Cluster) -> None:
    desk.instance("n1", "inf2.48xlarge", 12)
    desk.busy("n1", 4, 5)
    assert desk.ids(pod(devices(4), annotations=MUTEX)) == "0,1,2,3"


def test_case_17_an_excluded_device_breaks_its_block(n1: Cluster) -> None:
    asking = {"aws.amazon.com/nouse-neuron-uuid": "n1-AWSNeuron-0"}
    assert n1.ids(pod(devices(2), annotations=asking)) == "1,2"
    only = {"aws.amazon.com/use-neuron-uuid": "n1-AWSNeuron-0,n1-AWSNeuron-2"}
    assert n1.refused(pod(devices(2), annotations=only)) == "4/6 CardUuidMismatch"


def test_case_18_more_devices_than_the_node_has(desk: Cluster) -> None:
    desk.instance("n1", "trn1.2xlarge", 2)
    assert desk.refused(pod(devices(4))) == "NodeInsufficientDevice"


def test_case_20_an_id_that_no_device_has(n1: Cluster) -> None:
    asking = {"aws.amazon.com/use-neuron-uuid": "n1-AWSNeuron-9"}
    assert n1.refused(pod(cores(1), annotations=asking)) == "6/6 CardUuidMismatch"


def test_the_fullest_device_with_room_is_filled_first(n1: Cluster) -> None:
    n1.busy("n1", 2, mask=2)
    assert n1.written(pod(cores(1)))[ALLOCATED] == "n1-AWSNeuron-2,AWSNeuron,0,1:;"
    assert n1.written(pod(cores(1), annotations=MUTEX))[ALLOCATED] == "n1-AWSNeuron-5,AWSNeuron,0,1:;"


def test_a_whole_device_needs_one_that_nobody_uses(desk: Cluster) -> None:
    desk.instance("i1", "inf1.2xlarge", 1, size=4)
    desk.busy("i1", 0, mask=1)
    assert desk.refused(pod(devices(1)), "i1") == "1/1 CardInsufficientCore"
    assert desk.written(pod(cores(2)))[ALLOCATED] == "i1-AWSNeuron-0,AWSNeuron,0,6:;"


def test_case_21_cores_of_an_init_container_are_held_while_it_runs(n1: Cluster) -> None:
    text = "n1-AWSNeuron-5,AWSNeuron,0,2:;n1-AWSNeuron-5,AWSNeuron,0,1:;"
    n1.hold("x", "n1", text, inits=1)
    assert n1.used("n1")["n1-AWSNeuron-5"].cores == 3
    done = {"initContainerStatuses": [{"name": "init0", "state": {"terminated": {"exitCode": 0}}}]}
    n1.hold("x", "n1", text, inits=1, status={"phase": "Running", **done})
    assert n1.used("n1")["n1-AWSNeuron-5"].cores == 1


def test_case_22_devices_and_cores_in_one_pod_are_denied(n1: Cluster) -> None:
    text = f"cannot mix {COUNT} and {CORE} in one pod"
    assert n1.denied(pod(devices(1), cores(1))) == text
    assert n1.denied(pod(cores(1), inits=[devices(1)])) == text
    assert n1.review(pod({**devices(1), **cores(1)})).allowed, "beside devices the cores are ignored"


def test_case_23_only_the_vendors_keys_are_written(n1: Cluster) -> None:
    obj = pod(cores(1), annotations={"k8s.ovn.org/pod-networks": "{}"})
    assert set(n1.written(obj)) == {
        ALLOCATED,
        "AWS_NEURON_IDS",
        "NEURON_ALLOCATED",
        "NEURON_ALLOC_TIME",
        "NEURON_RESOURCE_TYPE",
        "aws.amazon.com/predicate-node",
        "hami.io/vgpu-node",
        "hami.io/vgpu-time",
    }
    assert n1.bind(obj)["metadata"]["annotations"]["k8s.ovn.org/pod-networks"] == "{}"


def test_case_24_the_quota_counts_cores(n1: Cluster) -> None:
    n1.quota({CORE: 2})
    n1.busy("n1", 5, mask=2)
    assert n1.review(pod(cores(1))).allowed
    assert n1.written(pod(cores(1)))[ALLOCATED] == "n1-AWSNeuron-5,AWSNeuron,0,1:;"
    assert n1.denied(pod(cores(2), name="q")) == "exceeding resource quota"
    assert "5/6 ResourceQuotaNotFit" in n1.refused(pod(devices(1), name="q"))
    n1.quota({CORE: 4})  # one is held, one reserved
    assert n1.ids(pod(devices(1), name="r")) == "4"


def test_case_25_a_core_that_two_pods_hold_stays_used_when_one_goes(n1: Cluster) -> None:
    n1.busy("n1", 5, mask=3)
    n1.busy("n1", 5, mask=1)
    n1.state.delete_pod("uid-busy-5-3")
    used = n1.used("n1")["n1-AWSNeuron-5"]
    assert (used.slots, used.cores) == (1, 1)


def test_case_26_a_number_of_cores_is_split_by_the_node(desk: Cluster) -> None:
    desk.instance("i1", "inf1.xlarge", 1, size=4)
    assert desk.written(pod(cores(4)))[ALLOCATED] == "i1-AWSNeuron-0,AWSNeuron,0,15:;"
    desk.state.delete_node("i1")
    desk.instance("n1", "inf2.24xlarge", 6)
    written = desk.written(pod(cores(4)))
    assert written[ALLOCATED] == "n1-AWSNeuron-0,AWSNeuron,0,3:n1-AWSNeuron-1,AWSNeuron,0,3:;"
    assert written["AWS_NEURON_IDS"] == "0,1,2,3"


def test_two_containers_share_a_device(n1: Cluster) -> None:
    written = n1.written(pod(cores(1), cores(1)))
    assert written[ALLOCATED] == "n1-AWSNeuron-5,AWSNeuron,0,1:;n1-AWSNeuron-5,AWSNeuron,0,2:;"
    assert written["AWS_NEURON_IDS"] == "10,11"


def test_devices_with_more_cores_than_a_mask_holds_are_malformed(lab: Lab, n1: Cluster) -> None:
    outcome = n1.node("n1", labels={TYPE: "x"}, capacity={COUNT: 1, CORE: 32})
    assert [one.reason for one in outcome.notices] == ["RegistrationUnreadable"]
    (card,) = node_devices(lab.vendor("AWSNeuron"), lab.node(capacity={COUNT: 1, CORE: 31}))
    assert card.devcore == 2**31 - 1


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), st.integers(0, 40))
def test_the_lowest_free_cores_are_given(total: int, used: int, number: int) -> None:
    mask = lowest_free(total, used, number)
    free = total & ~used
    assert mask & ~free == 0
    assert mask.bit_count() == min(number, free.bit_count())
    assert free & ((1 << mask.bit_length()) - 1) == mask, "none below is left out"


MASKS = st.lists(st.integers(0, 2**31 - 1), max_size=5)


@given(MASKS, st.randoms())
def test_holders_come_and_go_in_any_order(masks: list[int], random: Any) -> None:
    algebra = NeuronAlgebra()
    uses = [algebra.of(ContainerDevice("d", "AWSNeuron", 0, mask)) for mask in masks]
    total = algebra.zero
    for use in uses:
        total = algebra.add(total, use)
    union = 0
    for mask in masks:
        union |= mask
    assert total.cores == union
    random.shuffle(uses)
    for use in uses:
        total = algebra.remove(total, use)
    assert total == algebra.zero
