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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First the tests that need a cluster without HAMi: nothing has to be removed for them.

    Those of mode lock stand right behind those of the broker: both change the installation.
    """
    order = {"test_install_page.py": 0, "test_hostpid_broker.py": 2, "test_mode_lock.py": 3}
    items.sort(key=lambda item: order.get(item.path.name, 1))


@pytest.fixture(scope="session")
def release(cluster: Cluster) -> Iterator[Hami]:
    """HAMi's release, installed or not; removed at the end."""
    hami = Hami(cluster)
    yield hami
    if hami.is_installed:
        hami.uninstall()


@pytest.fixture
def bare(cluster: Cluster, release: Hami) -> Cluster:
    """The cluster without HAMi."""
    if release.is_installed:
        release.uninstall()
    return cluster


@pytest.fixture
def hami(release: Hami) -> Iterator[Hami]:
    """HAMi, ready, as values.yaml has it; afterwards every card is whole and the components are ready."""
    release.takes()
    yield release
    release.heal()


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for one test; its pods are gone when the test ends."""
    name = cluster.new_namespace(request.node.name)
    yield name
    cluster.remove_namespace(name)
