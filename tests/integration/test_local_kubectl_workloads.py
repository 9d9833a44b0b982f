"""kubectl with workloads: apply, rollout, scale, drain, exec, port-forward, ``helm template``.

Every test runs with kubectl, and with a stand-in that makes kubectl's requests itself; on a machine without
kubectl the stand-in does both.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubectl_workloads import RealKubectl, StandIn
from local_harness import until

from hami.local.api.apiserver import ApiServer
from hami.local.api.objects import Object, dig, labels_of, meta, name_of
from hami.local.api.resources import (
    CLUSTERROLEBINDINGS,
    CONFIGMAPS,
    DEPLOYMENTS,
    ENDPOINTS,
    JOBS,
    PODS,
    REPLICASETS,
)
from hami.local.kubelet.containers import Isolation
from hami.local.kubelet.kubelet import Kubelet, NodeConfig, NodeLogs
from hami.local.scheduling.scheduler_loop import Profile, SchedulerLoop

FOREVER = "trap 'exit 0' TERM; while :; do sleep 0.05; done"


class World:
    """The cluster of a test, and kubectl on it."""

    def __init__(self, api: ApiServer, kubectl: RealKubectl | StandIn, directory: Path) -> None:
        self.api = api
        self.kubectl = kubectl
        self._directory = directory

    async def run(self, *words: str) -> str:
        """The output of a command that has to work."""
        code, output = await self.kubectl.run(*words)
        assert code == 0, output
        return output

    async def fails(self, *words: str) -> str:
        """The output of a command that has to fail."""
        code, output = await self.kubectl.run(*words)
        assert code != 0, output
        return output

    def file(self, *documents: Object | str) -> str:
        """The path of a manifest."""
        path = self._directory / "manifest.yaml"
        texts = [body if isinstance(body, str) else yaml.safe_dump(body) for body in documents]
        path.write_text("---\n".join(texts))
        return str(path)

    def pods(self, app: str) -> list[Object]:
        return [pod for pod in self.api.store.list(PODS) if labels_of(pod).get("app") == app]


@pytest.fixture(params=["kubectl", "stand-in"])
async def world(
    request: pytest.FixtureRequest,
    embedded_api: ApiServer,
    kubeconfig: Path,
    kubectl: str | None,
    tmp_path: Path,
) -> AsyncIterator[World]:
    """Two nodes with real processes, the default scheduler, and kubectl."""
    real = kubectl if request.param == "kubectl" else None
    with tempfile.TemporaryDirectory(prefix="hami-") as directory:
        kubelets = [
            Kubelet(
                NodeConfig(name, Path(directory) / name, restart_backoff_s=0.05), embedded_api.registry,
                time.time, Isolation.NONE,
            )
            for name in ("n1", "n2")
        ]  # fmt: skip
        loop = SchedulerLoop(embedded_api.registry, time.time, [Profile("default-scheduler")])
        embedded_api.logs = NodeLogs(lambda: kubelets)
        try:
            for kubelet in kubelets:
                await kubelet.start()
            await loop.start()
            client = RealKubectl(real, kubeconfig) if real else StandIn(embedded_api)
            yield World(embedded_api, client, tmp_path)
        finally:
            await loop.stop()
            for kubelet in kubelets:
                await kubelet.stop()


def template(app: str, script: str = FOREVER, **spec: Any) -> Object:
    container = {"name": "main", "image": "none", "command": ["sh", "-c", script]}
    pod = {"containers": [container], "terminationGracePeriodSeconds": 1, **spec}
    return {"metadata": {"labels": {"app": app}}, "spec": pod}


def workload(kind: str, name: str, script: str = FOREVER, **spec: Any) -> Object:
    selector = {"selector": {"matchLabels": {"app": name}}, "template": template(name, script)}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": {**selector, **spec}}


async def test_a_deployment_is_applied_rolled_out_scaled_and_deleted(world: World) -> None:
    assert "created" in await world.run("apply", "-f", world.file(workload("Deployment", "web", replicas=2)))
    assert "successfully rolled out" in await world.run("rollout", "status", "deployment/web")
    assert {dig(pod, "status", "phase") for pod in world.pods("web")} == {"Running"}
    await world.run("scale", "deployment/web", "--replicas=3")
    await world.run("rollout", "status", "deployment/web")
    assert len(world.pods("web")) == 3
    await world.run("delete", "deployment", "web")
    await until(lambda: not world.pods("web") and not world.api.store.list(REPLICASETS))


async def test_a_changed_template_replaces_the_pods(world: World) -> None:
    await world.run("apply", "-f", world.file(workload("Deployment", "web", replicas=2)))
    await world.run("rollout", "status", "deployment/web")
    before = {name_of(pod) for pod in world.pods("web")}
    changed = workload("Deployment", "web", FOREVER + " # changed", replicas=2)
    assert "configured" in await world.run("apply", "-f", world.file(changed))
    await world.run("rollout", "status", "deployment/web")
    await until(lambda: not before & {name_of(pod) for pod in world.pods("web")})


async def test_an_orphaning_delete_leaves_the_pods(world: World) -> None:
    await world.run("apply", "-f", world.file(workload("Deployment", "web", replicas=1)))
    await world.run("rollout", "status", "deployment/web")
    await world.run("delete", "deployment", "web", "--cascade=orphan")
    assert world.api.store.find(DEPLOYMENTS, "default", "web") is None
    assert len(world.pods("web")) == 1
    assert not meta(world.api.store.list(REPLICASETS)[0]).get("ownerReferences")


async def test_a_foreground_delete_returns_when_everything_is_gone(world: World) -> None:
    await world.run("apply", "-f", world.file(workload("Deployment", "web", replicas=1)))
    await world.run("rollout", "status", "deployment/web")
    await world.run("delete", "deployment", "web", "--cascade=foreground")
    assert world.pods("web") == []
    assert world.api.store.list(REPLICASETS) == []


async def test_a_job_runs_to_its_end(world: World) -> None:
    spec = {"completions": 2, "template": template("once", "echo done", restartPolicy="Never")}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "once"}, "spec": spec}
    await world.run("apply", "-f", world.file(job))
    await world.run("wait", "--for=condition=Complete", "job/once", "--timeout=90s")
    assert world.api.store.get(JOBS, "default", "once")["status"]["succeeded"] == 2


async def test_a_drained_node_keeps_only_its_daemons(world: World) -> None:
    daemon = workload("DaemonSet", "agent")
    await world.run("apply", "-f", world.file(workload("Deployment", "web", replicas=3), daemon))
    await world.run("rollout", "status", "deployment/web")
    await world.run("rollout", "status", "daemonset/agent")
    await world.run("drain", "n1", "--ignore-daemonsets")
    await world.run("rollout", "status", "deployment/web")
    await until(lambda: {dig(pod, "spec", "nodeName") for pod in world.pods("web")} == {"n2"})
    assert {dig(pod, "spec", "nodeName") for pod in world.pods("agent")} == {"n1", "n2"}


async def test_server_side_apply_reports_a_conflict_until_it_is_forced(world: World) -> None:
    file = world.file(workload("Deployment", "web", replicas=1))
    assert "serverside-applied" in await world.run("apply", "--server-side", "-f", file)
    await world.run("scale", "deployment/web", "--replicas=2")
    refused = await world.fails("apply", "--server-side", "-f", file)
    assert "conflict" in refused
    assert ".spec.replicas" in refused
    await world.run("apply", "--server-side", "--force-conflicts", "-f", file)
    assert world.api.store.get(DEPLOYMENTS, "default", "web")["spec"]["replicas"] == 1


async def test_server_side_apply_follows_client_side_apply(world: World) -> None:
    first = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "1"}}
    await world.run("apply", "-f", world.file(first))
    await world.run("apply", "--server-side", "-f", world.file({**first, "data": {"a": "2"}}))
    assert world.api.store.get(CONFIGMAPS, "default", "c")["data"] == {"a": "2"}


async def test_unknown_fields_are_accepted_with_validation_on(world: World) -> None:
    body = workload("Deployment", "web", replicas=0, somethingNew=True)
    await world.run("apply", "-f", world.file(body))
    assert world.api.store.get(DEPLOYMENTS, "default", "web")["spec"]["somethingNew"] is True


async def test_a_refused_workload_is_explained(world: World) -> None:
    body = workload("Deployment", "web", selector={"matchLabels": {"app": "other"}})
    assert "does not match template" in await world.fails("apply", "-f", world.file(body))


async def test_commands_that_send_protobuf_are_told_so(world: World) -> None:
    output = await world.fails("create", "deployment", "x", "--image=none")
    assert "application/vnd.kubernetes.protobuf" in output
    assert world.api.store.list(DEPLOYMENTS) == []


async def test_a_command_runs_in_a_pod_and_its_status_comes_back(world: World) -> None:
    await world.run("apply", "-f", world.file(workload("Deployment", "web", replicas=1)))
    await world.run("rollout", "status", "deployment/web")
    pod = name_of(world.pods("web")[0])
    assert (await world.run("exec", pod, "--", "echo", "inside")).strip().endswith("inside")
    code, _ = await world.kubectl.run("exec", pod, "--", "sh", "-c", "exit 7")
    assert code == 7


async def test_a_port_of_a_pod_is_forwarded(world: World, tmp_path: Path) -> None:
    script = (
        "import http.server, pathlib\n"
        "server = http.server.HTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)\n"
        f"pathlib.Path({str(tmp_path / 'port')!r}).write_text(str(server.server_port))\n"
        "server.serve_forever()\n"
    )
    container = {"name": "main", "image": "none", "command": ["python3", "-c", script]}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "www"}, "spec": spec}
    await world.run("apply", "-f", world.file(body))
    await until(lambda: (tmp_path / "port").exists() and (tmp_path / "port").read_text())
    port = int((tmp_path / "port").read_text())
    async with world.kubectl.forward("www", port) as fetch:
        answer = await fetch(b"GET / HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 200 OK")
    assert b"Directory listing" in answer


RELEASE = """\
# Source: release/templates/serviceaccount.yaml
apiVersion: v1
kind: ServiceAccount
metadata:
  name: release-agent
  labels: &labels {app.kubernetes.io/name: agent, app.kubernetes.io/managed-by: Helm}
