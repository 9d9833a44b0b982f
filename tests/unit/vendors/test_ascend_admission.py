"""Ascend NPUs at admission and what a container asks (ascend.md §4, §5, §11)."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from vendor_desk import Desk, limits_of, pod

from hami.vendors.config import ConfigError, decode_config, load_profiles
from hami.vendors.engine import container_request, mutate_admission
from hami.vendors.types import AdmissionRejected, Inventory, VendorProfile

SOFT = {"huawei.com/vnpu-mode": "hami-core"}
A, B3, P310, C = "Ascend910A", "Ascend910B3", "Ascend310P", "Ascend910C"
CHIPS = ("Ascend910A", "Ascend910B2", B3, "Ascend910B4-1", "Ascend910B4", P310, C)
B3_AT, C_AT = "vnpus/configs/2", "vnpus/configs/6"


def asking(word: str, count: Any, memory: Any = None, core: Any = None, **annotations: str) -> dict[str, Any]:
    """A pod of one container."""
    name = f"huawei.com/{word}"
    limits = {name: count, f"{name}-memory": memory, f"{name}-core": core}
    return pod({key: text for key, text in limits.items() if text is not None}, annotations=annotations)


def soft(*args: Any) -> dict[str, Any]:
    obj = asking(*args)
    obj["metadata"]["annotations"].update(SOFT)
    return obj


def memory_of(obj: Mapping[str, Any], word: str) -> tuple[str, str]:
    """Memory in limits and requests."""
    resources = obj["spec"]["containers"][0]["resources"]
    name = f"huawei.com/{word}-memory"
    return resources["limits"][name], resources["requests"][name]


@pytest.mark.parametrize(
    ("word", "count", "asked", "got"),
    [
        pytest.param(B3, 1, 10000, 16384, id="1"),
        pytest.param(B3, 1, 16384, 16384, id="2a"),
        pytest.param(B3, 1, 16385, 32768, id="2b"),
        pytest.param(B3, 1, 40000, 65536, id="3"),
        pytest.param(P310, 1, 12289, 21527, id="5a"),
        pytest.param(P310, 1, 22000, 21527, id="5b"),
        pytest.param(A, 1, None, 32768, id="6"),
        pytest.param(A, 2, 17477, 32768, id="8"),
        pytest.param(B3, 1, 0, 16384, id="nothing"),
        pytest.param(B3, 2, 65536, 65536, id="whole"),
    ],
)
def test_memory_is_rounded_to_a_template_or_the_card_in_limits_and_requests(
    lab: Any, word: str, count: int, asked: int | None, got: int
) -> None:
    stored = Desk(lab.vendor(word)).admitted(asking(word, count, asked))
    assert memory_of(stored, word) == (str(got), str(got))


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        pytest.param(asking(B3, 1, 70000), "huawei.com/Ascend910B3-memory 70000 is invalid", id="4"),
        pytest.param(asking(P310, 1, 24577), "huawei.com/Ascend310P-memory 24577 is invalid", id="5c"),
        pytest.param(asking(A, 2, 8738), "vNPU not supported for multiple devices", id="7"),
        pytest.param(
            asking(B3, 1, None, 10),
            "huawei.com/Ascend910B3-core is only supported in hami-core (soft split) mode",
            id="10",
        ),
        pytest.param(
            asking(B3, 1, 4096, 10, **{"huawei.com/vnpu-mode": "HAMI-CORE"}),
            "huawei.com/Ascend910B3-core is only supported in hami-core (soft split) mode",
            id="13",
        ),
        pytest.param(asking(C, 5), "Ascend910C device request must be 1 or 2*n, got 5", id="15"),
        pytest.param(asking(B3, 0), "huawei.com/Ascend910B3 value 0", id="zero"),
        pytest.param(asking(C, 1, 16384), "superPod: false", id="18"),
    ],
)
def test_what_cannot_be_served_is_denied_with_the_reason(lab: Any, obj: dict[str, Any], text: str) -> None:
    word = next(iter(limits_of(obj))).removeprefix("huawei.com/")
    assert text in Desk(lab.vendor(word)).denied(obj)


def test_soft_mode_keeps_the_memory_and_takes_cores(lab: Any) -> None:  # 9
    desk = Desk(lab.vendor(B3))
    assert memory_of(desk.admitted(soft(B3, 2, 20000)), B3) == ("20000", "20000")
    assert memory_of(desk.admitted(soft(B3, 1)), B3) == ("65536", "65536")
    assert desk.numbers(desk.admitted(soft(B3, 1, 20000, 40))) == (1, 20000, 0, 40)


def test_no_cores_are_accepted_in_hard_mode(lab: Any) -> None:  # 11
    assert Desk(lab.vendor(B3)).admitted(asking(B3, 1, None, 0))


def test_a_chip_without_a_core_resource_ignores_cores(lab: Any) -> None:  # 12
    desk = Desk(lab.vendor(B3, {f"{B3_AT}/resourceCoreName": ""}))
    assert desk.numbers(desk.admitted(asking(B3, 1, None, 10))) == (1, 65536, 0, 0)


@pytest.mark.parametrize(("count", "stored"), [pytest.param(1, "2", id="14"), pytest.param(4, "4", id="16")])
def test_a_super_pod_gives_whole_modules(lab: Any, count: int, stored: str) -> None:
    obj = asking(C, count)
    obj["spec"]["containers"][0]["resources"]["requests"] = {f"huawei.com/{C}": str(count)}
    resources = Desk(lab.vendor(C)).admitted(obj)["spec"]["containers"][0]["resources"]
    assert resources["limits"][f"huawei.com/{C}"] == resources["requests"][f"huawei.com/{C}"] == stored


def test_a_die_without_super_pod_may_be_cut(lab: Any) -> None:  # 17
    stored = Desk(lab.vendor(C, {f"{C_AT}/superPod": False})).admitted(asking(C, 1, 16384))
    assert limits_of(stored) == {f"huawei.com/{C}": "1", f"huawei.com/{C}-memory": "16384"}


def test_odd_counts_without_super_pod_are_denied_unless_unsupported_ones_are_allowed(lab: Any) -> None:  # 50
    changes = {f"{C_AT}/superPod": False}
    denied = Desk(lab.vendor(C, changes)).denied(asking(C, 3))
    assert denied == "Ascend910C device request must be 1 or 2*n, got 3"
    desk = Desk(lab.vendor(C, {**changes, "vnpus/allowUnsupported": True}))
    desk.admitted(asking(C, 3))
    cards = [
        {"id": f"d{n}", "index": n, "count": 4, "devmem": 65536, "devcore": 20, "type": C, "health": True}
        for n in range(6)
    ]
    desk.registered("n1", *cards, capacity={f"huawei.com/{C}": 24})
    assert desk.refused(asking(C, 3)) == "4/3 AllocatedCardsInsufficientRequest"


# --- environment and runtime class ------------------------------------------------------------------------


def all_chips(lab: Any) -> tuple[VendorProfile, ...]:
    changes = {f"vnpus/configs/{at}/overwriteEnv": True for at in range(len(CHIPS))}
    return load_profiles(decode_config(lab.config(changes)), enable_ascend=True)


def env_after(lab: Any, obj: dict[str, Any]) -> list[Any]:
    (container,) = obj["spec"]["containers"]
    for profile in all_chips(lab):
        mutate_admission(profile, container, obj, lab.no_inventory)
    found: list[Any] = container.get("env", [])
    return found


def test_a_container_without_npus_is_shown_none_once(lab: Any) -> None:  # 19
    hidden = {"name": "ASCEND_VISIBLE_DEVICES", "value": ""}
    obj = pod({"cpu": 1})
    assert env_after(lab, obj) == [hidden]
    assert env_after(lab, obj) == [hidden]
    own = {"name": "ASCEND_VISIBLE_DEVICES", "value": "0"}
    assert env_after(lab, pod({"name": "a", "env": [own]})) == [own]


def test_a_container_with_an_npu_keeps_its_environment(lab: Any) -> None:  # 20
    assert env_after(lab, asking("Ascend910B4", 1)) == []


def test_a_runtime_class_of_the_pod_stays(lab: Any) -> None:  # 21
    desk = Desk(lab.vendor(B3, {f"{B3_AT}/runtimeClassName": "ascend"}))
    obj = asking(B3, 1)
    assert desk.admitted(obj)["spec"]["runtimeClassName"] == "ascend"
    obj["spec"]["runtimeClassName"] = "custom-rc"
    assert desk.admitted(obj)["spec"]["runtimeClassName"] == "custom-rc"


def test_the_two_flags_admit_their_sections(lab: Any) -> None:
    config = decode_config(lab.config())
    words = [[p.common_word for p in load_profiles(config, enable_ascend=on)] for on in (False, True)]
    assert [word for word in words[1] if word not in words[0]] == list(CHIPS)
    assert words[1][-len(CHIPS) :] == list(CHIPS)


# --- requests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("obj", "name"),
    [
        pytest.param(asking(B3, 1, "16Gi"), "for 16Gi of memory write 16384", id="22"),
        pytest.param(asking(B3, 1, "-1m"), "-memory value -1m", id="23a"),
        pytest.param(asking(B3, 1, -100), "-memory value -100", id="23b"),
        pytest.param(soft(B3, 1, 4096, -1), "-core value -1", id="23c"),
        pytest.param(asking(B3, 2200000000), "huawei.com/Ascend910B3 value 2200000000", id="23d"),
    ],
)
def test_an_invalid_request_says_what_is_wrong(lab: Any, obj: dict[str, Any], name: str) -> None:
    with pytest.raises(AdmissionRejected, match=name):
        container_request(lab.vendor(B3), obj["spec"]["containers"][0], obj)


def test_memory_is_multiplied_by_the_factor(lab: Any) -> None:  # 24, 25
    profile = lab.vendor(B3, {f"{B3_AT}/memoryFactor": 10})
    assert Desk(profile).numbers(asking(B3, 1, 128)) == (1, 1280, 0, 0)
    too_much = asking(B3, 1, 300000000)
    with pytest.raises(AdmissionRejected, match="300000000"):
        container_request(profile, too_much["spec"]["containers"][0], too_much)


def test_a_pod_that_bypassed_the_webhook_asks_for_whole_cards(lab: Any) -> None:  # 26
    assert Desk(lab.vendor(B3)).numbers(asking(B3, 2)) == (2, 0, 100, 0)


def test_a_factor_is_taken_out_after_rounding(lab: Any) -> None:  # 47
    desk = Desk(lab.vendor(B3, {f"{B3_AT}/memoryFactor": 1024}))
    stored = desk.admitted(asking(B3, 1, 20))
    assert memory_of(stored, B3) == ("32", "32")
    assert desk.numbers(stored) == (1, 32768, 0, 0)
    assert memory_of(desk.admitted(stored), B3) == ("32", "32")


def test_a_whole_card_counts_against_the_quota_at_admission(lab: Any) -> None:  # 49
    desk = Desk(lab.vendor(B3))
    desk.quota({"huawei.com/Ascend910B3-memory": 60000})
    assert "exceeding resource quota" in desk.denied(asking(B3, 1))
    desk.admitted(asking(B3, 1, 20000))


# --- configuration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("templates/0/name", "", "vnpus.configs[2].templates[0].name is empty"),
        ("templates/1/memory", 65536, "vnpus.configs[2].templates[1].memory is 65536"),
        ("templates/1/memory", 0, "vnpus.configs[2].templates[1].memory is 0"),
        ("memoryCapacity", 65535, "vnpus.configs[2].memoryCapacity is 65535"),
        ("memoryFactor", 16385, "vnpus.configs[2].memoryFactor is 16385"),
        ("commonWord", "", "vnpus.configs[2].commonWord is empty"),
        ("aiCore", "20", "vnpus.configs[2].aiCore must be an integer"),
    ],
)
def test_a_chip_that_cannot_work_is_refused_with_its_path(
    lab: Any, path: str, value: Any, problem: str
) -> None:
    document = lab.config()
    target: Any = document["vnpus"]["configs"][2]
    *parents, last = path.split("/")
    for part in parents:
        target = target[int(part)] if part.isdigit() else target[part]
    target[last] = value
    with pytest.raises(ConfigError) as refused:
        decode_config(document)
    assert any(problem in text for text in refused.value.problems), refused.value.problems


def test_a_node_whose_plugin_has_another_config_is_told(lab: Any) -> None:
    profile = lab.vendor(B3)
    card = {"id": "d0", "count": 8, "devmem": 65536, "devcore": 20, "type": B3, "health": True}
    node = lab.node(annotations={profile.rules.register.key: json.dumps([card])})
    found: Inventory = profile.hooks.discover(node, profile)
    assert len(found.devices) == 1
    assert "65536 MiB and 8 slots" in found.warnings[0]
