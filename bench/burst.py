"""How fast many pods at once start, and what they cost the API server: on the real cluster of tools/cluster.

Needs root; starts the cluster unless it runs, and installs HAMi for the time of the measurement. Two parts:

  real     60 pods at once on the one real node: with a card in mode exact, with a card in mode lock, and the
           same pods without any device (plain). Seconds from before the first creation until the API server
           shows all of them Running. The three alternate, figures are medians over the runs.
  hollow   500 pods at once over 50 nodes without a kubelet (8 cards each, node policy spread). Seconds from
           before the first creation until all are bound; p99 of /filter and /bind, from the extender's own
           histograms.

Writes are counted in the API server's audit log: every create, update, patch and delete, refused ones too, of
these pods and their subresources, and of node locks; by whomever but the creator of the pods and the kubelet.
Events are not counted. What a device plugin writes last is written by the hollow nodes themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from parts import command

from hami.kube.client import Client, Limits
from hami.kube.config import load_config
from hami.kube.errors import KubeError
from hami.kube.informer import Informer
from hami.kube.operations import Selection
from hami.kube.resources import NAMESPACES, NODES, PODS
from hami.protocol.keys import ALLOCATION_MODE, BIND_PHASE, BIND_SUCCESS, NODE_LOCK
from hami.protocol.views import Node, Pod

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools/cluster/hami-cluster"
KUBE_HOME = Path(os.environ.get("KUBE_HOME", "/var/lib/hami-cluster"))
SYSTEM, NAMESPACE, REAL_NODE = "hami-system", f"hami-burst-{os.getpid()}", "node1"
AGENT = "hami-bench"
EXACT, LOCK, PLAIN = "exact", "lock", "plain"
CARDS_OF_REAL_NODE = 2
LIMIT_S = 180.0
YOUNG_S = 65.0
"""A scheduler that has led for less reads a node's pods before each Binding: not what is measured here."""
HOLLOW_LABEL = "hami.io/hollow"
ALLOWED = "allocationPolicy.allowedUsers={admin}"  # the hollow nodes write what device plugins write

Kind = str
"""exact, lock or plain."""
Samples = dict[str, list[float]]


def main() -> int:
    """Print what was measured, and with --json one JSON object as the last line."""
    parser = command.parser(__doc__)
    parser.add_argument("--part", choices=("all", "real", "hollow"), default="all")
    parser.add_argument("--runs", type=int, default=3, help="alternating runs on the real node (default 3)")
    parser.add_argument("--pods", type=int, default=60, help="pods on the real node (default 60)")
    parser.add_argument("--many", type=int, default=500, help="pods over the hollow nodes (default 500)")
    parser.add_argument("--nodes", type=int, default=50, help="hollow nodes (default 50)")
    options = parser.parse_args()
    if not (1 <= options.pods <= 200 and 1 <= options.many <= 4000 and options.runs >= 1):
        parser.error("between 1 and 200 pods on the real node, 4000 over the hollow ones, and 1 run or more")
    figures: dict[str, float] = {}
    with running_cluster(), installation(options.pods):
        installed = time.monotonic()
        os.environ["KUBECONFIG"] = str(KUBE_HOME / "admin.conf")
        asyncio.run(measure(options, figures, installed + YOUNG_S))
    for name, figure in figures.items():
        print(f"{name:36} {figure:10.3f}")
    if options.json:
        print(json.dumps(figures))
    return 0


async def measure(options: argparse.Namespace, figures: dict[str, float], not_before: float) -> None:
    """Both parts, one after the other; the hollow one not before that moment of the monotonic clock."""
    async with Client(load_config(), Limits(qps=0), user_agent=AGENT) as client:
        await new_namespace(client)
        try:
            if options.part in ("all", "real"):
                await measure_real(client, options, figures)
            if options.part in ("all", "hollow"):
                await asyncio.sleep(max(0.0, not_before - time.monotonic()))
                await measure_hollow(client, options, figures)
        finally:
            await client.delete(NAMESPACES, NAMESPACE)


