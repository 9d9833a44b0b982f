"""Typed errors of the whole project: every failure we report on purpose derives from :class:`HamiError`."""

from __future__ import annotations


class HamiError(Exception):
    """Base of every error this project raises on purpose. The text is meant for a user to read."""


class ProtocolError(HamiError):
    """A text or object that travels between components does not follow the protocol.

    ``path`` names the offending place (``$.spec.containers[0].resources``, ``segment 2, field count``), or is
    empty when the whole value is meant.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(f"{message} (at {path})" if path else message)
        self.message = message
        self.path = path


class QuantityError(ProtocolError):
    """A Kubernetes quantity that cannot be read."""


class DurationError(ProtocolError):
    """A Go duration (``5m0s``) that cannot be read."""


class TimestampError(ProtocolError):
    """A time that cannot be read."""


class AllocationError(ProtocolError):
    """A device allocation text (``uuid,type,memory,core:;``) that cannot be read or written."""


class MigReservationError(ProtocolError):
    """The MIG reservations of a pod cannot be read or written."""


class LockFormatError(ProtocolError):
    """The value of a node lock annotation cannot be read; such a lock is stale at once."""


class PairScoreError(ProtocolError):
    """The pair scores of a node cannot be read; the devices of the node stay usable."""


class ObjectError(ProtocolError):
    """A Kubernetes object or an HTTP body cannot be decoded, or is larger than allowed."""


class RegistrationError(ProtocolError):
    """Base of the two ways in which a node's device registration gives no devices."""


class DevicesAbsent(RegistrationError):  # noqa: N818 - the name says what is the case
    """No register source, or an empty one (``[]``, ``:``): the vendor is dropped from the node."""


class DevicesMalformed(RegistrationError):  # noqa: N818 - the name says what is the case
    """The register source is unusable as a whole: the last good devices stay, an event is raised."""
