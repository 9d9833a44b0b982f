"""Settings from device-config.yaml, config.json and flags (device-plugin.md §3, §15.1)."""

from __future__ import annotations

import errno
import hashlib
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.node.config import (
    MigAllowed,
    NvidiaConfig,
    Overrides,
    build_settings,
    foreign_sections,
    parse_device_config,
    parse_node_overrides,
    parse_sharing,
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
    assert foreign_sections(text) == ("sharing",)
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
        b"nvidia: !!bool x",
        b"nvidia: !!int ''",
        b"nvidia: !!timestamp x",
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
        b"[" * 100_000,
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

    def __init__(self, folder: Path, cluster: Any, given_flags: Overrides | None = None) -> None:
        self.device = folder / "device-config.yaml"
        self.node = folder / "config.json"
        self.device.write_bytes(YAML)
        self.loader = SettingsLoader(self.device, self.node, given_flags or Overrides(), cluster)


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


def test_mode_mig_and_static_mig_together_are_refused(tmp_path: Path, cluster: Any) -> None:
    files = Files(tmp_path, cluster, Overrides(mig_strategy="mixed"))
    first = files.loader.load()
    assert first.mig_strategy == "mixed"
    files.node.write_bytes(node_config({"name": "n1", "operatingmode": "mig"}))
    assert files.loader.load() == first, "on reload the settings in force stay"
    assert "--mig-strategy=mixed" in cluster.events[0][2]
    with pytest.raises(SettingsError, match="--mig-strategy=mixed"):
        Files(tmp_path, cluster, Overrides(mig_strategy="mixed")).loader.load()


def test_an_unknown_mig_strategy_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"'all' must be one of none, single, mixed"):
        build_settings(NvidiaConfig(), (), Overrides(mig_strategy="all"))


def test_a_missing_node_config_is_no_error(tmp_path: Path, cluster: Any) -> None:
    assert Files(tmp_path, cluster).loader.load().mode == "hami-core"
    assert cluster.events == []


def test_a_bad_device_config_at_start_is_an_error(tmp_path: Path, cluster: Any) -> None:
    files = Files(tmp_path, cluster)
    files.device.unlink()
    with pytest.raises(SettingsError, match=r"device-config\.yaml"):
        files.loader.load()


