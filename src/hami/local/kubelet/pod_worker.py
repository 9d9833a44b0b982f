"""Runs one pod on its node: admission with devices, init containers in order, restarts, graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hami.local.api.objects import Object, dig, name_of
from hami.local.kubelet import cdi
from hami.local.kubelet.containers import (
    Container,
    ContainerPlan,
    ContainerStartError,
    Mount,
    start_container,
)
from hami.local.kubelet.devices import AllocationRefusedError
from hami.local.kubelet.pod_env import container_env, expand, volume_mounts
from hami.local.kubelet.pod_status import (
    ContainerRecord,
    build_status,
    key_of,
    pod_phase,
    rejected_status,
    restarts,
)

if TYPE_CHECKING:
    from hami.local.kubelet.kubelet import Kubelet

_LOG = logging.getLogger(__name__)
_BACKOFF_RESET_S = 600.0
_REAP_LIMIT_S = 5.0
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class RuntimeHook:
    """What the container runtime adds for containers with NVIDIA_VISIBLE_DEVICES, as NVIDIA's does.

    ``env`` is set under the container's own variables; ``library_path`` goes in front of LD_LIBRARY_PATH
    and behind PATH, where the driver's programs are found.
    """

    env: Mapping[str, str]
    library_path: str
    visible: tuple[str, ...] = ()

    def apply(self, plan: ContainerPlan) -> ContainerPlan:
        wanted = plan.env.get("NVIDIA_VISIBLE_DEVICES", "")
        if wanted in ("", "void"):
            return plan
        env = {**self.env, **plan.env}
        before = env.get("LD_LIBRARY_PATH")
        env["LD_LIBRARY_PATH"] = f"{self.library_path}:{before}" if before else self.library_path
        env["PATH"] = f"{env.get('PATH', DEFAULT_PATH)}:{self.library_path}"
        return replace(plan, env=env, visible=(*plan.visible, *self.visible))


class PodWorker:
    """One pod from admission to its end. ``run`` is its task; ``terminate`` starts the graceful end."""

    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        self.pod = pod
        self.uid = key_of(pod)[2]
        self._kubelet = kubelet
        self._policy = str(dig(pod, "spec", "restartPolicy") or "Always")
        self._inits = [_record(item, sidecar=item.get("restartPolicy") == "Always")
                       for item in dig(pod, "spec", "initContainers") or []]  # fmt: skip
        self._regular = [_record(item) for item in dig(pod, "spec", "containers") or []]
        for record in [*self._inits, *self._regular]:
            record.image_id = f"the host's files; {kubelet.isolation.describe()}"
        for record in self._inits[1:] + (self._regular if self._inits else []):
            record.waiting_reason = "PodInitializing"
        self._running: dict[str, Container] = {}
        self._started: list[Container] = []
        self._stopping = asyncio.Event()
        self._shortened = asyncio.Event()
        self._progress = asyncio.Event()
        self._grace_s = 30.0
        self._finished = False

    @property
    def finished(self) -> bool:
        """No container runs and none will be started any more."""
        return self._finished

    @property
    def directory(self) -> Path:
        return self._kubelet.pods_directory / self.uid

    def log_path(self, container: str, *, previous: bool = False) -> Path:
        return self.directory / "logs" / container / ("previous.log" if previous else "current.log")

    def running(self, container: str) -> Container | None:
        """The container of this name while it runs."""
        return self._running.get(container)

    def is_over(self, container: str) -> bool:
        """Whether the log of the container will get no more lines from the present run."""
        return self._finished or container not in self._running

    def terminate(self, grace_s: float) -> None:
        """End the containers: SIGTERM, after ``grace_s`` seconds SIGKILL. May be called again to shorten."""
        self._grace_s = min(self._grace_s, grace_s) if self._stopping.is_set() else grace_s
        self._stopping.set()
        self._shortened.set()
        self._progress.set()
        if grace_s <= 0:
            self.kill()

    def kill(self) -> None:
        """End every process of the pod now."""
        for container in self._running.values():
            container.kill()

    async def reap(self) -> None:
        """After ``run`` was cancelled: wait until the processes have ended, so that nothing outlives us."""
        for container in self._started:
            container.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REAP_LIMIT_S):
                    await container.ended()

    async def run(self) -> None:
        try:
            if await self._admit():
                await self._run_containers()
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            self._finished = True
            self._kubelet.devices.release(self.uid)
        await self._report()

    async def _admit(self) -> bool:
        """Get the pod's devices; the pod fails as with kubelet where that is not possible."""
        reason = message = ""
        async with self._kubelet.admission:
            over = self._kubelet.exceeded(self.pod)
            if over:
                reason, message = f"OutOf{over}", f"Node didn't have enough resource: {over}"
            else:
                try:
                    await self._kubelet.devices.allocate(self.uid, self._wanted_devices())
                except AllocationRefusedError as error:
                    reason = "UnexpectedAdmissionError"
                    message = f"Allocate failed due to {error}"
                    if not message.endswith("which is unexpected"):
                        message += ", which is unexpected"
        if not reason:
            return True
        self._finished = True
        await self._kubelet.recorder.record(self.pod, "Warning", reason, message)
        status = rejected_status(self.pod, reason, f"Pod was rejected: {message}", self._kubelet.clock())
        await self._kubelet.set_status(self.pod, status)
        self._regular = []
        return False

    def _wanted_devices(self) -> list[tuple[str, dict[str, int], bool]]:
        book = self._kubelet.devices.book
        return [
            (
                str(container["name"]),
                {
                    name: int(amount)
                    for name, amount in (dig(container, "resources", "limits") or {}).items()
                    if book.known(name) and str(amount).isdigit() and int(amount) > 0
                },
                is_init and container.get("restartPolicy") != "Always",
            )
            for field, is_init in (("initContainers", True), ("containers", False))
            for container in dig(self.pod, "spec", field) or []
        ]

    async def _run_containers(self) -> None:
        """Init containers one after the other, then all regular ones; sidecars run along until those end."""
        sidecars: list[asyncio.Task[None]] = []
        stopper = asyncio.create_task(self._watch_stop())
        try:
            await self._report()
            for record, spec in zip(self._inits, dig(self.pod, "spec", "initContainers") or [], strict=True):
                if record.sidecar:
                    sidecars.append(asyncio.create_task(self._keep(record, spec, "Always")))
                    while not record.running and not self._stopping.is_set():
                        self._progress.clear()
                        await self._progress.wait()
                    continue
                policy = "OnFailure" if self._policy == "Always" else self._policy
                await self._keep(record, spec, policy)
                if self._stopping.is_set() or record.exit_code != 0:
                    return
            for record in self._regular:
                record.waiting_reason = "ContainerCreating"
            specs = dig(self.pod, "spec", "containers") or []
            await asyncio.gather(
                *(self._keep(record, spec, self._policy)
                  for record, spec in zip(self._regular, specs, strict=True))
            )  # fmt: skip
        finally:
            stopper.cancel()
            for task in sidecars:
                task.cancel()
            self.kill()
            await asyncio.gather(stopper, *sidecars, return_exceptions=True)

    async def _watch_stop(self) -> None:
        """Once asked to stop: SIGTERM to all, SIGKILL when the grace period is over."""
        await self._stopping.wait()
        loop = asyncio.get_running_loop()
        began = loop.time()
        for container in self._running.values():
            container.signal(signal.SIGTERM)
        while (left := began + self._grace_s - loop.time()) > 0:
            self._shortened.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._shortened.wait()
        self.kill()

    async def _keep(self, record: ContainerRecord, spec: Object, policy: str) -> None:
        """Run one container, again and again as its policy says, with back-off."""
        backoff = self._kubelet.restart_backoff_s
        while not self._stopping.is_set():
            began = self._kubelet.clock()
            code = await self._run_once(record, spec)
            await self._report()
            if self._stopping.is_set():
                return
            if code is not None and not restarts(policy, record):
                return
            if self._kubelet.clock() - began > _BACKOFF_RESET_S:
                backoff = self._kubelet.restart_backoff_s
            if code is not None:
                record.restarts += 1
                record.wait(
                    "CrashLoopBackOff", f"back-off {int(backoff)}s restarting failed container={record.name}"
                )
                await self._kubelet.recorder.record(
                    self.pod, "Warning", "BackOff",
                    f"Back-off restarting failed container {record.name} in pod {name_of(self.pod)}",
                )  # fmt: skip
                await self._report()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff):
                    await self._stopping.wait()
            backoff = min(backoff * 2, 300.0)

    async def _run_once(self, record: ContainerRecord, spec: Object) -> int | None:
        """Start the container and wait for its end; None where it could not be configured."""
        name = record.name
        kubelet = self._kubelet
        try:
            await kubelet.devices.pre_start(self.uid, name)
            plan = await asyncio.to_thread(self._plan, spec)
        except (ContainerStartError, AllocationRefusedError) as error:
            record.wait("CreateContainerConfigError", str(error))
            await kubelet.recorder.record(self.pod, "Warning", "Failed", f"Error: {error}")
            return None
        log = self.log_path(name)
        if log.exists():
            log.replace(self.log_path(name, previous=True))
        try:
            container = await start_container(
                plan, self.directory / "containers" / name, kubelet.isolation, log
            )
        except ContainerStartError as error:
            record.wait("RunContainerError", str(error))
            await kubelet.recorder.record(self.pod, "Warning", "Failed", f"Error: {error}")
            return None
        self._running[name] = container
        self._started = [one for one in self._started if one.process.returncode is None] + [container]
        record.begin(kubelet.clock(), f"hami-local://{self.uid[:8]}-{name}-{record.restarts}")
        self._progress.set()
        await kubelet.recorder.record(self.pod, "Normal", "Started", f"Started container {name}")
        await self._report()
        try:
            if self._stopping.is_set():
                container.signal(signal.SIGTERM)
            code = await container.wait()
        except ContainerStartError as error:
            code = 128
            record.end(kubelet.clock(), code, "StartError", f"failed to start container: {error}")
            await kubelet.recorder.record(self.pod, "Warning", "Failed", f"Error: {error}")
        else:
            record.end(kubelet.clock(), code)
        finally:
            container.kill()
            self._running.pop(name, None)
        return code

    def _plan(self, spec: Object) -> ContainerPlan:
        kubelet = self._kubelet
        env: dict[str, str] = {"PATH": DEFAULT_PATH, "HOSTNAME": name_of(self.pod), "HOME": "/root"}
        mounts: list[Mount] = []
        cdi_names: list[str] = []
        for answer in kubelet.devices.answers(self.uid, str(spec["name"])):
            env.update(answer.envs)
            mounts += [Mount(m.host_path, m.container_path, m.read_only) for m in answer.mounts]
            cdi_names += [device.name for device in answer.cdi_devices]
            for device in answer.devices:
                mounts.append(Mount(device.host_path, device.container_path, "w" not in device.permissions))
        env = container_env(self.pod, spec, kubelet.node(), env, kubelet.lookup)
        edits = cdi.resolve(kubelet.config.host_root, cdi_names)
        env.update(edits.env)
        mounts += edits.mounts
        mounts += volume_mounts(self.pod, spec, self.directory / "volumes", kubelet.lookup)
        argv = [expand(str(part), env) for part in [*(spec.get("command") or []), *(spec.get("args") or [])]]
        plan = ContainerPlan(
            argv=tuple(argv),
            env=env,
            cwd=str(spec.get("workingDir") or "/"),
            mounts=tuple(mounts),
            visible=tuple(str(path) for path in kubelet.visible),
            hostname=name_of(self.pod),
        )
        for hook in kubelet.hooks:
            plan = hook.apply(plan)
        return plan

    async def _report(self) -> None:
        """Write the status as it is now; a pod that was not admitted has its status already."""
        if not self._regular:
            return
        if pod_phase(self._policy, self._inits, self._regular) in ("Succeeded", "Failed"):
            # Before anybody can see it: a pod that follows at once finds the devices free.
            self._kubelet.devices.release(self.uid)

        def make(current: Object) -> Object:
            return build_status(
                current, self._inits, self._regular, now=self._kubelet.clock(), address=self._kubelet.address
            )

        await self._kubelet.update_status(self.pod, make)

    def clean_up(self) -> None:
        """Remove the pod's files."""
        shutil.rmtree(self.directory, ignore_errors=True)


def _record(container: Object, *, sidecar: bool = False) -> ContainerRecord:
    return ContainerRecord(str(container["name"]), str(container.get("image") or ""), sidecar=sidecar)
