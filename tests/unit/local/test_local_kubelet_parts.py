"""Pure parts of the kubelet stand-in: device book, pod status, environment, emulated mounts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from hami.local.api.podlog import LogRequest
from hami.local.kubelet import cdi
from hami.local.kubelet.container_log import LogWriter, read_log
from hami.local.kubelet.containers import ContainerPlan, ContainerStartError, Mount, emulate
from hami.local.kubelet.devices import AllocationRefusedError, DeviceBook, Grant
from hami.local.kubelet.pod_env import container_env, expand, volume_mounts
from hami.local.kubelet.pod_status import ContainerRecord, build_status, pod_phase
from hami.local.kubelet.pod_worker import RuntimeHook

GPU = "example.com/gpu"


def book(*devices: str) -> DeviceBook:
    found = DeviceBook()
    found.replace(GPU, dict.fromkeys(devices, "Healthy"), {})
    return found


def test_used_and_unhealthy_devices_are_not_candidates() -> None:
    devices = book("a", "b", "c")
    devices.offers[GPU].health["b"] = "Unhealthy"
    devices.grants.append(Grant("u", "main", GPU, ("a",), b""))
    assert devices.candidates(GPU, 1, []) == (["c"], [])


def test_devices_of_init_containers_come_first() -> None:
    devices = book("a", "b", "c")
    devices.grants.append(Grant("u", "init", GPU, ("b",), b""))
    available, must = devices.candidates(GPU, 2, ["b"])
    assert must == ["b"]
    assert devices.choose(available, must, 2, ["c"]) == ("b", "c")


def test_an_unusable_preference_is_filled_up_in_order() -> None:
    assert book("a", "b", "c").choose(["a", "b", "c"], [], 2, ["x", "b"]) == ("b", "a")


def test_too_few_devices_are_refused_in_kubelets_words() -> None:
    with pytest.raises(AllocationRefusedError, match=r"for example\.com/gpu\. Requested: 2, Available: 1"):
        book("a").candidates(GPU, 2, [])


def test_the_checkpoint_reads_back_with_devices_unhealthy_until_the_plugin_returns() -> None:
    devices = book("a", "b")
    devices.grants.append(Grant("u", "main", GPU, ("a",), b"answer"))
    again = DeviceBook()
    again.load_json(devices.to_json())
    assert again.grants == devices.grants
    assert again.capacity() == {GPU: (2, 0)}


@pytest.mark.parametrize(
    "data", [None, {}, {"Data": 1}, {"Data": {"PodDeviceEntries": [1], "RegisteredDevices": {}}}]
)
def test_a_malformed_checkpoint_is_a_value_error(data: Any) -> None:
    with pytest.raises(ValueError, match="checkpoint"):
        DeviceBook().load_json(data)


def record(name: str = "c", code: int | None = None, running: bool = False, **fields: Any) -> ContainerRecord:
    found = ContainerRecord(name, "image", **fields)
    if running or code is not None:
        found.begin(1.0, "id")
    if code is not None:
        found.end(2.0, code)
    return found


@pytest.mark.parametrize(
    ("policy", "inits", "regular", "phase"),
    [
        ("Always", [], [record(running=True)], "Running"),
        ("Always", [], [record()], "Pending"),
        ("Never", [], [record(code=0)], "Succeeded"),
        ("Never", [], [record(code=0), record(code=1)], "Failed"),
        ("Never", [], [record(code=1), record(running=True)], "Running"),
        ("OnFailure", [], [record(code=1)], "Running"),
        ("OnFailure", [], [record(code=0)], "Succeeded"),
        ("Always", [record(running=True)], [record()], "Pending"),
        ("Always", [record(code=1)], [record()], "Pending"),
        ("Never", [record(code=1)], [record()], "Failed"),
        ("Never", [record(running=True, sidecar=True)], [record(code=0)], "Succeeded"),
    ],
)
def test_the_phase_of_a_pod(
    policy: str, inits: list[ContainerRecord], regular: list[ContainerRecord], phase: str
) -> None:
    assert pod_phase(policy, inits, regular) == phase


def test_the_status_keeps_what_others_wrote_and_names_unready_containers() -> None:
    pod: Any = {
        "spec": {"restartPolicy": "Always"},
        "status": {"qosClass": "Burstable", "conditions": [{"type": "PodScheduled", "status": "True"}]},
    }
    status = build_status(pod, [], [record("a", running=True), record("b")], now=5.0, address="10.0.0.1")
    conditions = {condition["type"]: condition for condition in status["conditions"]}
    assert status["qosClass"] == "Burstable"
    assert conditions["PodScheduled"]["status"] == "True"
    assert conditions["Ready"]["message"] == "containers with unready status: [b]"
    assert pod["status"]["conditions"] == [{"type": "PodScheduled", "status": "True"}]


def test_a_killed_container_shows_its_signal() -> None:
    status = record(code=137).status()
    assert status["state"]["terminated"]["signal"] == 9


@pytest.mark.parametrize(
    ("text", "expected"),
    [("$(A)/x", "1/x"), ("$$(A)", "$(A)"), ("$(NO)", "$(NO)"), ("$A", "$A"), ("$(A)$(B)", "12")],
)
def test_references_are_expanded(text: str, expected: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == expected


def nothing(plural: str, namespace: str, name: str) -> Any:
    return None


def objects(plural: str, namespace: str, name: str) -> Any:
    return {
        ("configmaps", "cm"): {"kind": "ConfigMap", "data": {"k": "v"}},
        ("secrets", "s"): {"kind": "Secret", "data": {"k": "c2VjcmV0"}, "metadata": {"name": "s"}},
    }.get((plural, name))


POD: Any = {
    "metadata": {"name": "p", "namespace": "ns", "uid": "u", "labels": {"app": "web"}},
    "spec": {"nodeName": "n1"},
}


def test_the_pods_own_variables_win_over_those_of_the_plugin() -> None:
    spec = {"env": [{"name": "LIMIT", "value": "$(BASE)0"}]}
    env = container_env(POD, spec, {}, {"LIMIT": "1", "BASE": "2"}, nothing)
    assert env == {"LIMIT": "20", "BASE": "2"}


def test_variables_come_from_fields_config_maps_and_secrets() -> None:
    spec = {
        "envFrom": [{"prefix": "P_", "configMapRef": {"name": "cm"}}],
        "env": [
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
            {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "OPTIONAL", "valueFrom": {"secretKeyRef": {"name": "x", "key": "k", "optional": True}}},
        ],
    }
    env = container_env(POD, spec, {}, {}, objects)
    assert env == {"P_k": "v", "NODE": "n1", "APP": "web", "SECRET": "secret"}


def test_a_missing_config_map_stops_the_container_by_name() -> None:
    spec = {"env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "gone", "key": "k"}}}]}
    with pytest.raises(ContainerStartError, match='configmap "gone" not found'):
        container_env(POD, spec, {}, {}, nothing)


def test_config_map_volumes_are_written_as_files(tmp_path: Path) -> None:
    pod = {**POD, "spec": {"volumes": [{"name": "v", "configMap": {"name": "cm"}}]}}
    mounts = volume_mounts(
        pod, {"volumeMounts": [{"name": "v", "mountPath": "/etc/x", "readOnly": True}]}, tmp_path, objects
    )
    assert mounts == [Mount(str(tmp_path / "v"), "/etc/x", read_only=True)]
    assert (tmp_path / "v" / "k").read_text() == "v"


def test_a_sub_path_cannot_leave_its_volume(tmp_path: Path) -> None:
    pod = {**POD, "spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}
    with pytest.raises(ContainerStartError, match="subPath"):
        volume_mounts(
            pod, {"volumeMounts": [{"name": "v", "mountPath": "/x", "subPath": "../.."}]}, tmp_path, nothing
        )


def test_emulation_rewrites_mounted_paths_and_preloads_the_library(tmp_path: Path) -> None:
    preload = tmp_path / "ld.so.preload"
    preload.write_text("/usr/local/vgpu/libvgpu.so\n")
    plan = ContainerPlan(
        argv=("true",),
        env={"CACHE": "/usr/local/vgpu/x.cache", "OTHER": "/usr/local/vgpux", "LD_PRELOAD": "/mine.so"},
        mounts=(
            Mount("/host/D", "/usr/local/vgpu"),
            Mount("/host/libvgpu.so.v1", "/usr/local/vgpu/libvgpu.so", read_only=True),
            Mount(str(preload), "/etc/ld.so.preload", read_only=True),
        ),
    )
    env = emulate(plan).env
    assert env["CACHE"] == "/host/D/x.cache"
    assert env["OTHER"] == "/usr/local/vgpux"
    assert env["LD_PRELOAD"] == "/host/libvgpu.so.v1:/mine.so"


@pytest.mark.parametrize(
    ("visible", "path"),
    [("GPU-1", "/driver:/mine"), ("", "/mine"), ("void", "/mine"), ("none", "/driver:/mine")],
)
def test_the_runtime_adds_the_driver_where_devices_are_visible(visible: str, path: str) -> None:
    hook = RuntimeHook(env={"FAKEGPU_STATE": "/s"}, library_path="/driver")
    plan = ContainerPlan(argv=("true",), env={"NVIDIA_VISIBLE_DEVICES": visible, "LD_LIBRARY_PATH": "/mine"})
    assert hook.apply(plan).env["LD_LIBRARY_PATH"] == path


def test_programs_of_the_driver_are_found_after_all_others() -> None:
    hook = RuntimeHook(env={}, library_path="/driver")
    plan = ContainerPlan(argv=("true",), env={"NVIDIA_VISIBLE_DEVICES": "GPU-1", "PATH": "/bin"})
    assert hook.apply(plan).env["PATH"] == "/bin:/driver"


def write_cdi(root: Path, document: Any) -> None:
    directory = root / "var/run/cdi"
    directory.mkdir(parents=True)
    (directory / "hami.io-vgpu-1.json").write_text(json.dumps(document))


CDI_DOCUMENT: Any = {
    "cdiVersion": "0.5.0",
    "kind": "hami.io/vgpu",
    "devices": [
        {
            "name": "v1",
            "containerEdits": {
                "env": ["CUDA_DEVICE_SM_LIMIT=30"],
                "mounts": [{"hostPath": "/host/limits", "containerPath": "/overrideEnv", "options": ["ro"]}],
            },
        }
    ],
}


def test_a_cdi_device_brings_its_environment_and_mounts(tmp_path: Path) -> None:
    write_cdi(tmp_path, CDI_DOCUMENT)
    edits = cdi.resolve(tmp_path, ["hami.io/vgpu=v1"])
    assert edits.env == {"CUDA_DEVICE_SM_LIMIT": "30"}
    assert edits.mounts == (Mount("/host/limits", "/overrideEnv", read_only=True),)


def test_an_unknown_cdi_device_stops_the_container(tmp_path: Path) -> None:
    with pytest.raises(ContainerStartError, match=r"unresolvable CDI devices hami\.io/vgpu=v2"):
        cdi.resolve(tmp_path, ["hami.io/vgpu=v2"])


def test_a_cdi_hook_is_not_dropped_silently(tmp_path: Path) -> None:
    document = json.loads(json.dumps(CDI_DOCUMENT))
    document["devices"][0]["containerEdits"]["hooks"] = [{"path": "/bin/true"}]
    write_cdi(tmp_path, document)
    with pytest.raises(ContainerStartError, match="hooks"):
        cdi.resolve(tmp_path, ["hami.io/vgpu=v1"])


def log_request(**options: Any) -> LogRequest:
    asked: dict[str, Any] = {
        "pod": {}, "container": "c", "follow": False, "previous": False, "timestamps": False,
        "tail_lines": None, "since": None, "limit_bytes": None, **options,
    }  # fmt: skip
    return LogRequest(**asked)


async def written(path: Path, *pieces: bytes) -> None:
    writer = LogWriter(path, clock=lambda: 1_800_000_000.0)
    stream = asyncio.StreamReader()
    for piece in pieces:
        stream.feed_data(piece)
    stream.feed_eof()
    await writer.copy(stream, "stdout")
    writer.close()


async def read(path: Path, **options: Any) -> bytes:
    return b"".join([chunk async for chunk in read_log(path, log_request(**options), lambda: True)])


async def test_lines_that_come_in_pieces_are_joined(tmp_path: Path) -> None:
    await written(tmp_path / "log", b"one\ntw", b"o\nlast")
    assert await read(tmp_path / "log") == b"one\ntwo\nlast\n"


async def test_a_long_line_is_kept_whole(tmp_path: Path) -> None:
    line = b"x" * 100_000
    await written(tmp_path / "log", line + b"\n")
    assert await read(tmp_path / "log") == line + b"\n"


async def test_old_lines_are_left_out(tmp_path: Path) -> None:
    await written(tmp_path / "log", b"one\n")
    assert await read(tmp_path / "log", since=1_800_000_001.0) == b""
    assert await read(tmp_path / "log", since=1_799_999_999.0, timestamps=True) == (
        b"2027-01-15T08:00:00.000000Z one\n"
    )


async def test_a_full_log_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hami.local.kubelet.container_log.MAX_FILE_BYTES", 100)
    await written(tmp_path / "log", b"".join(b"line %d\n" % index for index in range(8)))
    assert (tmp_path / "log.1").exists()
    assert (await read(tmp_path / "log")).endswith(b"line 7\n")
    assert (tmp_path / "log").stat().st_size < 300


async def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert await read(tmp_path / "none", follow=True) == b""
