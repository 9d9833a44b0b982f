"""Is a cluster ready for HAMi, and does an installation work? Findings, each with what to do. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from hami.answers.ours import component_of
from hami.node.exact.mode import version_obstacle
from hami.protocol.errors import LockFormatError, RegistrationError, TimestampError
from hami.protocol.inventory import DeviceInfo, decode_json
from hami.protocol.keys import (
    COMPONENT_PLUGIN,
    COMPONENT_SCHEDULER,
    NODE_CONFIG_APPLIED,
    NODE_LOCK,
    NVIDIA,
    VENDOR_KEYS,
)
from hami.protocol.lock import DEFAULT_LOCK_TIMEOUT, parse_lock
from hami.protocol.members import map_of, objects_of
from hami.protocol.timestamps import parse_rfc3339
from hami.vendors.mig import MIG_MODE

COUNT_RESOURCE: Final = "nvidia.com/gpu"
_INSTANCES: Final = "nvidia.com/mig-"
WEBHOOK: Final = "vgpu.hami.io"
NAMES_SHOWN: Final = 4
HASH_DIGITS: Final = 16
_RIVAL: Final = re.compile(r"nvidia-device-plugin|k8s-device-plugin")
_LEASE_SLACK_S: Final = 30.0

Result = Literal["ok", "warn", "fail"]
Object = Mapping[str, Any]


class Check(msgspec.Struct, frozen=True):
    """One finding; ``fix`` is empty where there is nothing to do."""

    name: str
    result: Result
    found: str
    fix: str = ""


class Objects(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of a cluster; ``notes`` says what could not be."""

    version: str
    nodes: list[dict[str, Any]]
    daemonsets: list[dict[str, Any]]
    runtime_classes: list[dict[str, Any]]
    pods: list[dict[str, Any]] = []  # HAMi's own
    webhooks: list[dict[str, Any]] = []
    leases: list[dict[str, Any]] = []
    node_config: str | None = None  # config.json; None: no ConfigMap
    count_resource: str = COUNT_RESOURCE
    lease: str = "hami-scheduler"  # "": nobody is elected
    notes: list[str] = []
    unread: list[str] = []  # the kinds (plural names) that `notes` are about


def preflight(objects: Objects, selector: Mapping[str, str]) -> list[Check]:
    """Before the installation; ``selector``: labels of the nodes that are to get the device plugin."""
    nodes = _selected(objects.nodes, selector)
    return [_kubernetes(objects.version), _gpu_nodes(nodes, selector), *_node_side(objects, nodes)]


def verify(objects: Objects, now: float) -> list[Check]:
    """After the installation; ``now`` is Unix seconds."""
    nodes = _selected(objects.nodes, plugin_selector(objects.daemonsets))
    return [
        _scheduler(objects),
        _leader(objects, now),
        _webhook(objects.webhooks),
        _plugins(objects, nodes),
        _cards(nodes),
        _capacity(nodes, objects.count_resource),
        _node_config(nodes, objects.node_config),
        _locks(nodes, now),
        _rivals(objects, nodes),
    ]


# --- before -----------------------------------------------------------------------------------------------


def _kubernetes(version: str) -> Check:
    name = "Kubernetes"
    found = re.match(r"v1\.(\d{1,4})", version)
    minor = int(found[1]) if found else 0
    if minor < 23:
        return Check(name, "fail", f"{version or 'unknown'}, 1.23 or newer is needed", "upgrade the cluster")
    if minor < 30:
        text = f"{version}: without ValidatingAdmissionPolicy (1.30) tenants can forge allocations"
        return Check(name, "warn", text, "restrict who may create and update pods, or upgrade")
    return Check(name, "ok", version)


def _gpu_nodes(nodes: Sequence[Object], selector: Mapping[str, str]) -> Check:
    labels = ",".join(f"{key}={value}" for key, value in sorted(selector.items()))
    if not nodes:
        fix = f"kubectl label node NODE {labels.replace(',', ' ')}"
        return Check("GPU nodes", "fail", f"no node has {labels}", fix)
    return Check("GPU nodes", "ok", f"{len(nodes)} with {labels}: {_names(nodes)}")


def _node_side(objects: Objects, nodes: Sequence[Object]) -> Iterable[Check]:
    yield _rivals(objects, nodes)
    if any(_name(one) == "nvidia" for one in objects.runtime_classes):
        text = "RuntimeClass nvidia is there"
        yield Check("container runtime", "ok", text, "install with devicePlugin.runtimeClassName=nvidia")
    else:
        values = "devicePlugin.runtimeClassName=nvidia, devicePlugin.createRuntimeClass=true"
        fix = f"unless nvidia is the default runtime of these nodes: {values}"
        yield Check("container runtime", "warn", "no RuntimeClass nvidia", fix)
    obstacles = {}
    for node in nodes:
        info = map_of(map_of(node, "status"), "nodeInfo")
        versions = (info.get("kubeletVersion", ""), info.get("containerRuntimeVersion", ""))
        obstacle = version_obstacle(*map(str, versions))
        if obstacle is not None:
            obstacles[_name(node)] = obstacle.text
    able = len(nodes) - len(obstacles)
    text = f"exact on {able} of {len(nodes)} nodes"
    if obstacles:
        text += f"; lock on {_listed(sorted(obstacles))}: {next(iter(obstacles.values()))}"
    yield Check("allocation mode", "ok", text)


