"""Dynamic MIG in allocation mode exact: the instance is made when the container starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver_world import install_driver
from exact_world import ALLOCATED, TO_ALLOCATE, World, gpus
from mig_world import NOTE, FakeGiven, FakeMig, mig_pod, reservation
from node_cards import U1, U2
from plugin_world import MINORS

from hami.node.cdi.driver import DriverRoots
from hami.node.config import MigAllowed, Settings
from hami.node.errors import NvmlError
from hami.node.exact.errors import NotYetError, RefusedError
from hami.node.mig.documents import InstanceDocuments
from hami.node.mig.instances import MigCards
from hami.node.mig.journal import Journal
from hami.node.mig.manager import MigManager
from hami.node.paths import HostPaths
from hami.node.plugin.answer import CdiDelivery, Delivery, DeviceNode

Make = Callable[..., Any]


class MigWorld(World):
    """A node in mode exact whose cards are divided for the pods."""

    def __init__(self, cluster: Any, host: HostPaths) -> None:
        self.driver = FakeMig(U1, U2)
        self.given = FakeGiven()
        super().__init__(cluster, host)
        self.boot = Path(host.root, "boot_id")
        self.boot.write_text("boot-1")
        self.settings = Settings(mode="mig", mig_allowlist=(MigAllowed(("A100",), ("1g.5gb",)),))

    def files(self) -> list[str]:
        """Cache directories and limits files."""
        folders = (Path(self.host.containers), Path(self.host.limits))
        return [path.name for folder in folders for path in folder.iterdir()]

    async def restart(self) -> None:
        """A new process, prepared."""
        self.mig = MigManager(
            MigCards(self.driver),
            self.cluster,
            Journal(self.host, str(self.boot)),
            self.given,
            retry_s=0.001,
            patience_s=0.0,
            minors=lambda: MINORS,
        )
        await self.mig.prepare(self.driver.gpus())
        self.plugin = self.start()
        await self.plugin.restore(limits_files=True)


@pytest.fixture
async def world(cluster: Any, host: HostPaths, make_pod: Make) -> MigWorld:
    made = MigWorld(cluster, host)
    await made.restart()
    cluster.add(mig_pod(make_pod, "p", reservation(U1, "1g.5gb", 6, 1)))
    made.held["p", "app"] = gpus(0)
    return made


async def test_a_container_gets_its_instance_and_the_pod_is_marked(world: MigWorld) -> None:
    env = await world.started("p")
    (made,) = world.driver.card(U1).instances.values()
    assert env == {"NVIDIA_VISIBLE_DEVICES": made.compute[0]}
    assert not world.edits(gpus(0)).get("mounts")
    notes = world.cluster.notes("p")
    (item,) = json.loads(notes[NOTE])
    assert item["migUUID"] == made.compute[0]
    assert (notes["hami.io/bind-phase"], notes[TO_ALLOCATE]) == ("success", ";")
    assert world.files() == []


async def test_x2_a_restarted_container_gets_the_same_instance(world: MigWorld) -> None:
    first = await world.started("p")
    patches = len(world.cluster.patches)
    assert await world.started("p") == first
    assert len(world.cluster.patches) == patches


async def test_a_container_that_starts_again_after_a_restart_of_the_plugin_keeps_its_instance(
    world: MigWorld,
) -> None:
    first = await world.started("p")
    await world.restart()
    assert await world.started("p") == first
    assert world.files() == [], "there are no limits to bring back"


async def test_after_a_reboot_the_container_gets_a_new_instance_at_its_place(world: MigWorld) -> None:
    first = await world.started("p")
    world.driver = FakeMig(U1, U2)
    world.driver.made = 10
    await world.restart()
    assert await world.started("p") != first
    assert world.driver.places(U1) == [("1g.5gb", 6)]


async def test_a_driver_that_refuses_is_told_to_the_pod_and_the_next_try_succeeds(world: MigWorld) -> None:
    world.driver.fail["create"] = [NvmlError("cannot make MIG instance 1g.5gb: Insufficient Resources", 23)]
    with pytest.raises(RefusedError, match="Insufficient Resources"):
        await world.started("p")
    assert "Insufficient Resources" in world.cluster.notes("p")["hami.io/allocate-error"]
    assert world.driver.places(U1) == []
    assert await world.started("p")
    assert "hami.io/allocate-error" not in world.cluster.notes("p")


async def test_a_place_that_is_still_in_use_is_answered_later(world: MigWorld, make_pod: Make) -> None:
    await world.started("p")
    (instance,) = world.driver.card(U1).instances.values()
    instance.processes = 1
    world.cluster.objects["team-a", "p"]["status"]["phase"] = "Succeeded"
    world.cluster.add(mig_pod(make_pod, "next", reservation(U1, "1g.5gb", 6, 1)))
    del world.held["p", "app"]
    world.held["next", "app"] = gpus(1)
    with pytest.raises(NotYetError, match="another pod"):
        await world.started("next")
    instance.processes = 0
    assert await world.started("next")


async def test_a_pod_without_reservations_is_refused(world: MigWorld) -> None:
    world.cluster.notes("p")[NOTE] = "[]"
    with pytest.raises(RefusedError, match="1 devices and 0 MIG reservations"):
        await world.started("p")


async def test_a_container_of_mode_hami_core_keeps_its_share_when_the_node_changes_its_mode(
    world: MigWorld, make_pod: Make
) -> None:
    dynamic, world.settings = world.settings, Settings()
    world.cluster.add(make_pod("old", f"{U2},NVIDIA,3000,30:;"))
    world.held["old", "app"] = gpus(2)
    before = await world.started("old")
    world.settings = dynamic
    assert await world.started("old") == before
    assert world.cluster.notes("old")[ALLOCATED] == f"{U2},NVIDIA,3000,30:;"


async def test_with_a_cdi_strategy_the_document_brings_what_that_of_the_instance_adds(
    world: MigWorld, tmp_path: Path
) -> None:
    root = install_driver(tmp_path / "driver")
    roots = DriverRoots(str(root), "", str(root), "", "/usr/bin/nvidia-ctk")
    assert world.mig is not None
    world.mig.documents = InstanceDocuments(world.host, roots)
    world.delivery = Delivery(extras={}, device_nodes={}, cdi=CdiDelivery(cri=True, only=True))
    await world.started("p")
    (made,) = world.driver.card(U1).instances.values()
    edits = world.edits(gpus(0))
    paths = [node["path"] for node in edits["deviceNodes"]]
    assert f"/dev/nvidia-caps/nvidia-cap{100 + 2 * made.id}" in paths
    assert "/dev/nvidiactl" in paths
    assert any("libcuda.so" in mount["containerPath"] for mount in edits["mounts"])


async def test_the_document_has_the_nodes_of_the_instance_when_asked_for(world: MigWorld) -> None:
    control = (DeviceNode("/dev/nvidiactl", "/dev/nvidiactl"),)
    world.delivery = Delivery(extras={}, device_nodes={"": control})
    await world.started("p")
    paths = [node["path"] for node in world.edits(gpus(0))["deviceNodes"]]
    assert paths[:2] == ["/dev/nvidiactl", "/dev/nvidia0"]
