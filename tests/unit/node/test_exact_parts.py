"""Mode exact in pieces: names and documents, the choice of the mode, who holds which ids, the shared list."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.node.api import podresources_v1_pb2 as pb
from hami.node.api import podresources_v1_pb2_grpc as rpc
from hami.node.errors import SettingsError, UnsafePathError
from hami.node.exact.cdi import build_document, cache_file, device_name, document_file, name_of_file
from hami.node.exact.chooser import ModeChooser
from hami.node.exact.documents import Documents
from hami.node.exact.errors import (
    KubeletStateError,
    NotYetError,
    PodResourcesBusyError,
    PodResourcesError,
)
from hami.node.exact.holders import (
    Holding,
    Recorded,
    container_to_start,
    holding_of,
    sharing_init_containers,
)
from hami.node.exact.kubelet_state import decode_kubelet_state
from hami.node.exact.mode import check_flags, version_obstacle
from hami.node.exact.pod_resources import PodResources, SharedList, holdings_of
from hami.node.paths import HostPaths
from hami.node.plugin.answer import DeviceNode, Mount
from hami.protocol.views import Node, Pod, decode

GPU = "nvidia.com/gpu"
Make = Callable[..., Any]


# --- names and documents ------------------------------------------------------------------------------------


def test_a_name_depends_on_the_set_of_ids_and_not_on_their_order() -> None:
    assert device_name(["b-1", "a-0"]) == device_name(("a-0", "b-1"))
    assert device_name(["a-0"]) != device_name(["a-1"])


def test_a_name_is_v_and_the_first_32_digits_of_the_hash_of_the_joined_ids() -> None:
    expected = "v" + hashlib.sha256(b"GPU-a-0,GPU-b-3").hexdigest()[:32]
    assert device_name(["GPU-b-3", "GPU-a-0"]) == expected


@given(st.frozensets(st.text(min_size=1, max_size=63), min_size=1, max_size=8))
def test_a_name_is_a_valid_cdi_name_and_file_name(ids: frozenset[str]) -> None:
    name = device_name(ids)
    assert len(name) == 33
    assert name.isalnum()
    assert name_of_file(document_file(name)) == name


def test_files_of_others_are_nobodys_documents() -> None:
    assert name_of_file("nvidia.yaml") == ""
    assert name_of_file("k8s.device-plugin.nvidia.com-gpu.json") == ""


def test_the_cache_file_is_the_uuid5_of_pod_and_container() -> None:
    assert cache_file("uid-p", "app") == cache_file("uid-p", "app")
    assert cache_file("uid-p", "app") != cache_file("uid-p", "side")
    namespace = uuid.UUID("6ba7b812-9dad-11d1-80b4-00c04fd430c8")
    assert cache_file("uid-p", "app") == str(uuid.uuid5(namespace, "uid-p/app"))


def document(*devices: DeviceNode) -> Any:
    mounts = (Mount("/etc/ld.so.preload", "/h/ld.so.preload", True), Mount("/a", "/h/a", False))
    return json.loads(build_document("v1", {"B": "2", "A": "1"}, mounts, devices))


def test_a_document_holds_one_device_with_sorted_environment_and_mounts_in_order() -> None:
    made = document()
    assert (made["cdiVersion"], made["kind"]) == ("0.3.0", "hami.io/vgpu")
    (device,) = made["devices"]
    assert device["name"] == "v1"
    assert device["containerEdits"]["env"] == ["A=1", "B=2"]
    assert [mount["containerPath"] for mount in device["containerEdits"]["mounts"]] == [
        "/etc/ld.so.preload",
        "/a",
    ]
    assert [mount["options"][-1] for mount in device["containerEdits"]["mounts"]] == ["ro", "rw"]
    assert "deviceNodes" not in device["containerEdits"]


def test_the_version_is_the_lowest_that_the_device_nodes_need() -> None:
    same = document(DeviceNode("/dev/nvidia0", "/dev/nvidia0"))
    moved = document(DeviceNode("/dev/nvidia0", "/run/driver/dev/nvidia0"))
    assert (same["cdiVersion"], moved["cdiVersion"]) == ("0.3.0", "0.5.0")
    (node,) = moved["devices"][0]["containerEdits"]["deviceNodes"]
    assert node == {"path": "/dev/nvidia0", "hostPath": "/run/driver/dev/nvidia0", "permissions": "rw"}


# --- documents on the host ----------------------------------------------------------------------------------


@pytest.fixture
def documents(host: HostPaths) -> Documents:
    return Documents(host)


def path_of(documents: Documents, name: str) -> Path:
    return Path(documents.directory) / document_file(name)


def test_a_document_is_readable_for_all_and_its_directory_is_made(documents: Documents) -> None:
    documents.write("v1", b"{}")
    assert path_of(documents, "v1").read_bytes() == b"{}"
    assert path_of(documents, "v1").stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in Path(documents.directory).iterdir()] == ["hami.io-vgpu-v1.json"]


def test_x10_a_symlink_in_a_documents_place_is_replaced_and_its_target_stays(
    documents: Documents, tmp_path: Path
) -> None:
    documents.write("other", b"")
    target = tmp_path / "target"
    target.write_text("precious")
    path_of(documents, "v1").symlink_to(target)
    documents.write("v1", b"{}")
    assert target.read_text() == "precious"
    assert not path_of(documents, "v1").is_symlink()
    assert path_of(documents, "v1").read_bytes() == b"{}"


def test_x10_a_directory_in_a_documents_place_is_refused(documents: Documents) -> None:
    path_of(documents, "v1").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        documents.write("v1", b"{}")
    assert list(Path(documents.directory).iterdir()) == [path_of(documents, "v1")]


def test_x10_a_symlink_in_the_place_of_the_directory_is_refused(documents: Documents, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    Path(documents.directory).parent.mkdir(parents=True)
    Path(documents.directory).symlink_to(elsewhere)
    with pytest.raises(UnsafePathError, match="not a directory"):
        documents.write("v1", b"{}")
    assert list(elsewhere.iterdir()) == []


def test_only_old_documents_that_nobody_holds_are_removed(documents: Documents) -> None:
    for name in ("held", "old", "new"):
        documents.write(name, b"{}")
    foreign = Path(documents.directory) / "nvidia.yaml"
    temporary = Path(documents.directory) / ".hami.io-vgpu-v9.json.0123"
    for path in (foreign, temporary):
        path.write_text("")
    now = time.time()
    for path in (path_of(documents, "held"), path_of(documents, "old"), foreign, temporary):
        os.utime(path, (now - 600, now - 600))
    removed = documents.collect({"held"}, now - 300)
    assert sorted(removed) == [temporary.name, document_file("old")]
    assert {path.name for path in Path(documents.directory).iterdir()} == {
        document_file("held"),
        document_file("new"),
        "nvidia.yaml",
    }


def test_the_probe_says_why_nothing_can_be_written(documents: Documents) -> None:
    assert documents.probe() == ""
    assert list(Path(documents.directory).iterdir()) == []
    block(documents)
    assert documents.directory in documents.probe()


# --- the choice of the mode ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kubelet", "runtime", "text"),
    [
        pytest.param("v1.30.9", "containerd://2.1.0", "the kubelet is v1.30.9, 1.31", id="kubelet 1.30"),
        pytest.param("v1.36.0", "containerd://1.7.27", "containerd 2.0 or later", id="containerd 1.7"),
        pytest.param("v1.31.0", "cri-o://1.28.0", "", id="cri-o 1.28"),
        pytest.param("v1.31.2+k3s1", "containerd://2.0.4-k3s2", "", id="k3s"),
        pytest.param("v1.36.0", "cri-o://1.27.9", "cri-o 1.28 or later", id="cri-o 1.27"),
        pytest.param("v1.36.0", "docker://27.0.1", "is not known", id="docker"),
        pytest.param("", "", "version '' is not known", id="not reported"),
    ],
)
def test_x12_versions_decide(kubelet: str, runtime: str, text: str) -> None:
    obstacle = version_obstacle(kubelet, runtime)
    assert (obstacle is None) == (text == "")
    assert obstacle is None or text in obstacle.text


def test_modes_that_do_not_exist_and_exact_without_kubelet_are_refused() -> None:
    with pytest.raises(SettingsError, match="must be auto, lock or exact, not 'fast'"):
        check_flags("fast", "/k.sock")
    with pytest.raises(SettingsError, match="empty --kubelet-socket"):
        check_flags("exact", "")
    check_flags("auto", "")


class Kubelet:
    """PodResources that refuses some times."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.calls = 0
        self.listed: list[Holding] = []

    async def holdings(self, resource: str) -> list[Holding]:
        self.calls += 1
        if self.calls <= self.failures:
            raise PodResourcesError("kubelet's PodResources API does not answer")
        return self.listed


