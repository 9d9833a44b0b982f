"""Admission and requests of NVIDIA containers (nvidia-scheduling.md §15.1, A1-A19)."""

import copy
from typing import Any

import pytest

from hami.vendors.engine import container_request
from hami.vendors.types import AdmissionRejected


def limits_of(pod: dict[str, Any], number: int = 0) -> dict[str, str]:
    limits: dict[str, str] = pod["spec"]["containers"][number].get("resources", {}).get("limits", {})
    return limits


def env_of(pod: dict[str, Any], number: int = 0) -> list[tuple[str, str]]:
    return [(entry["name"], entry["value"]) for entry in pod["spec"]["containers"][number].get("env", [])]


@pytest.mark.parametrize(
    ("asked", "section", "added", "numbers"),
    [
        pytest.param({"gpu": 1}, {}, {"gpucores": "100"}, (1, 0, 100, 100), id="A1"),
        pytest.param({"gpu": 2, "gpumem": 3000}, {}, {}, (2, 3000, 101, 0), id="A2"),
        pytest.param({"gpumem": 3000}, {}, {"gpu": "1"}, (1, 3000, 101, 0), id="A3"),
        pytest.param({"gpucores": 20}, {}, {"gpu": "1"}, (1, 0, 100, 20), id="A5"),
        pytest.param(
            {"gpu": 1, "gpumem-percentage": 100}, {}, {"gpucores": "100"}, (1, 0, 100, 100), id="A6"
        ),
        pytest.param({"gpu": 1, "gpumem-percentage": 40}, {}, {}, (1, 0, 40, 0), id="A7"),
        pytest.param({"gpu": 1, "gpumem-percentage": 0}, {}, {}, (1, 0, 100, 0), id="A10"),
        pytest.param(
            {"gpu": 1, "gpumem-percentage": 0}, {"defaultMemory": 2048}, {}, (1, 2048, 101, 0), id="A11"
        ),
        pytest.param({"gpu": 1, "gpumem-percentage": 60, "gpumem": 500}, {}, {}, (1, 500, 60, 0), id="A12"),
        pytest.param({"gpu": 1, "gpumem": 6}, {"memoryFactor": 1024}, {}, (1, 6144, 101, 0), id="A13"),
        pytest.param(
            {"gpu": 1, "gpumem-percentage": 0},
            {"defaultMemory": 5, "memoryFactor": 1024},
            {},
            (1, 5, 101, 0),
            id="default memory is MiB whatever the factor",
        ),
        pytest.param({"gpu": 1, "gpumem": "1k"}, {}, {}, (1, 1000, 101, 0), id="suffix"),
        pytest.param({"gpu": "16.0", "gpumem": 1}, {}, {}, (16, 1, 101, 0), id="canonicalised"),
        pytest.param({"gpu": 1, "gpumem": 1}, {"defaultCores": 30}, {}, (1, 1, 101, 30), id="default cores"),
        pytest.param({"gpu": 1, "gpumem": 0}, {}, {}, (1, 0, 100, 0), id="zero memory is the whole card"),
    ],
)
def test_a_container_gets_its_defaults_and_its_request(
    lab: Any,
    asked: dict[str, Any],
    section: dict[str, Any],
    added: dict[str, str],
    numbers: tuple[int, int, int, int],
) -> None:
    profile, pod = lab.nvidia(**section), lab.pod(asked)
    before = dict(limits_of(pod))
    assert lab.admit(profile, pod)
    assert limits_of(pod) == before | {f"nvidia.com/{key}": value for key, value in added.items()}
    assert lab.numbers(profile, pod) == [numbers]


def test_cores_alone_are_no_request_when_the_count_has_no_default(lab: Any) -> None:  # A4
    profile, pod = lab.nvidia(defaultGPUNum=0), lab.pod({"gpucores": 20})
    assert not lab.admit(profile, pod)
    assert lab.numbers(profile, pod) == [None]


@pytest.mark.parametrize("percent", [pytest.param(101, id="A8"), pytest.param(-1, id="A9"), "1.5", "400Gi"])
def test_a_percentage_outside_0_to_100_is_denied(lab: Any, percent: object) -> None:
    pod = lab.pod({"gpu": 1, "gpumem-percentage": percent})
    with pytest.raises(AdmissionRejected) as denied:
        lab.admit(lab.nvidia(), pod)
    assert str(denied.value) == (
        f"invalid nvidia.com/gpumem-percentage value {percent} in container app0: "
        "must be an integer between 0 and 100"
    )


def test_an_old_percentage_over_100_is_a_whole_card_for_the_filter(lab: Any) -> None:
    assert lab.numbers(lab.nvidia(), lab.pod({"gpu": 1, "gpumem-percentage": 300})) == [(1, 0, 100, 0)]


