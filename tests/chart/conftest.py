"""Tests of the chart as helm renders it: `make chart-test` finds or builds helm; nothing else runs them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

READY = bool(os.environ.get("HAMI_HELM"))
KUBERNETES = Path(os.environ.get("HAMI_KUBE_BIN") or "/nonexistent", "kube-apiserver").exists()
collect_ignore_glob = [] if READY else ["test_*.py"]
if not KUBERNETES:
    collect_ignore_glob += ["test_real_api_server.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Refuse loudly where these tests are asked for by name, but there is no helm."""
    if READY and not KUBERNETES:
        sys.stderr.write("chart: no Kubernetes in HAMI_KUBE_BIN (`make cluster` builds it): rendered only\n")
    if not READY and any("chart" in Path(argument).parts for argument in config.args):
        raise pytest.UsageError("tests/chart needs helm: run `make chart-test`")
