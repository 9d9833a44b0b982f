"""The admission webhook: a pure review of one pod (scheduler.md §14; decisions 1, 13, 38, 40, 41).

The pod stays the plain object that came in; the patch is the difference to a changed copy, so nothing is
touched that we do not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from hami.protocol import keys
from hami.protocol.admission import AdmissionAnswer, AdmissionRequest
from hami.protocol.errors import ObjectError
from hami.protocol.patch import json_patch
from hami.protocol.views import Pod
from hami.scheduler.core.answers import PlacementError
from hami.scheduler.core.requests import MAX_CONTAINERS, too_many_containers
from hami.scheduler.core.state import ClusterState
from hami.vendors.engine import admission_warnings, mutate_admission
from hami.vendors.types import AdmissionRejected, InventoryView, VendorProfile

DEFAULT_SCHEDULER = "default-scheduler"
NODE_POLICIES = ("binpack", "spread", "fragmentation-aware")
_PRIVILEGED_ADVICE = (
    "a privileged container sees all cards and is held by no limit: drop privileged, or let the "
    "administrator start the scheduler with --admission-privileged=allow-unlimited"
)
CARD_POLICIES = ("binpack", "spread", "mutex", "topology-aware", "numa", "fragmentation-aware")
NVIDIA_MODES = ("hami-core", "mig", "mps")
MAX_REVIEWED_CONTAINERS = 2000
MAX_ANNOTATION_CHARS = 256 << 10  # as the API server's own limit, which it checks only after us
_PROTECTED_PREFIX = keys.ILUVATAR_INDEX_PREFIX  # one key for each container
_BAD_REQUEST, _FORBIDDEN, _INVALID = 400, 403, 422
_MESSAGE_CHARS = 4096  # of an answer
_QUOTED_CHARS = 100  # of a text of the user that an answer quotes


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """What the review depends on besides the state."""

    scheduler_name: str = ""
    force_overwrite: bool = True
    privileged: Literal["deny", "allow-unlimited"] = "deny"


def protected_keys(profiles: Iterable[VendorProfile]) -> frozenset[str]:
    """Annotations no user may bring along: those of every vendor with fixed keys, and of these profiles."""
    vendors = dict(keys.VENDOR_KEYS)
    for profile in profiles:
        word, rules = profile.common_word, profile.rules
        vendors.setdefault(word, keys.VendorKeys(word, rules.allocated, rules.to_allocate or ""))
    return keys.protected_annotations(vendors)


class Webhook:
    """Reviews pods against one cluster state."""

    def __init__(
        self, state: ClusterState, profiles: Sequence[VendorProfile], settings: WebhookSettings
    ) -> None:
        self._state = state
        self._settings = settings
        self.use(profiles)

    def use(self, profiles: Sequence[VendorProfile]) -> None:
        """Review by these vendors from now on; the state must have them already."""
        self._profiles = tuple(profiles)
        self._protected = protected_keys(profiles)

    def review(self, request: AdmissionRequest) -> AdmissionAnswer:
        """The answer to one request; pure, the object of the request is not changed.

        Only new pods are reviewed: of an existing one the allocation is ours or a node plugin's.
        """
        if request.operation not in ("", "CREATE"):
            return AdmissionAnswer(True)
        before = request.object
        problem = _no_pod(before)
        if before is None or problem:
            return AdmissionAnswer(False, problem, _BAD_REQUEST)
        pod = _working_copy(before)
        _strip(pod, self._protected)
        try:
            message, warnings = self._decide(pod, request.namespace)
        except _Denied as denied:
            return AdmissionAnswer(False, str(denied)[:_MESSAGE_CHARS], denied.code, warnings=denied.warnings)
        return AdmissionAnswer(True, message, patch=json_patch(before, pod), warnings=warnings)

    def _decide(self, pod: dict[str, Any], namespace: str) -> tuple[str, list[str]]:
        """Change ``pod`` as it shall be stored; the message and the warnings. Raises ``_Denied``."""
        spec = pod["spec"]
        if not spec.get("containers"):
            raise _Denied("pod has no containers")
        if self._is_foreign(spec.get("schedulerName") or ""):
            return "pod already has different scheduler assigned", []
        uses = _mutate(self._profiles, self._state.inventory, pod)
        warnings = []
        if uses:
            warnings = [*self._check_privileged(spec), *_policy_warnings(pod), *self._advice(pod)]
            if self._settings.scheduler_name:
                spec["schedulerName"] = self._settings.scheduler_name
                if spec.get("nodeName"):
                    raise _Denied("pod has node assigned")
        self._check_request(pod, namespace)
        return "", warnings

    def _is_foreign(self, name: str) -> bool:
        own = self._settings.scheduler_name
        if not name or (name == DEFAULT_SCHEDULER and self._settings.force_overwrite):
            return False
        return not own or own != name

    def _advice(self, pod: Mapping[str, Any]) -> list[str]:
        found: list[str] = []
        for container in _containers(pod["spec"]):
            for profile in self._profiles:
                try:
                    found += admission_warnings(profile, container, pod)
                except AdmissionRejected:
                    continue  # of a container that no vendor claimed: ``_check_request`` says what is wrong
        return found

    def _check_privileged(self, spec: Mapping[str, Any]) -> list[str]:
        for container in _containers(spec):
            if (container.get("securityContext") or {}).get("privileged") is True:
                name = container.get("name", "")
                if self._settings.privileged == "deny":
                    raise _Denied(f"container {name} is privileged", warnings=[_PRIVILEGED_ADVICE])
                return [f"container {name} is privileged, its GPU limits are not enforced"]
        return []

    def _check_request(self, pod: Mapping[str, Any], namespace: str) -> None:
        """Refuse what `/filter` could never place, and what the namespace's quota leaves no room for."""
        metadata = {**pod["metadata"], "namespace": namespace or pod["metadata"].get("namespace", "")}
        try:
            request = self._state.parse({**pod, "metadata": metadata})
        except (PlacementError, ObjectError) as error:
            raise _Denied(str(error)) from error
        if request is None:
            return
        if request.invalid:
            raise _Denied(request.invalid, _INVALID)
        shortage = self._state.quota_shortage(request)
        if shortage:
            raise _Denied("exceeding resource quota", warnings=[shortage])


