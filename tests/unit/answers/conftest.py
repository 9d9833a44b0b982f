"""Snapshots of small clusters, built from plain words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from hami.answers.replay import Replay
from hami.answers.snapshot import Settings, Snapshot

NOW = 1_787_400_000.0


class Builder:
    """Collects objects; `snapshot()` is the cluster."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.pods: list[dict[str, Any]] = []
        self.quotas: list[dict[str, Any]] = []
        self.extra: dict[str, Any] = {}

    def node(self, name: str, cards: int = 1, **parts: Any) -> None:
        """A node with so many cards of `memory` MiB; ids are `<node>-<n>`."""
        card = {
            "count": 10,
            "devmem": parts.get("memory", 8000),
            "devcore": 100,
            "type": parts.get("model", "NVIDIA-T4"),
            "mode": "hami-core",
            "health": parts.get("health", True),
        }
        register = [{"id": f"{name}-{at}", "index": at, **card} for at in range(cards)]
        annotations = {
            "hami.io/node-nvidia-register": json.dumps(register),
            "hami.io/node-handshake": "Reported_now",
            **parts.get("annotations", {}),
        }
        self.nodes.append(
            {
                "metadata": {
                    "name": name,
                    "annotations": annotations,
                    "labels": {"kubernetes.io/hostname": name, **parts.get("labels", {})},
                },
                "spec": parts.get("spec", {}),
                "status": {"allocatable": {"nvidia.com/gpu": str(10 * cards), "cpu": "8", "pods": "110"}},
            }
        )

    def pod(self, name: str, **parts: Any) -> dict[str, Any]:
        """A waiting pod; amounts as of the resources: gpu=1, gpumem=, gpucores=."""
        obj = pod(name, **parts)
        self.pods.append(obj)
        return obj

    def holder(self, name: str, node: str, *devices: str, namespace: str = "default", **parts: Any) -> None:
        """A running pod; a device is `<card>,NVIDIA,<MiB>,<cores>`."""
        held = {
            "hami.io/vgpu-node": node,
            "hami.io/vgpu-time": "1",
            "hami.io/vgpu-devices-allocated": "".join(f"{one}:" for one in devices) + ";",
        }
        memory = int(devices[0].split(",")[2])
        obj = pod(name, namespace=namespace, gpu=len(devices), gpumem=memory, annotations=held, **parts)
        obj["spec"]["nodeName"] = node
        obj["status"] = {"phase": "Running"}
        self.pods.append(obj)

    def quota(self, namespace: str, **limits: int) -> None:
        """A quota object."""
        hard = {f"limits.nvidia.com/{key}": str(limit) for key, limit in limits.items()}
        self.quotas.append({"metadata": {"name": "quota", "namespace": namespace}, "spec": {"hard": hard}})

    def snapshot(self, **settings: Any) -> Snapshot:
        """The cluster so far; keywords as of `Settings`."""
        return Snapshot(NOW, Settings(**settings), "", self.nodes, self.pods, self.quotas, **self.extra)

    def replay(self, **settings: Any) -> Replay:
        """The cluster in memory."""
        return Replay(self.snapshot(**settings))


def pod(
    name: str,
    *,
    namespace: str = "default",
    annotations: Mapping[str, str] | None = None,
    spec: Mapping[str, Any] | None = None,
    scheduler: str = "hami-scheduler",
    **amounts: int,
) -> dict[str, Any]:
    """A pod object with one container."""
    limits = {f"nvidia.com/{key}": str(amount) for key, amount in (amounts or {"gpu": 1}).items()}
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{namespace}-{name}",
            "annotations": dict(annotations or {}),
        },
        "spec": {
            "schedulerName": scheduler,
            "containers": [{"name": "main", "resources": {"limits": limits}}],
            **(spec or {}),
        },
        "status": {"phase": "Pending"},
    }


@pytest.fixture(scope="session")
def make_cluster() -> type[Builder]:
    """What makes empty clusters, for tests that need many."""
    return Builder


@pytest.fixture
def cluster() -> Builder:
    """An empty cluster."""
    return Builder()
