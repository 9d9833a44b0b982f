"""What the API server refuses of an object before it is stored, and what an update may not change."""

from __future__ import annotations

import re
from typing import Any

from hami.local.api import workload_rules
from hami.local.api.errors import ApiError, bad_request, invalid
from hami.local.api.objects import Object, clone, dig, meta, rfc3339
from hami.local.api.resources import Resource
from hami.local.scheduling.amounts import milli

_SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
_QUALIFIED = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
_MAX_ANNOTATIONS = 256 * 1024
_NATIVE = re.compile(r"^(cpu|memory|ephemeral-storage|hugepages-[A-Za-z0-9]+)$")
_NAME_CHARS = "bcdfghjklmnpqrstvwxz2456789"
_MUTABLE_POD_FIELDS = (
    "activeDeadlineSeconds",
    "terminationGracePeriodSeconds",
    "tolerations",
    "schedulingGates",
)

Causes = list[tuple[str, str]]


def random_suffix(random_bytes: bytes) -> str:
    """Five characters of the alphabet of ``generateName``."""
    return "".join(_NAME_CHARS[byte % len(_NAME_CHARS)] for byte in random_bytes[:5])


def check_identity(resource: Resource, obj: Any, namespace: str, name: str | None) -> Object:
    """The body with kind, apiVersion and namespace set. Raises 400 where they contradict the path."""
    if not isinstance(obj, dict):
        raise bad_request("the body of the request is not an object")
    if not isinstance(obj.get("metadata") or {}, dict):
        raise bad_request("metadata is not an object")
    if obj.get("kind", resource.kind) != resource.kind or (
        obj.get("apiVersion", resource.api_version) != resource.api_version
    ):
        raise bad_request(
            f"{obj.get('kind')} in version {obj.get('apiVersion')!r} cannot be handled as "
            f"{resource.kind} in version {resource.api_version!r}"
        )
    result: Object = {"kind": resource.kind, "apiVersion": resource.api_version, **obj}
    result["kind"], result["apiVersion"] = resource.kind, resource.api_version
    metadata = result["metadata"] = dict(obj.get("metadata") or {})
    if resource.namespaced:
        if metadata.get("namespace") not in (None, "", namespace):
            raise bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        metadata["namespace"] = namespace
    else:
        metadata.pop("namespace", None)
    if name is not None:
        if metadata.get("name") not in (None, "", name):
            raise bad_request(
                f"the name of the object ({metadata.get('name')}) does not match the name on the URL ({name})"
            )
        metadata["name"] = name
    return result


def stamp_new(obj: Object, *, now: float, uid: str, suffix: str) -> None:
    """Set what only the server sets on a new object."""
    metadata = meta(obj)
    if not metadata.get("name") and metadata.get("generateName"):
        metadata["name"] = f"{str(metadata['generateName'])[:58]}{suffix}"
    for field in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink"):
        metadata.pop(field, None)
    metadata["uid"] = uid
    metadata["creationTimestamp"] = rfc3339(now)
    if isinstance(obj.get("spec"), dict):
        metadata["generation"] = 1


def validate(resource: Resource, obj: Object) -> None:
    """Raises 422 with every cause found."""
    causes: Causes = []
    metadata = meta(obj)
    name = metadata.get("name")
    if not name:
        causes.append(("metadata.name", "Required value: name or generateName is required"))
    elif not isinstance(name, str) or not _valid_name(resource, name):
        causes.append(("metadata.name", f"Invalid value: {name!r}: a lowercase RFC 1123 name is required"))
    _validate_labels(metadata.get("labels"), causes)
    _validate_annotations(metadata.get("annotations"), causes)
    _validate_ownership(metadata, causes)
    try:
        if resource.key == "pods":
            _validate_pod("spec", obj["spec"], causes)
        elif resource.key == "services":
            _validate_service(obj["spec"], causes)
        elif resource.key in workload_rules.SELECTOR_KINDS:
            workload_rules.validate(resource, obj, causes)
            _validate_labels(dig(obj, "spec", "template", "metadata", "labels"), causes)
            _validate_pod("spec.template.spec", obj["spec"]["template"]["spec"], causes)
        elif resource.kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
            _validate_webhooks(obj, causes)
    except (AttributeError, TypeError) as error:
        raise bad_request(f"{resource.kind} in version {resource.version!r} is malformed: {error}") from error
    if causes:
        raise invalid(resource.kind, resource.group, str(name or ""), causes)


