"""`hami explain`, `top`, `simulate`, `snapshot`, `locks` and `support-bundle` against the installed chart
(docs/answers.md, operate.md, troubleshooting.md)."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import NODE, SYSTEM, Cluster, Hami, allocated, container, limits, pod, until

PROGRAMS = Path(sys.executable).parent
CONFIG = "hami-scheduler-device"
WORK = ["gpuprog", "worker", "--mib", "1500", "--kernel-us", "500", "--heartbeat", "5"]


class Asker:
    """A user at a machine with a kubeconfig."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            "PATH": f"{PROGRAMS}:{cluster.programs}:{os.environ['PATH']}",
            "HOME": str(folder),
            "KUBECONFIG": str(cluster.kubeconfig),
        }

    def run(self, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """A command, run to its end in a folder of its own."""
        return subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=self.folder,
            env=self.environment,
        )

    def text(self, *command: str) -> str:
        """What a command prints; it must succeed."""
        done = self.run(*command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr or done.stdout}"
        return done.stdout

    def json(self, *command: str) -> Any:
        """The answer as an object."""
        return json.loads(self.text(*command, "-o", "json"))


@pytest.fixture
def user(cluster: Cluster, tmp_path: Path) -> Asker:
    return Asker(cluster, tmp_path)


def test_a_user_asks_what_is_granted_used_and_would_fit_and_why_a_pod_waits(
    cluster: Cluster, hami: Hami, namespace: str, user: Asker
) -> None:
    cluster.create(
        pod(namespace, "works", container(limits(memory_mib=30000), command=WORK)),
        pod(namespace, "beside", container(limits(memory_mib=30000))),
    )
    works, beside = (allocated(item)[0] for item in cluster.running(namespace, "works", "beside"))
    assert works != beside
    cluster.create(pod(namespace, "waits", container(limits(memory_mib=20480))))
    until(
        "the scheduler says why the pod waits",
        lambda: "2/2 CardInsufficientMemory" in cluster.events(namespace, "waits"),
    )

    waits = user.json("hami", "explain", f"{namespace}/waits")
    assert waits["notes"] == []
    assert [refusal["reason"] for refusal in waits["refusals"]] == ["2/2 CardInsufficientMemory"]
    assert f"ask for nvidia.com/gpumem: 10960 instead of 20480: fits on {NODE}" in waits["changes"]
    runs = user.json("hami", "explain", f"{namespace}/works")
    assert runs["node"] == NODE
    assert [card["id"] for card in runs["cards"] if card["chosen"]] == works

    def used() -> Any:
        found = user.json("hami", "top", "-n", namespace)
        rows = {row["pod"]: row for row in found["pods"]}
        return found if (rows[f"{namespace}/works"]["used_memory"] or 0) >= 1500 else None

    found = until(
        "the monitor's figures arrive through the API server",
        used,
        lambda: user.text("hami", "top", "pods"),
    )
    assert found["notes"] == []
    rows = {row["pod"]: row for row in found["pods"]}
    assert {name: row["memory"] for name, row in rows.items()} == {
        f"{namespace}/{name}": 30000 for name in ("works", "beside")
    }
    cards = {card["id"]: card for card in found["cards"]}
    assert sorted(cards) == sorted(card["id"] for card in hami.registered())
    assert cards[works[0]]["used_memory"] >= 1500
    (node,) = found["nodes"]
    assert (node["cards"], node["healthy"], node["pods"], node["memory"]["granted"]) == (2, 2, 2, 60000)

    small = json.dumps(pod(namespace, "small", container(limits(memory_mib=10960))))
    fits = user.run("hami", "simulate", "-", "-o", "json", text=small)
    assert fits.returncode == 0, fits
    assert [one["node"] for one in json.loads(fits.stdout)["pods"]] == [NODE]
    assert user.run("hami", "simulate", "-", text=small.replace("10960", "10961")).returncode == 1
    names = {item["metadata"]["name"] for item in cluster.items("pods", namespace)}
    assert names == {"works", "beside", "waits"}, "asking creates nothing"

    user.text("hami", "snapshot", "state.json.gz")
    snapshot = json.loads(gzip.decompress((user.folder / "state.json.gz").read_bytes()))
    assert snapshot["notes"] == []
    assert snapshot["device_config"] == cluster.get("configmap", CONFIG, SYSTEM)["data"]["device-config.yaml"]
    # spread is what values.yaml says; without the Deployment it would be binpack
    assert snapshot["settings"]["node_policy"] == "spread"
    again = user.json("hami", "explain", f"{namespace}/waits", "--snapshot", "state.json.gz")
    assert again["refusals"] == waits["refusals"]


