"""Device plugin and monitor (chart.md §9-§15, §20)."""

from __future__ import annotations

from typing import Any

import pytest
from chart_harness import Refused, env, host_paths, render

from hami.node.config import parse_device_config
from hami.node.mig.profiles import allowed
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


BROKER = {"devicePlugin.hostPIDBroker.enabled": True}


def test_case_21_the_broker_needs_host_pids() -> None:
    """X1 of host-pid-broker.md: the error names both values."""
    values = {**BROKER, "devicePlugin.hostPID": False}
    with pytest.raises(Refused, match=r"devicePlugin\.hostPIDBroker requires devicePlugin\.hostPID: "):
        render(values)
    rendered = render({**values, "devicePlugin.enabled": False})
    assert not [found for found in rendered.of("DaemonSet") if "device-plugin" in found["metadata"]["name"]]


def test_case_22_the_broker_in_the_device_plugin_and_nowhere_else() -> None:
    """X3 of host-pid-broker.md."""
    rendered = render({**BROKER, "prometheus.enabled": True})
    assert env(rendered.plugin)["LIBVGPU_HOSTPID_BROKER"] == "1"
    mount = {"name": "hostpid-broker", "mountPath": "/var/run/hami/hostpid"}
    assert mount in rendered.plugin["volumeMounts"]
    (volume,) = [item for item in rendered.node_pod["volumes"] if item["name"] == "hostpid-broker"]
    assert volume["hostPath"] == {"path": "/var/run/hami/hostpid", "type": "DirectoryOrCreate"}
    assert rendered.node_pod["hostPID"] is True
    others = [
        found
        for spec in rendered.pods()
        for found in [*spec.get("initContainers", []), *spec["containers"]]
        if found["name"] != "device-plugin"
    ]
    assert {"vgpu-monitor", "install-library", "vgpu-scheduler-extender"} <= {item["name"] for item in others}
    assert "hostpid" not in str(others).lower()


def test_x2_without_the_broker_nothing_of_it_is_rendered() -> None:
    """The whole default rendering is compared with tests/chart/golden/default.yaml in
    test_chart_upgrade.py, and did not change when the broker came.
    """
    rendered = render()
    text = str(rendered.objects)
    for word in (
        "LIBVGPU_HOSTPID_BROKER",
        "hostpid",
        "LINUX_IMMUTABLE",
        "metrics-bind-address=:9396",
        "9396",
    ):
        assert word not in text
    assert text == str(render({"devicePlugin.hostPIDBroker.enabled": False}).objects)


def test_the_broker_comes_with_one_right_and_one_port_for_its_metrics() -> None:
    before, after = render(), render(BROKER)
    assert "ports" not in before.plugin
    assert after.plugin["ports"] == [{"name": "plugin-metrics", "containerPort": 9396}]
    assert "--metrics-bind-address=:9396" in after.plugin["command"]
    added = after.plugin["securityContext"]["capabilities"]["add"]
    assert added == [*before.plugin["securityContext"]["capabilities"]["add"], "LINUX_IMMUTABLE"]
    ports = after.get("Service", "hami-device-plugin-monitor")["spec"]["ports"]
    assert [(item["name"], item["targetPort"]) for item in ports] == [
        ("monitorport", "metrics"),
        ("pluginport", "plugin-metrics"),
    ]
    privileged = render({**BROKER, "devicePlugin.securityContext": {"privileged": True}})
    assert privileged.plugin["securityContext"]["capabilities"]["add"] == ["DAC_OVERRIDE"], "has all of them"
    bare = render({**BROKER, "devicePlugin.securityContext": {"capabilities": None}})
    assert bare.plugin["securityContext"]["capabilities"] == {"add": ["LINUX_IMMUTABLE"]}
    (scc,) = render({**BROKER, "openshift.enabled": True}).of("SecurityContextConstraints")
    assert scc["allowedCapabilities"] == ["DAC_OVERRIDE", "LINUX_IMMUTABLE"]


