"""What is really used, as the monitors of a live cluster say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp

from hami.answers.errors import MetricsError
from hami.answers.lists import list_plain
from hami.answers.ours import PLUGINS
from hami.answers.snapshot import CardUse, ContainerUse
from hami.answers.usage import read_usage
from hami.kube.client import Client
from hami.kube.errors import KubeError
from hami.kube.operations import Selection
from hami.kube.resources import PODS
from hami.protocol.members import map_of, objects_of

MONITOR_PORT: Final = 9394
_METRICS: Final = "metrics"  # name of the port in the pods of the chart
_TIMEOUT_S: Final = 5.0
_MAX_BYTES: Final = 32 << 20
_AT_ONCE: Final = 16


async def usage(
    client: Client, namespace: str, urls: Sequence[str], notes: list[str]
) -> tuple[list[ContainerUse], list[CardUse]]:
    """Of every monitor in ``namespace`` ("": of any), or of those at ``urls``; what fails is a note."""
    texts = await (_from_urls(urls, notes) if urls else _from_pods(client, namespace, notes))
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


def metrics_port(pod: Mapping[str, Any], usual: int = MONITOR_PORT) -> int:
    """The port on which a pod of HAMi's serves its metrics: the one of that name, else the usual one."""
    containers = objects_of(map_of(pod, "spec"), "containers")
    ports = (port for container in containers for port in objects_of(container, "ports"))
    numbers = (one.get("containerPort") for one in ports if one.get("name") == _METRICS)
    return next((number for number in numbers if isinstance(number, int)), usual)


async def proxied_metrics(
    client: Client, pod: Mapping[str, Any], port: int, timeout_s: float, max_bytes: int
) -> bytes:
    """What a pod serves on its metrics port, through the API server. Raises ``KubeError``."""
    metadata = pod["metadata"]
    path = PODS.path(metadata["namespace"], f"{metadata['name']}:{port}", "proxy/metrics")
    return await client.request("GET", path, timeout_s=timeout_s, max_bytes=max_bytes)


async def whole_body(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The body of a monitor's answer. Raises `MetricsError` where it is longer."""
    whole = bytearray()
    async for piece in answer.content.iter_any():
        whole += piece
        if len(whole) > max_bytes:
            raise MetricsError(f"the monitor answers more than {max_bytes} bytes")
    return bytes(whole)


async def _from_pods(client: Client, namespace: str, notes: list[str]) -> list[tuple[str, str]]:
    """Each monitor's name and text, through the API server's proxy."""
    try:
        pods = await list_plain(client, PODS, Selection(namespace, label_selector=PLUGINS))
    except KubeError as error:
        notes.append(f"usage is left out: {error}")
        return []
    gate = asyncio.Semaphore(_AT_ONCE)

    async def read(pod: Mapping[str, Any]) -> str:
        async with gate:
            answer = await proxied_metrics(client, pod, metrics_port(pod), _TIMEOUT_S, _MAX_BYTES)
        return answer.decode("utf-8", "replace")

    running = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Running"]
    if not running:
        notes.append("usage is left out: no running pod of HAMi's device plugin was found")
    return await _each([(_name(pod), read(pod)) for pod in running], notes)


async def _from_urls(urls: Sequence[str], notes: list[str]) -> list[tuple[str, str]]:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def read(url: str) -> str:
            async with session.get(url) as answer:
                answer.raise_for_status()
                return (await whole_body(answer, _MAX_BYTES)).decode("utf-8", "replace")

        return await _each([(url, read(url)) for url in urls], notes)


async def _each(reads: list[tuple[str, Any]], notes: list[str]) -> list[tuple[str, str]]:
    answers = await asyncio.gather(*(one for _, one in reads), return_exceptions=True)
    texts = []
    for (name, _), answer in zip(reads, answers, strict=True):
        if isinstance(answer, str):
            texts.append((name, answer))
        elif isinstance(answer, KubeError | MetricsError | aiohttp.ClientError | TimeoutError | ValueError):
            notes.append(f"usage of {name} is left out: {str(answer) or type(answer).__name__}")
        else:
            raise answer
    return texts


def _name(pod: Mapping[str, Any]) -> str:
    return f"{pod['metadata'].get('namespace')}/{pod['metadata'].get('name')}"