def _valid_name(resource: Resource, name: str) -> bool:
    if resource.key == "namespaces":
        return len(name) <= 63 and bool(_LABEL.match(name))
    if resource.group == "rbac.authorization.k8s.io":
        return name not in (".", "..") and not {"/", "%"} & set(name)
    return len(name) <= 253 and bool(_SUBDOMAIN.match(name))


def _valid_key(key: Any) -> bool:
    if not isinstance(key, str):
        return False
    prefix, slash, name = key.rpartition("/")
    if slash and (not prefix or len(prefix) > 253 or not _SUBDOMAIN.match(prefix)):
        return False
    return len(name) <= 63 and bool(_QUALIFIED.match(name))


def _validate_labels(labels: Any, causes: Causes) -> None:
    if labels is None:
        return
    if not isinstance(labels, dict):
        raise bad_request("metadata.labels is not an object")
    for key, value in labels.items():
        if not _valid_key(key):
            causes.append(("metadata.labels", f"Invalid value: {key!r}: not a qualified name"))
        elif not isinstance(value, str):
            raise bad_request(f"metadata.labels[{key}] is not a string")
        elif value and (len(value) > 63 or not _QUALIFIED.match(value)):
            causes.append(("metadata.labels", f"Invalid value: {value!r}: not a valid label value"))


def _validate_annotations(annotations: Any, causes: Causes) -> None:
    if annotations is None:
        return
    if not isinstance(annotations, dict):
        raise bad_request("metadata.annotations is not an object")
    size = 0
    for key, value in annotations.items():
        if not isinstance(value, str):
            raise bad_request(f"metadata.annotations[{key}] is not a string")
        if not _valid_key(str(key).lower()):
            causes.append(("metadata.annotations", f"Invalid value: {key!r}: not a qualified name"))
        size += len(key) + len(value.encode())
    if size > _MAX_ANNOTATIONS:
        causes.append(("metadata.annotations", f"Too long: may not be more than {_MAX_ANNOTATIONS} bytes"))


def _validate_ownership(metadata: Object, causes: Causes) -> None:
    """Finalizers and owner references: the garbage collector lives by them."""
    finalizers = metadata.get("finalizers")
    if finalizers is not None:
        if not isinstance(finalizers, list) or not all(isinstance(item, str) for item in finalizers):
            raise bad_request("metadata.finalizers is not a list of strings")
        for item in finalizers:
            if not _valid_key(item):
                causes.append(("metadata.finalizers", f"Invalid value: {item!r}: not a qualified name"))
    owners = metadata.get("ownerReferences")
    if owners is None:
        return
    if not isinstance(owners, list) or not all(isinstance(owner, dict) for owner in owners):
        raise bad_request("metadata.ownerReferences is not a list of objects")
    for index, owner in enumerate(owners):
        for field in ("apiVersion", "kind", "name", "uid"):
            if not isinstance(owner.get(field), str) or not owner[field]:
                causes.append((f"metadata.ownerReferences[{index}].{field}", "Required value"))
    if sum(owner.get("controller") is True for owner in owners) > 1:
        causes.append(
            ("metadata.ownerReferences", "Invalid value: only one reference can have controller set to true")
        )


