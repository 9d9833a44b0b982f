"""Deployments: one ReplicaSet per pod template, replaced at once (Recreate) or step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hami.local.api.errors import ApiError
from hami.local.api.objects import (
    Object,
    annotations_of,
    clone,
    dig,
    labels_of,
    meta,
    name_of,
    namespace_of,
    parse_time,
    rfc3339,
)
from hami.local.api.resources import DEPLOYMENTS, PODS, REPLICASETS
from hami.local.api.selectors import matches_label_selector
from hami.local.api.store import Event
from hami.local.controllers.common import (
    controller_of,
    is_controlled_by,
    is_deleting,
    owner_reference,
    share_of,
    template_hash,
    with_owner,
    without_label,
)
from hami.local.controllers.controller import Controller, Key
from hami.local.controllers.rollout import Bounds, Size, next_new, next_old

HASH_LABEL = "pod-template-hash"
REVISION = "deployment.kubernetes.io/revision"


class DeploymentController(Controller):
    """Creates, scales and cleans up the ReplicaSets of Deployments."""

    resource = DEPLOYMENTS
    component = "deployment-controller"

    def keys(self, storage_key: str, event: Event) -> Iterable[Key]:
        if storage_key == REPLICASETS.key:
            return self.owner_keys(event)
        if storage_key == PODS.key and event.change == "DELETED":
            # Recreate waits for the last old pod to go.
            return self._grandparent(event.obj)
        return super().keys(storage_key, event) if storage_key == DEPLOYMENTS.key else []

    def _grandparent(self, pod: Object) -> list[Key]:
        reference = controller_of(pod)
        if reference is None or reference.get("kind") != REPLICASETS.kind:
            return []
        parent = self.store.find(REPLICASETS, namespace_of(pod), str(reference.get("name")))
        owner = controller_of(parent) if parent is not None else None
        return [(namespace_of(pod), str(owner["name"]))] if owner is not None and self._is_mine(owner) else []

    async def sync(self, key: Key) -> float | None:
        deployment = self.store.find(DEPLOYMENTS, *key)
        if deployment is None or is_deleting(deployment):
            return None
        await self._adopt(deployment)
        current, old = self._sets(deployment)
        paused = bool(deployment["spec"].get("paused"))
        if current is None and not paused:
            current = await self._create(deployment, old)
        elif current is not None and not paused:
            current = await self._make_newest(deployment, current, old)
        if paused:
            await self._scale_paused(deployment, current, old)
        elif current is not None:
            await self._scale_all(deployment, current, old)
            await self._note_revision(deployment, current)
        current, old = self._sets(deployment)
        now = self.clock()
        status = status_of(deployment, current, old, now)
        await self.write_status(deployment, status)
        if current is not None and is_complete(deployment, status):
            await self._clean_up(deployment, old)
        return _deadline(deployment, status, now)

    def _owned(self, deployment: Object) -> list[Object]:
        return [
            found
            for found in self.store.list(REPLICASETS, namespace_of(deployment))
            if is_controlled_by(found, deployment)
        ]

    def _sets(self, deployment: Object) -> tuple[Object | None, list[Object]]:
        """The ReplicaSet of the present template, if there is one, and the others, oldest first."""
        wanted = without_label(deployment["spec"]["template"], HASH_LABEL)
        owned = sorted(self._owned(deployment), key=lambda found: (_revision(found), name_of(found)))
        same = [found for found in owned if without_label(found["spec"]["template"], HASH_LABEL) == wanted]
        current = same[0] if same else None
        return current, [found for found in owned if found is not current]

    async def _adopt(self, deployment: Object) -> None:
        """Take ReplicaSets that match the selector and have no controller (left by an orphaning delete)."""
        for found in self.store.list(REPLICASETS, namespace_of(deployment)):
            if controller_of(found) is not None or is_deleting(found):
                continue
            if matches_label_selector(deployment["spec"]["selector"], labels_of(found)):
                await self.registry.update(
                    REPLICASETS, namespace_of(found), name_of(found),
                    lambda stored: with_owner(stored, owner_reference(DEPLOYMENTS, deployment)),
                )  # fmt: skip

    async def _create(self, deployment: Object, old: Sequence[Object]) -> Object:
        template = without_label(deployment["spec"]["template"], HASH_LABEL)
        digest = template_hash(template)
        labels = {**labels_of(template), HASH_LABEL: digest}
        template["metadata"] = {**(template.get("metadata") or {}), "labels": labels}
        selector: Object = clone(deployment["spec"]["selector"])
        selector["matchLabels"] = {**(selector.get("matchLabels") or {}), HASH_LABEL: digest}
        start = 0 if _strategy(deployment) == "Recreate" else next_new(
            _bounds(deployment), Size(0, 0), [_size(found) for found in old]
        )  # fmt: skip
        body: Object = {
            "metadata": {
                "name": f"{name_of(deployment)}-{digest}",
                "labels": labels,
                "annotations": {REVISION: str(max((_revision(found) for found in old), default=0) + 1)},
                "ownerReferences": [owner_reference(DEPLOYMENTS, deployment)],
            },
            "spec": {"replicas": start, "selector": selector, "template": template},
        }
        if deployment["spec"].get("minReadySeconds"):
            body["spec"]["minReadySeconds"] = deployment["spec"]["minReadySeconds"]
        created, _ = await self.registry.create(REPLICASETS, namespace_of(deployment), body)
        await self._say(deployment, created, 0, start)
        return created

    async def _make_newest(self, deployment: Object, current: Object, old: Sequence[Object]) -> Object:
        """Give the present ReplicaSet the highest revision: after a rollback it is not so yet."""
        newest = max((_revision(found) for found in old), default=0)
        minimum = deployment["spec"].get("minReadySeconds")
        if _revision(current) > newest and current["spec"].get("minReadySeconds") == minimum:
            return current

        def change(stored: Object) -> Object:
            changed: Object = clone(stored)
            if _revision(changed) <= newest:
                meta(changed).setdefault("annotations", {})[REVISION] = str(newest + 1)
            if minimum is not None:
                changed["spec"]["minReadySeconds"] = minimum
            else:
                changed["spec"].pop("minReadySeconds", None)
            return changed

        changed, _ = await self.registry.update(REPLICASETS, namespace_of(current), name_of(current), change)
        return changed

    async def _scale_paused(self, deployment: Object, current: Object | None, old: Sequence[Object]) -> None:
        """No rollout; where a single ReplicaSet has pods, it follows ``replicas``."""
        everything = [*old, *([current] if current is not None else [])]
        active = [found for found in everything if _size(found).wanted] or everything[-1:]
        if len(active) == 1:
            await self._scale(deployment, active[0], int(deployment["spec"]["replicas"]))

    async def _scale_all(self, deployment: Object, current: Object, old: Sequence[Object]) -> None:
        """One step towards ``replicas`` pods of the present template."""
        bounds = _bounds(deployment)
        if _strategy(deployment) == "Recreate":
            for found in old:
                await self._scale(deployment, found, 0)
            if not self._has_pods(old):
                await self._scale(deployment, current, bounds.replicas)
            return
        await self._scale(deployment, current, next_new(bounds, _size(current), [_size(s) for s in old]))
        current, old = self._reread(current), [self._reread(found) for found in old]
        wanted = next_old(bounds, _size(current), [_size(found) for found in old])
        for found, count in zip(old, wanted, strict=True):
            await self._scale(deployment, found, count)

    def _reread(self, replicaset: Object) -> Object:
        return self.store.get(REPLICASETS, namespace_of(replicaset), name_of(replicaset))

    def _has_pods(self, sets: Sequence[Object]) -> bool:
        uids = {meta(found)["uid"] for found in sets}
        return any(
            (controller_of(pod) or {}).get("uid") in uids
            and dig(pod, "status", "phase") not in ("Succeeded", "Failed")
            for found in sets[:1]
            for pod in self.store.list(PODS, namespace_of(found))
        )

    async def _scale(self, deployment: Object, replicaset: Object, count: int) -> None:
        before = int(replicaset["spec"]["replicas"])
        if before == count:
            return

        def change(stored: Object) -> Object:
            changed: Object = clone(stored)
            changed["spec"]["replicas"] = count
            return changed

        await self.registry.update(REPLICASETS, namespace_of(replicaset), name_of(replicaset), change)
        await self._say(deployment, replicaset, before, count)

    async def _say(self, deployment: Object, replicaset: Object, before: int, after: int) -> None:
        if before != after:
            word = "up" if after > before else "down"
            await self.recorder.record(
                deployment, "Normal", "ScalingReplicaSet",
                f"Scaled {word} replica set {name_of(replicaset)} from {before} to {after}",
            )  # fmt: skip

    async def _note_revision(self, deployment: Object, current: Object) -> None:
        revision = str(_revision(self._reread(current)))
        if annotations_of(deployment).get(REVISION) == revision:
            return

        def change(stored: Object) -> Object:
            changed: Object = clone(stored)
            meta(changed).setdefault("annotations", {})[REVISION] = revision
            return changed

        await self.registry.update(DEPLOYMENTS, namespace_of(deployment), name_of(deployment), change)

    async def _clean_up(self, deployment: Object, old: Sequence[Object]) -> None:
        """Remove empty ReplicaSets beyond ``revisionHistoryLimit``, oldest first."""
        kept = int(deployment["spec"].get("revisionHistoryLimit") or 0)
        empty = [found for found in old if not _size(found).wanted and not dig(found, "status", "replicas")]
        for found in empty[: max(len(empty) - kept, 0)]:
            try:
                await self.delete(REPLICASETS, found)
            except ApiError as error:
                if error.code != 404:
                    raise


def _strategy(deployment: Object) -> str:
    return str(dig(deployment, "spec", "strategy", "type") or "RollingUpdate")


def _bounds(deployment: Object) -> Bounds:
    replicas = int(deployment["spec"]["replicas"])
    rolling = dig(deployment, "spec", "strategy", "rollingUpdate") or {}
    surge = share_of(rolling.get("maxSurge"), replicas, round_up=True)
    unavailable = min(share_of(rolling.get("maxUnavailable"), replicas, round_up=False), replicas)
    if _strategy(deployment) == "RollingUpdate" and surge == 0 and unavailable == 0:
        unavailable = 1  # else no step would be possible
    return Bounds(replicas, surge, unavailable)


def _size(replicaset: Object) -> Size:
    return Size(int(replicaset["spec"]["replicas"]), int(dig(replicaset, "status", "availableReplicas") or 0))


def _revision(replicaset: Object) -> int:
    text = annotations_of(replicaset).get(REVISION, "0")
    return int(text) if text.isascii() and text.isdigit() else 0


def _total(sets: Iterable[Object], field: str) -> int:
    return sum(int(dig(found, "status", field) or 0) for found in sets)


def status_of(deployment: Object, current: Object | None, old: Sequence[Object], now: float) -> Object:
    """``status`` of a Deployment, computed from its ReplicaSets' own."""
    everything = [*old, *([current] if current is not None else [])]
    replicas = int(deployment["spec"]["replicas"])
    available = _total(everything, "availableReplicas")
    counts = {
        "replicas": _total(everything, "replicas"),
        "updatedReplicas": _total([current] if current is not None else [], "replicas"),
        "readyReplicas": _total(everything, "readyReplicas"),
        "availableReplicas": available,
        "unavailableReplicas": max(_wanted(everything) - available, 0),
    }
    status: Object = {"observedGeneration": meta(deployment).get("generation", 1)}
    status.update({field: count for field, count in counts.items() if count})
    before = {item["type"]: item for item in dig(deployment, "status", "conditions") or []}
    conditions = []
    enough = available >= _bounds(deployment).least_available
    conditions.append(
        _condition(
            before.get("Available"), "Available", "True" if enough else "False",
            "MinimumReplicasAvailable" if enough else "MinimumReplicasUnavailable",
            f"Deployment {'has' if enough else 'does not have'} minimum availability.", now, moved=False,
        )
    )  # fmt: skip
    name = name_of(current) if current is not None else name_of(deployment)
    moved = any(dig(deployment, "status", field) != status.get(field) for field in _PROGRESS_FIELDS)
    if counts["updatedReplicas"] == replicas == counts["replicas"] == available and current is not None:
        state = ("True", "NewReplicaSetAvailable", f'ReplicaSet "{name}" has successfully progressed.')
        moved = moved and (before.get("Progressing") or {}).get("reason") != "NewReplicaSetAvailable"
    elif not moved and _is_late(deployment, before.get("Progressing"), now):
        state = ("False", "ProgressDeadlineExceeded", f'ReplicaSet "{name}" has timed out progressing.')
    else:
        state = ("True", "ReplicaSetUpdated", f'ReplicaSet "{name}" is progressing.')
    conditions.append(_condition(before.get("Progressing"), "Progressing", *state, now, moved=moved))
    status["conditions"] = conditions
    return status


