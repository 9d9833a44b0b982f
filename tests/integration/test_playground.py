"""``hami cluster`` as a user runs it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from local_harness import reaped

from hami.cli.cluster import MODELS
from hami.local.cluster import Cluster, ClusterConfig, ClusterError, GpuNode, default_native
from hami.local.kubelet.containers import Isolation

COMMAND = [sys.executable, "-c", "from hami.cli.main import main; main(prog_name='hami')", "cluster"]
LIST_NODES = """
import json, os, re, urllib.request
server = re.search(r"server: (\\S+)", open(os.environ["KUBECONFIG"]).read())[1]
for node in json.load(urllib.request.urlopen(server + "/api/v1/nodes"))["items"]:
    print(node["metadata"]["name"], node["status"]["allocatable"]["nvidia.com/gpu"],
          "T4" in node["metadata"]["annotations"]["hami.io/node-nvidia-register"])
"""


@pytest.fixture
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hd-") as directory:
        yield Path(directory)


@asynccontextmanager
async def started(scratch: Path, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {**os.environ, "TMPDIR": str(scratch), "HAMI_NATIVE_BUILD": str(default_native())}
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *words, env=environment, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with reaped(process):
        yield process


async def finish(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    async with asyncio.timeout(110.0):
        output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


def files_in(scratch: Path) -> list[Path]:
    return list(scratch.iterdir())


async def test_a_command_runs_on_the_cluster_that_was_asked_for(scratch: Path) -> None:
    words = ("--nodes", "2", "--cards", "2", "--model", "T4", "--", sys.executable, "-c", LIST_NODES)
    async with started(scratch, *words) as process:
        status, output, errors = await finish(process)
    assert (status, output) == (0, "gpu-node-1 20 True\ngpu-node-2 20 True\n"), errors
    assert files_in(scratch) == []


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -9 $$"], 137),
        (["no-such-x"], 127),
        (["/etc/passwd"], 126),
    ],
)
async def test_the_status_of_the_command_is_that_of_hami(
    scratch: Path, words: list[str], status: int
) -> None:
    async with started(scratch, "--", *words) as process:
        found, _, errors = await finish(process)
    assert found == status, errors
    assert (f"cannot run {words[0]}: " in errors) == (status in (126, 127))
    assert files_in(scratch) == []


async def test_without_a_command_it_stays_open_until_interrupted(scratch: Path) -> None:
    async with started(scratch) as process:
        assert process.stderr is not None
        lines: list[str] = []
        async with asyncio.timeout(100.0):
            while not lines or "Logs of the components" not in lines[-1]:
                lines.append((await process.stderr.readline()).decode())
                assert lines[-1], "it ended by itself"
        (dashboard,) = (line.split() for line in lines if " dashboard " in line)
        assert os.access(dashboard[0], os.X_OK), "the line cannot be pasted"
        process.send_signal(signal.SIGTERM)
        status, _, _ = await finish(process)
    assert status == 0
    assert files_in(scratch) == []


def test_the_models_are_those_of_the_simulated_driver() -> None:
    source = Path(__file__).parents[2] / "native" / "fakegpu" / "model.c"
    known = re.findall(r'\{\s*"([A-Z0-9-]+(?:GB)?)",\s*"(?:NVIDIA|Tesla)', source.read_text())
    assert sorted(known) == sorted(MODELS)


async def test_a_working_folder_that_cannot_be_preloaded_from_is_refused(scratch: Path) -> None:
    folder = scratch / "a b"
    folder.mkdir()
    config = ClusterConfig([GpuNode("n1")], default_native(), folder, Isolation.NONE)
    with pytest.raises(ClusterError, match=r"has a space or a colon in its name.*set TMPDIR"):
        async with Cluster(config):
            pass
