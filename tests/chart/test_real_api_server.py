"""The chart's objects on a real API server: taken, obeyed, and sufficient for the real programs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import real_api
import yaml
from chart_harness import CHART
from real_api import BIN, ApiServer, held_port, process, until

NAMESPACE = "hami-system"
ALLOCATED = "hami.io/vgpu-devices-allocated"
REFUSED = "only HAMi's scheduler and node plugins may write"
SCHEDULER = f"--as=system:serviceaccount:{NAMESPACE}:hami-scheduler"
PLUGIN = f"--as=system:serviceaccount:{NAMESPACE}:hami-device-plugin"
VENDOR = f"--as=system:serviceaccount:{NAMESPACE}:vendor-plugin"


def _helm(server: ApiServer, *arguments: str) -> None:
    config = server.kubeconfig("admin", "admin")
    done = subprocess.run(
        [os.environ["HAMI_HELM"], "--kubeconfig", str(config), "--namespace", NAMESPACE, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server with the chart installed, without nodes and so without any pod of it."""
    with real_api.running(tmp_path_factory.mktemp("real")) as started:
        started.ok("create", "namespace", NAMESPACE)
        # alice may do what she likes with pods; the webhook, whose server does not run, is not asked
        started.ok("create", "clusterrolebinding", "tenants", "--clusterrole=cluster-admin", "--user=alice")
        vendor = f"--serviceaccount={NAMESPACE}:vendor-plugin"
        started.ok("create", "clusterrolebinding", "vendor", "--clusterrole=cluster-admin", vendor)
        everything = (
            *("scheduler.replicas=2", "networkPolicy.enabled=true", "resourceQuota.enabled=true"),
            *("mockDevicePlugin.enabled=true", "devicePlugin.runtimeClassName=nvidia"),
            *(
                "devicePlugin.createRuntimeClass=true",
                "scheduler.admissionWebhook.whitelistNamespaces={default}",
            ),
            *("dashboard.enabled=true", "dashboard.auth.mode=kubernetes"),
        )
        _helm(
            started, "install", "hami", str(CHART), *(word for item in everything for word in ("--set", item))
        )
        until(lambda: "True" in started.ok(*_policy_seen(started)))
        yield started


def _policy_seen(server: ApiServer) -> tuple[str, ...]:
    """A dry run whose refusal shows that the API server obeys the policy by now."""
    code, text = server.kubectl(
        *("create", "--dry-run=server", "-f", "-"),
        text=json.dumps(_pod("seen", {ALLOCATED: "x"})),
        user="alice",
    )
    seen = str(code != 0 and REFUSED in text)
    return ("get", "namespace", NAMESPACE, "-o", f"go-template={seen}")


def _pod(name: str, annotations: dict[str, str] | None = None, **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "annotations": annotations or {}, **metadata},
        "spec": {"containers": [{"name": "main", "image": "x"}]},
    }


def _patch(server: ApiServer, pod: str, annotations: dict[str, str | None], *options: str, user: str) -> str:
    patch = json.dumps({"metadata": {"annotations": annotations}})
    return server.kubectl("patch", "pod", pod, "--type=merge", "-p", patch, *options, user=user)[1]


@pytest.mark.parametrize(
    "metadata",
    [
        {"annotations": {ALLOCATED: "GPU-1,NVIDIA,1,1:;"}},
        {"annotations": {"hami.io/bind-phase": "success"}, "labels": {"hami.io/webhook": "ignore"}},
        {"labels": {"hami.io/vgpu-node": "n1"}},
    ],
)
def test_case_42_a_tenant_creates_no_pod_with_an_allocation(
    server: ApiServer, metadata: dict[str, Any]
) -> None:
    code, text = server.create(_pod("forged", **metadata), user="alice")
    assert code != 0
    assert REFUSED in text


def test_case_42_a_tenant_changes_no_allocation(server: ApiServer) -> None:
    assert server.create(_pod("p42"), user="alice")[0] == 0
    for options in ((), ("--subresource=status",)):
        assert REFUSED in _patch(server, "p42", {ALLOCATED: "x"}, *options, user="alice")
    assert "patched" in _patch(server, "p42", {"example.com/mine": "x"}, user="alice")
    assert "patched" in _patch(server, "p42", {ALLOCATED: "GPU-1,NVIDIA,1,1:;"}, SCHEDULER, user="admin")
    assert "patched" in _patch(server, "p42", {"hami.io/bind-phase": "success"}, PLUGIN, user="admin")
    assert "patched" in _patch(server, "p42", {"hami.io/bind-phase": "failed"}, VENDOR, user="admin")
    assert REFUSED in _patch(server, "p42", {ALLOCATED: None}, user="alice")
    assert REFUSED in _patch(server, "p42", {ALLOCATED: "GPU-1,NVIDIA,9,1:;"}, user="alice")


