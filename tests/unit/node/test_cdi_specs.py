"""What CDI documents of a node hold, and how they come into their directory (device-plugin.md §8.4, §8.5)."""

from __future__ import annotations

import json
import logging
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cdi_rules import problems
from driver_world import FOLDER, VERSION, install_driver, touch
from node_cards import U1, U2

from hami.node.cdi import kinds
from hami.node.cdi.directory import CdiDirectory
from hami.node.cdi.driver import DriverRoots, driver_edits, extra_edits
from hami.node.cdi.edits import CdiError
from hami.node.cdi.specs import OUR_FILES, CardDevice, make_specs
from hami.node.errors import UnsafePathError
from hami.node.paths import HostPaths

HOOK = "/usr/bin/nvidia-ctk"
GPU_FILE = "k8s.device-plugin.nvidia.com-gpu.json"
TWO = [CardDevice(U1, ("/dev/nvidia0",), "00000000:3B:00.0"), CardDevice(U2, ("/dev/nvidia1",))]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return install_driver(tmp_path / "driver-root")


def roots_of(root: Path, host: str = "") -> DriverRoots:
    return DriverRoots(str(root), host, str(root), host, HOOK)


def document(files: Any, kind: str = kinds.GPU) -> Any:
    content = files[kinds.file_of(kind)]
    assert problems(content) == []
    return json.loads(content)


# ---- content -----------------------------------------------------------------------------------------------


