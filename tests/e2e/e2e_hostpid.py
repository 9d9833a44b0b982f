"""What the tests of the host PID broker share: processes in pods, who answered them, and what is found."""

from __future__ import annotations

import re
from typing import Any

from e2e_harness import SYSTEM, Cluster, Hami, Object, container, limits, pod, until

ON = ("--set", "devicePlugin.hostPIDBroker.enabled=true")
ENDS_ON_TERM = ["sh", "-c", "trap 'exit 1' TERM; sleep infinity & wait"]
WORKER = "gpuprog worker --mib 100 --kernel-us 500 --heartbeat 1 > /dev/null 2>&1 < /dev/null &"
READ_REGION = (
    "import sys; from hami.node.monitor.files import open_containers, read_directory as read;"
    "c = open_containers('/usr/local/vgpu/containers');"
    "print(*sorted(read(c.__enter__(), sys.argv[1]).host_pids))"
)
NODE_PIDS = (
    'for f in $(grep -ls "$0" /proc/[0-9]*/cgroup); do d=${f%/cgroup};'
    ' [ "$(cat "$d/comm")" = gpuprog ] && echo "${d#/proc/}"; done | sort -n'
)


def create(cluster: Cluster, namespace: str, name: str, *, runtime: str = "", **more: Any) -> Object:
    """A pod with a share of a card, once it runs; TERM ends its container, which is then started again."""
    asked = container(limits(memory_mib=3000), command=ENDS_ON_TERM, **more)
    spec: dict[str, Any] = {"runtimeClassName": runtime} if runtime else {}
    cluster.create(pod(namespace, name, asked, **spec))
    (found,) = cluster.running(namespace, name)
    return found


def restart(cluster: Cluster, namespace: str, name: str) -> Object:
    """The pod, once its container was started again and runs."""

    def count() -> int:
        found = cluster.get("pod", name, namespace)["status"]["containerStatuses"][0]
        return int(found["restartCount"])

    before = count()
    cluster.execute(namespace, name, "sh", "-c", "kill -TERM 1")
    until(f"the container of {name} was restarted", lambda: count() > before)
    (found,) = cluster.running(namespace, name)
    return found


def start(cluster: Cluster, namespace: str, name: str) -> None:
    """One more CUDA process in the pod."""
    done = cluster.execute(namespace, name, "sh", "-c", WORKER)
    assert done.code == 0, done


def mapping_is_right(cluster: Cluster, hami: Hami, found: Object, processes: int) -> None:
    """The monitor finds in the pod's region exactly the PIDs that its processes have on the node."""
    uid = found["metadata"]["uid"]
    monitor = hami.pods("device-plugin")[0]

    def pids() -> tuple[list[str], list[str]]:
        seen = cluster.execute(
            SYSTEM, monitor, "python3", "-c", READ_REGION, f"{uid}_main", container="vgpu-monitor"
        )
        return seen.out.split(), cluster.node("sh", "-c", NODE_PIDS, uid).split()

    def right() -> bool:
        region, node = pids()
        return region == node and len(node) == processes

    until(
        f"{processes} processes of {found['metadata']['name']} have the PIDs of the node",
        right,
        lambda: str(pids()),
    )


def answered(cluster: Cluster, hami: Hami) -> float:
    """Requests that the broker has answered with a PID."""
    (plugin,) = hami.pods("device-plugin")
    path = f"/api/v1/namespaces/{SYSTEM}/pods/http:{plugin}:9396/proxy/metrics"
    text = cluster.kubectl("get", "--raw", path)
    return sum(map(float, re.findall(r'^hami_hostpid_broker_requests_total{result="ok"} (\S+)$', text, re.M)))


def asks(cluster: Cluster, hami: Hami, namespace: str, found: Object, processes: int) -> None:
    """One more process of the pod gets its PID from the broker."""
    before = answered(cluster, hami)
    start(cluster, namespace, found["metadata"]["name"])
    mapping_is_right(cluster, hami, found, processes)
    assert answered(cluster, hami) > before


def does_without(cluster: Cluster, hami: Hami, namespace: str, found: Object, processes: int) -> None:
    """One more process of a pod without the mount finds its PID on the existing path."""
    name = found["metadata"]["name"]
    assert not has_mount(cluster, namespace, name)
    before = answered(cluster, hami)
    start(cluster, namespace, name)
    mapping_is_right(cluster, hami, found, processes)
    assert answered(cluster, hami) == before, "a pod without the mount cannot ask"


def has_mount(cluster: Cluster, namespace: str, name: str) -> bool:
    """Whether the broker's directory is mounted in the pod."""
    mounts = cluster.execute(namespace, name, "cat", "/proc/self/mounts")
    assert mounts.code == 0, mounts
    return " /tmp/vgpulock/hostpid " in mounts.out