def test_case_42_a_tenant_creates_no_binding_with_an_allocation(server: ApiServer) -> None:
    assert server.create(_pod("b42"), user="alice")[0] == 0
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "b42", "namespace": "default", "annotations": {ALLOCATED: "x"}},
        "target": {"kind": "Node", "name": "n1"},
    }
    for path in ("/api/v1/namespaces/default/pods/b42/binding", "/api/v1/namespaces/default/bindings"):
        arguments = ("create", "--raw", path, "-f", "-")
        code, text = server.kubectl(*arguments, text=json.dumps(binding), user="alice")
        assert code != 0
        assert REFUSED in text
    server.ok(*arguments, SCHEDULER, text=json.dumps(binding))
    bound = json.loads(server.ok("get", "pod", "b42", "--namespace", "default", "-o", "json"))
    assert (bound["spec"]["nodeName"], bound["metadata"]["annotations"][ALLOCATED]) == ("n1", "x")


def test_controllers_of_the_release_namespace_pass_no_forged_pods_on(server: ApiServer) -> None:
    """In kube-system they live beside the scheduler, and create pods as a tenant's Deployment says."""
    forged = json.dumps(_pod("passed-on", {ALLOCATED: "x"}, labels={"hami.io/webhook": "ignore"}))
    code, text = server.kubectl("create", "-f", "-", VENDOR, text=forged)
    assert code != 0
    assert REFUSED in text


def test_upgrade_and_rollback_keep_the_ca_bundle(server: ApiServer) -> None:
    path = "/webhooks/0/clientConfig/caBundle"
    bundle = "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCg=="
    patch = json.dumps([{"op": "add", "path": path, "value": bundle}])
    server.ok("patch", "mutatingwebhookconfiguration", "hami-webhook", "--type=json", "-p", patch)

    def kept() -> bool:
        shown = server.ok("get", "mutatingwebhookconfiguration", "hami-webhook", "-o", "yaml")
        return bundle in shown

    try:
        _helm(
            server,
            "upgrade",
            "hami",
            str(CHART),
            "--reuse-values",
            "--set",
            "devicePlugin.deviceSplitCount=20",
        )
        assert kept()
        _helm(server, "rollback", "hami", "1")
        assert kept()
    finally:
        remove = json.dumps([{"op": "remove", "path": path}])
        server.ok("patch", "mutatingwebhookconfiguration", "hami-webhook", "--type=json", "-p", remove)


@contextlib.contextmanager
def _scheduling(server: ApiServer, folder: Path) -> Iterator[tuple[Path, Path]]:
    """Extender and kube-scheduler as the chart configures them, with the rights it gives; their logs."""
    with held_port() as port, held_port() as own:
        yield from _scheduling_on(server, folder, port, own)


def _scheduling_on(server: ApiServer, folder: Path, port: int, own: int) -> Iterator[tuple[Path, Path]]:
    account = server.account(NAMESPACE, "hami-scheduler")

    config = yaml.safe_load(server.read("configmap", "hami-scheduler", NAMESPACE)["data"]["config.yaml"])
    config["clientConnection"] = {"kubeconfig": str(account)}
    config["extenders"][0]["urlPrefix"] = f"https://127.0.0.1:{port}"
    (folder / "config.yaml").write_text(yaml.safe_dump(config), "utf-8")
    devices = folder / "device-config.yaml"
    devices.write_text(
        server.read("configmap", "hami-scheduler-device", NAMESPACE)["data"]["device-config.yaml"], "utf-8"
    )
    spec = server.read("deployment", "hami-scheduler", NAMESPACE)["spec"]["template"]["spec"]
    commands = {item["name"]: item["command"] for item in spec["containers"]}
    replaced = {
        "--http_bind=0.0.0.0:8443": f"--http_bind=127.0.0.1:{port}",
        "--metrics-bind-address=:9395": "--metrics-bind-address=127.0.0.1:0",
        "--device-config-file=/device-config/device-config.yaml": f"--device-config-file={devices}",
        "--config=/config/config.yaml": f"--config={folder / 'config.yaml'}",
    }
    extender, scheduler = (
        [replaced.get(word, word) for word in commands[name][1:]]
        for name in ("vgpu-scheduler-extender", "kube-scheduler")
    )
    me = {"POD_NAME": "hami-scheduler-1", "POD_NAMESPACE": NAMESPACE, "KUBECONFIG": str(account)}
    logs = folder / "extender.log", folder / "kube-scheduler.log"
    command = (
        *(str(BIN / "kube-scheduler"), *scheduler, f"--secure-port={own}", "--bind-address=127.0.0.1"),
        *(f"--authentication-kubeconfig={account}", f"--authorization-kubeconfig={account}"),
    )
    hami = (sys.executable, "-c", "from hami.cli.main import main; main()", "scheduler")
    with process(logs[0], *hami, *extender, **me), process(logs[1], *command):
        yield logs


