"""Utilisation of containers from charged GPU time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hami.node.monitor.region import DeviceUse, Extra, Region
from hami.node.monitor.series import ContainerSample, SeriesBook, add_container
from hami.node.monitor.utilization import UtilizationMeter


def region(charged_ns: int, factor: float = 1.0, sm: int = 0) -> Region:
    extra = Extra(0.0, 0, 0, 0, charged_ns, factor)
    device = DeviceUse(3, "GPU-a", 0, 30, 0, 0, 0, 0, sm, extra)
    return Region("v1", (device,), frozenset(), 0, 1, (), 1, 0, 1, 0, True)


def test_the_growth_of_charged_time_is_the_share_of_the_device() -> None:
    meter = UtilizationMeter()
    meter.observe("c", region(10**9), 100.0)
    assert meter.percent("c", 3) == 0
    meter.observe("c", region(10**9 + 1_500_000_000), 105.0)
    assert meter.percent("c", 3) == 30
    meter.observe("c", region(10**9 + 3_000_000_000, factor=0.5), 110.0)
    assert meter.percent("c", 3) == 15
    meter.observe("c", region(10**9 + 3_000_000_000), 115.0)
    assert meter.percent("c", 3) == 0


def test_a_new_region_and_a_forgotten_container_start_from_nothing() -> None:
    meter = UtilizationMeter()
    meter.observe("c", region(5 * 10**9), 100.0)
    meter.observe("c", region(0), 105.0)
    assert meter.percent("c", 3) == 0
    meter.retain([])
    meter.observe("c", region(10**9), 110.0)
    assert meter.percent("c", 3) == 0
    assert meter.percent("other", 3) == 0


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.floats(1 / 64, 4)), min_size=2, max_size=5))
def test_any_readings_give_a_percentage(readings: list[tuple[int, float]]) -> None:
    meter = UtilizationMeter()
    for second, (charged, factor) in enumerate(readings):
        meter.observe("c", region(charged, factor), float(second))
        assert 0 <= meter.percent("c", 3) <= 100


def test_what_the_library_reports_itself_wins() -> None:
    for sm, expected in ((0, 42.0), (17, 17.0)):
        book = SeriesBook()
        sample = ContainerSample("ns", "p", "c", (), region(0, sm=sm), utilization={3: 42.0})
        add_container(book, sample, 1000.0, emit_allocated=True, legacy=False)
        samples = {item.name: item.value for metric in book.metrics for item in metric.samples}
        assert samples["hami_container_device_utilization_ratio"] == expected
