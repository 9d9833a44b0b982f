"""`hami top` and `hami simulate`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import yaml

from hami.answers.collect import flags_of, settings_of
from hami.answers.errors import AnswerError, MetricsError
from hami.answers.render import columns, simulation_lines, top_lines
from hami.answers.simulate import pods_of_spec, simulate
from hami.answers.snapshot import CardUse, ContainerUse, Settings
from hami.answers.top import Share, top
from hami.answers.usage import read_usage

Builder = Any

DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: team}
spec:
  replicas: 3
  template:
    spec:
      containers:
      - name: main
        resources: {limits: {nvidia.com/gpu: 1, nvidia.com/gpumem: 3000}}
---
apiVersion: v1
kind: Pod
metadata: {name: single}
spec:
  containers:
  - name: main
    resources: {limits: {nvidia.com/gpu: 1, nvidia.com/gpumem: 8000}}
"""


def shared(cluster: Builder) -> None:
    """Two nodes; a pod holds 2000 MiB and uses 1000."""
    cluster.node("n1", cards=2)
    cluster.node("n2", health=False)
    cluster.holder("p", "n1", "n1-0,NVIDIA,2000,30", namespace="team")
    cluster.extra["containers_use"] = [ContainerUse("team", "p", "main", "n1-0", 1000 << 20, 12.0)]
    cluster.extra["cards_use"] = [CardUse("n1-0", 1500 << 20, 40.0)]


def test_the_tables_agree_on_what_is_granted_and_used(cluster: Builder) -> None:
    shared(cluster)
    found = top(cluster.replay())
    (total,) = found.cluster
    assert (total.cards, total.healthy, total.pods) == (3, 2, 1)
    assert (total.slots, total.memory, total.cores) == (Share(1, 30), Share(2000, 24000), Share(30, 300))
    assert total.used_memory == 1500
    assert [(row.node, row.memory, row.utilization) for row in found.nodes] == [
        ("n1", Share(2000, 16000), 40.0),
        ("n2", Share(0, 8000), None),
    ]
    card = found.cards[0]
    assert (card.id, card.pods, card.used_memory) == ("n1-0", ("team/p",), 1500)
    (pod,) = found.pods
    assert (pod.memory, pod.cores, pod.used_memory, pod.utilization) == (2000, 30, 1000, 12.0)


def test_a_namespace_limits_the_pods_and_not_what_is_granted(cluster: Builder) -> None:
    shared(cluster)
    found = top(cluster.replay(), "other")
    assert found.pods == ()
    assert found.cluster[0].memory == Share(2000, 24000)


def test_tables_are_aligned_and_unknown_use_is_a_dash(cluster: Builder) -> None:
    shared(cluster)
    lines = top_lines(top(cluster.replay()), "cards")
    assert lines[0].split()[:2] == ["VENDOR", "CARDS"]
    last = next(line for line in lines if line.startswith("n2"))
    assert last.split() == [
        "n2",
        "n2-0",
        "NVIDIA-T4",
        "unhealthy",
        "0",
        "0/10",
        "0/8000",
        "0%",
        "0/100",
        "0%",
        "-",
        "-",
    ]
    assert columns(("A", "B"), [("long", "x"), ("y", "")]) == ["A     B", "long  x", "y"]


def test_usage_is_read_from_the_monitors_text() -> None:
    text = "\n".join(
        [
            'hami_vgpu_memory_used_bytes{namespace="t",pod="p",container="c",device_uuid="g"} 5e+06',
            'hami_container_device_utilization_ratio{namespace="t",pod="p",container="c",device_uuid="g"} 7',
            'hami_host_gpu_memory_used_bytes{device_uuid="g",node="n"} 9e+06',
            "something_else 1",
            "",
        ]
    )
    assert read_usage([text]) == ([ContainerUse("t", "p", "c", "g", 5e6, 7.0)], [CardUse("g", 9e6, 0.0)])


def test_what_is_no_metrics_text_is_refused() -> None:
    with pytest.raises(MetricsError, match="no metrics of a monitor"):
        read_usage(["<html>not found</html>"])


def test_settings_come_from_the_schedulers_command_line() -> None:
    words = ["scheduler", "--node-scheduler-policy=spread", "--gpu-scheduler-policy", "binpack"]
    words += ["--enable-ascend", "--node-label-selector=a=b", "--unknown=1"]
    assert settings_of(flags_of(words)) == Settings(
        node_policy="spread", card_policy="binpack", enable_ascend=True, node_selector={"a": "b"}
    )


