"""Snapshot files: what is in them, what is not, and what a damaged one is answered."""

from __future__ import annotations

import gzip
from typing import Any

import pytest
from msgspec.structs import replace

from hami.answers import snapshot as snapshots
from hami.answers.errors import SnapshotError
from hami.answers.explain import explain
from hami.answers.hashing import hash_names
from hami.answers.monitors import metrics_port
from hami.answers.redact import Redaction
from hami.answers.replay import Replay, profiles_of
from hami.answers.snapshot import ContainerUse, decode_snapshot, encode_snapshot
from hami.answers.top import top

Builder = Any
SALT = b"salt"


@pytest.fixture
def redaction() -> Redaction:
    """For the usual NVIDIA names."""
    return Redaction(profiles_of("", ascend=False, iluvatar=False))


def secretive_pod() -> dict[str, Any]:
    """A pod that holds a secret wherever a pod can hold one."""
    secret = "hunter2"
    return {
        "metadata": {
            "name": "p",
            "namespace": "team",
            "uid": "u",
            "labels": {"token": secret},
            "annotations": {
                "kubectl.kubernetes.io/last-applied-configuration": secret,
                "note": secret,
                "nvidia.com/use-gputype": "A100",
                "hami.io/vgpu-node": "n1",
            },
            "managedFields": [{"manager": secret}],
        },
        "spec": {
            "schedulerName": "hami-scheduler",
            "volumes": [{"name": secret}],
            "imagePullSecrets": [{"name": secret}],
            "serviceAccountName": secret,
            "containers": [
                {
                    "name": "main",
                    "image": secret,
                    "command": [secret],
                    "args": [secret],
                    "env": [{"name": "PASSWORD", "value": secret}],
                    "resources": {"limits": {"nvidia.com/gpu": "1"}},
                    "securityContext": {"privileged": True, "runAsUser": 7},
                    "lifecycle": {"x": secret},
                }
            ],
        },
        "status": {
            "phase": "Pending",
            "containerStatuses": [
                {"name": "main", "image": secret, "state": {"waiting": {"message": secret}}}
            ],
            "podIP": secret,
        },
    }


def test_no_secret_of_a_pod_reaches_a_snapshot_and_all_that_matters_does(
    redaction: Redaction, cluster: Builder
) -> None:
    kept = redaction.pod(secretive_pod())
    assert b"hunter2" not in gzip.decompress(encode_snapshot(replace(cluster.snapshot(), pods=[kept])))
    assert kept["metadata"]["annotations"] == {"nvidia.com/use-gputype": "A100", "hami.io/vgpu-node": "n1"}
    assert kept["spec"]["containers"] == [
        {
            "name": "main",
            "resources": {"limits": {"nvidia.com/gpu": "1"}},
            "securityContext": {"privileged": True},
        }
    ]


def test_a_redacted_cluster_gives_the_same_answers(redaction: Redaction, cluster: Builder) -> None:
    fill(cluster)
    whole = cluster.snapshot()
    kept = replace(
        whole,
        nodes=[redaction.node(one) for one in whole.nodes],
        pods=[redaction.pod(one) for one in whole.pods],
        quotas=[redaction.quota(one) for one in whole.quotas],
    )
    again = decode_snapshot(encode_snapshot(kept))
    assert Replay(again).state.fingerprint() == Replay(whole).state.fingerprint()
    assert explain(Replay(again), "team", "big") == explain(Replay(whole), "team", "big")


