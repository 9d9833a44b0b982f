"""Views of Kubernetes objects, extender and admission bodies, JSON patch, keys."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.protocol import keys
from hami.protocol.admission import AdmissionAnswer, decode_review, encode_review
from hami.protocol.errors import ObjectError
from hami.protocol.extender import (
    ExtenderFilterResult,
    decode_binding_args,
    decode_filter_args,
    encode_binding_result,
    encode_filter_result,
)
from hami.protocol.patch import json_patch
from hami.protocol.views import Lease, Node, Pod, ResourceQuota, decode

POD = {
    "metadata": {"name": "p", "namespace": "ns", "uid": "u", "annotations": None, "labels": {"a": "b"}},
    "spec": {
        "nodeName": "n",
        "initContainers": [{"name": "i", "restartPolicy": "Always"}],
        "containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1", "cpu": 2}}}],
        "schedulingGroup": {"podGroupName": "g"},
    },
    "status": {
        "phase": "Running",
        "initContainerStatuses": [{"name": "i", "state": {"terminated": {"exitCode": 0}}}],
    },
    "unknown": [1, 2],
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(st.characters(codec="utf-8"), max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["metadata", "spec", "status", "name", "containers", "Pod", "nodes", "NodeNames", "a/b~"]
            ),
            inner,
        )
    ),
    max_leaves=15,
)


def test_a_pod_is_read_with_nulls_and_unknown_members() -> None:
    pod = decode(json.dumps(POD), Pod)
    assert (pod.name, pod.namespace, pod.uid, pod.node_name, pod.phase) == ("p", "ns", "u", "n", "Running")
    assert dict(pod.annotations) == {}
    assert [container.name for container in pod.slots] == ["i", "c"]
    assert pod.init_containers[0].is_sidecar
    assert dict(pod.containers[0].limits) == {"nvidia.com/gpu": "1", "cpu": 2}
    assert dict(pod.init_containers[0].limits) == {}
    assert pod.spec.scheduling_group is not None
    assert pod.spec.scheduling_group.pod_group_name == "g"


def test_other_kinds_are_read() -> None:
    node = decode('{"metadata":{"name":"n"},"status":{"allocatable":{"nvidia.com/gpu":"10"}}}', Node)
    assert (dict(node.allocatable), dict(node.capacity)) == ({"nvidia.com/gpu": "10"}, {})
    quota = decode('{"spec":{"hard":{"limits.nvidia.com/gpumem":"2k"}}}', ResourceQuota)
    assert dict(quota.hard) == {"limits.nvidia.com/gpumem": "2k"}
    lease = decode('{"spec":{"holderIdentity":"x","leaseDurationSeconds":15}}', Lease)
    assert (lease.spec.holder_identity, lease.spec.lease_duration_seconds) == ("x", 15)


def test_errors_name_the_place_and_sizes_are_bounded() -> None:
    with pytest.raises(ObjectError) as error:
        decode('{"spec":{"containers":[{"name":5}]}}', Pod)
    assert error.value.path == "$.spec.containers[0].name"
    with pytest.raises(ObjectError, match="over the limit of 10"):
        decode(json.dumps(POD), Pod, max_bytes=10)


@given(st.one_of(st.binary(max_size=40), JSON.map(lambda value: json.dumps(value).encode())))
def test_body_decoders_raise_only_object_errors(data: bytes) -> None:
    for attempt in (
        lambda: decode(data, Pod),
        lambda: decode(data, Node),
        lambda: decode_filter_args(data),
        lambda: decode_binding_args(data),
        lambda: decode_review(data),
    ):
        try:
            attempt()
        except ObjectError:
            continue


def test_filter_requests_are_read_in_any_case() -> None:
    args = decode_filter_args(json.dumps({"pod": POD, "NODENAMES": ["a", "b"], "Nodes": None}).encode())
    assert (args.pod.name, args.node_names, args.nodes) == ("p", ("a", "b"), None)
    args = decode_filter_args(
        json.dumps({"Pod": POD, "Nodes": {"Items": [{"x": 1}]}, "NodeNames": None}).encode()
    )
    assert [bytes(node) for node in args.nodes or ()] == [b'{"x": 1}']
    assert args.node_names is None


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"NodeNames":["a"]}', "extender args missing pod"),
        (b'{"Pod":null,"NodeNames":["a"]}', "extender args missing pod"),
        (b'{"Pod":{},"Nodes":null}', "extender args missing nodes"),
        (b"", "invalid filter request"),
        (b'{"Pod":{', "invalid filter request"),
        (b'{"Pod":{},"NodeNames":[1]}', "invalid NodeNames"),
    ],
)
def test_bad_filter_requests_are_answered_with_the_reason(body: bytes, text: str) -> None:
    with pytest.raises(ObjectError, match=text):
        decode_filter_args(body)


def test_filter_answers_have_all_five_members_and_no_percent_sign_in_the_error() -> None:
    assert json.loads(encode_filter_result(ExtenderFilterResult(node_names=["n2"]))) == {
        "Nodes": None,
        "NodeNames": ["n2"],
        "FailedNodes": None,
        "FailedAndUnresolvableNodes": None,
        "Error": "",
    }
    answer = json.loads(
        encode_filter_result(
            ExtenderFilterResult(nodes=[msgspec.Raw(b'{"x":1}')], failed_nodes={"n": "r"}, error="5%")
        )
    )
    assert answer["Nodes"] == {"metadata": {}, "items": [{"x": 1}]}
    assert answer["FailedNodes"] == {"n": "r"}
    assert "%" not in answer["Error"]


def test_bind_bodies() -> None:
    args = decode_binding_args(b'{"podname":"p","PodNamespace":"ns","PodUID":"u","NODE":"n"}')
    assert (args.pod_name, args.pod_namespace, args.pod_uid, args.node) == ("p", "ns", "u", "n")
    assert json.loads(encode_binding_result("")) == {"Error": ""}


def test_admission_review_round_trip() -> None:
    request = decode_review(
        json.dumps(
            {"kind": "AdmissionReview", "request": {"uid": "7", "operation": "CREATE", "object": POD}}
        ).encode()
    )
    assert request.object == POD
    patch = [{"op": "add", "path": "/spec/schedulerName", "value": "s"}]
    answer = json.loads(encode_review("7", AdmissionAnswer(True, patch=patch, warnings=["w"])))
    assert answer["apiVersion"] == "admission.k8s.io/v1"
    assert answer["response"]["uid"] == "7"
    assert json.loads(base64.b64decode(answer["response"]["patch"])) == patch
    denied = json.loads(encode_review("7", AdmissionAnswer(False, "no", 403)))["response"]
    assert denied == {"uid": "7", "allowed": False, "status": {"code": 403, "message": "no"}}
    with pytest.raises(ObjectError):
        decode_review(b'{"request":null}')


@given(JSON, JSON)
def test_a_json_patch_turns_one_value_into_the_other(before: Any, after: Any) -> None:
    assert apply_patch(copy.deepcopy(before), json_patch(before, after)) == after
    assert json_patch(before, before) == []


def apply_patch(value: Any, operations: list[dict[str, Any]]) -> Any:
    """A plain RFC 6902 interpreter for the three operations we write."""
    root = {"": value}
    for operation in operations:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")]
        target: Any = root
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target[part]
        if isinstance(target, list):
            position = len(target) if last == "-" else int(last)
            if operation["op"] == "add":
                target.insert(position, operation["value"])
            elif operation["op"] == "remove":
                del target[position]
            else:
                target[position] = operation["value"]
        elif operation["op"] == "remove":
            del target[last]
        else:
            target[last] = operation["value"]
    return root[""]


def test_vendor_keys_follow_the_table() -> None:
    assert keys.VENDOR_KEYS["NVIDIA"].handshake == "hami.io/node-handshake"
    assert keys.ascend_keys("Ascend910B4").register == "hami.io/node-register-Ascend910B4"
    assert keys.iluvatar_keys("MR-V100").register == "hami.io/node-MR-V100-register"
    allocated = [vendor.allocated for vendor in keys.VENDOR_KEYS.values()]
    assert len(set(allocated)) == len(allocated) == 14


def test_every_allocation_key_is_protected_and_user_keys_are_not() -> None:
    protected = keys.protected_annotations({**keys.VENDOR_KEYS, "Ascend310P": keys.ascend_keys("Ascend310P")})
    for vendor in keys.VENDOR_KEYS.values():
        assert vendor.allocated in protected
    assert {"hami.io/vgpu-node", "hami.io/bind-phase", "huawei.com/Ascend310P", "predicate-time"} <= protected
    assert not protected & {"nvidia.com/use-gputype", "hami.io/node-scheduler-policy", ""}
