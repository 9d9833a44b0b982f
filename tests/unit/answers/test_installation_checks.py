"""`hami preflight` and `hami verify`: what they find, and what they say to do (operations.md J1)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.answers.checks import Check, Objects, preflight, verify
from hami.answers.render import check_lines
from hami.protocol.timestamps import format_rfc3339_micro

NOW = 1_787_400_000.0
CONFIG = '{"nodeconfig": []}'
GPU = {"gpu": "on"}


def node(name: str = "n1", **changes: Any) -> dict[str, Any]:
    card = {"id": "GPU-1", "count": 10, "devmem": 8000, "devcore": 100, "type": "T4", "health": True}
    annotations = {
        "hami.io/node-nvidia-register": json.dumps([card]),
        "hami.io/node-config-applied": hashlib.sha256(CONFIG.encode()).hexdigest()[:16],
        **changes.get("annotations", {}),
    }
    info = {
        "kubeletVersion": changes.get("kubelet", "v1.36.0"),
        "containerRuntimeVersion": "containerd://2.4.0",
    }
    status = {"capacity": {"nvidia.com/gpu": changes.get("capacity", "10")}, "nodeInfo": info}
    return {
        "metadata": {"name": name, "labels": changes.get("labels", GPU), "annotations": annotations},
        "status": status,
    }


def pod(name: str, component: str, *, ready: bool = True, on: str = "n1") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"app.kubernetes.io/component": component}},
        "spec": {"nodeName": on},
        "status": {"conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
    }


def daemonset(name: str, image: str, component: str = "") -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": component} if component else {}
    spec = {"nodeSelector": GPU, "containers": [{"name": "c", "image": image}]}
    return {
        "metadata": {"name": name, "namespace": "gpu", "labels": labels},
        "spec": {"template": {"spec": spec}},
    }


def working(**changes: Any) -> Objects:
    lease = {
        "metadata": {"name": "hami-scheduler"},
        "spec": {
            "holderIdentity": "hami-scheduler-1_x",
            "leaseDurationSeconds": 15,
            "renewTime": format_rfc3339_micro(NOW - 5),
        },
    }
    hook = {"name": "vgpu.hami.io", "clientConfig": {"caBundle": "LS0t"}}
    parts: dict[str, Any] = {
        "version": "v1.36.3",
        "nodes": [node()],
        "daemonsets": [daemonset("hami-device-plugin", "hami:v0.1.0", "hami-device-plugin")],
        "runtime_classes": [{"metadata": {"name": "nvidia"}}],
        "pods": [
            pod("hami-scheduler-1", "hami-scheduler"),
            pod("hami-device-plugin-1", "hami-device-plugin"),
        ],
        "webhooks": [{"webhooks": [hook]}],
        "leases": [lease],
        "node_config": CONFIG,
        **changes,
    }
    return Objects(**parts)


def bad(checks: list[Check]) -> dict[str, str]:
    return {one.name: one.result for one in checks if one.result != "ok"}


def test_a_working_installation_has_nothing_to_do() -> None:
    checks = verify(working(), NOW)
    assert bad(checks) == {}
    assert all(not one.fix for one in checks)


@pytest.mark.parametrize(
    ("changes", "name", "result", "words"),
    [
        ({"pods": []}, "scheduler", "fail", "no pod"),
        ({"pods": [pod("s", "hami-scheduler", ready=False)]}, "scheduler", "fail", "0 of 1 ready; not: s"),
        ({"leases": []}, "leader", "fail", "nobody holds Lease hami-scheduler"),
        ({"webhooks": []}, "webhook", "warn", "not configured"),
        (
            {"webhooks": [{"webhooks": [{"name": "vgpu.hami.io", "clientConfig": {}}]}]},
            "webhook",
            "fail",
            "no CA bundle",
        ),
        ({"nodes": []}, "device plugin", "fail", "no node has the labels"),
        ({"nodes": [node(), node("n2")]}, "device plugin", "fail", "no ready pod on n2"),
        (
            {"nodes": [node(annotations={"hami.io/node-nvidia-register": "[]"})]},
            "cards",
            "fail",
            "none registered on n1",
        ),
        ({"nodes": [node(capacity="8")]}, "capacity of nvidia.com/gpu", "fail", "n1 shows 8, 10 registered"),
        ({"node_config": "{}"}, "node configuration", "warn", "not in force on n1"),
        ({"nodes": [node(annotations={"hami.io/mutex.lock": "x"})]}, "node locks", "warn", "stale on n1"),
        (
            {"daemonsets": [daemonset("dp", "nvcr.io/nvidia/k8s-device-plugin:v0.17")]},
            "other GPU plugins",
            "fail",
            "DaemonSet gpu/dp",
        ),
    ],
)
def test_what_does_not_work_is_found_and_has_a_remedy(
    changes: dict[str, Any], name: str, result: str, words: str
) -> None:
    (found,) = [one for one in verify(working(**changes), NOW) if one.name == name]
    assert found.result == result
    assert words in found.found
    assert found.fix


@pytest.mark.parametrize(("amount", "result"), [("7", "ok"), ("0", "fail")])
def test_a_node_whose_cards_were_divided_by_hand_registers_none(amount: str, result: str) -> None:
    divided = node(annotations={"hami.io/node-nvidia-register": "[]"}, capacity="0")
    divided["status"]["capacity"]["nvidia.com/mig-1g.5gb"] = amount
    (found,) = [one for one in verify(working(nodes=[divided]), NOW) if one.name == "cards"]
    assert found.result == result
    assert amount == "0" or found.found == "0 on 0 nodes, MIG instances on 1 nodes"


@pytest.mark.parametrize(
    ("modes", "shown", "result"),
    [
        (["mig", "mig"], "20", "ok"),
        (["mig", "hami-core"], "20", "ok"),
        (["mig", "mig"], "13", "fail"),
        (["mig", "mig"], "absent", "fail"),
        (["hami-core", "hami-core"], "20", "fail"),
    ],
)
def test_kubelet_may_count_more_slots_than_cards_have_instances(
    modes: list[str], shown: str, result: str
) -> None:
    """device-plugin.md §5.4: a card in MIG mode is offered max(deviceSplitCount, instances) times."""
    cards = [{"id": f"GPU-{i}", "count": 7, "devmem": 40960, "mode": mode} for i, mode in enumerate(modes)]
    objects = working(
        nodes=[node(capacity=shown, annotations={"hami.io/node-nvidia-register": json.dumps(cards)})]
    )
    (found,) = [one for one in verify(objects, NOW) if one.name.startswith("capacity")]
    assert found.result == result


def test_a_lease_that_nobody_renews_has_no_leader() -> None:
    assert bad(verify(working(), NOW + 40)) == {}
    assert bad(verify(working(), NOW + 41)) == {"leader": "fail"}
    assert bad(verify(working(lease="", leases=[]), NOW)) == {}


def test_a_ready_cluster_passes_before_the_installation() -> None:
    assert bad(preflight(working(), GPU)) == {}


def test_a_cluster_that_is_not_ready_is_told_why() -> None:
    objects = working(
        version="v1.29.4+k3s1",
        nodes=[node(kubelet="v1.29.4"), node("n2", labels={})],
        runtime_classes=[],
        daemonsets=[daemonset("nvidia-device-plugin", "mirror.example/dp:1")],
    )
    checks = preflight(objects, GPU)
    assert bad(checks) == {"Kubernetes": "warn", "other GPU plugins": "fail", "container runtime": "warn"}
    mode = next(one for one in checks if one.name == "allocation mode")
    assert mode.found.startswith("exact on 0 of 1 nodes; lock on n1: the kubelet is v1.29.4")
    assert bad(preflight(working(version="v1.22.1", nodes=[]), GPU)) == {
        "Kubernetes": "fail",
        "GPU nodes": "fail",
    }


def test_a_plugin_that_selects_other_nodes_is_no_rival() -> None:
    other = daemonset("nvidia-device-plugin-daemonset", "nvcr.io/nvidia/k8s-device-plugin:v0.17")
    other["spec"]["template"]["spec"]["nodeSelector"] = {"nvidia.com/gpu.deploy.device-plugin": "true"}
    kept_away = node(labels={**GPU, "nvidia.com/gpu.deploy.device-plugin": "false"})
    beside = node(labels={**GPU, "nvidia.com/gpu.deploy.device-plugin": "true"})
    assert bad(preflight(working(nodes=[kept_away], daemonsets=[other]), GPU)) == {}
    assert bad(preflight(working(nodes=[kept_away, beside], daemonsets=[other]), GPU)) == {
        "other GPU plugins": "fail"
    }


def test_what_may_not_be_read_is_not_called_ok() -> None:
    hidden = working(daemonsets=[], notes=["daemonsets cannot be read: no"], unread=["daemonsets"])
    for checks in (preflight(hidden, GPU), verify(hidden, NOW)):
        assert bad(checks) == {"other GPU plugins": "warn"}


def test_the_table_has_a_line_for_each_check() -> None:
    checks = verify(working(nodes=[]), NOW)
    lines = check_lines(checks, ["leases cannot be read: no"])
    assert lines[0].split() == ["CHECK", "RESULT", "FOUND", "DO"]
    assert len(lines) == len(checks) + 3
    assert lines[-1] == "note: leases cannot be read: no"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["metadata", "labels", "annotations", "spec", "status", "webhooks", "template", "name"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    st.lists(st.dictionaries(st.sampled_from(["metadata", "spec", "status", "webhooks"]), _JSON), max_size=3)
)
def test_any_objects_give_findings(objects: list[dict[str, Any]]) -> None:
    kinds = ("nodes", "daemonsets", "runtime_classes", "pods", "webhooks", "leases")
    found = working(**dict.fromkeys(kinds, objects))
    assert len(verify(found, NOW)) == 9
    assert len(preflight(found, {})) == 5
