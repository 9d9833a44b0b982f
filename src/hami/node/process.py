"""What the processes of a node are given alike."""

from __future__ import annotations

from dataclasses import dataclass

from hami.kube.client import Client, Limits
from hami.kube.config import load_config

FLUSH_S = 3.0
"""How long a process that ends may take to send its last events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProcess:
    """How a process reaches NVML and Kubernetes, and where it serves ``/metrics``."""

    nvml_library: str
    kube_qps: float
    kube_burst: int
    metrics_address: str
    """``host:port``."""

    def client(self, user_agent: str) -> Client:
        """A client of the cluster that this process belongs to. Raises :class:`ConfigError`."""
        return Client(load_config(), Limits(qps=self.kube_qps, burst=self.kube_burst), user_agent=user_agent)
