"""What goes into a support bundle, read from a live cluster. Reads only; what cannot be read is a note."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec

from hami.answers.bundle import MAX_BYTES, Bundle, event_of
from hami.answers.checks import WEBHOOK, Objects, plugin_selector, preflight, verify
from hami.answers.collect import Overrides, collect
from hami.answers.hashing import hash_names
from hami.answers.inspection import inspect
from hami.answers.lists import list_plain
from hami.answers.locks import find_locks
from hami.answers.monitors import MONITOR_PORT, metrics_port, proxied_metrics
from hami.answers.ours import component_of, is_of_chart
from hami.answers.render import check_lines, top_lines
from hami.answers.replay import Replay
from hami.answers.scrub import scrub, scrub_all, without_secrets
from hami.answers.snapshot import Snapshot, encode_snapshot
from hami.answers.top import top
from hami.kube.client import Client
from hami.kube.errors import Forbidden, KubeError, NotFound, ResponseTooLarge
from hami.kube.operations import Selection, list_pages
from hami.kube.resources import (
    CONFIGMAPS,
    DEPLOYMENTS,
    EVENTS,
    PODS,
    SERVICES,
    VALIDATING_POLICIES,
    VALIDATING_POLICY_BINDINGS,
    Resource,
)
from hami.protocol.errors import HamiError
from hami.protocol.keys import COMPONENT_LABEL, COMPONENT_PLUGIN, COMPONENT_SCHEDULER
from hami.protocol.members import map_of, objects_of
from hami.vendors.request import containers_of

LOG_LINES: Final = 2000
TIMEOUT_S: Final = 120.0
_LOG_BYTES: Final = 1 << 20
_METRICS_BYTES: Final = 4 << 20
_READ_TIMEOUT_S: Final = 15.0
_NODES: Final = 40
"""How many device plugins are asked for logs and metrics: the troubled ones first."""
_EVENTS_READ, _EVENTS_KEPT = 50_000, 5_000
_AT_ONCE: Final = 8
_NOW, _BEFORE = "log", "previous log"
_DASHBOARD: Final = "hami-dashboard"
_COMPONENTS: Final = (COMPONENT_SCHEDULER, COMPONENT_PLUGIN, _DASHBOARD)
_OURS: Final = f"{COMPONENT_LABEL} in ({', '.join(_COMPONENTS)})"
_POD_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_DEFAULT_PORTS: Final = {COMPONENT_SCHEDULER: 9395, COMPONENT_PLUGIN: MONITOR_PORT}

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the caller wants: where HAMi is ("": found), lines of each log (0: no logs), bytes in all, seconds
    in all, and a salt where names are to be replaced (b"": they stay)."""

    namespace: str = ""
    log_lines: int = LOG_LINES
    max_bytes: int = MAX_BYTES
    timeout_s: float = TIMEOUT_S
    salt: bytes = b""


async def gather(client: Client, wishes: Wishes, now: float, progress: Callable[[str], None]) -> Bundle:
    """Everything that can be read in time. Raises ``KubeError`` where nothing can: the API server does not
    answer, or does not know the caller."""
    await client.json("GET", "/version", dict)
    gathering = _Gathering(client, wishes, now, progress)
    await gathering.run()
    return gathering.bundle


