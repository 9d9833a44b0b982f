"""Why PreStartContainer is not answered: later, or never like this."""

from __future__ import annotations

from hami.node.errors import NodeError


class NotYetError(NodeError):
    """Something is not there yet; kubelet calls again (gRPC UNAVAILABLE). Nothing is marked."""


class StorageError(NotYetError):
    """The host's file system refuses; told on the node (gRPC UNAVAILABLE)."""


class RefusedError(NodeError):
    """The container must not start like this (gRPC FAILED_PRECONDITION). The pod gets an event and, with
    ``marks_pod``, the annotation ``hami.io/allocate-error``; with ``fails_pod`` also ``bind-phase=failed``.
    """

    def __init__(self, message: str, *, marks_pod: bool = True, fails_pod: bool = False) -> None:
        super().__init__(message)
        self.marks_pod = marks_pod
        self.fails_pod = fails_pod


class PodResourcesError(NotYetError):
    """Kubelet's PodResources API does not answer."""


class PodResourcesBusyError(PodResourcesError):
    """Kubelet's PodResources API answers RESOURCE_EXHAUSTED: too many calls."""


class KubeletStateError(NodeError):
    """Kubelet's device checkpoint cannot be read."""