async def measure_real(client: Client, options: argparse.Namespace, figures: dict[str, float]) -> None:
    """Pods at once on the node that runs them."""
    samples: Samples = {}
    mode = ""
    for number in range(options.runs):
        for kind in (PLAIN, EXACT, LOCK) if number % 2 == 0 else (LOCK, EXACT, PLAIN):
            if kind not in (PLAIN, mode):
                await switch_mode(client, kind, options.pods)
                mode = kind
            selector = {"kubernetes.io/hostname": REAL_NODE}
            await burst(client, [real_pod(f"warm-{number}-{kind}", kind, selector)], is_running)
            await empty(client)
            before = audit_position()
            pods = [real_pod(f"{kind}-{number}-{at}", kind, selector) for at in range(options.pods)]
            took = await burst(client, pods, is_running)
            if kind != PLAIN:
                await wait_for("all are answered", lambda: all_answered(client, options.pods))
                samples.setdefault(f"{kind}_writes", []).append(writes_since(before) / options.pods)
            await empty(client)
            samples.setdefault(kind, []).append(took)
            note(f"run {number + 1}: {options.pods} pods {kind}: {took:.2f} s")
    plain = statistics.median(samples[PLAIN])
    figures[f"burst_{PLAIN}_s"] = round(plain, 2)
    for kind in (EXACT, LOCK):
        median = statistics.median(samples[kind])
        figures[f"burst_{kind}_s"] = round(median, 2)
        figures[f"burst_{kind}_over_plain_ratio"] = round(median / plain, 3)
        figures[f"api_writes_per_pod_{kind}_real_node"] = round(max(samples[f"{kind}_writes"]), 3)


async def measure_hollow(client: Client, options: argparse.Namespace, figures: dict[str, float]) -> None:
    """Many pods over many nodes: what the scheduler can do where no kubelet is in the way."""
    selector = {HOLLOW_LABEL: "true"}
    for mode in (EXACT, LOCK):
        with hollow_nodes(options.nodes, mode):
            await wait_for("the scheduler knows the nodes", lambda: knows(client, options.nodes))
            pods = [real_pod(f"many-{mode}-{at}", mode, selector) for at in range(options.many)]
            histograms = await scheduler_metrics(client)
            before = audit_position()
            took = await burst(client, pods, is_bound)
            await wait_for("all are answered", lambda: all_answered(client, options.many))
            figures[f"hollow_{mode}_all_bound_s"] = round(took, 2)
            figures[f"api_writes_per_pod_{mode}"] = round(writes_since(before) / options.many, 3)
            after = await scheduler_metrics(client)
            for verb in ("filter", "bind"):
                name = f"hami_scheduler_{verb}_duration_seconds"
                seconds = quantile(0.99, buckets(histograms, name), buckets(after, name))
                figures[f"hollow_{mode}_{verb}_p99_ms"] = round(seconds * 1000, 2)
            note(f"{options.many} pods {mode} over {options.nodes} hollow nodes: {took:.2f} s")
            await empty(client)


# --- pods -------------------------------------------------------------------------------------------------


def real_pod(name: str, kind: Kind, selector: dict[str, str]) -> dict[str, Any]:
    """A pod that sleeps; of kind plain without any device."""
    limits = {} if kind == PLAIN else {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "500"}
    main = {
        "name": "main",
        "image": "hami.local/test-program:dev",
        "command": ["sleep", "infinity"],
        "resources": {"limits": limits},
    }
    spec = {"containers": [main], "nodeSelector": selector, "terminationGracePeriodSeconds": 1}
    notes = {} if kind == PLAIN else {"hami.io/node-scheduler-policy": "spread"}
    metadata = {"name": name, "namespace": NAMESPACE, "annotations": notes}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def is_running(pod: Pod) -> bool:
    """Whether the pod runs; one that failed never will."""
    if pod.is_finished:
        raise SystemExit(f"burst: pod {pod.name} has ended: {pod.status}")
    return pod.phase == "Running"


def is_bound(pod: Pod) -> bool:
    """Whether the pod has a node."""
    return bool(pod.node_name)


async def burst(client: Client, pods: list[dict[str, Any]], done: Callable[[Pod], bool]) -> float:
    """Create all pods at once; seconds until each of them was seen to be ``done``."""
    seen = Seen(done, len(pods))
    watch = Informer(client, PODS, msgspec.json.Decoder(Pod).decode, seen, Selection(namespace=NAMESPACE))
    watching = asyncio.create_task(watch.run())
    try:
        await watch.synced.wait()
        started = time.monotonic()
        await asyncio.gather(*(client.create(PODS, pod, msgspec.Raw, namespace=NAMESPACE) for pod in pods))
        try:
            async with asyncio.timeout(LIMIT_S):
                await seen.all.wait()
        except TimeoutError:
            raise SystemExit(f"burst: after {LIMIT_S:.0f} s only {seen.count} of {len(pods)} pods") from None
        return seen.at - started
    finally:
        watching.cancel()
        await asyncio.wait({watching})


