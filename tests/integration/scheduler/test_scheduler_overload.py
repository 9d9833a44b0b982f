"""More pods at once than the client's rate limit lets through: they are bound at that rate, none is lost."""

from __future__ import annotations

import asyncio
from typing import Any

PODS = 24


async def test_a_burst_beyond_the_rate_limit_is_bound_at_that_rate(start: Any) -> None:
    """Every pod takes three requests (mode `lock`), and kube-scheduler comes back for those that failed."""

    async def schedule(world: Any, pod: Any, node: str) -> None:
        while True:
            answer = await world.filter(pod, node)
            if "already bound" in answer["Error"]:
                return
            if answer["NodeNames"] and not await world.bind(pod, node):
                return
            await asyncio.sleep(0.5)

    async with start(kube_qps=20.0, kube_burst=1) as world:
        nodes = [f"n{number}" for number in range(PODS)]
        for node in nodes:
            await world.add_node(node)
        pods = [await world.add_pod(f"p-{node}") for node in nodes]
        binder = world.scheduler.binder
        binder._settings = type(binder._settings)(answer_within_s=2.0)
        async with asyncio.timeout(100):
            await asyncio.gather(*(schedule(world, pod, node) for pod, node in zip(pods, nodes, strict=True)))
        bound = [(await world.pod(f"p-{node}"))["spec"].get("nodeName") for node in nodes]
    assert bound == nodes
