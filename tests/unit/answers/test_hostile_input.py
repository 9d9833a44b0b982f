"""Files of strangers: snapshots and specs that are built to hang, to fill memory or to break a command."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from hami.answers import simulate as simulation
from hami.answers.errors import AnswerError, SnapshotError
from hami.answers.explain import explain
from hami.answers.monitors import usage
from hami.answers.render import explanation_lines, simulation_lines, top_lines
from hami.answers.replay import Replay
from hami.answers.simulate import pods_of_spec, simulate
from hami.answers.snapshot import decode_snapshot
from hami.answers.top import top
from hami.local.serving import serving
from hami.protocol.errors import HamiError
from hami.vendors.config import ConfigError, parse_config

Builder = Any

SPEC = """
kind: Pod
metadata: {name: p%s}
spec:
  volumes: %s
  containers: [{name: main, resources: {limits: {nvidia.com/gpu: 1}}}]
"""


def laughs(levels: int) -> str:
    """A text that stands for 10 to the power of `levels` values."""
    lists = ["&a0 [x, x, x, x, x, x, x, x, x, x]"]
    lists += [f"&a{at} [{', '.join([f'*a{at - 1}'] * 10)}]" for at in range(1, levels)]
    return f"[{', '.join(lists)}]"


@pytest.mark.parametrize(
    ("volumes", "words"),
    [
        (laughs(9), "more than 500000 values"),
        ("&a [*a]", "nested more than 100 levels"),
        ("&a {x: *a}", "nested more than 100 levels"),
        ("[" * 500 + "]" * 500, "nested more than 100 levels"),
        ("[" * 5000 + "]" * 5000, "not YAML|nested more than 100 levels"),
        ("{1: a}", "a key that is not text"),
        ("!!set {a}", "set"),
        ("!!binary aGVsbG8=", "bytes"),
        (".inf", "the number inf"),
        ('"\\ud800"', "not Unicode|not YAML"),
    ],
)
def test_what_yaml_has_and_kubernetes_has_not_is_refused(volumes: str, words: str) -> None:
    with pytest.raises(AnswerError, match=words):
        pods_of_spec(SPEC % ("", volumes))


def test_a_list_that_contains_itself_is_refused() -> None:
    with pytest.raises(AnswerError, match="nested"):
        pods_of_spec("kind: List\nitems: &i\n- kind: List\n  items: *i\n")


def test_a_date_is_text_as_kubectl_reads_it() -> None:
    (pod,) = pods_of_spec(SPEC % (", annotations: {built: 2026-01-01}", "[]"))
    assert pod["metadata"]["annotations"] == {"built": "2026-01-01"}


def test_many_copies_of_a_large_pod_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "MAX_VALUES", 1000)
    spec = json.dumps({"containers": [{"name": "main"}], "volumes": list(range(100))})
    text = f"kind: Job\nmetadata: {{name: j}}\nspec: {{parallelism: %d, template: {{spec: {spec}}}}}"
    assert len(pods_of_spec(text % 9)) == 9
    monkeypatch.setattr(copy, "deepcopy", lambda _: pytest.fail("copied"))
    with pytest.raises(AnswerError, match="more than 1000 values in all"):
        pods_of_spec(text % 10)


def test_a_device_config_of_many_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than 500000 values"):
        parse_config(f"nvidia: {laughs(9)}")


@pytest.mark.parametrize("metadata", [None, 7, "x", [], {}, {"name": None}, {"name": ["a"]}, {"name": ""}])
@pytest.mark.parametrize("member", ["nodes", "pods", "quotas"])
def test_a_snapshot_with_an_object_without_a_name_is_refused(
    cluster: Builder, member: str, metadata: object
) -> None:
    content = whole(cluster)
    content[member].append({"metadata": metadata})
    at = len(content[member]) - 1
    with pytest.raises(SnapshotError, match=rf"{member}\[{at}\]\.metadata\.name is missing"):
        decode_snapshot(json.dumps(content).encode())


def test_a_snapshot_that_is_nested_too_deeply_is_refused(cluster: Builder) -> None:
    content = whole(cluster)
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    content["pods"][0]["spec"]["volumes"] = deep
    with pytest.raises(SnapshotError, match="pods is nested more than 100"):
        decode_snapshot(json.dumps(content).encode())


def whole(cluster: Builder) -> dict[str, Any]:
    """A snapshot with something in every place, as plain data."""
    taint = {"key": "a", "value": "b", "effect": "NoSchedule"}
    cluster.node("n1", 2, spec={"taints": [taint], "unschedulable": False})
    cluster.node("n2", annotations={"hami.io/device-cordon": "n2-0"})
    cluster.holder("runs", "n1", "n1-0,NVIDIA,4000,30")
    term = {"matchExpressions": [{"key": "k", "operator": "In", "values": ["x"]}]}
    needed = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    spec = {"tolerations": [{"key": "a"}], "affinity": {"nodeAffinity": needed}, "priority": 5}
    annotations = {"nvidia.com/use-gputype": "A100"}
    waits = cluster.pod("waits", gpu=1, gpumem=20000, annotations=annotations, spec=spec)
    condition = {"type": "PodScheduled", "status": "False", "message": "no"}
    waits["status"] = {"phase": "Pending", "conditions": [condition]}
    cluster.quota("default", gpumem=100)
    content: dict[str, Any] = json.loads(msgspec.json.encode(cluster.snapshot()))
    use = {"device": "n1-0", "memory": 1e9, "utilization": 3}
    content["cards_use"] = [use]
    content["containers_use"] = [{"namespace": "default", "pod": "runs", "container": "main", **use}]
    return content


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a document but itself."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from places(inner, (*path, at))


ODD: list[Any] = [None, -1, 10**30, 1e308, True, "", "\x1b[31m", [], [[1]], {"a": None}, "9" * 300, -(2**63)]


def test_whatever_type_stands_in_a_snapshot_it_is_answered_refused_or_left_out(cluster: Builder) -> None:
    content = whole(cluster)
    pods = pods_of_spec(SPEC % ("", "[]"))
    answered = 0
    for number, path in enumerate([path for path in places(content) for _ in range(3)]):
        changed = copy.deepcopy(content)
        place: Any = changed
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = copy.deepcopy(ODD[5 * number % len(ODD)])
        try:
            snapshot = decode_snapshot(json.dumps(changed).encode())
            lines = explanation_lines(explain(Replay(snapshot), "default", "waits"))
            lines += explanation_lines(explain(Replay(snapshot), "default", "runs"))
            lines += top_lines(top(Replay(snapshot)), "cards")
            lines += simulation_lines(simulate(Replay(snapshot), copy.deepcopy(pods)))
        except HamiError:
            continue
        assert lines
        answered += 1
    assert answered > 100


async def test_one_monitor_that_talks_nonsense_takes_no_other_ones_figures_away() -> None:
    padding = "# " + "x" * 200_000 + "\n"
    good = padding + 'hami_host_gpu_memory_used_bytes{device_uuid="c1"} 5\n'
    odd = (
        'hami_host_gpu_memory_used_bytes{device_uuid="c2"} NaN\n'
        'hami_host_gpu_utilization_ratio{device_uuid="c2"} +Inf\n'
    )
    texts = {"good": good, "odd": odd, "bad": "{{{"}

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=texts[request.path[1:]])

    app = web.Application()
    app.router.add_get("/{name}", answer)
    async with serving(app) as port:
        urls = tuple(f"http://127.0.0.1:{port}/{name}" for name in ("bad", "good", "odd"))
        notes: list[str] = []
        containers, cards = await usage(None, "", urls, notes)  # type: ignore[arg-type]
    assert containers == []
    assert [(card.device, card.memory) for card in cards] == [("c1", 5.0)]
    (note,) = notes
    assert note.startswith(f"usage of {urls[0]} is left out")
