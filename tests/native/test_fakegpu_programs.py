"""How programs reach the simulated driver, which cards they see, what gpuprog and fakegpud say."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakegpu_harness import Cards

PATHS = [("gpuprog", "symbol"), ("gpuprog", "dlsym"), ("gpuprog", "procaddr"), ("gpuprog-linked", "symbol")]


@pytest.fixture
def cards(tmp_path: Path) -> Iterator[Cards]:
    made = Cards(tmp_path / "s", devices=4, model="H100-80GB,T4", uuid_seed="test")
    yield made
    made.close()


def uuids(cards: Cards, **settings: object) -> list[str]:
    return [line["uuid"] for line in cards.run("info", **settings)[1:]]


@pytest.mark.parametrize(("program", "via"), PATHS)
def test_the_driver_is_reached_in_every_way(cards: Cards, program: str, via: str) -> None:
    lines = cards.run("--via", via, "info", program=program)
    assert lines[0]["devices"] == 4
    assert [line["name"] for line in lines[1:]] == [
        "NVIDIA H100 80GB HBM3",
        "Tesla T4",
        "Tesla T4",
        "Tesla T4",
    ]
    assert cards.run("--via", via, "alloc", "64", program=program)[-1]["result"] == 0


def test_uuids_come_from_the_seed_and_differ_by_card(cards: Cards, tmp_path: Path) -> None:
    again = Cards(tmp_path / "t", devices=4, model="H100-80GB,T4", uuid_seed="test")
    other = Cards(tmp_path / "u", devices=4, uuid_seed="other")
    assert uuids(cards) == uuids(again)
    assert len(set(uuids(cards)) | set(uuids(other))) == 8


def test_given_uuids_are_used(tmp_path: Path) -> None:
    given = "GPU-03f69c50-207a-2038-9b45-23cac89cb67a"
    assert uuids(Cards(tmp_path / "s", devices=1, uuids=given)) == [given]


def test_a_container_sees_the_cards_it_was_given_in_the_drivers_order(cards: Cards) -> None:
    every = uuids(cards)
    wanted = f"{every[3]},{every[1]}"
    assert uuids(cards, NVIDIA_VISIBLE_DEVICES=wanted) == [every[1], every[3]]
    assert uuids(cards, visible_devices="2", NVIDIA_VISIBLE_DEVICES="all") == [every[2]]
    assert cards.run("info", NVIDIA_VISIBLE_DEVICES="none")[0]["result"] == 100


def test_cuda_visible_devices_orders_and_ends_at_the_first_bad_entry(cards: Cards) -> None:
    every = uuids(cards)
    assert uuids(cards, CUDA_VISIBLE_DEVICES="2,0,9,1") == [every[2], every[0]]
    assert uuids(cards, CUDA_VISIBLE_DEVICES=every[1][:12]) == [every[1]]


def test_the_fastest_card_comes_first_unless_the_order_is_by_bus(tmp_path: Path) -> None:
    mixed = Cards(tmp_path / "s", devices=2, model="T4,H100-80GB")
    names = [line["name"] for line in mixed.run("info")[1:]]
    by_bus = [line["name"] for line in mixed.run("info", CUDA_DEVICE_ORDER="PCI_BUS_ID")[1:]]
    assert names == by_bus[::-1] == ["NVIDIA H100 80GB HBM3", "Tesla T4"]


def test_an_injected_fault_hits_the_call_it_names(cards: Cards) -> None:
    faults = "cuMemAlloc_v2:1=719"
    assert cards.run("alloc", "1", faults=faults)[0]["result"] == 719
    assert cards.run("alloc", "1", faults="cuMemAlloc_v2:2=719")[0]["result"] == 0


def test_the_call_log_names_every_call(cards: Cards, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    cards.run("alloc", "1", call_log=log)
    names = [line.split()[3] for line in log.read_text().splitlines()]
    assert [n for n in names if n.startswith("cuMem")] == ["cuMemAlloc_v2", "cuMemFree_v2"]
    assert names[0] == "cuInit"


def test_a_worker_reports_until_it_is_told_to_stop(cards: Cards) -> None:
    worker = cards.start("worker", "--mib", "64", "--kernel-us", "100", "--heartbeat", "0")
    assert cards.first(worker)["bytes"] == 64 * 1024 * 1024
    assert cards.first(worker)["call"] == "heartbeat"
    worker.send_signal(signal.SIGTERM)
    assert worker.stdout is not None
    assert '"call": "worker", "result": 0' in worker.stdout.read()
    assert worker.wait() == 0


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_goes_to_standard_output(cards: Cards, option: str) -> None:
    done = cards.attempt(option)
    assert (done.returncode, done.stderr) == (0, "")
    assert "worker --mib" in done.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "no command"),
        (("fly",), "unknown command"),
        (("alloc", "much"), "needs a number"),
        (("--via", "magic", "info"), "--via takes"),
        (("launch", "--count"), "needs a number"),
    ],
)
def test_wrong_usage_is_explained(cards: Cards, words: tuple[str, ...], text: str) -> None:
    done = cards.attempt(*words)
    assert done.returncode == 2
    assert text in done.stderr
    assert "usage:" in done.stderr


def test_a_missing_driver_is_explained(cards: Cards, tmp_path: Path) -> None:
    done = cards.attempt("info", LD_LIBRARY_PATH=tmp_path)
    assert done.returncode == 3
    assert "libcuda.so.1" in done.stderr
    assert "LD_LIBRARY_PATH" in done.stderr


def test_an_unusable_state_path_is_explained_and_cuinit_fails(cards: Cards, tmp_path: Path) -> None:
    done = cards.attempt("info", state=tmp_path / "no" / "such")
    assert '"result": 304' in done.stdout
    assert "set FAKEGPU_STATE" in done.stderr


def test_settings_can_stand_in_a_file_of_the_state_path(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("FAKEGPU_DEVICES=3\nFAKEGPU_MODEL=H200\n")
    lines = Cards(tmp_path).run("info")
    assert [line["name"] for line in lines[1:]] == ["NVIDIA H200"] * 3


@pytest.mark.parametrize(("library", "prefix"), [("libcuda.so.1", "cu"), ("libnvidia-ml.so.1", "nvml")])
def test_only_driver_functions_are_exported(cards: Cards, library: str, prefix: str) -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(cards.programs / library)],
        capture_output=True,
        text=True,
        check=True,
    )
    names = [line.split()[-1] for line in listing.stdout.splitlines()]
    assert len(names) > 80
    assert [name for name in names if not name.startswith(prefix)] == []


def test_functions_that_are_not_modelled_exist_and_say_so(cards: Cards) -> None:
    result = cards.python(
        """
        import ctypes, json
        cuda, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
        codes = [cuda.cuIpcOpenMemHandle_v2(), nvml.nvmlDeviceGetFanSpeed_v2()]
        cuda.cuInit(0), nvml.nvmlInit_v2()
        print(json.dumps([*codes, cuda.cuIpcOpenMemHandle_v2(), nvml.nvmlDeviceGetFanSpeed_v2()]))
        """
    )
    assert result == [3, 1, 801, 3]
