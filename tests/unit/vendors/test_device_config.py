"""The device config file (scheduler.md §3, nvidia-scheduling.md §3; README cases 37-39)."""

from typing import Any

import pytest
import yaml

from hami.vendors.config import BUILTIN, ConfigError, decode_config, load_profiles, parse_config

NVIDIA = {"nvidia": {"resourceCountName": "nvidia.com/gpu"}}


def problems(document: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as refused:
        decode_config(document)
    return refused.value.problems


def test_every_section_is_read_with_its_types() -> None:
    config = parse_config(
        """
        nvidia:
          resourceCountName: nvidia.com/gpu
          memoryFactor: 1024
          overwriteEnv: true
          libCudaLogLevel: 3
          deviceMemoryScaling: 1.5
          deviceCoreScaling: 2
          migProfileAllowlist: [{models: [A30], profiles: [1g.6gb, 2g.12gb]}]
        cambricon: {resourceCountName: cambricon.com/vmlu, allowUnsupported: true}
        hygon: {memoryFactor: 2}
        metax: {resourceVCountName: metax-tech.com/sgpu, sgpuTopologyAware: true}
        enflame: {resourceNameGCU: enflame.com/gcu}
        kunlun: {resourceVMemoryName: kunlunxin.com/vxpu-memory}
        awsneuron: {resourceCoreName: aws.amazon.com/neuroncore}
        amd: {resourceMemoryName: amd.com/gpumem}
        vastai: {resourceCountName: vastaitech.com/va}
        biren: {resourceCountName: birentech.com/gpu}
        mthreads: {resourceCoreName: mthreads.com/sgpu-core}
        iluvatars: [{commonWord: MR-V100, resourceCountName: iluvatar.ai/MR-V100-vgpu}]
        vnpus:
          hamiVnpuCore: true
          configs:
            - commonWord: Ascend910B3
              resourceName: huawei.com/Ascend910B3
              memoryAllocatable: 65536
              memoryCapacity: 65536
              templates: [{name: vir05_1c_16g, memory: 16384, aiCore: 5}]
        """
    )
    assert config.nvidia.memory_factor == 1024
    assert config.nvidia.cuda_log_level == "3"
    assert (config.nvidia.memory_scaling, config.nvidia.core_scaling) == (1.5, 2.0)
    assert config.nvidia.mig_allowlist[0].profiles == ("1g.6gb", "2g.12gb")
    assert config.cambricon.allow_unsupported
    assert config.hygon.memory_factor == 2
    assert config.metax.topology_aware
    assert config.enflame.drs_name == "enflame.com/drs-gcu"
    assert config.iluvatars[0].common_word == "MR-V100"
    assert config.vnpus.soft_mode
    assert config.vnpus.chips[0].templates[0].memory == 16384
    assert config.warnings == ()


def test_ascend_chips_may_stand_in_a_bare_list() -> None:
    config = decode_config({"vnpus": [{"commonWord": "Ascend310P", "resourceName": "huawei.com/Ascend310P"}]})
    assert [chip.common_word for chip in config.vnpus.chips] == ["Ascend310P"]
    assert not config.vnpus.soft_mode


def test_unknown_sections_and_the_old_geometries_are_ignored_with_a_warning() -> None:  # 38
    section = {**NVIDIA["nvidia"], "knownMigGeometries": [], "futureKey": {"a": 1}}
    config = decode_config({"nvidia": section, "quantum": {"x": 1}})
    assert config.nvidia.resource_count_name == "nvidia.com/gpu"
    assert len(config.warnings) == 2
    assert "'quantum'" in config.warnings[0]
    assert "knownMigGeometries" in config.warnings[1]


@pytest.mark.parametrize(
    "document", [None, {}, {"nvidia": None}, {"nvidia": {}, "vnpus": []}, {"nvidia": {"x": 1}}]
)
def test_a_file_in_which_every_section_is_empty_is_refused(document: object) -> None:  # 39
    assert problems(document) == ("all configurations are empty",)


def test_two_adapters_with_one_common_word_are_refused_with_both_positions() -> None:  # 37
    chip = {"commonWord": "Ascend910B4", "resourceName": "huawei.com/Ascend910B4"}
    other = {"commonWord": "Ascend910B4", "resourceName": "huawei.com/other"}
    (problem,) = problems({"vnpus": {"configs": [chip, other]}})
    assert "'Ascend910B4'" in problem
    assert "vnpus.configs[0]" in problem
    assert "vnpus.configs[1]" in problem


def test_two_adapters_with_one_count_resource_are_refused() -> None:
    (problem,) = problems({**NVIDIA, "amd": {"resourceCountName": "nvidia.com/gpu"}})
    assert problem == "count resource 'nvidia.com/gpu' is used by both nvidia and amd"


def test_all_problems_are_told_at_once_with_their_key_paths() -> None:
    document = {
        "nvidia": {
            "resourceCountName": 5,
            "defaultCores": -1,
            "defaultMemory": 2**31,
            "overwriteEnv": "yes",
            "gpuCorePolicy": "sometimes",
            "deviceMemoryScaling": "1",
            "memoryFactor": 1.5,
            "migProfileAllowlist": [{"models": ["A100"], "profiles": []}, {"profiles": ["5gb", "1g.5gb+me"]}],
        },
        "iluvatars": {"chipName": "x"},
        "hygon": [],
    }
    found = problems(document)
    for path in (
        "nvidia.resourceCountName",
        "nvidia.defaultCores",
        "nvidia.defaultMemory",
        "nvidia.overwriteEnv",
        "nvidia.gpuCorePolicy",
        "nvidia.deviceMemoryScaling",
        "nvidia.memoryFactor",
        "nvidia.migProfileAllowlist[0].profiles",  # M16
        "nvidia.migProfileAllowlist[1].models",
        "nvidia.migProfileAllowlist[1].profiles[0]",  # M17
        "nvidia.migProfileAllowlist[1].profiles[1]",
        "iluvatars",
        "hygon",
    ):
        assert sum(problem.startswith(path) for problem in found) == 1, path
    assert len(found) == 13


@pytest.mark.parametrize(
    "profile", [pytest.param("5gb", id="M17"), "g.5gb", "1x.5gb", "1g", "1g.", "1g.5gb.gfx", "-1g.5gb"]
)
def test_a_profile_that_does_not_name_its_slices_is_refused(profile: str) -> None:
    allowlist = [{"models": ["A100"], "profiles": [profile]}]
    (problem,) = problems({"nvidia": {**NVIDIA["nvidia"], "migProfileAllowlist": allowlist}})
    assert problem.startswith("nvidia.migProfileAllowlist[0].profiles[0]")


def test_a_model_without_profiles_is_refused() -> None:  # M16
    allowlist = [{"models": ["A100"], "profiles": []}]
    (problem,) = problems({"nvidia": {**NVIDIA["nvidia"], "migProfileAllowlist": allowlist}})
    assert problem.startswith("nvidia.migProfileAllowlist[0].profiles")


@pytest.mark.parametrize(
    "text", ["[1", "- a", "text", "a: &x [*x]", "!!python/object:os.system x", b"\xff\xfe"]
)
def test_anything_but_a_mapping_is_refused(text: str | bytes) -> None:
    with pytest.raises(ConfigError):
        parse_config(text)


def test_an_oversized_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="over the limit"):
        parse_config("#" * (1024 * 1024 + 1))


def test_yaml_and_object_give_the_same_config() -> None:
    assert parse_config(yaml.safe_dump(NVIDIA)) == decode_config(NVIDIA)


def test_a_vendor_without_a_count_name_is_not_built() -> None:
    words = [
        profile.common_word for profile in load_profiles(decode_config({"nvidia": {"overwriteEnv": True}}))
    ]
    assert words == ["Enflame"]  # slices have names of their own to fall back to


def test_the_builtin_config_knows_the_five_resources_and_one_card_by_default() -> None:
    profile = load_profiles(BUILTIN)[0]
    assert set(profile.names.all()) == {
        "nvidia.com/gpu",
        "nvidia.com/gpumem",
        "nvidia.com/gpumem-percentage",
        "nvidia.com/gpucores",
        "nvidia.com/priority",
    }
    assert BUILTIN.nvidia.default_count == 1
    assert profile.names.memory_factor == 1


def test_a_factor_of_zero_acts_as_one(lab: Any) -> None:
    assert lab.nvidia(memoryFactor=0).names.memory_factor == 1
