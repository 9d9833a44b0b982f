"""A snapshot of a live cluster: objects by list, usage from the nodes' monitors. Reads only."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from hami.answers.errors import AnswerError, MetricsError
from hami.answers.lists import list_plain
from hami.answers.redact import Redaction
from hami.answers.replay import profiles_of
from hami.answers.snapshot import CardUse, ContainerUse, Settings, Snapshot
from hami.answers.usage import read_usage
from hami.kube.client import Client
from hami.kube.errors import Forbidden, KubeError
from hami.kube.operations import Selection
from hami.kube.resources import CONFIGMAPS, DEPLOYMENTS, NODES, PODS, RESOURCE_QUOTAS, Resource
from hami.protocol.members import map_of, objects_of
from hami.scheduler.edge.settings import SettingsError, parse_selector

CONFIG_KEY: Final = "device-config.yaml"
_SCHEDULER = "app.kubernetes.io/component=hami-scheduler"
_PLUGIN = "app.kubernetes.io/component=hami-device-plugin"
_MONITOR_PORT: Final = 9394
_METRICS: Final = "metrics"  # name of the port in the pods of the chart
_MONITOR_TIMEOUT_S = 5.0
_MONITOR_BYTES = 32 << 20
_AT_ONCE = 16
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
        used = await _usage(client, overrides, notes)
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
        return await list_plain(client, resource, Selection(namespace, label_selector=_SCHEDULER))
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
        template = map_of(map_of(found, "spec"), "template")
        for container in objects_of(map_of(template, "spec"), "containers"):
            words = [*(container.get("command") or []), *(container.get("args") or [])]
            if "scheduler" in words[:2]:
                flags.update(flags_of(words))
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


# --- usage ------------------------------------------------------------------------------------------------


async def _usage(
    client: Client, overrides: Overrides, notes: list[str]
) -> tuple[list[ContainerUse], list[CardUse]]:
    texts = await (
        _from_urls(overrides.monitor_urls, notes)
        if overrides.monitor_urls
        else _from_pods(client, overrides.hami_namespace, notes)
    )
    containers: dict[tuple[str, ...], ContainerUse] = {}
    cards: dict[str, CardUse] = {}
    for name, text in texts:
        try:
            of_containers, of_cards = read_usage([text])
        except MetricsError as error:
            notes.append(f"usage of {name} is left out: {error}")
        else:
            containers.update({(u.namespace, u.pod, u.container, u.device): u for u in of_containers})
            cards.update({use.device: use for use in of_cards})
    return list(containers.values()), list(cards.values())


async def _from_pods(client: Client, namespace: str, notes: list[str]) -> list[tuple[str, str]]:
    """Each monitor's name and text, through the API server's proxy."""
    try:
        pods = await list_plain(client, PODS, Selection(namespace, label_selector=_PLUGIN))
    except KubeError as error:
        notes.append(f"usage is left out: {error}")
        return []
    gate = asyncio.Semaphore(_AT_ONCE)

    async def read(pod: Mapping[str, Any]) -> str:
        metadata = pod["metadata"]
        name = f"{metadata['name']}:{metrics_port(pod)}"
        path = PODS.path(metadata["namespace"], name, "proxy/metrics")
        async with gate:
            answer = await client.request("GET", path, timeout_s=_MONITOR_TIMEOUT_S, max_bytes=_MONITOR_BYTES)
        return answer.decode("utf-8", "replace")

    running = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Running"]
    if not running:
        notes.append("usage is left out: no running pod of HAMi's device plugin was found")
    return await _each([(_name(pod), read(pod)) for pod in running], notes)


def metrics_port(pod: Mapping[str, Any], usual: int = _MONITOR_PORT) -> int:
    """The port on which a pod of HAMi's serves its metrics: the one of that name, else the usual one."""
    containers = objects_of(map_of(pod, "spec"), "containers")
    ports = (port for container in containers for port in objects_of(container, "ports"))
    numbers = (one.get("containerPort") for one in ports if one.get("name") == _METRICS)
    return next((number for number in numbers if isinstance(number, int)), usual)


async def _from_urls(urls: Sequence[str], notes: list[str]) -> list[tuple[str, str]]:
    timeout = aiohttp.ClientTimeout(total=_MONITOR_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def read(url: str) -> str:
            async with session.get(url) as answer:
                answer.raise_for_status()
                whole = bytearray()
                async for piece in answer.content.iter_any():
                    whole += piece
                    if len(whole) > _MONITOR_BYTES:
                        raise ValueError(f"more than {_MONITOR_BYTES} bytes")
                return whole.decode("utf-8", "replace")

        return await _each([(url, read(url)) for url in urls], notes)


async def _each(reads: list[tuple[str, Any]], notes: list[str]) -> list[tuple[str, str]]:
    answers = await asyncio.gather(*(one for _, one in reads), return_exceptions=True)
    texts = []
    for (name, _), answer in zip(reads, answers, strict=True):
        if isinstance(answer, str):
            texts.append((name, answer))
        elif isinstance(answer, KubeError | aiohttp.ClientError | TimeoutError | ValueError):
            notes.append(f"usage of {name} is left out: {str(answer) or type(answer).__name__}")
        else:
            raise answer
    return texts


def _name(pod: Mapping[str, Any]) -> str:
    return f"{pod['metadata'].get('namespace')}/{pod['metadata'].get('name')}"