class NodeOnly:
    """The part of a cluster that the chooser asks."""

    def __init__(self, kubelet: str, runtime: str, before: str = "") -> None:
        info = {"kubeletVersion": kubelet, "containerRuntimeVersion": runtime}
        notes = {"annotations": {"hami.io/allocation-mode": before} if before else {}}
        self._node = decode(msgspec.json.encode({"metadata": notes, "status": {"nodeInfo": info}}), Node)

    async def node(self) -> Node:
        return self._node


def chooser(
    wanted: str, documents: Documents, kubelet: Kubelet, versions: tuple[str, str] = ("v1.36.0", "")
) -> ModeChooser:
    node: Any = NodeOnly(versions[0], versions[1] or "containerd://2.4.0")
    return ModeChooser(wanted, node, kubelet, documents, pause_s=0)


async def test_auto_takes_exact_where_everything_answers(documents: Documents) -> None:
    assert await chooser("auto", documents, Kubelet(failures=2)).choose() == "exact"
    assert await chooser("lock", documents, Kubelet()).choose() == "lock"


def block(documents: Documents) -> None:
    """Put a file in the place of the CDI directory."""
    shutil.rmtree(documents.directory, ignore_errors=True)
    Path(documents.directory).parent.mkdir(parents=True, exist_ok=True)
    Path(documents.directory).write_text("a file")


