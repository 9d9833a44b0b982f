"""What the end-to-end tests share: kubectl, the node, pods of the test image, and HAMi's installation."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TOOL = ROOT / "tools/cluster/hami-cluster"
CHART = ROOT / "charts/hami"
VALUES = HERE / "values.yaml"
SYSTEM = "hami-system"
NODE = "node1"
IMAGE = "hami.local/test-program:dev"
LIMIT_S = 60.0
"""Within this time a pod that fits must run (chart.md §6.2), and everything else must come true."""

ALLOCATED = "hami.io/vgpu-devices-allocated"
PHASE = "hami.io/bind-phase"
LOCK = "hami.io/mutex.lock"
MODE = "hami.io/allocation-mode"
REGISTER = "hami.io/node-nvidia-register"
UUID = re.compile(r"GPU-[0-9a-f-]{36}")
NVML_TOTAL = (
    "import pynvml as n; n.nvmlInit(); h=n.nvmlDeviceGetHandleByIndex(0);"
    "print(n.nvmlDeviceGetCount(), n.nvmlDeviceGetMemoryInfo(h).total >> 20)"
)

Object = dict[str, Any]
T = TypeVar("T")
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Result:
    """How a command in a container or on the node ended."""

    code: int
    out: str
    err: str


class Cluster:
    """The cluster of tools/cluster, by its own tool, and its kubectl."""

    def __init__(self) -> None:
        settings = '. tools/cluster/env.sh; printf "%s\n" "$KUBE_BIN" "$KUBE_HOME"'
        said = subprocess.run(["bash", "-c", settings], capture_output=True, text=True, check=True, cwd=ROOT)
        programs, home = map(Path, said.stdout.split("\n")[:2])
        self.programs = programs
        """Folder of kubectl and the other programs."""
        self.home = home
        """Folder of the running cluster, the same name on the node."""
        self.kubeconfig = home / "admin.conf"

    def run(self, *arguments: str, text: str | None = None, limit_s: float = 120.0) -> Result:
        """Run one command of the tool to its end; kubectl, the most frequent one, without the tool."""
        command = [str(TOOL), *arguments]
        if arguments[0] == "kubectl":
            command = [str(self.programs / "kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments[1:]]
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=limit_s, check=False
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def kubectl(self, *arguments: str, text: str | None = None, limit_s: float = 120.0) -> str:
        """What kubectl prints; its failure fails the test with kubectl's own words."""
        done = self.run("kubectl", *arguments, text=text, limit_s=limit_s)
        assert done.code == 0, f"kubectl {' '.join(arguments)}: {done.err or done.out}"
        return done.out

    def node(self, *command: str) -> str:
        """What a command prints that runs on the node, as root."""
        done = self.run("exec", *command)
        assert done.code == 0, f"{' '.join(command)}: {done.err or done.out}"
        return done.out

    def alias(self, image: str, other: str) -> None:
        """Give an image of the node a second name."""
        socket = f"{self.home}/containerd.sock"
        self.node("ctr", "-a", socket, "-n", "k8s.io", "images", "tag", "--force", image, other)

    def cards(self, *command: str) -> str:
        """A command to the simulated driver of the node, such as ``set 0 lost 1``."""
        return self.node(
            *("env", f"FAKEGPU_STATE={self.home}/cards", f"LD_LIBRARY_PATH={self.home}/driver"),
            *(f"{self.home}/driver/fakegpud", *command),
        )

    def create(self, *objects: Object) -> None:
        """Create objects; a refusal fails the test."""
        self.kubectl("create", "-f", "-", text=_list(objects))

    def refused(self, *objects: Object) -> str:
        """The words with which the API server refuses to create the objects."""
        done = self.run("kubectl", "create", "-f", "-", text=_list(objects))
        assert done.code != 0, f"created, although it had to be refused: {done.out}"
        return done.err

    def get(self, kind: str, name: str, namespace: str = "") -> Object:
        """One object."""
        where = ("--namespace", namespace) if namespace else ()
        found: Object = json.loads(self.kubectl("get", kind, name, *where, "-o", "json"))
        return found

    def items(self, kind: str, namespace: str = "", selector: str = "") -> list[Object]:
        """The objects of a kind."""
        where = ("--namespace", namespace) if namespace else ("--all-namespaces",)
        found: list[Object] = json.loads(
            self.kubectl("get", kind, *where, "--selector", selector, "-o", "json")
        )["items"]
        return found

    def delete(self, kind: str, *names: str, namespace: str) -> None:
        """Delete objects and wait until they are gone."""
        self.kubectl("delete", kind, *names, "--namespace", namespace, "--wait", "--timeout=90s")

    def execute(self, namespace: str, pod: str, *command: str, container: str = "main") -> Result:
        """Run a command in a container."""
        return self.run("kubectl", "exec", "--namespace", namespace, pod, "-c", container, "--", *command)

    def events(self, namespace: str, pod: str) -> str:
        """The reasons and messages of a pod's events, a line each."""
        found = json.loads(
            self.kubectl(
                *("get", "events", "--namespace", namespace, "-o", "json"),
                *("--field-selector", f"involvedObject.name={pod}"),
            )
        )["items"]
        return "\n".join(f"{event['reason']}: {event['message']}" for event in found)

    def running(self, namespace: str, *pods: str) -> list[Object]:
        """The pods, once all of them run and are ready."""

        def all_run() -> list[Object] | None:
            found = [self.get("pod", pod, namespace) for pod in pods]
            return found if all(is_ready(pod) for pod in found) else None

        def why() -> str:
            return "\n".join(
                f"{pod}: {self.get('pod', pod, namespace)['status']}\n{self.events(namespace, pod)}"
                for pod in pods
            )

        return until(f"pods {', '.join(pods)} run", all_run, why)

    def rolled_out(self, namespace: str, name: str, replicas: int) -> list[Object]:
        """The pods of a Deployment that run, once as many as wanted do."""

        def all_run() -> list[Object] | None:
            found = [item for item in self.items("pods", namespace, f"app={name}") if is_ready(item)]
            return found if len(found) == replicas else None

        return until(
            f"{replicas} pods of {name} run", all_run, lambda: self.kubectl("get", "pods", "-n", namespace)
        )

    def new_namespace(self, test: str) -> str:
        """Create a namespace named after a test, with its service account."""
        name = f"{re.sub('[^a-z0-9]+', '-', test.lower())[:40].strip('-')}-{next(_numbers)}"
        self.kubectl("create", "namespace", name)
        until(
            "the namespace has its service account",
            lambda: self.run("kubectl", "get", "sa", "default", "-n", name).code == 0,
        )
        return name

    def remove_namespace(self, name: str) -> None:
        """Remove a namespace with all in it, and wait until none of its pods is left."""
        self.kubectl("delete", "namespace", name, "--wait=false")
        now = ("--grace-period=0", "--force", "--wait=false")

        def empty() -> bool:
            self.run("kubectl", "delete", "pods", "--all", "-n", name, *now)
            return not self.items("pods", name)

        until("the namespace has no pods", empty)


