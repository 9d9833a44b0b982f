"""The checked-in stubs are those of the .proto files, with the names and numbers that kubelet speaks."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from grpc_tools import protoc  # type: ignore[import-untyped]

import hami.node.api
from hami.node.api import deviceplugin_v1beta1_pb2 as plugin
from hami.node.api import podresources_v1_pb2 as resources

API = Path(hami.node.api.__file__).parent
SOURCE = API.parents[2]


@pytest.mark.parametrize("name", ["deviceplugin_v1beta1", "podresources_v1"])
def test_the_stubs_are_generated_from_the_proto_files(name: str, tmp_path: Path) -> None:
    out = tmp_path / "set.pb"
    file = f"hami/node/api/{name}.proto"
    assert protoc.main(["protoc", f"-I{SOURCE}", f"--descriptor_set_out={out}", file]) == 0
    (described,) = FileDescriptorSet.FromString(out.read_bytes()).file
    module = plugin if name.startswith("device") else resources
    generated = FileDescriptorSet().file.add()
    module.DESCRIPTOR.CopyToProto(generated)
    for message in described.message_type:
        _without_json_names(message)
    assert generated == described


def _without_json_names(message: DescriptorProto) -> None:
    """The compiler adds them to a set but not to the stubs."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _without_json_names(nested)


def test_the_wire_names_are_those_of_kubelet() -> None:
    methods = {
        method.full_name
        for descriptor in (plugin.DESCRIPTOR, resources.DESCRIPTOR)
        for service in descriptor.services_by_name.values()
        for method in service.methods
    }
    assert methods == {
        "v1beta1.Registration.Register",
        "v1beta1.DevicePlugin.GetDevicePluginOptions",
        "v1beta1.DevicePlugin.ListAndWatch",
        "v1beta1.DevicePlugin.GetPreferredAllocation",
        "v1beta1.DevicePlugin.Allocate",
        "v1beta1.DevicePlugin.PreStartContainer",
        "v1.PodResourcesLister.List",
        "v1.PodResourcesLister.GetAllocatableResources",
        "v1.PodResourcesLister.Get",
    }


def test_an_answer_has_the_bytes_that_kubelet_expects() -> None:
    answer = plugin.ContainerAllocateResponse(
        envs={"A": "1"}, mounts=[plugin.Mount(container_path="/c", host_path="/h", read_only=True)]
    )
    assert answer.SerializeToString() == b"\x0a\x06\x0a\x01A\x12\x011\x12\x0a\x0a\x02/c\x12\x02/h\x18\x01"