_PROGRESS_FIELDS = ("updatedReplicas", "readyReplicas", "availableReplicas", "replicas")


def _wanted(sets: Iterable[Object]) -> int:
    return sum(int(found["spec"]["replicas"]) for found in sets)


def _condition(
    before: Object | None, kind: str, status: str, reason: str, message: str, now: float, *, moved: bool
) -> Object:
    """``lastTransitionTime`` moves with the status, ``lastUpdateTime`` with ``moved`` or the reason."""
    stamp = rfc3339(now)
    same_status = before is not None and before.get("status") == status
    same = same_status and before is not None and before.get("reason") == reason and not moved
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastUpdateTime": before["lastUpdateTime"] if same and before is not None else stamp,
        "lastTransitionTime": before["lastTransitionTime"] if same_status and before is not None else stamp,
    }


def _is_late(deployment: Object, progressing: Object | None, now: float) -> bool:
    if progressing is None or progressing.get("reason") == "NewReplicaSetAvailable":
        return False
    if progressing.get("reason") == "ProgressDeadlineExceeded":
        return True
    deadline = deployment["spec"].get("progressDeadlineSeconds")
    since = parse_time(str(progressing.get("lastUpdateTime")))
    paused = bool(deployment["spec"].get("paused"))
    return deadline is not None and since is not None and not paused and since + float(deadline) < now


def is_complete(deployment: Object, status: Object) -> bool:
    """Whether every pod is of the present template and available."""
    replicas = int(deployment["spec"]["replicas"])
    return bool(
        status.get("updatedReplicas", 0) == status.get("replicas", 0) == replicas
        and status.get("availableReplicas", 0) == replicas
    )


def _deadline(deployment: Object, status: Object, now: float) -> float | None:
    """Seconds until a rollout that does not move is late."""
    for condition in status["conditions"]:
        if condition["type"] == "Progressing" and condition["reason"] == "ReplicaSetUpdated":
            since = parse_time(condition["lastUpdateTime"]) or now
            return max(since + float(deployment["spec"].get("progressDeadlineSeconds") or 600) - now, 0) + 1
    return None