def _validate_service(spec: Object, causes: Causes) -> None:
    selector = spec.get("selector")
    if selector is not None and not isinstance(selector, dict):
        raise bad_request("spec.selector is not an object")
    _validate_labels(selector, causes)
    for index, port in enumerate(spec.get("ports") or []):
        for field in ("port", "targetPort"):
            number = port.get(field)
            named = field == "targetPort" and isinstance(number, str)
            whole = isinstance(number, int) and not isinstance(number, bool)
            if not named and not (whole and 0 < number < 65536):
                where = f"spec.ports[{index}].{field}"
                causes.append((where, f"Invalid value: {number!r}: a port between 1 and 65535 is required"))


def _validate_pod(path: str, spec: Object, causes: Causes) -> None:
    _check_placement(path, spec)
    if not spec.get("containers"):
        causes.append((f"{path}.containers", "Required value"))
    if spec.get("restartPolicy") not in ("Always", "OnFailure", "Never"):
        causes.append((f"{path}.restartPolicy", f"Unsupported value: {spec.get('restartPolicy')!r}"))
    seen: set[str] = set()
    for field in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(field) or []):
            where = f"{path}.{field}[{index}]"
            name = container.get("name")
            if not isinstance(name, str) or len(name) > 63 or not _LABEL.match(name):
                causes.append((f"{where}.name", f"Invalid value: {name!r}"))
            elif name in seen:
                causes.append((f"{where}.name", f"Duplicate value: {name!r}"))
            else:
                seen.add(name)
            if not container.get("image"):
                causes.append((f"{where}.image", "Required value"))
            _validate_resources(f"{where}.resources", container.get("resources") or {}, causes)


_SHAPES: dict[str, type] = {
    "nodeSelector": dict, "affinity": dict, "securityContext": dict, "tolerations": list, "volumes": list,
    "schedulingGates": list, "imagePullSecrets": list,
}  # fmt: skip


