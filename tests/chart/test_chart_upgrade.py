"""Values files of HAMi's users, and the rendered manifest that other tests read (chart.md §20 case 37)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from chart_harness import GOLDEN, Object, Refused, Rendered, render

HERE = Path(__file__).resolve().parent
HAMI = HERE / "hami-2.10-values.yaml"
FREE = {"nodeLabelSelector", "nodeSelector", "resources", "securityContext", "updateStrategy"}
HAMI_OBJECTS = {
    *("ConfigMap/hami-device-plugin", "ConfigMap/hami-scheduler", "ConfigMap/hami-scheduler-device"),
    *("ClusterRole/hami-device-plugin-monitor", "ClusterRole/hami-scheduler", "ClusterRole/hami-admission"),
    *("ClusterRoleBinding/hami-device-plugin", "ClusterRoleBinding/hami-scheduler"),
    *("ClusterRoleBinding/hami-scheduler-kube", "ClusterRoleBinding/hami-scheduler-volume"),
    *("ClusterRoleBinding/hami-admission", "DaemonSet/hami-device-plugin", "Deployment/hami-scheduler"),
    *("Job/hami-admission-create", "Job/hami-admission-patch", "MutatingWebhookConfiguration/hami-webhook"),
    *(
        "Role/hami-admission",
        "Role/hami-scheduler",
        "RoleBinding/hami-admission",
        "RoleBinding/hami-scheduler",
    ),
    *("Service/hami-device-plugin-monitor", "Service/hami-scheduler"),
    *("ServiceAccount/hami-admission", "ServiceAccount/hami-device-plugin", "ServiceAccount/hami-scheduler"),
}


def _adopted() -> Rendered:
    return render(None, "--values", str(HAMI), "--set", "global.imageTag=v0.1.0")


def _missing(theirs: Object, ours: Object, path: str = "") -> Iterator[str]:
    """Keys that we do not have, leaving out what is below maps that users fill themselves."""
    for key, value in theirs.items():
        if key not in ours:
            yield f"{path}{key}"
        elif isinstance(value, dict) and key not in FREE:
            yield from _missing(value, ours[key], f"{path}{key}.")


def test_values_as_helm_prints_them_are_taken_those_with_defaults_are_refused(tmp_path: Path) -> None:
    """`helm get values` without `-o yaml` begins with a heading; with `--all` with another."""
    values = tmp_path / "values.yaml"
    values.write_text("USER-SUPPLIED VALUES:\nglobal:\n  imageTag: v7\n")
    assert render(None, "--values", str(values)).deployment
    values.write_text("COMPUTED VALUES:\nglobal:\n  imageTag: v7\n")
    with pytest.raises(Refused, match="COMPUTED VALUES"):
        render(None, "--values", str(values))


def test_case_37_a_values_file_of_hami_keeps_every_name_and_every_immutable_field() -> None:
    rendered = _adopted()
    names = {f"{kind}/{name}" for kind, name in rendered.names}
    assert names >= HAMI_OBJECTS
    labels = {"app.kubernetes.io/name": "hami", "app.kubernetes.io/instance": "hami"}
    for kind, name, component in (
        ("Deployment", "hami-scheduler", "hami-scheduler"),
        ("DaemonSet", "hami-device-plugin", "hami-device-plugin"),
    ):
        selector = rendered.get(kind, name)["spec"]["selector"]
        assert selector == {"matchLabels": {**labels, "app.kubernetes.io/component": component}}
    roles = {item["metadata"]["name"]: item["roleRef"]["name"] for item in rendered.of("ClusterRoleBinding")}
    assert roles == {
        "hami-admission": "hami-admission",
        "hami-device-plugin": "hami-device-plugin-monitor",
        "hami-scheduler": "hami-scheduler",
        "hami-scheduler-kube": "system:kube-scheduler",
        "hami-scheduler-volume": "system:volume-scheduler",
    }


def test_an_image_of_hami_is_refused() -> None:
    with pytest.raises(Refused, match=r"projecthami/hami:v2\.10\.0, an image of HAMi's"):
        render(None, "--values", str(HAMI))


def test_the_file_of_hami_changes_what_it_sets() -> None:
    rendered = _adopted()
    assert "--http_bind=0.0.0.0:443" in rendered.extender["command"]
    assert rendered.pod["securityContext"]["sysctls"] == [
        {"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}
    ]
    assert rendered.plugin["securityContext"]["privileged"] is True
    assert rendered.kube_scheduler["image"].startswith("registry.cn-hangzhou.aliyuncs.com/google_containers/")
    assert "--node-label-selector=gpu=on" in rendered.extender["command"]


def test_every_key_of_hami_is_a_key_of_ours() -> None:
    ours: Object = yaml.safe_load((HERE.parents[1] / "charts/hami/values.yaml").read_text("utf-8"))
    theirs: Object = yaml.safe_load(HAMI.read_text("utf-8"))
    assert set(_missing(theirs, ours)) == {"mockDevicePlugin.tag"}, "which nothing ever read"


def test_a_hardened_installation_renders() -> None:
    rendered = render(None, "--values", str(HERE.parents[1] / "charts/hami/values-hardened.yaml"))
    assert rendered.of("NetworkPolicy")
    assert rendered.of("PodDisruptionBudget")
    assert {item["spec"]["type"] for item in rendered.of("Service")} == {"ClusterIP"}


def test_the_golden_manifest_is_what_helm_renders() -> None:
    # HAMI_GOLDEN=write make chart-test renews it
    file = GOLDEN / "default.yaml"
    objects = render().objects
    text = yaml.safe_dump_all(objects, sort_keys=False, width=120)
    if os.environ.get("HAMI_GOLDEN") == "write":
        file.write_text(text, "utf-8")
    if list(yaml.safe_load_all(file.read_text("utf-8"))) != objects:
        pytest.fail("tests/chart/golden/default.yaml is out of date: run HAMI_GOLDEN=write make chart-test")
