"""The example of docs/answers.md is what the command says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hami.answers.explain import explain
from hami.answers.render import explanation_lines

PAGE = Path(__file__).parents[3] / "docs" / "answers.md"


def test_the_documented_explanation_is_the_one_that_is_given(cluster: Any) -> None:
    cluster.node("n1", memory=40960)
    cluster.holder("runs", "n1", "n1-0,NVIDIA,30000,10")
    waiting = cluster.pod("waits", gpu=1, gpumem=20000, gpucores=10)
    message = "0/1 nodes are available: 1 1/1 CardInsufficientMemory."
    waiting["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": message}]
    shown = re.search(r"```text\n\$ hami explain waits\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert shown
    assert explanation_lines(explain(cluster.replay(), "default", "waits")) == shown[1].splitlines()
