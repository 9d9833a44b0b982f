"""Two schedulers, each with a kube-scheduler loop that never stops, on one cluster; a Lease says who leads.

The loops are worse than real ones, which end when they lose the Lease. The API server is slow and loses
answers, so Bindings of the old leader land while the new one decides.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from fault_api import ApiFaults, Storm
from fault_invariants import ALLOCATED, LOCK, Ledger, compared, metric_lines, rebuild

from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.local.api.apiserver import ApiServer
from hami.local.api.objects import Object, annotations_of, clone, dig, meta, name_of, rfc3339_micro
from hami.local.api.registry import DeleteOptions
from hami.local.api.resources import LEASES, NODES, PODS
from hami.local.scheduling.scheduler_loop import Extender, Profile, SchedulerLoop
from hami.protocol.lock import parse_lock
from hami.scheduler.edge.app import Scheduler
from hami.scheduler.edge.settings import SchedulerSettings
from hami.vendors.config import decode_config, load_profiles

NVIDIA = {
    "resourceCountName": "nvidia.com/gpu",
    "resourceMemoryName": "nvidia.com/gpumem",
    "resourceMemoryPercentageName": "nvidia.com/gpumem-percentage",
    "resourceCoreName": "nvidia.com/gpucores",
    "resourcePriorityName": "nvidia.com/priority",
    "defaultGPUNum": 1,
}
MANAGED = frozenset({"nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"})
TO_ALLOCATE = "hami.io/vgpu-devices-to-allocate"
LEASE = ("kube-system", "hami-scheduler")
LEASE_S = 1.0
LIMIT_S = 60.0
STEPS = int(os.environ.get("HAMI_FAULT_STEPS", "8"))
SEED = int(os.environ.get("HAMI_FAULT_SEED", "1"))


class Election:
    """Renews the Lease for its leader; another takes over once it was released or has run out."""

    def __init__(self, api: ApiServer) -> None:
        self.leader = "a"
        self.changes = 0
        self._api = api

    async def run(self) -> None:
        while True:
            await self._write(f"{self.leader}_1")
            await asyncio.sleep(LEASE_S / 5)

    async def change(self, *, released: bool) -> None:
        """Hand over; without ``released`` the old leader just falls silent for the time of its Lease."""
        new = "b" if self.leader == "a" else "a"
        self.leader = "nobody"
        await self._write("" if released else None)
        if not released:
            await asyncio.sleep(LEASE_S)
        self.changes += 1
        self.leader = new
        await self._write(f"{new}_1")

    async def _write(self, holder: str | None) -> None:
        if holder is None or holder == "nobody_1":
            return
        spec = {
            "holderIdentity": holder, "leaseDurationSeconds": int(LEASE_S), "leaseTransitions": self.changes,
            "renewTime": rfc3339_micro(time.time()),
        }  # fmt: skip
        if self._api.store.find(LEASES, *LEASE) is None:
            body: Object = {"metadata": {"namespace": LEASE[0], "name": LEASE[1]}, "spec": spec}
            await self._api.registry.create(LEASES, LEASE[0], body)
        else:
            await self._api.registry.update(LEASES, *LEASE, lambda old: {**clone(old), "spec": spec})


class Plugin:
    """The node's side in short: whatever is bound is allocated a moment later, then the lock is released."""

    def __init__(self, api: ApiServer, rng: random.Random) -> None:
        self._api = api
        self._rng = rng
        self._tasks: set[asyncio.Task[None]] = set()
        api.store.subscribe(self._see)

    def _see(self, key: str, event: Any) -> None:
        if key != "pods" or not dig(event.obj, "spec", "nodeName"):
            return
        if event.previous is not None and not dig(event.previous, "spec", "nodeName"):
            task = asyncio.create_task(self._allocate(event.obj))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _allocate(self, pod: Object) -> None:
        await asyncio.sleep(self._rng.random() * 0.1)
        current = self._api.store.find(PODS, "default", name_of(pod))
        if current is None or meta(current)["uid"] != meta(pod)["uid"]:
            return

        def done(old: Object) -> Object:
            new: Object = clone(old)
            meta(new)["annotations"] |= {TO_ALLOCATE: ";", "hami.io/bind-phase": "success"}
            return new

        def started(old: Object) -> Object:
            new: Object = clone(old)
            new["status"]["phase"] = "Running"
            return new

        def unlocked(old: Object) -> Object:
            new: Object = clone(old)
            lock = annotations_of(new).get(LOCK)
            owner = parse_lock(lock).owner if lock else None
            if owner is not None and owner.name == name_of(pod):
                del meta(new)["annotations"][LOCK]
            return new

        await self._api.registry.update(PODS, "default", name_of(pod), done)
        await self._api.registry.update(PODS, "default", name_of(pod), started, subresource="status")
        await self._api.registry.update(NODES, "", pod["spec"]["nodeName"], unlocked)


@asynccontextmanager
async def scheduler(
    api: ApiServer, hostname: str, lease: tuple[str, str] | None = LEASE, *, loops: int = 1
) -> AsyncIterator[Scheduler]:
    """A scheduler that leads while ``hostname`` holds the Lease (None: always), and loops in front of it."""
    settings = SchedulerSettings(
        device_config_file=Path("unused"), hostname=hostname, http_bind="127.0.0.1:0",
        metrics_bind_address="127.0.0.1:0", scheduler_name="hami-scheduler", kube_qps=0.0, lease=lease,
    )  # fmt: skip
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            Client(ClientConfig(api.url), Limits(qps=0.0), user_agent="hami-scheduler")
        )
        made = Scheduler.build(settings, load_profiles(decode_config({"nvidia": NVIDIA})), client)
        running = asyncio.create_task(made.run(stop))
        async with asyncio.timeout(LIMIT_S):
            while not made.ports and not running.done():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        # Short, so that the loop whose scheduler does not lead soon lets go of a pod.
        extender = Extender(f"http://127.0.0.1:{made.ports['extender']}", MANAGED, timeout_s=1.0)
        profile = Profile("hami-scheduler", extender=extender, ignored=MANAGED)
        for _ in range(loops):
            loop = SchedulerLoop(api.registry, time.time, [profile])
            await loop.start()
            stack.push_async_callback(loop.stop)
        try:
            yield made
        finally:
            stop.set()
            await running


