"""Why a program is slow or refused, from the region alone. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Final

from hami.node.region.view import Object
from hami.protocol import region_layout as layout

MINUTE_NS: Final = 60_000_000_000
STALE_HEARTBEAT_S: Final = 30
_SIGN: Final = 1 << 31  # of an int, in which the C tool reads an error number too
_PLUGIN_VARIABLE: Final = {"memory": "CUDA_DEVICE_MEMORY_LIMIT", "core": "CUDA_DEVICE_SM_LIMIT"}


def explanation(region: Object, now_ns: int, environment: Mapping[str, str], from_file: bool) -> Object:
    """What ``--explain`` adds to the object of a region.

    ``environment`` holds the variables of the limits file if ``from_file``, else those of the environment.
    """
    source = "limits file" if from_file else "environment"
    return {
        "heartbeat_age_s": now_ns // 1_000_000_000 - region["heartbeat"] if region["heartbeat"] else None,
        "devices": [_device(device, region, now_ns, environment, source) for device in region["devices"]],
    }


def _device(device: Object, region: Object, now_ns: int, named: Mapping[str, str], source: str) -> Object:
    events = [event for event in region["events"] if event["device"] == device["index"]]
    last_minute = [event for event in events if 0 <= now_ns - event["time"] <= MINUTE_NS]
    throttled = sum(event["value"] for event in last_minute if event["type"] == "throttled")
    refusals = [event for event in events if event["type"] == "refusal"]
    return {
        "index": device["index"],
        "memory_limit": device.get("memory_limit", device["limit"]),
        "memory_limit_from": _origin("memory", device, named, source),
        "core_limit": device.get("core_limit", 0),
        "core_limit_from": _origin("core", device, named, source),
        "throttled_of_last_minute_percent": min(100, throttled * 100 // MINUTE_NS),
        "last_refusal": {key: refusals[-1][key] for key in ("time", "value", "pid")} if refusals else None,
    }


def _origin(kind: str, device: Object, named: Mapping[str, str], source: str) -> str:
    """Where the limit in force comes from: it is the smaller of the limits file and the region."""
    region = device["limit" if kind == "memory" else "sm_limit"]
    if device.get(f"{kind}_limit", region) != region:
        return source
    base = _PLUGIN_VARIABLE[kind]
    return source if f"{base}_{device['index']}" in named or base in named else "region"


def lines(region: Object, explained: Object) -> Iterator[str]:
    """The explanation as text."""
    if not region["extension"]:
        yield "This region has no block of our library: only its limits and sums can be told."
    yield _monitor_line(region, explained)
    for device, about in zip(region["devices"], explained["devices"], strict=True):
        yield from _device_lines(device, about)
    for process in region["processes"]:
        yield _process_line(process)


def _monitor_line(region: Object, explained: Object) -> str:
    age = explained["heartbeat_age_s"]
    if age is None:
        text = "no monitor of ours has written here"
    else:
        text = f"the monitor's heartbeat is {age} s old"
        if age > STALE_HEARTBEAT_S:
            text += ", its blocks are not obeyed"
    blocked = (
        ", launches are BLOCKED by a container of higher priority" if region["recent_kernel"] < 0 else ""
    )
    return f"monitor: {text}{blocked}; priority {region['priority']} (0 is high)"


def _device_lines(device: Object, about: Object) -> Iterator[str]:
    limit, core = about["memory_limit"], about["core_limit"]
    memory = f"{size_text(limit)} ({about['memory_limit_from']})" if limit else "no limit"
    yield (
        f"device {device['index']} {device['uuid']}: memory limit {memory}, used {size_text(device['used'])}"
        + (f", peak {size_text(device['peak'])}" if "peak" in device else "")
        + (f", uncounted {size_text(device['residual'])}" if device.get("residual") else "")
        + (f", managed {size_text(device['oversubscribed'])}" if device.get("oversubscribed") else "")
    )
    cores = "none"
    if core:
        cores = f"{core} % ({about['core_limit_from']})"
    elif "core_limit" in device and 0 < device["sm_limit"] < layout.SM_LIMIT_NONE:
        cores = f"{device['sm_limit']} %, not in force"
    yield (
        f"  core limit {cores}, "
        f"throttled {device.get('throttled', 0) / 1e9:.1f} s in all, "
        f"{about['throttled_of_last_minute_percent']} % of the last minute"
    )
    last = about["last_refusal"]
    yield f"  refused {device.get('refusals', 0)} times" + (
        f", last {size_text(last['value'])} to process {last['pid']} at {_time(last['time'])}" if last else ""
    )


def _process_line(process: Object) -> str:
    used = (
        ", ".join(f"device {d['index']} {size_text(d['total'])}" for d in process["devices"]) or "no memory"
    )
    state = [*process.get("state", ())]
    if process["status"] == "suspended":
        state.append("suspended")
    if not process["live"]:
        state.append("dead")
    path = process.get("host_pid_path")
    host = f"host PID {process['hostpid'] or 'unknown'}" + (f" ({path}{_broker(process)})" if path else "")
    return f"process {process['pid']}: {used}; {host}; {', '.join(state) or 'not blocked'}"


def _broker(process: Object) -> str:
    error = process["broker_error"]
    return f", broker: {os.strerror((error + _SIGN) % (2 * _SIGN) - _SIGN)}" if error else ""


def size_text(count: int) -> str:
    """Bytes as whole MiB where they are, else as bytes."""
    return f"{count >> 20} MiB" if count % (1 << 20) == 0 else f"{count} bytes"


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
