"""PreStartContainer in mode exact: whose entry is delivered, and what survives restarts (§17.4)."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from exact_world import ALLOCATED, GPU, LOCK, TO_ALLOCATE, World, documents_of, gpus
from node_cards import U1, U2

from hami.kube.errors import ServerError
from hami.node.exact.cdi import device_name, document_file
from hami.node.exact.errors import NotYetError, RefusedError
from hami.node.paths import HostPaths
from hami.node.plugin.answer import Delivery
from hami.protocol.views import Pod, decode

Make = Callable[..., Any]


@pytest.fixture
def world(cluster: Any, host: HostPaths) -> World:
    return World(cluster, host)


@pytest.fixture
def served(world: World, make_pod: Make) -> World:
    """Pod ``p`` with one container that holds one id."""
    world.cluster.add(make_pod("p", f"{U1},NVIDIA,3000,30:;"))
    world.held[("p", "app")] = gpus(0)
    return world


def write(path: Path, text: str) -> None:
    path.write_text(text)


async def test_a_container_gets_its_own_entry_and_the_pod_is_marked_in_one_write(served: World) -> None:
    env = await served.started("p")
    assert env["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert (env["NVIDIA_VISIBLE_DEVICES"], env["HAMI_DEVICE_UUIDS"]) == (U1, U1)
    assert served.cluster.patches == [("p", {"hami.io/bind-phase": "success", TO_ALLOCATE: ";"})]
    assert served.cluster.notes("p")[ALLOCATED] == f"{U1},NVIDIA,3000,30:;"


async def test_x1_sixty_pods_at_once_each_container_gets_its_own(world: World, make_pod: Make) -> None:
    containers = ("a", "b", "c")
    wanted: dict[tuple[str, str], int] = {}
    for index in range(60):
        names = containers[: 1 + index % 3]
        limits = [1000 + 10 * index + position for position in range(len(names))]
        text = "".join(f"{(U1, U2)[index % 2]},NVIDIA,{mib},{index}:;" for mib in limits)
        world.cluster.add(make_pod(f"p{index}", text, containers=names))
        for name, mib in zip(names, limits, strict=True):
            world.held[(f"p{index}", name)] = (f"{name}-{index}",)
            wanted[(f"p{index}", name)] = mib
    await asyncio.gather(*(world.pre_start(*world.held[key]) for key in wanted))
    for key, mib in wanted.items():
        env = world.env(world.held[key])
        assert env["CUDA_DEVICE_MEMORY_LIMIT_0"] == f"{mib}m"
        assert env["CUDA_DEVICE_SM_LIMIT"] == key[0][1:]
        (directory,) = [
            mount["hostPath"] for mount in world.edits(world.held[key])["mounts"]
            if mount["containerPath"] == "/usr/local/vgpu"
        ]  # fmt: skip
        assert directory.endswith(f"/uid-{key[0]}_{key[1]}")
    await world.plugin.drain(30)
    assert LOCK not in world.cluster.node_annotations
    assert sorted(name for name, _ in world.cluster.patches) == sorted(f"p{index}" for index in range(60))


async def test_x2_a_restart_gets_the_same_answer_and_writes_nothing(served: World) -> None:
    await served.started("p")
    content = served.path(gpus(0)).read_bytes()
    directory = Path(served.host.containers) / "uid-p_app"
    (directory / "used.cache").write_text("region")
    for _ in range(5):
        await served.started("p")
    assert served.path(gpus(0)).read_bytes() == content
    assert (directory / "used.cache").read_text() == "region"
    assert directory.stat().st_mode & 0o7777 == 0o777
    assert len(served.cluster.patches) == 1


async def test_x4_a_mark_that_was_lost_is_made_up_for_by_the_next_process(served: World) -> None:
    served.cluster.fail_pod_patches = lambda _notes: ServerError(500, "InternalError", "down")
    await served.started("p")
    assert served.cluster.notes("p")["hami.io/bind-phase"] == "allocating"
    served.cluster.fail_pod_patches = lambda _notes: None
    served.plugin = served.start()
    await served.plugin.restore(True)
    await served.plugin.mark_served()
    assert served.cluster.notes("p")["hami.io/bind-phase"] == "success"
    assert served.env(gpus(0))["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"


async def test_x5_ids_used_again_get_the_document_of_the_new_pod(served: World, make_pod: Make) -> None:
    await served.started("p")
    del served.held[("p", "app")]
    served.cluster.add(make_pod("q", f"{U2},NVIDIA,500,5:;"))
    served.held[("q", "app")] = gpus(0)
    env = await served.started("q")
    assert (env["CUDA_DEVICE_MEMORY_LIMIT_0"], env["NVIDIA_VISIBLE_DEVICES"]) == ("500m", U2)
    assert documents_of(served) == [document_file(device_name(gpus(0)))]


async def test_x7_a_pod_that_bypassed_the_scheduler_is_refused_by_name(served: World) -> None:
    notes = served.cluster.notes("p")
    notes.clear()
    with pytest.raises(RefusedError) as caught:
        await served.started("p")
    text = "pod team-a/p has no device allocation; it must be scheduled by hami-scheduler"
    assert str(caught.value) == text
    assert served.events("AllocateFailed") == [text]
    assert notes == {"hami.io/allocate-error": text}
    assert not served.path(gpus(0)).exists()


async def test_a_refusal_is_written_once_for_the_same_words(served: World) -> None:
    served.cluster.notes("p").clear()
    for _ in range(3):
        with pytest.raises(RefusedError):
            await served.started("p")
    assert len(served.cluster.patches) == 1


async def test_annotations_of_another_node_are_no_allocation(served: World) -> None:
    served.cluster.notes("p")["hami.io/vgpu-node"] = "n2"
    with pytest.raises(RefusedError, match="has no device allocation"):
        await served.started("p")


async def test_x8_a_lock_taken_for_this_pod_is_released_and_a_foreign_one_stays(served: World) -> None:
    served.cluster.node_annotations[LOCK] = "2026-11-29T20:00:00Z,team-a,p"
    await served.started("p")
    assert LOCK not in served.cluster.node_annotations
    served.cluster.node_annotations[LOCK] = "2026-11-29T20:00:00Z,team-a,other"
    served.cluster.notes("p")["hami.io/bind-phase"] = "allocating"
    await served.plugin.mark_served()
    assert served.cluster.notes("p")["hami.io/bind-phase"] == "success"
    assert served.cluster.node_annotations[LOCK].endswith("other")


async def test_x9_the_document_sets_every_variable_of_the_closed_list(world: World, make_pod: Make) -> None:
    own = [("CUDA_DEVICE_SM_LIMIT_0", "100"), ("LIBVGPU_HOSTPID_BROKER", "1"), ("LIBCUDA_LOG_LEVEL", "4")]
    world.cluster.add(make_pod("p", f"{U1},NVIDIA,3000,30:;", env={"app": own}))
    world.held[("p", "app")] = gpus(0)
    world.settings = replace(world.settings, log_level="1")
    env = await world.started("p")
    limits = (Path(world.host.limits) / "uid-p_app").read_text()
    table = dict(line.split("=", 1) for line in limits.splitlines())
    assert {key: value for key, value in env.items() if key in table} == {
        key: value for key, value in table.items() if key != "LIBCUDA_LOG_LEVEL"
    }
    assert (env["CUDA_DEVICE_SM_LIMIT_0"], env["LIBVGPU_HOSTPID_BROKER"]) == ("30", "0")
    assert "LIBCUDA_LOG_LEVEL" not in env
    assert set(table) - set(env) == {"LIBCUDA_LOG_LEVEL"}
    (event,) = world.events("HAMiReservedEnv")
    assert "CUDA_DEVICE_SM_LIMIT_0, LIBVGPU_HOSTPID_BROKER" in event


async def test_x11_after_a_reboot_the_documents_are_back(served: World) -> None:
    await served.started("p")
    content = served.path(gpus(0)).read_bytes()
    shutil.rmtree(served.directory)
    served.plugin = served.start()
    await served.plugin.restore(True)
    await served.started("p")
    assert served.path(gpus(0)).read_bytes() == content


async def test_x13_a_container_of_mode_lock_keeps_its_region_when_it_restarts(served: World) -> None:
    await served.started("p")
    body = served.checkpoint()
    body["entries"][0]["limits"]["CUDA_DEVICE_MEMORY_SHARED_CACHE"] = "/usr/local/vgpu/random.cache"
    write(Path(served.host.checkpoint), json.dumps(body))
    served.plugin = served.start()
    await served.plugin.restore(True)
    env = await served.started("p")
    assert env["CUDA_DEVICE_MEMORY_SHARED_CACHE"] == "/usr/local/vgpu/random.cache"
    assert len(served.cluster.patches) == 1


def set_status(world: World, name: str, **state: Any) -> None:
    world.cluster.objects[("team-a", "p")]["status"]["initContainerStatuses"] = [
        {"name": name, "state": state}
    ]


@pytest.fixture
def with_init(world: World, make_pod: Make) -> World:
    """Pod ``p``: its init container and, with the same id, its container; kubelet lists only the latter."""
    world.cluster.add(make_pod("p", f"{U1},NVIDIA,1000,10:;{U2},NVIDIA,2000,20:;", init=("init",)))
    world.held[("p", "app")] = gpus(0)
    world.record([("uid-p", "init", gpus(0)), ("uid-p", "app", gpus(0))])
    return world


async def test_x14_an_init_container_and_the_container_after_it_get_their_own_entries(
    with_init: World,
) -> None:
    env = await with_init.started("p")
    assert (env["CUDA_DEVICE_MEMORY_LIMIT_0"], env["HAMI_DEVICE_UUIDS"]) == ("1000m", U1)
    assert with_init.cluster.patches == []
    set_status(with_init, "init", terminated={"exitCode": 0})
    env = await with_init.started("p")
    assert (env["CUDA_DEVICE_MEMORY_LIMIT_0"], env["HAMI_DEVICE_UUIDS"]) == ("2000m", U2)
    assert with_init.cluster.patches == [("p", {"hami.io/bind-phase": "success", TO_ALLOCATE: ";;"})]


async def test_x14_without_kubelets_checkpoint_the_number_of_devices_tells(with_init: World) -> None:
    with_init.state.unlink()
    env = await with_init.started("p")
    assert env["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m"


async def test_x14_while_the_status_does_not_tell_nothing_is_guessed(with_init: World) -> None:
    await with_init.started("p")
    content = with_init.path(gpus(0)).read_bytes()
    set_status(with_init, "init", running={})
    with pytest.raises(NotYetError, match="does not tell yet whether init container init has ended"):
        await with_init.started("p")
    assert with_init.path(gpus(0)).read_bytes() == content
    set_status(with_init, "init", waiting={"reason": "CreateContainerConfigError"})
    assert (await with_init.started("p"))["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m"


async def test_x14_ids_that_only_an_init_container_holds_lead_to_its_pod(
    world: World, make_pod: Make
) -> None:
    world.cluster.add(make_pod("p", f"{U1},NVIDIA,1000,10:{U2},NVIDIA,1000,10:;;", init=("init",)))
    ids = gpus(0, 2)
    world.record([("uid-p", "init", ids)])
    await world.pre_start(*ids)
    assert world.env(ids)["CUDA_DEVICE_MEMORY_LIMIT_1"] == "1000m"
    await world.plugin.collect(GPU, -1e12)
    assert world.path(ids).exists()
    world.cluster.objects[("team-a", "p")]["status"]["phase"] = "Running"
    await world.plugin.collect(GPU, -1e12)
    assert not world.path(ids).exists()


async def test_x15_a_changed_annotation_is_refused_also_by_the_next_process(served: World) -> None:
    await served.started("p")
    content = served.path(gpus(0)).read_bytes()
    for text in (f"{U1},NVIDIA,6000,30:;", f"{U2},NVIDIA,3000,30:;"):
        served.cluster.notes("p")[ALLOCATED] = text
        with pytest.raises(RefusedError) as caught:
            await served.started("p")
        assert f"container app was given {U1} with 3000 MiB and 30 % first" in str(caught.value)
        assert served.events("AllocateFailed")[-1] == str(caught.value)
        served.plugin = served.start()
        await served.plugin.restore(True)
    assert f"now says {U2} with 3000 MiB" in str(caught.value)
    assert served.path(gpus(0)).read_bytes() == content
    assert served.cluster.notes("p")["hami.io/bind-phase"] == "success"
    assert "CUDA_DEVICE_MEMORY_LIMIT_0=3000m\n" in (Path(served.host.limits) / "uid-p_app").read_text()


def spoil_lock_parent(host: HostPaths) -> None:
    """A lock parent that a workload could exchange: of another user, or (without root) a symlink."""
    parent = Path(host.host("/tmp/vgpulock"))
    if os.geteuid() == 0:
        parent.mkdir(exist_ok=True)
        os.chown(parent, 1000, 1000)
    else:
        parent.symlink_to("/nowhere")


async def test_x2_a_container_that_gave_its_directory_to_another_user_starts_again(served: World) -> None:
    first = await served.started("p")
    directory = Path(served.host.containers) / "uid-p_app"
    (directory / "kept").touch()
    directory.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(directory, 1000, 1000)
    assert await served.started("p") == first
    found = directory.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), 0o777)
    assert (directory / "kept").exists()


async def test_x16_an_unsafe_lock_parent_is_refused_and_no_document_written(served: World) -> None:
    spoil_lock_parent(served.host)
    with pytest.raises(RefusedError, match=r"^failed to prepare host PID lock parent"):
        await served.started("p")
    assert not served.path(gpus(0)).exists()
    assert served.cluster.notes("p")["hami.io/allocate-error"].startswith("failed to prepare host PID lock")
    assert served.cluster.notes("p")["hami.io/bind-phase"] == "allocating"
    assert len(served.events("AllocateFailed")) == 1


async def test_x17_a_pod_that_the_watch_has_not_shown_is_read_once(served: World) -> None:
    served.pods.unseen.add("p")
    reads: list[str] = []
    whole = served.cluster.pod

    async def counted(namespace: str, name: str) -> Pod:
        reads.append(name)
        pod: Pod = await whole(namespace, name)
        return pod

    served.cluster.pod = counted
    await served.started("p")
    assert reads == ["p"]


async def test_x17_an_older_pod_of_the_same_name_in_the_watch_is_not_served(served: World) -> None:
    served.pods.stale["p"] = decode(
        msgspec.json.encode(
            {**served.cluster.objects[("team-a", "p")], "metadata": {"name": "p", "uid": "uid-old"}}
        ),
        Pod,
    )
    served.record([("uid-p", "app", gpus(0))])
    assert (await served.started("p"))["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"


async def test_x17_without_kubelets_record_an_older_pod_of_the_same_name_is_not_served(served: World) -> None:
    old = copy.deepcopy(served.cluster.objects["team-a", "p"])
    old["metadata"]["uid"] = "uid-old"
    for key, text in old["metadata"]["annotations"].items():
        old["metadata"]["annotations"][key] = text.replace("3000", "9000")
    served.pods.stale["p"] = decode(msgspec.json.encode(old), Pod)
    served.state.unlink(missing_ok=True)
    assert (await served.started("p"))["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert not (Path(served.host.containers) / "uid-old_app").exists()


async def test_x18_a_broker_turned_on_reaches_a_restarted_container(served: World) -> None:
    assert (await served.started("p"))["LIBVGPU_HOSTPID_BROKER"] == "0"
    served.delivery = Delivery(broker=True, extras={}, device_nodes={})
    assert (await served.started("p"))["LIBVGPU_HOSTPID_BROKER"] == "1"
    mounts = [mount["containerPath"] for mount in served.edits(gpus(0))["mounts"]]
    assert mounts.index("/tmp/vgpulock") + 1 == mounts.index("/tmp/vgpulock/hostpid")
    assert "LIBVGPU_HOSTPID_BROKER=1\n" in (Path(served.host.limits) / "uid-p_app").read_text()


async def test_a_mount_point_that_cannot_be_made_is_mounted_on_by_no_container(
    served: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("hami.node.plugin.workspace.prepare_mount_point", fail)
    served.delivery = Delivery(broker=True, extras={}, device_nodes={})
    await served.started("p")
    mounts = [mount["containerPath"] for mount in served.edits(gpus(0))["mounts"]]
    assert "/tmp/vgpulock" in mounts
    assert "/tmp/vgpulock/hostpid" not in mounts
    assert "HAMiLockParentUnsafe" in [item[1] for item in served.cluster.events]


async def test_a15_with_the_gate_off_the_document_overrides_the_pod_s_own_gate(
    world: World, make_pod: Make
) -> None:
    own = [("LIBVGPU_HOSTPID_BROKER", "1")]
    world.cluster.add(make_pod("p", f"{U1},NVIDIA,3000,30:;", env={"app": own}))
    world.held[("p", "app")] = gpus(0)
    assert (await world.started("p"))["LIBVGPU_HOSTPID_BROKER"] == "0"
    mounts = world.edits(gpus(0))["mounts"]
    assert "/tmp/vgpulock" in [mount["containerPath"] for mount in mounts]
    assert "hostpid" not in str(mounts)
