"""What must hold on an embedded cluster whatever was killed, judged from outside.

:class:`Ledger` judges every change of a pod as it happens; :func:`faults` judges a cluster at rest.
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from hami.local.api.apiserver import ApiServer
from hami.local.api.objects import Object, annotations_of, dig, meta, name_of
from hami.local.api.resources import EVENTS, NODES, PODS
from hami.local.cluster import Cluster, SimulatedNode
from hami.local.kubelet import cdi
from hami.protocol.allocation import decode_allocation
from hami.protocol.lock import holder_is_done, parse_lock
from hami.protocol.views import Node, Pod
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge.metric_texts import NODE_FAMILIES, POD_FAMILIES
from hami.scheduler.edge.metrics import Metrics
from hami.scheduler.edge.timing import Timings
from hami.vendors.config import decode_config, load_profiles

ALLOCATED = "hami.io/vgpu-devices-allocated"
REGISTER = "hami.io/node-nvidia-register"
LOCK = "hami.io/mutex.lock"
COUNT = "nvidia.com/gpu"
FINISHED = ("Succeeded", "Failed")
_COMPARED = frozenset(family.name for family in (*NODE_FAMILIES, *POD_FAMILIES))


@dataclass(slots=True)
class Use:
    """Of one card: containers, MiB, percent."""

    slots: int = 0
    memory_mib: int = 0
    cores_percent: int = 0


def is_live(pod: Object) -> bool:
    return bool(dig(pod, "spec", "nodeName")) and dig(pod, "status", "phase") not in FINISHED


def uses(pods: Iterable[Object]) -> dict[str, Use]:
    """Use per card by the annotations of bound pods that have not finished.

    Init containers are left out: in these workloads they never ask for more than what runs after them.
    """
    found: dict[str, Use] = {}
    for pod in pods:
        text = annotations_of(pod).get(ALLOCATED)
        if not is_live(pod) or text is None:
            continue
        inits = len(dig(pod, "spec", "initContainers") or [])
        for slot in decode_allocation(text)[inits:]:
            for device in slot:
                use = found.setdefault(device.uuid, Use())
                use.slots += 1
                use.memory_mib += device.usedmem
                use.cores_percent += device.usedcores
    return found


@dataclass(slots=True)
class Ledger:
    """Listens to the store and notes every moment at which a card is promised more than it has."""

    api: ApiServer
    broken: list[str] = field(default_factory=list)
    changes: int = 0
    _cards: dict[str, dict[str, Any]] = field(default_factory=dict)

    def watch(self) -> Any:
        return self.api.store.subscribe(self._see)

    def _see(self, key: str, event: Any) -> None:
        if key == "nodes":
            self._learn(event.obj)
        elif key == "pods":
            self.changes += 1
            self._judge()

    def _judge(self) -> None:
        for node in self.api.store.list(NODES):
            self._learn(node)
        for uuid, use in uses(self.api.store.list(PODS)).items():
            if (card := self._cards.get(uuid)) is None:
                self._note(f"card {uuid} is given to a pod and was never registered")
            elif (
                use.memory_mib > card["devmem"]
                or use.cores_percent > card["devcore"]
                or use.slots > card["count"]
            ):
                self._note(f"card {uuid} is over-committed: {use} of {card}")

    def _learn(self, node: Object) -> None:
        self._cards.update((str(card["id"]), card) for card in registered(node))

    def _note(self, text: str) -> None:
        if text not in self.broken:
            self.broken.append(text)


def registered(node: Object) -> list[dict[str, Any]]:
    text = annotations_of(node).get(REGISTER)
    return list(msgspec.json.decode(text)) if text else []


def rebuilt(cluster: Cluster) -> ClusterState:
    """A fresh state from the objects in the API."""
    profiles = load_profiles(decode_config(cluster.config.device_config))
    return rebuild(profiles, cluster.api.store.list(NODES), cluster.api.store.list(PODS))


def rebuild(profiles: Any, nodes: Iterable[Object], pods: Iterable[Object]) -> ClusterState:
    state = ClusterState(profiles)
    for node in nodes:
        state.upsert_node(msgspec.convert(node, Node), 0.0)
    for pod in pods:
        state.upsert_pod(msgspec.convert(pod, Pod))
    return state


async def metric_lines(state: ClusterState) -> set[str]:
    """The lines of a state's ``/metrics`` that say what is promised."""
    metrics = Metrics(state, Timings(), legacy=False)
    return compared(b"".join([chunk async for chunk in metrics.chunks()]).decode())


