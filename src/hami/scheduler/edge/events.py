"""What users read on their pods and nodes (protocol.md §10, scheduler.md §12)."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from hami.kube.events import EventRecorder, ObjectRef
from hami.scheduler.core.answers import NoFit, Notice, Placement, Reservation
from hami.scheduler.core.texts import codes
from hami.vendors.reasons import QUOTA_NOT_FIT

_SUMMARY_EVERY_S = 30.0
_REMEMBERED = 10_000


class SchedulerEvents:
    """Records the scheduler's events; nothing here blocks or fails."""

    def __init__(self, recorder: EventRecorder, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder = recorder
        self._clock = clock
        self._failed_at: OrderedDict[str, float] = OrderedDict()
        self.binding_failures = 0

    def filtering_succeeded(self, pod: ObjectRef, placement: Placement) -> None:
        """The pod has a node."""
        self._failed_at.pop(pod.uid, None)
        self._recorder.record(pod, "Normal", "FilteringSucceed", placement.message)

    def filtering_failed(self, pod: ObjectRef, answer: NoFit) -> None:
        """Nothing fits: one event per reason and a summary, at most every 30 s for a pod that is tried
        again."""
        now = self._clock()
        if now - self._failed_at.get(pod.uid, -_SUMMARY_EVERY_S) < _SUMMARY_EVERY_S:
            return
        self._failed_at[pod.uid] = now
        self._failed_at.move_to_end(pod.uid)
        if len(self._failed_at) > _REMEMBERED:
            self._failed_at.popitem(last=False)
        for message in answer.messages():
            self._recorder.record(pod, "Warning", "FilteringFailed", message)
        texts = (*answer.failed.values(), *answer.unresolvable.values())
        by_quota = sum(QUOTA_NOT_FIT in codes(text) for text in texts)
        if by_quota:
            where = f"{by_quota} of {len(texts)} nodes"
            text = f"the quota of namespace {pod.namespace} refuses the pod on {where}"
            self._recorder.record(
                pod, "Warning", "FilteringFailed", f"namespace quota, not node capacity: {text}"
            )

    def filtering_error(self, pod: ObjectRef, message: str) -> None:
        """The pod could not be judged."""
        self._recorder.record(pod, "Warning", "FilteringFailed", message)

    def bound(self, pod: ObjectRef, node: str) -> None:
        """The pod is bound."""
        message = f"Successfully binding node [{node}] to {pod.namespace}/{pod.name}"
        self._recorder.record(pod, "Normal", "BindingSucceed", message)

    def unlimited(self, pod: ObjectRef, container: str) -> None:
        """A privileged pod with devices was bound (decision 1)."""
        message = f"container {container} is privileged, its GPU limits are not enforced"
        self._recorder.record(pod, "Warning", "HAMiUnlimited", message)

    def binding_failed(self, pod: ObjectRef, message: str) -> None:
        """The pod could not be bound."""
        self.binding_failures += 1
        self._recorder.record(pod, "Warning", "BindingFailed", message)

    def reservation_expired(self, reservation: Reservation, timeout: str) -> None:
        """kube-scheduler never came back for the pod."""
        message = f"no bind request within {timeout}, the devices on node {reservation.node} are free again"
        self._recorder.record(pod_of(reservation), "Warning", "ReservationExpired", message)

    def notice(self, notice: Notice) -> None:
        """A warning of the scheduling core."""
        ref = ObjectRef(notice.kind, notice.name, notice.namespace, notice.uid)
        self._recorder.record(ref, "Warning", notice.reason, notice.message)


def pod_of(reservation: Reservation) -> ObjectRef:
    """The pod of a reservation."""
    return ObjectRef("Pod", reservation.name, reservation.namespace, reservation.uid)
