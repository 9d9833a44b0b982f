"""The operations of the API on the store: defaults, admission, validation, graceful deletion, Binding.

Everything below HTTP and above the store. Coroutines wait only for admission webhooks.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from secrets import token_bytes
from typing import Any

from hami.local.api import quota, strategy
from hami.local.api.admission import AdmissionRequest, Admitted, Webhooks, admission_name
from hami.local.api.apply import track_update
from hami.local.api.defaults import apply_defaults
from hami.local.api.errors import (
    ApiError,
    bad_request,
    conflict,
    forbidden,
    invalid,
    method_not_allowed,
    not_found,
)
from hami.local.api.objects import Object, clone, dig, meta, name_of, rfc3339
from hami.local.api.resources import (
    EVENTS,
    NAMESPACES,
    PODS,
    RESOURCEQUOTAS,
    Resource,
    ResourceTable,
)
from hami.local.api.store import Event, Store

CONTROL_PLANE = "embedded-control-plane"
MAX_EVENTS = 10_000  # Event objects kept; the oldest go first
_PATCH_ATTEMPTS = 5
_GONE_PHASES = ("Succeeded", "Failed")
FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
_PROPAGATION = {"Foreground": FOREGROUND, "Orphan": ORPHAN, "Background": ""}


Change = Callable[[Object], Object]
"""Makes the wanted object out of the stored one."""


class DeleteOptions:
    """The fields of ``metav1.DeleteOptions`` that matter here. Grace in seconds, None = the object's own.

    ``finalizer`` is what the propagation policy puts on the object; None: the object's finalizers stay.
    """

    __slots__ = ("dry_run", "finalizer", "grace_s", "resource_version", "uid")

    def __init__(
        self,
        body: Any = None,
        *,
        grace_s: int | None = None,
        dry_run: bool = False,
        propagation: str = "",
    ) -> None:
        options = body if isinstance(body, dict) else {}
        wanted = options.get("gracePeriodSeconds", grace_s)
        if wanted is not None and (not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 0):
            raise bad_request(f"gracePeriodSeconds {wanted!r} is not a number of seconds")
        self.grace_s: int | None = wanted
        policy = str(options.get("propagationPolicy") or propagation)
        if not policy and "orphanDependents" in options:
            policy = "Orphan" if options["orphanDependents"] else "Background"
        if policy and policy not in _PROPAGATION:
            raise bad_request(
                f'invalid DeleteOptions: propagationPolicy: Unsupported value: "{policy}": supported values: '
                '"Background", "Foreground", "Orphan"'
            )
        self.finalizer: str | None = _PROPAGATION[policy] if policy else None
        self.uid = str(dig(options, "preconditions", "uid") or "")
        self.resource_version = str(dig(options, "preconditions", "resourceVersion") or "")
        self.dry_run = dry_run or "All" in (options.get("dryRun") or [])


class Registry:
    """Create, update, patch, delete and bind. Reads go to ``store`` directly.

    ``clock`` gives seconds since the epoch.
    """

    def __init__(self, store: Store, table: ResourceTable, clock: Callable[[], float]) -> None:
        self.store = store
        self.table = table
        self._clock = clock
        self.webhooks = Webhooks(store, _new_uid)
        self._event_names: list[tuple[str, str]] = []
        store.subscribe(self._after)
        for name in ("default", "kube-system", "kube-public", "kube-node-lease"):
            self._put(NAMESPACES, {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": name}})

    async def create(
        self, resource: Resource, namespace: str, body: Any, *, dry_run: bool = False
    ) -> tuple[Object, list[str]]:
        """The stored object and the warnings of admission."""
        obj = strategy.check_identity(resource, clone(body), namespace, None)
        if resource.namespaced:
            self._check_namespace(resource, namespace, name_of(obj))
        if resource.key in ("pods", "namespaces"):
            obj.pop("status", None)
        strategy.stamp_new(
            obj, now=self._clock(), uid=_new_uid(), suffix=strategy.random_suffix(token_bytes(5))
        )
        apply_defaults(resource, obj)
        identity = clone(meta(obj))
        request = AdmissionRequest(
            resource, "CREATE", namespace, admission_name(obj), obj, None, dry_run,
            options={"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
        )  # fmt: skip
        admitted = await self._admit(request)
        obj = _object_of(admitted)
        for field in ("name", "namespace", "uid", "creationTimestamp"):
            if field in identity:
                meta(obj)[field] = identity[field]
        strategy.validate(resource, obj)
        if resource.namespaced:
            self._check_namespace(resource, namespace, name_of(obj))
        if resource is PODS:
            self._gate(obj)
            quota.check(self.store, obj)
        if dry_run:
            if self.store.find(resource, namespace, name_of(obj)) is not None:
                self.store.create(resource, obj)  # raises AlreadyExists
            return obj, admitted.warnings
        return self.store.create(resource, obj), admitted.warnings

    async def update(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        change: Change,
        *,
        subresource: str = "",
        dry_run: bool = False,
        manager: str | None = CONTROL_PLANE,
    ) -> tuple[Object, list[str]]:
        """Store what ``change`` makes of the current object.

        ``manager`` owns the fields that it changes; None where ``change`` sets ``managedFields`` itself.

        A resourceVersion in its result must be the current one (409). Without one the change is made
        again, at most 5 times, if admission let somebody else in between.
        """
        for attempt in range(_PATCH_ATTEMPTS):
            current = self.store.get(resource, namespace, name)
            wanted = strategy.check_identity(resource, clone(change(current)), namespace, name)
            self.store.check_version(resource, current, wanted)
            try:
                return await self._update_once(resource, current, wanted, subresource, dry_run, manager)
            except ApiError as error:
                unchanged = self.store.find(resource, namespace, name) is current
                if error.reason != "Conflict" or unchanged or attempt + 1 == _PATCH_ATTEMPTS:
                    raise
        raise AssertionError("the loop above returns or raises")

    async def _update_once(
        self,
        resource: Resource,
        current: Object,
        wanted: Object,
        subresource: str,
        dry_run: bool,
        manager: str | None,
    ) -> tuple[Object, list[str]]:
        namespace, name = str(meta(current).get("namespace") or ""), name_of(current)
        meta(wanted)["resourceVersion"] = meta(current)["resourceVersion"]
        apply_defaults(resource, wanted)
        strategy.prepare_update(resource, current, wanted, subresource)
        request = AdmissionRequest(
            resource, "UPDATE", namespace, name, wanted, current, dry_run, subresource,
            options={"kind": "UpdateOptions", "apiVersion": "meta.k8s.io/v1"},
        )  # fmt: skip
        admitted = await self._admit(request)
        wanted = _object_of(admitted)
        meta(wanted)["resourceVersion"] = meta(current)["resourceVersion"]
        strategy.prepare_update(resource, current, wanted, subresource)
        strategy.validate(resource, wanted)
        if manager is not None:
            track_update(resource, current, wanted, manager, subresource, self._clock())
        if wanted == current or dry_run:
            return wanted, admitted.warnings
        if meta(wanted).get("deletionTimestamp") and self._is_released(resource, wanted):
            return self._remove(resource, wanted), admitted.warnings
        return self.store.update(resource, wanted), admitted.warnings

    async def delete(
        self, resource: Resource, namespace: str, name: str, options: DeleteOptions | None = None
    ) -> Object:
        """Delete at once, or mark for deletion where finalizers or a kubelet have to act first.

        Returns the object: with ``deletionTimestamp`` if it is still there.
        """
        options = options or DeleteOptions()
        current = self.store.get(resource, namespace, name)
        for field, wanted in (("uid", options.uid), ("resourceVersion", options.resource_version)):
            if wanted and meta(current).get(field) != wanted:
                raise conflict(
                    resource.group, resource.plural, name,
                    f"the {field} in the precondition ({wanted}) does not match that of the object "
                    f"({meta(current).get(field)})",
                )  # fmt: skip
        request = AdmissionRequest(
            resource, "DELETE", namespace, name, None, current, options.dry_run,
            options={"kind": "DeleteOptions", "apiVersion": "meta.k8s.io/v1"},
        )  # fmt: skip
        await self._admit(request)
        current = self.store.get(resource, namespace, name)
        if options.dry_run:
            return current
        grace = self._grace(resource, current, options.grace_s)
        marked = clone(current)
        if options.finalizer is not None and not meta(marked).get("deletionTimestamp"):
            _set_propagation(marked, options.finalizer)
        deadline = meta(marked).get("deletionGracePeriodSeconds")
        if not meta(marked).get("deletionTimestamp") or (deadline is not None and grace < int(deadline)):
            meta(marked)["deletionTimestamp"] = rfc3339(self._clock() + grace)
            meta(marked)["deletionGracePeriodSeconds"] = grace
        if resource is NAMESPACES:
            return await self._delete_namespace(marked)
        if self._is_released(resource, marked):
            return self._remove(resource, marked)
        if marked != current:
            return self.store.update(resource, marked)
        return current

    def bind(self, namespace: str, name: str, body: Any) -> None:
        """``pods/binding``: the node, and the Binding's annotations and labels, in one change."""
        if not isinstance(body, dict):
            raise bad_request("the body of the request is not an object")
        target = dig(body, "target", "name")
        if not isinstance(target, str) or not target:
            raise invalid("Binding", "", name, [("target.name", "Required value")])
        if (dig(body, "target", "kind") or "Node") != "Node":
            raise invalid(
                "Binding", "", name, [("target.kind", 'Unsupported value: supported values: "Node"')]
            )
        pod = clone(self.store.get(PODS, namespace, name))
        if dig(body, "metadata", "uid") and dig(body, "metadata", "uid") != meta(pod).get("uid"):
            raise conflict("", "pods/binding", name, "the UID in the precondition does not match the pod")
        if meta(pod).get("deletionTimestamp"):
            raise conflict(
                "", "pods/binding", name, f"pod {name} is being deleted, cannot be assigned to a host"
            )
        if pod["spec"].get("nodeName"):
            raise conflict(
                "", "pods/binding", name,
                f'pod {name} is already assigned to node "{pod["spec"]["nodeName"]}"',
            )  # fmt: skip
        if pod["spec"].get("schedulingGates"):
            raise conflict("", "pods/binding", name, f"pod {name} has non-empty .spec.schedulingGates")
        pod["spec"]["nodeName"] = target
        for field in ("annotations", "labels"):
            if dig(body, "metadata", field):
                meta(pod)[field] = {**(meta(pod).get(field) or {}), **body["metadata"][field]}
        strategy.validate(PODS, pod)
        set_condition(pod, "PodScheduled", "True", now=self._clock())
        self.store.update(PODS, pod)

    async def evict(self, namespace: str, name: str, body: Any) -> None:
        """``pods/eviction``: delete, as there are no disruption budgets here."""
        await self.delete(PODS, namespace, name, DeleteOptions(dig(body, "deleteOptions")))

    async def _admit(self, request: AdmissionRequest) -> Admitted:
        def normalise(obj: Object) -> None:
            apply_defaults(request.resource, obj)

        return await self.webhooks.admit(request, normalise)

    def _check_namespace(self, resource: Resource, namespace: str, name: str) -> None:
        found = self.store.find(NAMESPACES, "", namespace)
        if found is None:
            raise not_found("", "namespaces", namespace)
        if meta(found).get("deletionTimestamp"):
            raise forbidden(
                resource.group, resource.plural, name,
                f"unable to create new content in namespace {namespace} because it is being terminated",
            )  # fmt: skip

    def _gate(self, pod: Object) -> None:
        if pod["spec"].get("schedulingGates"):
            set_condition(
                pod, "PodScheduled", "False", now=self._clock(), reason="SchedulingGated",
                message="Scheduling is blocked due to non-empty scheduling gates",
            )  # fmt: skip

    def _grace(self, resource: Resource, obj: Object, wanted: int | None) -> int:
        """Seconds that a deletion leaves; 0 for all but pods that a kubelet may still run."""
        if resource is not PODS or not dig(obj, "spec", "nodeName"):
            return 0
        if dig(obj, "status", "phase") in _GONE_PHASES:
            return 0
        own = dig(obj, "spec", "terminationGracePeriodSeconds")
        return wanted if wanted is not None else int(30 if own is None else own)

    @staticmethod
    def _is_released(resource: Resource, obj: Object) -> bool:
        """Whether nobody has to act any more before the object may go."""
        if meta(obj).get("finalizers"):
            return False
        return resource is not PODS or not meta(obj).get("deletionGracePeriodSeconds")

    def _remove(self, resource: Resource, obj: Object) -> Object:
        meta(obj)["resourceVersion"] = meta(self.store.get(resource, str(meta(obj).get("namespace") or ""),
                                                           name_of(obj)))["resourceVersion"]  # fmt: skip
        return self.store.delete(resource, obj)

    async def _delete_namespace(self, marked: Object) -> Object:
        name = name_of(marked)
        if name in ("default", "kube-system", "kube-public"):
            raise forbidden("", "namespaces", name, "this namespace may not be deleted")
        marked.setdefault("status", {})["phase"] = "Terminating"
        marked = self.store.update(NAMESPACES, marked)
        for resource in self.table.namespaced():
            for obj in self.store.list(resource, name):
                if self.store.find(resource, name, name_of(obj)) is not None:
                    await self.delete(resource, name, name_of(obj))
        self._finish_namespace(name)
        return self.store.find(NAMESPACES, "", name) or marked

    def _finish_namespace(self, name: str) -> None:
        namespace = self.store.find(NAMESPACES, "", name)
        if namespace is None or not meta(namespace).get("deletionTimestamp"):
            return
        if any(self.store.list(resource, name) for resource in self.table.namespaced()):
            return
        if meta(namespace).get("finalizers"):
            return
        self.store.delete(NAMESPACES, clone(namespace))

    def _after(self, key: str, event: Event) -> None:
        """Upkeep after each change: quota usage, terminating namespaces, the bound on Events."""
        namespace = str(meta(event.obj).get("namespace") or "")
        if key == "pods":
            self._refresh_quotas(namespace)
        if key == "resourcequotas" and event.change != "DELETED":
            self._refresh_quotas(namespace)
        if key == "events" and event.change == "ADDED":
            self._event_names.append((namespace, name_of(event.obj)))
            if len(self._event_names) > MAX_EVENTS:
                old = self.store.find(EVENTS, *self._event_names.pop(0))
                if old is not None:
                    self.store.delete(EVENTS, clone(old))
        if event.change == "DELETED" and namespace:
            self._finish_namespace(namespace)

    def _refresh_quotas(self, namespace: str) -> None:
        for found in self.store.list(RESOURCEQUOTAS, namespace):
            status = quota.status(found, self.store.list(PODS, namespace))
            if found.get("status") != status:
                self.store.update(RESOURCEQUOTAS, {**clone(found), "status": status})

    def _put(self, resource: Resource, obj: Object) -> None:
        strategy.stamp_new(obj, now=self._clock(), uid=_new_uid(), suffix="")
        apply_defaults(resource, obj)
        self.store.create(resource, obj)


