"""Names, objects and images (chart.md §1, §2, §20)."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from chart_harness import CHART, Refused, notes, render

NAMES = {
    ("ServiceAccount", "hami-scheduler"),
    ("ClusterRole", "hami-scheduler"),
    ("ClusterRoleBinding", "hami-scheduler"),
    ("ClusterRoleBinding", "hami-scheduler-kube"),
    ("ClusterRoleBinding", "hami-scheduler-volume"),
    ("Role", "hami-scheduler"),
    ("RoleBinding", "hami-scheduler"),
    ("ConfigMap", "hami-scheduler"),
    ("ConfigMap", "hami-scheduler-device"),
    ("Deployment", "hami-scheduler"),
    ("Service", "hami-scheduler"),
    ("MutatingWebhookConfiguration", "hami-webhook"),
    ("ServiceAccount", "hami-device-plugin"),
    ("ClusterRole", "hami-device-plugin-monitor"),
    ("ClusterRoleBinding", "hami-device-plugin"),
    ("ConfigMap", "hami-device-plugin"),
    ("DaemonSet", "hami-device-plugin"),
    ("Service", "hami-device-plugin-monitor"),
}
"""Those of HAMi's 25 objects that are not of the certgen jobs."""
JOBS = {
    ("ServiceAccount", "hami-admission"),
    ("ClusterRole", "hami-admission"),
    ("ClusterRoleBinding", "hami-admission"),
    ("Role", "hami-admission"),
    ("RoleBinding", "hami-admission"),
    ("Job", "hami-admission-create"),
    ("Job", "hami-admission-patch"),
}
OURS = {
    ("Service", "hami-scheduler-webhook"),
    ("RoleBinding", "hami-scheduler-authentication"),
    ("ValidatingAdmissionPolicy", "hami-allocation-keys"),
    ("ValidatingAdmissionPolicyBinding", "hami-allocation-keys"),
}


def test_case_1_the_objects_of_a_default_installation() -> None:
    assert render().names == NAMES | OURS
    with_jobs = render({"scheduler.patch.enabled": True})
    assert with_jobs.names == NAMES | OURS | JOBS
    assert len(NAMES | JOBS) == 25


@pytest.mark.parametrize(
    ("release", "prefix"),
    [pytest.param("gpu", "gpu-hami", id="2"), pytest.param("my-hami-x", "my-hami-x", id="3")],
)
def test_names_follow_the_release(release: str, prefix: str) -> None:
    rendered = render(release=release)
    own = {name for _, name in rendered.names}
    assert {name[: len(prefix) + 1] for name in own} == {f"{prefix}-"}
    assert rendered.deployment["metadata"]["name"] == f"{prefix}-scheduler"


def test_every_object_carries_the_common_labels() -> None:
    everything: dict[str, Any] = {
        "scheduler.patch.enabled": True,
        "mockDevicePlugin.enabled": True,
        "dashboard.enabled": True,
        "networkPolicy.enabled": True,
        "resourceQuota.enabled": True,
        "openshift.enabled": True,
        "scheduler.replicas": 2,
        "devicePlugin.runtimeClassName": "nvidia",
        "devicePlugin.createRuntimeClass": True,
    }
    rendered = render(everything)
    for found in rendered.objects:
        labels = found["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "hami", found["metadata"]["name"]
        assert labels["app.kubernetes.io/instance"] == "hami"
        assert labels["helm.sh/chart"].startswith("hami-")
    for spec in [item for item in rendered.objects if item["kind"] in ("Deployment", "DaemonSet", "Job")]:
        assert spec["spec"]["template"]["metadata"]["labels"]["hami.io/webhook"] == "ignore"


def test_case_6_one_registry_for_every_image() -> None:
    rendered = render(
        {
            "global.imageRegistry": "reg.local/x",
            "mockDevicePlugin.enabled": True,
            "scheduler.patch.enabled": True,
            "devicePlugin.gpuOperatorToolkitReady.enabled": True,
        }
    )
    images = rendered.images()
    assert len(images) == 9
    assert all(image.startswith("reg.local/x/") for image in images)


def test_case_7_the_tag_of_one_image() -> None:
    rendered = render({"scheduler.extender.image.tag": " abc "})
    assert [image for image in rendered.images() if image.endswith(":abc")] == [rendered.extender["image"]]


def test_pull_secrets_of_all_images_are_used_once() -> None:
    rendered = render(
        {
            "global.imagePullSecrets": ["all"],
            "scheduler.kubeScheduler.image.pullSecrets": ["kube", "all"],
            "devicePlugin.monitor.image.pullSecrets": ["monitor"],
        }
    )
    assert rendered.pod["imagePullSecrets"] == [{"name": "all"}, {"name": "kube"}]
    assert rendered.node_pod["imagePullSecrets"] == [{"name": "all"}, {"name": "monitor"}]


def test_case_31_the_mock_plugin() -> None:
    added = render({"mockDevicePlugin.enabled": True}).names - render().names
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "DaemonSet")
    assert added == {(kind, "hami-mock-device-plugin") for kind in kinds}


