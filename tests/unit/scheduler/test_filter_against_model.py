"""`/filter` for NVIDIA cards against a second reading of the specification: plain loops, nothing remembered.

The model follows scheduler.md §6, §7, §9 and nvidia-scheduling.md §6, §9, §13.4 line by line. What it leaves
out: MIG, and the choice by pair scores inside a NUMA node or a quota.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from hami.scheduler.core.answers import NoFit

Lab = Any
Device = tuple[str, int, int]  # card, MiB, cores
Slots = list[list[Device]]  # of a pod, per container
ALLOCATED = "hami.io/vgpu-devices-allocated"
TRUE = ("1", "t", "T", "TRUE", "true", "True")
ALL_FITTED = 64
CARD_POLICIES = ["binpack", "spread", "mutex", "numa", "topology-aware", " binpack , numa", "spread,mutex"]
CARD_POLICIES += ["other", "", ",", "numa,topology-aware", "binpack,binpack,spread", " mutex"]


@dataclass
class Card:
    id: str
    index: int
    count: int
    mem: int
    cores: int
    model: str
    numa: int
    mode: str
    health: bool
    scores: dict[str, int]
    used: int = 0
    used_mem: int = 0
    used_cores: int = 0


@dataclass(frozen=True)
class Ask:
    nums: int
    mem: int
    percent: int
    cores: int


@dataclass
class Host:
    name: str
    cards: list[Card]
    cordoned: tuple[str, ...]
    allocatable: int | None


@dataclass
class New:
    """The pod to place: kinds of its containers (I, S, A) and what each asks."""

    kinds: str
    asks: list[Ask | None]
    notes: dict[str, str]
    node_policy: str
    card_policy: str
    weights: tuple[int, int, int] = (1, 1, 1)


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def held(kinds: str, slots: Slots) -> dict[str, tuple[int, int, int]]:
    """Slots, MiB and cores per card while init containers are still to come (scheduler.md §6.5)."""
    steady: dict[str, tuple[int, ...]] = {}
    peak: dict[str, tuple[int, ...]] = {}
    for kind, slot in zip(kinds, slots, strict=False):
        use = dict(steady)
        for card, mem, cores in slot:
            use[card] = tuple(a + b for a, b in zip(use.get(card, (0, 0, 0)), (1, mem, cores), strict=True))
        if kind != "I":
            steady = use
        for card, now in use.items():
            peak[card] = tuple(max(a, b) for a, b in zip(peak.get(card, (0, 0, 0)), now, strict=True))
    return {card: (use[0], use[1], use[2]) for card, use in peak.items()}


class Model:
    def __init__(self, hosts: Sequence[Host], new: New, left: tuple[int | None, int | None]) -> None:
        self.hosts = hosts
        self.new = new
        self.left = left  # of the namespace's quota: MiB, cores

    def answer(self) -> tuple[str, Slots] | dict[str, str]:
        """Node and devices, or the reason of every node."""
        fits: dict[str, Slots] = {}
        failed: dict[str, str] = {}
        for host in self.hosts:
            found = self.fit(host)
            if isinstance(found, str):
                failed[host.name] = found
            else:
                fits[host.name] = found
        if not fits:
            return failed
        sign = -1 if self.new.node_policy == "spread" else 1
        best = max(
            (host for host in self.hosts if host.name in fits),
            key=lambda host: (sign * self.base(host), -len(host.cards), [-ord(sign) for sign in host.name]),
        )
        return best.name, fits[best.name]

    def base(self, host: Host) -> float:
        single = np.float32
        total = [sum(getattr(card, name) for card in host.cards) for name in ("count", "cores", "mem")]
        used = [
            sum(getattr(card, name) for card in host.cards) for name in ("used", "used_cores", "used_mem")
        ]
        if not all(total):
            return 0.0
        slots, cores, mem = (single(part) / single(whole) for part, whole in zip(used, total, strict=True))
        return float(single(10) * (slots + cores + mem))

    def fit(self, host: Host) -> Slots | str:
        asked = [[("", 0, 0)] * (ask.nums if ask else 0) for ask in self.new.asks]
        slots = held(self.new.kinds, asked).get("", (0, 0, 0))[0]
        free = None if host.allocatable is None else host.allocatable - sum(one.used for one in host.cards)
        full = free is not None and slots > free
        steady = [replace(card) for card in host.cards]
        chosen: Slots = []
        for kind, ask in zip(self.new.kinds, self.new.asks, strict=True):
            cards = [replace(card) for card in steady]
            taken: list[Device] | str = [] if ask is None else self.take(host, cards, ask, chosen, full=full)
            if isinstance(taken, str):
                return taken
            for card_id, mem, cores in taken:
                card = next(card for card in cards if card.id == card_id)
                card.used, card.used_mem = card.used + 1, card.used_mem + mem
                card.used_cores += cores
            chosen.append(taken)
            if kind != "I":
                steady = cards
        return chosen

    def take(
        self, host: Host, cards: list[Card], ask: Ask, chosen: Slots, *, full: bool
    ) -> list[Device] | str:
        if ask.nums > len(cards):
            return "NodeInsufficientDevice"
        bound = self.new.notes.get("nvidia.com/numa-bind", "") in TRUE
        by_scores = "topology-aware" in words(self.new.card_policy)
        refused: Counter[str] = Counter()
        got: list[Device] = []
        group = None
        walk = sorted(cards, key=self.order(ask, bound=bound))[::-1]  # equal ones: the later first
        if bound:  # one NUMA node after the other, as they come up (nvidia-scheduling.md §9.5, ours)
            nodes = [card.numa for card in walk if not self.before_numa(host, card)]
            walk.sort(key=lambda card: nodes.index(card.numa) if card.numa in nodes else -1)
        for card in walk:
            reason = self.before_numa(host, card)
            if not reason and bound and card.numa != group:
                refused["NumaNotFit"] += len(got)
                got, group = [], card.numa
            device = (card.id, need(card, ask), min(ask.cores, 100))
            reason = reason or self.refusal(
                card, device, [*chosen, [*([] if by_scores else got), device]], full
            )
            if reason:
                refused[reason] += 1
                continue
            got.append(device)
            if len(got) == ask.nums and not by_scores:
                return got
        if by_scores and len(got) >= ask.nums:
            return self.best_of(got, {card.id: card.scores for card in cards}, ask.nums)
        refused["AllocatedCardsInsufficientRequest"] += len(got)
        return ", ".join(sorted(f"{n}/{len(cards)} {code}" for code, n in refused.items() if n))

    def order(self, ask: Ask, *, bound: bool) -> Callable[[Card], tuple[float, ...]]:
        """Ascending preference (scheduler.md §7.2)."""
        policy = self.new.card_policy
        keys: dict[str, Callable[[Card], float]] = {
            "binpack": lambda card: self.score(card, ask),
            "spread": lambda card: -self.score(card, ask),
            "numa": lambda card: card.numa,
            "index": lambda card: card.index,
            "idle": lambda card: -card.used,
            "low numa": lambda card: -card.numa,
        }
        if "," in policy:
            chain = [word.strip() for word in policy.split(",")]
            chain = ["numa", *chain] if bound else chain
            named = [word for word in dict.fromkeys(chain) if word in ("binpack", "spread", "numa")]
            names = [*(named or ["spread"]), "index"]
        elif policy in ("mutex", "numa"):
            names = {"mutex": ["idle", "numa"], "numa": ["numa", "index"]}[policy]
        elif policy == "binpack":
            names = ["low numa", "binpack"] if bound else ["binpack", "numa"]
        else:
            names = ["numa", "spread"] if bound else ["spread", "numa"]
        return lambda card: tuple(keys[name](card) for name in names)

    def score(self, card: Card, ask: Ask) -> float:
        mem = card.mem * ask.percent // 100 if ask.percent not in (0, 101) else ask.mem
        slot, core, memory = self.new.weights
        return 10 * (
            slot * ((card.used + 1) / card.count)
            + core * ((card.used_cores + ask.cores) / card.cores)
            + memory * ((card.used_mem + mem) / card.mem)
        )

    def before_numa(self, host: Host, card: Card) -> str:
        notes, model = self.new.notes, card.model.lower()
        use, modes = notes.get("nvidia.com/use-gputype", ""), notes.get("nvidia.com/vgpu-mode", "")
        if not card.health:
            return "CardNotHealth"
        if card.id in host.cordoned:
            return "CardCordoned"
        wrong = (
            (use.strip() and not any(word.lower() in model for word in words(use)))
            or any(word.lower() in model for word in words(notes.get("nvidia.com/nouse-gputype", "")))
            or (modes.strip() and card.mode and card.mode not in words(modes))
        )
        return "CardTypeMismatch" if wrong else ""

    def refusal(self, card: Card, device: Device, pod: Slots, full: bool) -> str:
        _, mem, cores = device
        use = self.new.notes.get("nvidia.com/use-gpuuuid", "")
        uses = held(self.new.kinds, pod).values()
        over = any(
            room is not None and sum(use[at] for use in uses) > room
            for at, room in enumerate(self.left, start=1)
        )
        checks = {
            "CardUuidMismatch": (use.strip() and card.id not in words(use))
            or card.id in words(self.new.notes.get("nvidia.com/nouse-gpuuuid", "")),
            "CardTimeSlicingExhausted": full or card.used >= card.count,
            "ExclusiveDeviceAllocateConflict": card.used and "mutex" in words(self.new.card_policy),
            "ResourceQuotaNotFit": over,
            "CardInsufficientMemory": card.mem - card.used_mem < mem,
            "CardInsufficientCore": card.cores - card.used_cores < cores,
        }
        first = next((code for code, failed in checks.items() if failed), "")
        if first:
            return first
        if card.cores == 100 and cores == 100 and card.used:
            return "ExclusiveDeviceAllocateConflict"
        return "CardComputeUnitsExhausted" if not cores and card.cores == card.used_cores else ""

    def best_of(self, got: list[Device], scores: Mapping[str, Mapping[str, int]], nums: int) -> list[Device]:
        if nums == len(got):
            return got
        if nums == 1:
            sums = [sum(scores[one[0]].get(other[0], 0) for other in got) for one in got]
            return [got[sums.index(min(sums))]]
        sets = list(combinations(got, nums))
        sums = [sum(scores[a[0]].get(b[0], 0) for a, b in combinations(one, 2)) for one in sets]
        return list(sets[sums.index(max(sums))])


def need(card: Card, ask: Ask) -> int:
    return ask.mem if ask.mem else card.mem * ask.percent // 100 if ask.percent != 101 else 0


# --- clusters and pods ----------------------------------------------------------------------------------


def some_host(pick: random.Random, name: str, sizes: Sequence[int]) -> Host:
    cards = [
        Card(
            f"{name}-{at}",
            at,
            pick.choice([10, 10, 3]),
            pick.choice(sizes),
            pick.choice([100, 100, 100, 150]),
            pick.choice(["NVIDIA A10", "NVIDIA A10", "NVIDIA-Tesla T4"]),
            pick.choice([0, 0, 1]),
            pick.choice(["hami-core"] * 6 + ["mps", ""]),
            pick.random() > 0.06,
            {},
        )
        for at in range(pick.choice([1, 2, 4, 5]))
    ]
    if pick.random() < 0.7:
        for card in cards:
            others = [other.id for other in cards if other is not card]
            card.scores = {other: pick.choice([-5, 10, 20, 120, 420]) for other in others}
    cordoned = (cards[0].id,) if pick.random() < 0.08 else ()
    slots = sum(card.count for card in cards)
    return Host(name, cards, cordoned, pick.choice([None, slots, slots - 4]))


def some_pod(pick: random.Random, hosts: Sequence[Host]) -> tuple[New, list[dict[str, Any]]]:
    kinds = "".join(pick.choice("IS") for _ in range(pick.choice([0, 0, 0, 1, 2]))) + "A" * pick.choice(
        [1, 1, 2]
    )
    asks: list[Ask | None] = []
    amounts: list[dict[str, Any]] = []
    for _ in kinds:
        if pick.random() < 0.12:
            asks.append(None)
            amounts.append({"gpus": None})
            continue
        nums, cores = pick.choice([1, 1, 1, 2, 3]), pick.choice([None, 0, 10, 30, 60, 100, 150])
        mem, percent = pick.choice(
            [(None, None), (1000, None), (3000, None), (None, 50), (None, 0), (2000, 30)]
        )
        given = percent or 101
        whole = 100 if given == 101 and not mem else given
        asks.append(Ask(nums, mem or 0, whole, cores or 0))
        amounts.append({"gpus": nums, "mem": mem, "percent": percent, "cores": cores})
    ids = [card.id for card in pick.choice(hosts).cards]
    choices = {
        "nvidia.com/numa-bind": (0.2, ["true", "T", "yes", " true", ""]),
        "nvidia.com/use-gputype": (0.1, ["a10, t4", " tesla ", ",", "  ", "nvidia"]),
        "nvidia.com/nouse-gputype": (0.1, ["T4", ",", "", "a100"]),
        "nvidia.com/use-gpuuuid": (0.1, [f" {ids[0]} ,", ids[0].upper(), ",", " ", ",".join(ids)]),
        "nvidia.com/nouse-gpuuuid": (0.1, [ids[-1], f"{ids[0]}, {ids[-1]}", " "]),
        "nvidia.com/vgpu-mode": (0.1, ["hami-core", "mps , hami-core", "mig", " "]),
        "hami.io/node-scheduler-policy": (0.5, ["binpack", "spread", "Spread", ""]),
        "hami.io/gpu-scheduler-policy": (0.8, CARD_POLICIES),
    }
    notes = {key: pick.choice(texts) for key, (odds, texts) in choices.items() if pick.random() < odds}
    new = New(
        kinds,
        asks,
        notes,
        notes.get("hami.io/node-scheduler-policy", "binpack"),
        notes.get("hami.io/gpu-scheduler-policy", "spread"),
    )
    if pick.random() < 0.15:
        new.weights = pick.choice([(1, 1, 3), (0, 0, 1), (5, 1, 0)])
        slot, core, memory = new.weights
        notes["hami.io/device-scoring-weights"] = f"memory={memory}, slot = {slot},core=+{core}"
    return new, amounts


def filled(pick: random.Random, lab: Lab, hosts: Sequence[Host]) -> None:
    """Register the hosts, and pods that hold some of their cards."""
    for host in hosts:
        cards = [
            lab.card(
                card.id,
                count=card.count,
                devmem=card.mem,
                devcore=card.cores,
                type=card.model,
                numa=card.numa,
                mode=card.mode,
                health=card.health,
            )
            for card in host.cards
        ]
        rows = ",".join(
            f'{{"uuid":"{card.id}","score":{str(card.scores).replace(chr(39), chr(34))}}}'
            for card in host.cards
        )
        annotations = {
            "hami.io/node-nvidia-score": f"[{rows}]",
            "hami.io/device-cordon": " ,".join(host.cordoned),
        }
        lab.node(host.name, *cards, annotations=annotations, allocatable=host.allocatable)
        for number in range(pick.choice([0, 0, 1, 2, 4, 7])):
            card = pick.choice(host.cards)
            mem, cores = pick.choice([500, 1000, 3000, 6000]), pick.choice([0, 0, 10, 25, 60, 100])
            lab.holder(
                f"{host.name}-{number}", host.name, f"{card.id},NVIDIA,{mem},{cores}:;", namespace="other"
            )
            card.used, card.used_mem = card.used + 1, card.used_mem + mem
            card.used_cores += cores


def decided(lab: Lab, pod: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Slots] | dict[str, str]:
    answer = lab.filter(pod, *names)
    if isinstance(answer, NoFit):
        return {**answer.failed, **answer.unresolvable}
    slots = answer.reservation.allocations["NVIDIA"]
    return answer.node, [[(one.uuid, one.usedmem, one.usedcores) for one in slot] for slot in slots]


@pytest.mark.parametrize("nodes", [3, ALL_FITTED + 6])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_node_cards_and_reasons_are_those_of_the_plain_reading(lab: Lab, nodes: int, seed: int) -> None:
    pick = random.Random(seed)
    sizes = pick.choice([[8000], [4000, 8000, 16000]])
    hosts = [some_host(pick, f"n{at:02d}", sizes) for at in range(pick.randint(1, nodes))]
    new, amounts = some_pod(pick, hosts)
    lab = lab.fresh()
    filled(pick, lab, hosts)
    left: tuple[int | None, int | None] = (None, None)
    if pick.random() < 0.3:
        left = pick.choice([(4000, None), (None, 100), (9000, 60), (0, 0)])
        limits = {"gpumem": left[0], "gpucores": left[1]}
        lab.quota("default", **{name: limit for name, limit in limits.items() if limit is not None})
    if "topology-aware" in words(new.card_policy) and (
        left != (None, None) or new.notes.get("nvidia.com/numa-bind", "") in TRUE
    ):
        return  # not modelled
    if not any(new.asks):
        return
    inits = [
        lab.container(f"c{at}", **amounts[at], **({"restartPolicy": "Always"} if kind == "S" else {}))
        for at, kind in enumerate(new.kinds)
        if kind != "A"
    ]
    apps = [lab.container(f"c{at}", **amounts[at]) for at, kind in enumerate(new.kinds) if kind == "A"]
    pod = lab.pod("new", *apps, inits=inits, annotations=new.notes)
    assert decided(lab, pod, [host.name for host in hosts]) == Model(hosts, new, left).answer()
