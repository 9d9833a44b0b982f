"""``hami region FILE``: shows a container's shared region, changes limits in it, repairs it, explains it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import click

from hami.cli.terminal import plain
from hami.node.errors import NodeError
from hami.node.region.edit import RegionFile
from hami.node.region.explain import explanation, lines
from hami.node.region.limits import LimitsFile, check_limits, limits_file_of, parse_size, what_applies
from hami.node.region.view import Object
from hami.protocol import region_layout as layout

_DIGITS = 20


def _pair(text: str) -> tuple[int, str]:
    device, found, value = text.partition("=")
    number = _number(device, layout.MAX_DEVICES - 1)
    if not found or number is None:
        raise click.BadParameter(
            f"{text[:80]}: expected DEVICE=VALUE, DEVICE from 0 to {layout.MAX_DEVICES - 1}"
        )
    return number, value


def _number(text: str, most: int) -> int | None:
    """A number of ASCII digits from 0 to ``most``, else None."""
    if not (text.isascii() and text.isdecimal()) or len(text) > _DIGITS or int(text) > most:
        return None
    return int(text)


def _size(text: str) -> int:
    amount = parse_size(text)
    if amount is None:
        raise click.BadParameter(f"{text[:80]}: expected a size such as 3000m or 2g, below 2^64 bytes")
    return amount


def _table(region: Object) -> Iterator[str]:
    block = "with" if region["extension"] else "without"
    yield (
        f"{region['version']}, {region['bytes']} bytes, {block} our block, "
        f"switch {region['utilization_switch']}, activity {region['recent_kernel']}, "
        f"priority {region['priority']}"
    )
    for device in region["devices"]:
        yield (
            f"device {device['index']} {device['uuid']}: limit {device['limit']} bytes, "
            f"cores {device['sm_limit']} %, used {device['used']}"
        )
    yield f"{'SLOT':>4} {'PID':>10} {'HOST PID':>10} {'STATUS':<10} {'LIVE':<5} BYTES BY DEVICE"
    for process in region["processes"]:
        used = " ".join(f"{d['index']}:{d['total']}" for d in process["devices"]) or "-"
        yield (
            f"{process['slot']:>4} {process['pid']:>10} {process['hostpid']:>10} {process['status']:<10} "
            f"{'yes' if process['live'] else 'no':<5} {used}"
        )


@click.command("region")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the same that vgpu-region prints.")
@click.option("--explain", is_flag=True, help="Say why programs of the container are slow or refused.")
@click.option(
    "--set-limit", multiple=True, metavar="DEVICE=SIZE", help="Memory limit, e.g. 0=3000m; 0=0: none."
)
@click.option("--set-sm-limit", multiple=True, metavar="DEVICE=PERCENT", help="Core limit, 1 to 100.")
@click.option("--suspend", is_flag=True, help="Launches of every process wait until --resume.")
@click.option("--resume", is_flag=True, help="Let suspended processes go on.")
@click.option("--repair", is_flag=True, help="Clear what killed processes left; live ones are not touched.")
def command(
    file: Path,
    as_json: bool,
    explain: bool,
    set_limit: tuple[str, ...],
    set_sm_limit: tuple[str, ...],
    suspend: bool,
    resume: bool,
    repair: bool,
) -> None:
    """Show the shared region FILE of a container, or change it.

    Reads the layouts of HAMi 2.3 and older (v0), 2.4 to 2.8 (v1.1) and 2.9 and later (v1.2). Where the
    container has a limits file, a program's limit is the smaller of the file's and the region's: a larger
    one is refused, for it would have no effect.
    """
    if suspend and resume:
        raise click.UsageError("--suspend and --resume exclude each other")
    memory = [(device, _size(value)) for device, value in map(_pair, set_limit)]
    cores = [(device, _number(value, 100) or 0) for device, value in map(_pair, set_sm_limit)]
    if not all(percent for _, percent in cores):
        raise click.BadParameter("a core limit is 1 to 100 percent")
    changes = bool(memory or cores or suspend or resume or repair)
    try:
        limits = limits_file_of(file)
        with RegionFile(file, write=changes) as region:
            if memory or cores:
                check_limits(region.view(), limits, memory, cores)
                region.set_limits(memory, cores)
            if suspend or resume:
                region.set_status(layout.SLOT_SUSPENDED if suspend else layout.SLOT_RUNNING)
            repaired = region.repair() if repair else None
            shown = region.view()
    except NodeError as error:
        text = str(error)
        raise click.ClickException(plain(text if str(file) in text else f"{file}: {text}")) from error
    said = [plain(line) for line in what_applies(shown, limits, memory, cores)]
    if repaired is not None:
        shown["repaired"] = repaired
        said.append(f"{repaired['slots_cleared']} slots and {repaired['flags_cleared']} flags cleared")
    _print(shown, said, limits, as_json=as_json, explain=explain)


def _print(
    shown: Object, said: list[str], limits: LimitsFile | None, *, as_json: bool, explain: bool
) -> None:
    now, named = time.time_ns(), os.environ if limits is None else limits.variables
    explained = explanation(shown, now, named, from_file=limits is not None) if explain else None
    if as_json:
        if explained is not None:
            shown["explain"] = explained
        click.echo(json.dumps(shown))
        return
    for row in (*said, *(_table(shown) if explained is None else lines(shown, explained))):
        click.echo(row)
