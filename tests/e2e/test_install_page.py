"""docs/install.md and docs/operate.md, word for word as a new user: install, verify, uninstall.

The words in capitals and the registry are what the pages tell the reader to replace. Images are not pushed:
the node knows those of the test cluster under the names that the page gives them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator

import pytest
from e2e_harness import NODE, ROOT, Cluster, until

PAGES = ROOT / "docs"
NAMES = {
    "hami.local/hami:dev": "registry.example/projecthami/hami:v0.1.0",
    "hami.local/test-program:dev": "registry.example/projecthami/test-program:v0.1.0",
}


def _section(page: str, title: str) -> str:
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", (PAGES / page).read_text(), re.M | re.S)
    return str(found)


def _block(page: str, title: str) -> str:
    """The commands of a section: its only block of code."""
    (found,) = re.findall(r"^```(?:sh)?\n(.*?)^```$", _section(page, title), re.M | re.S)
    return str(found)


def _first_cells(page: str, title: str) -> list[str]:
    """The commands in the first column of a section's table, as a browser shows them."""
    rows = re.findall(r"^\| `(.*?)` \|", _section(page, title), re.M)
    return [row.replace("\\|", "|") for row in rows]


def _run(cluster: Cluster, commands: str) -> str:
    """What the commands print, run by a shell in the repository's root; they must succeed."""
    environment = {
        **os.environ,
        "PATH": f"{cluster.programs}:{os.environ['PATH']}",
        "KUBECONFIG": str(cluster.kubeconfig),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", re.sub(r"\bNODE\b", NODE, commands)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def page_cluster(bare: Cluster) -> Iterator[Cluster]:
    """The cluster without HAMi, as a new user finds it, and afterwards."""
    version = bare.get("node", NODE)["status"]["nodeInfo"]["kubeletVersion"]
    scheduler = f"kube-scheduler:{version}"
    for image, name in (NAMES | {f"hami.local/{scheduler}": f"registry.k8s.io/{scheduler}"}).items():
        bare.alias(image, name)
    bare.kubectl("label", "node", NODE, "gpu-")
    try:
        yield bare
    finally:
        bare.run("helm", "uninstall", "hami", "--namespace", "kube-system", "--wait", "--ignore-not-found")
        bare.kubectl("label", "node", NODE, "gpu=on", "--overwrite")


def test_the_pages_install_verify_and_uninstall(page_cluster: Cluster) -> None:
    assert "docker build -f images/hami/Dockerfile" in _block("install.md", "Image")
    for name in NAMES.values():
        assert f" {name}" in _block("install.md", "Image")
    _run(page_cluster, _block("install.md", "Install"))

    pods, offered, registered, bundle, lease, apply, wait, shown, delete = _first_cells(
        "install.md", "Verify"
    )
    until(
        "the pods are ready",
        lambda: len(re.findall(r"^hami-\S+ +2/2 +Running", _run(page_cluster, pods), re.M)) == 3,
        lambda: _run(page_cluster, pods),
    )
    until("the node offers its cards", lambda: _run(page_cluster, offered) == "20")
    assert _run(page_cluster, registered).count('"id"') == 2
    until("the webhook is trusted", lambda: len(_run(page_cluster, bundle)) == 20)
    until("a scheduler leads", lambda: "hami-scheduler-" in _run(page_cluster, lease))
    _run(page_cluster, apply)
    try:
        _run(page_cluster, wait)
        assert json.loads(_run(page_cluster, shown))["total_bytes"] == 4000 << 20
    finally:
        _run(page_cluster, delete)

    (uninstall,) = re.findall(r"^\d\. `(helm .*?)`", _section("operate.md", "Uninstall"), re.M)
    _run(page_cluster, uninstall)
    until("the pods are gone", lambda: "hami-" not in _run(page_cluster, pods))
    cleanup = _block("operate.md", "Uninstall").replace("kubectl delete runtimeclass nvidia", "true")
    _run(page_cluster, cleanup)
    left = _run(page_cluster, "kubectl get mutatingwebhookconfigurations,validatingadmissionpolicies -o name")
    assert "hami" not in left
    notes = page_cluster.get("node", NODE)["metadata"]["annotations"]
    assert [name for name in notes if name.startswith("hami.io/")] == []
