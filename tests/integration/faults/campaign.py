"""Many runs of the fault scenarios: ``make faults`` or ``campaign.py --runs 100 [--seed 1] [--storm]``.

Seeds follow one another; a failing one is printed, with all that was done, and can be run alone:
``campaign.py --runs 1 --seed N``. Every ``--share`` runs use one cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fault_scenario import CRASHES, STORMS, Report, Run, RunFailedError, cluster_config

from hami.local.cluster import Cluster


async def share(seeds: range, weights: Mapping[str, int], kept_logs: Path) -> tuple[list[Report], list[str]]:
    """Runs on one cluster until the first that fails: it may leave anything behind."""
    reports: list[Report] = []
    with tempfile.TemporaryDirectory(prefix="hami-", ignore_cleanup_errors=True) as folder:
        async with Cluster(replace(cluster_config(), directory=Path(folder))) as cluster:
            for seed in seeds:
                run = Run(cluster, seed, weights)
                try:
                    reports.append(await run.go())
                except RunFailedError as error:
                    target = kept_logs / f"seed-{seed}"
                    shutil.rmtree(target, ignore_errors=True)
                    shutil.copytree(cluster.logs, target)
                    (target / "failure.txt").write_text(str(error))
                    return [*reports, run.report], [f"{error}\nlogs kept in {target}"]
                print(
                    f"seed {seed}: settled in {run.report.settled_s:.1f} s {dict(run.report.phases)}",
                    flush=True,
                )
    return reports, []


async def campaign(
    runs: int, first: int, per_cluster: int, weights: Mapping[str, int], kept_logs: Path
) -> int:
    """Number of failed runs."""
    began = time.monotonic()
    actions: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    disturbed: Counter[str] = Counter()
    failed: list[int] = []
    done = 0
    while done < runs:
        start = first + done
        reports, errors = await share(range(start, start + min(per_cluster, runs - done)), weights, kept_logs)
        done += len(reports)
        for report in reports:
            actions += report.actions
            phases += report.phases
            disturbed += report.faults
        for error in errors:
            failed.append(reports[-1].seed)
            print(error, flush=True)
    print(
        f"{runs} runs, {len(failed)} failed {failed or ''} in {time.monotonic() - began:.0f} s; "
        f"steps {dict(actions)}; faults of the API {dict(disturbed)}; pods at rest {dict(phases)}"
    )
    return len(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run")
    parser.add_argument("--share", type=int, default=10, help="runs per cluster")
    parser.add_argument("--logs", type=Path, default=Path("build/faults"), help="where logs of failures go")
    parser.add_argument("--storm", action="store_true", help="a disturbed API server instead of crashes")
    given = parser.parse_args()
    weights = STORMS if given.storm else CRASHES
    failed = asyncio.run(campaign(given.runs, given.seed, given.share, weights, given.logs))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
