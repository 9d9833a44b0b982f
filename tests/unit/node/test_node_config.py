"""Settings from device-config.yaml, config.json and flags (device-plugin.md §3, §15.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.node.config import (
    NvidiaConfig,
    Overrides,
    build_settings,
    foreign_sections,
    parse_device_config,
    parse_node_overrides,
)
from hami.node.errors import SettingsError
from hami.node.plugin.loader import SettingsLoader

YAML = b"nvidia:\n  resourceCountName: acme.io/gpu\n  deviceSplitCount: 3\n  libCudaLogLevel: 1\n"


def node_config(*entries: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"nodeconfig": list(entries)})


def settings_of(*entries: dict[str, Any], given_flags: Overrides | None = None) -> Any:
    overrides = parse_node_overrides(node_config(*entries), "n1")
    return build_settings(NvidiaConfig(), overrides, given_flags or Overrides())


def test_d17_values_left_out_have_defaults() -> None:
    settings = build_settings(parse_device_config(b"nvidia: {}"), (), Overrides())
    assert (settings.split_count, settings.memory_scaling, settings.core_scaling) == (10, 1.0, 1.0)
    assert settings.log_level == ""
    assert settings.mode == "hami-core"


def test_sections_of_nvidias_plugin_are_named() -> None:
    text = b"version: v1\nsharing: {}\nflags: {}\nother: {}\nnvidia: {}\n"
    assert foreign_sections(text) == ("flags", "sharing")
    assert parse_device_config(text) == NvidiaConfig()


def test_d6_the_socket_follows_the_resource_name() -> None:
    settings = build_settings(parse_device_config(YAML), (), Overrides())
    assert (settings.resource_name, settings.socket_name) == ("acme.io/gpu", "nvidia-gpu.sock")
    assert (settings.split_count, settings.log_level) == (3, "1")


def test_d14_keys_of_the_node_config_match_in_any_case() -> None:
    assert settings_of({"name": "n1", "deviceSplitCount": 4}).split_count == 4


def test_d15_the_later_entry_wins_per_key_and_other_nodes_are_skipped() -> None:
    settings = settings_of(
        {"name": "n1", "devicesplitcount": 2, "devicememoryscaling": 2, "enablegetpreferredallocation": True},
        {"name": "n1", "devicesplitcount": 6},
        {"name": "n2", "devicesplitcount": 9},
    )
    assert (settings.split_count, settings.memory_scaling, settings.preferred_allocation) == (6, 2.0, False)


def test_an_explicit_flag_wins_over_both_files() -> None:
    flags = Overrides(split_count=7, disable_core_limit=True)
    settings = settings_of({"name": "n1", "devicesplitcount": 2}, given_flags=flags)
    assert (settings.split_count, settings.disable_core_limit) == (7, True)
    assert settings.sources["split_count"] == "flag or environment"


def test_filters_are_read() -> None:
    settings = settings_of({"name": "n1", "filterdevices": {"uuid": ["GPU-aa"], "index": [2]}})
    assert settings.excluded_uuids == {"GPU-aa"}
    assert settings.excluded_indexes == {2}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"nvidia: 3",
        b"version: v2\nnvidia: {}",
        b"other: {}",
        b"nvidia: {deviceSplitCount: 0}",
        b"nvidia: {deviceSplitCount: 1001}",
        b"nvidia: {deviceMemoryScaling: 0}",
        b"nvidia: {deviceCoreScaling: 101}",
        b"nvidia: {gpuCorePolicy: sometimes}",
        b"nvidia: {preConfiguredDeviceMemory: -1}",
        b"nvidia: {resourceCountName: ''}",
        b"nvidia: {deviceMemoryScaling: .nan}",
        b"\xff\xfe",
        b"a: &a [*a]",
    ],
)
def test_a_bad_device_config_is_one_typed_error(text: bytes) -> None:
    with pytest.raises(SettingsError):
        parse_device_config(text)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"nodeconfig": 3}',
        node_config({"name": "n1", "operatingmode": "turbo"}),
        node_config({"name": "n1", "devicesplitcount": "4"}),
        node_config({"name": "n1", "devicememoryscaling": -1}),
        node_config({"name": "n1", "preconfigureddevicememory": -1}),
        b'{"nodeconfig":' + b"[" * 100 + b"]" * 100 + b"}",
    ],
)
def test_a_bad_node_config_is_one_typed_error(text: bytes) -> None:
    with pytest.raises(SettingsError):
        parse_node_overrides(text, "n1")


@given(st.binary(max_size=200))
def test_any_bytes_give_settings_or_a_typed_error(text: bytes) -> None:
    for parse in (parse_device_config, lambda data: parse_node_overrides(data, "n1")):
        try:
            parse(text)
        except SettingsError:
            continue


class Files:
    """The two files and a loader on them."""

    def __init__(self, folder: Path, cluster: Any) -> None:
        self.device = folder / "device-config.yaml"
        self.node = folder / "config.json"
        self.device.write_bytes(YAML)
        self.loader = SettingsLoader(self.device, self.node, Overrides(), cluster)


def test_d13_a_bad_node_config_at_start_gives_base_values_and_an_event(tmp_path: Path, cluster: Any) -> None:
    files = Files(tmp_path, cluster)
    files.node.write_bytes(node_config({"name": "n1", "operatingmode": "turbo", "devicesplitcount": 9}))
    settings = files.loader.load()
    assert (settings.mode, settings.split_count) == ("hami-core", 3)
    assert [event[:2] for event in cluster.events] == [("node", "HAMiNodeConfigInvalid")]


def test_d18_a_bad_file_on_reload_leaves_the_settings_in_force(tmp_path: Path, cluster: Any) -> None:
    files = Files(tmp_path, cluster)
    files.node.write_bytes(node_config({"name": "n1", "operatingmode": "mps", "devicesplitcount": 5}))
    first = files.loader.load()
    files.node.write_bytes(b"{")
    assert files.loader.load() == first
    files.node.unlink()
    files.device.write_bytes(b"{")
    assert files.loader.load() == first
    assert len(cluster.events) == 2


def test_mode_mig_on_reload_leaves_the_settings_in_force(tmp_path: Path, cluster: Any) -> None:
    files = Files(tmp_path, cluster)
    first = files.loader.load()
    files.node.write_bytes(node_config({"name": "n1", "operatingmode": "mig"}))
    assert files.loader.load() == first
    assert "mig" in cluster.events[0][2]


def test_a_missing_node_config_is_no_error(tmp_path: Path, cluster: Any) -> None:
    assert Files(tmp_path, cluster).loader.load().mode == "hami-core"
    assert cluster.events == []


def test_a_bad_device_config_at_start_is_an_error(tmp_path: Path, cluster: Any) -> None:
    files = Files(tmp_path, cluster)
    files.device.unlink()
    with pytest.raises(SettingsError, match=r"device-config\.yaml"):
        files.loader.load()


def test_mode_mig_is_refused(tmp_path: Path, cluster: Any) -> None:
    files = Files(tmp_path, cluster)
    files.node.write_bytes(node_config({"name": "n1", "operatingmode": "mig"}))
    with pytest.raises(SettingsError, match="mig"):
        files.loader.load()
