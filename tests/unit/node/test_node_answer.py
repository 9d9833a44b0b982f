"""Environment, mounts and limits file of one container (device-plugin.md §15.2, host-pid-broker.md §15.4)."""

from __future__ import annotations

import posixpath
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_cards import U1, U2

from hami.node.config import Settings
from hami.node.paths import HostPaths
from hami.node.plugin.answer import (
    Answer,
    Delivery,
    DeviceNode,
    HostFiles,
    Mount,
    build_answer,
    control_disabled,
    integrate_broker,
    limits_table,
    limits_text,
    reserved_variables,
)
from hami.protocol.allocation import ContainerDevice, Slot
from hami.protocol.views import Container, EnvVar, ResourceRequirements

PATHS = HostPaths("", "/usr/local", "v2.10.0")
PLAIN = Delivery(extras={}, device_nodes={})
FILES = HostFiles("/usr/local/vgpu/libvgpu.so.v2.10.0", license=False)
CACHE = "/usr/local/vgpu/5b0c.cache"
ONE: Slot = (ContainerDevice(U1, "NVIDIA", 3000, 30),)


def slot(*devices: tuple[str, int, int]) -> Slot:
    return tuple(ContainerDevice(uuid, "NVIDIA", memory, cores) for uuid, memory, cores in devices)


def answer(
    devices: Slot = ONE,
    container: Container | None = None,
    settings: Settings | None = None,
    delivery: Delivery = PLAIN,
    files: HostFiles = FILES,
    paths: HostPaths = PATHS,
) -> Answer:
    chosen = container or Container(name="app")
    config = settings or Settings()
    table = limits_table(devices, chosen, config, CACHE, delivery)
    return build_answer(devices, chosen, "uid-1", table, config, paths, files, delivery)


def container_with(*env: tuple[str, str | None]) -> Container:
    return Container(name="app", env=[EnvVar(name, value) for name, value in env])


def targets(result: Answer) -> list[str]:
    return [mount.container_path for mount in result.mounts]


def test_l1_environment_and_mounts_of_a_plain_container() -> None:
    result = answer()
    assert result.env == {
        "NVIDIA_VISIBLE_DEVICES": U1,
        "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
        "CUDA_DEVICE_SM_LIMIT": "30",
        "HAMI_DEVICE_UUIDS": U1,
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": CACHE,
    }
    assert result.mounts == (
        Mount("/usr/local/vgpu/libvgpu.so", "/usr/local/vgpu/libvgpu.so.v2.10.0", True),
        Mount("/usr/local/vgpu", "/usr/local/vgpu/containers/uid-1_app", False),
        Mount("/tmp/vgpulock", "/tmp/vgpulock", False),
        Mount("/etc/ld.so.preload", "/usr/local/vgpu/ld.so.preload", True),
        Mount("/overrideEnv", "/usr/local/vgpu/limits/uid-1_app", True),
    )


@pytest.mark.parametrize(
    ("env", "disabled"),
    [
        ((("CUDA_DISABLE_CONTROL", "true"),), True),
        ((("CUDA_DISABLE_CONTROL", "no"), ("CUDA_DISABLE_CONTROL", "1")), True),
        ((("CUDA_DISABLE_CONTROL", None),), False),
        ((("CUDA_DISABLE_CONTROL", "yes"),), False),
        ((("OTHER", "true"),), False),
    ],
)
def test_l3_l4_the_preload_file_is_left_out_when_control_is_disabled(
    env: tuple[tuple[str, str | None], ...], disabled: bool
) -> None:
    container = container_with(*env)
    assert control_disabled(container) is disabled
    assert ("/etc/ld.so.preload" not in targets(answer(container=container))) is disabled


