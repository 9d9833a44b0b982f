"""Jobs: pods that run to their end, a given number of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hami.local.api.errors import ApiError
from hami.local.api.objects import (
    Object,
    annotations_of,
    dig,
    meta,
    name_of,
    namespace_of,
    parse_time,
    rfc3339,
)
from hami.local.api.registry import DeleteOptions
from hami.local.api.resources import JOBS, PODS
from hami.local.controllers.common import (
    is_active,
    is_controlled_by,
    is_deleting,
    pod_from_template,
    ready_since,
    without_finalizer,
)
from hami.local.controllers.controller import Context, Controller, Key

TRACKING = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"
_BURST = 100
_MAX_BACKOFF_S = 360.0


@dataclass(slots=True)
class Tally:
    """The pods of a job: what ``status`` says of those counted before, and the others."""

    succeeded: int = 0
    failed: int = 0
    active: list[Object] = field(default_factory=list)
    uncounted: list[Object] = field(default_factory=list)
    indexes_done: set[int] = field(default_factory=set)


class JobController(Controller):
    """Creates the pods of Jobs, counts how they end, and says when a Job is Complete or Failed.

    A pod carries a finalizer until its end has been counted, so that none is counted twice or missed.
    ``backoff_s``: the pause after the first failure; it doubles with each, up to six minutes.
    """

    resource = JOBS
    component = "job-controller"

    def __init__(self, context: Context, *, backoff_s: float = 10.0) -> None:
        super().__init__(context)
        self._backoff_s = backoff_s

    async def sync(self, key: Key) -> float | None:
        job = self.store.find(JOBS, *key)
        pods = self.store.list(PODS, key[0])
        if job is None:
            await self._release_orphans(key, pods)
            return None
        pods = [pod for pod in pods if is_controlled_by(pod, job)]
        now = self.clock()
        finished = finished_at(job)
        if finished is not None or is_deleting(job):
            await self._release(pods)
            return await self._expire(job, finished, now)
        tally = count(job, pods)
        verdict = judge(job, tally, now)
        again: float | None = None
        suspended = bool(job["spec"].get("suspend"))
        if verdict is not None or suspended:
            for pod in tally.active:
                await self.delete(PODS, pod)
            tally.active = [] if verdict is not None else tally.active
        else:
            again = await self._adjust(job, tally, pods, now)
        await self.write_status(job, status_of(job, tally, verdict, suspended, self.clock()))
        await self._release(tally.uncounted)
        if verdict is not None:
            kind, reason, message = verdict
            await self.recorder.record(
                job, "Normal" if kind == "Complete" else "Warning", reason or "Completed",
                message or "Job completed",
            )  # fmt: skip
            return 0.01
        return min((wait for wait in (again, _deadline(job, now)) if wait is not None), default=None)

    async def _adjust(self, job: Object, tally: Tally, pods: Sequence[Object], now: float) -> float | None:
        """Create or delete pods; the seconds to wait where a failure makes it pause."""
        wanted = wanted_active(job, tally)
        if len(tally.active) > wanted:
            surplus = sorted(tally.active, key=lambda pod: ready_since(pod) is not None)
            for pod in surplus[: len(tally.active) - wanted]:
                await self.delete(PODS, pod)
                tally.active.remove(pod)
            return None
        missing = min(wanted - len(tally.active), _BURST)
        if missing <= 0:
            return None
        pause = self._pause(tally, pods, now)
        if pause > 0:
            return pause
        indexes = free_indexes(job, tally, missing)
        for position in range(missing):
            index = indexes[position] if indexes is not None else None
            body = job_pod(job, index)
            try:
                pod, _ = await self.registry.create(PODS, namespace_of(job), body)
            except ApiError as error:
                await self.recorder.record(job, "Warning", "FailedCreate", f"Error creating: {error.message}")
                return min(self._backoff_s, 30.0)
            tally.active.append(pod)
            await self.recorder.record(job, "Normal", "SuccessfulCreate", f"Created pod: {name_of(pod)}")
        return None

    def _pause(self, tally: Tally, pods: Sequence[Object], now: float) -> float:
        if not tally.failed:
            return 0.0
        ends = [_ended_at(pod) for pod in pods if dig(pod, "status", "phase") == "Failed"]
        newest = max((end for end in ends if end is not None), default=None)
        if newest is None:
            return 0.0
        backoff = min(self._backoff_s * 2.0 ** min(tally.failed - 1, 16), _MAX_BACKOFF_S)
        return newest + backoff - now

    async def _release(self, pods: Sequence[Object]) -> None:
        """Take the finalizer off pods that are counted, or whose job has ended."""
        for pod in pods:
            if TRACKING not in (meta(pod).get("finalizers") or []):
                continue
            try:
                await self.registry.update(
                    PODS, namespace_of(pod), name_of(pod), lambda stored: without_finalizer(stored, TRACKING)
                )
            except ApiError as error:
                if error.code != 404:
                    raise

    async def _release_orphans(self, key: Key, pods: Sequence[Object]) -> None:
        """The job has gone: its pods must not wait for it."""
        for pod in pods:
            if any(self._is_mine(owner) and owner.get("name") == key[1]
                   for owner in meta(pod).get("ownerReferences") or []):  # fmt: skip
                await self._release([pod])

    async def _expire(self, job: Object, finished: float | None, now: float) -> float | None:
        """Delete a finished job ``ttlSecondsAfterFinished`` after its end."""
        limit = job["spec"].get("ttlSecondsAfterFinished")
        if finished is None or limit is None or is_deleting(job):
            return None
        left = finished + float(limit) - now
        if left > 0:
            return left
        options = DeleteOptions(
            {"preconditions": {"uid": meta(job)["uid"]}, "propagationPolicy": "Background"}
        )
        await self.registry.delete(JOBS, namespace_of(job), name_of(job), options)
        return None


def finished_at(job: Object) -> float | None:
    """When the job became Complete or Failed; None while it runs."""
    for condition in dig(job, "status", "conditions") or []:
        if condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True":
            return parse_time(str(condition.get("lastTransitionTime"))) or 0.0
    return None


def count(job: Object, pods: Sequence[Object]) -> Tally:
    """Add the pods that have ended and carry the finalizer to what was counted before.

    A pod that is deleted before it has ended counts as failed once its processes are gone.
    """
    status = job.get("status") or {}
    tally = Tally(int(status.get("succeeded") or 0), int(status.get("failed") or 0))
    tally.indexes_done = parse_indexes(str(status.get("completedIndexes") or ""))
    for pod in pods:
        tracked = TRACKING in (meta(pod).get("finalizers") or [])
        phase = dig(pod, "status", "phase")
        gone = is_deleting(pod) and not meta(pod).get("deletionGracePeriodSeconds")
        if is_active(pod):
            tally.active.append(pod)
        elif tracked and (phase in ("Succeeded", "Failed") or gone):
            tally.uncounted.append(pod)
            if phase == "Succeeded":
                index = _index(pod)
                if index is None or index not in tally.indexes_done:
                    tally.succeeded += 1
                if index is not None:
                    tally.indexes_done.add(index)
            else:
                tally.failed += 1
    return tally


def judge(job: Object, tally: Tally, now: float) -> tuple[str, str, str] | None:
    """(condition, reason, message) once the job has ended, else None."""
    spec = job["spec"]
    restarts = sum(
        int(status.get("restartCount") or 0)
        for pod in tally.active
        for status in dig(pod, "status", "containerStatuses") or []
    )
    limit = int(spec["backoffLimit"]) if spec.get("backoffLimit") is not None else 6
    if tally.failed > limit or (restarts and restarts + tally.failed > limit):
        return "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    began = parse_time(str(dig(job, "status", "startTime") or ""))
    deadline = spec.get("activeDeadlineSeconds")
    if deadline is not None and began is not None and began + float(deadline) <= now:
        return "Failed", "DeadlineExceeded", "Job was active longer than specified deadline"
    completions = spec.get("completions")
    if completions is None:
        if tally.succeeded and not tally.active:
            return "Complete", "", ""
    elif tally.succeeded >= int(completions):
        return "Complete", "", ""
    return None


def wanted_active(job: Object, tally: Tally) -> int:
    """How many pods are to run now."""
    parallelism = int(job["spec"].get("parallelism") or 0)
    completions = job["spec"].get("completions")
    if completions is None:
        # A work queue: after the first success no new pods.
        return min(parallelism, len(tally.active)) if tally.succeeded else parallelism
    return max(min(parallelism, int(completions) - tally.succeeded), 0)


def free_indexes(job: Object, tally: Tally, limit: int) -> list[int] | None:
    """The lowest completion indexes without a pod; None for a job without indexes."""
    if job["spec"].get("completionMode") != "Indexed":
        return None
    taken = tally.indexes_done | {index for pod in tally.active if (index := _index(pod)) is not None}
    return [index for index in range(int(job["spec"]["completions"])) if index not in taken][:limit]


def job_pod(job: Object, index: int | None) -> Object:
    """A new pod of the job, with the finalizer of the count, and its index where it has one."""
    pod = pod_from_template(job["spec"]["template"], JOBS, job)
    meta(pod)["finalizers"].append(TRACKING)
    if index is not None:
        meta(pod)["generateName"] = f"{name_of(job)}-{index}-"
        meta(pod)["annotations"][INDEX] = str(index)
        meta(pod)["labels"][INDEX] = str(index)
        pod["spec"].setdefault("hostname", f"{name_of(job)}-{index}")
        source = {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{INDEX}']"}}
        for group in ("initContainers", "containers"):
            for container in pod["spec"].get(group) or []:
                container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "valueFrom": source})
    return pod


def status_of(
    job: Object, tally: Tally, verdict: tuple[str, str, str] | None, suspended: bool, now: float
) -> Object:
    """The whole ``status`` of a job."""
    stamp = rfc3339(now)
    before = job.get("status") or {}
    status: Object = {"startTime": before.get("startTime") or stamp}
    if suspended:
        status.pop("startTime")
    counts = {
        "active": len(tally.active),
        "succeeded": tally.succeeded,
        "failed": tally.failed,
    }
    status.update({name: number for name, number in counts.items() if number})
    status["ready"] = sum(ready_since(pod) is not None for pod in tally.active)
    status["terminating"] = 0
    if job["spec"].get("completionMode") == "Indexed":
        status["completedIndexes"] = format_indexes(tally.indexes_done)
    conditions = [item for item in before.get("conditions") or [] if item.get("type") != "Suspended"]
    if suspended:
        conditions.append(_condition("Suspended", "JobSuspended", "Job suspended", stamp))
    if verdict is not None:
        conditions.append(_condition(*verdict, stamp))
        if verdict[0] == "Complete":
            status["completionTime"] = stamp
    if conditions:
        status["conditions"] = conditions
    return status


def _condition(kind: str, reason: str, message: str, stamp: str) -> Object:
    condition: Object = {
        "type": kind, "status": "True", "lastProbeTime": stamp, "lastTransitionTime": stamp,
    }  # fmt: skip
    if reason:
        condition.update(reason=reason, message=message)
    return condition


def parse_indexes(text: str) -> set[int]:
    """``0-2,5`` as a set; parts that are no numbers are left out."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return found


def format_indexes(indexes: set[int]) -> str:
    """The shortest form: ``0-2,5``."""
    parts: list[str] = []
    ordered = sorted(indexes)
    start = 0
    for position, index in enumerate(ordered):
        if position + 1 < len(ordered) and ordered[position + 1] == index + 1:
            continue
        first = ordered[start]
        parts.append(str(first) if first == index else f"{first}-{index}")
        start = position + 1
    return ",".join(parts)


def _index(pod: Object) -> int | None:
    text = annotations_of(pod).get(INDEX, "")
    return int(text) if text.isascii() and text.isdigit() else None


def _ended_at(pod: Object) -> float | None:
    ends = [
        parse_time(str(dig(status, "state", "terminated", "finishedAt") or ""))
        for status in dig(pod, "status", "containerStatuses") or []
    ]
    known = [end for end in ends if end is not None]
    return max(known) if known else parse_time(str(meta(pod).get("creationTimestamp")))


def _deadline(job: Object, now: float) -> float | None:
    limit, began = job["spec"].get("activeDeadlineSeconds"), dig(job, "status", "startTime")
    if limit is None:
        return None
    since = parse_time(str(began or "")) or now
    return max(since + float(limit) - now, 0.0) + 0.01