class _Denied(Exception):  # noqa: N818
    """The pod is refused with this text and code."""

    def __init__(self, text: str, code: int = _FORBIDDEN, warnings: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.code = code
        self.warnings = warnings


def _mutate(profiles: Sequence[VendorProfile], inventory: InventoryView, pod: dict[str, Any]) -> bool:
    """Every vendor's admission for every container, init containers first; whether any device is
    requested."""
    uses = False
    containers = _containers(pod["spec"])
    for container in containers:
        for profile in profiles:
            try:
                uses = mutate_admission(profile, container, pod, inventory) or uses
            except AdmissionRejected as error:
                raise _Denied(str(error), _INVALID) from error
        if uses and len(containers) > MAX_CONTAINERS:
            raise _Denied(too_many_containers(len(containers)), _INVALID)
    return uses


def _containers(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]


def _policy_warnings(pod: Mapping[str, Any]) -> list[str]:
    annotations = pod["metadata"].get("annotations") or {}
    warnings = []
    policy = annotations.get(keys.NODE_POLICY)
    if policy is not None and policy not in NODE_POLICIES:
        known = ", ".join(NODE_POLICIES)
        shown = policy[:_QUOTED_CHARS]
        warnings.append(f"{keys.NODE_POLICY}: unknown policy {shown!r} acts as binpack; known are {known}")
    policy = annotations.get(keys.CARD_POLICY)
    if policy is not None:
        unknown = [word.strip() for word in policy.split(",") if word.strip() not in CARD_POLICIES]
        if unknown:
            known = ", ".join(CARD_POLICIES)
            shown = unknown[0][:_QUOTED_CHARS]
            warnings.append(f"{keys.CARD_POLICY}: unknown policy {shown!r}; known are {known}")
    modes = [word.strip() for word in annotations.get(keys.NVIDIA_MODE, "").split(",") if word.strip()]
    unknown = [mode for mode in modes if mode not in NVIDIA_MODES]
    if unknown:
        known = ", ".join(NVIDIA_MODES)
        shown = unknown[0][:_QUOTED_CHARS]
        warnings.append(f"{keys.NVIDIA_MODE}: no card has the mode {shown!r}; known are {known}")
    return warnings


def _no_pod(pod: dict[str, Any] | None) -> str:
    """Why the object is no pod, else ""."""
    if pod is None:
        return "the request has no object"
    if pod.get("kind", "Pod") != "Pod":
        return f"expected a Pod, got {str(pod['kind'])[:_QUOTED_CHARS]!r}"
    if not isinstance(pod.get("metadata"), dict) or not isinstance(pod.get("spec"), dict):
        return "the object is not a Pod: metadata and spec must be objects"
    lists = (pod["spec"].get("initContainers"), pod["spec"].get("containers"))
    containers = sum(len(found) for found in lists if isinstance(found, list))
    if containers > MAX_REVIEWED_CONTAINERS:
        return f"the pod has {containers} containers, at most {MAX_REVIEWED_CONTAINERS} are reviewed"
    annotations = pod["metadata"].get("annotations")
    if isinstance(annotations, dict) and _size(annotations) > MAX_ANNOTATION_CHARS:
        return f"metadata.annotations: may not be more than {MAX_ANNOTATION_CHARS} bytes"
    try:
        msgspec.convert(pod, Pod)
    except msgspec.ValidationError as error:
        return f"the object is not a Pod: {error}"[:_MESSAGE_CHARS]
    return ""


def _size(annotations: Mapping[str, Any]) -> int:
    return sum(map(len, annotations)) + sum(
        len(text) for text in annotations.values() if isinstance(text, str)
    )


def _working_copy(pod: dict[str, Any]) -> dict[str, Any]:
    """A copy of all that admission may change; the rest is shared, so that its size does not matter."""
    metadata, spec = dict(pod["metadata"]), dict(pod["spec"])
    for member in ("annotations", "labels"):
        if metadata.get(member) is not None:
            metadata[member] = dict(metadata[member])
    for member in ("initContainers", "containers"):
        if spec.get(member) is not None:
            spec[member] = [_copied_container(container) for container in spec[member]]
    return {**pod, "metadata": metadata, "spec": spec}


def _copied_container(container: dict[str, Any]) -> dict[str, Any]:
    copied = dict(container)
    if copied.get("env") is not None:
        copied["env"] = list(copied["env"])
    if copied.get("resources") is not None:
        resources = copied["resources"] = dict(copied["resources"])
        for member in ("limits", "requests"):
            if resources.get(member) is not None:
                resources[member] = dict(resources[member])
    return copied


def _strip(pod: dict[str, Any], protected: frozenset[str]) -> None:
    metadata = pod["metadata"]
    for member, forbidden in (("annotations", protected), ("labels", keys.PROTECTED_LABELS)):
        held = metadata.get(member)
        if held:
            for key in forbidden & held.keys() | {key for key in held if key.startswith(_PROTECTED_PREFIX)}:
                del held[key]
