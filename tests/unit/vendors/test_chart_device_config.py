"""The device config that our chart renders: all sections in vendor order; faulty ones are refused by path."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hami.vendors.config import ConfigError, decode_config, load_profiles, parse_config
from hami.vendors.schema import DeviceConfig

GOLDEN = Path(__file__).parents[2] / "chart" / "golden" / "default.yaml"
ORDER = [
    "NVIDIA",
    "MLU",
    "DCU",
    "GCU",
    "Enflame",
    "Mthreads",
    "Metax-GPU",
    "Metax-SGPU",
    "kunlun",
    "XPU",
    "AWSNeuron",
    "AMD",
    "Vastai",
    "Biren",
    "Ascend910A",
    "Ascend910B2",
    "Ascend910B3",
    "Ascend910B4-1",
    "Ascend910B4",
    "Ascend310P",
    "Ascend910C",
    "MR-V100",
    "MR-V50",
    "BI-V150",
    "BI-V100",
]
"""README 2.1, chips as the chart lists them."""


def rendered() -> str:
    """The file in the ConfigMap of the chart's default values."""
    for document in yaml.safe_load_all(GOLDEN.read_text("utf-8")):
        if document and document["kind"] == "ConfigMap" and "device-config.yaml" in document["data"]:
            text: str = document["data"]["device-config.yaml"]
            return text
    raise LookupError(f"{GOLDEN} has no device config")


def without_allowlist(config: DeviceConfig) -> DeviceConfig:
    return replace(config, nvidia=replace(config.nvidia, mig_allowlist=()))


def allowed(config: DeviceConfig) -> set[tuple[str, str]]:
    """Model and profile of everything that may be made of MIG cards."""
    entries = config.nvidia.mig_allowlist
    return {(model, profile) for entry in entries for model in entry.models for profile in entry.profiles}


def test_the_rendered_config_is_that_of_hami_s_chart(lab: Any) -> None:
    ours, theirs = parse_config(rendered()), decode_config(lab.config())
    assert without_allowlist(ours) == without_allowlist(theirs)


def test_every_mig_profile_of_hami_s_chart_is_allowed_and_real_names_of_cards_too(lab: Any) -> None:
    ours, theirs = allowed(parse_config(rendered())), allowed(decode_config(lab.config()))
    assert theirs < ours
    assert ("H100 80GB HBM3", "4g.40gb") in ours - theirs


def test_profiles_come_in_vendor_order() -> None:
    config = parse_config(rendered())
    words = [p.common_word for p in load_profiles(config, enable_ascend=True, enable_iluvatar=True)]
    assert words == ORDER
    plain = [p.common_word for p in load_profiles(config)]
    assert plain == [word for word in words if not word.startswith(("Ascend", "MR-", "BI-"))]


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("nvidia/memoryFactor", "1", "nvidia.memoryFactor must be an integer, not '1'"),
        ("cambricon/resourceCountName", 7, "cambricon.resourceCountName must be text, not 7"),
        ("hygon/memoryFactor", -1, "hygon.memoryFactor is -1, it must not be negative"),
        ("enflame/resourceNameGCU", ["x"], "enflame.resourceNameGCU must be text, not a list"),
        ("mthreads/resourceCoreName", True, "mthreads.resourceCoreName must be text, not True"),
        ("metax/sgpuTopologyAware", "no", "metax.sgpuTopologyAware must be true or false, not 'no'"),
        ("kunlun/strictCounts", 1, "kunlun.strictCounts must be true or false, not 1"),
        ("kunlun/multiContainerIdx", "all", "kunlun.multiContainerIdx is 'all', it must be concat or last"),
        ("awsneuron", "x", "awsneuron must be a mapping, not 'x'"),
        ("amd/resourceMemoryName", {}, "amd.resourceMemoryName must be text, not a mapping"),
        ("vastai/resourceCountName", 1.5, "vastai.resourceCountName must be text, not 1.5"),
        ("biren/resourceCountName", "nvidia.com/gpu", "is used by both nvidia and biren"),
        ("vnpus/configs/5/aiCore", 2**31, "vnpus.configs[5].aiCore is 2147483648, more than 2147483647"),
        ("vnpus/hamiCoreMemoryScope", "node", "vnpus.hamiCoreMemoryScope is 'node', it must be perCard or"),
        ("iluvatars/1", "MR-V50", "iluvatars[1] must be a mapping, not 'MR-V50'"),
        ("iluvatars/2/commonWord", "MR-V100", "is used by both iluvatars[0] and iluvatars[2]"),
    ],
)
def test_a_faulty_section_is_refused_with_its_path_and_what_was_expected(
    path: str, value: Any, problem: str
) -> None:
    document = copy.deepcopy(yaml.safe_load(rendered()))
    *parents, last = path.split("/")
    target: Any = document
    for part in parents:
        target = target[int(part)] if isinstance(target, list) else target[part]
    target[int(last) if isinstance(target, list) else last] = value
    with pytest.raises(ConfigError) as refused:
        parse_config(yaml.safe_dump(document))
    assert [text for text in refused.value.problems if problem in text], refused.value.problems
    assert str(refused.value).startswith("device config: ")
