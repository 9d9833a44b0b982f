"""The label that says which scheduler pod leads (protocol.md §5); Services select on it. Written by the
leader."""

from __future__ import annotations

import asyncio
import logging
import time

from hami.kube.client import Client
from hami.kube.errors import KubeError, NotFound
from hami.kube.operations import Selection, list_pages, patch_metadata
from hami.kube.resources import PODS
from hami.protocol import keys
from hami.protocol.errors import HamiError
from hami.protocol.views import Pod, decode
from hami.scheduler.edge.leader import Leadership

_PERIOD_S = 15.0
_LOOK_S = 0.5

log = logging.getLogger(__name__)


async def keep_role_labels(client: Client, leadership: Leadership, namespace: str, own_pod: str) -> None:
    """Label all scheduler pods of the namespace, once leading and every 15 s while it lasts; until
    cancelled."""
    due = 0.0
    while True:
        if not leadership.is_leader():
            due = 0.0
        elif time.monotonic() >= due:
            due = time.monotonic() + _PERIOD_S
            try:
                await write_role_labels(client, namespace, own_pod)
            except HamiError as error:
                log.warning("role_labels.failed", extra={"reason": str(error)})
        await asyncio.sleep(_LOOK_S)


async def write_role_labels(client: Client, namespace: str, own_pod: str) -> None:
    """One pass: ``own_pod`` leads, the others follow; only wrong labels are written. Raises ``KubeError``."""
    selection = Selection(namespace, label_selector=f"{keys.COMPONENT_LABEL}={keys.COMPONENT_SCHEDULER}")
    wrong: list[tuple[Pod, str]] = []
    async for page in list_pages(client, PODS, selection):
        for item in page.items:
            pod = decode(item, Pod)
            role = keys.ROLE_LEADER if pod.name == own_pod else keys.ROLE_FOLLOWER
            if pod.labels.get(keys.SCHEDULER_ROLE_LABEL) != role:
                wrong.append((pod, role))
    for pod, role in wrong:
        try:
            await patch_metadata(
                client,
                PODS,
                pod.name,
                namespace=namespace,
                labels={keys.SCHEDULER_ROLE_LABEL: role},
                uid=pod.uid,
            )
        except NotFound:
            continue
        except KubeError as error:
            log.warning("role_label.failed", extra={"pod": pod.name, "reason": str(error)})