def test_the_plugin_serves_its_metrics_without_the_broker_where_asked() -> None:
    rendered = render({"devicePlugin.metrics.enabled": True})
    assert rendered.plugin["ports"] == [{"name": "plugin-metrics", "containerPort": 9396}]
    assert "--metrics-bind-address=:9396" in rendered.plugin["command"]
    assert "LIBVGPU_HOSTPID_BROKER" not in env(rendered.plugin)
    ports = rendered.get("Service", "hami-device-plugin-monitor")["spec"]["ports"]
    assert [item["name"] for item in ports] == ["monitorport", "pluginport"]
    with pytest.raises(Refused, match=r"the port is devicePlugin\.metrics\.enabled"):
        render(
            {
                "devicePlugin.metrics.enabled": True,
                "devicePlugin.extraArgs": ["--metrics-bind-address=:9396"],
            }
        )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("devicePlugin.hostPIDBroker.enabled", "1", "/devicePlugin/hostPIDBroker/enabled"),
        ("devicePlugin.migStrategy", "all", "/devicePlugin/migStrategy"),
        ("devicePlugin.deviceListStrategy", "envvar,cdi", "deviceListStrategy=cdi is unknown"),
        ("devicePlugin.healthRecovery.mode", "on", "/devicePlugin/healthRecovery/mode"),
        ("devicePlugin.healthRecovery.transientXids", "x", "/devicePlugin/healthRecovery/transientXids"),
        ("devicePlugin.createRuntimeClass", True, "needs devicePlugin.runtimeClassName"),
        ("devicePlugin.nodeConfiguration.config", "{", "config is not JSON"),
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


MIG_NODE = (
    '{"nodeconfig": [{"name": "n1", "operatingmode": "mig"}, {"name": "n2", "operatingmode": "hami-core"}]}'
)


def test_a_node_that_makes_mig_instances_has_a_privileged_plugin() -> None:
    rendered = render({"devicePlugin.nodeConfiguration.config": MIG_NODE, "openshift.enabled": True})
    assert rendered.plugin["securityContext"] == {
        "privileged": True,
        "readOnlyRootFilesystem": True,
        "runAsUser": 0,
    }
    assert env(rendered.plugin)["NVIDIA_MIG_CONFIG_DEVICES"] == "all"
    (scc,) = rendered.of("SecurityContextConstraints")
    assert (scc["allowPrivilegedContainer"], scc["allowPrivilegeEscalation"]) == (True, True)
    assert not rendered.monitor["securityContext"].get("privileged")
    plain = render()
    assert not plain.plugin["securityContext"].get("privileged")
    assert "NVIDIA_MIG_CONFIG_DEVICES" not in env(plain.plugin)


def test_a_chosen_security_context_outranks_what_mig_needs() -> None:
    chosen = {"privileged": False, "capabilities": {"add": ["SYS_ADMIN"]}}
    rendered = render(
        {"devicePlugin.nodeConfiguration.config": MIG_NODE, "devicePlugin.securityContext": chosen}
    )
    assert rendered.plugin["securityContext"]["privileged"] is False


def test_mig_devices_that_are_there_are_offered_as_asked_for() -> None:
    for strategy in ("none", "single", "mixed"):
        command = render({"devicePlugin.migStrategy": strategy}).plugin["command"]
        assert f"--mig-strategy={strategy}" in command
    values = {"devicePlugin.migStrategy": "mixed", "devicePlugin.nodeConfiguration.config": MIG_NODE}
    with pytest.raises(Refused, match=r'node "n1" has operatingmode mig.*devicePlugin\.migStrategy=mixed'):
        render(values)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("NVIDIA A100-SXM4-40GB", "1g.5gb"),
        ("NVIDIA A100 80GB PCIe", "1g.10gb"),
        ("NVIDIA H100 80GB HBM3", "1g.10gb"),
        ("NVIDIA H100 NVL", "1g.12gb"),
        ("NVIDIA H20", "1g.12gb"),
        ("NVIDIA GH200 480GB", "1g.12gb"),
        ("NVIDIA H200", "1g.18gb"),
        ("NVIDIA H200 NVL", "1g.18gb"),
        ("NVIDIA B200", "1g.23gb"),
    ],
)
def test_the_names_that_drivers_report_have_their_mig_profiles(name: str, first: str) -> None:
    text = render().get("ConfigMap", "hami-scheduler-device")["data"]["device-config.yaml"]
    entries = parse_device_config(text.encode()).mig_profile_allowlist
    profiles = allowed(name, entries)
    assert profiles[0] == first
    assert any(profile.startswith("4g.") for profile in profiles)