def exists(documents: Documents) -> bool:
    return Path(documents.directory).exists()


async def test_auto_takes_lock_without_podresources_or_cdi_directory(documents: Documents) -> None:
    assert await chooser("auto", documents, Kubelet(failures=100)).choose() == "lock"
    block(documents)
    assert await chooser("auto", documents, Kubelet()).choose() == "lock"


@pytest.mark.parametrize("before", ["", "lock", "exact"])
async def test_a_node_that_was_exact_waits_for_a_silent_kubelet(documents: Documents, before: str) -> None:
    """In mode lock nobody would write the documents that its containers need to start again."""
    node: Any = NodeOnly("v1.36.0", "containerd://2.4.0", before)
    choice = ModeChooser("auto", node, Kubelet(failures=20), documents, pause_s=0)
    if before == "exact":
        with pytest.raises(PodResourcesError, match="does not answer"):
            await choice.choose()
        assert await choice.choose() == "exact"
    else:
        assert await choice.choose() == "lock"


async def test_an_old_node_is_not_even_probed(documents: Documents) -> None:
    kubelet = Kubelet()
    assert await chooser("auto", documents, kubelet, ("v1.30.0", "")).choose() == "lock"
    assert kubelet.calls == 0
    assert not exists(documents)


async def test_an_explicit_exact_on_an_old_node_says_what_is_missing(documents: Documents) -> None:
    with pytest.raises(SettingsError) as caught:
        await chooser("exact", documents, Kubelet(), ("v1.30.0", "")).choose()
    assert str(caught.value) == (
        "--allocation-mode=exact cannot be used on this node: "
        "the kubelet is v1.30.0, 1.31 or later is needed; use --allocation-mode=lock or auto"
    )


async def test_an_explicit_exact_is_obeyed_with_a_runtime_that_is_not_known(documents: Documents) -> None:
    assert await chooser("exact", documents, Kubelet(), ("v1.36.0", "hami-local://1.0")).choose() == "exact"
    assert await chooser("auto", documents, Kubelet(), ("v1.36.0", "hami-local://1.0")).choose() == "lock"


# --- who holds which ids ------------------------------------------------------------------------------------


def test_the_entries_of_a_container_are_joined_for_its_resource_only() -> None:
    def entry(resource: str, device: str) -> Any:
        return pb.ContainerDevices(resource_name=resource, device_ids=[device])

    container = pb.ContainerResources(
        name="app", devices=[entry(GPU, "a-0"), entry("other.com/x", "x"), entry(GPU, "b-1")]
    )
    idle = pb.ContainerResources(name="idle")
    answer = pb.ListPodResourcesResponse(
        pod_resources=[pb.PodResources(name="p", namespace="ns", containers=[container, idle])]
    )
    assert holdings_of(answer, GPU) == (Holding("ns", "p", "app", frozenset({"a-0", "b-1"})),)


def test_the_holder_has_exactly_the_ids_of_the_call() -> None:
    one = Holding("ns", "p", "one", frozenset({"a-0"}))
    two = Holding("ns", "p", "two", frozenset({"a-0", "a-1"}))
    assert holding_of([one, two], ["a-1", "a-0"]) == two
    assert holding_of([one, two], ["a-1"]) is None
    with pytest.raises(NotYetError, match="the same devices for ns/p, ns/q"):
        holding_of([one, Holding("ns", "q", "c", frozenset({"a-0"}))], ["a-0"])


def status(name: str, **state: Any) -> dict[str, Any]:
    return {"name": name, "state": state}