@dataclass(slots=True)
class _Gathering:
    client: Client
    wishes: Wishes
    now: float
    progress: Callable[[str], None]
    bundle: Bundle = field(init=False)
    pods: list[Object] = field(default_factory=list)  # HAMi's own
    own_names: set[str] = field(default_factory=set)
    snapshot: Snapshot | None = None
    users: set[str] = field(default_factory=set)  # uids of pods that ask for devices

    def __post_init__(self) -> None:
        self.bundle = Bundle(self.wishes.max_bytes)

    async def run(self) -> None:
        parts: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("installation and checks", self._installation),
            ("objects", self._objects),
            ("node locks", self._locks),
            ("nodes, pods and quotas", self._state),
            ("events", self._events),
            ("logs", self._logs),
            ("metrics", self._metrics),
        ]
        deadline = asyncio.get_running_loop().time() + self.wishes.timeout_s
        for at, (title, read) in enumerate(parts, 1):
            self.progress(f"{at}/{len(parts)} {title}")
            try:
                async with asyncio.timeout_at(deadline):
                    await read()
            except TimeoutError:
                self.bundle.notes.append(f"{title}: not all was read within {self.wishes.timeout_s:g} s")
            except HamiError as error:
                self.bundle.notes.append(f"{title}: {error}")
        if self.wishes.salt:
            self._rename(self.wishes.salt)

    # --- parts ----------------------------------------------------------------------------------------------

    async def _installation(self) -> None:
        found = await inspect(self.client, self.wishes.namespace)
        self.bundle.notes.extend(found.notes)
        beside = Selection(self.wishes.namespace, label_selector=f"{COMPONENT_LABEL}={_DASHBOARD}")
        pods = [*found.pods, *(await self._list(PODS, beside) if "pods" not in found.unread else [])]
        self.pods = [pod for pod in pods if _POD_NAME.fullmatch(_names(pod)[1])]
        self.own_names.update(name for one in pods for name in _names(one))
        checks = {
            "preflight": preflight(found, plugin_selector(found.daemonsets)),
            "verify": verify(found, self.now),
        }
        self.bundle.add_json("checks.json", {**checks, "notes": found.notes})
        text = "\n\n".join("\n".join([name, *check_lines(rows, [])]) for name, rows in checks.items())
        self.bundle.add("checks.txt", text + "\n")
        self.bundle.add_json("versions.json", _versions(found))
        ours = [one for one in found.daemonsets if _component(one)]
        hooks = [
            one
            for one in found.webhooks
            if any(hook.get("name") == WEBHOOK for hook in objects_of(one, "webhooks"))
        ]
        leases = [one for one in found.leases if map_of(one, "metadata").get("name") == found.lease]
        for kind, objects in (
            ("daemonsets", ours),
            ("pods", pods),
            ("mutatingwebhookconfigurations", hooks),
            ("leases", leases),
            ("runtimeclasses", found.runtime_classes),
        ):
            self._keep(kind, objects)

    async def _objects(self) -> None:
        ours = Selection(self.wishes.namespace, label_selector=_OURS)
        every = Selection(label_selector="app.kubernetes.io/managed-by=Helm")
        for resource, selection in (
            (DEPLOYMENTS, ours),
            (CONFIGMAPS, ours),
            (SERVICES, ours),
            (VALIDATING_POLICIES, every),
            (VALIDATING_POLICY_BINDINGS, every),
        ):
            found = await self._list(resource, selection)
            self._keep(resource.plural, [one for one in found if selection is ours or is_of_chart(one)])

    async def _locks(self) -> None:
        found = await find_locks(self.client, self.now)
        self.bundle.add_json("locks.json", found)

    async def _state(self) -> None:
        overrides = Overrides(self.wishes.namespace, partial=True)
        self.snapshot = snapshot = await collect(self.client, overrides, self.now)
        self.bundle.notes.extend(snapshot.notes)
        replay = Replay(snapshot)
        self.users = {
            str(map_of(pod, "metadata").get("uid"))
            for pod in snapshot.pods
            if not replay.resources.isdisjoint(_asked(pod))
        }
        tables = top(replay)
        text = "\n\n".join("\n".join(top_lines(tables, table)) for table in ("nodes", "cards", "pods"))
        self.bundle.add("top.txt", text + "\n")
        salt = self.wishes.salt
        shown = hash_names(snapshot, salt) if salt else snapshot
        shown = msgspec.structs.replace(
            shown,
            device_config=scrub(shown.device_config),
            **{part: scrub_all(getattr(shown, part)) for part in ("nodes", "pods", "quotas", "notes")},
        )
        self.bundle.add("snapshot.json.gz", encode_snapshot(shown))

    async def _events(self) -> None:
        uids = self.users | {str(map_of(pod, "metadata").get("uid")) for pod in self.pods}
        name = self.snapshot.settings.scheduler_name if self.snapshot else "hami-scheduler"
        kept: list[Object] = []
        try:
            kept += await self._events_in("", name, uids)
        except Forbidden as error:
            places = ({_names(pod)[0] for pod in self.pods} | {self.wishes.namespace}) - {""}
            note = f"events cannot be read but in {', '.join(sorted(places)) or 'no namespace'}: {error}"
            self.bundle.notes.append(note)
            for place in sorted(places):
                kept += await self._events_in(place, name, uids)
        if len(kept) > _EVENTS_KEPT:
            self.bundle.notes.append(f"events: the newest {_EVENTS_KEPT} of {len(kept)}")
        kept.sort(key=_time)
        self._keep("events", kept[-_EVENTS_KEPT:])

    async def _logs(self) -> None:
        if not self.wishes.log_lines:
            self.bundle.notes.append("logs: not wanted")
            return
        logs = [(pod, *one) for pod in self._chosen() for one in _logs_of(pod)]
        await self._all([partial(self._log, *one) for one in logs])

    async def _metrics(self) -> None:
        ports = [(pod, port) for pod in self._chosen() for port in _ports(pod)]
        await self._all([partial(self._metrics_of, *one) for one in ports])

    async def _events_in(self, namespace: str, scheduler: str, uids: set[str]) -> list[Object]:
        kept: list[Object] = []
        read = 0
        async with aclosing(list_pages(self.client, EVENTS, Selection(namespace))) as pages:
            async for page in pages:
                events = (msgspec.json.decode(item) for item in page.items)
                kept += [event_of(one) for one in events if _is_about_us(one, scheduler, uids)]
                read += len(page.items)
                if read >= _EVENTS_READ:
                    self.bundle.notes.append(f"events: only {read} were looked through")
                    break
        return kept

    # --- one thing ------------------------------------------------------------------------------------------

    async def _log(self, pod: Object, container: str, run: str) -> None:
        namespace, name = _names(pod)
        path = PODS.path(namespace, name, "log")
        lines = self.wishes.log_lines
        while True:
            query = {"container": container, "tailLines": str(lines), "timestamps": "true"}
            if run == _BEFORE:
                query["previous"] = "true"
            try:
                data = await self.client.request(
                    "GET", path, query=query, timeout_s=_READ_TIMEOUT_S, max_bytes=_LOG_BYTES
                )
            except ResponseTooLarge:
                lines //= 4  # the newest lines matter; a limit in bytes would keep the oldest
                if lines:
                    continue
                self.bundle.notes.append(
                    f"log of {name}/{container}: a line is longer than {_LOG_BYTES} bytes"
                )
                return
            except KubeError as error:
                self.bundle.notes.append(f"{run} of {name}/{container}: {error}")
                return
            if lines < self.wishes.log_lines:
                self.bundle.notes.append(f"log of {name}/{container}: the last {lines} lines")
            if data:
                text = scrub(data.decode("utf-8", "replace"))
                self.bundle.add(f"logs/{name}/{container}.{run.replace(' ', '-')}", text)
            return

    async def _metrics_of(self, pod: Object, port: int) -> None:
        name = _names(pod)[1]
        try:
            data = await proxied_metrics(self.client, pod, port, _READ_TIMEOUT_S, _METRICS_BYTES)
        except KubeError as error:
            self.bundle.notes.append(f"metrics of {name}:{port}: {error}")
            return
        self.bundle.add(f"metrics/{name}-{port}.txt", scrub(data.decode("utf-8", "replace")))

    async def _list(self, resource: Resource, selection: Selection) -> list[Object]:
        try:
            return await list_plain(self.client, resource, selection)
        except (Forbidden, NotFound) as error:
            self.bundle.notes.append(f"{resource.plural} cannot be read: {error}")
            return []

    def _keep(self, name: str, objects: Sequence[Object]) -> None:
        if objects:
            self.bundle.add_json(f"objects/{name}.json", [without_secrets(one) for one in objects])

    async def _all(self, reads: Sequence[Callable[[], Awaitable[None]]]) -> None:
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(read: Callable[[], Awaitable[None]]) -> None:
            async with gate:
                await read()

        async with asyncio.TaskGroup() as group:
            for read in reads:
                group.create_task(one(read))

    def _chosen(self) -> list[Object]:
        """The pods to ask: every scheduler and dashboard, and the device plugins in trouble first."""
        always = [pod for pod in self.pods if _component(pod) in (COMPONENT_SCHEDULER, _DASHBOARD)]
        plugins = sorted((pod for pod in self.pods if _component(pod) == COMPONENT_PLUGIN), key=_trouble)
        if len(plugins) > _NODES:
            note = f"logs and metrics: {_NODES} of {len(plugins)} device plugins, those in trouble first"
            if note not in self.bundle.notes:
                self.bundle.notes.append(note)
        return [*always, *plugins[:_NODES]]

    def _rename(self, salt: bytes) -> None:
        names: dict[str, str] = {}
        if self.snapshot is not None:
            for kind, objects in (
                ("quota", self.snapshot.quotas),
                ("pod", self.snapshot.pods),
                ("node", self.snapshot.nodes),
            ):
                for one in objects:
                    namespace, name = _names(one)
                    names[namespace] = "ns"
                    names[name] = kind
        self.bundle.rename(salt, names, frozenset(self.own_names))


