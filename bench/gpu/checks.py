"""The checks that need only the driver, in the order in which they run."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from bench_setup import GIB, MIB, NotRunError, Process, Setup, load_layout, require

layout = load_layout()
Check = Callable[[Setup], str]


def usage(region: Path) -> int:
    """Bytes of the first card in all live slots."""
    data = region.read_bytes()
    return sum(row["total"] for row in slots(data))


def slots(data: bytes) -> list[dict[str, int]]:
    """Live slots of a region."""
    rows = []
    for k in range(layout.V1.proc_num.read(data)):
        base = layout.V1.procs.base(k)
        if layout.V1Slot.status.read(data, base) != layout.SLOT_FREE:
            rows.append(
                {
                    "pid": layout.V1Slot.pid.read(data, base),
                    "hostpid": layout.V1Slot.hostpid.read(data, base),
                    "context": layout.V1Slot.used_context.read(data, base, 0),
                    "total": layout.V1Slot.used_total.read(data, base, 0),
                }
            )
    return rows


def poke(region: Path, offset: int, value: int, length: int) -> None:
    """Write a number into a region, as monitor and tool do."""
    with region.open("r+b") as stream:
        stream.seek(offset)
        stream.write(value.to_bytes(length, "little", signed=value < 0))


def look_ups(setup: Setup) -> str:
    """G2: informational; the library must not depend on the answer."""
    with setup.process(None) as process:
        process.must("start", load=False)
        same = process.must("pointers")["same"]
    with setup.process(setup.region()) as process:
        process.must("start", load=False)
        ours = process.must("pointers")["same"]
    return f"without the library {same}, with it {ours}"


def sizes(setup: Setup) -> str:
    """G3: the card is as large as the limit, whoever is asked."""
    with setup.process(setup.region(), CUDA_DEVICE_MEMORY_LIMIT_0="8g") as process:
        process.must("start")
        seen = process.must("sizes")
        wrong = {
            name: seen[name] for name in ("total", "device_total", "nvml_total") if seen[name] != 8 * GIB
        }
        require(not wrong, f"not 8 GiB: {wrong}")
        require(seen["free"] + seen["nvml_used"] <= 8 * GIB, f"free and used exceed the limit: {seen}")
    return "8 GiB by cuMemGetInfo, cuDeviceTotalMem and NVML"


def refusals(setup: Setup) -> str:
    """G4: refused between limit - context - 64 MiB and limit + 32 MiB, as "out of memory"."""
    limit, told = 4 * GIB, []
    for kind in ("linear", "async", "managed", "pitch", "array", "physical"):
        region = setup.region()
        with setup.process(region, CUDA_DEVICE_MEMORY_LIMIT_0="4g", LIBCUDA_LOG_LEVEL="0") as process:
            process.must("start")
            context = usage(region)
            found = process.must("fill_checked", kind=kind, step=16 * MIB, most=limit + GIB)
            low, high = limit - context - 64 * MIB, limit - context + 32 * MIB
            require(
                found["refusal"] == 2,
                f"{kind}: refused with {found['refusal']} after {found['bytes'] // MIB} MiB",
            )
            require(low <= found["bytes"] <= high, f"{kind}: refused after {found['bytes'] // MIB} MiB")
            require(
                usage(region) - context <= 4 * MIB, f"{kind}: {usage(region) // MIB} MiB are still charged"
            )
            told.append(f"{kind} {found['bytes'] // MIB}")
    return f"limit 4096 MiB, context {context // MIB}; got MiB: {', '.join(told)}"


def context_size(setup: Setup) -> str:
    """G6: what is charged for the context against what NVML shows for the process."""
    region = setup.region()
    with setup.process(region, CUDA_DEVICE_MEMORY_LIMIT_0="8g") as process:
        pid = process.must("start")["pid"]
        (slot,) = slots(region.read_bytes())
        with setup.process(None) as outside:
            outside.must("start", load=False)
            shown = outside.must("processes")["processes"]
        ours = shown.get(str(slot["hostpid"])) or shown.get(str(pid))
        if ours is None:
            raise NotRunError(f"NVML does not name the process: {shown}")
        require(
            abs(ours - slot["context"]) <= 64 * MIB,
            f"charged {slot['context'] // MIB}, NVML {ours // MIB} MiB",
        )
    return f"charged {slot['context'] // MIB} MiB, NVML {ours // MIB} MiB"


def race(setup: Setup) -> str:
    """G7: two processes ask for the last GiB at the same time."""
    region, rounds = setup.region(), max(10, int(100 * setup.scale))
    limits = {"CUDA_DEVICE_MEMORY_LIMIT_0": "4g", "LIBCUDA_LOG_LEVEL": "0"}
    with setup.process(region, **limits) as one, setup.process(region, **limits) as two:
        for process in (one, two):
            process.must("start")
        room = 4 * GIB - usage(region)
        size = room // 2 + 64 * MIB
        for number in range(rounds):
            for process in (one, two):
                process.send("alloc", kind="linear", size=size)
            codes = sorted(process.answer()["code"] for process in (one, two))
            require(codes == [0, 2], f"round {number}: results {codes}")
            require(usage(region) <= 4 * GIB, f"round {number}: {usage(region)} bytes are charged")
            for process in (one, two):
                process.must("free")
    return f"{rounds} rounds, one winner in each"


def shares(setup: Setup, modes: list[tuple[str, int]], limits: list[int]) -> str:
    """Throughput against that of a card that is busy all the time; NVML's utilisation beside it."""
    told, bad = [], []
    for mode, ns in modes:
        free, busy = loop(setup, mode, ns, 4 * setup.scale, 0)
        require(busy > 50, f"{mode} {ns // 1000} us: the program keeps the card busy for {busy:.0f} % only")
        for limit in limits:
            rate, shown = loop(setup, mode, ns, 12 * setup.scale, limit)
            share = busy * rate / free
            told.append(f"{mode} {ns // 1000} us at {limit}: throughput {share:.1f} %, NVML {shown:.0f} %")
            if abs(share - limit) > 0.15 * limit or abs(shown - limit) > 5:
                bad.append(told[-1])
    require(not bad, "; ".join(bad))
    return "; ".join(told)