def compared(text: str) -> set[str]:
    return {line for line in text.splitlines() if line.partition("{")[0] in _COMPARED}


async def faults(cluster: Cluster) -> list[str]:
    """Everything that is wrong with the cluster as it is now; empty once it has settled and is sound."""
    state = rebuilt(cluster)
    found = [text for pod in cluster.api.store.list(PODS) for text in pod_faults(cluster, state, pod)]
    for node in cluster.nodes.values():
        found += lock_faults(cluster, node)
        found += grant_faults(cluster, node)
        found += await monitor_faults(cluster, node)
    return found + await scheduler_faults(cluster, state)


def pod_faults(cluster: Cluster, state: ClusterState, pod: Object) -> Iterator[str]:
    """Every pod runs, has succeeded, has failed and says why, or waits and says why."""
    phase, name = dig(pod, "status", "phase"), name_of(pod)
    if meta(pod).get("deletionTimestamp"):
        yield f"{name}: is still being deleted"
    elif phase == "Failed":
        if not _says_why(cluster, pod):
            yield f"{name}: failed without a word: {pod['status']}"
    elif phase == "Running":
        yield from container_faults(cluster, pod)
    elif phase == "Pending":
        if dig(pod, "spec", "nodeName"):
            yield f"{name}: bound to {pod['spec']['nodeName']} and not started: {pod['status']}"
        elif not _rejection(pod):
            yield f"{name}: pending without a reason"
        elif dig(pod, "spec", "schedulerName") == "hami-scheduler":
            request = state.parse(pod)
            if request is not None and state.fits_now(request):
                yield f"{name}: pending although it fits: {_rejection(pod)}"


def _says_why(cluster: Cluster, pod: Object) -> bool:
    for key in ("initContainerStatuses", "containerStatuses"):
        for status in dig(pod, "status", key) or []:
            if dig(status, "state", "terminated", "exitCode"):
                return True
    return any(
        event["type"] == "Warning" and event["involvedObject"].get("uid") == meta(pod)["uid"]
        for event in cluster.api.store.list(EVENTS)
    )


