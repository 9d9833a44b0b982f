"""What the checks of an installation look at, read from a live cluster. Reads only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hami.answers.checks import COUNT_RESOURCE, Objects
from hami.answers.collect import CONFIG_KEY, flags_of
from hami.answers.lists import list_plain
from hami.answers.ours import SCHEDULERS_AND_PLUGINS, containers_of_template, words_of
from hami.kube.client import Client
from hami.kube.errors import Forbidden, NotFound
from hami.kube.operations import Selection
from hami.kube.resources import (
    CONFIGMAPS,
    DAEMON_SETS,
    DEPLOYMENTS,
    LEASES,
    MUTATING_WEBHOOKS,
    NODES,
    PODS,
    RUNTIME_CLASSES,
    Resource,
)
from hami.protocol.members import map_of
from hami.vendors.config import ConfigError, parse_config

NODE_CONFIG_KEY = "config.json"


async def inspect(client: Client, namespace: str = "") -> Objects:
    """Everything, in ``namespace`` ("": all) where it is HAMi's own. Raises ``KubeError``."""
    notes: dict[str, str] = {}
    ours = Selection(namespace, label_selector=SCHEDULERS_AND_PLUGINS)
    version: Any = await client.json("GET", "/version", dict)
    configs = await _list(client, CONFIGMAPS, notes, ours)
    lease = _lease(await _list(client, DEPLOYMENTS, notes, ours))
    return Objects(
        version=str(version.get("gitVersion", "")),
        nodes=await _list(client, NODES, notes),
        daemonsets=await _list(client, DAEMON_SETS, notes),
        runtime_classes=await _list(client, RUNTIME_CLASSES, notes),
        pods=await _list(client, PODS, notes, ours),
        webhooks=await _list(client, MUTATING_WEBHOOKS, notes),
        leases=await _list(client, LEASES, notes, Selection(namespace)),
        node_config=_text(configs, NODE_CONFIG_KEY),
        count_resource=_count_resource(_text(configs, CONFIG_KEY)),
        lease=lease,
        notes=list(notes.values()),
        unread=list(notes),
    )


async def _list(
    client: Client, resource: Resource, notes: dict[str, str], selection: Selection | None = None
) -> list[dict[str, Any]]:
    """The objects of a kind; none, with a note, where the caller may not list it or the cluster lacks it."""
    try:
        return await list_plain(client, resource, selection)
    except (Forbidden, NotFound) as error:
        notes[resource.plural] = f"{resource.plural} cannot be read: {error}"
        return []


def _text(configs: Sequence[dict[str, Any]], key: str) -> str | None:
    found = (map_of(one, "data").get(key) for one in configs)
    return next((text for text in found if isinstance(text, str)), None)


def _count_resource(config: str | None) -> str:
    try:
        return (parse_config(config).nvidia.resource_count_name if config else "") or COUNT_RESOURCE
    except ConfigError:
        return COUNT_RESOURCE


def _lease(deployments: Sequence[dict[str, Any]]) -> str:
    """Name of the Lease that replicas elect a leader by, "" where they do not."""
    for one in deployments:
        for container in containers_of_template(one):
            flags = flags_of(words_of(container))
            if "leader-elect" in flags:
                elects = flags["leader-elect"] == "true"
                return flags.get("leader-elect-resource-name", "hami-scheduler") if elects else ""
    return "hami-scheduler"