def loop(setup: Setup, mode: str, ns: int, seconds: float, limit: int) -> tuple[float, float]:
    """Kernels a second and NVML's mean utilisation, percent, after a sixth of the time to warm up."""
    warm = seconds / 6
    with (
        setup.process(setup.region(), CUDA_DEVICE_SM_LIMIT=str(limit)) as process,
        setup.process(None) as eye,
    ):
        process.must("start")
        process.send("spin", seconds=seconds, ns=ns, mode=mode, warm=warm)
        busy = watch_utilization(eye, seconds, warm)
        return process.answer()["rate"], busy


def watch_utilization(eye: Process, seconds: float, warm: float) -> float:
    """Mean of NVML's utilisation of the card, percent, after the warm-up."""
    seen, begin = [], time.monotonic()
    while time.monotonic() - begin < seconds - 0.3:
        time.sleep(0.2)
        if time.monotonic() - begin > warm:
            seen.append(float(eye.must("utilization")["percent"]))
    return statistics.fmean(seen) if seen else 0.0


def core_limit(setup: Setup) -> str:
    """G8: a loop of long kernels and one of short ones."""
    return shares(setup, [("kernel", 2_000_000), ("kernel", 50_000)], [20, 50, 80])


def core_limit_of_graphs(setup: Setup) -> str:
    """G9: graphs, and cooperative kernels."""
    return shares(setup, [("graph", 100_000), ("cooperative", 500_000)], [30])


