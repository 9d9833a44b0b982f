"""One seeded run: pods come and go while components are killed at random moments; then all must settle.

The seed decides the pods, the victims and the moments; what the machine does between them is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fault_api import READ, WATCH, WRITE, ApiFaults, Storm, Trap
from fault_invariants import Ledger, faults, is_live

from hami.local.api.errors import ApiError
from hami.local.api.objects import Object, dig, meta, name_of
from hami.local.api.registry import DeleteOptions
from hami.local.api.resources import PODS
from hami.local.cluster import Cluster, ClusterConfig, GpuNode, default_native
from hami.local.components import Component

SETTLE_S = 90.0
RUN_S = 330.0
STEPS = 24
NODES = (GpuNode("n1", cards=2), GpuNode("n2", cards=1))
CRASHES = {"create": 12, "delete": 3, "kill": 3, "trap": 4, "kubelet": 1, "process": 1, "api": 1}
STORMS = {"create": 12, "delete": 4, "api": 4}
EVERYBODY = frozenset(
    {"scheduler"} | {f"{node.name}-{role}" for node in NODES for role in ("plugin", "monitor")}
)


class RunFailedError(AssertionError):
    """A run ended with the cluster in a state that must not be."""


@dataclass(slots=True)
class Report:
    """What a run did."""

    seed: int
    actions: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)
    settled_s: float = 0.0


def cluster_config(allocation_mode: str = "lock") -> ClusterConfig:
    return ClusterConfig(NODES, default_native(), allocation_mode=allocation_mode)


class Run:
    """Runs the scenario of ``seed`` on a cluster that is at rest and empty, and leaves it so."""

    def __init__(
        self, cluster: Cluster, seed: int, weights: Mapping[str, int], *, steps: int = STEPS
    ) -> None:
        self.report = Report(seed)
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._weights = weights
        self._steps = steps
        self._api = ApiFaults(cluster.api, self._rng)
        self._ledger = Ledger(cluster.api)
        self._down: dict[str, asyncio.Task[None]] = {}
        self._made = 0
        self._began = time.monotonic()

    async def go(self) -> Report:
        """Raises :class:`RunFailedError` with the seed and all that happened."""
        task = asyncio.create_task(self._go())
        done, _ = await asyncio.wait({task}, timeout=RUN_S)
        if not done:
            stuck = _stacks()
            task.cancel()
            await asyncio.wait({task}, timeout=SETTLE_S)
            raise self._failed(f"the run did not end within {RUN_S:g} s", stuck)
        return await task

    async def _go(self) -> Report:
        cancel = self._ledger.watch()
        if self._weights is STORMS:
            self._api.storm = Storm(EVERYBODY)
        try:
            for _ in range(self._steps):
                await self._step()
                await asyncio.sleep(self._rng.random() * 0.25)
            self.report.faults.update(self._api.counts)
            self._api.quiet()
            await asyncio.gather(*self._down.values())
            await self._settle("after the faults")
            self.report.phases.update(str(dig(pod, "status", "phase")) for pod in self._pods())
            await self._empty()
            await self._probe()
            await self._empty()
        finally:
            cancel()
            self._api.quiet()
            await asyncio.gather(*self._down.values(), return_exceptions=True)
            self._cluster.api.intercept = None
        return self.report

    # --- steps ---------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        kind = self._rng.choices(list(self._weights), list(self._weights.values()))[0]
        steps: dict[str, Callable[[], Awaitable[str]]] = {
            "create": self._create,
            "delete": self._delete,
            "kill": self._kill,
            "trap": self._trap,
            "kubelet": self._restart_kubelet,
            "process": self._kill_process,
            "api": self._disturb_api,
        }
        self.report.actions[kind] += 1
        self._note(await steps[kind]())

    async def _create(self) -> str:
        body = self._pod(f"r{self.report.seed}-{self._made}")
        self._made += 1
        await self._cluster.api.registry.create(PODS, "default", body)
        return f"create {name_of(body)} {body['spec']['containers'][0]['resources']['limits']}"

    def _pod(self, name: str) -> Object:
        rng = self._rng
        program = self._cluster.config.native / "fakegpu" / "gpuprog"
        count = 2 if rng.random() < 0.15 else 1
        memory, cores = rng.choice((4000, 12000, 24000, 36000)), rng.choice((0, 10, 30, 50))
        scripts = (
            "sleep 600", "sleep 600", "sleep 600", "sleep 0.3", "exit 3",
            f"exec {program} worker --mib 500", f"exec {program} worker --mib 500", f"{program} alloc 1000",
        )  # fmt: skip

        def container(label: str, script: str, share: int) -> Object:
            limits = {"nvidia.com/gpu": str(count), "nvidia.com/gpumem": str(memory // share)}
            if cores:
                limits["nvidia.com/gpucores"] = str(cores // share)
            return {
                "name": label, "image": "none", "command": ["sh", "-c", script],
                "resources": {"limits": limits},
            }  # fmt: skip

        shape = rng.random()
        main = container("main", rng.choice(scripts), 1)
        spec: Object = {
            "restartPolicy": rng.choice(("Never", "Never", "Always")),
            "terminationGracePeriodSeconds": 1,
            "containers": [main],
        }
        if shape < 0.2:
            spec["containers"].append(container("side", rng.choice(scripts), 2))
        elif shape < 0.3:
            spec["initContainers"] = [container("first", "sleep 0.1", 2)]
        if rng.random() < 0.9:  # without it the webhook has to set it, which may be down
            spec["schedulerName"] = "hami-scheduler"
        return {"metadata": {"name": name}, "spec": spec}

    async def _delete(self) -> str:
        pods = self._pods()
        if not pods:
            return "delete nothing"
        name = name_of(self._rng.choice(pods))
        await self._remove(name, self._rng.choice((0, 1)))
        return f"delete {name}"

    async def _kill(self) -> str:
        victim, delay = self._victim(), self._rng.random() * 0.3
        pause = self._pause()
        if victim.name not in self._down:
            self._down[victim.name] = asyncio.create_task(self._crash(victim, delay, pause))
        return f"kill {victim.name} in {delay:.3f} s, back after {pause:.3f} s"

    async def _trap(self) -> str:
        victim = self._rng.choice([self._cluster.component("scheduler"), *self._plugins()])
        kind = self._rng.choices((WRITE, READ, WATCH), (6, 2, 1))[0]
        skip = self._rng.choice((0, 0, 1, 2, 3)) if kind == WRITE else self._rng.choice((0, 1))
        landed = self._rng.random() < 0.6
        pause = self._pause()

        async def fire() -> None:
            if victim.name in self._down:
                return
            self._note(f"trap kills {victim.name}")
            dead = asyncio.Event()
            # The death of its client cancels this handler: the victim comes back by a task of its own.
            self._down[victim.name] = asyncio.create_task(self._crash(victim, 0.0, pause, dead))
            await dead.wait()

        self._api.arm(Trap(victim.name, kind, skip, landed, fire))
        return f"trap {victim.name} at {kind} {skip}, landed: {landed}, back after {pause:.3f} s"

    async def _crash(
        self, victim: Component, delay: float, pause: float, dead: asyncio.Event | None = None
    ) -> None:
        await asyncio.sleep(delay)
        await victim.kill(stay_down=True)
        if dead is not None:
            dead.set()
        await asyncio.sleep(pause)
        await victim.start()
        self._note(f"{victim.name} is started again")
        self._down.pop(victim.name, None)

    async def _restart_kubelet(self) -> str:
        node = self._rng.choice(list(self._cluster.nodes.values()))
        await node.kubelet.restart()
        return f"kubelet of {node.config.name} restarted"

    async def _kill_process(self) -> str:
        """SIGKILL to the first process of a container."""
        workers = [
            worker
            for node in self._cluster.nodes.values()
            for worker in node.kubelet._workers.values()
            if worker._running
        ]
        if not workers:
            return "no process to kill"
        worker = self._rng.choice(workers)
        for container in worker._running.values():
            if container.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(container.process.pid, signal.SIGKILL)
        return f"killed the processes of {name_of(worker.pod)}"

    async def _disturb_api(self) -> str:
        match self._rng.choice(("cut", "expire", "restart")):
            case "cut":
                self._api.cut_watches()
                return "watches cut"
            case "expire":
                self._cluster.api.expire()
                self._api.cut_watches()
                return "history compacted, watches cut"
            case _:
                await self._cluster.api.restart()
                return "API server restarted"

    def _plugins(self) -> list[Component]:
        return [node.plugin for node in self._cluster.nodes.values()]

    def _victim(self) -> Component:
        monitors = [node.monitor for node in self._cluster.nodes.values() if node.monitor is not None]
        scheduler = self._cluster.component("scheduler")
        return self._rng.choice([scheduler, scheduler, *self._plugins(), *self._plugins(), *monitors])

    def _pause(self) -> float:
        return self._rng.choice((0.0, 0.0, 0.3, 1.0)) * self._rng.random()

    # --- rest ----------------------------------------------------------------------------------------------

    async def _settle(self, when: str) -> None:
        """Wait until nothing is wrong; what was wrong at some moment for good is never forgiven."""
        began = time.monotonic()
        found: list[str] = ["not looked yet"]
        while found and time.monotonic() - began < SETTLE_S:
            found = await faults(self._cluster)
            if self._ledger.broken:
                raise self._failed(when, self._ledger.broken)
            if found:
                await asyncio.sleep(0.1)
        if found:
            raise self._failed(when, found)
        self.report.settled_s = max(self.report.settled_s, time.monotonic() - began)

    async def _empty(self) -> None:
        """Delete all pods."""
        for pod in self._pods():
            await self._remove(name_of(pod), 0)
        await self._until("the pods are gone", lambda: not self._pods())
        await self._settle("with all pods deleted")

    async def _probe(self) -> None:
        """A pod on each node shows that locks left behind are taken over and everything works."""
        names = []
        for node in self._cluster.nodes:
            body = self._pod(f"r{self.report.seed}-probe-{node}")
            body["spec"]["schedulerName"] = "hami-scheduler"
            body["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
            body["spec"].pop("initContainers", None)
            body["spec"]["restartPolicy"] = "Never"
            body["spec"]["containers"] = body["spec"]["containers"][:1]
            body["spec"]["containers"][0]["command"] = ["sh", "-c", "sleep 600"]
            body["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "1"
            await self._cluster.api.registry.create(PODS, "default", body)
            names.append(name_of(body))
        await self._until("the probes run", lambda: all(self._phase(name) == "Running" for name in names))
        await self._until("the locks are released", self._unlocked)
        await self._settle("with probes")

    def _unlocked(self) -> bool:
        return not any(
            dig(node.kubelet.node(), "metadata", "annotations", "hami.io/mutex.lock")
            for node in self._cluster.nodes.values()
        )

    async def _until(self, what: str, condition: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > SETTLE_S:
                raise self._failed(f"until {what}", await faults(self._cluster))
            await asyncio.sleep(0.05)

    async def _remove(self, name: str, grace_s: int) -> None:
        with contextlib.suppress(ApiError):
            await self._cluster.api.registry.delete(PODS, "default", name, DeleteOptions(grace_s=grace_s))

    def _pods(self) -> list[Object]:
        return self._cluster.api.store.list(PODS)

    def _phase(self, name: str) -> Any:
        return dig(self._cluster.api.store.find(PODS, "default", name) or {}, "status", "phase")

    def _note(self, text: str) -> None:
        self.report.log.append(f"{time.monotonic() - self._began:7.3f} {text}")

    def _failed(self, when: str, found: list[str]) -> RunFailedError:
        lines = [f"seed {self.report.seed}, {when}:", *(f"  {line}" for line in found), "what was done:"]
        lines += [f"  {line}" for line in self.report.log]
        lines += ["pods:"]
        for pod in self._pods():
            where = f"{name_of(pod)} on {dig(pod, 'spec', 'nodeName')} live={is_live(pod)}"
            lines.append(f"  {where} {meta(pod).get('annotations')} {pod['status']}")
        for node in self._cluster.nodes.values():
            lines.append(f"node {node.config.name}: {dig(node.kubelet.node(), 'metadata', 'annotations')}")
        storm = " FAULTS_ARGS=--storm" if self._weights is STORMS else ""
        lines += [f"logs: {self._cluster.logs}", f"again: make faults RUNS=1 SEED={self.report.seed}{storm}"]
        return RunFailedError("\n".join(lines))


def _stacks() -> list[str]:
    """Where every task of this process stands: its chain of coroutines."""
    lines: list[str] = []
    for task in asyncio.all_tasks():
        chain: list[str] = []
        at: Any = task.get_coro()
        while at is not None and (frame := getattr(at, "cr_frame", None)) is not None:
            chain.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
            at = at.cr_await
        lines.append(f"{task.get_name()}: {' > '.join(chain)} > {at!r}"[:600])
    return sorted(lines)
