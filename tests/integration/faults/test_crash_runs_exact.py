"""The same kills in allocation mode exact: no lock is ever taken, nothing has to be undone."""

from __future__ import annotations

from fault_scenario import CRASHES, Run, cluster_config

from hami.local.api.objects import annotations_of
from hami.local.api.resources import NODES
from hami.local.api.store import Event
from hami.local.cluster import Cluster


async def test_in_mode_exact_after_kills_at_random_moments_every_pod_runs_or_says_why() -> None:
    locks: list[str] = []

    def observe(key: str, event: Event) -> None:
        found = annotations_of(event.obj).get("hami.io/mutex.lock") if key == NODES.key else None
        if found:
            locks.append(found)

    async with Cluster(cluster_config("exact")) as cluster:
        cancel = cluster.api.store.subscribe(observe)
        for seed in (1, 2):
            report = await Run(cluster, seed, CRASHES).go()
            assert report.actions["kill"] + report.actions["trap"] > 0
        cancel()
    assert locks == []