def _set_propagation(obj: Object, finalizer: str) -> None:
    """Leave ``finalizer`` as the only one of those that say what becomes of dependents."""
    kept = [item for item in meta(obj).get("finalizers") or [] if item not in (FOREGROUND, ORPHAN)]
    if finalizer:
        kept.append(finalizer)
    if kept or meta(obj).get("finalizers"):
        meta(obj)["finalizers"] = kept


def _new_uid() -> str:
    return str(uuid.uuid4())


def _object_of(admitted: Admitted) -> Object:
    if not isinstance(admitted.obj, dict):
        raise method_not_allowed("a webhook removed the object")
    return admitted.obj


def set_condition(
    obj: Object, kind: str, status: str, *, now: float, reason: str = "", message: str = ""
) -> bool:
    """Set the condition ``kind``; its transition time moves with ``status`` only. True if it changed."""
    conditions = obj.setdefault("status", {}).setdefault("conditions", [])
    wanted: Object = {"type": kind, "status": status, "lastProbeTime": None}
    if reason:
        wanted["reason"] = reason
    if message:
        wanted["message"] = message
    for index, condition in enumerate(conditions):
        if condition.get("type") != kind:
            continue
        same = condition.get("status") == status
        wanted["lastTransitionTime"] = condition.get("lastTransitionTime") if same else rfc3339(now)
        changed: bool = condition != wanted
        conditions[index] = wanted
        return changed
    wanted["lastTransitionTime"] = rfc3339(now)
    conditions.append(wanted)
    return True
