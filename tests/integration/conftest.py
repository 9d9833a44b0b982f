"""Fixtures of the integration tests: an embedded API server, and a whole embedded cluster."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hami.local.api.apiserver import ApiServer
from hami.local.cluster import Cluster, ClusterConfig, GpuNode, default_native

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture
async def embedded_api() -> AsyncIterator[ApiServer]:
    """A running API server on a free loopback port; bookmarks come five times a second."""
    server = ApiServer(bookmark_interval_s=0.2)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
def kubeconfig(embedded_api: ApiServer, tmp_path: Path) -> Path:
    """A kubeconfig file for ``embedded_api``."""
    path = tmp_path / "kubeconfig"
    embedded_api.write_kubeconfig(path)
    return path


@pytest.fixture
def kubectl() -> str | None:
    """The path of kubectl, None on a machine without it: tests then make its requests themselves."""
    return shutil.which("kubectl")


@pytest.fixture
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """A ready cluster: node ``n1`` with one simulated A100 (40 GB), scheduler, device plugin, monitor.

    The parameter, where a test gives one, is the allocation mode.
    """
    mode = str(getattr(request, "param", "lock"))
    async with Cluster(ClusterConfig([GpuNode("n1")], default_native(), allocation_mode=mode)) as running:
        yield running