def test_l6_l33_limits_per_device_in_allocation_order() -> None:
    equal = answer(slot((U1, 3000, 30), (U2, 4000, 30)))
    assert equal.env["NVIDIA_VISIBLE_DEVICES"] == f"{U1},{U2}"
    assert equal.env["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert equal.env["CUDA_DEVICE_MEMORY_LIMIT_1"] == "4000m"
    assert "CUDA_DEVICE_SM_LIMIT_0" not in equal.env
    different = answer(slot((U1, 3000, 30), (U2, 4000, 60)))
    assert different.env["CUDA_DEVICE_SM_LIMIT"] == "30"
    assert different.env["CUDA_DEVICE_SM_LIMIT_0"] == "30"
    assert different.env["CUDA_DEVICE_SM_LIMIT_1"] == "60"
    assert different.env["HAMI_DEVICE_UUIDS"] == f"{U1},{U2}"


def test_l15_l16_d16_configuration_reaches_the_environment() -> None:
    settings = Settings(memory_scaling=1.5, log_level="3", disable_core_limit=True)
    env = answer(settings=settings).env
    assert env["CUDA_OVERSUBSCRIBE"] == "true"
    assert env["LIBCUDA_LOG_LEVEL"] == "3"
    assert env["GPU_CORE_UTILIZATION_POLICY"] == "disable"


def test_l17_a_license_file_adds_its_two_mounts_before_the_limits_file() -> None:
    assert targets(answer(files=replace(FILES, license=True)))[-3:] == [
        "/tmp/license",
        "/usr/bin/vgpuvalidator",
        "/overrideEnv",
    ]


def test_l20_volume_mounts_carry_the_ids() -> None:
    result = answer(delivery=replace(PLAIN, volume_mounts=True))
    assert result.env["NVIDIA_VISIBLE_DEVICES"] == "/var/run/nvidia-container-devices"
    assert result.mounts[0] == Mount(f"/var/run/nvidia-container-devices/{U1}", "/dev/null", False)


def test_cards_are_named_by_index_where_that_is_chosen() -> None:
    node = DeviceNode("/dev/nvidia3", "/dev/nvidia3")
    chosen = replace(PLAIN, indexes={U1: "3", U2: "0"}, device_nodes={U1: (node,)})
    two = slot((U1, 1000, 10), (U2, 2000, 20))
    found = answer(two, delivery=chosen)
    assert found.env["NVIDIA_VISIBLE_DEVICES"] == "3,0"
    assert found.env["HAMI_DEVICE_UUIDS"] == f"{U1},{U2}"
    assert found.devices == (node,)
    mounted = answer(two, delivery=replace(chosen, volume_mounts=True)).mounts[:2]
    assert [mount.container_path for mount in mounted] == [
        "/var/run/nvidia-container-devices/3",
        "/var/run/nvidia-container-devices/0",
    ]


def test_imex_channels_go_the_way_of_the_cards() -> None:
    channel = DeviceNode("/dev/nvidia-caps-imex-channels/channel0", "/dev/nvidia-caps-imex-channels/channel0")
    chosen = replace(PLAIN, imex=("0",), device_nodes={"imex": (channel,)})
    found = answer(delivery=chosen)
    assert found.env["NVIDIA_IMEX_CHANNELS"] == "0"
    assert found.devices == (channel,)
    mounted = answer(delivery=replace(chosen, volume_mounts=True))
    assert "NVIDIA_IMEX_CHANNELS" not in mounted.env
    assert [mount.container_path for mount in mounted.mounts[:2]] == [
        f"/var/run/nvidia-container-devices/{U1}",
        "/var/run/nvidia-container-devices/imex/0",
    ]
    assert "NVIDIA_IMEX_CHANNELS" not in answer().env


def test_l23_device_nodes_of_the_container_and_control_nodes() -> None:
    nodes = {
        "": (DeviceNode("/dev/nvidiactl", "/dev/nvidiactl"),),
        U1: (DeviceNode("/dev/nvidia0", "/dev/nvidia0"),),
        U2: (DeviceNode("/dev/nvidia1", "/dev/nvidia1"),),
    }
    found = answer(delivery=replace(PLAIN, device_nodes=nodes)).devices
    assert [node.container_path for node in found] == ["/dev/nvidiactl", "/dev/nvidia0"]


def test_the_same_card_twice_is_visible_once() -> None:
    env = answer(slot((U1, 1, 0), (U1, 2, 0))).env
    assert env["NVIDIA_VISIBLE_DEVICES"] == U1
    assert env["HAMI_DEVICE_UUIDS"] == f"{U1},{U1}"


def test_host_root_moves_host_paths_and_no_container_path() -> None:
    result = answer(paths=HostPaths("/h", "/usr/local", "v1"))
    assert targets(result) == targets(answer())
    assert all(mount.host_path.startswith("/h/") for mount in result.mounts[1:])


def test_l34_the_limits_file_holds_the_closed_list_once_and_sorted() -> None:
    table = limits_table(ONE, Container(name="app"), Settings(), CACHE, PLAIN)
    assert limits_text(table).decode().splitlines() == [
        "ACTIVE_OOM_KILLER=0",
        "CUDA_DEVICE_MEMORY_LIMIT=0",
        "CUDA_DEVICE_MEMORY_LIMIT_0=3000m",
        f"CUDA_DEVICE_MEMORY_SHARED_CACHE={CACHE}",
        "CUDA_DEVICE_SM_LIMIT=30",
        "CUDA_DEVICE_SM_LIMIT_0=30",
        "CUDA_OVERSUBSCRIBE=false",
        "CUDA_TASK_PRIORITY=1",
        "GPU_CORE_UTILIZATION_POLICY=default",
        f"HAMI_DEVICE_UUIDS={U1}",
        "HAMI_LIMITS_FORMAT=1",
        "LIBVGPU_HOSTPID_BROKER=0",
        "RECORD_KERNEL_INTERVAL=1",
        "VGPU_CHARGE_RESIDUAL=report",
        "VGPU_FAILURE_POLICY=private",
        "VGPU_NVML_PROCESSES=own",
    ]
    assert "/overrideEnv" not in targets(answer(delivery=replace(PLAIN, limits_file=False)))


def test_the_priority_of_the_limits_file_comes_from_the_priority_resource() -> None:
    resources = ResourceRequirements(limits={"nvidia.com/priority": "0"})
    table = limits_table(ONE, Container(name="app", resources=resources), Settings(), CACHE, PLAIN)
    assert table["CUDA_TASK_PRIORITY"] == "0"


def test_l39_variables_of_the_closed_list_in_the_pod_are_found() -> None:
    table = limits_table(ONE, Container(name="app"), Settings(), CACHE, PLAIN)
    container = container_with(
        ("CUDA_DEVICE_MEMORY_LIMIT_0", "1g"), ("CUDA_TASK_PRIORITY", "0"), ("PATH", "/bin")
    )
    assert reserved_variables(container, table) == ("CUDA_DEVICE_MEMORY_LIMIT_0",)


PARENT = Mount("/tmp/vgpulock", "/tmp/vgpulock", False)
BROKER = Mount("/tmp/vgpulock/hostpid", "/var/run/hami/hostpid", True)
X, M, Y = (Mount(f"/{name}", f"/{name}", False) for name in "xmy")


def test_l18_a1_the_gate_adds_mount_and_variable_after_the_parent() -> None:
    result = answer(delivery=replace(PLAIN, broker=True))
    assert result.env["LIBVGPU_HOSTPID_BROKER"] == "1"
    assert targets(result)[2:5] == ["/tmp/vgpulock", "/tmp/vgpulock/hostpid", "/etc/ld.so.preload"]


def test_a3_without_the_gate_broker_mounts_and_variable_are_removed() -> None:
    mounts = [
        X,
        Mount("/tmp/vgpulock/hostpid/", "/old", False),
        Mount("/tmp/vgpulock", "/other", True),
        Mount("tmp/vgpulock/hostpid", "/old2", False),
        Y,
    ]
    env, result = integrate_broker({"LIBVGPU_HOSTPID_BROKER": "1", "K": "v"}, mounts, False, PATHS)
    assert env == {"K": "v"}
    assert result == [X, PARENT, Y]


def test_a4_the_parent_moves_before_the_broker() -> None:
    mounts = [X, Mount("tmp/vgpulock/hostpid", "/bad", False), M, Mount("/tmp/./vgpulock", "/bad", True), Y]
    env, result = integrate_broker({}, mounts, True, PATHS)
    assert result == [X, PARENT, BROKER, M, Y]
    assert integrate_broker(env, result, True, PATHS) == (env, result)


def test_a5_a9_one_canonical_mount_and_similar_names_stay() -> None:
    near = Mount("/tmp/vgpulock/hostpid2", "/n", False)
    mounts = [BROKER, near, Mount("/tmp/vgpulock/hostpid/../hostpid", "/bad", False)]
    assert integrate_broker({}, mounts, True, PATHS)[1] == [PARENT, BROKER, near]


@pytest.mark.parametrize(
    "path",
    [
        "/tmp/vgpulock/hostpid/",
        "tmp/vgpulock/hostpid",
        "/tmp/vgpulock/hostpid/../hostpid",
        "//tmp//vgpulock/./hostpid",
    ],
)
def test_a5_every_spelling_of_the_target_is_one_canonical_mount(path: str) -> None:
    mounts = [X, BROKER, Y, Mount(path, "/bad", False)]
    assert integrate_broker({}, mounts, True, PATHS)[1] == [X, PARENT, BROKER, Y]
    assert integrate_broker({}, [Mount(path, "/bad", False), X], True, PATHS)[1] == [PARENT, BROKER, X]


PATHS_OF_MOUNTS = st.sampled_from(
    [
        *("/tmp/vgpulock", "/tmp/vgpulock/", "tmp/vgpulock", "/tmp/./vgpulock", "/tmp//vgpulock"),
        *("/tmp/vgpulock/hostpid", "tmp/vgpulock/hostpid/", "/tmp/vgpulock/x/../hostpid"),
        *("/tmp/vgpulock2", "/tmp/vgpulock/hostpid2", "/TMP/vgpulock", "/x", "", "/"),
    ]
)
MOUNTS = st.lists(st.builds(Mount, PATHS_OF_MOUNTS, st.sampled_from(["/a", "/b"]), st.booleans()), max_size=8)
ENVS = st.dictionaries(st.sampled_from(["LIBVGPU_HOSTPID_BROKER", "K", "L"]), st.sampled_from(["0", "1"]))


@given(MOUNTS, ENVS, st.booleans())
def test_a6_integrating_twice_is_integrating_once(
    mounts: list[Mount], env: dict[str, str], gate: bool
) -> None:
    once = integrate_broker(env, mounts, gate, PATHS)
    assert integrate_broker(*once, gate, PATHS) == once
    result_env, result = once
    names = [posixpath.normpath("/" + mount.container_path.lstrip("/")) for mount in result]
    assert names.count("/tmp/vgpulock") == 1
    assert names.count("/tmp/vgpulock/hostpid") == int(gate)
    if gate:
        assert names.index("/tmp/vgpulock") < names.index("/tmp/vgpulock/hostpid")
    ours = ("/tmp/vgpulock", "/tmp/vgpulock/hostpid")
    unrelated = [mount for mount in result if mount not in (PARENT, BROKER)]
    assert unrelated == [
        mount for mount in mounts if posixpath.normpath("/" + mount.container_path.lstrip("/")) not in ours
    ]
    assert result_env.get("LIBVGPU_HOSTPID_BROKER") == ("1" if gate else None)
    assert {key: value for key, value in result_env.items() if key in "KL"} == {
        key: value for key, value in env.items() if key in "KL"
    }


def test_a7_an_empty_environment_gets_the_one_key() -> None:
    assert integrate_broker({}, [], True, PATHS) == ({"LIBVGPU_HOSTPID_BROKER": "1"}, [PARENT, BROKER])


def test_a8_an_empty_mount_is_kept() -> None:
    empty = Mount("", "", False)
    assert integrate_broker({}, [empty, X], True, PATHS)[1] == [empty, X, PARENT, BROKER]
    assert integrate_broker({}, [empty, X], False, PATHS)[1] == [empty, X, PARENT]


def test_a2_a10_without_the_gate_no_answer_has_the_broker_whatever_the_pod_sets() -> None:
    result = answer(container=container_with(("LIBVGPU_HOSTPID_BROKER", "1")))
    assert "LIBVGPU_HOSTPID_BROKER" not in result.env
    assert "/tmp/vgpulock" in targets(result)
    assert not [mount for mount in result.mounts if "hostpid" in mount.container_path + mount.host_path]


def test_a1_the_order_of_all_mounts_with_the_broker() -> None:
    result = answer(delivery=replace(PLAIN, broker=True), files=replace(FILES, license=True))
    assert targets(result) == [
        *("/usr/local/vgpu/libvgpu.so", "/usr/local/vgpu", "/tmp/vgpulock", "/tmp/vgpulock/hostpid"),
        *("/etc/ld.so.preload", "/tmp/license", "/usr/bin/vgpuvalidator", "/overrideEnv"),
    ]
    assert result.mounts[2] == PARENT
    assert result.mounts[3] == BROKER


def test_a11_control_that_is_disabled_takes_the_preload_and_leaves_the_broker() -> None:
    container = container_with(("CUDA_DISABLE_CONTROL", "true"))
    result = answer(container=container, delivery=replace(PLAIN, broker=True))
    assert BROKER in result.mounts
    assert result.env["LIBVGPU_HOSTPID_BROKER"] == "1"
    assert "/etc/ld.so.preload" not in targets(result)


def test_the_node_wide_lock_is_handed_on_with_the_broker_only() -> None:
    """host-pid-broker.md §9.5: off by default, and nothing without the broker's directory."""
    for broker, lock in ((False, False), (False, True), (True, False), (True, True)):
        delivery = replace(PLAIN, broker=broker, hostpid_node_lock=lock)
        table = limits_table(ONE, Container(name="app"), Settings(), CACHE, delivery)
        assert table.get("VGPU_HOSTPID_NODE_LOCK") == ("1" if broker and lock else None)


@pytest.mark.parametrize("gate", [True, False])
def test_a14_the_limits_file_says_whether_the_broker_is_there(gate: bool) -> None:
    delivery = replace(PLAIN, broker=gate)
    table = limits_table(ONE, Container(name="app"), Settings(), CACHE, delivery)
    assert f"LIBVGPU_HOSTPID_BROKER={int(gate)}\n".encode() in limits_text(table)