---
# Source: release/templates/configmap.yaml
apiVersion: v1
kind: ConfigMap
metadata: {name: release-config, labels: {app.kubernetes.io/managed-by: Helm}}
data:
  message: "from the chart"
---
# Source: release/templates/rbac.yaml
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: release-agent}
rules:
- {apiGroups: [""], resources: [nodes, pods], verbs: [get, list, watch, patch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: release-agent}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: release-agent}
subjects:
- {kind: ServiceAccount, name: release-agent, namespace: default}
---
# Source: release/templates/service.yaml
apiVersion: v1
kind: Service
metadata: {name: release-scheduler}
spec:
  type: ClusterIP
  ports: [{name: http, port: 443, targetPort: web, protocol: TCP}]
  selector: {app: scheduler}
---
# Source: release/templates/deployment.yaml
apiVersion: apps/v1
kind: Deployment
metadata: {name: release-scheduler}
spec:
  replicas: 1
  selector: {matchLabels: {app: scheduler}}
  template:
    metadata: {labels: {app: scheduler}, annotations: {checksum/config: abc}}
    spec:
      serviceAccountName: release-agent
      containers:
      - name: main
        image: "registry.example/scheduler:v1"
        command: [sh, -c, "echo $MESSAGE; trap 'exit 0' TERM; while :; do sleep 0.05; done"]
        env:
        - {name: MESSAGE, valueFrom: {configMapKeyRef: {name: release-config, key: message}}}
        ports: [{name: web, containerPort: 18443, protocol: TCP}]
        resources: {limits: {cpu: 100m, memory: 64Mi}, requests: {cpu: 10m, memory: 16Mi}}