def _rivals(objects: Objects, nodes: Sequence[Object]) -> Check:
    """Other plugins that select one of our nodes (where we have none yet: any)."""
    if "daemonsets" in objects.unread:
        fix = "ask somebody who may list DaemonSets in all namespaces"
        return Check("other GPU plugins", "warn", "unknown: DaemonSets cannot be read", fix)
    found = []
    for one in objects.daemonsets:
        spec = map_of(map_of(map_of(one, "spec"), "template"), "spec")
        images = [str(item.get("image", "")) for item in objects_of(spec, "containers")]
        ours = component_of(one).startswith("hami-")
        elsewhere = nodes and not _selected(nodes, map_of(spec, "nodeSelector"))
        if not (ours or elsewhere) and any(_RIVAL.search(text) for text in (_name(one), *images)):
            found.append(f"{map_of(one, 'metadata').get('namespace')}/{_name(one)}")
    if found:
        fix = "remove it (GPU Operator: devicePlugin.enabled=false): two cannot offer one resource of a node"
        return Check("other GPU plugins", "fail", f"DaemonSet {_listed(sorted(found))}", fix)
    return Check("other GPU plugins", "ok", "none")


# --- after ------------------------------------------------------------------------------------------------


def _scheduler(objects: Objects) -> Check:
    name, pods = "scheduler", _component(objects.pods, COMPONENT_SCHEDULER)
    waiting = [one for one in pods if not _is_ready(one)]
    if not pods:
        fix = "helm status RELEASE; is this the right cluster, and --hami-namespace?"
        return Check(name, "fail", "no pod", fix)
    if waiting:
        result: Result = "fail" if len(waiting) == len(pods) else "warn"
        text = f"{len(pods) - len(waiting)} of {len(pods)} ready; not: {_names(waiting)}"
        return Check(name, result, text, "kubectl describe pod, and its log (vgpu-scheduler-extender)")
    return Check(name, "ok", f"{len(pods)} of {len(pods)} ready")


def _leader(objects: Objects, now: float) -> Check:
    name = "leader"
    if not objects.lease:
        return Check(name, "ok", "no election (one replica)")
    for lease in objects.leases:
        spec = map_of(lease, "spec")
        holder = str(spec.get("holderIdentity") or "")
        if _name(lease) != objects.lease or not holder:
            continue
        try:
            age = now - parse_rfc3339(str(spec.get("renewTime") or ""))
        except TimestampError:
            break
        duration = spec.get("leaseDurationSeconds")
        if age > (duration if isinstance(duration, int) else 15) + _LEASE_SLACK_S:
            text = f"{holder} renewed the Lease {age:.0f} s ago"
            return Check(name, "fail", text, "kube-scheduler beside the extender does not run: its log")
        return Check(name, "ok", holder)
    fix = "kube-scheduler beside the extender: its log"
    return Check(name, "fail", f"nobody holds Lease {objects.lease}", fix)


def _webhook(configurations: Sequence[Object]) -> Check:
    name = "webhook"
    ours = [
        hook for one in configurations for hook in objects_of(one, "webhooks") if hook.get("name") == WEBHOOK
    ]
    if not ours:
        text = "not configured: pods must name the scheduler themselves"
        return Check(name, "warn", text, "scheduler.admissionWebhook.enabled=true")
    if not all(map_of(hook, "clientConfig").get("caBundle") for hook in ours):
        text = "no CA bundle: the API server cannot call it, GPU pods go to the default scheduler"
        return Check(name, "fail", text, "the scheduler writes it within seconds; its log if it does not")
    return Check(name, "ok", "configured, with a CA bundle")


def _plugins(objects: Objects, nodes: Sequence[Object]) -> Check:
    name = "device plugin"
    ready = {
        map_of(one, "spec").get("nodeName")
        for one in _component(objects.pods, COMPONENT_PLUGIN)
        if _is_ready(one)
    }
    without = [node for node in nodes if _name(node) not in ready]
    if not nodes:
        return Check(name, "fail", "no node has the labels it asks for", "kubectl label node NODE gpu=on")
    if without:
        text = f"{len(nodes) - len(without)} of {len(nodes)} nodes; no ready pod on {_names(without)}"
        return Check(name, "fail", text, "kubectl describe pod, and its log (device-plugin)")
    return Check(name, "ok", f"ready on {len(nodes)} of {len(nodes)} nodes")