def test_the_document_of_the_cards_names_each_and_brings_the_driver(root: Path) -> None:
    specs = make_specs(TWO, {}, (), roots_of(root))
    found = document(specs.files)
    assert (found["kind"], found["cdiVersion"]) == ("k8s.device-plugin.nvidia.com/gpu", "0.3.0")
    assert {
        device["name"]: [node["path"] for node in device["containerEdits"]["deviceNodes"]]
        for device in found["devices"]
    } == {U1: ["/dev/nvidia0"], U2: ["/dev/nvidia1"]}
    common = found["containerEdits"]
    assert common["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]
    assert [node["path"] for node in common["deviceNodes"]] == ["/dev/nvidiactl", "/dev/nvidia-uvm"]
    assert {mount["containerPath"] for mount in common["mounts"]} == {
        *(f"/{FOLDER}/{name}.so.{VERSION}" for name in ("libcuda", "libnvidia-ml")),
        *(f"/{FOLDER}/{name}.so.{VERSION}" for name in ("libnvidia-ptxjitcompiler", "libGLX_nvidia")),
        f"/{FOLDER}/vdpau/libvdpau_nvidia.so.{VERSION}",
        f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin",
        "/usr/bin/nvidia-smi",
        "/run/nvidia-persistenced/socket",
    }


def test_only_the_socket_may_be_written_to(root: Path) -> None:
    mounts = driver_edits(roots_of(root)).mounts
    assert [mount.container_path for mount in mounts if "ro" not in mount.options] == [
        "/run/nvidia-persistenced/socket"
    ]


def test_hooks_make_the_libraries_found(root: Path) -> None:
    links, cache = driver_edits(roots_of(root)).hooks
    assert links.path == cache.path == HOOK
    assert links.args == (
        "nvidia-ctk",
        "hook",
        "create-symlinks",
        "--link",
        f"libcuda.so.1::/{FOLDER}/libcuda.so",
    )
    assert cache.args == (
        "nvidia-ctk",
        "hook",
        "update-ldcache",
        "--folder",
        f"/{FOLDER}",
        "--folder",
        f"/{FOLDER}/vdpau",
    )


def test_the_small_hook_program_has_no_subcommand(root: Path) -> None:
    touch(root, "usr/bin/nvidia-cdi-hook")
    links, _ = driver_edits(replace(roots_of(root), hook="/usr/bin/nvidia-cdi-hook")).hooks
    assert links.args[:2] == ("nvidia-cdi-hook", "create-symlinks")


def test_roots_are_those_of_the_host(root: Path) -> None:
    roots = DriverRoots(str(root), "/run/nvidia/driver", str(root), "/run/nvidia/dev", "/opt/nvidia-ctk")
    found = document(make_specs(TWO, {}, (), roots).files)
    assert found["cdiVersion"] == "0.5.0"
    assert {
        mount["hostPath"].startswith("/run/nvidia/driver/") for mount in found["containerEdits"]["mounts"]
    } == {True}
    assert found["devices"][0]["containerEdits"]["deviceNodes"] == [
        {"path": "/dev/nvidia0", "hostPath": "/run/nvidia/dev/dev/nvidia0", "permissions": "rw"}
    ]


def test_graphics_nodes_of_a_card_come_with_it(root: Path, tmp_path: Path) -> None:
    sysfs = tmp_path / "sys"
    (sysfs / "bus/pci/devices/0000:3b:00.0/drm/card1").mkdir(parents=True)
    (sysfs / "bus/pci/devices/0000:3b:00.0/drm/renderD129").mkdir()
    (sysfs / "bus/pci/devices/0000:3b:00.0/drm/version").touch()
    touch(root, "dev/dri/card0", "dev/dri/card1", "dev/dri/renderD129")
    edits = make_specs(TWO, {}, (), roots_of(root), str(sysfs)).edits
    paths = [node.path for node in edits[f"{kinds.GPU}={U1}"].nodes]
    assert paths[-3:] == ["/dev/nvidia0", "/dev/dri/card1", "/dev/dri/renderD129"]
    assert "/dev/dri/card1" not in [node.path for node in edits[f"{kinds.GPU}={U2}"].nodes]


def test_the_edits_of_a_name_are_all_that_its_document_brings(root: Path) -> None:
    specs = make_specs(TWO, {"0": "/dev/nvidia-caps-imex-channels/channel0"}, (), roots_of(root))
    card = specs.edits[f"{kinds.GPU}={U1}"]
    assert card.env == {"NVIDIA_VISIBLE_DEVICES": "void"}
    assert [node.path for node in card.nodes] == ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"]
    assert len(card.hooks) == 2
    channel = document(specs.files, kinds.IMEX)["devices"][0]
    assert channel["name"] == "0"
    assert specs.edits[f"{kinds.IMEX}=0"].nodes[0].path == "/dev/nvidia-caps-imex-channels/channel0"


def test_extras_are_described_where_the_node_has_them(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    touch(root, "dev/nvidia-fs0", "dev/nvidia-fs1", "etc/cufile.json", "dev/infiniband/uverbs0")
    with caplog.at_level(logging.WARNING):
        specs = make_specs(TWO, {}, kinds.EXTRAS, roots_of(root))
    assert specs.extras == (kinds.GDS, kinds.MOFED)
    assert set(specs.files) == {GPU_FILE, kinds.file_of(kinds.GDS), kinds.file_of(kinds.MOFED)}
    (device,) = document(specs.files, kinds.GDS)["devices"]
    assert device["name"] == "all"
    assert [node["path"] for node in device["containerEdits"]["deviceNodes"]] == [
        "/dev/nvidia-fs0",
        "/dev/nvidia-fs1",
    ]
    assert [mount["containerPath"] for mount in device["containerEdits"]["mounts"]] == ["/etc/cufile.json"]
    assert caplog.messages == ["cdi.kind_without_devices"]
    assert not extra_edits(kinds.GDRCOPY, roots_of(root))


def test_of_two_installed_drivers_the_linked_one_counts(root: Path) -> None:
    touch(root, f"{FOLDER}/libcuda.so.535.1.2")
    mounts = driver_edits(roots_of(root)).mounts
    assert not any("535.1.2" in mount.container_path for mount in mounts)
    (root / FOLDER / "libcuda.so.1").unlink()
    with pytest.raises(CdiError, match=f"drivers 535.1.2 and {VERSION}"):
        driver_edits(roots_of(root))


def test_a_root_without_a_driver_says_what_to_mount(tmp_path: Path) -> None:
    with pytest.raises(CdiError, match="nvidiaDriverRoot"):
        make_specs(TWO, {}, (), roots_of(tmp_path))


def test_a_hook_that_is_not_there_is_noticed_before_a_container_needs_it(root: Path) -> None:
    (root / "usr/bin/nvidia-ctk").unlink()
    with pytest.raises(CdiError, match="install the NVIDIA Container Toolkit"):
        driver_edits(roots_of(root))
    assert driver_edits(roots_of(root, "/run/nvidia/driver")).hooks, "the host's root is not to be seen here"


# ---- directory ---------------------------------------------------------------------------------------------


@pytest.fixture
def directory(host: HostPaths) -> CdiDirectory:
    return CdiDirectory(host)


def names(directory: CdiDirectory) -> list[str]:
    return sorted(path.name for path in Path(directory.path).iterdir())


def test_documents_are_root_s_and_nobody_else_may_write(directory: CdiDirectory) -> None:
    before = os.umask(0)
    try:
        directory.publish({GPU_FILE: b"one"}, OUR_FILES)
    finally:
        os.umask(before)
    found = Path(directory.path, GPU_FILE).stat()
    assert stat.S_IMODE(found.st_mode) == 0o644
    assert found.st_uid == os.geteuid()


def test_a_planted_symlink_is_replaced_and_its_target_stays(directory: CdiDirectory, tmp_path: Path) -> None:
    target = tmp_path / "victim"
    target.write_text("as it was")
    directory.publish({}, OUR_FILES)
    planted = Path(directory.path, GPU_FILE)
    planted.symlink_to(target)
    directory.publish({GPU_FILE: b"one"}, OUR_FILES)
    assert target.read_text() == "as it was"
    assert not planted.is_symlink()
    assert planted.read_bytes() == b"one"


def test_documents_of_before_go_and_those_of_others_stay(directory: CdiDirectory) -> None:
    directory.publish({GPU_FILE: b"one", kinds.file_of(kinds.GDS): b"two"}, OUR_FILES)
    folder = Path(directory.path)
    others = ["nvidia.yaml", "hami.io-vgpu-v0.json", "k8s.device-plugin.nvidia.com-gpu-MIG-1.json"]
    touch(folder, *others, f".{GPU_FILE}.0123456789abcdef", f".{GPU_FILE}.fedcba9876543210")
    os.utime(folder / f".{GPU_FILE}.0123456789abcdef", (1, 1))
    removed = directory.publish({GPU_FILE: b"three"}, OUR_FILES)
    assert sorted(removed) == [f".{GPU_FILE}.0123456789abcdef", kinds.file_of(kinds.GDS)]
    assert names(directory) == sorted([GPU_FILE, f".{GPU_FILE}.fedcba9876543210", *others])
    assert (folder / GPU_FILE).read_bytes() == b"three"


def test_a_single_document_is_written_and_removed(directory: CdiDirectory) -> None:
    directory.write("k8s.device-plugin.nvidia.com-gpu-MIG-1.json", b"one")
    assert names(directory) == ["k8s.device-plugin.nvidia.com-gpu-MIG-1.json"]
    directory.remove("k8s.device-plugin.nvidia.com-gpu-MIG-1.json")
    directory.remove("k8s.device-plugin.nvidia.com-gpu-MIG-1.json")
    assert names(directory) == []


def test_a_directory_that_everybody_may_write_to_is_refused(directory: CdiDirectory) -> None:
    directory.publish({}, OUR_FILES)
    Path(directory.path).chmod(0o777)
    with pytest.raises(UnsafePathError, match="chmod o-w"):
        directory.publish({GPU_FILE: b"one"}, OUR_FILES)
    assert names(directory) == []


def test_a_symlink_in_place_of_the_directory_is_refused(directory: CdiDirectory, tmp_path: Path) -> None:
    Path(directory.path).parent.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    Path(directory.path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePathError):
        directory.publish({GPU_FILE: b"one"}, OUR_FILES)
    assert list((tmp_path / "elsewhere").iterdir()) == []
