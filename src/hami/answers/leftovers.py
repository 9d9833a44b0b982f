"""What an uninstalled HAMi leaves in a cluster, because Helm does not own it (operations.md J9)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from cryptography import x509

from hami.answers.checks import WEBHOOK
from hami.answers.errors import AnswerError
from hami.answers.lists import list_plain
from hami.answers.ours import SCHEDULERS_AND_PLUGINS, component_of, is_of_chart
from hami.kube.client import Client
from hami.kube.errors import NotFound
from hami.kube.operations import Selection, patch_metadata
from hami.kube.resources import (
    DAEMON_SETS,
    DEPLOYMENTS,
    LEASES,
    MUTATING_WEBHOOKS,
    NODES,
    RUNTIME_CLASSES,
    SECRETS,
    VALIDATING_POLICIES,
    VALIDATING_POLICY_BINDINGS,
    Resource,
)
from hami.protocol.keys import COMPONENT_SCHEDULER
from hami.protocol.members import map_of, objects_of

PREFIX: Final = "hami.io/"
POLICY_END: Final = "-allocation-keys"
_DELETED: Final = (MUTATING_WEBHOOKS, VALIDATING_POLICY_BINDINGS, VALIDATING_POLICIES, SECRETS, LEASES)
_BY_KIND: Final = {one.kind: one for one in _DELETED}


class Leftover(msgspec.Struct, frozen=True):
    """One object; of a node its ``annotations``, of another kind the whole. ``hint``: why it stays."""

    kind: str
    name: str
    namespace: str = ""
    uid: str = ""
    annotations: tuple[str, ...] = ()
    hint: str = ""


async def find_leftovers(client: Client, namespace: str, release: str, scheduler_name: str) -> list[Leftover]:
    """Everything, in the order in which it goes; ``release`` is the release or the start of the names.

    Raises ``KubeError``, and :class:`AnswerError` while HAMi is installed anywhere.
    """
    for resource in (DEPLOYMENTS, DAEMON_SETS):
        for one in await _list(client, resource, Selection(label_selector=SCHEDULERS_AND_PLUGINS)):
            where = map_of(one, "metadata")
            raise AnswerError(
                f"HAMi is still installed: {resource.kind} {where.get('namespace')}/{where.get('name')}; "
                "first: helm uninstall RELEASE"
            )
    found = [
        _leftover(MUTATING_WEBHOOKS, one, hint)
        for one in await _list(client, MUTATING_WEBHOOKS)
        for hint in _hints_of_webhooks(one)
    ]
    for resource in (VALIDATING_POLICY_BINDINGS, VALIDATING_POLICIES):
        policies = [_leftover(resource, one) for one in await _list(client, resource) if is_of_chart(one)]
        found += [one for one in policies if one.name.endswith(POLICY_END)]
    # The chart begins the names of objects with the release, or with RELEASE-hami where that lacks "hami".
    schedulers = [f"{start}-scheduler" for start in (release, f"{release}-hami")]
    for scheduler in schedulers:
        for secret in await _get(client, SECRETS, f"{scheduler}-tls", namespace):
            found.append(_leftover(SECRETS, secret, _hint_of_secret(secret, scheduler)))
    for lease in await _get(client, LEASES, scheduler_name, namespace):
        found.append(_leftover(LEASES, lease, _hint_of_lease(lease, schedulers)))
    for node in await _list(client, NODES):
        keys = sorted(
            key for key in map_of(map_of(node, "metadata"), "annotations") if key.startswith(PREFIX)
        )
        if keys:
            found.append(msgspec.structs.replace(_leftover(NODES, node), annotations=tuple(keys)))
    classes = [
        _leftover(RUNTIME_CLASSES, one, "running pods may name it")
        for one in await _list(client, RUNTIME_CLASSES)
        if is_of_chart(one)
    ]
    return [*found, *classes]


async def remove(client: Client, found: Leftover) -> None:
    """Remove one of :func:`find_leftovers` that has no hint; one that is gone already is no error."""
    try:
        if found.kind == NODES.kind:
            await patch_metadata(
                client, NODES, found.name, annotations=dict.fromkeys(found.annotations), uid=found.uid
            )
        else:
            await client.delete(_BY_KIND[found.kind], found.name, namespace=found.namespace, uid=found.uid)
    except NotFound:
        return


async def _list(
    client: Client, resource: Resource, selection: Selection | None = None
) -> list[dict[str, Any]]:
    """The objects of a kind; none where the cluster lacks it."""
    try:
        return await list_plain(client, resource, selection)
    except NotFound:
        return []


async def _get(client: Client, resource: Resource, name: str, namespace: str) -> list[dict[str, Any]]:
    """The object of that name, or none."""
    try:
        return [await client.get(resource, name, dict, namespace=namespace)]
    except NotFound:
        return []


def _leftover(resource: Resource, obj: dict[str, Any], hint: str = "") -> Leftover:
    metadata = map_of(obj, "metadata")
    name, namespace, uid = (str(metadata.get(key) or "") for key in ("name", "namespace", "uid"))
    return Leftover(resource.kind, name, namespace, uid, hint=hint)


# --- whose it is ------------------------------------------------------------------------------------------


def _hints_of_webhooks(configuration: dict[str, Any]) -> tuple[str, ...]:
    """One hint ("": it goes) for a configuration with a webhook of ours, nothing for another's."""
    names = [hook.get("name") for hook in objects_of(configuration, "webhooks")]
    if WEBHOOK not in names:
        return ()
    others = sorted({str(name) for name in names if name != WEBHOOK})
    return (f"webhooks of others are in it: {', '.join(others)}" if others else "",)


def _hint_of_secret(secret: dict[str, Any], scheduler: str) -> str:
    """Why a Secret of our name is not ours: no label says so, and its certificate is for another server."""
    if component_of(secret) == COMPONENT_SCHEDULER or is_of_chart(secret):
        return ""
    namespace = map_of(secret, "metadata").get("namespace")
    wanted = f"{scheduler}.{namespace}.svc"
    served = _served_names(map_of(secret, "data").get("tls.crt"))
    if wanted in served:
        return ""
    return f"not made by HAMi: no label of it, and its certificate is not for {wanted}"


def _served_names(text: Any) -> Sequence[str]:
    """The host names of a Secret's certificate; none where there is no certificate."""
    try:
        certificate = x509.load_pem_x509_certificate(base64.b64decode(text, validate=True))
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return names.get_values_for_type(x509.DNSName)
    except (TypeError, ValueError, binascii.Error, x509.ExtensionNotFound, x509.DuplicateExtension):
        return ()


def _hint_of_lease(lease: dict[str, Any], schedulers: Sequence[str]) -> str:
    """Why a Lease of our name is not ours: a pod that is not the scheduler's held it last."""
    holder = str(map_of(lease, "spec").get("holderIdentity") or "")
    if not holder or holder.startswith(tuple(f"{name}-" for name in schedulers)):
        return ""
    return f"held by {holder}, which is no pod of {' or '.join(schedulers)}"