def _cards(nodes: Sequence[Object]) -> Check:
    """Cards that were divided by hand are Kubernetes' own: not registered, each profile a resource."""
    name, total, sick, without, divided = "cards", 0, 0, [], 0
    for node in nodes:
        devices = _registered(node)
        if not devices:
            if _offers_instances(node):
                divided += 1
            else:
                without.append(node)
        total += len(devices)
        sick += sum(not device.health for device in devices)
    if without:
        text = f"none registered on {_names(without)}"
        fix = "the device plugin's log on that node (register.failed, nvml); right with migStrategy single"
        return Check(name, "fail", text, fix)
    text = f"{total} on {len(nodes) - divided} nodes"
    if divided:
        text += f", MIG instances on {divided} nodes"
    if sick:
        return Check(name, "warn", f"{text}, {sick} unhealthy", "events of the node (HAMiDeviceUnhealthy)")
    return Check(name, "ok", text)


def _offers_instances(node: Object) -> bool:
    capacity = map_of(map_of(node, "status"), "capacity")
    return any(key.startswith(_INSTANCES) and str(amount) != "0" for key, amount in capacity.items())


def _capacity(nodes: Sequence[Object], resource: str) -> Check:
    """A card in MIG mode registers its instances; kubelet is offered ``max(deviceSplitCount, instances)``."""
    name, wrong = f"capacity of {resource}", []
    for node in nodes:
        devices = _registered(node)
        wanted = sum(device.count for device in devices)
        shown = str(map_of(map_of(node, "status"), "capacity").get(resource, "absent"))
        divided = any(device.mode == MIG_MODE for device in devices)
        more = divided and shown.isdecimal() and int(shown) > wanted
        if wanted and shown != str(wanted) and not more:
            wrong.append(f"{_name(node)} shows {shown}, {wanted} registered")
    if wrong:
        fix = "kubelet asks another plugin, or none: events of the node, the plugin's log"
        return Check(name, "fail", _listed(wrong), fix)
    return Check(name, "ok", "as registered")


def _node_config(nodes: Sequence[Object], text: str | None) -> Check:
    name = "node configuration"
    wanted = "" if text is None else hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]
    behind = [node for node in nodes if _annotations(node).get(NODE_CONFIG_APPLIED, "") != wanted]
    if behind and text is not None:
        fix = "kubelet brings an edit within a minute; then events of the node (HAMiNodeConfigInvalid)"
        return Check(name, "warn", f"not in force on {_names(behind)}", fix)
    return Check(name, "ok", "in force everywhere" if text is not None else "none")


def _locks(nodes: Sequence[Object], now: float) -> Check:
    old = []
    for node in nodes:
        lock = _annotations(node).get(NODE_LOCK)
        if not isinstance(lock, str):
            continue
        try:
            is_old = now - parse_lock(lock).time > DEFAULT_LOCK_TIMEOUT
        except LockFormatError:
            is_old = True
        if is_old:
            old.append(node)
    if old:
        fix = "the next pod there takes it over; the plugin's log says why"
        return Check("node locks", "warn", f"stale on {_names(old)}", fix)
    return Check("node locks", "ok", "none stale")


# --- objects ----------------------------------------------------------------------------------------------


def _selected(nodes: Iterable[Object], selector: Mapping[str, Any]) -> list[Object]:
    return [node for node in nodes if all(_labels(node).get(key) == value for key, value in selector.items())]


def plugin_selector(daemonsets: Iterable[Object]) -> Mapping[str, Any]:
    """The node labels that HAMi's own DaemonSet asks for."""
    for one in daemonsets:
        if component_of(one) == COMPONENT_PLUGIN:
            return map_of(map_of(map_of(map_of(one, "spec"), "template"), "spec"), "nodeSelector")
    return {"gpu": "on"}


def _registered(node: Object) -> Sequence[DeviceInfo]:
    """The cards that the node has registered."""
    text = _annotations(node).get(VENDOR_KEYS[NVIDIA].register)
    try:
        return decode_json(text, NVIDIA).devices if isinstance(text, str) else ()
    except RegistrationError:
        return ()


def _component(pods: Iterable[Object], component: str) -> list[Object]:
    return [one for one in pods if component_of(one) == component]


def _is_ready(pod: Object) -> bool:
    conditions = objects_of(map_of(pod, "status"), "conditions")
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


def _name(obj: Object) -> str:
    return str(map_of(obj, "metadata").get("name", ""))


def _labels(obj: Object) -> Mapping[str, Any]:
    return {key: str(value) for key, value in map_of(map_of(obj, "metadata"), "labels").items()}


def _annotations(obj: Object) -> Mapping[str, Any]:
    return map_of(map_of(obj, "metadata"), "annotations")


def _names(objects: Iterable[Object]) -> str:
    return _listed(sorted(map(_name, objects)))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