def killed(setup: Setup) -> str:
    """G12: memory of a killed process is free for another within 5 s."""
    region, limits = setup.region(), {"CUDA_DEVICE_MEMORY_LIMIT_0": "5g", "LIBCUDA_LOG_LEVEL": "0"}
    first = setup.process(region, **limits)
    first.must("start")
    with setup.process(region, **limits) as second:
        second.must("start")
        first.must("alloc", kind="linear", size=4 * GIB)
        require(second.ask("alloc", kind="linear", size=3 * GIB)["code"] == 2, "both fit")
        first.child.send_signal(signal.SIGKILL)
        first.child.wait()
        begin = time.monotonic()
        while second.ask("alloc", kind="linear", size=3 * GIB)["code"] != 0:
            require(time.monotonic() - begin < 5, "still refused after 5 s")
            time.sleep(0.02)
        return f"given back after {time.monotonic() - begin:.2f} s"


def children(setup: Setup) -> str:
    """G13: a forked child, and a program of its own in the same container."""
    region = setup.region()
    with setup.process(region, CUDA_DEVICE_MEMORY_LIMIT_0="4g") as process:
        process.must("start")
        process.must("alloc", kind="linear", size=64 * MIB)
        before = usage(region)
        require(process.must("fork")["status"] == 0, "the child failed")
        require(usage(region) == before, "the child changed its parent's numbers")
        with setup.process(region, CUDA_DEVICE_MEMORY_LIMIT_0="4g") as other:
            other.must("start")
            require(len(slots(region.read_bytes())) == 2, "not two slots")
        process.must("free")
    require(slots(region.read_bytes()) == [], "slots are left")
    return "fork, a second program, no slot left"


def shared_memory(setup: Setup) -> str:
    """G14: opened by another process, charged once."""
    region = setup.region()
    with setup.process(region) as owner, setup.process(region) as user:
        for process in (owner, user):
            process.must("start")
        handle = owner.must("share")["handle"]
        before = usage(region)
        user.must("open", handle=handle)
        require(usage(region) == before, f"charged {usage(region) - before} bytes more")
    return "charged once"


def start_up(setup: Setup) -> str:
    """G16: eight processes at once, cuInit and the first context apart, with and without the library.

    What the library adds counts as nothing within the spread of two runs without it.
    """
    runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for preload in (False, True, False, True):
        region = setup.region() if preload else None
        processes = [setup.process(region) for _ in range(8)]
        for process in processes:
            process.send("start", load=False)
        answers = [process.answer() for process in processes]
        for process in processes:
            process.leave()
        runs[preload].append(
            {key: max(answer[key] for answer in answers) for key in answers[0] if "_ms" in key}
        )
    best = {preload: {key: min(run[key] for run in of) for key in of[0]} for preload, of in runs.items()}
    init, context = (best[True][key] - best[False][key] for key in ("init_ms", "context_ms"))
    spread = abs(runs[False][0]["init_ms"] - runs[False][1]["init_ms"])
    allowed = max(2 + 0.1 * 8 / (os.cpu_count() or 1), spread)
    detail = (
        f"added: cuInit {init:.2f} ms to {best[False]['init_ms']:.2f} (allowed {allowed:.2f}, spread without "
        f"the library {spread:.2f}), context {context:.0f} ms"
    )
    require(init <= allowed and context <= 300, detail)
    return detail


def host_pid(setup: Setup) -> str:
    """G17: which numbers the driver has for processes, and what the library made of them."""
    region = setup.region()
    with setup.process(region) as process, setup.process(None) as outside:
        pid = process.must("start")["pid"]
        outside.must("start", load=False)
        (slot,) = slots(region.read_bytes())
        shown = sorted(int(name) for name in outside.must("processes")["processes"])
    return f"process {pid}, slot's host PID {slot['hostpid']}, NVML names {shown}"


def priority(setup: Setup) -> str:
    """G18: launches stop within 100 ms when the monitor says so, and go on within 100 ms."""
    region, counter = setup.region(), setup.work / "counter"
    counter.write_bytes(bytes(8))

    def launches() -> int:
        return int.from_bytes(counter.read_bytes(), "little")

    with setup.process(region) as process:
        process.must("start")
        process.send("spin", seconds=5.5, ns=100_000, counter=str(counter), queue_ms=0.5)
        deadline = time.monotonic() + 10
        while launches() == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)
        poke(region, layout.V1.recent_kernel.offset, -1, 4)
        time.sleep(0.1)
        stopped = launches()
        time.sleep(2.4)
        later = launches()
        poke(region, layout.V1.recent_kernel.offset, 0, 4)
        time.sleep(0.1)
        again = launches()
        process.answer()
    require(later - stopped <= 4, f"{later - stopped} launches while blocked")
    require(again > later, "no launch within 100 ms after the block")
    return f"{stopped} launches before, {later - stopped} while blocked, {again - later} in 100 ms after"


