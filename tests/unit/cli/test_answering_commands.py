"""`hami explain`, `top`, `simulate` and `snapshot` as a user calls them, on a snapshot file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hami.answers.snapshot import Settings, Snapshot, decode_snapshot, encode_snapshot
from hami.cli.main import main
from hami.cli.sources import Source

REGISTER = json.dumps(
    [{"id": "card-0", "count": 10, "devmem": 8000, "devcore": 100, "type": "T4", "health": True}]
)
POD = """
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  containers:
  - name: main
    resources: {limits: {nvidia.com/gpu: 1, nvidia.com/gpumem: %d}}
"""


def hami(*words: str, text: str | None = None) -> Result:
    """One call of the command."""
    return CliRunner().invoke(main, [*words], input=text, prog_name="hami")


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A cluster of one node with one card, and a pod that waits for more than it has."""
    node: dict[str, Any] = {
        "metadata": {
            "name": "n1",
            "annotations": {
                "hami.io/node-nvidia-register": REGISTER,
                "hami.io/node-handshake": "Reported_now",
            },
        },
        "spec": {},
        "status": {},
    }
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "9000"}
    pod = {
        "metadata": {"name": "waits", "namespace": "team", "uid": "u"},
        "spec": {
            "schedulerName": "hami-scheduler",
            "containers": [{"name": "main", "resources": {"limits": limits}}],
        },
        "status": {"phase": "Pending"},
    }
    path = tmp_path / "cluster.json.gz"
    path.write_bytes(encode_snapshot(Snapshot(1_787_400_000.0, Settings(), "", [node], [pod], [])))
    return str(path)


@pytest.mark.parametrize("words", [("team/waits",), ("waits", "-n", "team"), ("pod/waits", "-n", "team")])
def test_a_pod_is_named_with_its_namespace_or_beside_it(file: str, words: tuple[str, ...]) -> None:
    result = hami("explain", *words, "--snapshot", file)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Pod team/waits (Pending)\n  No node fits")
    assert "- ask for nvidia.com/gpumem: 8000 instead of 9000: fits on n1" in result.output


def test_a_pod_that_is_not_there_is_an_error_with_a_hint(file: str) -> None:
    result = hami("explain", "waits", "--snapshot", file)
    assert result.exit_code == 1
    assert result.output == "Error: no pod waits in namespace default; there is one in team: add -n\n"


def test_answers_are_json_on_request(file: str) -> None:
    assert (
        json.loads(hami("explain", "team/waits", "-o", "json", "--snapshot", file).output)["placed"] is False
    )
    top = json.loads(hami("top", "-o", "json", "--snapshot", file).output)
    assert top["cluster"][0]["memory"] == {"granted": 0, "total": 8000}
    simulated = hami("simulate", "-", "-o", "json", "--snapshot", file, text=POD % ("p", 1))
    assert json.loads(simulated.output)["fits"] == 1


def test_the_exit_status_of_simulate_says_whether_all_fit(file: str) -> None:
    fits = hami("simulate", "-", "--snapshot", file, text=POD % ("p", 8000))
    assert (fits.exit_code, fits.output.splitlines()[-1]) == (0, "1 of 1 pods fit")
    too_much = hami(
        "simulate", "-", "--snapshot", file, text=(POD % ("p", 5000)) + "---" + (POD % ("q", 5000))
    )
    assert (too_much.exit_code, too_much.output.splitlines()[-1]) == (1, "1 of 2 pods fit")
    no_pods = hami("simulate", "-", "--snapshot", file, text="kind: Namespace")
    assert (no_pods.exit_code, no_pods.output.startswith("Error: ")) == (2, True)


def test_a_snapshot_of_a_snapshot_can_hash_its_names(file: str, tmp_path: Path) -> None:
    target = tmp_path / "hashed.json.gz"
    result = hami("snapshot", str(target), "--hash-names", "--snapshot", file)
    assert result.exit_code == 0, result.output
    hashed = decode_snapshot(target.read_bytes())
    assert hashed.names_hashed
    assert hashed.pods[0]["metadata"]["name"].startswith("pod-")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    "command", [("explain", "p"), ("top",), ("simulate", "-"), ("snapshot", "/dev/null/x")]
)
def test_a_file_that_is_no_snapshot_is_named(command: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text("hello")
    result = hami(*command, "--snapshot", str(path), text=POD % ("p", 1))
    assert result.exit_code == (2 if command[0] == "simulate" else 1)
    assert result.output.startswith(f"Error: {path}: no snapshot of `hami snapshot`")
    missing = hami(*command, "--snapshot", "/nonexistent", text=POD % ("p", 1))
    assert missing.output == "Error: /nonexistent: No such file or directory\n"


def kubeconfig(folder: Path, namespace: str) -> Path:
    """A kubeconfig whose context names a namespace and a server that does not answer."""
    path = folder / "config"
    context = {"cluster": "k", "user": "u", "namespace": namespace}
    path.write_text(
        json.dumps(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": context}],
                "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:9"}}],
                "users": [{"name": "u", "user": {}}],
            }
        )
    )
    return path


def test_a_pod_without_a_namespace_is_in_that_of_the_context(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = decode_snapshot(Path(file).read_bytes())
    monkeypatch.setattr(Source, "read", lambda _self, **_kind: snapshot)
    mine = str(kubeconfig(tmp_path, "team"))
    assert hami("explain", "waits", "--kubeconfig", mine).output.startswith("Pod team/waits (Pending)")
    simulated = hami("simulate", "-", "--kubeconfig", mine, text=POD % ("p", 1))
    assert "team/p" in simulated.output
    elsewhere = hami("explain", "waits", "-n", "other", "--kubeconfig", mine)
    assert "no pod waits in namespace other" in elsewhere.output


def test_a_cluster_that_cannot_be_reached_is_an_error_in_words(tmp_path: Path) -> None:
    result = hami("top", "--kubeconfig", str(kubeconfig(tmp_path, "")))
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert "the API server http://127.0.0.1:" in result.output


def test_watching_a_file_is_refused(file: str) -> None:
    result = hami("top", "--watch", "1", "--snapshot", file)
    assert result.exit_code == 2
    assert "a snapshot does not change" in result.output
