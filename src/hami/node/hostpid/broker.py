"""The broker put together: files, loop, end (host-pid-broker.md §6.1, §6.6)."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable

from hami.node.hostpid.counters import Counters
from hami.node.hostpid.endpoint import LOCK_WAIT_S, Endpoint, open_endpoint
from hami.node.hostpid.errors import BrokerError
from hami.node.hostpid.serving import Server
from hami.node.paths import BROKER_DIRECTORY, HostPaths

log = logging.getLogger(__name__)


class Broker:
    """A started broker; :meth:`serve` blocks until :meth:`stop`, :meth:`close` takes the socket away."""

    def __init__(self, endpoint: Endpoint, server: Server) -> None:
        self._endpoint = endpoint
        self._server = server

    def serve(self) -> None:
        """Answer until :meth:`stop`; raises :class:`BrokerError` when the listener fails."""
        log.info("hostpid.serving", extra={"socket": self._endpoint.path})
        self._server.run()

    @property
    def wake(self) -> int:
        """For ``signal.set_wakeup_fd``: a signal that is told here is not handled too late."""
        return self._server.wake

    def stop(self) -> None:
        """Let :meth:`serve` end; safe in a signal handler."""
        self._server.stop()

    def close(self) -> None:
        """Remove the socket if it is still ours and free the lock; a second call does nothing.

        Raises one :class:`BrokerError` for everything that failed.
        """
        self._endpoint.close()


def start_broker(
    paths: HostPaths,
    counters: Counters,
    lock_wait_s: float = LOCK_WAIT_S,
    make_server: Callable[[socket.socket, Counters], Server] = Server,
) -> Broker:
    """Make everything ready to serve below ``paths``; raises :class:`BrokerError`.

    ``make_server`` is for tests with other limits.
    """
    if not paths.root and os.geteuid() != 0:
        raise BrokerError("host PID broker: must run as root")
    endpoint = open_endpoint(paths.host(BROKER_DIRECTORY), paths.trusted_uid, lock_wait_s)
    return Broker(endpoint, make_server(endpoint.listener, counters))
