"""MIG with the real device plugin as a process: embedded API server, kubelet stand-in, simulated driver."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_device_plugin_embedded import NATIVE, REGISTER, Node

from hami.local.api.apiserver import ApiServer
from hami.local.api.objects import dig
from hami.local.api.resources import PODS
from hami.local.components import ComponentError

NOTE = "hami.io/vgpu-mig-allocations"
ALLOWED = "[{models: [A100-SXM4-40GB], profiles: [1g.5gb, 2g.10gb, 3g.20gb, 7g.40gb]}]"
PLACES = """
    import json, pynvml as n
    from hami.node.mig.instances import MigCards
    from hami.node.mig.nvml import NvmlMig
    from hami.node.mig.plan import SliceKey
    from hami.node.nvml import NvmlSession
    driver = NvmlMig(NvmlSession())
    cards = MigCards(driver)
    def seen():
        return [[gpu.index, s.key.word, s.key.start, list(s.devices.values())]
                for gpu in driver.gpus() for s in cards.seen(gpu)]
"""


class MigNode(Node):
    """A node with two cards in mode ``mig``."""

    mode = "mig"

    def __init__(self, api: ApiServer, directory: Path) -> None:
        super().__init__(api, directory)
        self.config.write_text(f"nvidia:\n  deviceSplitCount: 3\n  migProfileAllowlist: {ALLOWED}\n")
        entry = {"name": "n1", "operatingmode": self.mode}
        self.node_config.write_bytes(msgspec.json.encode({"nodeconfig": [entry]}))

    def allocatable_of(self, resource: str) -> str | None:
        found: dict[str, str] = dig(self.object, "status", "allocatable") or {}
        return found.get(resource)

    def serves_again(self, before: int) -> bool:
        """Whether the plugin has been started again and kubelet has its devices."""
        try:
            return self.plugin.pid != before and self.allocatable == "14"
        except ComponentError:
            return False

    async def on_driver(self, script: str) -> Any:
        """Run a script on the simulated driver; the JSON of its last line."""
        env = {
            "PATH": "/usr/bin:/bin",
            "LD_LIBRARY_PATH": str(NATIVE / "fakegpu"),
            "FAKEGPU_STATE": str(self.directory / "cards"),
            "FAKEGPU_DEVICES": "2",
            "FAKEGPU_UUID_SEED": "test",
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            textwrap.dedent(PLACES) + textwrap.dedent(script),
            env=env,
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        return json.loads(out.splitlines()[-1])

    async def instances(self) -> list[list[Any]]:
        """Card, profile, start and MIG UUIDs of every instance."""
        found: list[list[Any]] = await self.on_driver("print(json.dumps(seen()))")
        return found

    async def reserved(self, name: str, card: str, profile: str, start: int, size: int) -> None:
        """A pod whose only container has one slice."""
        text = json.dumps(
            [
                {
                    "containerIndex": 0,
                    "deviceIndex": 0,
                    "gpuUUID": card,
                    "profile": profile,
                    "placement": {"start": start, "size": size},
                }
            ]
        )
        create = self.api.registry.create

        async def with_reservation(resource: Any, namespace: str, body: Any, **more: Any) -> Any:
            if resource is PODS:
                body["metadata"]["annotations"][NOTE] = text
            return await create(resource, namespace, body, **more)

        self.api.registry.create = with_reservation  # type: ignore[method-assign]
        try:
            await self.bound(name, f"{card},NVIDIA,4864,15:;")
        finally:
            self.api.registry.create = create  # type: ignore[method-assign]

    async def gone(self) -> None:
        """Return once no instance is left."""
        for _ in range(200):
            if not await self.instances():
                return
            await asyncio.sleep(0.05)
        raise self.plugin.error("the instance is still there")

    @asynccontextmanager
    async def serving(self, resource: str, count: str) -> AsyncIterator[MigNode]:
        try:
            await self.kubelet.start()
            await self.plugin.start()
            await self.until(lambda: self.allocatable_of(resource) == count and REGISTER in self.annotations)
            yield self
        finally:
            await self.plugin.stop()
            await self.kubelet.stop()


class StaticNode(MigNode):
    """The same with static MIG."""

    mode = "hami-core"

    def plugin_flags(self) -> list[str]:
        return [*super().plugin_flags(), "--mig-strategy=mixed"]


@pytest.fixture
def folder() -> Any:
    with tempfile.TemporaryDirectory(prefix="hami-") as directory:
        yield Path(directory)


@pytest.mark.parametrize("journal", ["there", "lost"])
async def test_an_instance_lives_as_long_as_its_pod_and_outlives_the_plugin(
    embedded_api: ApiServer, folder: Path, journal: str
) -> None:
    """Without the journal kubelet's record of its answer is the proof."""
    node = MigNode(embedded_api, folder)
    async with node.serving("nvidia.com/gpu", "14"):
        first, second = node.cards
        assert (first.mode, first.count, first.devcore) == ("mig", 7, 100)
        assert [item.name for item in first.mig_profiles] == ["1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb"]
        await node.reserved("p", second.id, "2g.10gb", 2, 2)
        await node.until(lambda: dig(node.pod("p"), "status", "phase") == "Running")
        ((card, word, start, uuids),) = await node.instances()
        assert (card, word, start) == (1, "2g", 2)
        (answer,) = node.kubelet.devices.answers(node.pod("p")["metadata"]["uid"], "main")
        assert dict(answer.envs) == {"NVIDIA_VISIBLE_DEVICES": uuids[0]}
        assert not answer.mounts
        (item,) = json.loads(node.notes("p")[NOTE])
        assert item["migUUID"] == uuids[0]
        assert node.notes("p")["hami.io/bind-phase"] == "success"
        if journal == "lost":
            (node.vgpu / "mig-instances.json").unlink()
        before = node.plugin.pid
        await node.plugin.kill()
        await node.until(lambda: node.serves_again(before))
        assert await node.instances() == [[card, word, start, uuids]]
        await node.reserved("q", first.id, "1g.5gb", 6, 1)
        await node.until(lambda: dig(node.pod("q"), "status", "phase") == "Running")
        assert len(await node.instances()) == 2
        for name in ("p", "q"):
            await embedded_api.registry.delete(PODS, "default", name)
        await node.gone()


