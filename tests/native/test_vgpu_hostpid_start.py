"""Many processes that start CUDA at once: bench/hostpid.py, whose figures of time are not looked at."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hostpid_harness import unshare
from vgpu_harness import NativeBuild

from hami.local.api.apiserver import ApiServer

BENCH = Path(__file__).resolve().parents[2] / "bench/hostpid.py"
COUNT = 300


def test_300_processes_that_start_at_once_get_their_own_pid(native: NativeBuild) -> None:
    """X7: with the broker every one is the kernel's; without it none is another process's."""
    unshare()
    done = subprocess.run(
        [sys.executable, str(BENCH), "--json", "--part", "start", "--count", str(COUNT), "--patient"],
        env={**os.environ, "HAMI_NATIVE_BUILD": str(native.directory)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures[f"hostpids_right_on_n{COUNT}"] == COUNT
    assert figures[f"hostpids_wrong_on_n{COUNT}"] == figures[f"hostpids_unknown_on_n{COUNT}"] == 0
    assert figures[f"hostpids_wrong_off_n{COUNT}"] == 0
    assert figures[f"hostpids_right_off_n{COUNT}"] + figures[f"hostpids_unknown_off_n{COUNT}"] == COUNT


async def test_300_processes_get_their_own_pid_while_the_plugin_registers_and_allocates(
    native: NativeBuild,
) -> None:
    """X8: the broker is the plugin's; registrations and Allocate calls go on until all are ready.

    It gives a client half a second, in which 300 processes on a busy machine may not get as far as their
    question: those do without a PID, and all is made once more.
    """
    unshare()
    for _ in range(4):
        found = await _start_beside_the_plugin(native)
        assert found["wrong"] == 0
        assert found["right"] + found["unknown"] == COUNT
        if found["right"] == COUNT:
            return
    raise AssertionError(f"never all of them: {found}")


async def _start_beside_the_plugin(native: NativeBuild) -> dict[str, float]:
    """How many host PIDs are right, unknown and wrong."""
    bench = _bench()
    api = ApiServer(bookmark_interval_s=1)
    await api.start()
    try:
        with tempfile.TemporaryDirectory(prefix="hp") as path:
            node = bench.PluginNode(api, native.directory, Path(path) / "plugin")
            start = bench.Start(native.directory, Path(path), COUNT, gate=True, patient=True)
            async with node.running() as stub:
                running = asyncio.create_task(asyncio.to_thread(start.run, node.broker_directory))
                calls = 0
                while not running.done() or calls < 10:
                    os.kill(node.plugin.pid, signal.SIGHUP)
                    rounds = node.kubelet.rounds
                    async with asyncio.timeout(60):
                        while node.kubelet.rounds == rounds:  # noqa: ASYNC110 - a counter
                            await asyncio.sleep(0.01)
                    for _ in range(10):
                        await node.allocate(stub)
                        calls += 1
                    await node.delete_pods()
                figures = await running
                assert node.plugin.starts == 1
    finally:
        await api.stop()
    return {kind: figures[f"hostpids_{kind}_on_n{COUNT}"] for kind in ("right", "unknown", "wrong")}


def _bench() -> Any:
    """bench/hostpid.py as a module."""
    spec = importlib.util.spec_from_file_location("bench_hostpid", BENCH)
    assert spec is not None
    assert spec.loader is not None
    sys.path.insert(0, str(BENCH.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
