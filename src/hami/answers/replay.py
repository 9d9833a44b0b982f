"""A cluster in memory, fed from a snapshot: the scheduler's own state, and what can be asked of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from hami.answers.errors import AnswerError
from hami.answers.shapes import check_node, check_pod
from hami.answers.snapshot import Snapshot
from hami.local.scheduling import node_fit
from hami.protocol import views
from hami.scheduler.core.answers import NoFit, Placement, PodRequest
from hami.scheduler.core.state import ClusterState
from hami.vendors.config import BUILTIN, load_profiles, parse_config
from hami.vendors.types import VendorProfile

Object = Mapping[str, Any]
T = TypeVar("T")


@lru_cache(maxsize=8)
def profiles_of(snapshot_config: str, *, ascend: bool, iluvatar: bool) -> tuple[VendorProfile, ...]:
    """The vendors of a device config text; an empty one means NVIDIA with the usual resource names."""
    config = parse_config(snapshot_config) if snapshot_config.strip() else BUILTIN
    return load_profiles(config, enable_ascend=ascend, enable_iluvatar=iluvatar)


class Replay:
    """The snapshot's cluster. Trials may change it; who needs it as it was replays the snapshot again."""

    def __init__(self, snapshot: Snapshot) -> None:
        settings = snapshot.settings
        self.snapshot = snapshot
        self.now = snapshot.taken_at
        self.profiles = profiles_of(
            snapshot.device_config, ascend=settings.enable_ascend, iluvatar=settings.enable_iluvatar
        )
        self.by_word = {profile.common_word: profile for profile in self.profiles}
        self.state = ClusterState(
            self.profiles,
            node_policy=settings.node_policy,
            card_policy=settings.card_policy,
            node_selector=settings.node_selector,
        )
        self.resources = frozenset(name for profile in self.profiles for name in profile.names.all())
        self.skipped: list[str] = []  # objects nobody can read
        self.nodes: dict[str, Object] = {}
        self.pods: dict[tuple[str, str], Object] = {}
        self._views: dict[str, views.Pod] = {}
        self._placed: defaultdict[str, dict[str, Object]] = defaultdict(dict)  # node -> uid -> pod
        self._checked: dict[bytes, dict[str, node_fit.Unfit | None]] = {}
        for node in snapshot.nodes:
            self.feed_node(node)
        self.feed_quotas()
        for pod in snapshot.pods:
            self.take(pod)

    def feed_node(self, node: Object) -> None:
        """Take over a node as it is now."""
        view = self._read(node, views.Node, check_node)
        if view is not None:
            self.nodes[view.name] = node
            self.state.upsert_node(view, self.now)
            self._forget(view.name)

    def feed_quotas(self) -> None:
        """Take over every quota of the snapshot."""
        for quota in self.snapshot.quotas:
            view = self._read(quota, views.ResourceQuota)
            if view is not None:
                self.state.upsert_quota(view)

    def node_views(self, names: Iterable[str]) -> list[views.Node]:
        """Nodes as the scheduler reads them."""
        read = (self._read(self.nodes[name], views.Node) for name in names)
        return [view for view in read if view is not None]

    def take(self, pod: Object) -> None:
        """Take over a pod as it is now."""
        view = self._read(pod, views.Pod, check_pod)
        if view is None:
            return
        self.pods[view.namespace, view.name] = pod
        self._views[view.uid] = view
        self.state.upsert_pod(view)
        if view.node_name and not view.is_finished:
            self._placed[view.node_name][view.uid] = pod
            self._forget(view.node_name)

    def drop(self, pod: Object) -> None:
        """Forget a pod."""
        metadata = pod["metadata"]
        self.pods.pop((metadata.get("namespace", ""), metadata["name"]), None)
        self.state.delete_pod(metadata.get("uid", ""))
        self._views.pop(metadata.get("uid", ""), None)
        node = (pod.get("spec") or {}).get("nodeName") or ""
        if self._placed[node].pop(metadata.get("uid", ""), None) is not None:
            self._forget(node)

    @contextmanager
    def without(self, uids: Iterable[str]) -> Iterator[None]:
        """The scheduler's state as if these pods had ended, for the time of a trial."""
        gone = [self._views[uid] for uid in uids]
        for view in gone:
            self.state.delete_pod(view.uid)
        try:
            yield
        finally:
            for view in gone:
                self.state.upsert_pod(view)

    def pod(self, namespace: str, name: str) -> Object:
        """A pod by name. Raises `AnswerError`."""
        found = self.pods.get((namespace, name))
        if found is None:
            elsewhere = sorted(space for space, other in self.pods if other == name)
            hint = f"; there is one in {', '.join(elsewhere)}: add -n" if elsewhere else ""
            raise AnswerError(f"no pod {name} in namespace {namespace}{hint}")
        return found

    def request(self, pod: Object) -> PodRequest | None:
        """The pod's device requests, None without any. Raises `HamiError`."""
        return self.state.parse(pod)

    def place(self, pod: Object, nodes: Iterable[str]) -> Placement | NoFit | None:
        """Decide a pod among nodes and keep the reservation; None when it asks for no device."""
        request = self.request(pod)
        if request is None:
            return None
        return self.state.place(request, self.state.candidates(sorted(nodes)), self.now)

    def unfit(self, pod: Object) -> dict[str, str]:
        """Nodes that kube-scheduler itself keeps from the pod, with its words (devices left to us).

        Raises `AnswerError` for what is no pod.
        """
        check_pod(pod)
        key = msgspec.json.encode(pod.get("spec") or {}, order="sorted")
        known = self._checked.setdefault(key, {})
        found = {}
        for name, node in self.nodes.items():
            if name not in known:
                placed = self._placed[name].values()
                known[name] = node_fit.check(
                    dict(pod), dict(node), [dict(one) for one in placed], self.resources
                )
            verdict = known[name]
            if verdict is not None:
                found[name] = ", ".join(verdict.reasons)
        return found

    def _forget(self, node: str) -> None:
        for known in self._checked.values():
            known.pop(node, None)

    def _read(self, obj: Object, kind: type[T], check: Callable[[object], None] | None = None) -> T | None:
        try:
            if check is not None:
                check(obj)
            return msgspec.convert(obj, kind)
        except (AnswerError, msgspec.ValidationError) as error:
            name = (obj.get("metadata") or {}).get("name", "?") if isinstance(obj, Mapping) else "?"
            self.skipped.append(f"{kind.__name__} {name} is left out: {error}")
            return None
