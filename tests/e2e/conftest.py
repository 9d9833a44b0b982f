"""End-to-end tests on a real Kubernetes: `make e2e` starts it and runs them; nothing else collects them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

READY = os.environ.get("HAMI_E2E") == "1"
collect_ignore_glob = [] if READY else ["*"]

if READY:
    from e2e_harness import Cluster, Hami


def pytest_configure(config: pytest.Config) -> None:
    """Refuse loudly where these tests are asked for by name, but have no cluster."""
    if not READY and any("e2e" in Path(argument).parts for argument in config.args):
        raise pytest.UsageError("tests/e2e needs a cluster of its own: run `make e2e` (root, Linux)")


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The running cluster of tools/cluster."""
    return Cluster()


@pytest.fixture(scope="session")
def installed(cluster: Cluster) -> Iterator[Hami]:
    """HAMi, ready to serve; removed at the end."""
    hami = Hami(cluster)
    hami.install()
    yield hami
    hami.uninstall()


@pytest.fixture
def hami(installed: Hami) -> Iterator[Hami]:
    """HAMi, ready; when a test ends every card is whole again and the components are ready."""
    yield installed
    installed.heal()


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for one test; its pods are gone when the test ends."""
    name = cluster.new_namespace(request.node.name)
    yield name
    cluster.remove_namespace(name)