# --- simulate ---------------------------------------------------------------------------------------------


def test_each_simulated_pod_sees_the_ones_before_it(cluster: Builder) -> None:
    cluster.node("n1")
    cluster.node("n2")
    found = simulate(cluster.replay(), pods_of_spec(DEPLOYMENT))
    assert [(one.pod, one.node) for one in found.pods] == [
        ("team/web-0", "n1"),
        ("team/web-1", "n1"),
        ("team/web-2", "n2"),
        ("default/single", ""),
    ]
    assert found.pods[0].cards == ("n1-0: 3000 MiB, 0 cores",)
    assert found.pods[3].reason == "2 nodes: 1/1 CardInsufficientMemory"
    lines = simulation_lines(found)
    assert lines[-1] == "3 of 4 pods fit"


def test_simulated_pods_go_through_admission(cluster: Builder) -> None:
    cluster.node("n1")
    cluster.quota("default", gpumem=100)
    spec = "kind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: c, resources: {limits: %s}}]}"
    refused = {
        "{nvidia.com/gpu: 0}": "invalid nvidia.com/gpu value 0",
        "{nvidia.com/gpu: 1, nvidia.com/gpumem: 200}": "exceeding resource quota; nvidia.com/gpumem: 200",
    }
    for limits, text in refused.items():
        (one,) = simulate(cluster.replay(), pods_of_spec(spec % limits)).pods
        assert one.reason.startswith("refused at admission: " + text)
    # the webhook adds the number of cards to a pod that names only memory
    (one,) = simulate(cluster.replay(), pods_of_spec(spec % "{nvidia.com/gpumem: 50}")).pods
    assert one.cards == ("n1-0: 50 MiB, 0 cores",)


def test_simulated_pods_meet_kube_schedulers_own_checks(cluster: Builder) -> None:
    cluster.node("n1", labels={"zone": "a"})
    cluster.node("n2", labels={"zone": "b"})
    spec = """
kind: Job
metadata: {name: j}
spec:
  parallelism: 2
  template:
    spec:
      nodeSelector: {zone: b}
      containers: [{name: c, resources: {limits: {nvidia.com/gpu: 1, cpu: 5}}}]
"""
    found = simulate(cluster.replay(), pods_of_spec(spec))
    assert [one.node for one in found.pods] == ["n2", ""]
    assert "kept away by kube-scheduler: Insufficient cpu" in found.pods[1].reason


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "holds no pod"),
        ("{", "not YAML"),
        ("- 1", "has no kind"),
        ("kind: Pod", "holds no pod"),
        ("kind: Service\nspec: {}", "holds no pod"),
        ("kind: Deployment\nspec: {replicas: 2}", "has no spec.template.spec"),
        ("kind: Deployment\nspec: {replicas: -1, template: {spec: {}}}", "asks for -1 pods"),
        ("kind: Deployment\nspec: {replicas: 100000, template: {spec: {}}}", "asks for 100000 pods"),
        ("a: &a [*a]", "nested more than"),
    ],
)
def test_a_spec_without_pods_is_refused(text: str, error: str) -> None:
    with pytest.raises(AnswerError, match=error):
        pods_of_spec(text)


def test_no_spec_however_broken_ends_in_anything_but_an_answer_or_a_refusal(cluster: Builder) -> None:
    cluster.node("n1")
    chance = random.Random(5)
    odd: list[Any] = [None, 1, "x", [], {}, [1], {"a": 1}, -5, True]

    def broken(value: Any) -> Any:
        if chance.random() < 0.08:
            return chance.choice(odd)
        if isinstance(value, dict):
            return {key: broken(one) for key, one in value.items()}
        return [broken(one) for one in value] if isinstance(value, list) else value

    good = {
        "kind": "Deployment",
        "metadata": {"name": "web", "annotations": {"nvidia.com/use-gputype": "T4"}},
        "spec": {
            "replicas": 2,
            "template": {
                "metadata": {"labels": {"a": "b"}},
                "spec": {
                    "nodeSelector": {"kubernetes.io/hostname": "n1"},
                    "tolerations": [{"key": "a", "operator": "Exists"}],
                    "initContainers": [{"name": "i", "restartPolicy": "Always"}],
                    "containers": [
                        {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1", "cpu": "1"}}}
                    ],
                },
            },
        },
    }
    answered = 0
    for _ in range(400):
        try:
            pods = pods_of_spec(yaml.safe_dump(broken(good)))
        except AnswerError:
            continue
        answered += len(simulate(cluster.replay(), pods).pods)
    assert answered > 50
