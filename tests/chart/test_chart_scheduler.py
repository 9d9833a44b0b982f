"""Scheduler, kube-scheduler, webhook, TLS and policy (chart.md §5-§7, §20)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_harness import Refused, notes, render

from hami.protocol.keys import VENDOR_KEYS, ascend_keys, iluvatar_keys, protected_annotations
from hami.vendors.config import parse_config

DURATION_FLAG = "--pod-max-in-unschedulable-pods-duration=20s"


@pytest.mark.parametrize(
    ("kube", "tag", "version"),
    [
        pytest.param("v1.31.2+k3s1", "v1.31.2", "v1", id="4"),
        ("v1.30.8-eks-2d5f260", "v1.30.8", "v1"),
        ("v1.32.0-rc.1", "v1.32.0", "v1"),
        ("v1.29.11-gke.1234", "v1.29.11", "v1"),
        ("v1.28.15+rke2r1", "v1.28.15", "v1"),
        ("v1.26.0", "v1.26.0", "v1"),
        ("1.25.9", "v1.25.9", "v1beta2"),
        ("v1.23.17", "v1.23.17", "v1beta2"),
    ],
)
def test_kube_scheduler_follows_the_version_of_the_cluster(kube: str, tag: str, version: str) -> None:
    rendered = render(kube=kube)
    assert rendered.kube_scheduler["image"] == f"registry.k8s.io/kube-scheduler:{tag}"
    assert rendered.kube_scheduler_config["apiVersion"] == f"kubescheduler.config.k8s.io/{version}"


def test_case_5_the_configuration_follows_the_tag_where_one_is_set() -> None:
    assert render(kube="1.25.9").kube_scheduler_config["apiVersion"].endswith("/v1beta2")
    rendered = render({"scheduler.kubeScheduler.image.tag": "v1.28.0"}, kube="1.25.9")
    assert rendered.kube_scheduler_config["apiVersion"].endswith("/v1")
    rendered = render({"scheduler.kubeScheduler.image.tag": "mirror"}, kube="1.25.9")
    assert rendered.kube_scheduler_config["apiVersion"].endswith("/v1beta2")


def test_clusters_that_are_too_old_are_refused() -> None:
    with pytest.raises(Refused, match=r">= 1\.23"):
        render(kube="1.22.17")
    with pytest.raises(Refused, match=r"before 1\.23 are not supported"):
        render({"scheduler.kubeScheduler.image.tag": "v1.21.2"})


def test_case_8_no_node_ports_without_node_port() -> None:
    service = render({"scheduler.service.type": "ClusterIP"}).get("Service", "hami-scheduler")
    assert not [port for port in service["spec"]["ports"] if "nodePort" in port]
    ports = render().get("Service", "hami-scheduler")["spec"]["ports"]
    assert [port["nodePort"] for port in ports] == [31998, 31993]


def test_case_9_labels_of_services() -> None:
    values = {"scheduler.service.labels": {"team": "a"}, "devicePlugin.service.labels": {"team": "b"}}
    rendered = render(values)
    assert rendered.get("Service", "hami-scheduler")["metadata"]["labels"]["team"] == "a"
    assert rendered.get("Service", "hami-device-plugin-monitor")["metadata"]["labels"]["team"] == "b"


def test_case_10_probes_without_kube_scheduler() -> None:
    rendered = render({"scheduler.kubeScheduler.enabled": False, "scheduler.livenessProbe": True})
    assert [item["name"] for item in rendered.pod["containers"]] == ["vgpu-scheduler-extender"]
    assert rendered.extender["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert ("ConfigMap", "hami-scheduler") not in rendered.names
    assert "--leader-elect=false" in rendered.extender["command"]
    selector = rendered.get("Service", "hami-scheduler")["spec"]["selector"]
    assert "hami.io/scheduler-role" not in selector, "nobody would get that label"


def test_several_replicas_need_somebody_who_holds_the_lease() -> None:
    with pytest.raises(Refused, match=r"scheduler\.replicas is 2"):
        render({"scheduler.kubeScheduler.enabled": False, "scheduler.replicas": 2})


def test_case_11_without_election_there_is_one_replica() -> None:
    rendered = render({"scheduler.leaderElect": False, "scheduler.replicas": 3})
    assert rendered.deployment["spec"]["replicas"] == 1
    assert "affinity" not in rendered.pod
    assert rendered.kube_scheduler_config["leaderElection"]["leaderElect"] is False
    assert rendered.extender["readinessProbe"]["httpGet"]["path"] == "/readyz", "which asks for no leader"


def test_case_12_nodes_by_label() -> None:
    command = render({"scheduler.nodeLabelSelector": {"zone": "a", "gpu": "on"}}).extender["command"]
    assert "--node-label-selector=gpu=on,zone=a" in command


def test_case_13_without_webhook() -> None:
    rendered = render({"scheduler.admissionWebhook.enabled": False})
    assert rendered.of("MutatingWebhookConfiguration") == []
    assert not [item for item in rendered.pod["volumes"] if item["name"] == "tls"]
    assert "--http_bind=0.0.0.0:80" in rendered.extender["command"]
    assert not [word for word in rendered.extender["command"] if "tls" in word or "cert_file" in word]
    (extender,) = rendered.kube_scheduler_config["extenders"]
    assert extender["urlPrefix"] == "http://127.0.0.1:80"
    assert extender["enableHTTPS"] is False
    ports = {port["name"]: port["containerPort"] for port in rendered.extender["ports"]}
    target = rendered.get("Service", "hami-scheduler")["spec"]["ports"][0]["targetPort"]
    assert ports[target] == 80
    assert rendered.pod["securityContext"]["sysctls"], "a user other than root listens on port 80"


def test_case_14_webhook_by_url() -> None:
    url = {"scheduler.admissionWebhook.customURL": {"enabled": True, "host": "10.0.0.5"}}
    rendered = render(url)
    (webhook,) = rendered.get("MutatingWebhookConfiguration", "hami-webhook")["webhooks"]
    assert webhook["clientConfig"] == {"url": "https://10.0.0.5:31998/webhook"}
    (hosts,) = [word for word in rendered.extender["command"] if word.startswith("--tls-hosts=")]
    assert "10.0.0.5" in hosts.removeprefix("--tls-hosts=").split(",")
    certificate = render({**url, "scheduler.certManager.enabled": True}).of("Certificate")[0]
    assert "10.0.0.5" in certificate["spec"]["ipAddresses"]


def test_case_15_namespaces_that_are_ignored() -> None:
    rendered = render({"scheduler.admissionWebhook.whitelistNamespaces": ["kube-system"]})
    (webhook,) = rendered.get("MutatingWebhookConfiguration", "hami-webhook")["webhooks"]
    assert webhook["namespaceSelector"]["matchExpressions"] == [
        {"key": "hami.io/webhook", "operator": "NotIn", "values": ["ignore"]},
        {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system"]},
    ]


def test_case_16_without_namespace_selector() -> None:
    rendered = render({"scheduler.admissionWebhook.manageNamespaceSelector": False})
    (webhook,) = rendered.get("MutatingWebhookConfiguration", "hami-webhook")["webhooks"]
    assert "namespaceSelector" not in webhook
    assert webhook["objectSelector"]["matchExpressions"]


def test_the_webhook_is_served_by_every_ready_replica() -> None:
    rendered = render({"scheduler.replicas": 2})
    (webhook,) = rendered.get("MutatingWebhookConfiguration", "hami-webhook")["webhooks"]
    service = rendered.get("Service", webhook["clientConfig"]["service"]["name"])
    assert "hami.io/scheduler-role" not in service["spec"]["selector"]
    assert webhook["clientConfig"]["service"]["port"] == service["spec"]["ports"][0]["port"] == 443
    assert webhook["admissionReviewVersions"] == ["v1", "v1beta1"]
    labels = rendered.deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (hosts,) = [word for word in rendered.extender["command"] if word.startswith("--tls-hosts=")]
    assert f"{service['metadata']['name']}.kube-system.svc" in hosts
    leader = rendered.get("Service", "hami-scheduler")["spec"]["selector"]
    assert leader["hami.io/scheduler-role"] == "leader"


def test_case_17_cert_manager() -> None:
    rendered = render({"scheduler.certManager.enabled": True, "scheduler.patch.enabled": True})
    assert {
        ("Certificate", "hami-scheduler-serving-cert"),
        ("Issuer", "hami-scheduler-selfsigned-issuer"),
    } < set(rendered.names)
    assert rendered.of("Job") == []
    notes_of = rendered.get("MutatingWebhookConfiguration", "hami-webhook")["metadata"]["annotations"]
    assert notes_of == {"cert-manager.io/inject-ca-from": "kube-system/hami-scheduler-serving-cert"}
    spec = rendered.of("Certificate")[0]["spec"]
    assert "127.0.0.1" in spec["ipAddresses"]
    assert "hami-scheduler-webhook.kube-system.svc" in spec["dnsNames"]
    assert "--cert_file=/tls/tls.crt" in rendered.extender["command"]


@pytest.mark.parametrize("choice", [None, True, False])
def test_case_43_who_makes_the_certificate(choice: bool | None) -> None:
    rendered = render({"scheduler.patch.enabled": choice})
    jobs = {item["metadata"]["name"] for item in rendered.of("Job")}
    assert jobs == ({"hami-admission-create", "hami-admission-patch"} if choice else set())
    own = [word for word in rendered.extender["command"] if word.startswith("--tls-secret=")]
    assert own == ([] if choice else ["--tls-secret=kube-system/hami-scheduler-tls"])
    mounted = [item for item in rendered.extender["volumeMounts"] if item["mountPath"] == "/tls"]
    assert bool(mounted) == bool(choice)
    secrets = [
        rule for rule in rendered.get("Role", "hami-scheduler")["rules"] if "secrets" in rule["resources"]
    ]
    assert bool(secrets) == (not choice)


def test_case_26_a_device_configuration_of_ones_own() -> None:
    text = "nvidia:\n  resourceCountName: x.io/gpu\n"
    rendered = render({"device-config.content": text})
    assert rendered.device_config == text
    assert "x.io/gpu" in rendered.managed
    assert "nvidia.com/gpu" not in rendered.managed


def test_a_device_configuration_that_is_none_is_refused() -> None:
    with pytest.raises(Refused, match=r"device-config\.content is not a YAML mapping"):
        render({"device-config.content": "nvidia: [\n"})


def test_our_programs_read_the_device_configuration() -> None:
    config = parse_config(render().device_config)
    assert config.warnings == ()
    assert config.nvidia.split_count == 10
    assert config.nvidia.default_count == 1
    assert len(config.nvidia.mig_allowlist) == 9
    assert [chip.chip_name for chip in config.vnpus.chips] == [
        *("910A", "910B2", "910B3", "910B4-1", "910B4", "310P3", "Ascend910"),
    ]
    assert config.vnpus.chips[-1].super_pod
    assert len(config.iluvatars) == 4


def test_case_25_ascend_and_iluvatar() -> None:
    rendered = render({"devices.ascend.enabled": True, "devices.iluvatar.enabled": True})
    added = set(rendered.managed) - set(render().managed)
    assert len([name for name in added if name.startswith("huawei.com/Ascend")]) == 21
    assert len([name for name in added if name.startswith("iluvatar.ai/")]) == 12
    assert len(added) == 33
    assert {"--enable-ascend=true", "--enable-iluvatar=true"} <= set(rendered.extender["command"])


def test_case_40_managed_resources_are_those_of_the_device_configuration() -> None:
    rendered = render({"devices.ascend.enabled": True, "devices.iluvatar.enabled": True})
    names: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key.lower().startswith("resource"):
                    names.add(inner)
                else:
                    collect(inner)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)

    config = yaml.safe_load(rendered.device_config)
    collect(config)
    # the default of biren.sviResourceNames
    parts_of_cards = {"birentech.com/1-2-gpu", "birentech.com/1-4-gpu"}
    assert set(rendered.managed) == names | parts_of_cards
    counted = {
        config[section][key]
        for section in ("cambricon", "mthreads")
        for key in ("resourceMemoryName", "resourceCoreName")
    } | {item[key] for item in config["iluvatars"] for key in ("resourceMemoryName", "resourceCoreName")}
    assert {name for name, ignored in rendered.managed.items() if not ignored} == counted


def test_a_vendor_described_by_data_is_managed_and_its_allocations_are_protected() -> None:
    page = (Path(__file__).parents[2] / "docs" / "adding-a-vendor.md").read_text()
    described = page.split("```yaml\n")[1].split("```")[0]
    other = "  - {commonWord: Other, resourceCountName: other.example/card}\n"
    rendered = render({"device-config.content": described + other})
    names = {"acme.example/npu", "acme.example/npu-memory", "acme.example/npu-cores", "other.example/card"}
    assert {name for name, ignored in rendered.managed.items() if ignored} >= names
    policy = json.dumps(rendered.of("ValidatingAdmissionPolicy")[0]["spec"])
    for key in ("acme.example/allocated", "acme.example/to-allocate", "hami.io/Other-devices-allocated"):
        assert key in policy


def test_a_vendor_that_is_off_is_not_managed() -> None:
    assert "vastaitech.com/va" not in render({"devices.vastai.enabled": False}).managed
    listed = render({"devices.kunlun.customresources": ["kunlunxin.com/other"]}).managed
    assert "kunlunxin.com/other" in listed


def test_case_39_what_kube_scheduler_is_told() -> None:
    rendered = render()
    config = rendered.kube_scheduler_config
    assert config["percentageOfNodesToScore"] == 100
    (extender,) = config["extenders"]
    assert "preemptVerb" not in extender
    assert extender["urlPrefix"] == "https://127.0.0.1:8443"
    assert (extender["filterVerb"], extender["bindVerb"]) == ("filter", "bind")
    assert (extender["nodeCacheCapable"], extender["httpTimeout"], extender["weight"]) == (True, "30s", 1)
    assert rendered.kube_scheduler["command"].count(DURATION_FLAG) == 1
    assert DURATION_FLAG not in render(kube="1.23.5").kube_scheduler["command"]
    own = "--pod-max-in-unschedulable-pods-duration=60s"
    command = render(
        {"scheduler.kubeScheduler.extraNewArgs": ["--config=/config/config.yaml", own]}
    ).kube_scheduler
    assert command["command"] == ["kube-scheduler", "--config=/config/config.yaml", own]


def test_case_46_arguments_of_the_extender() -> None:
    command = render().extender["command"]
    assert command[0] == "scheduler"
    assert {"--kube-qps=50", "--kube-burst=100", "--reservation-timeout=15m"} <= set(command)
    assert {"--leader-elect=true", "--leader-elect-resource-name=hami-scheduler"} <= set(command)
    assert command[-2:] == ["--debug", "-v=4"]


def test_case_44_a_word_that_is_no_choice() -> None:
    with pytest.raises(Refused, match=r"/scheduler/admissionWebhook/privileged.*'deny', 'allow-unlimited'"):
        render({"scheduler.admissionWebhook.privileged": "maybe"})
    values = {"scheduler.admissionWebhook.privileged": "allow-unlimited"}
    assert "--admission-privileged=allow-unlimited" in render(values).extender["command"]


def test_case_41_the_policy_needs_kubernetes_1_30() -> None:
    assert render(kube="1.29").of("ValidatingAdmissionPolicy") == []
    newer = render(kube="1.30")
    assert (
        len(newer.of("ValidatingAdmissionPolicy")) == len(newer.of("ValidatingAdmissionPolicyBinding")) == 1
    )
    assert not render({"allocationPolicy.enabled": False}).of("ValidatingAdmissionPolicyBinding")
    assert "forge or change allocations" in notes(kube="v1.29.0")


def test_the_policy_protects_every_allocation_key() -> None:
    rendered = render({"devices.ascend.enabled": True, "allocationPolicy.allowedUsers": ["system:someone"]})
    spec = rendered.of("ValidatingAdmissionPolicy")[0]["spec"]
    variables = {item["name"]: item["expression"] for item in spec["variables"]}
    listed = re.match(r"\[(.*?)\]\.filter", variables["changed"])
    assert listed
    config = parse_config(rendered.device_config)
    vendors = dict(VENDOR_KEYS)
    vendors |= {chip.common_word: ascend_keys(chip.common_word) for chip in config.vnpus.chips}
    vendors |= {item.common_word: iluvatar_keys(item.common_word) for item in config.iluvatars}
    assert set(yaml.safe_load(f"[{listed[1]}]")) >= protected_annotations(vendors)
    assert '"system:someone"' in variables["trusted"]
    assert spec["failurePolicy"] == "Fail"


def test_the_extender_answers_other_hosts_only_where_that_is_chosen() -> None:
    assert not [word for word in render().extender["command"] if "remote-extender" in word]
    with pytest.raises(Refused, match="lets other hosts bind pods"):
        render({"scheduler.remoteExtender": True})
    values = {"scheduler.remoteExtender": True, "scheduler.kubeScheduler.enabled": False}
    assert "--remote-extender=true" in render(values).extender["command"]


def test_nothing_of_the_scheduler_runs_as_root_or_writes_to_its_image() -> None:
    rendered = render()
    assert rendered.pod["securityContext"]["runAsNonRoot"] is True
    for found in rendered.pod["containers"]:
        assert found["securityContext"]["readOnlyRootFilesystem"] is True
        assert found["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_changed_configuration_restarts_those_who_read_it() -> None:
    def sums(values: dict[str, Any]) -> tuple[Any, Any]:
        rendered = render(values)
        pods = (rendered.deployment, rendered.get("DaemonSet", "hami-device-plugin"))
        scheduler, plugin = (item["spec"]["template"]["metadata"]["annotations"] for item in pods)
        return scheduler, plugin

    base = sums({})
    of_devices = sums({"devicePlugin.deviceSplitCount": 5})
    assert base[0] != of_devices[0]
    assert base[1] != of_devices[1]
    of_node = sums({"devicePlugin.nodeConfiguration.config": "{}"})
    assert base[0] == of_node[0], "the scheduler does not read the node configuration"
    assert base[1] != of_node[1]
    of_scheduler = sums({"schedulerName": "other"})
    assert base[0] != of_scheduler[0]
    assert base[1] == of_scheduler[1], "the device plugin does not read kube-scheduler's configuration"
