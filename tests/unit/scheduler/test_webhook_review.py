"""The admission review (scheduler.md §14 and its cases 44 to 48, 55 to 58, 61, 88 to 91)."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.protocol.admission import AdmissionAnswer, AdmissionRequest, decode_review, encode_review
from hami.protocol.errors import ObjectError
from hami.protocol.views import ResourceQuota
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge.webhook import Webhook, WebhookSettings
from hami.vendors.config import decode_config, load_profiles

PROFILES = load_profiles(
    decode_config(
        {
            "nvidia": {
                "resourceCountName": "nvidia.com/gpu",
                "resourceMemoryName": "nvidia.com/gpumem",
                "resourceMemoryPercentageName": "nvidia.com/gpumem-percentage",
                "resourceCoreName": "nvidia.com/gpucores",
                "resourcePriorityName": "nvidia.com/priority",
                "defaultGPUNum": 1,
            }
        }
    )
)


def container(name: str = "a", privileged: bool = False, **limits: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name, "image": "i"}
    if limits:
        made["resources"] = {"limits": {f"nvidia.com/{key}": str(amount) for key, amount in limits.items()}}
    if privileged:
        made["securityContext"] = {"privileged": True}
    return made


def pod(*containers: dict[str, Any], **members: Any) -> dict[str, Any]:
    metadata = {
        "name": "p",
        "annotations": members.pop("annotations", {}),
        "labels": members.pop("labels", {}),
    }
    return {"kind": "Pod", "metadata": metadata, "spec": {"containers": list(containers), **members}}


def review(
    obj: Any, *, quota: dict[str, str] | None = None, namespace: str = "q", **settings: Any
) -> AdmissionAnswer:
    state = ClusterState(PROFILES)
    if quota is not None:
        hard = {f"limits.nvidia.com/{key}": amount for key, amount in quota.items()}
        made = {"metadata": {"name": "rq", "namespace": "q"}, "spec": {"hard": hard}}
        state.upsert_quota(msgspec.convert(made, ResourceQuota))
    webhook = Webhook(state, PROFILES, WebhookSettings(**{"scheduler_name": "hami-scheduler", **settings}))
    before = copy.deepcopy(obj)
    answer = webhook.review(AdmissionRequest(uid="u", operation="CREATE", namespace=namespace, object=obj))
    assert obj == before, "the object of the request stays as it was"
    return answer


def test_a_pod_with_a_device_gets_our_scheduler_and_nothing_else() -> None:
    answer = review(
        pod(container(gpu=1, gpumem=100), schedulerName="default-scheduler", odd={"x": [1, None]})
    )
    assert answer.allowed
    assert [dict(op) for op in answer.patch] == [
        {"op": "replace", "path": "/spec/schedulerName", "value": "hami-scheduler"}
    ]


def test_a_plain_pod_is_untouched() -> None:
    answer = review(pod(container(), schedulerName="default-scheduler"))
    assert (answer.allowed, list(answer.patch)) == (True, [])


def test_a_pod_of_another_scheduler_is_untouched() -> None:
    answer = review(pod(container(gpu=1), schedulerName="volcano"))
    assert (answer.allowed, list(answer.patch)) == (True, [])
    assert answer.message == "pod already has different scheduler assigned"


def test_without_the_overwrite_flag_only_pods_that_name_us_are_touched() -> None:
    default = review(pod(container(gpu=1), schedulerName="default-scheduler"), force_overwrite=False)
    assert (default.allowed, list(default.patch)) == (True, [])
    ours = review(pod(container(gpumem=5), schedulerName="hami-scheduler"), force_overwrite=False)
    assert list(ours.patch), "the count is defaulted"


def test_forged_allocation_keys_are_removed_even_from_pods_of_other_schedulers() -> None:
    forged = {"hami.io/vgpu-node": "n1", "hami.io/vgpu-devices-allocated": "x", "mine": "1"}
    answer = review(
        pod(container(), schedulerName="volcano", annotations=forged, labels={"hami.io/vgpu-node": "n1"})
    )
    assert answer.allowed
    assert sorted(op["path"] for op in answer.patch) == [
        "/metadata/annotations/hami.io~1vgpu-devices-allocated",
        "/metadata/annotations/hami.io~1vgpu-node",
        "/metadata/labels/hami.io~1vgpu-node",
    ]
    assert {op["op"] for op in answer.patch} == {"remove"}


def test_a_privileged_container_beside_a_device_is_denied_by_name() -> None:
    answer = review(pod(container("a", privileged=True), container("b", gpu=1)))
    assert (answer.allowed, answer.code, answer.message) == (False, 403, "container a is privileged")


def test_a_privileged_sidecar_beside_a_device_is_denied_by_name() -> None:
    sidecar = {**container("side", privileged=True), "restartPolicy": "Always"}
    answer = review(pod(container(gpu=1), initContainers=[sidecar]))
    assert (answer.allowed, answer.code, answer.message) == (False, 403, "container side is privileged")


def test_a_privileged_init_container_is_named_first() -> None:
    spec = pod(container(privileged=True, gpu=1))
    spec["spec"]["initContainers"] = [container("init", privileged=True)]
    assert review(spec).message == "container init is privileged"


def test_a_privileged_pod_without_devices_is_untouched() -> None:
    answer = review(pod(container(privileged=True)))
    assert (answer.allowed, list(answer.patch)) == (True, [])


def test_allow_unlimited_admits_privileged_pods_with_a_warning() -> None:
    answer = review(pod(container(privileged=True, gpu=1)), privileged="allow-unlimited")
    assert answer.allowed
    assert answer.warnings == ["container a is privileged, its GPU limits are not enforced"]


def test_a_device_pod_with_a_node_is_denied_unless_we_have_no_name() -> None:
    assert review(pod(container(gpu=1), nodeName="n1")).message == "pod has node assigned"
    assert review(pod(container(gpu=1), nodeName="n1"), scheduler_name="").allowed


def test_a_pod_without_containers_is_denied() -> None:
    answer = review(pod())
    assert (answer.allowed, answer.code, answer.message) == (False, 403, "pod has no containers")


def gpu(mem: int, count: int = 1) -> dict[str, int]:
    return {"gpu": count, "gpumem": mem}


@pytest.mark.parametrize(
    ("limits", "quota", "allowed"),
    [
        pytest.param(
            [gpu(2000, count=2) | {"gpucores": 100}], {"gpumem": "4000", "gpucores": "200"}, True, id="43"
        ),
        pytest.param([gpu(3000, count=2)], {"gpumem": "4000"}, False, id="44"),
        pytest.param([{"gpu": 1}], {"gpumem": "1500"}, True, id="45"),
        pytest.param([gpu(500)], {"gpumem": "0"}, False, id="46"),
        pytest.param([gpu(3000), gpu(3000)], {"gpumem": "6000"}, True, id="A22"),
        pytest.param([{"gpu": 1, "gpucores": 10}], {"gpucores": "0"}, False, id="A23"),
        pytest.param([gpu(3000), gpu(3000)], {"gpumem": "4000"}, False, id="two containers add up"),
        pytest.param([gpu(500, count=2)], {"gpumem": "999"}, False, id="two cards add up"),
    ],
)
def test_quota_at_admission(limits: list[dict[str, Any]], quota: dict[str, str], allowed: bool) -> None:
    answer = review(pod(*(container(f"c{at}", **one) for at, one in enumerate(limits))), quota=quota)
    assert answer.allowed is allowed
    assert allowed or answer.message == "exceeding resource quota"


@pytest.mark.parametrize(
    ("first", "app", "sidecar", "allowed"),
    [
        pytest.param(8000, 3000, False, False, id="A21"),
        pytest.param(3000, 4000, True, False, id="A25"),
        pytest.param(5000, 6000, False, True, id="the larger of both counts"),
        pytest.param(2000, 4000, True, True, id="a sidecar adds up"),
    ],
)
def test_quota_at_admission_follows_the_effective_request(
    first: int, app: int, sidecar: bool, allowed: bool
) -> None:
    init = container("first", gpu=1, gpumem=first) | ({"restartPolicy": "Always"} if sidecar else {})
    answer = review(pod(container("app", gpu=1, gpumem=app), initContainers=[init]), quota={"gpumem": "6000"})
    assert answer.allowed is allowed
    assert allowed or answer.message == "exceeding resource quota"


def test_a_refused_user_is_told_how_much_the_quota_leaves() -> None:
    answer = review(pod(container(gpu=2, gpumem=3000)), quota={"gpumem": "4000"})
    assert list(answer.warnings) == [
        "nvidia.com/gpumem: 6000 asked, 4000 left of the quota limits.nvidia.com/gpumem in namespace q"
    ]


def test_a_refused_user_is_told_what_to_do_about_a_privileged_container() -> None:
    (advice,) = review(pod(container("a", privileged=True, gpu=1))).warnings
    assert "drop privileged" in advice
    assert "--admission-privileged=allow-unlimited" in advice


def test_the_namespace_of_the_request_decides_not_that_of_the_object() -> None:
    made = pod(container(gpu=1, gpumem=500))
    made["metadata"]["namespace"] = "elsewhere"
    assert not review(made, quota={"gpumem": "100"}, namespace="q").allowed


@pytest.mark.parametrize(
    "weights",
    [
        "slot=1",
        "slot=1,memory=3",
        "slot=0,core=0,memory=0",
        "slot=1,slot=1,core=1",
        "slot=x,core=1,memory=1",
    ],
)
def test_bad_weights_are_denied_with_the_name_of_the_annotation(weights: str) -> None:
    answer = review(pod(container(gpu=1), annotations={"hami.io/device-scoring-weights": weights}))
    assert not answer.allowed
    assert "hami.io/device-scoring-weights" in answer.message


def test_an_unknown_policy_is_a_warning_that_names_the_known_ones() -> None:
    annotations = {"hami.io/node-scheduler-policy": "binpak", "hami.io/gpu-scheduler-policy": "spread, fast"}
    answer = review(pod(container(gpu=1), annotations=annotations))
    assert answer.allowed
    assert "'binpak'" in answer.warnings[0]
    assert "binpack, spread" in answer.warnings[0]
    assert "'fast'" in answer.warnings[1]


@pytest.mark.parametrize(
    ("limits", "mode", "words"),
    [
        ({"gpucores": 150}, "hami-core", ["nvidia.com/gpucores 150", "acts as 100"]),
        ({}, "hami-core, mgi", ["nvidia.com/vgpu-mode", "'mgi'", "hami-core, mig, mps"]),
    ],
)
def test_a_request_that_means_something_else_is_admitted_with_a_warning(
    limits: dict[str, Any], mode: str, words: list[str]
) -> None:
    answer = review(pod(container(gpu=1, **limits), annotations={"nvidia.com/vgpu-mode": mode}))
    assert answer.allowed
    (warning,) = answer.warnings
    assert [word for word in words if word not in warning] == []


@pytest.mark.parametrize("limits", [{"gpu": "1500m"}, {"gpu": 1, "gpumem": "9999999999999"}, {"gpu": -1}])
def test_a_request_that_no_node_could_serve_is_denied(limits: dict[str, Any]) -> None:
    answer = review(pod(container(**limits)))
    assert (answer.allowed, answer.code) == (False, 422)
    assert "a" in answer.message


@pytest.mark.parametrize(
    "obj",
    [
        None,
        {},
        {"kind": "Deployment", "metadata": {}, "spec": {}},
        {"metadata": [], "spec": {}},
        {"metadata": {"annotations": {"a": 1}}, "spec": {}},
        {"metadata": {}, "spec": {"containers": "none"}},
        {"metadata": {}, "spec": {"containers": [5]}},
    ],
)
def test_what_is_no_pod_is_refused_with_400(obj: Any) -> None:
    answer = review(obj)
    assert (answer.allowed, answer.code) == (False, 400)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(
    st.fixed_dictionaries(
        {
            "metadata": st.dictionaries(st.sampled_from(["name", "annotations", "labels"]), JSON, max_size=3),
            "spec": st.dictionaries(
                st.sampled_from(["containers", "initContainers", "schedulerName", "nodeName"]),
                JSON
                | st.lists(
                    st.dictionaries(
                        st.sampled_from(["name", "resources", "env", "securityContext"]),
                        JSON | st.just({"limits": {"nvidia.com/gpu": "1"}}),
                    ),
                    max_size=2,
                ),
            ),
        }
    )
)
def test_any_object_gets_an_answer(obj: dict[str, Any]) -> None:
    answer = review(obj)
    assert answer.allowed or answer.code in (400, 403, 422)


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_review_is_answered_in_its_version(version: str) -> None:
    body = {
        "apiVersion": f"admission.k8s.io/{version}",
        "kind": "AdmissionReview",
        "request": {"uid": "u7", "operation": "CREATE", "object": pod(container())},
    }
    request = decode_review(json.dumps(body).encode())
    answer = json.loads(encode_review(request.uid, AdmissionAnswer(True), request.api_version))
    assert answer["apiVersion"] == f"admission.k8s.io/{version}"
    assert answer["response"]["uid"] == "u7"


def test_a_review_of_an_unknown_version_is_refused() -> None:
    with pytest.raises(ObjectError):
        decode_review(b'{"apiVersion":"admission.k8s.io/v9","request":{"uid":"u"}}')