class Seen:
    """When the last of ``wanted`` pods was seen to be done."""

    def __init__(self, done: Callable[[Pod], bool], wanted: int) -> None:
        self.all = asyncio.Event()
        self.at = 0.0
        self._done = done
        self._wanted = wanted
        self._names: set[str] = set()

    @property
    def count(self) -> int:
        """Pods that are done."""
        return len(self._names)

    def on_add(self, pod: Pod, /) -> None:
        if self._done(pod):
            self._names.add(pod.name)
        if len(self._names) == self._wanted and not self.all.is_set():
            self.at = time.monotonic()
            self.all.set()

    def on_update(self, _: Pod, pod: Pod, /) -> None:
        self.on_add(pod)

    def on_delete(self, pod: Pod, /) -> None:
        pass


async def all_answered(client: Client, count: int) -> bool:
    """Whether the node side has written the last word on every pod."""
    pods = await list_pods(client)
    return sum(pod.annotations.get(BIND_PHASE) == BIND_SUCCESS for pod in pods) == count


async def list_pods(client: Client) -> list[Pod]:
    """All pods of the bench."""
    listed = await client.json(
        "GET", PODS.path(NAMESPACE), dict[str, Any], max_bytes=client.limits.max_page_bytes
    )
    return [msgspec.convert(item, Pod) for item in listed["items"]]


async def empty(client: Client) -> None:
    """Delete all pods and wait until they are gone; those of hollow nodes nobody else would end."""
    hollow = any(pod.node_name != REAL_NODE for pod in await list_pods(client))
    body = b'{"gracePeriodSeconds":0}' if hollow else None
    await client.request(
        "DELETE", PODS.path(NAMESPACE), body=body, timeout_s=120, max_bytes=client.limits.max_page_bytes
    )

    async def gone() -> bool:
        return not await list_pods(client)

    await wait_for("the pods are gone", gone)


