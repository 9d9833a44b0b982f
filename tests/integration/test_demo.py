"""``hami demo`` as a user runs it."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from local_harness import reaped
from rich.console import Console
from rich.table import Table

from hami.local.cluster import default_native
from hami.local.demo import Usage, mean_cores, print_table, read_usage

COMMAND = [sys.executable, "-c", "from hami.cli.main import main; main(prog_name='hami')", "demo"]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder with a short name that the demo uses for its working files."""
    with tempfile.TemporaryDirectory(prefix="hd-") as directory:
        yield Path(directory)


@asynccontextmanager
async def started(
    scratch: Path, *words: str, native: Path | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {**os.environ, "TMPDIR": str(scratch), "COLUMNS": "100"}
    environment["HAMI_NATIVE_BUILD"] = str(native or default_native())
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *words, env=environment, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with reaped(process):
        yield process


async def finish(process: asyncio.subprocess.Process) -> tuple[int, str]:
    async with asyncio.timeout(110.0):
        output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def read_until(process: asyncio.subprocess.Process, text: str) -> str:
    assert process.stdout is not None
    seen = ""
    async with asyncio.timeout(100.0):
        while text not in seen:
            line = await process.stdout.readline()
            assert line, seen
            seen += line.decode()
    return seen


def processes_in(scratch: Path) -> list[str]:
    """Command lines of the processes that use a file below ``scratch``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(scratch).encode() in command:
                found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


def files_in(scratch: Path) -> list[Path]:
    return list(scratch.iterdir())


async def nothing_left(scratch: Path) -> None:
    async with asyncio.timeout(60.0):
        while processes_in(scratch):  # noqa: ASYNC110 - processes end on their own
            await asyncio.sleep(0.05)


async def test_the_story_is_told_and_nothing_is_left(scratch: Path) -> None:
    async with started(scratch) as process:
        code, output = await finish(process)
    assert code == 0, output
    assert "CUDA error 2 (CUDA_ERROR_OUT_OF_MEMORY)" in output
    assert "bob keeps working" in output
    assert "0/1 nodes are available: 1 1/1 CardInsufficientMemory." in output
    rows = [line.split() for line in output.splitlines()]
    alice = next(row for row in rows if row[:2] == ["alice", "Running"])
    assert alice[2:4] == ["4096", "MiB"]
    assert int(alice[4]) >= 1024
    assert files_in(scratch) == []
    await nothing_left(scratch)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_demo_cleans_up(scratch: Path, number: signal.Signals) -> None:
    async with started(scratch) as process:
        await read_until(process, "pod alice runs")
        process.send_signal(number)
        code, output = await finish(process)
    assert code == 130, output
    assert "Traceback" not in output
    assert files_in(scratch) == []
    await nothing_left(scratch)


async def test_a_kept_cluster_says_how_to_use_it_and_ends_with_ctrl_c(scratch: Path) -> None:
    async with started(scratch, "--keep") as process:
        seen = await read_until(process, "Logs of the components")
        line = next(line for line in seen.splitlines() if "export KUBECONFIG=" in line)
        kubeconfig = await asyncio.to_thread(Path(line.partition("=")[2].strip()).read_text)
        assert "server: http://127.0.0.1:" in kubeconfig
        process.send_signal(signal.SIGINT)
        code, output = await finish(process)
    assert code == 0, output
    assert files_in(scratch) == []


async def test_no_process_outlives_a_killed_demo(scratch: Path) -> None:
    async with started(scratch) as process:
        await read_until(process, "pod bob runs")
        assert processes_in(scratch)
        process.kill()
        await process.wait()
    await nothing_left(scratch)


async def test_without_a_native_build_the_demo_says_what_to_do(scratch: Path) -> None:
    async with started(scratch, native=scratch / "nowhere") as process:
        code, output = await finish(process)
    assert code == 1
    assert "run `make native` first" in output
    assert files_in(scratch) == []


def test_usage_is_summed_over_containers_and_cards() -> None:
    text = (
        "# TYPE hami_vgpu_memory_used_bytes gauge\n"
        'hami_vgpu_memory_used_bytes{pod="a",container="x"} 1\n'
        'hami_vgpu_memory_used_bytes{pod="a",container="y"} 2\n'
        "# TYPE hami_vgpu_core_limit_ratio gauge\n"
        'hami_vgpu_core_limit_ratio{pod="a",container="x"} 30\n'
    )
    assert read_usage(text) == {"a": Usage(3.0, 0.0, 30.0, 0.0)}


def test_cores_in_use_are_averaged_and_the_rest_is_the_last() -> None:
    samples = [{"a": Usage(1.0, 9.0, 30.0, 20.0)}, {}, {"a": Usage(2.0, 9.0, 30.0, 40.0)}]
    assert mean_cores(samples) == {"a": Usage(2.0, 9.0, 30.0, 20.0)}


def test_a_narrow_terminal_cuts_no_cell_and_no_line_ends_in_spaces() -> None:
    table = Table(title="Pods", title_justify="left")
    for name in ("POD", "STATUS", "MEMORY LIMIT"):
        table.add_column(name, no_wrap=True)
    table.add_row("alice", "Running", "4096 MiB")
    output = io.StringIO()
    print_table(Console(file=output, width=20), table)
    text = output.getvalue()
    assert "alice" in text
    assert "4096 MiB" in text
    assert "…" not in text
    assert [line for line in text.splitlines() if line != line.rstrip()] == []
