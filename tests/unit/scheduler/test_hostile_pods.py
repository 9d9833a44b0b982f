"""Pods made to hurt: an exact answer within bounds, whatever they hold."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from hami.protocol.admission import AdmissionRequest
from hami.protocol.errors import ObjectError
from hami.scheduler.core.answers import PlacementError
from hami.scheduler.core.requests import MAX_CONTAINERS
from hami.scheduler.edge.routes import scheduler_routes
from hami.scheduler.edge.webhook import (
    MAX_ANNOTATION_CHARS,
    MAX_REVIEWED_CONTAINERS,
    Webhook,
    WebhookSettings,
)
from hami.vendors.selection import MAX_STEERING_TEXT

DEVICES = {"limits": {"nvidia.com/gpu": "1"}}


@pytest.fixture
def webhook(lab: Any) -> Webhook:
    return Webhook(lab.state, lab.profiles(), WebhookSettings("hami-scheduler"))


def create(pod: dict[str, Any] | None, operation: str = "CREATE") -> AdmissionRequest:
    return AdmissionRequest(uid="u", operation=operation, namespace="ns", object=pod)


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def test_the_depth_of_what_is_not_looked_at_does_not_matter(webhook: Webhook, lab: Any) -> None:
    deep = nested(10_000)
    containers = [lab.container(x=deep, env=[{"name": "a", "valueFrom": deep}])]
    answer = webhook.review(create({**lab.pod("p", *containers), "x": deep}))
    assert answer.allowed
    assert [each["path"] for each in answer.patch] == [
        "/spec/containers/0/resources/limits/nvidia.com~1gpucores",
        "/spec/schedulerName",
    ]


def test_annotations_beyond_what_the_api_server_takes_are_denied(webhook: Webhook, lab: Any) -> None:
    most = {"a": "x" * (MAX_ANNOTATION_CHARS - 1)}
    assert webhook.review(create(lab.pod("p", annotations=most))).allowed
    answer = webhook.review(create(lab.pod("p", annotations={**most, "b": ""})))
    assert (answer.allowed, answer.code) == (False, 400)
    assert answer.message == "metadata.annotations: may not be more than 262144 bytes"


def test_a_review_never_changes_what_it_was_given(webhook: Webhook, lab: Any) -> None:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/priority": "1"}
    forged = {"hami.io/vgpu-node": "n1", "other": "x"}
    main = {"name": "a", "env": [{"name": "b"}], "resources": {"limits": limits, "requests": {"cpu": "1"}}}
    pod = lab.pod("p", main, lab.container("c", gpus=None), inits=[lab.container("i")], annotations=forged)
    before = json.dumps(pod)
    assert webhook.review(create(pod)).patch
    assert json.dumps(pod) == before


def test_a_pod_of_more_containers_than_are_reviewed_is_denied(webhook: Webhook) -> None:
    spec: dict[str, Any] = {"containers": [{}] * MAX_REVIEWED_CONTAINERS, "initContainers": [{}]}
    answer = webhook.review(create({"metadata": {}, "spec": spec}))
    assert (answer.allowed, answer.code) == (False, 400)
    assert answer.message == "the pod has 2001 containers, at most 2000 are reviewed"


@pytest.mark.parametrize("operation", ["UPDATE", "DELETE", "CONNECT"])
def test_existing_pods_are_left_alone(webhook: Webhook, lab: Any, operation: str) -> None:
    held = lab.pod("p", annotations={"hami.io/vgpu-node": "n1"})
    assert webhook.review(create(held, operation)).patch == ()
    assert webhook.review(create(None, operation)).allowed


def test_a_pod_with_devices_and_too_many_containers_is_denied_and_fits_nowhere(
    webhook: Webhook, lab: Any
) -> None:
    lab.node("n1", lab.card("a"))
    inits = [lab.container(f"i{at}") for at in range(MAX_CONTAINERS)]
    pod = lab.pod("p", inits=inits)
    text = f"a pod with devices has at most {MAX_CONTAINERS} containers, this one has {MAX_CONTAINERS + 1}"
    answer = webhook.review(create(pod))
    assert (answer.allowed, answer.code, answer.message) == (False, 422, text)
    assert lab.refused(pod) == {"n1": text}
    assert webhook.review(create(lab.pod("p", inits=inits[1:]))).allowed


def test_a_pod_without_devices_may_have_any_number_of_containers(webhook: Webhook, lab: Any) -> None:
    plain = lab.container("c", gpus=None)
    assert webhook.review(create(lab.pod("p", *[plain] * (MAX_CONTAINERS + 1)))).allowed


@pytest.mark.parametrize("key", ["nvidia.com/use-gpuuuid", "hami.io/gpu-scheduler-policy"])
def test_an_annotation_too_long_to_steer_by_is_denied_and_fits_nowhere(
    webhook: Webhook, lab: Any, key: str
) -> None:
    lab.node("n1", lab.card("a"))
    pod = lab.pod("p", annotations={key: "x," * MAX_STEERING_TEXT})
    text = f"annotation {key} has {2 * MAX_STEERING_TEXT} characters, at most {MAX_STEERING_TEXT} are read"
    answer = webhook.review(create(pod))
    assert (answer.allowed, answer.code, answer.message) == (False, 422, text)
    assert lab.refused(pod) == {"n1": text}


@pytest.mark.parametrize("weight", ["9" * 19, "9" * 400, "9" * 5000, "1_0", "１"])
def test_a_weight_beyond_int64_is_refused(lab: Any, weight: str) -> None:
    annotations = {"hami.io/device-scoring-weights": f"slot={weight},core=1,memory=1"}
    with pytest.raises(PlacementError, match='"slot" weight must be an integer') as refused:
        lab.request(lab.pod("p", annotations=annotations))
    assert len(str(refused.value)) < 500


def test_the_largest_weights_place_a_pod(lab: Any) -> None:
    lab.node("n1", lab.card("a"))
    text = ",".join(f"{name}={2**63 - 1}" for name in ("slot", "core", "memory"))
    pod = lab.pod("p", lab.container(mem=10), annotations={"hami.io/device-scoring-weights": text})
    assert lab.placed(pod) == ("n1", [["a"]])


@pytest.mark.parametrize("text", ["x" * 10**6, ",".join("x" * 1000 for _ in range(1000))])
def test_answers_quote_only_the_start_of_long_texts(webhook: Webhook, lab: Any, text: str) -> None:
    for pod in (
        {**lab.pod("p"), "kind": text},
        lab.pod("p", lab.container(text, gpus=0)),
        lab.pod("p", annotations={"hami.io/device-scoring-weights": text}),
        lab.pod("p", annotations={"hami.io/node-scheduler-policy": text[:10_000]}),
        lab.pod("p", annotations={"hami.io/gpu-scheduler-policy": text[:10_000]}),
    ):
        answer = webhook.review(create(pod))
        assert len(answer.message) + sum(map(len, answer.warnings)) <= 4096


async def test_a_fault_of_ours_denies_with_an_answer(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_request: AdmissionRequest) -> None:
        raise ValueError("secret")

    monkeypatch.setattr(webhook, "review", broken)
    verbs = SimpleNamespace(filter=None, simulate=None, bind=None)
    application = scheduler_routes(verbs, webhook, {}, 1 << 20)  # type: ignore[arg-type]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps({"request": {"uid": "u", "object": {}}}).encode()}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/webhook", "method": "POST", "client": ("192.0.2.1", 1)}
    await application(scope, receive, send)
    assert sent[0]["status"] == 200
    response = json.loads(sent[1]["body"])["response"]
    assert response == {
        "uid": "u",
        "allowed": False,
        "status": {"code": 500, "message": "internal error: ValueError"},
    }


def test_more_names_than_any_cluster_has_nodes_are_refused(lab: Any) -> None:
    names = json.dumps([str(at) for at in range(50_001)]).encode()
    with pytest.raises(ObjectError, match="50001 node names"):
        lab.state.candidates_json(names)
    assert lab.state.candidates_json(b'["a","a","\\u0000","' + b"x" * 1000 + b'"]').names[0] == "a"
