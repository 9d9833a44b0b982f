"""Everything the scheduler process is told from outside, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hami.protocol.durations import parse_duration
from hami.protocol.errors import DurationError, HamiError
from hami.protocol.lock import DEFAULT_LOCK_TIMEOUT


class SettingsError(HamiError):
    """A flag or environment value that cannot be used."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Flags and environment of `hami scheduler`; times in seconds. Defaults as in scheduler.md §1.1."""

    device_config_file: Path
    hostname: str
    http_bind: str = "127.0.0.1:8080"
    metrics_bind_address: str = ":9395"
    cert_file: Path | None = None
    key_file: Path | None = None
    tls_secret: tuple[str, str] | None = None  # namespace and name of self-managed TLS
    tls_hosts: tuple[str, ...] = ()
    webhook_configuration: str = ""  # whose CA bundle self-managed TLS keeps right
    scheduler_name: str = ""
    node_policy: str = "binpack"
    card_policy: str = "spread"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    kube_qps: float = 50.0
    kube_burst: int = 100
    kube_timeout_s: float = 30.0
    node_lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT
    node_lock_retry_s: float = 28.0
    reservation_timeout_s: float = 900.0
    force_overwrite: bool = True
    privileged: Literal["deny", "allow-unlimited"] = "deny"
    lease: tuple[str, str] | None = None  # namespace and name; None: no election
    pod_name: str = ""
    pod_namespace: str = ""
    legacy_metrics: bool = False
    profiling: bool = False
    enable_ascend: bool = False
    enable_iluvatar: bool = False
    max_request_bytes: int = 32 << 20
    remote_extender: bool = False  # whether kube-scheduler may run on another host

    def __post_init__(self) -> None:
        if not self.hostname:
            raise SettingsError("the hostname is empty: it identifies this replica in leader election")
        if (self.cert_file is None) != (self.key_file is None):
            raise SettingsError(
                "--cert_file and --key_file belong together: give both, or none for plain HTTP"
            )
        if self.tls_secret is not None and (self.cert_file is not None or not self.tls_hosts):
            raise SettingsError("--tls-secret needs --tls-hosts and excludes --cert_file and --key_file")
        if self.kube_qps < 0 or self.kube_burst < 1:
            raise SettingsError("--kube-qps must not be negative and --kube-burst must be at least 1")
        if self.max_request_bytes <= 0:
            raise SettingsError(f"--max-request-bytes is {self.max_request_bytes}, it must be positive")
        if self.node_lock_timeout_s <= 0 or self.reservation_timeout_s <= 0 or self.node_lock_retry_s < 0:
            raise SettingsError("timeouts must be positive")


def parse_selector(text: str) -> dict[str, str]:
    """``k=v,k=v``; raises ``SettingsError``."""
    selector = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = part.partition("=")
        if not separator or not key.strip():
            raise SettingsError(f"--node-label-selector: {part!r} is not key=value")
        selector[key.strip()] = value.strip()
    return selector


def parse_secret(text: str) -> tuple[str, str] | None:
    """``namespace/name``, None for an empty text; raises ``SettingsError``."""
    if not text:
        return None
    namespace, separator, name = text.partition("/")
    if not separator or not namespace or not name or "/" in name:
        raise SettingsError(f"--tls-secret: {text!r} is not namespace/name")
    return namespace, name


def lock_timeout(flag: float | None, environment: str) -> float:
    """Seconds until a node lock is stale: the flag, else `HAMI_NODELOCK_EXPIRE`, else 5 minutes
    (protocol.md §7.4)."""
    if flag is not None:
        return flag
    if environment:
        try:
            value = parse_duration(environment)
        except DurationError:
            return DEFAULT_LOCK_TIMEOUT
        return value if value > 0 else DEFAULT_LOCK_TIMEOUT
    return DEFAULT_LOCK_TIMEOUT
