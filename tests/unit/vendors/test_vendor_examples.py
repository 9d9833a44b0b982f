"""Every pod of `examples/<vendor>/` is admitted and gets what its first lines say, on nodes as recorded.

The line is `# Gets: <number> x <type>, <MiB> MiB, <number> cores`, once for each kind of device in order.
"""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from vendor_desk import NOW, patched
from vendor_pools import RecordedNode, every_profile, pools

from hami.protocol import views
from hami.protocol.admission import AdmissionRequest
from hami.protocol.allocation import decode_allocation
from hami.scheduler.core.answers import Placement
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge.webhook import Webhook, WebhookSettings
from hami.vendors.config import _MODULES

EXAMPLES = Path(__file__).parents[3] / "examples"
FILES = sorted(EXAMPLES.glob("*/*.yaml"))
GETS = re.compile(r"^# Gets: (\d+) x (\S[^,]*), (\d+) MiB, (\d+) cores$", re.MULTILINE)
ALSO_ON_NODES = {"hami-vnpu-core": "true"}  # Ascend nodes serve soft slices too

PROFILES = every_profile()
POOLS = pools(PROFILES)


def put(state: ClusterState, plain: RecordedNode, name: str) -> None:
    obj = {
        "metadata": {
            "name": name,
            "labels": dict(plain.labels),
            "annotations": {**plain.annotations, **ALSO_ON_NODES},
        },
        "status": {
            "capacity": {key: str(value) for key, value in plain.capacity.items()},
            "allocatable": {key: str(value) for key, value in plain.allocatable.items()},
        },
    }
    state.upsert_node(msgspec.convert(obj, views.Node), NOW)


def admitted(state: ClusterState, obj: dict[str, Any]) -> dict[str, Any]:
    settings = WebhookSettings(scheduler_name="hami-scheduler")
    request = AdmissionRequest(uid="r", operation="CREATE", namespace="default", name="p", object=obj)
    answer = Webhook(state, PROFILES, settings).review(request)
    assert answer.allowed, answer.message
    return patched(obj, answer.patch)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_example_gets_what_it_says(path: Path) -> None:
    text = path.read_text("utf-8")
    wanted = [
        (word, int(mem), int(cores)) for n, word, mem, cores in GETS.findall(text) for _ in range(int(n))
    ]
    assert wanted, "no line `# Gets: <n> x <type>, <MiB> MiB, <n> cores`"
    (obj,) = (one for one in yaml.safe_load_all(text) if one["kind"] == "Pod")
    state = ClusterState(PROFILES)
    words = {word for word in POOLS if any(kind == word or kind.startswith(word) for kind, _, _ in wanted)}
    nodes = [node for word in sorted(words) for node in POOLS[word].nodes]
    for number, node in enumerate(nodes):
        put(state, node, f"n{number}")
    obj["metadata"] = {"namespace": "default", "uid": "u", **obj["metadata"]}
    request = state.parse(admitted(state, obj))
    assert request is not None
    answer = state.place(request, state.candidates(sorted(state.node_names())), NOW)
    assert isinstance(answer, Placement), answer
    written = answer.reservation.annotations
    got = [
        (device.type, device.usedmem, device.usedcores)
        for profile in PROFILES
        for slot in decode_allocation(written.get(profile.rules.allocated, ""))
        for device in slot
    ]
    assert got == wanted


def test_every_vendor_has_examples_and_a_page() -> None:
    vendors = set(_MODULES.values()) - {"nvidia", "described"}
    assert {path.parent.name for path in FILES} == vendors
    assert {path.stem for path in (EXAMPLES.parent / "docs" / "vendors").glob("*.md")} == vendors
