"""Device plugin and monitor (chart.md §9-§15, §20)."""

from __future__ import annotations

from typing import Any

import pytest
from chart_harness import Refused, env, host_paths, render

from hami.vendors.config import parse_config

OTHER = {"global.gpuHookPath": "/var/lib/hami"}


def test_case_19_one_value_for_every_path() -> None:
    rendered = render(OTHER)
    assert env(rendered.plugin)["HOOK_PATH"] == "/var/lib/hami"
    assert env(rendered.monitor)["HOOK_PATH"] == "/var/lib/hami/vgpu"
    paths = host_paths(rendered.node_pod)
    assert (paths["lib"], paths["ctrs"]) == ("/var/lib/hami/vgpu", "/var/lib/hami/vgpu/containers")
    mounts = {item["name"]: item["mountPath"] for item in rendered.plugin["volumeMounts"]}
    assert mounts["lib"] == "/var/lib/hami/vgpu"
    (installer,) = rendered.node_pod["initContainers"]
    assert env(installer)["HOOK_PATH"] == "/var/lib/hami"
    assert installer["volumeMounts"] == [{"name": "lib", "mountPath": "/var/lib/hami/vgpu"}]
    assert "/usr/local" not in str(rendered.node_pod)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("devicePlugin.libPath", "/usr/local/vgpu", id="20"),
        ("devicePlugin.monitor.ctrPath", "/usr/local/vgpu/containers"),
    ],
)
def test_a_second_path_that_contradicts_is_refused(key: str, value: str) -> None:
    with pytest.raises(Refused, match=f'{key} is "{value}", but global.gpuHookPath "/var/lib/hami"'):
        render({**OTHER, key: value})
    assert render({key: f"{value}/"}).names, "what agrees is taken"


def test_case_21_the_broker_needs_host_pids() -> None:
    with pytest.raises(Refused, match=r"needs devicePlugin\.hostPID=true"):
        render({"devicePlugin.hostPIDBroker.enabled": True, "devicePlugin.hostPID": False})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("devicePlugin.hostPIDBroker.enabled", True, "broker is not in this version"),
        ("devicePlugin.migStrategy", "mixed", "static MIG is not in this version"),
        ("devicePlugin.deviceListStrategy", "cdi-annotations", "use envvar or volume-mounts"),
        ("devicePlugin.createRuntimeClass", True, "needs devicePlugin.runtimeClassName"),
        ("devicePlugin.nodeConfiguration.config", "{", "config is not JSON"),
        (
            "devicePlugin.nodeConfiguration.config",
            '{"nodeconfig": [{"name": "n1", "operatingmode": "mig"}]}',
            'node "n1" has operatingmode mig',
        ),
        ("devicePlugin.monitorctrPath", "/x", "was renamed"),
        ("scheduler.kubeScheduler.imageTag", "v1.30.0", r"use scheduler\.kubeScheduler\.image\.tag"),
        ("podSecurityPolicy.enabled", True, "no PodSecurityPolicy any more"),
        ("openshift.selinux.enabled", True, "not in this version"),
        ("global.gpuHookPath", "usr/local", "/global/gpuHookPath"),
        ("scheduler.reservationTimeout", "15 minutes", "/scheduler/reservationTimeout"),
    ],
)
def test_what_cannot_work_is_refused_in_words(key: str, value: Any, words: str) -> None:
    with pytest.raises(Refused, match=words):
        render({key: value})


def test_case_38_a_key_that_does_not_exist_is_refused() -> None:
    with pytest.raises(Refused, match="additional properties 'deviceSplitCout' not allowed"):
        render({"devicePlugin.deviceSplitCout": 5})


def test_case_23_old_metric_names() -> None:
    rendered = render({"legacyMetrics": True})
    assert "--legacy-metrics=true" in rendered.extender["command"]
    assert "--legacy-metrics=true" in rendered.monitor["command"]


def test_case_27_a_node_configuration_that_exists_already() -> None:
    rendered = render({"devicePlugin.nodeConfiguration.externalConfigName": "mycm"})
    assert ("ConfigMap", "hami-device-plugin") not in rendered.names
    volumes = {item["name"]: item for item in rendered.node_pod["volumes"]}
    assert volumes["deviceconfig"]["configMap"]["name"] == "mycm"


def test_case_28_switches_that_are_null_are_not_set() -> None:
    assert env(render().plugin)["PASS_DEVICE_SPECS"] == "false"
    assert "PASS_DEVICE_SPECS" not in env(render({"devicePlugin.passDeviceSpecsEnabled": None}).plugin)
    assert env(render({"devicePlugin.gdsEnabled": True}).plugin)["GDS_ENABLED"] == "true"
    assert "GDS_ENABLED" not in env(render().plugin)