def test_case_28_switches_that_are_null_are_not_set() -> None:
    assert env(render().plugin)["PASS_DEVICE_SPECS"] == "false"
    assert "PASS_DEVICE_SPECS" not in env(render({"devicePlugin.passDeviceSpecsEnabled": None}).plugin)
    assert env(render({"devicePlugin.gdsEnabled": True}).plugin)["GDS_ENABLED"] == "true"
    assert "GDS_ENABLED" not in env(render().plugin)


def test_with_cdi_the_plugin_sees_driver_and_cdi_directory() -> None:
    lock = {"devicePlugin.allocationMode": "lock"}
    plain = render(lock)
    with_cdi = render({**lock, "devicePlugin.deviceListStrategy": "envvar,cdi-cri"})
    added = host_paths(with_cdi.node_pod).items() - host_paths(plain.node_pod).items()
    assert added == {("cdi-root", "/var/run/cdi"), ("driver-root", "/")}
    mounts = {item["name"]: item for item in with_cdi.plugin["volumeMounts"]}
    assert (mounts["cdi-root"]["mountPath"], mounts["driver-root"]["mountPath"]) == (
        "/var/run/cdi",
        "/driver-root",
    )
    assert mounts["driver-root"]["readOnly"]
    assert env(with_cdi.plugin)["DEVICE_LIST_STRATEGY"] == "envvar,cdi-cri"
    assert env(with_cdi.plugin)["NVIDIA_DRIVER_ROOT"] == "/"
    assert "NVIDIA_DRIVER_ROOT" not in env(plain.plugin)


def test_with_cdi_the_driver_may_be_elsewhere() -> None:
    values = {
        "devicePlugin.deviceListStrategy": "cdi-annotations",
        "devicePlugin.nvidiaDriverRoot": "/run/nvidia/driver",
        "devicePlugin.nvidiaHookPath": "/usr/local/nvidia/toolkit/nvidia-ctk",
    }
    rendered = render(values)
    assert host_paths(rendered.node_pod)["driver-root"] == "/run/nvidia/driver"
    found = env(rendered.plugin)
    assert found["NVIDIA_DRIVER_ROOT"] == "/run/nvidia/driver"
    assert found["NVIDIA_CDI_HOOK_PATH"] == "/usr/local/nvidia/toolkit/nvidia-ctk"


def test_recovery_of_cards_reaches_the_plugin_where_it_is_on() -> None:
    assert not any(name.startswith("HAMI_HEALTH") for name in env(render().plugin))
    values = {"mode": "timed", "transientXids": "63, 94", "quietPeriod": "5m"}
    found = env(render({f"devicePlugin.healthRecovery.{key}": value for key, value in values.items()}).plugin)
    assert found["HAMI_HEALTH_RECOVERY"] == "timed"
    assert found["HAMI_HEALTH_TRANSIENT_XIDS"] == "63, 94"
    assert found["HAMI_HEALTH_QUIET_PERIOD"] == "5m"


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


