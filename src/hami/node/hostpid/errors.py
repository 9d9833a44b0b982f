"""Typed errors of the host PID broker."""

from __future__ import annotations

from collections.abc import Sequence

from hami.node.errors import NodeError


class BrokerError(NodeError):
    """The host PID broker cannot start, or has ended; the text goes into the exit of the device plugin."""


def combined(errors: Sequence[NodeError]) -> NodeError:
    """One error for all of ``errors``, of which there is at least one."""
    if len(errors) == 1:
        return errors[0]
    return BrokerError("; ".join(map(str, errors)))
