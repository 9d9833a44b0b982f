"""ReplicaSets: as many pods as asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hami.local.api.errors import ApiError
from hami.local.api.objects import Object, clone, dig, labels_of, meta, name_of, namespace_of, parse_time
from hami.local.api.registry import set_condition
from hami.local.api.resources import PODS, REPLICASETS
from hami.local.api.selectors import matches_label_selector
from hami.local.controllers.common import (
    controller_of,
    is_active,
    is_available,
    is_controlled_by,
    is_deleting,
    owner_reference,
    pod_from_template,
    ready_since,
    with_owner,
    without_owner,
)
from hami.local.controllers.controller import Controller, Key

_BURST = 100  # pods created or deleted in one step
_FAILED_BASE_S = 0.5
_FAILED_MAX_S = 60.0
_KEPT_FAILED = 10  # finished pods kept per ReplicaSet for a look at their status


class ReplicaSetController(Controller):
    """Creates and deletes the pods of ReplicaSets; adopts and releases pods as their labels change."""

    resource = REPLICASETS
    component = "replicaset-controller"

    async def sync(self, key: Key) -> float | None:
        replicaset = self.store.find(REPLICASETS, *key)
        if replicaset is None:
            return None
        pods = await self._claim(replicaset)
        active = [pod for pod in pods if is_active(pod)]
        again = None
        failure = ""
        if not is_deleting(replicaset):
            wanted = int(replicaset["spec"]["replicas"])
            if len(active) < wanted:
                again = pause_after_failures(pods, self.clock())
                if again is None:
                    failure = await self._create(replicaset, min(wanted - len(active), _BURST))
            elif len(active) > wanted:
                for pod in deletion_order(active)[: min(len(active) - wanted, _BURST)]:
                    await self.delete(PODS, pod)
                    await self.recorder.record(
                        replicaset, "Normal", "SuccessfulDelete", f"Deleted pod: {name_of(pod)}"
                    )
            await self._drop_old_failures(pods)
        pods = [pod for pod in self.store.list(PODS, key[0]) if is_controlled_by(pod, replicaset)]
        await self.write_status(replicaset, status_of(replicaset, pods, failure, self.clock()))
        if failure:
            raise ApiError(403, "Forbidden", failure)
        waits = [again, _next_available(replicaset, pods, self.clock())]
        return min((wait for wait in waits if wait is not None), default=None)

    async def _claim(self, replicaset: Object) -> list[Object]:
        """The pods that ``replicaset`` controls, after taking orphans and letting go of strangers."""
        selector = replicaset["spec"].get("selector")
        claimed: list[Object] = []
        for pod in self.store.list(PODS, namespace_of(replicaset)):
            matches = matches_label_selector(selector, labels_of(pod))
            if is_controlled_by(pod, replicaset):
                if matches or is_deleting(pod):
                    claimed.append(pod)
                else:
                    await self._set_owner(pod, replicaset, owned=False)
            elif matches and controller_of(pod) is None and is_active(pod) and not is_deleting(replicaset):
                claimed.append(await self._set_owner(pod, replicaset, owned=True))
        return claimed

    async def _set_owner(self, pod: Object, replicaset: Object, *, owned: bool) -> Object:
        reference = owner_reference(REPLICASETS, replicaset)

        def change(current: Object) -> Object:
            return with_owner(current, reference) if owned else without_owner(current, reference["uid"])

        changed, _ = await self.registry.update(PODS, namespace_of(pod), name_of(pod), change)
        return changed

    async def _create(self, replicaset: Object, count: int) -> str:
        """Create ``count`` pods; why that failed, empty if it did not."""
        for _ in range(count):
            body = pod_from_template(replicaset["spec"]["template"], REPLICASETS, replicaset)
            try:
                pod, _ = await self.registry.create(PODS, namespace_of(replicaset), body)
            except ApiError as error:
                text = f"Error creating: {error.message}"
                await self.recorder.record(replicaset, "Warning", "FailedCreate", text)
                return error.message
            await self.recorder.record(
                replicaset, "Normal", "SuccessfulCreate", f"Created pod: {name_of(pod)}"
            )
        return ""

    async def _drop_old_failures(self, pods: Sequence[Object]) -> None:
        finished = [pod for pod in pods if dig(pod, "status", "phase") == "Failed" and not is_deleting(pod)]
        finished.sort(key=lambda pod: str(meta(pod)["creationTimestamp"]))
        for pod in finished[:-_KEPT_FAILED]:
            await self.delete(PODS, pod)


def pause_after_failures(pods: Sequence[Object], now: float) -> float | None:
    """Seconds to wait before a replacement for pods that failed as a whole; None: replace now."""
    failed = [pod for pod in pods if dig(pod, "status", "phase") == "Failed"]
    if not failed:
        return None
    newest = max(parse_time(str(meta(pod)["creationTimestamp"])) or 0.0 for pod in failed)
    pause = min(_FAILED_BASE_S * 2.0 ** min(len(failed), 20), _FAILED_MAX_S)
    left = newest + pause - now
    return left if left > 0 else None


def deletion_order(pods: Sequence[Object]) -> list[Object]:
    """The pods whose loss costs least first: unassigned, not ready, cheap, crowded on a node, young."""
    crowd = Counter(dig(pod, "spec", "nodeName") for pod in pods)
    phases = {"Pending": 0, "Unknown": 1, "Running": 2}

    def cost(pod: Object) -> tuple[bool, int, bool, int, int, float]:
        node = dig(pod, "spec", "nodeName")
        price = str((meta(pod).get("annotations") or {}).get("controller.kubernetes.io/pod-deletion-cost", 0))
        return (
            bool(node),
            phases.get(str(dig(pod, "status", "phase")), 1),
            ready_since(pod) is not None,
            int(price) if price.lstrip("-").isdigit() else 0,
            -crowd[node],
            -(parse_time(str(meta(pod)["creationTimestamp"])) or 0.0),
        )

    return sorted(pods, key=cost)


def status_of(replicaset: Object, pods: Sequence[Object], failure: str, now: float) -> Object:
    """``status`` for the pods that the ReplicaSet controls; ``failure``: why a pod could not be created."""
    active = [pod for pod in pods if is_active(pod)]
    minimum = float(replicaset["spec"].get("minReadySeconds") or 0)
    ready = [pod for pod in active if ready_since(pod) is not None]
    status: Object = {
        "replicas": len(active),
        "observedGeneration": meta(replicaset).get("generation", 1),
    }
    counts = {
        "fullyLabeledReplicas": len(active),
        "readyReplicas": len(ready),
        "availableReplicas": sum(is_available(pod, minimum, now) for pod in ready),
    }
    status.update({field: count for field, count in counts.items() if count})
    scratch: Object = {"status": {"conditions": clone(dig(replicaset, "status", "conditions") or [])}}
    if failure:
        set_condition(
            scratch, "ReplicaFailure", "True", now=now, reason="FailedCreate", message=failure[:1024]
        )
        status["conditions"] = scratch["status"]["conditions"]
    return status


def _next_available(replicaset: Object, pods: Sequence[Object], now: float) -> float | None:
    """Seconds until the next ready pod has been so for ``minReadySeconds``."""
    minimum = float(replicaset["spec"].get("minReadySeconds") or 0)
    waits = [since + minimum - now for pod in pods if (since := ready_since(pod)) is not None]
    return min((wait for wait in waits if wait > 0), default=None)
