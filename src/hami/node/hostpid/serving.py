"""The broker's loop: one thread, one epoll, one deadline per transaction (host-pid-broker.md §4, §5, §6.5).

Every transaction has the same time, so the order in which they began is the order of their deadlines.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hami.node.hostpid.codec import INVALID, REQUEST, REQUEST_BYTES, encode_answer
from hami.node.hostpid.counters import Counters, Result
from hami.node.hostpid.errors import BrokerError

DEADLINE_S: Final = 0.5
MAX_ACTIVE: Final = 512
_BATCH: Final = 64
_BACKOFF_S: Final = (0.005, 1.0)
_FLOOD_PAUSE_S: Final = 0.005
"""With batches of 64 a full accept queue (4096) passes within 320 ms: before the peers' own deadline."""

_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_CREDENTIALS: Final = struct.Struct("iII")
_NOT_NOW: Final = socket.MSG_DONTWAIT
_SEND: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

log = logging.getLogger(__name__)

Connection = socket.SocketType
"""The plain type below ``socket.socket``, blocking like it."""
ReadPeer = Callable[[Connection], int]
"""Reads the PID or the UID of a peer."""


def peer_pid(connection: Connection) -> int:
    """PID of the process that called ``connect``, in our PID namespace; 0 if it is not visible here."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[0])


def peer_uid(connection: Connection) -> int:
    """UID of the process that called ``connect``, in our user namespace."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def accept_from(listener: socket.socket) -> Connection:
    """The next connection of a Unix listener; without the look-ups of ``socket.accept``, which take longer
    than the system call.
    """
    descriptor, _ = listener._accept()  # type: ignore[attr-defined]
    return Connection(socket.AF_UNIX, socket.SOCK_STREAM, 0, descriptor)


def longer_pause(pause_s: float) -> float:
    """How long to accept nothing after ``pause_s`` was not enough; 0: the first time."""
    first, longest = _BACKOFF_S
    return min(pause_s * 2 or first, longest)


@dataclass(slots=True, eq=False)
class _Transaction:
    connection: Connection
    started: float
    received: bytes = b""
    unsent: bytes = b""
    result: Result = Result.DROPPED
    watched: int = 0
    uid: int = 0  # of the peer, known while it is watched


