"""Whatever is asked in whatever order: what we place never exceeds cards, kubelet's slots or the quota."""

from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from hami.scheduler.core.answers import Placement

Lab = Any

AMOUNTS = st.fixed_dictionaries(
    {
        "gpus": st.integers(1, 3),
        "mem": st.sampled_from([None, 0, 1000, 5000, 8000]),
        "cores": st.sampled_from([None, 0, 30, 100]),
    }
)


@st.composite
def wishes(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "inits": draw(st.lists(st.tuples(st.booleans(), AMOUNTS), max_size=2)),
        "apps": draw(st.lists(AMOUNTS, min_size=1, max_size=3)),
        "annotations": draw(
            st.sampled_from(
                [{}, {}, {"hami.io/gpu-scheduler-policy": "binpack"}, {"nvidia.com/numa-bind": "true"}]
            )
        ),
        "namespace": draw(st.sampled_from(["free", "tight"])),
        "then": draw(st.sampled_from(["keep", "keep", "bind", "finish", "release"])),
    }


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(sequence=st.lists(wishes(), min_size=1, max_size=25))
def test_placements_never_exceed_what_there_is(lab: Lab, sequence: list[dict[str, Any]]) -> None:
    lab = lab.fresh()
    lab.node("n1", lab.card("a", count=3), lab.card("b", numa=1), lab.card("c", devmem=5000), allocatable=7)
    lab.node("n2", lab.card("d"), lab.card("e"))
    lab.quota("tight", gpumem=9000, gpucores=150)
    for number, wish in enumerate(sequence):
        inits = [
            lab.container(f"i{at}", **amounts, **({"restartPolicy": "Always"} if sidecar else {}))
            for at, (sidecar, amounts) in enumerate(wish["inits"])
        ]
        apps = [lab.container(f"a{at}", **amounts) for at, amounts in enumerate(wish["apps"])]
        pod = lab.pod(
            f"p{number}", *apps, inits=inits, annotations=wish["annotations"], namespace=wish["namespace"]
        )
        answer = lab.filter(pod)
        if isinstance(answer, Placement):
            follow_up(lab, pod, wish["then"])
        check(lab)


def follow_up(lab: Lab, pod: dict[str, Any], then: str) -> None:
    uid = pod["metadata"]["uid"]
    if then == "release":
        lab.state.release(uid)
    if then not in ("bind", "finish"):
        return
    bound = lab.bound(pod)
    before = [lab.used(name) for name in ("n1", "n2")]
    lab.see(bound)
    assert [lab.used(name) for name in ("n1", "n2")] == before
    if then == "finish":
        done = {"terminated": {"exitCode": 0}}
        ended = [{"name": one["name"], "state": done} for one in pod["spec"]["initContainers"]]
        lab.see({**bound, "status": {"phase": "Running", "initContainerStatuses": ended}})


def check(lab: Lab) -> None:
    for node in lab.state.usage():
        for card in node.cards:
            assert 0 <= card.used.slots <= card.info.count
            assert 0 <= card.used.mem <= card.info.devmem
            assert 0 <= card.used.cores <= card.info.devcore
        if node.name == "n1":
            assert sum(card.used.slots for card in node.cards) <= 7
    for quota in lab.state.quota_usage():
        assert quota.limit is None or quota.used <= quota.limit
