"""Which pods were given which MIG devices, out of what kubelet keeps."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from hami.node.api import deviceplugin_v1beta1_pb2 as pb
from hami.node.exact.cdi import device_name, document_file, qualified_name
from hami.node.mig.given import GivenByKubelet
from hami.node.paths import CDI_DIRECTORY, HostPaths

M1 = "MIG-11111111-2222-3333-4444-555555555555"
M2 = "MIG-66666666-7777-8888-9999-000000000000"


class Kubelet:
    """Its plugin folder, with the answers that it has on record."""

    def __init__(self, host: HostPaths) -> None:
        self.host = host
        self.folder = Path(host.root, "device-plugins")
        self.folder.mkdir()
        self.entries: list[dict[str, Any]] = []

    def record(self, pod: str, *ids: str, **answer: Any) -> None:
        text = pb.ContainerAllocateResponse(**answer).SerializeToString()
        self.entries.append(
            {
                "PodUID": pod,
                "ContainerName": "app",
                "ResourceName": "nvidia.com/gpu",
                "DeviceIDs": {"-1": list(ids)},
                "AllocResp": base64.b64encode(text).decode(),
            }
        )
        self.write(json.dumps({"Data": {"PodDeviceEntries": self.entries}, "Checksum": 1}))

    def write(self, text: str) -> None:
        (self.folder / "kubelet_internal_checkpoint").write_text(text)

    def owners(self, *uuids: str) -> dict[str, frozenset[str]]:
        return GivenByKubelet(str(self.folder / "kubelet.sock"), self.host).owners(uuids)


@pytest.fixture
def kubelet(host: HostPaths) -> Kubelet:
    return Kubelet(host)


@pytest.mark.parametrize(
    "answer",
    [
        {"envs": {"NVIDIA_VISIBLE_DEVICES": f"{M2},{M1}"}},
        {"cdi_devices": [pb.CDIDevice(name=f"k8s.device-plugin.nvidia.com/gpu={M1}")]},
        {"annotations": {"cdi.k8s.io/nvidia-device-plugin_x": f"k8s.device-plugin.nvidia.com/gpu={M1}"}},
        {"mounts": [pb.Mount(container_path=f"/var/run/nvidia-container-devices/{M1}")]},
    ],
    ids=["envvar", "cdi-cri", "cdi-annotations", "volume-mounts"],
)
def test_a_pod_was_given_what_the_answer_to_kubelet_names(kubelet: Kubelet, answer: dict[str, Any]) -> None:
    kubelet.record("uid-p", "GPU-1-0", **answer)
    kubelet.record("uid-other", "GPU-1-1", envs={"NVIDIA_VISIBLE_DEVICES": "GPU-1"})
    assert kubelet.owners(M1) == {M1: frozenset({"uid-p"})}


def test_in_mode_exact_the_document_that_the_answer_names_tells(kubelet: Kubelet) -> None:
    documents = Path(kubelet.host.host(CDI_DIRECTORY))
    documents.mkdir(parents=True)
    for pod, ids, uuid in (("uid-p", ("GPU-1-0",), M1), ("uid-q", ("GPU-1-1",), M2)):
        name = device_name(ids)
        kubelet.record(pod, *ids, cdi_devices=[pb.CDIDevice(name=qualified_name(name))])
        (documents / document_file(name)).write_text(json.dumps({"env": [f"NVIDIA_VISIBLE_DEVICES={uuid}"]}))
    assert kubelet.owners(M1, M2) == {M1: frozenset({"uid-p"}), M2: frozenset({"uid-q"})}
    (documents / document_file(device_name(("GPU-1-0",)))).unlink()
    assert kubelet.owners(M1) == {M1: frozenset()}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"Data": {"PodDeviceEntries": [{"AllocResp": 7}]}}'])
def test_what_cannot_be_read_proves_nothing(kubelet: Kubelet, text: str) -> None:
    assert kubelet.owners(M1) == {}, "kubelet has written nothing"
    kubelet.write(text)
    assert kubelet.owners(M1) == {}
