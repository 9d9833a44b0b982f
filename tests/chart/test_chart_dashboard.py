"""The web page in the chart: off by default, least rights, and only arguments that the program knows."""

from __future__ import annotations

from typing import Any

import pytest
from chart_harness import Object, Refused, Rendered, container, notes, render

from hami.cli.dashboard import command

ON: dict[str, Any] = {"dashboard.enabled": True}
NAME = "hami-dashboard"


def pod_of(rendered: Rendered) -> Object:
    spec: Object = rendered.get("Deployment", NAME)["spec"]["template"]["spec"]
    return spec


def flags_of(rendered: Rendered) -> dict[str, Any]:
    """The options as the program reads them; it refuses the ones it does not know."""
    words = container(pod_of(rendered), "dashboard")["args"]
    assert words[0] == "dashboard"
    return command.make_context("dashboard", list(words[1:])).params


def test_the_dashboard_is_off_until_asked_for() -> None:
    added = render(ON).names - render().names
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Deployment", "Service")
    assert added == {(kind, NAME) for kind in kinds}


def test_it_may_only_list_and_watch_what_it_shows() -> None:
    rules = render(ON).get("ClusterRole", NAME)["rules"]
    assert rules == [
        {"apiGroups": [""], "resources": ["nodes", "pods", "resourcequotas"], "verbs": ["list", "watch"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
    ]
    (binding,) = [one for one in render(ON).of("ClusterRoleBinding") if one["metadata"]["name"] == NAME]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": NAME, "namespace": "kube-system"}]


def test_reviews_are_allowed_only_where_tokens_are_checked() -> None:
    rules = render({**ON, "dashboard.auth.mode": "kubernetes"}).get("ClusterRole", NAME)["rules"]
    assert [(one["resources"], one["verbs"]) for one in rules[2:]] == [
        (["tokenreviews"], ["create"]),
        (["subjectaccessreviews"], ["create"]),
    ]


def test_its_pod_runs_without_rights_on_the_node() -> None:
    spec = pod_of(render(ON))
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    context = container(spec, "dashboard")["securityContext"]
    assert context == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not [one for one in spec["volumes"] if "hostPath" in one]
    assert not {"hostNetwork", "hostPID", "hostIPC", "priorityClassName"} & set(spec)


def test_the_program_knows_every_argument() -> None:
    values = {
        **ON,
        "dashboard.auth.mode": "header",
        "dashboard.auth.header": "X-User",
        "dashboard.hosts": ["gpus.example.org"],
        "dashboard.prometheusUrl": "http://prometheus.monitoring:9090",
        "dashboard.clusterName": "my cluster",
        "devices.ascend.enabled": True,
        "devices.iluvatar.enabled": True,
        "scheduler.nodeLabelSelector": {"pool": "gpu"},
    }
    flags = flags_of(render(values))
    assert flags["bind"] == ":8080"
    assert (flags["auth"], flags["auth_header"]) == ("header", "X-User")
    assert flags["allowed_host"][0] == NAME
    assert flags["allowed_host"][-1] == "gpus.example.org"
    assert flags["prometheus_url"] == "http://prometheus.monitoring:9090"
    assert flags["cluster_name"] == "my cluster"
    assert (flags["enable_ascend"], flags["enable_iluvatar"]) == (True, True)
    assert flags["node_label_selector"] == "pool=gpu"
    assert (flags["monitors"], flags["hami_namespace"]) == ("direct", "kube-system")


def test_the_service_leads_to_the_pod() -> None:
    rendered = render({**ON, "dashboard.service.port": 9000})
    service = rendered.get("Service", NAME)["spec"]
    assert (service["type"], service["ports"]) == (
        "ClusterIP",
        [{"name": "http", "port": 9000, "targetPort": "http"}],
    )
    labels = rendered.get("Deployment", NAME)["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert labels["hami.io/webhook"] == "ignore"


@pytest.mark.parametrize("mode", ["none", "header"])
def test_it_is_not_put_on_every_node_without_a_token(mode: str) -> None:
    values = {**ON, "dashboard.service.type": "NodePort", "dashboard.auth.mode": mode}
    with pytest.raises(Refused, match="would show every pod to whoever reaches a node"):
        render(values)
    render({**values, "dashboard.auth.mode": "kubernetes"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dashboard.auth.mode", "basic"),
        ("dashboard.auth.header", "X User"),
        ("dashboard.hosts", ["a b"]),
        ("dashboard.prometheusUrl", "file:///etc/passwd"),
        ("dashboard.service.port", 0),
        ("dashboard.unknown", 1),
    ],
)
def test_values_that_cannot_work_are_refused(key: str, value: Any) -> None:
    with pytest.raises(Refused):
        render({**ON, key: value})


def test_network_policies_let_it_reach_the_monitors_and_others_reach_it() -> None:
    values = {**ON, "networkPolicy.enabled": True, "networkPolicy.metricsFrom": [{"podSelector": {}}]}
    peers = [{"namespaceSelector": {"matchLabels": {"name": "proxy"}}}]
    rendered = render({**values, "dashboard.allowedFrom": peers})
    own = rendered.get("NetworkPolicy", NAME)["spec"]
    assert own["ingress"] == [{"ports": [{"port": "http", "protocol": "TCP"}], "from": peers}]
    (rule,) = rendered.get("NetworkPolicy", "hami-device-plugin")["spec"]["ingress"]
    labels = rendered.get("Deployment", NAME)["spec"]["template"]["metadata"]["labels"]
    selected = [one["podSelector"].get("matchLabels") for one in rule["from"]]
    assert selected[0] is None
    assert selected[1].items() <= labels.items()


def test_on_openshift_it_gets_the_context_without_rights() -> None:
    rendered = render({**ON, "openshift.enabled": True})
    binding = rendered.get("RoleBinding", "hami-dashboard-scc")
    assert (binding["roleRef"]["name"], binding["subjects"][0]["name"]) == ("nonroot-v2-scc", NAME)


def test_the_notes_say_where_it_is_and_what_none_means() -> None:
    assert "port-forward service/hami-dashboard 8080" in notes(ON)
    assert "WARNING: dashboard.auth.mode=none" in notes(ON)
    assert "WARNING: dashboard" not in notes({**ON, "dashboard.auth.mode": "kubernetes"})
    assert "let only the proxy in" in notes({**ON, "dashboard.auth.mode": "header"}).lower()