def test_case_18_the_topology_policy_requires_scores_of_pairs() -> None:
    policy = "scheduler.defaultSchedulerPolicy.gpuSchedulerPolicy"
    rendered = render({policy: "topology-aware"})
    assert env(rendered.plugin)["ENABLE_TOPOLOGY_SCORE"] == "true"
    assert "--gpu-scheduler-policy=topology-aware" in rendered.extender["command"]
    # Otherwise the plugin computes them where the driver can.
    for other in ("spread", "topology-aware,binpack"):
        assert "ENABLE_TOPOLOGY_SCORE" not in env(render({policy: other}).plugin)


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
        *("nvidia-device-plugin", "--config-file=/device-config/device-config.yaml"),
        *("--mig-strategy=none", "--disable-core-limit=false"),
    ]
    assert rendered.monitor["command"] == ["vGPUmonitor", "--metrics-bind-address=:9394", "-v=4"]
    (port,) = rendered.get("Service", "hami-device-plugin-monitor")["spec"]["ports"]
    assert (port["name"], port["port"], port["nodePort"]) == ("monitorport", 31992, 31992)
    assert rendered.monitor["ports"] == [{"name": port["targetPort"], "containerPort": 9394}]


def test_the_monitors_port_is_one_value() -> None:
    rendered = render({"devicePlugin.monitor.metricsPort": 19394})
    assert "--metrics-bind-address=:19394" in rendered.monitor["command"]
    assert rendered.monitor["ports"] == [{"name": "metrics", "containerPort": 19394}]
    assert {rendered.monitor[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")} == {
        "metrics"
    }
    with pytest.raises(Refused, match=r"devicePlugin\.monitor\.metricsPort is 9396"):
        render({**BROKER, "devicePlugin.monitor.metricsPort": 9396})
    with pytest.raises(Refused, match="metricsPort"):
        render({"devicePlugin.monitor.metricsPort": 70000})


@pytest.mark.parametrize(
    ("key", "argument", "value"),
    [
        ("devicePlugin.monitor", "--metrics-bind-address=:1", "devicePlugin.monitor.metricsPort"),
        ("scheduler.extender", "--metrics-bind-address=:1", "scheduler.metricsBindAddress"),
        ("scheduler.extender", "--http_bind", "scheduler.service.httpTargetPort"),
    ],
)
def test_an_argument_that_moves_a_port_away_from_its_probe_is_refused(
    key: str, argument: str, value: str
) -> None:
    with pytest.raises(Refused, match=f"{key}.extraArgs has {argument}, but the port is {value}"):
        render({f"{key}.extraArgs": ["-v=4", argument]})


def test_the_plugins_metrics_may_be_moved_unless_the_broker_needs_them() -> None:
    moved = {"devicePlugin.extraArgs": ["--metrics-bind-address=:1"]}
    assert "--metrics-bind-address=:1" in render(moved).plugin["command"]
    with pytest.raises(Refused, match=r"the port is devicePlugin\.hostPIDBroker\.enabled \(port 9396\)"):
        render({**BROKER, **moved})


def test_an_edited_config_map_reaches_the_plugin() -> None:
    """kubelet renews folders, never a single file that was mounted by subPath."""
    mounts = {item["name"]: item for item in render().plugin["volumeMounts"]}
    for name, folder in (("deviceconfig", "/config"), ("device-config", "/device-config")):
        assert mounts[name] == {"name": name, "mountPath": folder}


def test_the_monitor_is_probed_unless_that_is_switched_off() -> None:
    rendered = render()
    paths = {probe: rendered.monitor[probe]["httpGet"] for probe in ("livenessProbe", "readinessProbe")}
    assert paths == {
        "livenessProbe": {"path": "/healthz", "port": "metrics"},
        "readinessProbe": {"path": "/readyz", "port": "metrics"},
    }
    assert "livenessProbe" not in rendered.plugin
    off = {"devicePlugin.monitor.livenessProbe": False, "devicePlugin.monitor.readinessProbe": False}
    assert not {"livenessProbe", "readinessProbe"} & render(off).monitor.keys()


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