def test_kubectl_finds_the_commands_as_its_plugin(cluster: Cluster, hami: Hami, user: Asker) -> None:
    assert str(PROGRAMS / "kubectl-hami") in user.text("kubectl", "plugin", "list")
    printed = user.text("kubectl", "hami", "top", "cards")
    assert all(card["id"] in printed for card in hami.registered())
    assert "note" not in printed


def test_a_lock_that_nobody_needs_is_shown_and_removed(cluster: Cluster, hami: Hami, user: Asker) -> None:
    lock = "2026-01-01T00:00:00Z,gone,gone"
    cluster.kubectl("annotate", "node", NODE, f"hami.io/mutex.lock={lock}")
    try:
        (shown,) = user.json("hami", "locks")["locks"]
        assert (shown["node"], shown["holder"], shown["state"], shown["text"]) == (
            NODE,
            "gone/gone",
            "stale",
            lock,
        )
        assert user.text("hami", "locks", "--release", NODE, "--yes") == "released 1\n"
        assert "hami.io/mutex.lock" not in cluster.get("node", NODE)["metadata"]["annotations"]
        assert hami.registered()
    finally:
        cluster.kubectl("annotate", "node", NODE, "hami.io/mutex.lock-")


def _files(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as opened:
        read = {entry.name.partition("/")[2]: opened.extractfile(entry) for entry in opened}
        return {
            name: file.read().decode("utf-8", "replace") for name, file in read.items() if file is not None
        }


def test_a_bundle_for_a_report_holds_logs_and_metrics_and_no_key(
    cluster: Cluster, hami: Hami, user: Asker
) -> None:
    done = user.run("hami", "support-bundle")
    assert done.returncode == 0, done
    files = _files(user.folder / "hami-support.tar.gz")
    assert "note:" not in done.stderr, done.stderr
    checks = json.loads(files["checks.json"])
    assert [one for one in checks["verify"] if one["result"] != "ok"] == []
    names = {item["metadata"]["name"] for item in cluster.items("pods", SYSTEM)}
    for name in names:
        plugin = "device-plugin" in name
        for container_name in ("device-plugin", "vgpu-monitor") if plugin else ("kube-scheduler",):
            assert f"logs/{name}/{container_name}.log" in files
        wanted = "hami_host_gpu_memory_total_bytes" if plugin else "hami_scheduler_synced"
        assert wanted in files[f"metrics/{name}-{9394 if plugin else 9395}.txt"]
    key = cluster.get("secret", "hami-scheduler-tls", SYSTEM)["data"]
    assert not any(key["tls.key"][:40] in text or "PRIVATE KEY" in text for text in files.values())
    assert "CN=hami-scheduler until" in files["objects/mutatingwebhookconfigurations.json"]


def test_a_user_who_may_only_read_a_namespace_gets_a_bundle_that_says_what_it_lacks(
    cluster: Cluster, hami: Hami, namespace: str, user: Asker
) -> None:
    assert hami.is_installed
    cluster.kubectl("create", "serviceaccount", "reader", "-n", namespace)
    account = f"--serviceaccount={namespace}:reader"
    cluster.kubectl("create", "rolebinding", namespace, "-n", SYSTEM, "--clusterrole=view", account)
    try:
        token = cluster.kubectl("create", "token", "reader", "-n", namespace).strip()
        mine = user.folder / "reader.conf"
        mine.write_text(cluster.kubeconfig.read_text())
        words = ("--kubeconfig", str(mine))
        user.text("kubectl", *words, "config", "set-credentials", "reader", f"--token={token}")
        user.text("kubectl", *words, "config", "set-context", "--current", "--user=reader")
        done = user.run("hami", "support-bundle", "--hami-namespace", SYSTEM, "--hash-names", *words)
        assert done.returncode == 0, done
    finally:
        cluster.kubectl("delete", "rolebinding", namespace, "-n", SYSTEM)
    files = _files(user.folder / "hami-support.tar.gz")
    assert any(path.startswith("logs/hami-scheduler-") for path in files)
    for kind in ("nodes", "mutatingwebhookconfigurations", "events"):
        assert kind in files["README.txt"].partition("Not read, or cut")[2]
    assert not any(token in text or NODE in text for text in files.values())
