"""The chart on the real cluster, beside the installation of the other tests: scheduler and webhook only."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import Cluster, is_ready, until

CHART = Path(__file__).resolve().parents[2] / "charts/hami"
NAMESPACE = "chart-system"
PODS = 50
VALUES: dict[str, Any] = {
    "global": {"imageRegistry": "hami.local"},
    "fullnameOverride": "chart-hami",
    "schedulerName": "chart-scheduler",
    "scheduler": {
        "replicas": 2,
        "extender": {"image": {"repository": "hami", "tag": "dev"}},
        "service": {"type": "ClusterIP"},
        "admissionWebhook": {"objectSelector": {"matchLabels": {"chart": "mine"}}, "failurePolicy": "Ignore"},
    },
    "devicePlugin": {"enabled": False},
    # this policy would refuse the writes of the other installation
    "allocationPolicy": {"enabled": False},
}


def _helm(cluster: Cluster, *arguments: str, text: str | None = None) -> str:
    done = cluster.run("helm", "--namespace", NAMESPACE, *arguments, text=text, limit_s=180.0)
    assert done.code == 0, done.err
    return done.out


@pytest.fixture(scope="module")
def chart(cluster: Cluster) -> Iterator[Cluster]:
    """The chart, installed and ready; nothing of it is left behind."""
    cluster.kubectl("create", "namespace", NAMESPACE)
    try:
        _helm(
            cluster,
            *("install", "chart", str(CHART), "--values", "-", "--wait", "--timeout", "90s"),
            text=json.dumps(VALUES),
        )
        yield cluster
        _helm(cluster, "uninstall", "chart", "--wait")
        kinds = "clusterrole,clusterrolebinding,mutatingwebhookconfiguration"
        assert "chart-hami" not in cluster.kubectl("get", kinds, "-o", "name")
    finally:
        cluster.run("helm", "--namespace", NAMESPACE, "uninstall", "chart", "--ignore-not-found")
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait", "--timeout=90s")


def _leader(cluster: Cluster) -> str:
    found = cluster.items("pods", NAMESPACE, "hami.io/scheduler-role=leader")
    return str(found[0]["metadata"]["name"]) if found else ""


def _bundle(cluster: Cluster) -> str:
    hook = cluster.get("mutatingwebhookconfiguration", "chart-hami-webhook")
    return str(hook["webhooks"][0]["clientConfig"].get("caBundle", ""))


def _pod(number: int) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "100"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"p{number}", "namespace": NAMESPACE, "labels": {"chart": "mine"}},
        "spec": {
            "nodeSelector": {"no": "node"},
            "containers": [{"name": "main", "image": "none", "resources": {"limits": limits}}],
        },
    }


def test_case_35_pods_created_while_the_leader_is_killed_all_reach_the_scheduler(chart: Cluster) -> None:
    until("a leader and its CA bundle", lambda: _leader(chart) and _bundle(chart))
    leader = _leader(chart)
    kill = ("delete", "pod", leader, "--namespace", NAMESPACE, "--grace-period=1", "--wait=false")
    killer = threading.Timer(1.0, lambda: chart.run("kubectl", *kill))
    killer.start()
    try:
        for first in range(0, PODS, 5):
            chart.create(*(_pod(number) for number in range(first, first + 5)))
    finally:
        killer.join()
    pods = chart.items("pods", NAMESPACE, "chart=mine")
    assert len(pods) == PODS
    assert {item["spec"]["schedulerName"] for item in pods} == {"chart-scheduler"}
    until("another leader", lambda: _leader(chart) not in ("", leader))
    chart.kubectl("delete", "pods", "-l", "chart=mine", "-n", NAMESPACE, "--grace-period=0", "--force")


def test_case_36_a_deleted_tls_secret_comes_back_and_is_trusted(chart: Cluster) -> None:
    until("a leader and its CA bundle", lambda: _leader(chart) and _bundle(chart))
    until(
        "both pods are ready",
        lambda: [is_ready(each) for each in chart.items("pods", NAMESPACE)] == [True] * 2,
    )
    before = _bundle(chart)
    names = {item["metadata"]["name"] for item in chart.items("pods", NAMESPACE)}
    chart.kubectl("delete", "secret", "chart-hami-scheduler-tls", "--namespace", NAMESPACE)
    until("another CA bundle", lambda: _bundle(chart) not in ("", before))

    def taken() -> bool:
        chart.create(_pod(1))
        name = chart.get("pod", "p1", NAMESPACE)["spec"]["schedulerName"]
        chart.kubectl("delete", "pod", "p1", "--namespace", NAMESPACE, "--grace-period=0", "--force")
        return bool(name == "chart-scheduler")

    until("the webhook is trusted again", taken)
    pods = chart.items("pods", NAMESPACE)
    assert {item["metadata"]["name"] for item in pods} == names
    assert not any(status["restartCount"] for item in pods for status in item["status"]["containerStatuses"])
