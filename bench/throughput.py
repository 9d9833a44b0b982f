"""How many pods a second go through `/filter` and `/bind`.

A scheduler process runs against the embedded API server (another process), with empty nodes of eight cards in
allocation mode `exact` (mode `lock` binds one pod at a time per node, whatever the scheduler does).
This process takes kube-scheduler's part: pods are created at the API server, then filtered one at a time, as
kube-scheduler does, while up to `--binds` Bindings are under way. Every `/filter` names all nodes.

  scheduler_cpu_ms_per_pod_<N>   processor time of the scheduler process per pod, watches and events included
  pods_per_s_<N>                 pods bound per second, everything on this machine
  filter_p50_ms, bind_p50_ms, …  times of single answers

5,000 nodes and 5,000 names, then the same with 500.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import uvloop
from parts import command
from parts.scheduler_process import SchedulerProcess, api_process, node_name, pod_object, scheduler_process

_JSON = {"Content-Type": "application/json"}
_WARM_UP = 20


def main() -> None:
    parser = command.parser(__doc__, "fewer pods")
    parser.add_argument("--pods", type=int, default=1000, help="pods per figure (default 1000)")
    parser.add_argument("--binds", type=int, default=16, help="Bindings under way at once (default 16)")
    parser.add_argument("--nodes", default="5000,500", help="numbers of nodes (default 5000,500)")
    options = parser.parse_args()
    count = min(options.pods, 250) if options.quick else options.pods
    figures: dict[str, float] = {}
    for nodes in map(int, options.nodes.split(",")):
        figures |= measure(nodes, count, options.binds)
    for name, figure in figures.items():
        print(f"{name:40} {figure:9.3f}")
    if options.json:
        print(json.dumps(figures))


def measure(nodes: int, count: int, binds: int) -> dict[str, float]:
    with (
        api_process("embedded", nodes) as api,
        scheduler_process(api, "--kube-qps", "0", "--node-scheduler-policy", "spread") as scheduler,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        run = runner.run(drive(api, scheduler, nodes, count, binds))
    suffix = str(nodes) if nodes == 5000 else f"{nodes}names"
    return {
        f"scheduler_cpu_ms_per_pod_{suffix}": round(run.cpu_s / count * 1e3, 3),
        f"pods_per_s_{suffix}": round(count / run.wall_s, 1),
        f"filter_p50_ms_{suffix}": percentile(run.filters, 0.5),
        f"filter_p99_ms_{suffix}": percentile(run.filters, 0.99),
        f"bind_p50_ms_{suffix}": percentile(run.bindings, 0.5),
        f"bind_p99_ms_{suffix}": percentile(run.bindings, 0.99),
    }


def percentile(samples: list[float], share: float) -> float:
    ordered = sorted(samples)
    return round(ordered[int(share * (len(ordered) - 1))] * 1e3, 3)


@dataclass(slots=True)
class Run:
    """What one stream of pods took."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    filters: list[float] = field(default_factory=list)  # seconds
    bindings: list[float] = field(default_factory=list)


async def drive(api: int, scheduler: SchedulerProcess, nodes: int, count: int, binds: int) -> Run:
    names = json.dumps([node_name(number) for number in range(nodes)]).encode()
    async with session() as http:
        pods = [await create(http, api, number) for number in range(count + _WARM_UP)]
        for pod in pods[:_WARM_UP]:
            await bind(http, scheduler, pod, await placed(http, scheduler, pod, names, Run()), Run())
        run = Run()
        limit = asyncio.Semaphore(binds)
        cpu, started = scheduler.cpu_s(), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for pod in pods[_WARM_UP:]:
                node = await placed(http, scheduler, pod, names, run)
                await limit.acquire()
                task = group.create_task(bind(http, scheduler, pod, node, run))
                task.add_done_callback(lambda _: limit.release())
        run.wall_s = time.perf_counter() - started
        run.cpu_s = scheduler.cpu_s() - cpu
    return run


@asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        yield http


async def create(http: aiohttp.ClientSession, api: int, number: int) -> bytes:
    pod = pod_object(f"train-{number}", "", 1000 + 16 * (number % 997), 10, {})
    del pod["metadata"]["uid"], pod["metadata"]["resourceVersion"], pod["status"]
    url = f"http://127.0.0.1:{api}/api/v1/namespaces/default/pods"
    async with http.post(url, data=json.dumps(pod), headers=_JSON) as response:
        assert response.status == 201, await response.text()
        return await response.read()


async def placed(
    http: aiohttp.ClientSession, scheduler: SchedulerProcess, pod: bytes, names: bytes, run: Run
) -> str:
    body = b'{"Pod":%b,"Nodes":null,"NodeNames":%b}' % (pod, names)
    started = time.perf_counter()
    answer = await post(http, scheduler, "filter", body)
    run.filters.append(time.perf_counter() - started)
    (node,) = answer["NodeNames"]
    return str(node)


async def bind(
    http: aiohttp.ClientSession, scheduler: SchedulerProcess, pod: bytes, node: str, run: Run
) -> None:
    metadata = json.loads(pod)["metadata"]
    body = {
        "PodName": metadata["name"],
        "PodNamespace": metadata["namespace"],
        "PodUID": metadata["uid"],
        "Node": node,
    }
    started = time.perf_counter()
    await post(http, scheduler, "bind", json.dumps(body).encode())
    run.bindings.append(time.perf_counter() - started)


async def post(
    http: aiohttp.ClientSession, scheduler: SchedulerProcess, verb: str, body: bytes
) -> dict[str, list[str]]:
    url = f"http://127.0.0.1:{scheduler.extender}/{verb}"
    async with http.post(url, data=body, headers=_JSON) as response:
        answer: dict[str, list[str]] = json.loads(await response.read())
    assert not answer["Error"], answer["Error"]
    return answer


if __name__ == "__main__":
    main()