def starting(*states: dict[str, Any], sidecar: str = "", sandbox_ready: str = "True") -> Pod:
    inits = [{"name": name} for name in ("i1", "i2")]
    if sidecar:
        inits.append({"name": sidecar, "restartPolicy": "Always"})
    body = {
        "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {"initContainers": inits, "containers": [{"name": "app"}]},
        "status": {
            "phase": "Pending",
            "initContainerStatuses": list(states),
            "conditions": [{"type": "PodReadyToStartContainers", "status": sandbox_ready}],
        },
    }
    return decode(msgspec.json.encode(body), Pod)


DONE = {"terminated": {"exitCode": 0}}
FAILED = {"terminated": {"exitCode": 1}}
RUNNING: dict[str, Any] = {"running": {}}
FRESH = {"waiting": {"reason": "PodInitializing"}}
BACKOFF = {"waiting": {"reason": "CrashLoopBackOff"}}
REFUSED = {"waiting": {"reason": "CreateContainerConfigError"}}


@pytest.mark.parametrize(
    ("states", "answered", "expected"),
    [
        pytest.param([], (), "i1", id="nothing yet"),
        pytest.param([status("i1", **FRESH)], (), "i1", id="waiting"),
        pytest.param([status("i1", **FRESH)], ("i1",), "", id="answered and silent"),
        pytest.param([status("i1", **RUNNING)], ("i1",), "", id="seen running"),
        pytest.param([status("i1", **RUNNING)], (), "", id="running without our answer"),
        pytest.param([status("i1", **FAILED)], ("i1",), "i1", id="failed"),
        pytest.param([status("i1", **BACKOFF)], ("i1",), "i1", id="in back-off"),
        pytest.param([status("i1", **REFUSED)], ("i1",), "i1", id="refused before"),
        pytest.param([status("i1", **DONE), status("i2", **FRESH)], ("i1",), "i2", id="second"),
        pytest.param(
            [status("i1", **DONE), status("i2", **DONE)], ("i1", "i2"), "app", id="all init containers done"
        ),
        pytest.param([status("i1", **DONE), status("i2", **DONE)], (), "app", id="checkpoint lost"),
    ],
)
def test_which_container_starts_follows_from_status_and_answers(
    states: list[dict[str, Any]], answered: tuple[str, ...], expected: str
) -> None:
    pod = starting(*states)
    if expected:
        assert container_to_start(pod, ("i1", "i2"), "app", dict.fromkeys(answered, 50)) == expected
        return
    with pytest.raises(NotYetError, match="whether init container i1 has ended"):
        container_to_start(pod, ("i1", "i2"), "app", dict.fromkeys(answered, 50))


def ended(exit_code: int, seconds: int) -> dict[str, Any]:
    return {"terminated": {"exitCode": exit_code, "finishedAt": f"1970-01-01T00:00:{seconds:02}Z"}}


@pytest.mark.parametrize(
    ("seconds", "sandbox_ready", "expected"),
    [
        pytest.param(50, "True", "app", id="ended in the second of its answer"),
        pytest.param(59, "True", "app", id="ended after its answer"),
        pytest.param(49, "True", "", id="an end older than its answer"),
        pytest.param(59, "False", "i1", id="new sandbox"),
        pytest.param(49, "False", "", id="answered in the new sandbox"),
    ],
)
def test_an_end_counts_for_the_start_that_was_answered(
    seconds: int, sandbox_ready: str, expected: str
) -> None:
    pod = starting(status("i1", **ended(0, seconds)), sandbox_ready=sandbox_ready)
    if expected:
        assert container_to_start(pod, ("i1",), "app", {"i1": 50}) == expected
        return
    with pytest.raises(NotYetError, match="whether init container i1 has ended"):
        container_to_start(pod, ("i1",), "app", {"i1": 50})


def test_an_end_without_a_readable_time_counts() -> None:
    state = {"terminated": {"exitCode": 0, "finishedAt": "yesterday"}}
    assert container_to_start(starting(status("i1", **state)), ("i1",), "app", {"i1": 50}) == "app"


def test_sidecars_and_other_pods_do_not_share_ids() -> None:
    pod = starting(sidecar="side")
    ids = frozenset({"a-0"})
    records = [Recorded("u", "side", ids), Recorded("other", "i1", ids), Recorded("u", "i2", ids)]
    assert sharing_init_containers(pod, records) == ("i2",)


