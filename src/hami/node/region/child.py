"""Work that a hostile file may end by a signal, done in a child process that may die of it."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from hami.node.errors import NodeError

Answer = Mapping[str, int]
_MAX_BYTES: Final = 1 << 16


class ChildDiedError(NodeError):
    """The child ended without an answer; ``signal`` is the signal that killed it, 0 if none did."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


def in_child(work: Callable[[], Answer]) -> Answer:
    """What ``work`` returns, worked out in a forked copy of this process.

    Raises :class:`NodeError` with the text of the one that ``work`` raised, and :class:`ChildDiedError`.
    """
    receiver, sender = os.pipe()
    with warnings.catch_warnings():
        # Of a program with threads (Python 3.12 and later): the child takes no lock that one may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _be_the_child(work, sender)
    os.close(sender)
    with os.fdopen(receiver, "rb") as stream:
        said = stream.read(_MAX_BYTES)
    _, status = os.waitpid(child, 0)
    if not said:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        how = f"of {signal.Signals(number).name}" if number else f"with status {os.WEXITSTATUS(status)}"
        raise ChildDiedError(f"the process that made the change ended {how}", number)
    answer: dict[str, int | str] = json.loads(said)
    if "error" in answer:
        raise NodeError(str(answer["error"]))
    return {key: int(value) for key, value in answer.items()}


def _be_the_child(work: Callable[[], Answer], sender: int) -> NoReturn:
    """Never returns into the copy of the caller: no handler, buffer or ``finally`` of it runs twice."""
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGBUS, signal.SIG_DFL)  # no handler that prints: the caller tells it in words
        said: Mapping[str, int | str]
        try:
            said = work()
        except NodeError as error:
            said = {"error": str(error)}
        os.write(sender, json.dumps(said).encode())
        status = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)