@pytest.mark.parametrize(
    ("asked", "section", "words"),
    [
        pytest.param({"gpu": 1, "gpumem": 2097152}, {"memoryFactor": 1024}, ["1024 MiB"], id="A14"),
        pytest.param({"gpu": 1, "gpumem": "4Gi"}, {}, ["MiB", "write 4096"], id="A15"),
        pytest.param({"gpu": 1, "gpumem": "16.0Gi"}, {}, ["MiB", "write 16384"], id="vendors 33"),
        pytest.param({"gpu": 1, "gpumem": -1}, {}, ["gpumem"], id="negative memory"),
        pytest.param({"gpu": 1, "gpumem": "500m"}, {}, ["gpumem"], id="fraction of memory"),
        pytest.param({"gpu": 0}, {}, ["nvidia.com/gpu"], id="no card"),
        pytest.param({"gpu": 2**31}, {}, ["nvidia.com/gpu"], id="count over int32"),
        pytest.param({"gpu": "x"}, {}, ["nvidia.com/gpu"], id="no quantity"),
        pytest.param({"gpu": 1, "gpucores": -1}, {}, ["gpucores"], id="negative cores"),
        pytest.param({"gpu": 1, "gpucores": "500m"}, {}, ["gpucores"], id="fraction of cores"),
    ],
)
def test_an_invalid_request_is_denied_and_fails_the_filter(
    lab: Any, asked: dict[str, Any], section: dict[str, Any], words: list[str]
) -> None:
    profile, pod = lab.nvidia(**section), lab.pod(asked)
    with pytest.raises(AdmissionRejected) as denied:
        lab.admit(profile, pod)
    assert all(word in str(denied.value) for word in words)
    with pytest.raises(AdmissionRejected):
        container_request(profile, pod["spec"]["containers"][0], pod)


def test_a_priority_limit_becomes_an_environment_variable(lab: Any) -> None:  # A16
    pod = lab.pod({"gpu": 1, "priority": 1})
    assert lab.admit(lab.nvidia(), pod)
    assert env_of(pod) == [("CUDA_TASK_PRIORITY", "1")]


def test_a_priority_alone_is_no_device_request(lab: Any) -> None:
    pod = lab.pod({"priority": 0})
    assert not lab.admit(lab.nvidia(), pod)
    assert env_of(pod) == [("CUDA_TASK_PRIORITY", "0")]


def test_the_core_policy_is_written_for_gpu_containers_only(lab: Any) -> None:  # A17
    pod = lab.pod({"gpu": 1}, {})
    lab.admit(lab.nvidia(gpuCorePolicy="force"), pod)
    assert env_of(pod, 0) == [("GPU_CORE_UTILIZATION_POLICY", "force")]
    assert env_of(pod, 1) == []


def test_a_users_own_variable_is_never_overridden(lab: Any) -> None:
    own = [{"name": "GPU_CORE_UTILIZATION_POLICY", "value": "disable"}]
    pod = lab.pod({"resources": {"limits": {"nvidia.com/gpu": "1"}}, "env": own})
    lab.admit(lab.nvidia(gpuCorePolicy="force"), pod)
    assert env_of(pod) == [("GPU_CORE_UTILIZATION_POLICY", "disable")]


def test_overwrite_env_hides_the_gpus_from_other_containers(lab: Any) -> None:  # A18
    own = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    pod = lab.pod({"name": "x", "env": own}, {"gpu": 1})
    lab.admit(lab.nvidia(overwriteEnv=True, runtimeClassName="nvidia"), pod)
    assert env_of(pod, 0) == [("NVIDIA_VISIBLE_DEVICES", "all"), ("NVIDIA_VISIBLE_DEVICES", "none")]
    assert env_of(pod, 1) == []


def test_a_pod_without_gpu_keeps_its_runtime_class(lab: Any) -> None:
    pod = lab.pod({})
    assert not lab.admit(lab.nvidia(overwriteEnv=True, runtimeClassName="nvidia"), pod)
    assert "runtimeClassName" not in pod["spec"]


@pytest.mark.parametrize(("own", "expected"), [(None, "nvidia"), pytest.param("runsc", "runsc", id="A19")])
def test_the_runtime_class_is_set_where_the_pod_has_none(lab: Any, own: str | None, expected: str) -> None:
    pod = lab.pod({"gpu": 1})
    if own:
        pod["spec"]["runtimeClassName"] = own
    lab.admit(lab.nvidia(runtimeClassName="nvidia"), pod)
    assert pod["spec"]["runtimeClassName"] == expected


def test_a_count_among_the_requests_only_still_gets_the_exclusive_default(lab: Any) -> None:
    pod = lab.pod({"resources": {"requests": {"nvidia.com/gpu": "1"}}})
    assert lab.admit(lab.nvidia(), pod)
    once = copy.deepcopy(pod)
    assert limits_of(pod) == {"nvidia.com/gpucores": "100"}
    lab.admit(lab.nvidia(), pod)
    assert pod == once


def test_cores_of_the_user_in_limits_bring_a_limit_of_the_count(lab: Any) -> None:
    profile, pod = lab.nvidia(), lab.pod({"gpucores": 100})
    pod["spec"]["containers"][0]["resources"]["requests"] = {
        "nvidia.com/gpu": "1",
        "nvidia.com/gpucores": "100",
    }
    for _ in range(2):
        assert lab.admit(profile, pod)
        assert limits_of(pod) == {"nvidia.com/gpu": "1", "nvidia.com/gpucores": "100"}


def test_the_filter_reads_requests_where_limits_are_absent(lab: Any) -> None:
    given = {"nvidia.com/gpu": "2", "nvidia.com/gpumem": "96", "nvidia.com/gpucores": "32"}
    pod = lab.pod({"resources": {"requests": given}})
    assert lab.numbers(lab.nvidia(), pod) == [(2, 96, 101, 32)]


def test_a_profile_without_a_count_name_is_not_built(lab: Any) -> None:
    assert lab.nvidia(resourceCountName="").common_word != "NVIDIA"