def test_hashed_names_stand_nowhere_in_the_file_and_the_answers_stay(cluster: Builder) -> None:
    fill(cluster)
    cluster.extra["containers_use"] = [ContainerUse("team", "small", "main", "node-of-ours-0", 1 << 30, 5.0)]
    whole = cluster.snapshot()
    hashed = hash_names(whole, SALT)
    text = gzip.decompress(encode_snapshot(hashed)).decode()
    registered = text.replace("node-of-ours-0", "").replace("node-of-ours-1", "")  # ids of cards
    for name in ("node-of-ours", '"team"', '"small"', '"big"', "our-secret-message"):
        assert name not in registered, name
    before, after = top(Replay(whole)), top(Replay(hashed))
    assert [(row.memory, row.used_memory) for row in after.pods] == [
        (row.memory, row.used_memory) for row in before.pods
    ]
    pods = [one["metadata"] for one in hashed.pods]
    waiting = next(one for one, old in zip(pods, whole.pods, strict=True) if old["metadata"]["name"] == "big")
    old = explain(Replay(whole), "team", "big")
    new = explain(Replay(hashed), waiting["namespace"], waiting["name"])
    assert [one.reason for one in new.refusals] == [one.reason for one in old.refusals]
    assert len(new.changes) == len(old.changes)


def test_digests_differ_between_snapshots(cluster: Builder) -> None:
    cluster.pod("p")
    names = {hash_names(cluster.snapshot(), salt).pods[0]["metadata"]["name"] for salt in (b"a", b"b", b"a")}
    assert len(names) == 2


def fill(cluster: Builder) -> None:
    """A node with a holder, a waiting pod bound to it by name, and a quota."""
    cluster.node("node-of-ours", cards=2)
    cluster.holder("small", "node-of-ours", "node-of-ours-0,NVIDIA,3000,20", namespace="team")
    waiting = cluster.pod(
        "big",
        namespace="team",
        gpu=2,
        gpumem=6000,
        spec={"nodeSelector": {"kubernetes.io/hostname": "node-of-ours"}},
    )
    waiting["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "message": "our-secret-message"}
    ]
    cluster.quota("team", gpumem=20_000)


def test_a_file_is_the_same_for_the_same_snapshot(cluster: Builder) -> None:
    cluster.node("n1")
    assert encode_snapshot(cluster.snapshot()) == encode_snapshot(cluster.snapshot())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "no snapshot"),
        (b"not json", "no snapshot"),
        (b'{"nodes": 1}', "no snapshot"),
        (b"\x1f\x8bgarbage", "damaged"),
        (gzip.compress(b'{"a": 1}' * 1000, mtime=0)[:-20], "its end is missing"),
    ],
)
def test_a_file_that_is_no_snapshot_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(SnapshotError, match=text):
        decode_snapshot(data)


def test_a_file_of_another_format_is_refused(cluster: Builder) -> None:
    data = encode_snapshot(replace(cluster.snapshot(), format="hami-snapshot/9"))
    with pytest.raises(SnapshotError, match="format 'hami-snapshot/9', this version reads hami-snapshot/1"):
        decode_snapshot(data)


def test_a_bomb_is_refused_without_being_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MAX_TEXT_BYTES", 1 << 20)
    with pytest.raises(SnapshotError, match="more than 1048576 bytes"):
        decode_snapshot(gzip.compress(b" " * (4 << 20)))


def test_objects_that_nobody_can_read_are_left_out_and_named(cluster: Builder) -> None:
    cluster.node("n1")
    cluster.nodes.append({"metadata": {"name": "odd", "labels": 5}})
    cluster.pods.append({"metadata": {"name": "weird"}, "spec": {"containers": "none"}})
    replay = cluster.replay()
    assert [line.split(" is left out")[0] for line in replay.skipped] == ["Node odd", "Pod weird"]
    assert list(replay.nodes) == ["n1"]


@pytest.mark.parametrize(
    ("ports", "wanted"),
    [
        ([{"name": "metrics", "containerPort": 19394}], 19394),
        ([{"name": "plugin-metrics", "containerPort": 9396}], 9394),
        ([{"name": "metrics", "containerPort": "x"}, 7], 9394),
        (None, 9394),
    ],
)
def test_usage_is_read_where_the_pod_says_that_its_monitor_listens(ports: Any, wanted: int) -> None:
    containers = [{"name": "device-plugin"}, {"name": "vgpu-monitor", "ports": ports}]
    assert metrics_port({"spec": {"containers": containers}}) == wanted
