"""The NVML session on a driver whose answers the test chooses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from hami.node import nvml
from hami.node.errors import NvmlError, NvmlUnsupportedError
from hami.node.nvml import GpuIdentity, NvLink, NvmlSession, ProcessUse, XidEvent, resolve_library

UUIDS = [f"GPU-0000000{index}-2222-3333-4444-555555555555" for index in range(2)]


class Driver:
    """Stands in for the module ``pynvml``: its constants, and functions on two cards that fail on request."""

    def __init__(self) -> None:
        self.failures: dict[tuple[str, int | None], int] = {}
        self.users = 0
        self.open_sets = 0
        self.registered: list[tuple[int, int]] = []
        self.events: list[Any] = []
        self.samples: list[Any] = []
        self.links: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def fail(self, function: str, code: int, card: int | None = None) -> None:
        self.failures[function, card] = code

    def _check(self, function: str, card: int | None = None) -> None:
        for key in ((function, card), (function, None)):
            if key in self.failures:
                raise pynvml.NVMLError(self.failures[key])

    def nvmlInit(self) -> None:
        self._check("nvmlInit")
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1
        self._check("nvmlShutdown")

    def nvmlDeviceGetCount(self) -> int:
        self._check("nvmlDeviceGetCount")
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._check("nvmlDeviceGetHandleByIndex", index)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> int:
        index = UUIDS.index(uuid.decode())
        self._check("nvmlDeviceGetHandleByUUID", index)
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        self._check("nvmlDeviceGetUUID", handle)
        return UUIDS[handle].encode()

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA A100"

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        self._check("nvmlDeviceGetPciInfo", handle)
        return SimpleNamespace(busId=f"00000000:{handle:02X}:00.0")

    def nvmlDeviceGetMinorNumber(self, handle: int) -> int:
        return handle + 4

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._check("nvmlDeviceGetMemoryInfo", handle)
        return SimpleNamespace(total=1000, used=10)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._check("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=7, memory=3)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        self._check("nvmlDeviceGetTemperature", handle)
        return 41

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._check("nvmlDeviceGetPowerUsage", handle)
        return 61500

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        self._check("nvmlDeviceGetTotalEccErrors", handle)
        return 2

    def nvmlDeviceGetProcessUtilization(self, handle: int, since: int) -> list[Any]:
        self._check("nvmlDeviceGetProcessUtilization", handle)
        return [sample for sample in self.samples if sample.timeStamp > since]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        self._check("nvmlDeviceGetNvLinkState", link)
        if link not in self.links:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(self.links[link] is not None)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        self._check("nvmlDeviceGetNvLinkRemotePciInfo", link)
        return SimpleNamespace(busId=self.links[link][0].encode())

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        self._check("nvmlDeviceGetNvLinkRemoteDeviceType", link)
        return int(self.links[link][1])

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        self._check("nvmlDeviceGetTopologyCommonAncestor", one)
        return 20

    def nvmlEventSetCreate(self) -> str:
        self._check("nvmlEventSetCreate")
        self.open_sets += 1
        return "set"

    def nvmlEventSetFree(self, events: str) -> None:
        self.open_sets -= 1
        self._check("nvmlEventSetFree")

    def nvmlDeviceGetSupportedEventTypes(self, handle: int) -> int:
        self._check("nvmlDeviceGetSupportedEventTypes", handle)
        return int(pynvml.nvmlEventTypeXidCriticalError)

    def nvmlDeviceRegisterEvents(self, handle: int, types: int, events: str) -> None:
        self.registered.append((handle, types))

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        self._check("nvmlEventSetWait_v2")
        if not self.events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return self.events.pop(0)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(nvml, "pynvml", made)
    return made


@pytest.fixture
def session(driver: Driver) -> Iterator[NvmlSession]:
    made = NvmlSession()
    yield made
    made.close()
    assert driver.users == 0


def card(session: NvmlSession, index: int = 0) -> GpuIdentity:
    return session.gpus()[index]


def test_cards_are_listed_as_nvml_names_them(session: NvmlSession, driver: Driver) -> None:
    driver.fail("nvmlDeviceGetPciInfo", pynvml.NVML_ERROR_NOT_SUPPORTED, 1)
    assert session.gpus() == (
        GpuIdentity(0, UUIDS[0], "NVIDIA A100", "00000000:00:00.0", 4),
        GpuIdentity(1, UUIDS[1], "NVIDIA A100", "", 5),
    )


def test_a_lost_card_is_listed_as_it_was_and_an_unknown_one_is_not(driver: Driver) -> None:
    first, second = NvmlSession(), NvmlSession()
    known = first.gpus()
    driver.fail("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_GPU_IS_LOST, 0)
    assert first.gpus() == known
    assert [gpu.index for gpu in second.gpus()] == [1]


@pytest.mark.parametrize("function", ["nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_after_the_driver_was_gone_a_new_session_is_opened(
    session: NvmlSession, driver: Driver, function: str
) -> None:
    driver.fail(function, pynvml.NVML_ERROR_UNINITIALIZED)
    with pytest.raises(NvmlError, match="cannot list GPUs") as caught:
        session.gpus()
    assert caught.value.code == pynvml.NVML_ERROR_UNINITIALIZED
    assert driver.users == 0
    driver.failures.clear()
    assert len(session.gpus()) == 2
    assert driver.users == 1


def test_a_driver_that_does_not_start_is_an_error_each_time(driver: Driver) -> None:
    session = NvmlSession()
    driver.fail("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    for _ in range(2):
        with pytest.raises(NvmlError, match="initialise NVML"):
            session.gpus()
    session.close()
    assert driver.users == 0


def test_a_library_that_is_no_library_is_named(tmp_path: Path, driver: Driver) -> None:
    path = tmp_path / "libnvidia-ml.so.1"
    path.write_bytes(b"no library")
    with pytest.raises(NvmlError, match=str(path)):
        NvmlSession(str(path)).gpus()


def test_numbers_of_a_card(session: NvmlSession) -> None:
    gpu = card(session)
    memory, utilization, sensors = session.memory(gpu), session.utilization(gpu), session.sensors(gpu)
    assert (memory.total, memory.used, utilization.gpu, utilization.memory) == (1000, 10, 7, 3)
    assert (sensors.temperature, sensors.power_watts, sensors.ecc_uncorrected) == (41, 61.5, 2)


def test_what_a_card_does_not_have_is_told_apart_from_an_error(session: NvmlSession, driver: Driver) -> None:
    gpu = card(session)
    driver.fail("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_NOT_SUPPORTED)
    with pytest.raises(NvmlUnsupportedError):
        session.memory(gpu)
    driver.fail("nvmlDeviceGetUtilizationRates", pynvml.NVML_ERROR_GPU_IS_LOST)
    with pytest.raises(NvmlError) as caught:
        session.utilization(gpu)
    assert not isinstance(caught.value, NvmlUnsupportedError)
    for function in ("nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors"):
        driver.fail(function, pynvml.NVML_ERROR_NOT_SUPPORTED)
    sensors = session.sensors(gpu)
    assert (sensors.temperature, sensors.power_watts, sensors.ecc_uncorrected) == (None, None, None)


def test_samples_of_processes_are_clamped_and_none_is_no_error(session: NvmlSession, driver: Driver) -> None:
    gpu = card(session)
    driver.samples = [
        SimpleNamespace(pid=7, timeStamp=5, smUtil=130),
        SimpleNamespace(pid=8, timeStamp=9, smUtil=2),
    ]
    assert session.processes(gpu, 0) == (ProcessUse(7, 5, 100), ProcessUse(8, 9, 2))
    assert session.processes(gpu, 5) == (ProcessUse(8, 9, 2),)
    for code in (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND):
        driver.fail("nvmlDeviceGetProcessUtilization", code)
        assert session.processes(gpu, 0) == ()
    driver.fail("nvmlDeviceGetProcessUtilization", pynvml.NVML_ERROR_NOT_SUPPORTED)
    with pytest.raises(NvmlUnsupportedError):
        session.processes(gpu, 0)


def test_cards_that_cannot_be_watched_are_named_unless_they_have_no_events(
    session: NvmlSession, driver: Driver
) -> None:
    gpus = session.gpus()
    driver.fail("nvmlDeviceGetSupportedEventTypes", pynvml.NVML_ERROR_NOT_SUPPORTED, 0)
    driver.fail("nvmlDeviceGetHandleByUUID", pynvml.NVML_ERROR_GPU_IS_LOST, 1)
    source, unwatched = session.watch(gpus)
    assert unwatched == (UUIDS[1],)
    assert driver.registered == []
    source.close()


def test_events_of_a_watched_card(session: NvmlSession, driver: Driver) -> None:
    source, unwatched = session.watch(session.gpus())
    assert unwatched == ()
    assert driver.registered == [(index, pynvml.nvmlEventTypeXidCriticalError) for index in range(2)]
    xid = pynvml.nvmlEventTypeXidCriticalError
    driver.events = [
        SimpleNamespace(eventType=xid, device=1, eventData=79),
        SimpleNamespace(eventType=pynvml.nvmlEventTypeSingleBitEccError, device=1, eventData=1),
    ]
    assert source.wait(0.5) == XidEvent(UUIDS[1], 79)
    assert source.wait(0.5) is None
    assert source.wait(0.5) is None
    driver.fail("nvmlDeviceGetUUID", pynvml.NVML_ERROR_GPU_IS_LOST)
    driver.events = [SimpleNamespace(eventType=xid, device=1, eventData=79)]
    assert source.wait(0.5) == XidEvent("", 79)
    driver.fail("nvmlEventSetWait_v2", pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(NvmlError, match="wait for XID events"):
        source.wait(0.5)
    source.close()


def test_a_source_holds_the_driver_on_its_own(session: NvmlSession, driver: Driver) -> None:
    source, _ = session.watch(session.gpus())
    session.close()
    assert (driver.users, driver.open_sets) == (1, 1)
    driver.fail("nvmlEventSetFree", pynvml.NVML_ERROR_UNKNOWN)
    source.close()
    assert (driver.users, driver.open_sets) == (0, 0)
    driver.fail("nvmlEventSetCreate", pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
    with pytest.raises(NvmlError, match="watch for XID events"):
        session.watch(())
    assert driver.users == 1


def test_the_library_below_the_driver_root_is_preferred(tmp_path: Path) -> None:
    assert resolve_library("/") == resolve_library(str(tmp_path)) == "libnvidia-ml.so.1"
    path = tmp_path / "usr/lib64/libnvidia-ml.so.1"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    assert resolve_library(str(tmp_path)) == str(path)


GPU_LINK, SWITCH_LINK = ("00000000:01:00.0", 0), ("00000000:C4:00.0", 2)


def test_enabled_links_are_read_with_what_is_at_their_other_end(session: NvmlSession, driver: Driver) -> None:
    driver.links = {0: GPU_LINK, 1: None, 2: SWITCH_LINK, 21: GPU_LINK}
    assert session.nvlinks(card(session)) == (
        NvLink("00000000:01:00.0"),
        NvLink("00000000:C4:00.0", to_switch=True),
        NvLink("00000000:01:00.0"),
    )


def test_a_card_without_nvlink_has_no_links(session: NvmlSession, driver: Driver) -> None:
    assert session.nvlinks(card(session)) == ()
    driver.fail("nvmlDeviceGetNvLinkState", pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert session.nvlinks(card(session)) == ()


@pytest.mark.parametrize(
    "code",
    [
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    ],
)
def test_what_a_link_does_not_tell_stays_open(session: NvmlSession, driver: Driver, code: int) -> None:
    driver.links = {0: GPU_LINK, 1: SWITCH_LINK, 2: SWITCH_LINK}
    driver.fail("nvmlDeviceGetNvLinkState", code, 0)
    driver.fail("nvmlDeviceGetNvLinkRemotePciInfo", code, 1)
    driver.fail("nvmlDeviceGetNvLinkRemoteDeviceType", code, 2)
    assert session.nvlinks(card(session)) == (NvLink("", to_switch=True), NvLink("00000000:C4:00.0"))


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetNvLinkRemotePciInfo",
        "nvmlDeviceGetNvLinkRemoteDeviceType",
    ],
)
def test_any_other_error_of_a_link_is_an_error(session: NvmlSession, driver: Driver, function: str) -> None:
    driver.links = {0: GPU_LINK}
    driver.fail(function, pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(NvmlError, match="cannot read the NVLinks of GPU 0"):
        session.nvlinks(card(session))


def test_the_common_ancestor_of_two_cards(session: NvmlSession, driver: Driver) -> None:
    pair = card(session), card(session, 1)
    assert session.common_ancestor(*pair) == 20
    driver.fail("nvmlDeviceGetTopologyCommonAncestor", pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert session.common_ancestor(*pair) is None
    driver.fail("nvmlDeviceGetTopologyCommonAncestor", pynvml.NVML_ERROR_INVALID_ARGUMENT)
    with pytest.raises(NvmlError, match="common ancestor of GPUs 0 and 1"):
        session.common_ancestor(*pair)