def _rejection(pod: Object) -> str:
    for condition in dig(pod, "status", "conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or "")
    return ""


def container_faults(cluster: Cluster, pod: Object) -> Iterator[str]:
    """What a running container was given is what its pod's annotation says."""
    text = annotations_of(pod).get(ALLOCATED)
    name = name_of(pod)
    node = cluster.nodes[str(pod["spec"]["nodeName"])]
    wanted = [c for c in dig(pod, "spec", "containers") if COUNT in (dig(c, "resources", "limits") or {})]
    if text is None:
        if wanted:
            yield f"{name}: runs with a device and has no allocation"
        return
    inits = len(dig(pod, "spec", "initContainers") or [])
    for container, slot in zip(pod["spec"]["containers"], decode_allocation(text)[inits:], strict=False):
        envs: dict[str, str] = {}
        for answer in node.kubelet.devices.answers(str(meta(pod)["uid"]), container["name"]):
            envs.update(answer.envs)
            envs.update(cdi.resolve(node.host_root, [device.name for device in answer.cdi_devices]).env)
        cards = sorted(filter(None, envs.get("NVIDIA_VISIBLE_DEVICES", "").split(",")))
        if cards != sorted(device.uuid for device in slot):
            yield f"{name}/{container['name']}: sees {cards}, its allocation says {slot}"
        limits = sorted(text for key, text in envs.items() if key.startswith("CUDA_DEVICE_MEMORY_LIMIT_"))
        if limits != sorted(f"{device.usedmem}m" for device in slot):
            yield f"{name}/{container['name']}: is limited to {limits}, its allocation says {slot}"
        if slot and not _limits_file(node, pod, container["name"]).is_file():
            yield f"{name}/{container['name']}: has no limits file"


def _limits_file(node: SimulatedNode, pod: Object, container: str) -> Path:
    return node.host_root / "usr/local/vgpu/limits" / f"{meta(pod)['uid']}_{container}"


def lock_faults(cluster: Cluster, node: SimulatedNode) -> Iterator[str]:
    """A lock is there only if the next bind takes it over: its holder is gone or done (decision 29)."""
    text = annotations_of(cluster.api.store.get(NODES, "", node.config.name)).get(LOCK)
    if text is None:
        return
    owner = parse_lock(text).owner
    if owner is None:
        yield f"{node.config.name}: lock without an owner: {text}"
        return
    holder = cluster.api.store.find(PODS, owner.namespace, owner.name)
    if holder is not None and not holder_is_done(msgspec.convert(holder, Pod), node.config.name):
        yield f"{node.config.name}: locked by {owner.name}, which still waits"


def grant_faults(cluster: Cluster, node: SimulatedNode) -> Iterator[str]:
    """kubelet's book: no device twice, nothing for pods that are gone, and the offer stands."""
    book = node.kubelet.devices.book
    alive = {str(meta(pod)["uid"]) for pod in cluster.api.store.list(PODS) if is_live(pod)}
    for grant in book.grants:
        if grant.pod_uid not in alive:
            yield f"{node.config.name}: kubelet keeps devices for {grant.pod_uid}, which is gone"
    owners = {(grant.pod_uid, device) for grant in book.grants for device in grant.device_ids}
    counts = Counter(device for _, device in owners)
    yield from (f"{node.config.name}: {device} given to {n} pods" for device, n in counts.items() if n > 1)
    offer = book.offers.get(COUNT)
    cards = registered(cluster.api.store.get(NODES, "", node.config.name))
    wanted = sum(card["count"] for card in cards)
    if offer is None or len(offer.healthy()) != wanted:
        healthy = 0 if offer is None else len(offer.healthy())
        yield f"{node.config.name}: kubelet knows {healthy} healthy devices of {wanted}"


async def monitor_faults(cluster: Cluster, node: SimulatedNode) -> list[str]:
    """The monitor shows every container that has a region and none of a pod that is gone."""
    if node.monitor is None:
        return []
    try:
        text = await cluster.metrics(node.config.name)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return [f"{node.config.name}: the monitor does not answer: {error or type(error).__name__}"]
    shown = {
        sample.labels["pod"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "hami_vgpu_memory_used_bytes"
    }
    here = [pod for pod in cluster.api.store.list(PODS) if dig(pod, "spec", "nodeName") == node.config.name]
    gone = shown - {name_of(pod) for pod in here}
    missing = {
        name_of(pod) for pod in here if dig(pod, "status", "phase") == "Running" and _works(pod)
    } - shown
    return [f"{node.config.name}: the monitor shows {name}, which is gone" for name in gone] + [
        f"{node.config.name}: the monitor does not show {name}" for name in missing
    ]


def _works(pod: Object) -> bool:
    return any("worker" in str(container.get("command")) for container in pod["spec"]["containers"])


async def scheduler_faults(cluster: Cluster, state: ClusterState) -> list[str]:
    """What the scheduler says is promised equals a rebuild from the objects."""
    url = f"http://{cluster._address('scheduler-metrics')}/metrics"
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0)) as session:
            async with session.get(url) as answer:
                shown = compared(await answer.text())
            ready = f"{cluster.scheduler_url}/readyz"
            async with session.get(ready, ssl=_trusting()) as answer:
                if answer.status != 200:
                    return [f"the scheduler is not ready: {answer.status}"]
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return [f"the scheduler does not answer: {error or type(error).__name__}"]
    wanted = await metric_lines(state)
    return [f"the scheduler says {line}" for line in sorted(shown - wanted)] + [
        f"the scheduler does not say {line}" for line in sorted(wanted - shown)
    ]


def _trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