---
# Source: release/templates/daemonset.yaml
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: release-agent}
spec:
  selector: {matchLabels: {app: agent}}
  updateStrategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 1}}
  template:
    metadata: {labels: {app: agent}}
    spec:
      terminationGracePeriodSeconds: 1
      tolerations: [{operator: Exists}]
      nodeSelector: {kubernetes.io/os: linux}
      volumes: [{name: work, emptyDir: {}}]
      containers:
      - name: main
        image: "registry.example/agent:v1"
        command: [sh, -c, "trap 'exit 0' TERM; while :; do sleep 0.05; done"]
        volumeMounts: [{name: work, mountPath: /work}]
---
# Source: release/templates/job.yaml
apiVersion: batch/v1
kind: Job
metadata:
  name: release-certgen
  annotations: {helm.sh/hook: pre-install}
spec:
  template:
    metadata: {name: release-certgen}
    spec:
      restartPolicy: OnFailure
      containers:
      - {name: create, image: "registry.example/certgen:v1", command: [sh, -c, "exit 0"]}
---
# Source: release/templates/pdb.yaml
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: release-scheduler}
spec: {minAvailable: 1, selector: {matchLabels: {app: scheduler}}}
"""


@pytest.mark.parametrize("flags", [(), ("--server-side",)], ids=["client-side", "server-side"])
async def test_what_helm_template_prints_is_applied_and_runs(world: World, flags: tuple[str, ...]) -> None:
    file = world.file(RELEASE)
    await world.run("apply", *flags, "-f", file)
    await world.run("rollout", "status", "deployment/release-scheduler")
    await world.run("rollout", "status", "daemonset/release-agent")
    await world.run("wait", "--for=condition=Complete", "job/release-certgen", "--timeout=90s")
    binding = world.api.store.get(CLUSTERROLEBINDINGS, "", "release-agent")
    assert binding["subjects"][0]["name"] == "release-agent"
    await until(lambda: dig(world.api.store.find(ENDPOINTS, "default", "release-scheduler"), "subsets"))
    found = world.api.store.get(ENDPOINTS, "default", "release-scheduler")["subsets"]
    assert found[0]["ports"] == [{"name": "http", "port": 18443, "protocol": "TCP"}]
    versions = [meta(item)["resourceVersion"] for item in world.api.store.list(CONFIGMAPS)]
    await world.run("apply", *flags, "-f", file)
    assert [meta(item)["resourceVersion"] for item in world.api.store.list(CONFIGMAPS)] == versions
    assert len(world.api.store.list(REPLICASETS)) == 1