async def test_a_place_that_is_not_offered_fails_the_pod_with_its_reason(
    embedded_api: ApiServer, folder: Path
) -> None:
    node = MigNode(embedded_api, folder)
    async with node.serving("nvidia.com/gpu", "14"):
        await node.reserved("p", node.cards[0].id, "2g.10gb", 1, 2)
        await node.until(lambda: dig(node.pod("p"), "status", "phase") == "Failed")
        assert "the driver does not offer 2g at 1+2" in node.notes("p")["hami.io/allocate-error"]
        assert await node.instances() == []


async def test_static_devices_are_resources_of_kubelet(embedded_api: ApiServer, folder: Path) -> None:
    node = StaticNode(embedded_api, folder)
    await node.on_driver(
        """
        gpu = driver.gpus()[0]
        cards.divide(gpu)
        for start in (5, 6):
            cards.make(gpu, SliceKey(gpu.uuid, "1g", start, 1), "", lambda each: None)
        print(json.dumps(seen()))
        """
    )
    async with node.serving("nvidia.com/mig-1g.5gb", "2"):
        assert node.allocatable_of("nvidia.com/gpu") == "3", "the card that is not divided"
        assert [card.index for card in node.cards] == [1]
        await embedded_api.registry.create(
            PODS,
            "default",
            {
                "metadata": {"name": "p"},
                "spec": {
                    "nodeName": "n1",
                    "restartPolicy": "Never",
                    "containers": [
                        {
                            "name": "main",
                            "image": "none",
                            "command": ["sleep", "60"],
                            "resources": {"limits": {"nvidia.com/mig-1g.5gb": "1"}},
                        }
                    ],
                },
            },
        )
        await node.until(lambda: dig(node.pod("p"), "status", "phase") == "Running")
        (answer,) = node.kubelet.devices.answers(node.pod("p")["metadata"]["uid"], "main")
        assert answer.envs["NVIDIA_VISIBLE_DEVICES"] in {row[3][0] for row in await node.instances()}
        assert "hami.io/bind-phase" not in node.notes("p")