class Hami:
    """HAMi in the cluster, installed by helm from the chart of this repository."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.is_installed = False
        self.settings: tuple[str, ...] | None = None
        """Of the last upgrade; empty after an installation, None where something went wrong."""
        self._before: tuple[str, ...] | None = None

    def helm(self, *arguments: str) -> str:
        """What helm prints; its failure fails the test."""
        done = self.cluster.run("helm", "--namespace", SYSTEM, *arguments, limit_s=200)
        assert done.code == 0, f"helm {' '.join(arguments)}: {done.err or done.out}\n{self.logs()}"
        return done.out

    def install(self) -> None:
        """Install and wait until all of it serves."""
        self.is_installed = True
        self.helm("install", "hami", str(CHART), "-f", str(VALUES), "--create-namespace")
        self.ready()
        self.settings = ()

    def upgrade(self, *settings: str) -> None:
        """Upgrade with other values (``--set`` and the like) and wait until all of it serves."""
        self._before, self.settings = self.settings, None
        self.helm("upgrade", "hami", str(CHART), "-f", str(VALUES), *settings)
        self.ready()
        self.settings = settings

    def takes(self, *settings: str) -> None:
        """Installed, ready, and with these settings: nothing is done where it is so already."""
        if not self.is_installed:
            self.install()
        if self.settings != settings:
            self.upgrade(*settings)

    def rollback(self) -> None:
        """Back to the revision before, and wait until all of it serves."""
        self._before, self.settings, before = None, None, self._before
        self.helm("rollback", "hami")
        self.ready()
        self.settings = before

    def remove_release(self) -> None:
        """Remove the release, and nothing of what helm leaves behind."""
        self.is_installed = False
        self.helm("uninstall", "hami", "--wait", "--timeout=120s")
        until("all pods of HAMi have ended", lambda: not self.cluster.items("pods", SYSTEM))

    def uninstall(self) -> None:
        """Remove the release and what the documents say helm leaves behind (docs/operate.md)."""
        self.remove_release()
        objects = ("secret/hami-scheduler-tls", "lease/hami-scheduler")
        self.cluster.kubectl("delete", *objects, "-n", SYSTEM, "--ignore-not-found")
        notes = "node-nvidia-register node-handshake node-nvidia-score mutex.lock allocation-mode"
        notes += " node-config-applied"
        self.cluster.kubectl("annotate", "node", NODE, *(f"hami.io/{note}-" for note in notes.split()))

    def ready(self) -> None:
        """Wait until scheduler, webhook and device plugin serve and the cards are registered."""
        cluster = self.cluster
        for what in ("deployment/hami-scheduler", "daemonset/hami-device-plugin"):
            cluster.kubectl("rollout", "status", what, "-n", SYSTEM, "--timeout=110s")
        until("the node offers its cards", lambda: self.capacity() == 20, self.logs)
        until("the cards are registered", lambda: len(self.registered()) == 2, self.logs)
        until("a scheduler leads", lambda: bool(self.leader()), self.logs)
        configuration = "mutatingwebhookconfiguration"
        until(
            "the webhook has its CA bundle",
            lambda: (
                cluster.get(configuration, "hami-webhook")["webhooks"][0]["clientConfig"].get("caBundle")
                is not None
            ),
            self.logs,
        )

    def heal(self) -> None:
        """Wait until HAMi serves as after its installation; a failed card needs a new device plugin."""
        node = self.cluster.get("node", NODE)
        if not all(card.get("health") for card in _cards(node)):
            self.cluster.kubectl("delete", "pod", *self.pods("device-plugin"), "-n", SYSTEM, "--wait")
        elif self._whole() and _slots(node) == 20 and self.leader():
            return
        self.ready()
        until(
            "all cards are healthy", lambda: all(card.get("health") for card in self.registered()), self.logs
        )

    def _whole(self) -> bool:
        """Whether all pods of HAMi are there and ready."""
        pods = self.cluster.items("pods", SYSTEM)
        return len(pods) == 3 and all(is_ready(item) for item in pods)

    def capacity(self) -> int:
        """Slots that the node offers to pods."""
        return _slots(self.cluster.get("node", NODE))

    def registered(self) -> list[Object]:
        """The cards that the node registered."""
        return _cards(self.cluster.get("node", NODE))

    def pods(self, component: str) -> list[str]:
        """Names of a component's pods: ``scheduler`` or ``device-plugin``."""
        selector = f"app.kubernetes.io/component=hami-{component}"
        return [pod["metadata"]["name"] for pod in self.cluster.items("pods", SYSTEM, selector)]

    def leader(self) -> str:
        """Name of the scheduler pod that leads, empty without one."""
        done = self.cluster.run("kubectl", "get", "lease", "hami-scheduler", "-n", SYSTEM, "-o", "json")
        holder = json.loads(done.out)["spec"].get("holderIdentity", "") if done.code == 0 else ""
        pod = str(holder).partition("_")[0]
        return pod if pod in self.pods("scheduler") else ""

    def logs(self) -> str:
        """The last lines of every component."""
        return "\n".join(
            self.cluster.run(
                *("kubectl", "logs", "-n", SYSTEM, "--all-containers", "--prefix", "--tail=15"),
                *("-l", f"app.kubernetes.io/component=hami-{component}"),
            ).out
            for component in ("scheduler", "device-plugin")
        )