def test_the_rights_suffice_for_the_scheduler_and_kube_scheduler(server: ApiServer, tmp_path: Path) -> None:
    card = {"id": "GPU-1", "index": 0, "count": 10, "devmem": 8192, "devcore": 100}
    card |= {"type": "NVIDIA A10", "mode": "hami-core", "health": True}
    amounts = {"cpu": "8", "memory": "16Gi", "pods": "110", "nvidia.com/gpu": "10"}
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "n1", "annotations": {"hami.io/node-nvidia-register": json.dumps([card])}},
    }
    assert server.create(node)[0] == 0
    server.kubectl("taint", "node", "n1", "node.kubernetes.io/not-ready-")
    status = json.dumps({"status": {"capacity": amounts, "allocatable": amounts}})
    server.ok("patch", "node", "n1", "--subresource=status", "--type=merge", "-p", status)
    pod = _pod("gpu")
    pod["spec"]["schedulerName"] = "hami-scheduler"
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}
    pod["spec"]["containers"][0]["resources"] = {"limits": limits}
    with _scheduling(server, tmp_path) as logs:
        assert server.create(pod)[0] == 0

        def found(*arguments: str) -> Any:
            return json.loads(server.ok("get", *arguments, "-o", "json"))

        until(lambda: found("pod", "gpu", "--namespace", "default")["spec"].get("nodeName") == "n1")
        written = found("pod", "gpu", "--namespace", "default")["metadata"]["annotations"]
        assert written[ALLOCATED] == "GPU-1,NVIDIA,1000,0:;"
        hook = ("mutatingwebhookconfiguration", "hami-webhook")
        until(lambda: found(*hook)["webhooks"][0]["clientConfig"].get("caBundle"))
    for log in logs:
        assert "forbidden" not in log.read_text("utf-8").lower()


def test_the_rights_suffice_for_the_dashboard_and_tokens_decide_what_is_seen(
    server: ApiServer, tmp_path: Path
) -> None:
    server.ok("create", "namespace", "team-a")
    server.ok("create", "serviceaccount", "reader", "--namespace", "team-a")
    role = ("--verb=list", "--resource=pods", "--namespace", "team-a")
    server.ok("create", "role", "reader", *role)
    reader = ("--role=reader", "--serviceaccount=team-a:reader", "--namespace", "team-a")
    server.ok("create", "rolebinding", "reader", *reader)
    pods = [_pod("seen", namespace="team-a"), _pod("hidden", namespace="default")]
    for pod in pods:
        pod["spec"]["schedulerName"] = "hami-scheduler"
        pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    assert server.create(*pods)[0] == 0
    token = server.ok("create", "token", "reader", "--namespace", "team-a").strip()
    log = tmp_path / "dashboard.log"
    with _dashboard(server, tmp_path, log):
        until(lambda: "The dashboard is at " in log.read_text("utf-8"))
        url = log.read_text("utf-8").partition("The dashboard is at ")[2].split()[0]
        until(lambda: _asked(url, "readyz", "")[0] == 200)
        assert _asked(url, "api/v1/pending", "")[0] == 401
        assert _asked(url, "api/v1/pending", "wrong")[0] == 401

        def names(token: str) -> set[str]:
            return {one["pod"] for one in json.loads(_asked(url, "api/v1/pending", token)[1])["items"]}

        assert names("admin") >= {"seen", "hidden"}
        assert names(token) == {"seen"}
        assert _asked(url, "api/v1/pending/team-a/seen", token)[0] == 200
        assert _asked(url, "api/v1/pending/default/hidden", token)[0] == 404

        def well() -> bool:
            sources = json.loads(_asked(url, "api/v1/summary", token)[1])["sources"]
            return {"nodes", "pods", "resourcequotas"} <= {
                one["name"] for one in sources if one["state"] == "ok"
            }

        until(well)
    assert "forbidden" not in log.read_text("utf-8").lower()


@contextlib.contextmanager
def _dashboard(server: ApiServer, folder: Path, log: Path) -> Iterator[None]:
    """The dashboard as the chart starts it, with the rights it gives."""

    devices = folder / "device-config.yaml"
    devices.write_text(
        server.read("configmap", "hami-scheduler-device", NAMESPACE)["data"]["device-config.yaml"], "utf-8"
    )
    (found,) = server.read("deployment", "hami-dashboard", NAMESPACE)["spec"]["template"]["spec"][
        "containers"
    ]
    replaced = {
        "--bind=:8080": "--bind=127.0.0.1:0",
        "--device-config-file=/device-config/device-config.yaml": f"--device-config-file={devices}",
    }
    words = [replaced.get(word, word) for word in found["args"]]
    account = server.account(NAMESPACE, "hami-dashboard")
    program = (sys.executable, "-c", "from hami.cli.main import main; main()")
    with process(log, *program, *words, KUBECONFIG=str(account)):
        yield


def _asked(url: str, path: str, token: str) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
