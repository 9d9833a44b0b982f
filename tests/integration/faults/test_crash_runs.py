"""Components are killed with SIGKILL at random moments of a workload, then everything must settle.

100 runs and more: ``make faults RUNS=100`` (``campaign.py`` beside this file).
"""

from __future__ import annotations

from fault_scenario import CRASHES, STORMS, Run, cluster_config

from hami.local.cluster import Cluster

STEPS = 14  # fewer than in a campaign, for the time of `make test`


async def test_after_kills_at_random_moments_every_pod_runs_or_says_why() -> None:
    async with Cluster(cluster_config()) as cluster:
        for seed in (1, 2):
            report = await Run(cluster, seed, CRASHES, steps=STEPS).go()
            assert report.actions["kill"] + report.actions["trap"] > 0


async def test_after_a_storm_of_api_faults_every_pod_runs_or_says_why() -> None:
    async with Cluster(cluster_config()) as cluster:
        report = await Run(cluster, 1, STORMS, steps=STEPS).go()
        assert report.faults.total() > 10