# --- objects ----------------------------------------------------------------------------------------------


def _names(obj: Mapping[str, Any]) -> tuple[str, str]:
    """Namespace ("": none) and name."""
    metadata = map_of(obj, "metadata")
    return str(metadata.get("namespace") or ""), str(metadata.get("name") or "")


def _component(obj: Mapping[str, Any]) -> str:
    """Which of HAMi's programs it belongs to, "" where to none."""
    name = component_of(obj)
    return name if name in _COMPONENTS else ""


def _versions(found: Objects) -> dict[str, Any]:
    """Versions of the cluster and its nodes, and the images that run."""
    nodes: dict[str, int] = {}
    for node in found.nodes:
        info = map_of(map_of(node, "status"), "nodeInfo")
        members = ("kubeletVersion", "containerRuntimeVersion", "kernelVersion", "osImage", "architecture")
        text = ", ".join(str(info.get(member, "?")) for member in members)
        nodes[text] = nodes.get(text, 0) + 1
    images = {str(one.get("image")) for pod in found.pods for one in containers_of(pod)}
    charts = {str(map_of(map_of(one, "metadata"), "labels").get("helm.sh/chart")) for one in found.daemonsets}
    return {
        "kubernetes": found.version,
        "nodes": nodes,
        "images": sorted(images),
        "charts": sorted(chart for chart in charts if chart.startswith("hami-")),
    }