def test_case_24_service_monitors_need_their_kind() -> None:
    values = {"prometheus.enabled": True}
    assert render(values).of("ServiceMonitor") == []
    monitors = render(values, "--api-versions", "monitoring.coreos.com/v1/ServiceMonitor").of(
        "ServiceMonitor"
    )
    assert {item["spec"]["endpoints"][0]["port"] for item in monitors} == {"monitor", "monitorport"}
    assert len(monitors) == 2
    # else the labels of the GPU pods would be renamed to exported_namespace, exported_pod, exported_container
    assert all(point["honorLabels"] for item in monitors for point in item["spec"]["endpoints"])


def test_several_replicas_get_a_disruption_budget() -> None:
    (budget,) = render({"scheduler.replicas": 2}).of("PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    values = {"scheduler.replicas": 2, "scheduler.podDisruptionBudget.enabled": False}
    assert render(values).of("PodDisruptionBudget") == []


def test_network_policies_open_only_the_own_ports() -> None:
    peer = {"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}
    policies = render({"networkPolicy.enabled": True, "networkPolicy.metricsFrom": [peer]}).of(
        "NetworkPolicy"
    )
    rules = {item["metadata"]["name"]: item["spec"]["ingress"] for item in policies}
    assert [rule["ports"][0]["port"] for rule in rules["hami-scheduler"]] == ["https", "metrics"]
    assert [rule.get("from") for rule in rules["hami-scheduler"]] == [None, [peer]]
    assert [rule["ports"][0]["port"] for rule in rules["hami-device-plugin"]] == ["metrics"]


def test_the_network_policy_lets_prometheus_reach_every_port_of_its_service_monitor() -> None:
    values = {"networkPolicy.enabled": True, "devicePlugin.hostPIDBroker.enabled": True}
    rendered = render(values)
    (rule,) = rendered.get("NetworkPolicy", "hami-device-plugin")["spec"]["ingress"]
    served = rendered.get("Service", "hami-device-plugin-monitor")["spec"]["ports"]
    assert {port["port"] for port in rule["ports"]} == {port["targetPort"] for port in served}


def test_without_device_plugin_nothing_of_it_is_left() -> None:
    names = render({"devicePlugin.enabled": False}).names
    assert not [name for _, name in names if "device-plugin" in name]


def test_names_that_kubernetes_could_not_take_are_refused() -> None:
    with pytest.raises(Refused, match="longer than 41 characters"):
        render({"fullnameOverride": "a" * 42})


def test_names_of_services_and_jobs_fit_with_the_longest_name() -> None:
    values = {"fullnameOverride": "a" * 41, "scheduler.patch.enabled": True, "mockDevicePlugin.enabled": True}
    rendered = render(values, release="b" * 53)
    # a Service's name is a DNS label, and a Job's becomes a label of its pods
    names = [item["metadata"]["name"] for kind in ("Service", "Job") for item in rendered.of(kind)]
    assert max(map(len, names)) == 63
    assert max(len(value) for item in rendered.objects for value in item["metadata"]["labels"].values()) <= 63


@pytest.mark.parametrize("key", ["global.imagePullSecrets", "allocationPolicy.allowedUsers"])
def test_a_list_may_be_null(key: str) -> None:
    assert render({key: None}).objects == render().objects


@pytest.mark.parametrize("tag", ["", None])
def test_an_image_without_a_tag_is_refused_in_words(tag: str | None) -> None:
    with pytest.raises(Refused, match=r"image has no tag: set global\.imageTag"):
        render({"global.imageTag": tag})


ALERTS = {"prometheus.alerts.enabled": True, "prometheus.alerts.labels": {"team": "gpu"}}
RULES = ("--api-versions", "monitoring.coreos.com/v1/PrometheusRule")


def test_alerts_are_the_rules_file_where_the_cluster_has_that_kind() -> None:
    assert render({}, *RULES).of("PrometheusRule") == []
    assert render(ALERTS).of("PrometheusRule") == []
    (found,) = render(ALERTS, *RULES).of("PrometheusRule")
    assert found["metadata"]["name"] == "hami-alerts"
    assert found["metadata"]["labels"]["team"] == "gpu"
    assert found["spec"] == yaml.safe_load((CHART / "files/alerts.yaml").read_text("utf-8"))


def test_notes_say_when_prometheus_operator_is_missing() -> None:
    assert "prometheus.alerts.enabled=true has no effect: the cluster has no PrometheusRule" in notes(ALERTS)
    assert "prometheus.enabled=true has no effect" in notes({"prometheus.enabled": True})
    assert "has no effect" not in notes()


def test_notes_tell_what_to_check_and_what_is_missing() -> None:
    text = notes()
    assert "nvidia.com/gpu: 1" in text
    assert "WARNING" not in text
    assert "ValidatingAdmissionPolicy" in notes(kube="v1.29.3")
    assert "can forge" in notes({"allocationPolicy.enabled": False})
    assert "WARNING" not in notes({"devices.iluvatar.enabled": True})
    topology = {"scheduler.defaultSchedulerPolicy.gpuSchedulerPolicy": "topology-aware"}
    assert "WARNING" not in notes(topology)
    assert "remoteExtender" in notes({"scheduler.kubeScheduler.enabled": False})