class Server:
    """Serves on a listening, non-blocking socket, which stays the caller's.

    ``max_active`` transactions at once take ``deadline_s`` at most. Where all places are taken, they are
    shared evenly among the users that want some: who holds most loses the oldest to who holds fewer.
    ``accept``, ``read_pid``, ``read_uid`` and ``clock`` are for tests.
    """

    def __init__(
        self,
        listener: socket.socket,
        counters: Counters,
        *,
        max_active: int = MAX_ACTIVE,
        deadline_s: float = DEADLINE_S,
        read_pid: ReadPeer = peer_pid,
        read_uid: ReadPeer = peer_uid,
        accept: Callable[[socket.socket], Connection] = accept_from,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._counters = counters
        self._max_active = max_active
        self._deadline_s = deadline_s
        self._read_pid = read_pid
        self._read_uid = read_uid
        self._accept = accept
        self._clock = clock
        self._active: dict[int, _Transaction] = {}
        self._held: dict[int, int] = {}  # places by UID
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._epoll = select.epoll()
        self._listening = listener.fileno()
        self._closing = False
        self._pause_s = 0.0
        self._resume_at: float | None = None
        self._dropped = 0

    @property
    def wake(self) -> int:
        """What a byte written to lets :meth:`run` look up; for ``signal.set_wakeup_fd``."""
        return self._wake

    def stop(self) -> None:
        """Let :meth:`run` end: no transaction begins any more. From a signal handler or another thread.

        Python runs a signal's handler between two of its own steps, so a signal that comes just before the
        loop goes to sleep is handled only when something wakes it: give :attr:`wake` to the signals too.
        """
        self._closing = True
        with contextlib.suppress(OSError):  # run() may have ended, or the pipe be full: then it wakes anyway
            os.write(self._wake, b"\0")

    def run(self) -> None:
        """Serve until :meth:`stop` and the end of the transactions under way.

        Raises :class:`BrokerError` when the listener fails. May be called once.
        """
        self._epoll.register(self._woken, select.EPOLLIN)
        self._epoll.register(self._listener, select.EPOLLIN)
        try:
            while not self._closing:
                self._turn()
            self._refuse_waiting()
            while self._active:
                self._turn()
        finally:
            for transaction in list(self._active.values()):
                self._end(transaction)
            self._epoll.close()
            woken, wake, self._woken, self._wake = self._woken, self._wake, -1, -1
            os.close(wake)
            os.close(woken)

    def _turn(self) -> None:
        for descriptor, _ in self._epoll.poll(self._patience(), _BATCH):
            transaction = self._active.get(descriptor)
            if transaction is not None:
                self._advance(transaction)
            elif descriptor == self._woken:
                os.read(self._woken, select.PIPE_BUF)
            elif descriptor == self._listening and not self._closing:
                self._take_waiting()
        now = self._clock()
        while self._active:
            oldest = next(iter(self._active.values()))
            if oldest.started + self._deadline_s > now:
                break
            self._end(oldest)
        if self._resume_at is not None and now >= self._resume_at and not self._closing:
            self._resume_at = None
            self._epoll.modify(self._listener, select.EPOLLIN)

    def _patience(self) -> float:
        """Seconds until something is due, -1 when nothing is."""
        due = [] if self._resume_at is None else [self._resume_at]
        if self._active:
            due.append(next(iter(self._active.values())).started + self._deadline_s)
        return max(0.0, min(due) - self._clock()) if due else -1

    def _take_waiting(self) -> None:
        # First all that wait, then the first byte of each: most have sent their request by then.
        accepted: list[Connection] = []
        try:
            while len(accepted) < _BATCH:
                accepted.append(self._accept(self._listener))
                self._pause_s = 0.0
        except (BlockingIOError, ConnectionAbortedError):
            pass
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise BrokerError(f"host PID broker: accept: {error.strerror or error}") from error
            self._pause(error)
        finally:
            welcome = sum([self._begin(connection) for connection in accepted])
        if len(accepted) == _BATCH and not welcome:
            # Turning a flood away without a rest would take a whole CPU from those who do the node's work.
            self._accept_nothing_for(_FLOOD_PAUSE_S)

    def _pause(self, error: OSError) -> None:
        """Accept nothing for a while: 5 ms, then twice as long each time, at most 1 s."""
        self._pause_s = longer_pause(self._pause_s)
        self._accept_nothing_for(self._pause_s)
        self._counters.accept_failed()
        log.warning("hostpid.accept_failed", extra={"cause": error.strerror, "retry_s": self._pause_s})

    def _accept_nothing_for(self, seconds: float) -> None:
        self._resume_at = self._clock() + seconds
        self._epoll.modify(self._listener, 0)

    def _begin(self, connection: Connection) -> bool:
        """Whether there was a place for it."""
        if len(self._active) >= self._max_active and not self._made_room(connection):
            self._counters.turned_away()
            connection.close()
            return False
        started = self._clock()
        self._counters.started()
        self._advance(_Transaction(connection, started))
        return True

    def _made_room(self, connection: Connection) -> bool:
        """Whether the user who holds most places lost one, since the peer's user holds fewer even with it."""
        greedy = max(self._held, key=self._held.__getitem__, default=None)
        if greedy is None or self._held[greedy] <= self._held.get(self._read_uid(connection), 0) + 1:
            return False
        self._end(next(one for one in self._active.values() if one.uid == greedy))
        return True

    def _advance(self, transaction: _Transaction) -> None:
        """Go on as far as the peer lets us."""
        try:
            if not self._went_through(transaction):
                self._watch(transaction)
                return
        except Exception as error:  # whatever one transaction meets, the others are served
            transaction.result = Result.DROPPED
            log.debug("hostpid.transaction_failed", extra={"cause": str(error)})
        self._end(transaction)

    def _went_through(self, transaction: _Transaction) -> bool:
        """Whether it is over; False: the peer has to do something first."""
        try:
            if transaction.unsent or self._receive(transaction):
                self._send(transaction)
        except BlockingIOError:
            return False
        return True

    def _receive(self, transaction: _Transaction) -> bool:
        """Whether there is an answer now; False: the peer ended too early."""
        while len(transaction.received) < REQUEST_BYTES:
            piece = transaction.connection.recv(REQUEST_BYTES - len(transaction.received), _NOT_NOW)
            if not piece:
                return False
            transaction.received += piece
        if transaction.received == REQUEST:
            # Only now: credentials are read for a valid request, and never kept.
            transaction.unsent = encode_answer(self._read_pid(transaction.connection))
            transaction.result = Result.OK
        else:
            transaction.unsent = INVALID
            transaction.result = Result.INVALID
        return True

    def _send(self, transaction: _Transaction) -> None:
        while transaction.unsent:
            sent = transaction.connection.send(transaction.unsent, _SEND)
            transaction.unsent = transaction.unsent[sent:]
        transaction.connection.shutdown(socket.SHUT_RDWR)

    def _watch(self, transaction: _Transaction) -> None:
        wanted = select.EPOLLOUT if transaction.unsent else select.EPOLLIN
        descriptor = transaction.connection.fileno()
        if not transaction.watched:
            uid = transaction.uid = self._read_uid(transaction.connection)
            self._epoll.register(descriptor, wanted)
            self._active[descriptor] = transaction
            self._held[uid] = self._held.get(uid, 0) + 1
        elif transaction.watched != wanted:
            self._epoll.modify(descriptor, wanted)
        transaction.watched = wanted

    def _end(self, transaction: _Transaction) -> None:
        if transaction.unsent:
            transaction.result = Result.DROPPED
        if transaction.watched:
            # Closing takes the descriptor out of the epoll.
            del self._active[transaction.connection.fileno()]
            self._held[transaction.uid] -= 1
            if not self._held[transaction.uid]:
                del self._held[transaction.uid]
        transaction.connection.close()
        self._counters.ended(transaction.result, self._clock() - transaction.started)
        if transaction.result is Result.DROPPED:
            self._dropped += 1
            if self._dropped & (self._dropped - 1) == 0:
                log.debug("hostpid.dropped", extra={"transactions": self._dropped})

    def _refuse_waiting(self) -> None:
        """Close what waits in the accept queue; nobody can join it any more."""
        try:
            self._epoll.unregister(self._listener)
            self._listener.shutdown(socket.SHUT_RDWR)
            while True:
                connection = self._accept(self._listener)
                connection.close()
        except OSError:
            return
