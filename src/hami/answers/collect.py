"""A snapshot of a live cluster: objects by list, usage from the nodes' monitors. Reads only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hami.answers.errors import AnswerError
from hami.answers.lists import list_plain
from hami.answers.monitors import usage
from hami.answers.ours import SCHEDULERS, scheduler_containers, words_of
from hami.answers.redact import Redaction
from hami.answers.replay import profiles_of
from hami.answers.snapshot import CardUse, ContainerUse, Settings, Snapshot
from hami.kube.client import Client
from hami.kube.errors import Forbidden
from hami.kube.operations import Selection
from hami.kube.resources import CONFIGMAPS, DEPLOYMENTS, NODES, PODS, RESOURCE_QUOTAS, Resource
from hami.protocol.members import map_of
from hami.scheduler.edge.settings import SettingsError, parse_selector

CONFIG_KEY: Final = "device-config.yaml"
_FLAGS = {
    "scheduler-name": "scheduler_name",
    "node-scheduler-policy": "node_policy",
    "gpu-scheduler-policy": "card_policy",
    "enable-ascend": "enable_ascend",
    "enable-iluvatar": "enable_iluvatar",
}


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the caller knows better than the cluster; None: find it there."""

    hami_namespace: str = ""  # "": wherever it is installed
    device_config: str | None = None
    settings: Mapping[str, str] | None = None  # as of flags: "node-scheduler-policy" -> "spread"
    monitor_urls: tuple[str, ...] = ()  # instead of asking each node's monitor through the API server
    with_usage: bool = True
    partial: bool = False  # what may not be listed is a note, not an error


async def collect(client: Client, overrides: Overrides, now: float) -> Snapshot:
    """Everything placement depends on, as it is now. Raises `KubeError` or `AnswerError`."""
    notes: list[str] = []
    settings, config = await installed(client, overrides, notes)
    redaction = Redaction(
        profiles_of(config, ascend=settings.enable_ascend, iluvatar=settings.enable_iluvatar)
    )

    async def all_of(resource: Resource) -> list[dict[str, Any]]:
        try:
            return await list_plain(client, resource)
        except Forbidden as error:
            if not overrides.partial:
                raise
            notes.append(f"{resource.plural} cannot be listed: {error}")
            return []

    nodes = [redaction.node(one) for one in await all_of(NODES)]
    quotas = [redaction.quota(one) for one in await all_of(RESOURCE_QUOTAS)]
    pods = [redaction.pod(one) for one in await all_of(PODS)]
    used: tuple[list[ContainerUse], list[CardUse]] = ([], [])
    if overrides.with_usage:
        used = await usage(client, overrides.hami_namespace, overrides.monitor_urls, notes)
    return Snapshot(now, settings, config, nodes, pods, quotas, *used, notes)


async def installed(client: Client, overrides: Overrides, notes: list[str]) -> tuple[Settings, str]:
    """Settings and device config of the scheduler in the cluster, `overrides` on top. Errors as `collect`."""
    settings = await _settings(client, overrides, notes)
    if overrides.device_config is not None:
        return settings, overrides.device_config
    return settings, await _device_config(client, overrides.hami_namespace, notes)


async def _found(client: Client, resource: Resource, namespace: str, notes: list[str]) -> list[Any]:
    """The scheduler's objects of one kind; none, with a note, where listing them is not allowed."""
    try:
        return await list_plain(client, resource, Selection(namespace, label_selector=SCHEDULERS))
    except Forbidden as error:
        notes.append(f"{resource.plural} of HAMi's scheduler cannot be read: {error}")
        return []


async def _device_config(client: Client, namespace: str, notes: list[str]) -> str:
    """The text of the one ConfigMap that holds it."""
    texts = {}
    for found in await _found(client, CONFIGMAPS, namespace, notes):
        text = map_of(found, "data").get(CONFIG_KEY)
        if isinstance(text, str):
            metadata = found["metadata"]
            texts[f"{metadata.get('namespace')}/{metadata.get('name')}"] = text
    if len(set(texts.values())) > 1:
        names = ", ".join(sorted(texts))
        raise AnswerError(
            f"several installations have different device configs ({names}): give --hami-namespace"
        )
    if not texts:
        notes.append(
            f"no ConfigMap with {CONFIG_KEY} found: NVIDIA with the usual resource names is assumed; "
            "give the file with --device-config-file"
        )
    return next(iter(texts.values()), "")


async def _settings(client: Client, overrides: Overrides, notes: list[str]) -> Settings:
    """The flags of the scheduler's Deployment, with the caller's on top."""
    flags: dict[str, str] = {}
    known = overrides.settings or {}
    for found in await _found(client, DEPLOYMENTS, overrides.hami_namespace, notes):
        for container in scheduler_containers(found):
            flags.update(flags_of(words_of(container)))
    try:
        return settings_of({**flags, **known})
    except SettingsError as error:
        raise AnswerError(str(error)) from error


def flags_of(words: Sequence[Any]) -> dict[str, str]:
    """`--name=value`, `--name value` and a lone `--name` of a command line, without the dashes."""
    flags: dict[str, str] = {}
    name = ""
    for word in map(str, words):
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            flags[name] = text if equals else "true"
            name = "" if equals else name
        elif name:
            flags[name], name = word, ""
    return flags


def settings_of(flags: Mapping[str, str]) -> Settings:
    """The settings that flags stand for; others are ignored. Raises `SettingsError`."""
    values: dict[str, Any] = {field: flags[flag] for flag, field in _FLAGS.items() if flag in flags}
    for field in ("enable_ascend", "enable_iluvatar"):
        if field in values:
            values[field] = values[field] == "true"
    return Settings(**values, node_selector=dict(parse_selector(flags.get("node-label-selector", ""))))