def _asked(pod: Mapping[str, Any]) -> Iterable[str]:
    for container in containers_of(pod):
        for part in ("limits", "requests"):
            yield from map_of(map_of(container, "resources"), part)


def _statuses(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    status = map_of(pod, "status")
    return [*objects_of(status, "initContainerStatuses"), *objects_of(status, "containerStatuses")]


def _trouble(pod: Mapping[str, Any]) -> tuple[bool, int, str]:
    conditions = objects_of(map_of(pod, "status"), "conditions")
    ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
    return ready, -sum(_restarts(one) for one in _statuses(pod)), _names(pod)[1]


def _restarts(status: Mapping[str, Any]) -> int:
    count = status.get("restartCount")
    return count if isinstance(count, int) else 0


def _logs_of(pod: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Containers, and of which run the log is meant."""
    restarted = {one.get("name") for one in _statuses(pod) if _restarts(one)}
    for container in containers_of(pod):
        name = container.get("name")
        yield str(name), _NOW
        if name in restarted:
            yield str(name), _BEFORE


def _ports(pod: Mapping[str, Any]) -> list[int]:
    """The ports that serve metrics; the dashboard has none."""
    if _component(pod) not in _DEFAULT_PORTS:
        return []
    ports = [
        port
        for container in objects_of(map_of(pod, "spec"), "containers")
        for port in objects_of(container, "ports")
    ]
    more = [one.get("containerPort") for one in ports if one.get("name") == "plugin-metrics"]
    first = metrics_port(pod, _DEFAULT_PORTS[_component(pod)])
    return [first, *(number for number in more if isinstance(number, int))]


def _is_about_us(event: Any, scheduler: str, uids: set[str]) -> bool:
    if not isinstance(event, dict):
        return False
    component = str(map_of(event, "source").get("component") or event.get("reportingComponent") or "")
    if component.startswith("hami-") or component == scheduler:
        return True
    return map_of(event, "involvedObject").get("uid") in uids or str(event.get("reason")).startswith("HAMi")


def _time(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or "")