def node_object(name: str, cards: int) -> Object:
    devices = [
        {
            "id": f"GPU-{name}-{index}", "index": index, "count": 10, "devmem": 16000, "devcore": 100,
            "type": "NVIDIA T4", "mode": "hami-core", "health": True,
        }
        for index in range(cards)
    ]  # fmt: skip
    amounts = {"nvidia.com/gpu": str(10 * cards), "cpu": "8", "memory": "32Gi", "pods": "110"}
    register = {"hami.io/node-nvidia-register": msgspec.json.encode(devices).decode()}
    return {
        "metadata": {"name": name, "annotations": register},
        "status": {"capacity": amounts, "allocatable": amounts},
    }


def pod_object(name: str, mib: int) -> Object:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(mib), "nvidia.com/gpucores": "10"}
    container = {"name": "main", "image": "none", "resources": {"limits": limits}}
    return {
        "metadata": {"name": name},
        "spec": {"schedulerName": "hami-scheduler", "containers": [container]},
    }


async def test_two_schedulers_never_promise_a_card_twice(embedded_api: ApiServer) -> None:
    rng = random.Random(SEED)
    api = embedded_api
    for name in ("n1", "n2"):
        await api.registry.create(NODES, "", node_object(name, 1))
    election, ledger = Election(api), Ledger(api)
    ledger.watch()
    Plugin(api, rng)
    faults = ApiFaults(api, rng)
    faults.storm = Storm(
        frozenset({"scheduler"}), {"slow": 0.4, "lost": 0.05, "landed": 0.1, "500": 0.05}, slow_s=2.0
    )
    async with AsyncExitStack() as stack:
        electing = asyncio.create_task(election.run())
        stack.callback(electing.cancel)
        both = [await stack.enter_async_context(scheduler(api, name)) for name in ("a", "b")]
        for step in range(STEPS):
            await api.registry.create(
                PODS, "default", pod_object(f"p{step}", rng.choice((4000, 9000, 15000)))
            )
            bound = [pod for pod in api.store.list(PODS) if dig(pod, "spec", "nodeName")]
            if len(bound) > 3 or rng.random() < 0.3:
                for pod in rng.sample(bound, min(2, len(bound))):
                    await api.registry.delete(PODS, "default", name_of(pod), DeleteOptions(grace_s=0))
            if step % 4 == 1:
                await election.change(released=rng.random() < 0.5)
            await asyncio.sleep(rng.random() * 0.4)
            assert ledger.broken == []
        faults.quiet()
        async with asyncio.timeout(LIMIT_S):
            while await _unsettled(api, both):
                assert ledger.broken == []
                await asyncio.sleep(0.2)
    assert election.changes == STEPS // 4
    assert {"slow", "landed"} <= faults.counts.keys()


async def _unsettled(api: ApiServer, both: list[Scheduler]) -> list[str]:
    """Pods that wait without need, and differences to a rebuild."""
    profiles = load_profiles(decode_config({"nvidia": NVIDIA}))
    state = rebuild(profiles, api.store.list(NODES), api.store.list(PODS))
    found = []
    for pod in api.store.list(PODS):
        if dig(pod, "spec", "nodeName"):
            if annotations_of(pod).get("hami.io/bind-phase") != "success" or ALLOCATED not in annotations_of(
                pod
            ):
                found.append(f"{name_of(pod)} is bound and not allocated")
            continue
        request = state.parse(pod)
        assert request is not None
        if state.fits_now(request):
            found.append(f"{name_of(pod)} waits although it fits")
        if not any(c["type"] == "PodScheduled" for c in dig(pod, "status", "conditions") or []):
            found.append(f"{name_of(pod)} waits without a reason")
    wanted = await metric_lines(state)
    for made in both:
        text = b"".join([chunk async for chunk in made.metrics.chunks()]).decode()
        if compared(text) != wanted:
            found.append(f"{made.settings.hostname} differs from a rebuild")
    return found


async def test_two_loops_in_front_of_one_scheduler_bind_every_pod_once(embedded_api: ApiServer) -> None:
    rng = random.Random(SEED)
    api = embedded_api
    for name in ("n1", "n2"):
        await api.registry.create(NODES, "", node_object(name, 1))
    ledger = Ledger(api)
    ledger.watch()
    Plugin(api, rng)
    async with scheduler(api, "a", None, loops=2) as made:
        for step in range(10):
            await api.registry.create(PODS, "default", pod_object(f"p{step}", rng.choice((3000, 9000))))
        async with asyncio.timeout(LIMIT_S):
            while await _unsettled(api, [made]):
                assert ledger.broken == []
                await asyncio.sleep(0.1)
    bindings = [path for method, path in api.seen if method == "POST" and path.endswith("/binding")]
    bound = [pod for pod in api.store.list(PODS) if dig(pod, "spec", "nodeName")]
    assert len(bindings) == len(set(bindings)) == len(bound) > 3