async def new_namespace(client: Client) -> None:
    """A namespace with its service account."""
    metadata = {"name": NAMESPACE}
    await client.create(
        NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}, msgspec.Raw
    )

    async def has_account() -> bool:
        await client.request("GET", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default")
        return True

    await wait_for("the namespace has its service account", has_account)


async def wait_for(what: str, probe: Callable[[], Any]) -> None:
    """Until the probe is true; ends the program after LIMIT_S."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        with suppress(KubeError):
            if await probe():
                return
        await asyncio.sleep(0.3)
    raise SystemExit(f"burst: not within {LIMIT_S:.0f} s: {what}")


# --- what the API server and the scheduler counted ----------------------------------------------------------


def audit_position() -> int:
    """Where the audit log ends now."""
    return (KUBE_HOME / "cluster/audit.log").stat().st_size


def writes_since(position: int) -> int:
    """Writes for the pods of the bench since then, as this module's documentation counts them."""
    time.sleep(1.0)  # the log is written in the background
    with (KUBE_HOME / "cluster/audit.log").open("rb") as log:
        log.seek(position)
        return sum(1 for line in log if is_counted(json.loads(line)))


def is_counted(entry: dict[str, Any]) -> bool:
    """Whether an entry of the audit log is a write that the pods of the bench caused."""
    user = entry["user"]["username"]
    if entry["stage"] != "ResponseComplete" or user.startswith("system:node:"):
        return False
    if entry.get("userAgent", "").startswith(AGENT):
        return False
    target = entry["objectRef"]
    if target["resource"] == "nodes":
        return NODE_LOCK in json.dumps(entry.get("requestObject", ""))
    return bool(target["resource"] == "pods" and target.get("namespace") == NAMESPACE)


async def scheduler_metrics(client: Client) -> str:
    """The metrics of the scheduler, through the API server."""
    query = {"labelSelector": "app.kubernetes.io/component=hami-scheduler"}
    (pod,) = (await client.json("GET", PODS.path(SYSTEM), dict[str, Any], query=query))["items"]
    path = f"{PODS.path(SYSTEM)}/http:{pod['metadata']['name']}:9395/proxy/metrics"
    return (await client.request("GET", path, max_bytes=client.limits.max_page_bytes)).decode()


async def knows(client: Client, nodes: int) -> bool:
    """Whether the scheduler has all hollow nodes."""
    text = await scheduler_metrics(client)
    return len(set(re.findall(r'node="(hollow-\d+)"', text))) == nodes


def buckets(text: str, name: str) -> dict[float, float]:
    """Upper bound in seconds -> cumulative count of one histogram."""
    found = re.findall(rf'^{name}_bucket{{le="([^"]+)".*}} (\S+)$', text, re.MULTILINE)
    return {float(bound): float(count) for bound, count in found}


def quantile(share: float, before: dict[float, float], after: dict[float, float]) -> float:
    """The quantile, in seconds, of what came between; straight lines inside a bucket, as Prometheus does."""
    counts = {bound: after[bound] - before[bound] for bound in sorted(after)}
    rank = share * max(counts.values())
    lower = lower_count = 0.0
    for bound, count in counts.items():
        if count >= rank:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (rank - lower_count) / max(count - lower_count, 1.0)
        lower, lower_count = bound, count
    return lower


# --- the cluster ------------------------------------------------------------------------------------------


@contextmanager
def running_cluster() -> Iterator[None]:
    """The cluster of tools/cluster; one that runs already is kept."""
    kept = subprocess.run([TOOL, "status"], capture_output=True, check=False).returncode == 0
    if not kept:
        tool("up")
    try:
        yield
    finally:
        if not kept:
            tool("down")


@contextmanager
def installation(pods: int) -> Iterator[None]:
    """HAMi, installed by helm with one scheduler; removed at the end."""
    if "hami" in tool("helm", "list", "--all-namespaces", "--short").split():
        raise SystemExit("burst: HAMi is installed on the cluster already: uninstall it first")
    helm("install", pods, EXACT)
    try:
        yield
    finally:
        tool("helm", "uninstall", "hami", "-n", SYSTEM, "--wait")
        tool("kubectl", "delete", "namespace", SYSTEM)
        notes = "node-nvidia-register node-handshake node-nvidia-score mutex.lock allocation-mode"
        tool("kubectl", "annotate", "node", REAL_NODE, *(f"hami.io/{note}-" for note in notes.split()))


def helm(command: str, pods: int, mode: str) -> None:
    """Install or upgrade so that the node offers slots enough in that mode."""
    slots = -(-pods // CARDS_OF_REAL_NODE)
    settings = f"scheduler.replicas=1,devicePlugin.deviceSplitCount={slots},{ALLOWED}"
    values = str(ROOT / "tests/e2e/values.yaml")
    create = ["--create-namespace"] if command == "install" else []
    tool(
        *("helm", command, "hami", str(ROOT / "charts/hami"), "-n", SYSTEM, "-f", values, *create),
        *("--set", f"{settings},devicePlugin.allocationMode={mode}", "--wait", "--timeout=120s"),
    )


async def switch_mode(client: Client, mode: str, pods: int) -> None:
    """Restart the device plugin in another mode, and wait until it serves."""
    helm("upgrade", pods, mode)
    slots = -(-pods // CARDS_OF_REAL_NODE) * CARDS_OF_REAL_NODE

    async def serves() -> bool:
        node = await client.get(NODES, REAL_NODE, Node)
        offered = (node.status.allocatable or {}).get("nvidia.com/gpu")
        return node.annotations.get(ALLOCATION_MODE) == mode and str(offered) == str(slots)

    await wait_for(f"the node offers its cards in mode {mode}", serves)


@contextmanager
def hollow_nodes(count: int, mode: str) -> Iterator[None]:
    """Nodes without a kubelet."""
    tool("hollow", "start", "--nodes", str(count), "--mode", mode)
    try:
        yield
    finally:
        tool("hollow", "stop")


def tool(*arguments: str) -> str:
    """What the cluster's tool prints; the program ends with its words if it fails."""
    done = subprocess.run([TOOL, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"burst: {' '.join(arguments)}: {done.stderr or done.stdout}")
    return done.stdout


def note(text: str) -> None:
    """Progress, for those who watch."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