def live_limits(setup: Setup) -> str:
    """G19: a limit changed in the region holds at the next call."""
    region = setup.region()
    with setup.process(region, CUDA_DEVICE_MEMORY_LIMIT_0="4g", LIBCUDA_LOG_LEVEL="0") as process:
        process.must("start")
        codes = []
        for limit in (usage(region) + 32 * MIB, 4 * GIB):
            poke(region, layout.V1.limit.offset, limit, 8)
            codes.append(process.ask("alloc", kind="linear", size=64 * MIB)["code"])
        require(codes == [2, 0], f"results {codes}")
    return "lowered: refused; raised: granted"


def ends(setup: Setup) -> str:
    """G20: exit codes are the program's own, nothing is printed."""
    region = setup.region()
    process = setup.process(region)
    process.must("start")
    process.send("exit", status=7)
    require(process.child.wait(timeout=30) == 7, f"exit status {process.child.returncode}")
    errors = process.errors.read_text()
    require(errors == "", f"printed: {errors[:200]}")
    return "status 7, no output"


def other_containers(setup: Setup) -> str:
    """G21: a process outside of the container is not in its list."""
    region = setup.region()
    with setup.process(region) as inside, setup.process(None) as outside:
        own = inside.must("start")["pid"]
        foreign = outside.must("start", load=False)["pid"]
        listed = {int(name) for name in inside.must("processes")["processes"]}
        everyone = {int(name) for name in outside.must("processes")["processes"]}
    require(foreign not in listed and listed <= {own}, f"the container sees {sorted(listed)}")
    return f"inside {sorted(listed)}, outside {sorted(everyone)}"


def oversubscribed(setup: Setup) -> str:
    """G22: a limit above the card, filled beyond the card."""
    with setup.process(None) as process:
        process.must("start", load=False)
        physical = process.must("sizes")["total"]
    limits = {
        "CUDA_OVERSUBSCRIBE": "true",
        "CUDA_DEVICE_MEMORY_LIMIT_0": f"{physical * 12 // 10 // MIB}m",
        "LIBCUDA_LOG_LEVEL": "0",
    }
    with setup.process(setup.region(), **limits) as process:
        process.must("start")
        wanted = physical * 105 // 100 // GIB * GIB
        found = process.must("fill_checked", kind="linear", step=GIB, most=wanted)
        require(found["bytes"] == wanted, f"{found['bytes'] // GIB} of {wanted // GIB} GiB")
    return f"{wanted // GIB} GiB on a card of {physical // GIB} GiB"


CHECKS: list[tuple[str, str, Check, float]] = [
    ("G2", "look-up and dlsym", look_ups, 20),
    ("G3", "the card's size", sizes, 20),
    ("G4", "refusals at the limit", refusals, 60),
    ("G6", "size of the context", context_size, 20),
    ("G7", "race for the last GiB", race, 30),
    ("G12", "memory of a killed process", killed, 20),
    ("G13", "children", children, 20),
    ("G14", "memory shared by handle", shared_memory, 20),
    ("G16", "start-up of eight", start_up, 40),
    ("G17", "host PID", host_pid, 20),
    ("G18", "block by priority", priority, 20),
    ("G19", "limits changed at run time", live_limits, 20),
    ("G20", "exit", ends, 20),
    ("G21", "processes of others", other_containers, 20),
    ("G8", "core limit", core_limit, 125),
    ("G9", "core limit of graphs and cooperative kernels", core_limit_of_graphs, 60),
    ("G22", "oversubscription", oversubscribed, 40),
]
"""Name, title, function, and the seconds after which it is stopped."""