def test_mode_mig_takes_the_profiles_of_the_device_config(tmp_path: Path, cluster: Any) -> None:
    files = Files(tmp_path, cluster)
    files.device.write_bytes(
        b"nvidia: {migProfileAllowlist: [{models: [A100], profiles: [1g.5gb, 7g.40gb]}]}"
    )
    files.node.write_bytes(node_config({"name": "n1", "operatingmode": "mig"}))
    settings = files.loader.load()
    assert settings.is_dynamic_mig
    assert settings.mig_allowlist == (MigAllowed(("A100",), ("1g.5gb", "7g.40gb")),)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{models: [A100], profiles: []}", r"migProfileAllowlist\[0\] needs at least"),
        ("{profiles: [1g.5gb]}", r"migProfileAllowlist\[0\] needs at least"),
        ("{models: [A100], profiles: [5gb]}", r"'5gb', it must look like 1g\.10gb"),
        ("{models: [A100], profiles: [1g.5gb+me]}", r"'1g\.5gb\+me', it must not have \+me"),
    ],
)
def test_a_profile_that_cannot_be_selected_is_refused(entry: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        parse_device_config(f"nvidia: {{migProfileAllowlist: [{entry}]}}".encode())


def test_time_slicing_counts_for_static_mig_devices_only() -> None:
    text = b"""
nvidia: {}
sharing:
  timeSlicing:
    failRequestsGreaterThanOne: true
    resources: [{name: nvidia.com/mig-1g.5gb, replicas: 4}]
"""
    sharing = parse_sharing(text)
    assert sharing.fail_requests_greater_than_one
    assert sharing.replicas("nvidia.com/mig-1g.5gb") == 4
    assert sharing.replicas("nvidia.com/gpu") == 0
    assert foreign_sections(text) == ("sharing",)
    assert foreign_sections(text, "mixed") == ()
    assert not parse_sharing(b"nvidia: {}").fail_requests_greater_than_one


@pytest.mark.parametrize("replicas", ["1", "0", "-3", "1001", "many"])
def test_replicas_out_of_range_are_refused(replicas: str) -> None:
    text = f"sharing: {{timeSlicing: {{resources: [{{name: a/b, replicas: {replicas}}}]}}}}"
    with pytest.raises(SettingsError, match="timeSlicing"):
        parse_sharing(text.encode())


def test_an_edited_file_changes_the_settings_and_an_edit_for_another_node_does_not(
    tmp_path: Path, cluster: Any
) -> None:
    files = Files(tmp_path, cluster)
    assert not files.loader.refreshed(), "nothing has been loaded yet"
    files.loader.load()
    assert not files.loader.refreshed()
    text = node_config({"name": "n1", "devicesplitcount": 5})
    files.node.write_bytes(text)
    assert files.loader.refreshed()
    assert files.loader.applied == hashlib.sha256(text).hexdigest()[:16]
    text = node_config({"name": "n1", "devicesplitcount": 5}, {"name": "n2", "devicesplitcount": 7})
    files.node.write_bytes(text)
    assert not files.loader.refreshed()
    assert files.loader.applied == hashlib.sha256(text).hexdigest()[:16]
    assert files.loader.load().split_count == 5
    files.node.unlink()
    assert files.loader.refreshed()
    assert files.loader.applied == ""


def test_a_file_that_stays_bad_is_reported_once(tmp_path: Path, cluster: Any) -> None:
    files = Files(tmp_path, cluster)
    good = node_config({"name": "n1", "devicesplitcount": 5})
    files.node.write_bytes(good)
    files.loader.load()
    files.node.write_bytes(b"{")
    for _ in range(3):
        assert not files.loader.refreshed()
    assert [event[1] for event in cluster.events] == ["HAMiNodeConfigInvalid"]
    assert files.loader.applied == hashlib.sha256(good).hexdigest()[:16]


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_an_edit_that_cannot_be_read_for_a_moment_is_read_again(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """As while kubelet exchanges the folder, or without a free descriptor."""
    files = Files(tmp_path, cluster)
    files.node.write_bytes(node_config({"name": "n1", "devicesplitcount": 5}))
    files.loader.load()
    files.node.write_bytes(node_config({"name": "n1", "devicesplitcount": 6}))
    opened, left = Path.open, [failing]

    def once_failing(path: Path, *arguments: Any) -> Any:
        if path == files.node:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.EMFILE, "too many open files")
        return opened(path, *arguments)

    monkeypatch.setattr(Path, "open", once_failing)
    changes = [files.loader.refreshed() for _ in range(3)]
    assert changes.count(True) == 1
    assert files.loader.load().split_count == 6


def test_a_file_whose_folder_is_just_exchanged_is_not_taken_for_absent(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(tmp_path, cluster)
    text = node_config({"name": "n1", "devicesplitcount": 5})
    folders = [tmp_path / name for name in ("..1", "..2")]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_bytes(text)
    data = tmp_path / "..data"
    data.symlink_to(folders[0])
    files.node.symlink_to("..data/config.json")
    files.loader.load()
    opened = Path.open

    def in_the_old_folder(path: Path, *arguments: Any) -> Any:
        """Found before kubelet pointed the link to the new folder, opened after it removed the old one."""
        if path == files.node and folders[0].exists():
            data.unlink()
            data.symlink_to(folders[1])
            shutil.rmtree(folders[0])
            return opened(folders[0] / "config.json", *arguments)
        return opened(path, *arguments)

    monkeypatch.setattr(Path, "open", in_the_old_folder)
    assert files.loader.load().split_count == 5
    assert not folders[0].exists()


def test_resource_names_stay_until_the_plugin_starts_anew(tmp_path: Path, cluster: Any) -> None:
    files = Files(tmp_path, cluster)
    assert files.loader.load().resource_name == "acme.io/gpu"
    files.device.write_bytes(b"nvidia: {resourceCountName: nvidia.com/gpu, deviceSplitCount: 4}")
    assert files.loader.refreshed()
    settings = files.loader.load()
    assert (settings.resource_name, settings.split_count) == ("acme.io/gpu", 4)
    assert "acme.io/gpu to nvidia.com/gpu" in cluster.events[0][2]


def test_null_is_an_absent_key() -> None:
    """As HAMi's programs read it."""
    text = b'{"nodeconfig": [{"name": "n1", "devicesplitcount": null, "filterdevices": {"uuid": null}}]}'
    (entry,) = parse_node_overrides(text, "n1")
    assert entry.devicesplitcount is None
    assert entry.filterdevices is not None
    assert parse_node_overrides(b'{"nodeconfig": null}', "n1") == ()