def _slots(node: Object) -> int:
    return int(node["status"].get("allocatable", {}).get("nvidia.com/gpu", "0"))


def _cards(node: Object) -> list[Object]:
    cards: list[Object] = json.loads(node["metadata"].get("annotations", {}).get(REGISTER) or "[]")
    return cards


def limits(gpus: int = 1, memory_mib: int = 0, cores: int = 0) -> dict[str, str]:
    """Resource limits of one container."""
    asked = {"nvidia.com/gpu": gpus, "nvidia.com/gpumem": memory_mib, "nvidia.com/gpucores": cores}
    return {name: str(value) for name, value in asked.items() if value}


def container(asked: Mapping[str, str], name: str = "main", **more: Any) -> Object:
    """A container of the test image that sleeps."""
    return {
        "name": name,
        "image": IMAGE,
        "command": ["sleep", "infinity"],
        "resources": {"limits": dict(asked)},
    } | more


def pod(
    namespace: str,
    name: str,
    *containers: Object,
    init: Iterable[Object] = (),
    annotations: Mapping[str, str] | None = None,
    **spec: Any,
) -> Object:
    """A pod as a user writes it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "annotations": dict(annotations or {})},
        "spec": {
            "containers": list(containers),
            "initContainers": list(init),
            "terminationGracePeriodSeconds": 1,
        }
        | spec,
    }


def deployment(namespace: str, name: str, replicas: int, *containers: Object) -> Object:
    """A Deployment: what users run whose pods shall come again."""
    labels = {"app": name}
    spec = pod(namespace, "", *containers)["spec"]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def is_ready(found: Object) -> bool:
    """Whether a pod runs and is ready."""
    conditions = {each["type"]: each["status"] for each in found["status"].get("conditions", ())}
    return found["status"].get("phase") == "Running" and conditions.get("Ready") == "True"


def allocated(found: Object) -> list[list[str]]:
    """The cards of each container of a pod, by the annotation that its allocation was recorded in."""
    text = found["metadata"]["annotations"][ALLOCATED]
    return [UUID.findall(entry) for entry in text.split(";")[: text.count(";")]]


def shown_limits(cluster: Cluster, namespace: str, name: str) -> tuple[int, int]:
    """How many cards nvidia-ml-py shows in a pod, and the memory of the first, MiB."""
    seen = cluster.execute(namespace, name, "python3", "-c", NVML_TOTAL)
    assert seen.code == 0, seen
    count, memory_mib = seen.out.split()
    return int(count), int(memory_mib)


def until(
    what: str,
    probe: Callable[[], T | None],
    why: Callable[[], str] = str,
    limit_s: float = LIMIT_S,
) -> T:
    """The first true value of ``probe``; fails after ``limit_s`` with what ``why`` says."""
    end = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(KeyError, IndexError):
            value = probe()
            if value:
                return value
        assert time.monotonic() < end, f"not within {limit_s:.0f} s: {what}\n{why()}"
        time.sleep(0.2)


def _list(objects: Iterable[Object]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
