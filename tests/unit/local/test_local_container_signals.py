"""Signals to a container never cost its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from hami.local.kubelet.containers import Container, ContainerPlan, Isolation


class Process:
    """What the event loop keeps of a child whose end it has not noticed yet."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.pid = child.pid
        self.returncode: int | None = None
        self.send_signal = child.send_signal


def container_of(process: Any, folder: Path) -> Container:
    plan = ContainerPlan(("sh",), {})
    return Container(plan, folder, Isolation.ROOT, process, folder / "log", folder / "error")


def test_a_signal_to_a_process_that_has_just_ended_leaves_its_exit_code_to_the_loop(tmp_path: Path) -> None:
    with subprocess.Popen(["sh", "-c", "exit 7"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        container = container_of(Process(child), tmp_path)
        container.signal(signal.SIGTERM)
        container.kill()
        _, status = os.waitpid(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 7


def test_a_signal_to_a_process_that_is_gone_is_no_error(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
    container = container_of(Process(child), tmp_path)
    container.signal(signal.SIGTERM)
    container.kill()
