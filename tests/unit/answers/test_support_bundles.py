"""`hami support-bundle`: what it holds, what never gets into it, and how it stays small."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import tarfile
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from hami.answers import gather as gathering
from hami.answers.bundle import Bundle
from hami.answers.gather import Wishes, gather
from hami.answers.hashing import digest
from hami.answers.snapshot import decode_snapshot
from hami.kube.client import Client, Limits
from hami.kube.errors import Forbidden, KubeError, NotFound, ResponseTooLarge, TransportError

NOW = 1_787_400_000.0
SALT = b"s" * 32
HUSH = "hunter2hunter2"
PLUGIN, SCHEDULER = "hami-device-plugin", "hami-scheduler"
CONFIG = (
    "nvidia:\n  resourceCountName: nvidia.com/gpu\n  resourceMemoryName: nvidia.com/gpumem\n"
    f"# my_token: {HUSH}\n"
)
CARD = {"id": "GPU-1", "count": 10, "devmem": 8000, "devcore": 100, "type": "T4", "health": True}


def pod(name: str, component: str, restarts: int = 0, *, ready: bool = True) -> dict[str, Any]:
    ports = [{"name": "metrics", "containerPort": 9394 if component == PLUGIN else 9395}]
    container = {
        "name": "main",
        "image": "registry.example/hami:v1",
        "env": [{"name": "PASSWORD", "value": HUSH}],
        "args": [f"--token={HUSH}"],
        "ports": ports,
    }
    return {
        "metadata": {
            "name": name,
            "namespace": "hami-system",
            "uid": f"uid-{name}",
            "labels": {"app.kubernetes.io/component": component},
            "annotations": {"example.com/x": HUSH},
        },
        "spec": {"nodeName": "gpu-1", "containers": [container]},
        "status": {
            "phase": "Running",
            "podIP": "10.1.2.3",
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{"name": "main", "restartCount": restarts}],
        },
    }


def user_pod() -> dict[str, Any]:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}
    env = [{"name": "KEY", "value": HUSH}]
    return {
        "metadata": {"name": "train-0", "namespace": "team", "uid": "uid-train"},
        "spec": {
            "schedulerName": SCHEDULER,
            "containers": [{"name": "main", "resources": {"limits": limits}, "env": env}],
        },
        "status": {
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "status": "False", "message": f"password={HUSH}"}],
        },
    }


def event(reason: str, component: str, uid: str, message: str = "m", name: str = "x") -> dict[str, Any]:
    involved = {"kind": "Pod", "namespace": "team", "name": name, "uid": uid}
    return {
        "metadata": {"name": f"{reason}.1", "namespace": "team"},
        "reason": reason,
        "message": message,
        "source": {"component": component},
        "involvedObject": involved,
        "lastTimestamp": "2026-08-21T08:20:39Z",
    }


class Cluster(Client):
    """Answers from objects by kind; reads only."""

    def __init__(self) -> None:
        self.limits = Limits()
        self.objects: dict[str, list[dict[str, Any]]] = {
            "nodes": [
                {
                    "metadata": {
                        "name": "gpu-1",
                        "labels": {"gpu": "on"},
                        "annotations": {
                            "hami.io/node-nvidia-register": json.dumps([CARD]),
                            "hami.io/mutex.lock": "2026-08-21T08:20:39Z,team,train-0",
                        },
                    },
                    "status": {"capacity": {"nvidia.com/gpu": "10"}},
                }
            ],
            "pods": [pod("hami-scheduler-1", SCHEDULER), pod("hami-device-plugin-1", PLUGIN, 2), user_pod()],
            "configmaps": [
                {
                    "metadata": {"name": "c", "labels": {"app.kubernetes.io/component": SCHEDULER}},
                    "data": {"device-config.yaml": CONFIG},
                }
            ],
            "events": [
                event("FilteringFailed", SCHEDULER, "other", f"no room; token={HUSH}"),
                event("FailedMount", "kubelet", "uid-hami-device-plugin-1"),
                event("FailedScheduling", "default-scheduler", "uid-train", name="train-0"),
                event("Scaled", "controller", "shop", name="shop-1"),
            ],
        }
        self.denied: set[str] = set()
        self.logs: Callable[[str, Mapping[str, str]], bytes] = lambda path, _: f"of {path}\n".encode()
        self.hanging = ""

    async def request(self, method: str, path: str, **options: Any) -> bytes:
        assert method == "GET"
        query = options.get("query") or {}
        if self.hanging and self.hanging in path:
            await asyncio.Event().wait()
        if path == "/version":
            return b'{"gitVersion": "v1.36.3"}'
        if path.endswith("/log"):
            return self.logs(path, query)
        if "/proxy/metrics" in path:
            return b'hami_vgpu_oom_total{namespace="team",pod="train-0"} 1\n'
        kind = path.rpartition("/")[2]
        if kind in self.denied:
            raise Forbidden(403, "Forbidden", f"alice may not list {kind}")
        if path.endswith("/namespaces/team/pods/train-0"):
            return json.dumps(user_pod()).encode()
        listed = self.objects.get(kind, [])
        if "component" in (selector := query.get("labelSelector", "")):
            label = "app.kubernetes.io/component"
            listed = [
                one for one in listed if one["metadata"].get("labels", {}).get(label, "none") in selector
            ]
        return json.dumps({"metadata": {}, "items": listed}).encode()


async def made(cluster: Cluster, wishes: Wishes | None = None) -> tuple[Bundle, dict[str, str]]:
    """A bundle, and the texts of the files of its archive."""
    bundle = await gather(cluster, wishes or Wishes(), NOW, lambda _: None)
    data = bundle.pack(NOW, "1.0", renamed=bool(wishes and wishes.salt))
    files = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for entry in archive:
            read = archive.extractfile(entry)
            assert read is not None
            content = read.read()
            content = gzip.decompress(content) if entry.name.endswith(".gz") else content
            files[entry.name.removeprefix("hami-support/")] = content.decode()
    return bundle, files


async def test_a_bundle_holds_what_is_asked_for_in_reports() -> None:
    told: list[str] = []
    cluster = Cluster()
    await gather(cluster, Wishes(), NOW, told.append)
    bundle, files = await made(cluster)
    assert set(files) == {
        "README.txt", "checks.json", "checks.txt", "locks.json", "snapshot.json.gz", "top.txt",
        "versions.json",
        "objects/configmaps.json", "objects/events.json", "objects/pods.json",
        "logs/hami-scheduler-1/main.log", "logs/hami-device-plugin-1/main.log",
        "logs/hami-device-plugin-1/main.previous-log",
        "metrics/hami-scheduler-1-9395.txt", "metrics/hami-device-plugin-1-9394.txt",
    }  # fmt: skip
    assert told[0] == "1/7 installation and checks"
    assert len(told) == 7
    assert "no pod" not in files["checks.txt"]
    assert json.loads(files["versions.json"])["images"] == ["registry.example/hami:v1"]
    assert "team/train-0" in json.loads(files["locks.json"])["locks"][0]["holder"]
    assert len(decode_snapshot(files["snapshot.json.gz"].encode()).pods) == 3
    assert all(f"  {path}\n" in files["README.txt"] for path in files if path != "README.txt")
    assert bundle.notes == []


async def test_events_are_those_about_hami_and_pods_with_devices() -> None:
    _, files = await made(Cluster())
    reasons = [one["reason"] for one in json.loads(files["objects/events.json"])]
    assert sorted(reasons) == ["FailedMount", "FailedScheduling", "FilteringFailed"]


async def test_events_are_those_of_hamis_namespace_where_all_may_not_be_read() -> None:
    class Namespaced(Cluster):
        async def request(self, method: str, path: str, **options: Any) -> bytes:
            if path == "/api/v1/events":
                raise Forbidden(403, "Forbidden", "alice may not list events")
            return await super().request(method, path, **options)

    bundle, files = await made(Namespaced())
    assert len(json.loads(files["objects/events.json"])) == 3
    assert [note.partition(":")[0] for note in bundle.notes] == ["events cannot be read but in hami-system"]


async def test_no_secret_gets_into_a_bundle() -> None:
    cluster = Cluster()
    cluster.logs = lambda *_: f"Authorization: Bearer {HUSH}\n".encode()
    _, files = await made(cluster)
    assert [path for path, text in files.items() if HUSH in text] == []
    assert "Authorization: " in files["logs/hami-scheduler-1/main.log"]


@pytest.mark.parametrize("kinds", [{"nodes"}, {"pods", "events"}, {"nodes", "pods", "configmaps", "events"}])
async def test_what_the_caller_may_not_read_is_told_and_the_rest_is_there(kinds: set[str]) -> None:
    cluster = Cluster()
    cluster.denied = kinds
    bundle, files = await made(cluster)
    assert {"README.txt", "checks.json", "snapshot.json.gz"} <= set(files)
    for kind in kinds:
        assert f"alice may not list {kind}" in files["README.txt"], kind
        assert any(f"alice may not list {kind}" in note for note in bundle.notes)


async def test_an_api_server_that_does_not_answer_is_an_error() -> None:
    class Silent(Cluster):
        async def request(self, method: str, path: str, **_: Any) -> bytes:
            raise TransportError(f"{method} {path}: no answer")

    with pytest.raises(KubeError, match="no answer"):
        await gather(Silent(), Wishes(), NOW, lambda _: None)


async def test_a_full_bundle_leaves_files_out_and_names_them() -> None:
    cluster = Cluster()
    cluster.logs = lambda *_: b"x" * 500_000
    bundle, files = await made(cluster, Wishes(max_bytes=600_000))
    assert sum(path.startswith("logs/") for path in files) == 1
    left_out = [note for note in bundle.notes if "is left out: the bundle has 600000 bytes at most" in note]
    assert len(left_out) == 2
    assert sum(len(text) for path, text in files.items() if path.startswith("logs/")) <= 600_000


async def test_of_a_long_log_the_newest_lines_are_kept() -> None:
    cluster = Cluster()
    asked: list[int] = []

    def log(path: str, query: Mapping[str, str]) -> bytes:
        lines = int(query["tailLines"])
        if "scheduler" in path:
            asked.append(lines)
        if lines > 100:
            raise ResponseTooLarge("too much")
        return b"end\n"

    cluster.logs = log
    bundle, files = await made(cluster)
    assert asked == [2000, 500, 125, 31]
    assert "log of hami-scheduler-1/main: the last 31 lines" in bundle.notes
    assert files["logs/hami-scheduler-1/main.log"] == "end\n"


async def test_a_log_that_cannot_be_read_is_told() -> None:
    def log(path: str, query: Mapping[str, str]) -> bytes:
        if query.get("previous"):
            raise NotFound(404, "NotFound", "previous terminated container not found")
        raise ResponseTooLarge("one line")

    cluster = Cluster()
    cluster.logs = log
    bundle, files = await made(cluster)
    assert not any(path.startswith("logs/") for path in files)
    assert any(note.startswith("previous log of hami-device-plugin-1/main: ") for note in bundle.notes)
    assert "log of hami-scheduler-1/main: a line is longer than 1048576 bytes" in bundle.notes


async def test_logs_may_be_left_out() -> None:
    bundle, files = await made(Cluster(), Wishes(log_lines=0))
    assert not any(path.startswith("logs/") for path in files)
    assert "logs: not wanted" in bundle.notes


async def test_what_takes_too_long_is_given_up_and_told() -> None:
    cluster = Cluster()
    cluster.hanging = "/log"
    bundle, files = await made(cluster, Wishes(timeout_s=0.5))
    assert "logs: not all was read within 0.5 s" in bundle.notes
    assert "checks.json" in files


async def test_of_many_device_plugins_the_troubled_ones_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_NODES", 2)
    cluster = Cluster()
    plugins = [pod(f"plugin-{number}", PLUGIN) for number in range(3)]
    plugins += [pod("plugin-sick", PLUGIN, ready=False), pod("plugin-restarts", PLUGIN, 5)]
    cluster.objects["pods"] = [pod("hami-scheduler-1", SCHEDULER), *plugins]
    bundle, files = await made(cluster)
    asked = {path.split("/")[1] for path in files if path.startswith("logs/")}
    assert asked == {"hami-scheduler-1", "plugin-sick", "plugin-restarts"}
    assert bundle.notes == ["logs and metrics: 2 of 5 device plugins, those in trouble first"]


async def test_names_stand_nowhere_in_a_bundle_without_names() -> None:
    cluster = Cluster()
    cluster.logs = lambda *_: b'{"event":"pod.bound","pod":"gone-team/gone-pod","node":"gpu-1"} 10.1.2.3\n'
    cluster.denied = {"configmaps"}
    _, files = await made(cluster, Wishes(salt=SALT))
    for name in ("gpu-1", "train-0", "gone-team", "gone-pod", "10.1.2.3"):
        assert [path for path, text in files.items() if name in text] == [], name
    node, team = digest("node", "gpu-1", SALT), digest("ns", "team", SALT)
    log = files["logs/hami-scheduler-1/main.log"]
    assert json.loads(log.partition("}")[0] + "}")["node"] == node
    assert node in files["snapshot.json.gz"]
    assert team in files["snapshot.json.gz"]
    assert f'namespace="{team}"' in files["metrics/hami-device-plugin-1-9394.txt"]
    assert "hami-system" in files["objects/pods.json"]
    assert "were replaced by digests" in files["README.txt"]


async def test_the_dashboard_beside_them_is_asked_for_its_log() -> None:
    cluster = Cluster()
    cluster.objects["pods"].append(pod("hami-dashboard-1", "hami-dashboard"))
    _, files = await made(cluster)
    assert "logs/hami-dashboard-1/main.log" in files
    assert not any(path.startswith("metrics/hami-dashboard") for path in files)
    assert len(json.loads(files["objects/pods.json"])) == 3


async def test_a_pod_whose_name_is_none_is_not_asked() -> None:
    cluster = Cluster()
    cluster.objects["pods"] = [pod("..", PLUGIN), pod("a/b", PLUGIN)]
    _, files = await made(cluster)
    assert not any(path.startswith(("logs/", "metrics/")) for path in files)


def test_paths_cannot_leave_the_archive() -> None:
    bundle = Bundle()
    bundle.add("logs/../../etc/passwd", "x")
    bundle.add("/abs", "x")
    with tarfile.open(fileobj=io.BytesIO(bundle.pack(NOW, "1"))) as archive:
        names = archive.getnames()
    assert names == ["hami-support/README.txt", "hami-support/_/abs", "hami-support/logs/_/_/etc/passwd"]


def test_an_archive_is_the_same_for_the_same_content() -> None:
    bundle = Bundle()
    bundle.add("a", "x")
    assert bundle.pack(NOW, "1") == bundle.pack(NOW, "1")
