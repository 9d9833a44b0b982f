"""Sections of NVIDIA's own plugin in device-config.yaml (device-plugin.md §3.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.cli import device_plugin
from hami.node.errors import SettingsError
from hami.node.plugin.file_flags import parse_file_flags, read_file_flags
from hami.node.plugin.process import ProcessConfig

FILE = """
version: v1
flags:
  failOnInitError: false
  nvidiaDriverRoot: /run/nvidia/driver
  gdsEnabled: true
  deviceDiscoveryStrategy: nvml
  useNodeFeatureAPI: null
  gfd: {oneshot: false}
  plugin:
    passDeviceSpecs: true
    deviceListStrategy: [envvar, cdi-cri]
    deviceIDStrategy: index
    containerDriverRoot: /driver
    nvidiaCTKPath: /opt/nvidia-ctk
imex: {channelIDs: [0], required: true, nodes: 1}
nvidia: {deviceSplitCount: 3}
"""


def config_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, *flags: str) -> ProcessConfig:
    monkeypatch.setenv("NODE_NAME", "n1")
    for name in ("DEVICE_LIST_STRATEGY", "PASS_DEVICE_SPECS"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "device-config.yaml"
    file.write_text(text)
    arguments = [f"--config-file={file}", f"--host-root={tmp_path}", *flags]
    context = device_plugin.command.make_context("device-plugin", arguments)
    merged = device_plugin._with_file_flags(context, context.params)
    config: ProcessConfig = device_plugin._process_config(merged)
    return config


def test_flags_of_the_file_count_where_none_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, monkeypatch, FILE)
    options = config.options
    assert not options.fail_on_init_error
    assert options.pass_device_specs
    assert options.by_index
    assert options.delivery.cdi is not None
    assert (options.delivery.cdi.cri, options.delivery.cdi.only) == (True, False)
    assert options.delivery.extras == {"NVIDIA_GDS": "enabled"}
    assert (options.driver_host_root, options.dev_root) == ("/run/nvidia/driver",) * 2
    assert (options.driver_root, options.cdi_hook) == ("/driver", "/opt/nvidia-ctk")
    assert (options.imex_channels, options.imex_required) == (("0",), True)
    assert config.discovery == "nvml"


def test_command_line_and_environment_win_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDS_ENABLED", "false")
    config = config_of(tmp_path, monkeypatch, FILE, "--device-list-strategy=envvar", "--imex-channel-ids=")
    assert config.options.delivery.cdi is None
    assert config.options.delivery.extras == {}
    assert config.options.imex_channels == ()
    assert config.options.pass_device_specs


def test_without_these_sections_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = config_of(tmp_path, monkeypatch, "nvidia: {}\n")
    assert plain == config_of(tmp_path, monkeypatch, "nvidia: {}\nflags: null\nimex: {}\nsharing:\n")


def test_what_has_no_effect_is_told() -> None:
    found = parse_file_flags(
        {
            "flags": {"gfd": {}, "plugin": {"useX": 1}},
            "imex": {"nodes": 1},
            "sharing": {
                "timeSlicing": {
                    "renameByDefault": True,
                    "resources": [
                        {
                            "name": "nvidia.com/mig-1g.5gb",
                            "replicas": 2,
                            "rename": "nvidia.com/mig-1g.5gb.shared",
                        },
                        {"name": "nvidia.com/gpu", "replicas": 2, "rename": "other", "devices": ["0"]},
                    ],
                }
            },
        }
    )
    assert found.warnings == (
        "flags.gfd has no effect",
        "flags.plugin.useX has no effect",
        "imex.nodes has no effect",
        "sharing.timeSlicing.renameByDefault has no effect: resources keep their names",
        "sharing.timeSlicing.resources[1].rename has no effect",
        "sharing.timeSlicing.resources[1].devices has no effect: all devices of nvidia.com/gpu are shared",
    )
    assert found.values == {}


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"flags": []}, "device config, flags: expected a mapping"),
        ({"flags": {"plugin": "x"}}, "device config, flags.plugin: expected a mapping"),
        ({"flags": {"gdsEnabled": "yes"}}, "flags.gdsEnabled: expected true or false, not 'yes'"),
        ({"flags": {"nvidiaDriverRoot": 1}}, "flags.nvidiaDriverRoot: expected a text, not '1'"),
        ({"flags": {"plugin": {"deviceListStrategy": [1]}}}, "deviceListStrategy: expected a text"),
        ({"flags": {"plugin": {"deviceListStrategy": ["x"] * 17}}}, "expected at most 16 texts"),
        ({"imex": {"channelIDs": [1]}}, r"only \[\] and \[0\] are possible, not \[1\]"),
        ({"imex": {"required": 1}}, "imex.required: expected true or false"),
        ({"sharing": {"mps": {"resources": [{}]}}}, "sharing.mps needs an MPS root"),
        (
            {"flags": {"migStrategy": "mixed"}, "sharing": {"mps": {"resources": [{}]}}},
            "sharing.mps cannot be used with migStrategy mixed",
        ),
        ({"sharing": {"timeSlicing": {"resources": {}}}}, "resources: expected a list"),
        ({"sharing": {"timeSlicing": {"resources": [1]}}}, r"resources\[0\]: expected a mapping"),
        ({"sharing": {"timeSlicing": {"renameByDefault": 1}}}, "renameByDefault: expected true or false"),
    ],
)
def test_what_cannot_be_meant_is_refused(document: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        parse_file_flags(document)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*absent\.yaml: No such file"):
        read_file_flags(tmp_path / "absent.yaml")
    (tmp_path / "bad.yaml").write_text("[")
    with pytest.raises(SettingsError, match="not YAML"):
        read_file_flags(tmp_path / "bad.yaml")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["plugin", "gdsEnabled", "resources", "mps", "timeSlicing", "channelIDs", "name", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["flags", "imex", "sharing", "resources"]), _JSON))
def test_any_content_is_taken_or_refused(document: dict[str, Any]) -> None:
    try:
        found = parse_file_flags(document)
    except SettingsError:
        return
    assert set(found.values) <= {"gds_enabled", "imex_channel_ids"}
