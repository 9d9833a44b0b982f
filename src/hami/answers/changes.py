"""What would have to change for a waiting pod to fit: every answer was tried on a copy of the cluster."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from hami.answers.amounts import cores_share, memory_share
from hami.answers.replay import Object, Replay
from hami.protocol import keys
from hami.protocol.errors import HamiError, QuantityError
from hami.protocol.quantity import value
from hami.scheduler.core.answers import Placement, PodUsage
from hami.vendors.engine import containers_of, mutate_admission
from hami.vendors.selection import steering_keys
from hami.vendors.types import NOTHING_USED, AdmissionRejected

MAX_TRIALS: Final = 2000
"""Placements tried for one pod: about 2 s on a large cluster."""

_SHOWN = 3  # pods whose end would make room
_NODES_EMPTIED = 50  # nodes on which several pods at once are tried


def helpful_changes(replay: Replay, pod: Object, away: Mapping[str, str]) -> tuple[str, ...]:
    """Single changes with which the pod fits, as sentences; the most useful kinds first.

    `away`: nodes that kube-scheduler keeps from the pod, with its reason. The replayed cluster is the same
    afterwards but for the pod's own assignment.
    """
    return tuple(_Trials(replay, pod, away).found())


class _Trials:
    def __init__(self, replay: Replay, pod: Object, away: Mapping[str, str]) -> None:
        self._replay = replay
        self._pod = pod
        self._away = away
        self._left = MAX_TRIALS
        self._candidates = [name for name in replay.nodes if name not in away]
        request = replay.request(pod)
        self._vendors = [p for p in replay.profiles if request and p.common_word in request.vendors]

    def found(self) -> Iterator[str]:
        quota = list(self._without_quota())
        yield from quota
        yield from self._less()
        yield from self._without_annotation()
        yield from self._uncordoned()
        yield from self._on_nodes_kept_away()
        ended = list(self._ended())
        yield from ended
        if not quota and not ended:
            yield self._empty()

    # --- one trial ----------------------------------------------------------------------------------------

    def _fits(self, pod: Object, nodes: Iterable[str] | None = None) -> str:
        """The node the pod would get, or ""."""
        if self._left <= 0:
            return ""
        self._left -= 1
        try:
            answer = self._replay.place(pod, self._candidates if nodes is None else nodes)
        except HamiError:
            return ""
        if not isinstance(answer, Placement):
            return ""
        self._replay.state.release(answer.reservation.uid)
        return answer.node

    # --- kinds of change ----------------------------------------------------------------------------------

    def _less(self) -> Iterator[str]:
        """Asking for less of one resource."""
        for name, (asked, written) in self._amounts().items():
            most, node = self._most(name, asked)
            if node:
                yield f"ask for {name}: {most} instead of {written}: fits on {node}"

    def _most(self, name: str, asked: int) -> tuple[int, str]:
        """The largest amount below `asked` that fits, with a node; (0, "") when none does."""
        low, high, node = 0, asked, ""  # low fits (or is 0), high does not
        while high - low > 1:
            middle = (low + high) // 2 if node else 1  # first see whether the least fits
            there = self._fits_with(name, middle)
            if there:
                low, node = middle, there
            elif not node:
                return self._most_of_a_size(name, asked)
            else:
                high = middle
        return low, node

    def _most_of_a_size(self, name: str, asked: int) -> tuple[int, str]:
        """As `_most` for resources of which not every amount may be asked: the powers of two."""
        for bit in range((asked - 1).bit_length() - 1, 0, -1):
            node = self._fits_with(name, 1 << bit)
            if node:
                return 1 << bit, node
        return 0, ""

    def _fits_with(self, name: str, most: int) -> str:
        """The node the pod would get if it asked for at most so much, or ""."""
        less = with_at_most(self._pod, name, most)
        return self._fits(less) if self._is_admitted(less) else ""

    def _is_admitted(self, pod: Object) -> bool:
        """Whether the vendors let such a pod be created: some amounts are none of theirs."""
        draft = copy.deepcopy(dict(pod))
        try:
            for container in containers_of(draft):
                for profile in self._vendors:
                    mutate_admission(profile, container, draft, self._replay.state.inventory)
        except AdmissionRejected:
            return False
        return True

    def _amounts(self) -> dict[str, tuple[int, str]]:
        """The largest limit of every resource of the vendors asked that is more than 1, and as written."""
        found: dict[str, tuple[int, str]] = {}
        names = [name for profile in self._vendors for name in profile.names.all()]
        for container in containers_of(self._pod):
            limits = (container.get("resources") or {}).get("limits") or {}
            for name in names:
                try:
                    amount = value(limits[name]) if name in limits else 0
                except QuantityError:
                    continue
                written = str(limits[name]) if name in limits else ""
                shown = str(amount) if written.endswith("k") else written  # the API server writes 20000 so
                if amount > 1:
                    found[name] = max(found.get(name, (0, "")), (amount, shown))
        return found

    def _without_annotation(self) -> Iterator[str]:
        """Leaving out one annotation that narrows the choice of cards."""
        annotations = self._pod["metadata"].get("annotations") or {}
        narrowing = {keys.CARD_POLICY, *(key for one in self._vendors for key in steering_keys(one.rules))}
        for key in sorted(narrowing & annotations.keys()):
            kept = {other: text for other, text in annotations.items() if other != key}
            node = self._fits({**self._pod, "metadata": {**self._pod["metadata"], "annotations": kept}})
            if node:
                yield f"without the annotation {key}: {annotations[key]} it fits on {node}"

    def _without_quota(self) -> Iterator[str]:
        """A larger quota of the namespace."""
        state, space = self._replay.state, self._pod["metadata"].get("namespace", "")
        mine = [one for one in self._replay.snapshot.quotas if one["metadata"].get("namespace") == space]
        if not mine:
            return
        request = self._replay.request(self._pod)
        shortage = "" if request is None else state.quota_shortage(request)
        for quota in mine:
            state.delete_quota(space, quota["metadata"]["name"])
        node = self._fits(self._pod)
        self._replay.feed_quotas()
        if node:
            words = f" ({shortage})" if shortage else ""
            yield f"with a larger quota of namespace {space}{words} it fits on {node}"

    def _uncordoned(self) -> Iterator[str]:
        """Taking cards back into service."""
        cordoned = [
            name
            for name in self._candidates
            if (self._replay.nodes[name]["metadata"].get("annotations") or {}).get(keys.DEVICE_CORDON)
        ]
        for name in cordoned[:_NODES_EMPTIED]:
            node = self._replay.nodes[name]
            annotations = dict(node["metadata"]["annotations"])
            del annotations[keys.DEVICE_CORDON]
            self._replay.feed_node({**node, "metadata": {**node["metadata"], "annotations": annotations}})
            fits = self._fits(self._pod, [name])
            self._replay.feed_node(node)
            if fits:
                yield f"without the annotation {keys.DEVICE_CORDON} of node {name} it fits there"
                return

    def _on_nodes_kept_away(self) -> Iterator[str]:
        """A node whose cards would do, but that kube-scheduler does not offer."""
        for name, reason in sorted(self._away.items()):
            if self._fits(self._pod, [name]):
                yield f"node {name} has the cards, but kube-scheduler keeps the pod away: {reason}"
                return

    def _ended(self) -> Iterator[str]:
        """Running pods whose end makes room: single ones, else the fewest of one node."""
        shown = 0
        holders = self._holders()
        for held in (held for pods in holders.values() for held in pods):
            if self._left <= 0:
                break
            if self._fits_without([held]):
                yield f"once pod {held.namespace}/{held.name} has ended it fits on {held.node}"
                shown += 1
                if shown == _SHOWN:
                    return
        if shown:
            return
        best: list[PodUsage] = []
        for pods in list(holders.values())[:_NODES_EMPTIED]:
            few = self._few(pods) if self._left > 0 else []
            if few and (not best or len(few) < len(best)):
                best = few
        if best:
            names = ", ".join(f"{one.namespace}/{one.name}" for one in best)
            yield f"once pods {names} have ended it fits on {best[0].node}"

    def _holders(self) -> dict[str, list[PodUsage]]:
        """Per candidate node the other pods on cards of the vendors asked, those of least priority first."""
        words = {one.common_word for one in self._vendors}
        mine = self._pod["metadata"].get("uid", "")
        found: dict[str, list[PodUsage]] = {}
        for held in self._replay.state.pods():
            if held.uid != mine and held.node not in self._away and words & held.effective.keys():
                found.setdefault(held.node, []).append(held)
        for pods in found.values():
            pods.sort(key=lambda one: (self._priority(one), one.namespace, one.name))
        return dict(sorted(found.items()))

    def _priority(self, held: PodUsage) -> int:
        spec = self._replay.pods.get((held.namespace, held.name), {}).get("spec") or {}
        priority = spec.get("priority")
        return priority if isinstance(priority, int) else 0

    def _fits_without(self, gone: list[PodUsage]) -> bool:
        with self._replay.without(one.uid for one in gone):
            return bool(self._fits(self._pod, [gone[0].node]))

    def _few(self, pods: list[PodUsage]) -> list[PodUsage]:
        """A set of these pods of one node without which the pod fits, no member of it needless; or []."""
        if not self._fits_without(pods):
            return []
        needed = list(pods)
        for one in reversed(pods):
            fewer = [other for other in needed if other is not one]
            if fewer and self._fits_without(fewer):
                needed = fewer
        return needed

    def _empty(self) -> str:
        """Whether it would fit on nodes without any pod."""
        state, request = self._replay.state, self._replay.request(self._pod)
        assert request is not None
        simulation = state.simulate(request, self._replay.node_views(self._candidates))
        while (result := simulation.advance(64)) is None:
            pass
        fits = result.fits
        if fits:
            return f"on nodes without other pods it would fit, on {len(fits)} of them, such as {fits[0]}"
        if self._vendors and self._candidates:
            return f"it fits on no node of this cluster, not even on an empty one: {self._largest()}"
        return "there is no node that it could run on"

    def _largest(self) -> str:
        """The largest cards there are of the vendors asked."""
        parts = []
        for profile in self._vendors:
            kinds = self._replay.state.inventory.kinds(profile.common_word)
            if kinds:
                memory = max(memory_share(profile, one, NOTHING_USED).total for one in kinds)
                cores = max(cores_share(profile, one, NOTHING_USED).total for one in kinds)
                sizes = [f"{memory} MiB"] if memory else []
                sizes += [f"{cores} cores"] if cores else []
                sizes = sizes or [f"{max(one.count for one in kinds)} slots"]
                parts.append(f"the largest {profile.common_word} card has {' and '.join(sizes)}")
            else:
                parts.append(f"no node has registered cards of {profile.common_word}")
        return "; ".join(parts)


def with_at_most(pod: Object, name: str, most: int) -> dict[str, Any]:
    """A copy of the pod in which no container asks for more than `most` of a resource."""
    changed: dict[str, Any] = copy.deepcopy(dict(pod))
    for container in containers_of(changed):
        for side in ("limits", "requests"):
            amounts = (container.get("resources") or {}).get(side) or {}
            if name in amounts and value(amounts[name]) > most:
                amounts[name] = str(most)
    return changed


__all__ = ["MAX_TRIALS", "helpful_changes", "with_at_most"]