def test_kubelets_checkpoint_gives_the_ids_of_every_container() -> None:
    entry = {"PodUID": "u", "ContainerName": "i1", "ResourceName": GPU, "DeviceIDs": {"0": ["a"], "1": ["b"]}}
    other = {**entry, "ResourceName": "other.com/x"}
    empty = {**entry, "ContainerName": "c", "DeviceIDs": None, "AllocResp": "AA=="}
    content = msgspec.json.encode(
        {"Data": {"PodDeviceEntries": [entry, other, empty], "RegisteredDevices": {}}, "Checksum": 1}
    )
    assert decode_kubelet_state(content, GPU) == (
        Recorded("u", "i1", frozenset({"a", "b"})),
        Recorded("u", "c", frozenset()),
    )
    none = b'{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}'
    assert decode_kubelet_state(none, GPU) == ()


@given(st.binary(max_size=200))
def test_a_broken_checkpoint_of_kubelet_is_one_kind_of_error(content: bytes) -> None:
    with pytest.raises(KubeletStateError):
        decode_kubelet_state(content, GPU)


# --- the shared list ----------------------------------------------------------------------------------------


async def test_callers_of_one_moment_share_a_list() -> None:
    calls = 0

    async def fetch() -> int:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0)
        return calls

    shared = SharedList(fetch)
    assert await asyncio.gather(*(shared.get() for _ in range(50))) == [1] * 50


async def test_who_comes_during_a_list_gets_one_made_after_it_asked() -> None:
    started = asyncio.Event()
    gate = asyncio.Event()
    calls = 0

    async def fetch() -> int:
        nonlocal calls
        calls += 1
        mine = calls
        started.set()
        await gate.wait()
        return mine

    shared = SharedList(fetch)
    first = asyncio.create_task(shared.get())
    await started.wait()
    late = [asyncio.create_task(shared.get()) for _ in range(10)]
    await asyncio.sleep(0)
    gate.set()
    assert await first == 1
    assert await asyncio.gather(*late) == [2] * 10


async def test_a_list_that_is_always_refused_ends_with_the_error() -> None:
    async def fetch() -> int:
        raise PodResourcesBusyError("too many")

    with pytest.raises(PodResourcesBusyError):
        await SharedList(fetch, limit_s=0.05).get()


async def test_an_error_reaches_all_who_wait_and_the_next_caller_tries_again() -> None:
    answers: list[int | Exception] = [PodResourcesError("gone"), 7]

    async def fetch() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    shared = SharedList(fetch)
    results = await asyncio.gather(shared.get(), shared.get(), return_exceptions=True)
    assert [type(result) for result in results] == [PodResourcesError, PodResourcesError]
    assert await shared.get() == 7


class LimitedKubelet(rpc.PodResourcesListerServicer):  # type: ignore[misc]
    """Refuses every other list."""

    def __init__(self) -> None:
        self.calls = 0

    async def List(self, request: Any, context: Any) -> Any:
        self.calls += 1
        if self.calls % 2:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        device = pb.ContainerDevices(resource_name=GPU, device_ids=["a-0"])
        container = pb.ContainerResources(name="app", devices=[device])
        return pb.ListPodResourcesResponse(
            pod_resources=[pb.PodResources(name="p", namespace="ns", containers=[container])]
        )


async def test_x6_a_hundred_calls_succeed_with_a_list_per_wave_although_half_are_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        kubelet, server = LimitedKubelet(), grpc.aio.server()
        rpc.add_PodResourcesListerServicer_to_server(kubelet, server)
        server.add_insecure_port(f"unix:{folder}/kubelet.sock")
        await server.start()
        client = PodResources(f"{folder}/kubelet.sock")
        try:
            waves = 2
            for _ in range(waves):
                found = await asyncio.gather(*(client.holdings(GPU) for _ in range(50)))
                assert all(len(holdings) == 1 for holdings in found)
            assert kubelet.calls == 2 * waves  # one refused, one answered
        finally:
            await client.close()
            await server.stop(None)


async def test_a_kubelet_that_comes_back_is_found_again() -> None:
    with tempfile.TemporaryDirectory() as folder:
        client = PodResources(f"{folder}/kubelet.sock")
        with pytest.raises(PodResourcesError, match="does not answer"):
            await client.holdings(GPU)
        server = grpc.aio.server()
        kubelet = LimitedKubelet()
        kubelet.calls = 1
        rpc.add_PodResourcesListerServicer_to_server(kubelet, server)
        server.add_insecure_port(f"unix:{folder}/kubelet.sock")
        await server.start()
        try:
            async with asyncio.timeout(20):
                while True:
                    try:
                        found = await client.holdings(GPU)
                        break
                    except PodResourcesError:
                        await asyncio.sleep(0.05)
            assert [holding.container for holding in found] == ["app"]
        finally:
            await client.close()
            await server.stop(None)
