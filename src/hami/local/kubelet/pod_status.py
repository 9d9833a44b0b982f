"""The status of a pod as kubelet reports it, computed from what its containers do. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hami.local.api.objects import Object, clone, dig, meta, rfc3339
from hami.local.api.registry import set_condition


@dataclass(slots=True)
class ContainerRecord:
    """One container: waiting, running (started) or terminated (exit code set). Times in seconds."""

    name: str
    image: str
    waiting_reason: str = "ContainerCreating"
    message: str = ""
    started_at: float | None = None
    finished_at: float | None = None
    exit_code: int | None = None
    exit_reason: str = ""
    restarts: int = 0
    last: Object | None = None
    container_id: str = ""
    sidecar: bool = False
    image_id: str = ""

    @property
    def running(self) -> bool:
        return self.started_at is not None and self.exit_code is None

    @property
    def terminated(self) -> bool:
        return self.exit_code is not None

    def begin(self, now: float, container_id: str) -> None:
        """The program runs."""
        self.started_at, self.finished_at, self.exit_code = now, None, None
        self.waiting_reason = self.message = self.exit_reason = ""
        self.container_id = container_id

    def end(self, now: float, code: int, reason: str = "", message: str = "") -> None:
        """The program has ended, or could not be started (``reason`` given then)."""
        if self.started_at is None:
            self.started_at = now
        self.finished_at, self.exit_code, self.message = now, code, message
        self.exit_reason = reason or ("Completed" if code == 0 else "Error")

    def wait(self, reason: str, message: str) -> None:
        """Back to waiting: for the next start, or because it cannot be started."""
        if self.terminated:
            self.last = self._terminated()
        self.started_at = self.finished_at = self.exit_code = None
        self.waiting_reason, self.message = reason, message

    def _terminated(self) -> Object:
        state: Object = {
            "exitCode": self.exit_code,
            "reason": self.exit_reason,
            "startedAt": rfc3339(self.started_at or 0.0),
            "finishedAt": rfc3339(self.finished_at or 0.0),
            "containerID": self.container_id,
        }
        if self.exit_code is not None and self.exit_code > 128:
            state["signal"] = self.exit_code - 128
        if self.message:
            state["message"] = self.message
        return {"terminated": state}

    def status(self) -> Object:
        """``ContainerStatus``."""
        if self.terminated:
            state = self._terminated()
        elif self.running:
            state = {"running": {"startedAt": rfc3339(self.started_at or 0.0)}}
        else:
            waiting: Object = {"reason": self.waiting_reason or "ContainerCreating"}
            if self.message:
                waiting["message"] = self.message
            state = {"waiting": waiting}
        return {
            "name": self.name,
            "image": self.image,
            "imageID": self.image_id,
            "containerID": self.container_id,
            "state": state,
            "lastState": self.last or {},
            "ready": self.running,
            "started": self.running,
            "restartCount": self.restarts,
        }


def restarts(policy: str, record: ContainerRecord) -> bool:
    """Whether a container that has ended is started again."""
    if record.sidecar or policy == "Always":
        return True
    return policy == "OnFailure" and record.exit_code != 0


def pod_phase(policy: str, inits: Sequence[ContainerRecord], regular: Sequence[ContainerRecord]) -> str:
    """Pending, Running, Succeeded or Failed."""
    ordinary = [record for record in inits if not record.sidecar]
    for record in ordinary:
        if record.terminated and record.exit_code != 0 and not restarts(_init_policy(policy), record):
            return "Failed"
    if not all(record.terminated and record.exit_code == 0 for record in ordinary):
        return "Pending"
    if all(record.terminated and not restarts(policy, record) for record in regular):
        return "Succeeded" if all(record.exit_code == 0 for record in regular) else "Failed"
    if all(record.running or record.terminated or record.restarts for record in regular):
        return "Running"
    return "Pending"


def _init_policy(policy: str) -> str:
    return "OnFailure" if policy == "Always" else policy


def build_status(
    pod: Object,
    inits: Sequence[ContainerRecord],
    regular: Sequence[ContainerRecord],
    *,
    now: float,
    address: str,
) -> Object:
    """The whole ``status`` of a running pod, with the conditions that others set kept."""
    policy = str(dig(pod, "spec", "restartPolicy") or "Always")
    status: Object = clone(pod.get("status") or {})
    scratch: Object = {"status": status}
    phase = pod_phase(policy, inits, regular)
    finished = phase in ("Succeeded", "Failed")
    status["phase"] = phase
    status.setdefault("startTime", rfc3339(now))
    status["hostIP"] = status["podIP"] = address
    status["hostIPs"] = status["podIPs"] = [{"ip": address}]
    if inits:
        status["initContainerStatuses"] = [record.status() for record in inits]
    status["containerStatuses"] = [record.status() for record in regular]
    initialized = all(record.exit_code == 0 or (record.sidecar and record.running) for record in inits)
    names = [record.name for record in regular if not record.running]
    set_condition(
        scratch, "Initialized", "True" if initialized or finished else "False", now=now,
        reason="" if initialized or finished else "ContainersNotInitialized",
    )  # fmt: skip
    for kind in ("Ready", "ContainersReady"):
        if not names:
            set_condition(scratch, kind, "True", now=now)
        elif finished:
            reason = "PodCompleted" if phase == "Succeeded" else "PodFailed"
            set_condition(scratch, kind, "False", now=now, reason=reason)
        else:
            set_condition(
                scratch, kind, "False", now=now, reason="ContainersNotReady",
                message=f"containers with unready status: [{' '.join(names)}]",
            )  # fmt: skip
    return status


def rejected_status(pod: Object, reason: str, message: str, now: float) -> Object:
    """The status of a pod that the kubelet did not admit."""
    status: Object = clone(pod.get("status") or {})
    status.update(phase="Failed", reason=reason, message=message, startTime=rfc3339(now))
    return status


def key_of(pod: Object) -> tuple[str, str, str]:
    """(namespace, name, uid)."""
    metadata = meta(pod)
    return str(metadata.get("namespace")), str(metadata["name"]), str(metadata["uid"])
