"""CDI documents by the rules of the CNCF specification, and what a container gets by the CDI strategies."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from cdi_rules import problems
from hypothesis import given
from hypothesis import strategies as st
from node_cards import U1, U2

from hami.node.cdi.edits import BindMount, CdiError, Edits, Hook, Node, build_spec, merged, qualified
from hami.node.config import Settings
from hami.node.errors import AllocateError
from hami.node.exact.cdi import build_document
from hami.node.paths import HostPaths
from hami.node.plugin.answer import (
    Answer,
    CdiDelivery,
    Delivery,
    DeviceNode,
    HostFiles,
    Mount,
    base_response,
    build_answer,
    inlined_edits,
    limits_table,
)
from hami.protocol.allocation import ContainerDevice
from hami.protocol.views import Container

GPU = "k8s.device-plugin.nvidia.com/gpu"
NAME = f"{GPU}={U1}"
ID = "0b1c9a3e-0000-4000-8000-000000000001"
CRI = CdiDelivery(cri=True, only=True)
NOTES = CdiDelivery(annotations=True, only=True, new_id=lambda: ID)


def delivery(cdi: CdiDelivery | None, **other: object) -> Delivery:
    return replace(Delivery(extras={}, device_nodes={}, cdi=cdi), **other)  # type: ignore[arg-type]


def answer(given: Delivery) -> Answer:
    devices = (ContainerDevice(U1, "NVIDIA", 3000, 30),)
    container, settings = Container(name="app"), Settings()
    table = limits_table(devices, container, settings, "/usr/local/vgpu/x.cache", given)
    files = HostFiles("/usr/local/vgpu/libvgpu.so", license=False)
    return build_answer(devices, container, "uid-1", table, settings, HostPaths(), files, given)


# ---- what a container gets ---------------------------------------------------------------------------------


def test_l21_cdi_cri_names_the_devices_and_leaves_the_environment_to_cdi() -> None:
    result = answer(delivery(CRI))
    assert result.cdi_devices == (NAME,)
    assert result.annotations == {}
    assert "NVIDIA_VISIBLE_DEVICES" not in result.env
    assert result.env["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert result.env == {
        key: value for key, value in answer(delivery(None)).env.items() if key != "NVIDIA_VISIBLE_DEVICES"
    }
    assert result.mounts == answer(delivery(None)).mounts


def test_l22_cdi_annotations_name_devices_and_extras_under_the_prefix() -> None:
    cdi = replace(NOTES, prefix="x.io/", extras=("k8s.device-plugin.nvidia.com/gds",))
    result = answer(delivery(cdi, extras={"NVIDIA_GDS": "enabled"}))
    assert result.annotations == {
        f"x.io/nvidia-device-plugin_{ID}": f"{NAME},k8s.device-plugin.nvidia.com/gds=all"
    }
    assert result.cdi_devices == ()
    assert "NVIDIA_GDS" not in result.env


def test_both_cdi_strategies_say_the_same() -> None:
    result = answer(delivery(replace(NOTES, cri=True)))
    assert list(result.annotations.values()) == [NAME]
    assert result.cdi_devices == (NAME,)


def test_every_answer_has_an_annotation_key_of_its_own() -> None:
    cdi = CdiDelivery(annotations=True, only=True)
    keys = {key for _ in range(2) for key in answer(delivery(cdi)).annotations}
    assert len(keys) == 2
    assert all(key.startswith("cdi.k8s.io/nvidia-device-plugin_") for key in keys)
    assert all(len(key.partition("/")[2]) <= 63 for key in keys)


@pytest.mark.parametrize(("volume_mounts", "visible"), [(False, U1), (True, None)])
def test_a_strategy_beside_cdi_adds_its_own_way(volume_mounts: bool, visible: str | None) -> None:
    cdi = replace(CRI, only=False)
    given = delivery(cdi, volume_mounts=volume_mounts, extras={"NVIDIA_GDS": "enabled"})
    result = base_response([U1, U1], given)
    assert result.cdi_devices == (NAME,)
    assert result.env["NVIDIA_GDS"] == "enabled"
    assert result.env["NVIDIA_VISIBLE_DEVICES"] == (visible or "/var/run/nvidia-container-devices")
    targets = [mount.container_path for mount in result.mounts]
    assert targets == ([f"/var/run/nvidia-container-devices/{U1}"] if volume_mounts else [])


def test_with_cdi_alone_no_device_nodes_are_answered() -> None:
    nodes = {"": (DeviceNode("/dev/nvidiactl", "/dev/nvidiactl"),)}
    assert base_response([U1], delivery(CRI, device_nodes=nodes)).devices == ()
    beside = base_response([U1], delivery(replace(CRI, only=False), device_nodes=nodes))
    assert beside.devices == nodes[""]


def test_names_follow_the_id_strategy_and_come_in_their_order() -> None:
    cdi = replace(CRI, extras=("k8s.device-plugin.nvidia.com/gdrcopy", "k8s.device-plugin.nvidia.com/mofed"))
    result = base_response([U2, U1], delivery(cdi, indexes={U1: "0", U2: "1"}, imex=("0",)))
    assert result.cdi_devices == (
        f"{GPU}=1",
        f"{GPU}=0",
        "k8s.device-plugin.nvidia.com/imex-channel=0",
        "k8s.device-plugin.nvidia.com/gdrcopy=all",
        "k8s.device-plugin.nvidia.com/mofed=all",
    )


def test_without_anything_to_inject_there_is_no_annotation() -> None:
    result = base_response([], delivery(replace(NOTES, cri=True)))
    assert (result.annotations, result.cdi_devices) == ({}, ())


def test_a_device_that_no_document_describes_is_refused_where_it_is_put_in() -> None:
    given = delivery(replace(CRI, edits={NAME: Edits({"A": "1"})}))
    assert inlined_edits([U1], given) == Edits({"A": "1"})
    with pytest.raises(AllocateError, match=f"no CDI document describes {GPU}={U2}"):
        inlined_edits([U1, U2], given)
    assert not inlined_edits([U1], delivery(None))


def test_a_document_of_mode_exact_holds_what_cdi_adds_for_its_cards() -> None:
    card = Edits(
        {"NVIDIA_VISIBLE_DEVICES": "void"},
        (Node("/dev/nvidia0", "/driver/dev/nvidia0"),),
        (BindMount("/usr/lib64/libcuda.so.1", "/usr/lib64/libcuda.so.1", ("ro", "bind")),),
        (Hook("/usr/bin/nvidia-ctk", ("nvidia-ctk", "hook", "update-ldcache")),),
    )
    env = {"A": "1", "NVIDIA_VISIBLE_DEVICES": U1}
    content = build_document("v1", env, [Mount("/a", "/b", True)], [DeviceNode("/dev/x", "/dev/x")], card)
    assert problems(content) == []
    document = json.loads(content)
    (device,) = document["devices"]
    edits = device["containerEdits"]
    assert document["cdiVersion"] == "0.5.0"
    assert edits["env"] == ["A=1", "NVIDIA_VISIBLE_DEVICES=void"]
    assert [mount["containerPath"] for mount in edits["mounts"]] == ["/usr/lib64/libcuda.so.1", "/a"]
    assert [node["path"] for node in edits["deviceNodes"]] == ["/dev/nvidia0", "/dev/x"]
    assert [hook["path"] for hook in edits["hooks"]] == ["/usr/bin/nvidia-ctk"]


# ---- documents ---------------------------------------------------------------------------------------------

SOME = Edits({"A": "1"})


def test_the_version_is_the_lowest_that_the_content_needs() -> None:
    same = {"a": Edits(nodes=(Node("/dev/x", "/dev/x"),))}
    moved = {"a": Edits(nodes=(Node("/dev/x", "/y/dev/x"),))}
    versions = [
        json.loads(build_spec(GPU, devices, common))["cdiVersion"]
        for devices, common in ((same, None), (moved, None), (same, moved["a"]), ({"0": SOME}, None))
    ]
    assert versions == ["0.3.0", "0.5.0", "0.5.0", "0.5.0"]


@pytest.mark.parametrize(
    ("kind", "name", "edits"),
    [
        ("gpu", "a", SOME),
        ("/gpu", "a", SOME),
        ("vendor.com/", "a", SOME),
        ("vendor.com/../gpu", "a", SOME),
        ("1vendor/gpu", "a", SOME),
        (GPU, "", SOME),
        (GPU, "a/b", SOME),
        (GPU, "a,b", SOME),
        (GPU, "-a", SOME),
        (GPU, "a\n", SOME),
        (GPU, "a" * 254, SOME),
        (GPU, "a", Edits()),
        (GPU, "a", Edits({"A=B": "1"})),
        (GPU, "a", Edits({"A B": "1"})),
        (GPU, "a", Edits(nodes=(Node("dev/x", "/dev/x"),))),
        (GPU, "a", Edits(mounts=(BindMount("/a", "b", ()),))),
        (GPU, "a", Edits(hooks=(Hook("hook", ("hook",)),))),
    ],
)
def test_what_no_runtime_would_take_is_refused(kind: str, name: str, edits: Edits) -> None:
    with pytest.raises(CdiError):
        build_spec(kind, {name: edits})


def test_a_document_without_devices_is_refused() -> None:
    with pytest.raises(CdiError, match="needs a device"):
        build_spec(GPU, {})
    with pytest.raises(CdiError):
        qualified(GPU, "a b")


def test_parts_that_come_twice_are_merged_into_one() -> None:
    node, mount, hook = Node("/dev/x", "/dev/x"), BindMount("/a", "/a", ()), Hook("/h", ("h",))
    one = Edits({"A": "1"}, (node,), (mount,), (hook,))
    assert merged([one, one, Edits({"A": "2"})]) == replace(one, env={"A": "2"})
    assert not merged([])


_PATHS = st.from_regex(r"/[a-z]{1,5}(/[a-z0-9.]{1,5})?", fullmatch=True)
_EDITS = st.builds(
    Edits,
    st.dictionaries(st.from_regex(r"[A-Z_]{1,5}", fullmatch=True), st.text("ab =\"'\\é", max_size=5)),
    st.lists(st.builds(Node, _PATHS, _PATHS), max_size=3).map(tuple),
    st.lists(st.builds(BindMount, _PATHS, _PATHS, st.just(("ro",))), max_size=3).map(tuple),
    st.lists(st.builds(Hook, _PATHS, st.just(("h",))), max_size=2).map(tuple),
)


@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z0-9]([a-z0-9_.:-]{0,4}[A-Za-z0-9])?", fullmatch=True),
        _EDITS.filter(bool),
        min_size=1,
        max_size=4,
    ),
    _EDITS,
)
def test_every_document_obeys_the_rules_of_the_specification(
    devices: dict[str, Edits], common: Edits
) -> None:
    content = build_spec(GPU, devices, common)
    assert problems(content) == []
    assert [device["name"] for device in json.loads(content)["devices"]] == list(devices)
    assert content == build_spec(GPU, devices, common)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"cdiVersion": "9"}, "version '9'"),
        ({"kind": "x"}, "kind 'x'"),
        ({"devices": []}, "no devices"),
        ({"extra": 1}, "document: extra is unknown"),
        ({"devices": [{"name": "0", "containerEdits": {"env": ["A=1"]}}]}, "needs version 0.5.0"),
        ({"devices": [{"name": "a", "containerEdits": {"env": ["A"]}}]}, "variable 'A'"),
        ({"containerEdits": {"mounts": [{"hostPath": "/a"}]}}, "mounts: containerPath is missing"),
        ({"containerEdits": {"hooks": [{"hookName": "x", "path": "/a"}]}}, "hook 'x'"),
    ],
)
def test_the_validator_finds_what_is_wrong(change: dict[str, object], problem: str) -> None:
    document = json.loads(build_spec(GPU, {"a": SOME}))
    assert problems(json.dumps({**document, **change}).encode()) == [problem]