@pytest.mark.parametrize("further", [{"FOO": "bar"}, [{"name": "FOO", "value": "bar"}]])
def test_case_29_environment_as_map_and_as_list(further: Any) -> None:
    values = {"devicePlugin.extraEnvs": further, "devicePlugin.monitor.extraEnvs": further}
    rendered = render(values)
    assert env(rendered.plugin)["FOO"] == env(rendered.monitor)["FOO"] == "bar"


def test_case_30_runtime_class() -> None:
    rendered = render({"devicePlugin.createRuntimeClass": True, "devicePlugin.runtimeClassName": "nvidia"})
    found = rendered.get("RuntimeClass", "nvidia")
    assert found["handler"] == "nvidia"
    assert found["metadata"]["annotations"] == {"helm.sh/hook": "pre-install,pre-upgrade"}
    assert rendered.node_pod["runtimeClassName"] == "nvidia"
    assert 'runtimeClassName: "nvidia"' in rendered.device_config


def test_topology_scores_are_not_promised_to_a_plugin_without_them() -> None:
    values = {"scheduler.defaultSchedulerPolicy.gpuSchedulerPolicy": "topology-aware"}
    rendered = render(values)
    assert "ENABLE_TOPOLOGY_SCORE" not in env(rendered.plugin)
    assert "--gpu-scheduler-policy=topology-aware" in rendered.extender["command"]


def test_the_library_is_there_before_the_plugin_starts() -> None:
    rendered = render({"devicePlugin.gpuOperatorToolkitReady.enabled": True})
    names = [item["name"] for item in rendered.node_pod["initContainers"]]
    assert names == ["toolkit-validation", "install-library"]
    assert rendered.node_pod["initContainers"][1]["command"] == ["hami", "install-library"]
    assert "lifecycle" not in rendered.plugin


def test_the_plugin_mounts_no_more_of_the_host_than_it_needs() -> None:
    assert set(host_paths(render({"devicePlugin.allocationMode": "lock"}).node_pod).values()) == {
        "/var/lib/kubelet/device-plugins",
        "/usr/local/vgpu",
        "/usr/local/vgpu/containers",
        "/usr/local/vgpu/limits",
        "/tmp",
        "/tmp/hami",
    }
    added = host_paths(render().node_pod)
    assert added["pod-resources"] == "/var/lib/kubelet/pod-resources"
    assert added["cdi-root"] == "/var/run/cdi"


def test_plugin_and_monitor_are_not_privileged() -> None:
    rendered = render()
    for found in (rendered.plugin, rendered.monitor, *rendered.node_pod["initContainers"]):
        context = found["securityContext"]
        assert not context.get("privileged")
        assert "SYS_ADMIN" not in context["capabilities"]["add"]
        assert context["readOnlyRootFilesystem"] is True
    values = {"devicePlugin.securityContext": {"privileged": True}}
    assert render(values).plugin["securityContext"]["privileged"] is True


def test_commands_and_ports_of_the_node_pod() -> None:
    rendered = render()
    assert rendered.plugin["command"][:4] == [
        *("nvidia-device-plugin", "--config-file=/device-config.yaml"),
        *("--mig-strategy=none", "--disable-core-limit=false"),
    ]
    assert rendered.monitor["command"] == ["vGPUmonitor", "-v=4"]
    (port,) = rendered.get("Service", "hami-device-plugin-monitor")["spec"]["ports"]
    assert (port["name"], port["port"], port["nodePort"]) == ("monitorport", 31992, 31992)
    assert rendered.monitor["ports"] == [{"name": port["targetPort"], "containerPort": 9394}]


def test_large_numbers_stay_integers() -> None:
    memory = {"devicePlugin.preConfiguredDeviceMemory": 1_048_576}
    assert parse_config(render(memory).device_config).nvidia.preconfigured_memory == 1_048_576
    user = {"scheduler.patch.enabled": True, "scheduler.patch.runAsUser": 1_000_620_000}
    for job in render(user).of("Job"):
        assert job["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 1_000_620_000


def test_openshift_gets_the_right_to_use_its_constraints() -> None:
    rendered = render({"openshift.enabled": True})
    (scc,) = rendered.of("SecurityContextConstraints")
    assert scc["allowHostPID"] is True
    assert scc["allowPrivilegedContainer"] is False
    used = [
        rule["resourceNames"][0]
        for role in rendered.of("ClusterRole")
        for rule in role["rules"]
        if "securitycontextconstraints" in rule["resources"]
    ]
    assert sorted(used) == ["hami-device-plugin", "nonroot-v2"]
