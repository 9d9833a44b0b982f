"""The fit of one container request on one node, the same loop for every vendor (README R12).

Cards are tried from the last candidate to the first; the first check a card fails counts one reason. NUMA
binding groups cards explicitly, so that a rejected card of another NUMA node never loses progress.
"""

from collections.abc import Sequence

from hami.vendors.reasons import (
    CORDONED,
    EXCLUSIVE,
    EXHAUSTED,
    ID_MISMATCH,
    INSUFFICIENT_CARDS,
    INSUFFICIENT_CORES,
    INSUFFICIENT_MEMORY,
    INTERNAL_ERROR,
    NODE_INSUFFICIENT,
    NUMA_NOT_FIT,
    OUT_OF_SLOTS,
    QUOTA_NOT_FIT,
    TYPE_MISMATCH,
)
from hami.vendors.selection import Selection, cordoned_ids, select
from hami.vendors.types import (
    NO_PERCENT,
    Card,
    ContainerDevice,
    ContainerRequest,
    DeviceInfo,
    FitContext,
    FitResult,
    Need,
    Refused,
    Usage,
    VendorProfile,
)
from hami.vendors.usage import Held, quota_use

_NO_SEPARATORS = str.maketrans(",:;", "___")  # they structure the allocation text
MAX_CORES = 100  # percent: a larger request is read as a whole card


def fit(p: VendorProfile, ctx: FitContext) -> FitResult:
    """Exactly `ctx.request.nums` devices, or None with the reasons; never raises and changes nothing.

    A fault inside is answered with reason `InternalError`, so that one odd node does not stop the others;
    `detail` of the result says what happened.
    """
    try:
        return _Fit(p, ctx).run()
    except Exception as error:  # user texts and registrations reach the hooks: no input may stop a filter
        return FitResult(None, {INTERNAL_ERROR: 1}, len(ctx.candidates), f"{type(error).__name__}: {error}")


def refuse_all(code: str, candidates: int) -> FitResult:
    """Every card refuses with the same reason (a node without free slots, an unservable request)."""
    return FitResult(None, {code: candidates}, candidates)


def card_healthy(p: VendorProfile, info: DeviceInfo, used: Usage) -> bool:
    """Whether a card takes new containers: registered healthy, and its use is understood."""
    return info.health and (p.hooks.healthy is None or p.hooks.healthy(info, used))


def card_need(request: ContainerRequest, info: DeviceInfo, used: Usage) -> Need:
    """What the standard checks compare: MiB (percent of the card truncated), capped cores, and the card's
    cores.
    """
    mem = request.memreq
    if mem <= 0 and request.mem_percent != NO_PERCENT:
        mem = info.devmem * request.mem_percent // 100
    return Need(max(mem, 0), min(request.cores, MAX_CORES), info.devcore, used.cores)


