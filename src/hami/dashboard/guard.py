"""Which requests are answered at all: the host they were meant for, how often a client asks, how long heads
are."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

RATE: Final = 20.0  # requests per second of one client
BURST: Final = 60.0
MAX_REQUEST_BYTES: Final = 16 << 10
_CLIENTS: Final = 4096


class Hosts:
    """Names that the page may be reached by.

    A page of another site can make a browser resolve its own name to our address; then the Host header is
    that name. Addresses and `localhost` need no resolving, so they are always good.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in names) | {"localhost"}

    def allow(self, host: str) -> bool:
        """Whether a request with this Host header is for us."""
        name = _without_port(host.strip().lower())
        if name is None:
            return False
        if name.rstrip(".") in self._names:
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


def _without_port(host: str) -> str | None:
    """The name of `name`, `name:port` or `[v6]:port`; None for anything else."""
    if host.startswith("["):
        name, bracket, rest = host.partition("]")
        if not bracket or (rest and not _is_port(rest)):
            return None
        return name + bracket
    name, colon, port = host.partition(":")
    if not name or (colon and not _is_port(colon + port)):
        return None
    return name


def _is_port(text: str) -> bool:
    return text.startswith(":") and text[1:].isascii() and text[1:].isdigit() and len(text) <= 6


class Rates:
    """A token bucket per client; the clients not seen for longest are forgotten."""

    def __init__(self, rate: float = RATE, burst: float = BURST, clients: int = _CLIENTS) -> None:
        self._rate = rate
        self._burst = burst
        self._clients = clients
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allow(self, client: str, now: float) -> bool:
        """Whether this client may ask once more at `now` (seconds of any clock that only grows)."""
        left, then = self._left.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - then) * self._rate)
        allowed = left >= 1
        self._left[client] = (left - 1 if allowed else left, now)
        if len(self._left) > self._clients:
            self._left.popitem(last=False)
        return allowed
