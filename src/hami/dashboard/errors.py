"""What the dashboard answers instead of what was asked for."""

from __future__ import annotations

from hami.protocol.errors import HamiError


class StatusError(HamiError):
    """A request that is answered with HTTP `status`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AccessError(StatusError):
    """The reader may not see anything."""


class ApiError(StatusError):
    """A request that cannot be answered."""
