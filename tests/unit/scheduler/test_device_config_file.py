"""Which changes of the device config file a running scheduler follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hami.kube.mounted import read_mounted
from hami.scheduler.edge.device_config import DeviceConfigFile, needs_restart
from hami.scheduler.edge.settings import SettingsError
from hami.vendors.config import decode_config, load_profiles

NVIDIA = {
    "resourceCountName": "nvidia.com/gpu",
    "resourceMemoryName": "nvidia.com/gpumem",
    "resourceMemoryPercentageName": "nvidia.com/gpumem-percentage",
    "resourceCoreName": "nvidia.com/gpucores",
}
HYGON = {"resourceCountName": "hygon.com/dcunum", "resourceMemoryName": "hygon.com/dcumem"}
ASCEND = {
    "chipName": "910B3",
    "commonWord": "Ascend910B3",
    "resourceName": "huawei.com/Ascend910B3",
    "resourceMemoryName": "huawei.com/Ascend910B3-memory",
    "memoryAllocatable": 65536,
    "memoryCapacity": 65536,
    "aiCore": 20,
    "templates": [{"name": "vir05_1c_16g", "memory": 16384, "aiCore": 5}],
}


def write(path: Path, **sections: Any) -> None:
    path.write_text(yaml.safe_dump(sections))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "device-config.yaml"
    write(found, nvidia=NVIDIA)
    return found


def loaded(path: Path) -> DeviceConfigFile:
    file = DeviceConfigFile(path)
    file.load()
    return file


def test_a_changed_number_is_told_once_and_in_force_when_it_is_accepted(path: Path) -> None:
    file = loaded(path)
    assert file.refreshed() is None
    write(path, nvidia={**NVIDIA, "memoryFactor": 4})
    parsed = file.refreshed()
    assert parsed is not None
    assert parsed.profiles[0].names.memory_factor == 4
    assert file.differs, "it is not in force yet"
    assert file.refreshed() is None
    file.accept(parsed)
    assert not file.differs


def test_a_change_without_effect_is_none(path: Path) -> None:
    file = loaded(path)
    path.write_text(f"# a remark\n{path.read_text()}")
    assert file.refreshed() is None
    assert not file.differs


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not YAML"),
        ("{}", "all configurations are empty"),
        ("{nvidia: {memoryFactor: many}}", "nvidia.memoryFactor must be an integer"),
        ("x" * (2 << 20), "is longer than"),
        (None, "there is no such file"),
    ],
)
def test_a_bad_file_is_told_once_with_its_reason_and_differs_until_it_is_mended(
    path: Path, text: str | None, reason: str
) -> None:
    file = loaded(path)
    good = path.read_text()
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(SettingsError, match=reason):
        file.refreshed()
    assert file.refreshed() is None, "told once"
    assert file.differs
    path.write_text(good)
    assert file.refreshed() is None
    assert not file.differs


def test_kubelets_exchange_of_the_mounted_folder_is_seen(tmp_path: Path) -> None:
    """A ConfigMap volume: the file is a link into `..data`, which is renamed over."""
    for name, factor in (("..1", 1), ("..2", 2)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "device-config.yaml", nvidia={**NVIDIA, "memoryFactor": factor})
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "device-config.yaml").symlink_to("..data/device-config.yaml")
    file = loaded(tmp_path / "device-config.yaml")
    (tmp_path / "..new").symlink_to("..2")
    (tmp_path / "..new").rename(tmp_path / "..data")
    parsed = file.refreshed()
    assert parsed is not None
    assert parsed.profiles[0].names.memory_factor == 2


def test_a_folder_that_is_exchanged_while_the_file_is_opened_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path / "f"
    found.write_bytes(b"new")
    opened = Path.open
    gone = [FileNotFoundError(2, "gone")]

    def once(self: Path, *arguments: Any) -> Any:
        if gone:
            raise gone.pop()
        return opened(self, *arguments)

    monkeypatch.setattr(Path, "open", once)
    assert read_mounted(found, 10) == b"new"


def test_something_that_is_no_file_is_a_reason(tmp_path: Path) -> None:
    assert read_mounted(tmp_path, 10) == f"cannot read {tmp_path}: Is a directory"


def profiles(**sections: Any) -> Any:
    return load_profiles(decode_config(sections), enable_ascend=True, enable_iluvatar=True)


@pytest.mark.parametrize(
    "after",
    [
        {"nvidia": {**NVIDIA, "memoryFactor": 2, "defaultMemory": 100, "gpuCorePolicy": "force"}},
        {"nvidia": NVIDIA, "hygon": {**HYGON, "memoryFactor": 2}},
        {"nvidia": NVIDIA, "hygon": HYGON, "amd": {"resourceCountName": "amd.com/gpu"}},
        {"nvidia": {**NVIDIA, "migProfileAllowlist": [{"models": ["A100"], "profiles": ["1g.5gb"]}]}},
    ],
)
def test_numbers_switches_and_further_vendors_are_followed(after: Any) -> None:
    assert needs_restart(profiles(nvidia=NVIDIA), profiles(**after)) == ""


def test_new_templates_are_followed() -> None:
    other = {**ASCEND, "templates": [{"name": "vir10_3c_32g", "memory": 32768, "aiCore": 10}]}
    assert needs_restart(profiles(vnpus=[ASCEND]), profiles(vnpus=[other])) == ""


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (
            {"nvidia": {**NVIDIA, "resourceCountName": "acme.com/gpu"}},
            "the count resource of vendor NVIDIA changes from nvidia.com/gpu to acme.com/gpu",
        ),
        (
            {"nvidia": {**NVIDIA, "resourceMemoryName": ""}},
            "the memory resource of vendor NVIDIA changes from nvidia.com/gpumem to none",
        ),
        (
            {"nvidia": {**NVIDIA, "resourcePriorityName": "nvidia.com/priority"}},
            "the set of other resources of vendor NVIDIA changes",
        ),
        ({"hygon": HYGON}, "vendor NVIDIA is gone"),
    ],
)
def test_what_others_hold_on_to_takes_a_restart(after: Any, reason: str) -> None:
    problem = needs_restart(profiles(nvidia=NVIDIA), profiles(**after))
    assert reason in problem
    assert "restart of the scheduler pods" in problem


def test_a_rename_in_the_file_is_told_and_stays_told(path: Path) -> None:
    file = loaded(path)
    write(path, nvidia={**NVIDIA, "resourceCountName": "acme.com/gpu"})
    with pytest.raises(SettingsError, match=r"acme\.com/gpu.*restart"):
        file.refreshed()
    assert file.differs