class _Fit:
    """One run; holds what is the same for all cards."""

    __slots__ = (
        "_checks",
        "_collected",
        "_cordoned",
        "_ctx",
        "_has_quota",
        "_held",
        "_mutex",
        "_p",
        "_reasons",
        "_selection",
        "_total",
        "_total_cores",
    )

    def __init__(self, p: VendorProfile, ctx: FitContext) -> None:
        self._p = p
        self._ctx = ctx
        self._checks = p.rules.checks
        self._selection: Selection = select(p.rules, ctx.pod.annotations)
        self._cordoned = (
            cordoned_ids(ctx.node.annotations) if "cordon" in p.rules.checks else frozenset[str]()
        )
        self._mutex = "mutex" in ctx.policy and "mutex" in p.rules.checks
        quota = ctx.quota
        self._has_quota = "quota" in p.rules.checks and (
            quota.mem_left is not None or quota.cores_left is not None
        )
        self._total_cores: dict[str, int] | None = None
        self._held: Held | None = None
        self._collected: list[ContainerDevice] | None = None  # cards count with those collected before them
        self._total = len(ctx.candidates)
        self._reasons: dict[str, int] = {}

    def run(self) -> FitResult:
        p, ctx = self._p, self._ctx
        if ctx.request.nums > self._total and not self._may_repeat():
            return FitResult(None, {NODE_INSUFFICIENT: self._total}, self._total)
        if p.hooks.prefit is not None:
            refused = p.hooks.prefit(ctx)
            if refused is not None:
                return refused
        if p.hooks.choose is not None and (p.hooks.choose_when is None or p.hooks.choose_when(ctx)):
            return self._run_choosing()
        if self._selection.numa_bound:
            return self._run_numa_bound()
        taken: list[ContainerDevice] = []
        for card in reversed(ctx.candidates):
            if self._take(card, taken):
                return FitResult(tuple(taken), self._reasons, self._total)
        return self._failed(len(taken))

    # --- the three ways to collect ----------------------------------------------------------------------

    def _take(self, card: Card, taken: list[ContainerDevice]) -> bool:
        """Take the card as often as allowed; True when `taken` is complete."""
        repeat = self._p.hooks.repeatable
        nums = self._ctx.request.nums
        while True:
            device = self._device(card, taken)
            if isinstance(device, str):
                self._count(device)
                return False
            taken.append(device)
            if len(taken) == nums:
                return True
            if repeat is None or not repeat(card.info):
                return False

    def _run_numa_bound(self) -> FitResult:
        collected = 0
        for group in self._numa_groups():
            if collected:
                self._reasons[NUMA_NOT_FIT] = self._reasons.get(NUMA_NOT_FIT, 0) + collected
            taken: list[ContainerDevice] = []
            for card in group:
                if self._take(card, taken):
                    return FitResult(tuple(taken), self._reasons, self._total)
            collected = len(taken)
        return self._failed(collected)

    def _run_choosing(self) -> FitResult:
        """All eligible cards first, each once; the hook picks among them.

        Where the quota has no room for what it picks, only cards that fit into it together are eligible.
        """
        result = self._choose_among_eligible()
        if result.devices is not None or not self._has_quota or QUOTA_NOT_FIT not in result.reasons:
            return result
        self._reasons, self._collected = {}, []
        return self._choose_among_eligible()

    def _choose_among_eligible(self) -> FitResult:
        """Bound to a NUMA node the group examined last is asked first: it is the one HAMi would take."""
        if self._selection.numa_bound:
            groups = self._numa_groups()[::-1]
        else:
            groups = [list(reversed(self._ctx.candidates))]
        first_refusal: Refused | None = None
        for eligible in [self._eligible(group) for group in groups]:
            outcome = self._chosen(eligible)
            if isinstance(outcome, FitResult):
                return outcome
            first_refusal = first_refusal or outcome
        if first_refusal is None:
            return self._failed(0)
        return FitResult(None, first_refusal.reasons, first_refusal.total)

    def _eligible(self, group: Sequence[Card]) -> list[Card]:
        eligible: list[Card] = []
        collected = self._collected
        for card in group:
            device = self._device(card, ())
            if isinstance(device, str):
                self._count(device)
                continue
            eligible.append(card)
            if collected is not None:
                collected.append(device)
        if collected:
            collected.clear()
        return eligible

    def _chosen(self, eligible: list[Card]) -> FitResult | Refused:
        p, ctx = self._p, self._ctx
        choose = p.hooks.choose
        assert choose is not None
        choice = choose(ctx, eligible, self._reasons)
        if isinstance(choice, Refused):
            return choice
        taken: list[ContainerDevice] = []
        spent: set[int] = set()
        for position in choice:
            if position in spent:
                continue
            device = self._device(eligible[position], taken)
            if isinstance(device, str):
                self._count(device)
                spent.add(position)
                continue
            taken.append(device)
            if len(taken) == ctx.request.nums:
                return FitResult(tuple(taken), self._reasons, self._total)
        return Refused(self._failed(len(taken)).reasons, self._total)

    def _numa_groups(self) -> list[list[Card]]:
        """Cards in try order by NUMA node, groups in order of first appearance.

        Cards that fail the checks before the NUMA step are counted here and belong to no group.
        """
        groups: dict[int, list[Card]] = {}
        for card in reversed(self._ctx.candidates):
            reason = self._before_numa(card)
            if reason is not None:
                self._count(reason)
            else:
                groups.setdefault(card.info.numa, []).append(card)
        return list(groups.values())

    def _failed(self, collected: int) -> FitResult:
        reasons = dict(self._reasons)
        if collected:
            reasons[INSUFFICIENT_CARDS] = collected
        return FitResult(None, reasons or {NODE_INSUFFICIENT: self._total}, self._total)

    def _count(self, reason: str) -> None:
        self._reasons[reason] = self._reasons.get(reason, 0) + 1

    def _may_repeat(self) -> bool:
        repeat = self._p.hooks.repeatable
        if repeat is None:
            return False
        return any(
            repeat(card.info) and self._selection.allows_mode(card.info.mode) for card in self._ctx.candidates
        )

    # --- one card ---------------------------------------------------------------------------------------

    def _before_numa(self, card: Card) -> str | None:
        p, info, checks = self._p, card.info, self._checks
        if "health" in checks and not (
            info.health and (p.hooks.healthy is None or p.hooks.healthy(info, card.used))
        ):
            return p.rules.unhealthy_reason
        if info.id in self._cordoned:
            return CORDONED
        if "type" in checks and (
            self._ctx.request.type != p.common_word or not self._selection.allows_model(info.type, info.mode)
        ):
            return TYPE_MISMATCH
        return None

    def _device(self, card: Card, taken: Sequence[ContainerDevice]) -> ContainerDevice | str:
        """The device this container would get of the card, beside those in `taken`; or the reason against
        it.
        """
        reason = self._before_numa(card)
        if reason is not None:
            return reason
        p, ctx, checks = self._p, self._ctx, self._checks
        info, used, request = card.info, card.used, ctx.request
        hooks = p.hooks
        if hooks.card_rule is not None and (rule := hooks.card_rule(ctx, card)) is not None:
            return rule
        if "id" in checks and not self._selection.allows_id(info.id):
            return ID_MISMATCH
        slots, mem_used, cores_pending = used.slots, used.mem, 0
        if taken and hooks.repeatable is not None:
            for device in taken:  # this container's earlier slices of the same card
                if device.uuid == info.id:
                    slots += request.slots
                    mem_used += device.usedmem
                    cores_pending += device.usedcores
        if "slots" in checks and info.count - slots < request.slots:
            return OUT_OF_SLOTS
        if used.slots > 0 and (self._mutex or p.rules.unused_only):
            return EXCLUSIVE
        need = card_need(request, info, used) if hooks.needs is None else hooks.needs(ctx, card)
        if self._has_quota and not self._within_quota(card, need, taken):
            return QUOTA_NOT_FIT
        if "memory" in checks and info.devmem - mem_used < need.mem:
            return INSUFFICIENT_MEMORY
        if "cores" in checks and need.total_cores - need.used_cores - cores_pending < need.cores:
            return INSUFFICIENT_CORES
        if "exclusive" in checks and need.total_cores == MAX_CORES == need.cores and used.slots > 0:
            return EXCLUSIVE
        if (
            "exhausted" in checks
            and need.cores == 0
            and need.total_cores == need.used_cores
            and need.total_cores != 0
        ):
            return EXHAUSTED
        if hooks.device_rule is not None and (rule := hooks.device_rule(ctx, card, need, taken)) is not None:
            return rule
        return self._record(card, need, taken)

    def _record(self, card: Card, need: Need, taken: Sequence[ContainerDevice]) -> ContainerDevice:
        p, info = self._p, card.info
        if p.hooks.record is not None:
            return p.hooks.record(self._ctx, card, need, taken)
        rules = p.rules
        return ContainerDevice(
            info.id,
            info.type.translate(_NO_SEPARATORS) if rules.alloc_type == "device" else self._ctx.request.type,
            need.mem if rules.record_mem is None else rules.record_mem,
            need.cores,
            info.index,
            info.custom,
        )

    def _within_quota(self, card: Card, need: Need, taken: Sequence[ContainerDevice]) -> bool:
        """Whether the pod, with all chosen so far and this card, stays within its namespace's quota."""
        p, ctx = self._p, self._ctx
        if self._total_cores is None:
            self._total_cores = {c.info.id: c.info.devcore for c in ctx.candidates}
        if self._held is None:
            self._held = Held(p, ctx.pod.shape, inits_finished=False)
            for slot in ctx.allocated:
                self._held.append(slot)
        if p.hooks.charge is not None:
            candidate = p.hooks.charge(ctx, card, need)
        else:
            candidate = ContainerDevice(card.info.id, ctx.request.type, need.mem, need.cores)
        beside = (*(self._collected or ()), *taken, candidate)
        mem, cores = quota_use(p, self._held.total_with(beside), self._total_cores)
        quota = ctx.quota
        return not (
            (quota.mem_left is not None and mem > quota.mem_left)
            or (quota.cores_left is not None and cores > quota.cores_left)
        )