def _check_placement(path: str, spec: Object) -> None:
    """Raises 400 where what the scheduler and the kubelet read has the wrong type."""
    for field, shape in _SHAPES.items():
        value = spec.get(field)
        if value is None:
            continue
        items = value.values() if isinstance(value, dict) else value
        if not isinstance(value, shape) or (
            shape is list and not all(isinstance(item, dict) for item in items)
        ):
            raise bad_request(f"{path}.{field} has the wrong type")
    if not all(isinstance(value, str) for value in (spec.get("nodeSelector") or {}).values()):
        raise bad_request(f"{path}.nodeSelector is not a map of strings")
    kinds = [value for value in (spec.get("affinity") or {}).values() if value is not None]
    required = dig(spec, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    well_formed = required is None or _is_node_selector(required)
    if not well_formed or not all(isinstance(value, dict) for value in kinds):
        raise bad_request(f"{path}.affinity is malformed")


def _is_node_selector(selector: Any) -> bool:
    terms = selector.get("nodeSelectorTerms") if isinstance(selector, dict) else None
    return isinstance(terms, list) and all(
        isinstance(term, dict)
        and all(
            isinstance(term.get(field) or [], list)
            and all(
                isinstance(item, dict) and isinstance(item.get("values") or [], list)
                for item in term.get(field) or []
            )
            for field in ("matchExpressions", "matchFields")
        )
        for term in terms
    )


def _validate_resources(where: str, resources: Object, causes: Causes) -> None:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    amounts: dict[tuple[str, str], int] = {}
    for side, entries in (("limits", limits), ("requests", requests)):
        for name, amount in entries.items():
            field = f"{where}.{side}[{name}]"
            try:
                amounts[(side, name)] = milli(amount)
            except ValueError:
                raise bad_request(
                    f"{field}: quantities must match the regular expression of a quantity, got {amount!r}"
                ) from None
            if amounts[(side, name)] < 0:
                causes.append((field, f"Invalid value: {amount!r}: must be greater than or equal to 0"))
            elif not _NATIVE.match(name) and amounts[(side, name)] % 1000:
                causes.append((field, f"Invalid value: {amount!r}: must be an integer"))
    for name in requests:
        limit, request = amounts.get(("limits", name)), amounts[("requests", name)]
        if _NATIVE.match(name):
            if limit is not None and request > limit:
                causes.append(
                    (f"{where}.requests", f"Invalid value: {requests[name]!r}: must be less than or equal "
                                          f"to {name} limit of {limits[name]}")
                )  # fmt: skip
        elif limit is None:
            causes.append((f"{where}.limits", f"Required value: Limit must be set for non overcommitable "
                                              f"resources ({name})"))  # fmt: skip
        elif limit != request:
            causes.append(
                (f"{where}.requests", f"Invalid value: {requests[name]!r}: must be equal to {name} limit of "
                                      f"{limits[name]}")
            )  # fmt: skip


def _validate_webhooks(configuration: Object, causes: Causes) -> None:
    for index, webhook in enumerate(configuration.get("webhooks") or []):
        where = f"webhooks[{index}]"
        client = webhook.get("clientConfig") or {}
        if bool(client.get("url")) == bool(client.get("service")):
            causes.append(
                (f"{where}.clientConfig", "Required value: exactly one of url or service is required")
            )
        if client.get("url") and not str(client["url"]).startswith("https://"):
            causes.append((f"{where}.clientConfig.url", 'Invalid value: "https" is the only allowed scheme'))
        if webhook.get("failurePolicy") not in ("Fail", "Ignore"):
            causes.append((f"{where}.failurePolicy", f"Unsupported value: {webhook.get('failurePolicy')!r}"))
        if not isinstance(webhook.get("timeoutSeconds"), int) or not 1 <= webhook["timeoutSeconds"] <= 30:
            causes.append((f"{where}.timeoutSeconds", "Invalid value: must be between 1 and 30"))
        if "v1" not in (webhook.get("admissionReviewVersions") or []):
            causes.append((f"{where}.admissionReviewVersions", "Invalid value: must include v1"))
        if webhook.get("matchConditions"):
            causes.append((f"{where}.matchConditions", "Forbidden: this server does not evaluate CEL"))


def prepare_update(resource: Resource, old: Object, new: Object, subresource: str) -> None:
    """Give ``new`` what an update may not change, count the generation. Raises 422 for a forbidden change."""
    ours, theirs = meta(old), meta(new)
    for field in (
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
    ):
        if field in ours:
            theirs[field] = clone(ours[field])
        else:
            theirs.pop(field, None)
    theirs.pop("selfLink", None)
    if subresource == "status":
        for field in set(old) | set(new):
            if field in ("kind", "apiVersion", "metadata", "status"):
                continue
            if field in old:
                new[field] = old[field]
            else:
                new.pop(field, None)
        return
    if resource.has_status:
        if "status" in old:
            new["status"] = old["status"]
        else:
            new.pop("status", None)
    if resource.key == "pods":
        _check_pod_change(old, new)
    if resource.key in workload_rules.SELECTOR_KINDS:
        workload_rules.check_change(resource, old, new)
    if "generation" in ours and new.get("spec") != old.get("spec"):
        theirs["generation"] = int(ours["generation"]) + 1


def _check_pod_change(old: Object, new: Object) -> None:
    before, after = clone(old["spec"]), clone(new["spec"])
    for spec in (before, after):
        for field in _MUTABLE_POD_FIELDS:
            spec.pop(field, None)
        for container in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
            container.pop("image", None)
    if before != after:
        changed = sorted(field for field in {*before, *after} if before.get(field) != after.get(field))
        raise pod_change_forbidden(str(meta(old)["name"]), changed)


def pod_change_forbidden(name: str, fields: list[str]) -> ApiError:
    return invalid(
        "Pod", "", name,
        [("spec", "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
                  "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only "
                  "additions to existing tolerations),`spec.terminationGracePeriodSeconds`; changed: "
                  + ", ".join(fields))],
    )  # fmt: skip
