"""The gate of the host PID broker (WIRE, host-pid-broker.md §3)."""

from __future__ import annotations

from collections.abc import Mapping

from hami.protocol.keys import ENV_HOSTPID_BROKER


def gate_is_on(environment: Mapping[str, str]) -> bool:
    """Whether the broker is enabled: only by exactly ``1``, no other spelling of yes."""
    return environment.get(ENV_HOSTPID_BROKER) == "1"
