"""The broker's process: ``python -m hami.node.hostpid --host-root DIR`` (Linux).

Without ``--host-root`` it serves at the production path and must be root. It runs until SIGTERM or SIGINT.
The device plugin starts it with a parent, and with descriptors for its state and its counters.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

from hami.kube.logs import setup_logging
from hami.node.hostpid.broker import Broker, start_broker
from hami.node.hostpid.counters import Counters
from hami.node.hostpid.endpoint import LOCK_WAIT_S
from hami.node.hostpid.errors import BrokerError, combined
from hami.node.paths import HostPaths
from hami.protocol.errors import HamiError

_PR_SET_PDEATHSIG: Final = 1

log = logging.getLogger("hami.node.hostpid")


Start = Callable[[HostPaths, Counters, float], Broker]


def main(arguments: list[str], start: Start = start_broker) -> int:
    """Run the broker that ``start`` makes; the result is the exit status."""
    options = _parser().parse_args(arguments)
    setup_logging(logging.DEBUG if options.debug else logging.INFO)
    report = _reporter(options.state_fd)
    try:
        if options.parent:
            _die_with(options.parent)
        counters = Counters(options.counters_fd)
        broker = start(HostPaths(options.host_root.rstrip("/")), counters, options.lock_wait)
        _run(broker, report, is_child=bool(options.parent))
    except (HamiError, OSError) as error:
        log.error("hostpid.failed", extra={"reason": str(error)})  # noqa: TRY400 - the text says it all
        report({"error": str(error)})
        return 1
    return 0


def _run(broker: Broker, report: Callable[[dict[str, str]], None], *, is_child: bool) -> None:
    signal.set_wakeup_fd(broker.wake, warn_on_full_buffer=False)
    # A terminal sends SIGINT to the whole group; a child is ended by its parent alone.
    signal.signal(signal.SIGTERM, lambda *_: broker.stop())
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP) if is_child else ():
        signal.signal(number, signal.SIG_IGN)
    if not is_child:
        signal.signal(signal.SIGINT, lambda *_: broker.stop())
    gc.freeze()
    errors: list[BrokerError] = []
    try:
        report({"state": "serving"})
        broker.serve()
    except BrokerError as error:
        errors.append(error)
    finally:
        signal.set_wakeup_fd(-1)
    try:
        broker.close()
    except BrokerError as error:
        errors.append(error)
    if errors:
        raise combined(errors)


def _die_with(parent: int) -> None:
    """Be killed when the thread that started us ends; raises :class:`BrokerError` if it has already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:
        raise BrokerError("host PID broker: the device plugin has ended")


def _reporter(descriptor: int | None) -> Callable[[dict[str, str]], None]:
    """Writes one JSON object a line to the device plugin."""

    def report(state: dict[str, str]) -> None:
        if descriptor is not None:
            os.write(descriptor, json.dumps(state).encode() + b"\n")

    return report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hami.node.hostpid", description="The host PID broker.")
    parser.add_argument("--host-root", default="", help="keep all host paths below this directory")
    parser.add_argument("--lock-wait", type=float, default=LOCK_WAIT_S, help="seconds to wait for the lock")
    parser.add_argument("--debug", action="store_true", help="log dropped transactions")
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--state-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--counters-fd", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
