"""Typed errors of the node components."""

from __future__ import annotations

from hami.protocol.errors import HamiError


class NodeError(HamiError):
    """Base of what goes wrong on a node."""


class SettingsError(NodeError):
    """A flag, an environment variable or a configuration file asks for something impossible."""


class NvmlError(NodeError):
    """NVML cannot be loaded or refuses; ``code`` is its return code, 0 where there is none."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class NvmlUnsupportedError(NvmlError):
    """The card does not have what was asked for (unified memory, MIG)."""


class MigError(NodeError):
    """A card cannot be divided by MIG as things are; the text says what to do."""


class TopologyError(NodeError):
    """What NVML shows of the links between cards gives no scores."""


class UnsafePathError(NodeError):
    """A path on the host is not what it must be (a symlink, another owner, another type); nothing was
    changed.
    """


class NoBindingPodError(NodeError):
    """No pod on this node waits for devices; nothing is known that could be marked as failed.

    ``exhausted`` is ``namespace/name`` of a pod that would have been meant but has nothing left, or empty.
    """

    def __init__(self, message: str, exhausted: str = "") -> None:
        super().__init__(f"{message} ({exhausted} has nothing left to allocate)" if exhausted else message)
        self.exhausted = exhausted


class AllocateError(NodeError):
    """An allocation cannot be answered; the text goes to kubelet and to the pod."""


class SliceBusyError(AllocateError):
    """The place of a MIG instance is still taken by one that goes as soon as nothing uses it."""
