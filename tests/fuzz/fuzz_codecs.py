"""Fuzz target for everything that decodes foreign text or bytes: only the typed error of a codec may come
out, and what a codec has read it can write and read again.

    python tests/fuzz/fuzz_codecs.py --runs 20000 --seed 1           the same inputs every time
    python tests/fuzz/fuzz_codecs.py --atheris -max_total_time=300   coverage-guided, needs atheris
    python tests/fuzz/fuzz_codecs.py --replay FILE...                inputs that were found

The first byte of an input chooses the target, the rest is its text.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from hami.node.config import Overrides as GivenSettings
from hami.node.config import build_settings, parse_device_config, parse_node_overrides
from hami.node.errors import SettingsError
from hami.node.plugin.checkpoint import CheckpointError, decode_checkpoint
from hami.node.region.format import RegionError, choose_format
from hami.protocol.admission import decode_review
from hami.protocol.allocation import decode_allocation, encode_allocation, fit_slots, is_consumed, pop_first
from hami.protocol.durations import format_duration, parse_duration
from hami.protocol.errors import (
    AllocationError,
    DevicesMalformed,
    DurationError,
    LockFormatError,
    MigReservationError,
    ObjectError,
    PairScoreError,
    QuantityError,
    RegistrationError,
    TimestampError,
)
from hami.protocol.extender import decode_binding_args, decode_filter_args
from hami.protocol.inventory import decode_csv, decode_json, encode_csv, encode_json, read_json
from hami.protocol.lock import format_lock, parse_lock
from hami.protocol.mig import decode_mig_reservations, encode_mig_reservations
from hami.protocol.pair_scores import decode_pair_scores, encode_pair_scores
from hami.protocol.patch import json_patch
from hami.protocol.quantity import as_int64, canonical, value
from hami.protocol.timestamps import format_rfc3339, parse_handshake, parse_rfc3339
from hami.protocol.views import (
    Event,
    Lease,
    Node,
    Pod,
    ResourceQuota,
    decode,
)

LONGEST: Final = 4096
VIEWS: Final = (
    Event,
    Lease,
    Node,
    Pod,
    ResourceQuota,
)


def _says_why(reason: str) -> None:
    assert reason


def _allocation(text: str) -> None:
    try:
        found = decode_allocation(text)
    except AllocationError:
        return
    again = decode_allocation(encode_allocation(found))
    assert again == found
    if is_consumed(found):
        return
    position, slot, left = pop_first(found)
    assert slot == found[position]
    assert len(left) == len(found)
    assert fit_slots(left, len(left) + 1)[-1] == ()


def _registration(text: str) -> None:
    for read in (decode_json, decode_csv):
        try:
            found = read(text, "NVIDIA")
        except RegistrationError:
            continue
        ids = [device.id for device in found.devices]
        assert len(set(ids)) == len(ids)
        written = read_json(encode_json(found.devices))
        assert {device.id for device in written.devices} == set(ids)
        try:
            line = encode_csv(found.devices)
        except DevicesMalformed:
            continue
        assert sum(piece.count(",") == 8 for piece in line.split(":")) == len(ids)


def _quantity(text: str) -> None:
    try:
        written = canonical(text)
    except QuantityError:
        return
    number, whole = as_int64(text)
    assert not whole or number == value(text) or abs(number) >= 2**63 - 1
    # The API server cuts larger ones to int64 once they have 19 digits, so not always at the first reading.
    assert canonical(written) == written or abs(value(text)) == 2**63 - 1


def _lock(text: str) -> None:
    try:
        found = parse_lock(text)
    except LockFormatError:
        return
    if found.owner is not None and found.time >= 0:
        assert parse_lock(format_lock(found.owner, found.time)).owner == found.owner


def _times(text: str) -> None:
    try:
        seconds = parse_rfc3339(text)
    except TimestampError:
        pass
    else:
        try:
            assert abs(parse_rfc3339(format_rfc3339(seconds)) - seconds) <= 1
        except TimestampError:
            assert not -62135596800 <= seconds < 253402300800
    try:
        parse_handshake(text)
    except TimestampError:
        pass


def _duration(text: str) -> None:
    try:
        seconds = parse_duration(text)
    except DurationError:
        return
    try:
        written = format_duration(seconds)
    except DurationError:
        assert abs(seconds) >= 2**63 / 10**9
        return
    assert abs(parse_duration(written) - seconds) <= 1e-9 + abs(seconds) * 1e-15


def _mig(text: str) -> None:
    try:
        found = decode_mig_reservations(text)
    except MigReservationError:
        return
    assert decode_mig_reservations(encode_mig_reservations(found)) == found


def _pair_scores(text: str) -> None:
    try:
        found = decode_pair_scores(text)
    except PairScoreError:
        return
    assert decode_pair_scores(encode_pair_scores(found)) == found


def _views(text: str) -> None:
    for kind in VIEWS:
        for form in (text, text.encode("utf-8", "surrogateescape")):
            _view(form, kind)


def _view(form: str | bytes, kind: type[object]) -> None:
    try:
        found = decode(form, kind)
    except ObjectError as error:
        _says_why(str(error))
    else:
        if isinstance(found, Pod):
            assert len(found.slots) == len(found.spec.init_containers or ()) + len(
                found.spec.containers or ()
            )
            assert found.annotations.keys() <= (found.metadata.annotations or {}).keys()
        elif isinstance(found, Node):
            assert found.annotations.keys() <= (found.metadata.annotations or {}).keys()


def _bodies(text: str) -> None:
    body = text.encode("utf-8", "surrogateescape")
    for read in (decode_filter_args, decode_binding_args, decode_review):
        try:
            read(body)
        except ObjectError as error:
            _says_why(str(error))


def _patch(text: str) -> None:
    before, _, after = text.partition("\n")
    try:
        old, new = msgspec.json.decode(before), msgspec.json.decode(after)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return
    operations = json_patch(old, new)
    assert bool(operations) == (old != new) or operations
    assert {operation["op"] for operation in operations} <= {"add", "remove", "replace"}


def _node_files(text: str) -> None:
    data = text.encode("utf-8", "surrogateescape")
    try:
        config = parse_device_config(data)
        build_settings(config, (), GivenSettings())
    except SettingsError as error:
        _says_why(str(error))
    try:
        parse_node_overrides(data, "n1")
    except SettingsError as error:
        _says_why(str(error))
    try:
        found = decode_checkpoint(data)
        assert decode_checkpoint(found.encode()).entries == found.entries
    except CheckpointError as error:
        _says_why(str(error))
    try:
        choose_format(len(data) * 4096, data)
    except RegionError as error:
        _says_why(error.reason)


TARGETS: Final[tuple[Callable[[str], None], ...]] = (
    _allocation,
    _registration,
    _quantity,
    _lock,
    _times,
    _duration,
    _mig,
    _pair_scores,
    _views,
    _bodies,
    _patch,
    _node_files,
)

BYTE_TARGETS: Final = (_views, _bodies, _node_files)

_POD: Final = (
    '{"metadata":{"name":"p","namespace":"n","uid":"u","annotations":{"hami.io/vgpu-node":"n1"},'
    '"labels":null,"ownerReferences":[{"kind":"Job","controller":true}]},"spec":{"nodeName":"n1",'
    '"initContainers":[{"name":"i"}],"containers":[{"name":"c","env":[{"name":"A","value":"1"}],'
    '"resources":{"limits":{"nvidia.com/gpu":"1","cpu":0.5}}}]},"status":{"phase":"Pending"}}'
)
SEEDS: Final[tuple[tuple[Callable[[str], None], str], ...]] = (
    (_allocation, "GPU-1,NVIDIA,3000,30:GPU-2,NVIDIA,4000,60:;;GPU-3,NVIDIA-A100,-1,+7:;"),
    (_allocation, ";U1,NVIDIA,1000,0:;U1,NVIDIA,2147483648,0:"),
    (_registration, '[{"id":"GPU-1","index":1,"count":10,"devmem":40960,"type":"NVIDIA","health":true}]'),
    (_registration, '[{"ID":"a","numa":-1,"custominfo":{"x":1},"migProfiles":[{"name":"1g"}]},{"id":"a"}]'),
    (_registration, "GPU-1,10,40960,100,NVIDIA-A100,0,true:GPU-2,10,40960,100,NVIDIA,0,false,1,hami-core:"),
    *((_quantity, text) for text in ("1", "1.5Gi", "-100m", "12e3", "0.000000001", "9223372036854775808Ki")),
    *((_lock, text) for text in ("2026-08-21T10:00:00Z,team-a,p", "2026-08-21T10:00:00+02:00", "a,b", ",,")),
    *((_times, text) for text in ("2026-08-21T10:00:00.123Z", "2026-08-21 08:20:39", "0001-01-01T00:00:00Z")),
    *((_duration, text) for text in ("1h30m", "-1.5s", "250ms", "1us", "9223372036854775807ns", "5m0s")),
    (
        _mig,
        '[{"containerIndex":1,"deviceIndex":0,"gpuUUID":"g","profile":"1g.5gb","placement":{"start":0,"size":1},'
        '"migUUID":"m","gpuInstanceID":1,"computeInstanceID":0}]',
    ),
    (_pair_scores, '[{"uuid":"a","score":{"b":10,"c":-1}},{"uuid":"b","score":{}}]'),
    (_views, _POD),
    (_views, '{"type":"ADDED","object":' + _POD + "}"),
    (_views, '{"metadata":{"resourceVersion":"7","continue":"x"},"items":[' + _POD + "]}"),
    (_views, '{"metadata":{"name":"n"},"status":{"allocatable":{"cpu":"4"},"capacity":{}},"spec":{}}'),
    (_bodies, '{"Pod":' + _POD + ',"NodeNames":["n1","n2"],"Nodes":null}'),
    (_bodies, '{"podname":"p","PodNamespace":"n","PodUID":"u","Node":"n1"}'),
    (
        _bodies,
        '{"apiVersion":"admission.k8s.io/v1","request":{"uid":"r","operation":"CREATE","object":'
        + _POD
        + "}}",
    ),
    (_patch, '{"a":[1,2,{"b":null}],"c/d":true}\n{"a":[1,{"b":1}],"e":"f"}'),
    (_node_files, "version: v1\nnvidia:\n  deviceSplitCount: 4\n  deviceMemoryScaling: 1.5\n"),
    (_node_files, '{"nodeconfig":[{"name":"n1","devicesplitcount":4,"filterdevices":{"uuid":["a"]}}]}'),
    (
        _node_files,
        '{"version":1,"entries":[{"pod_uid":"u","namespace":"n","pod":"p","container":"c",'
        '"devices":[{"uuid":"g","memory_mib":1,"cores_percent":2}],"limits":{"A":"1"}}]}',
    ),
)


def seed_inputs() -> list[bytes]:
    """The seeds as inputs."""
    return [bytes([TARGETS.index(target)]) + text.encode() for target, text in SEEDS]


def run_one(data: bytes) -> None:
    """One input. Whatever it raises is a finding.

    Annotation values come out of JSON and never hold half a character; bodies and files may.
    """
    if data:
        target = TARGETS[data[0] % len(TARGETS)]
        body = data[1 : LONGEST + 1]
        target(body.decode("utf-8", "surrogateescape" if target in BYTE_TARGETS else "replace"))


_PIECES: Final = (
    *(bytes([byte]) for byte in b'\x00\x7f\x80\xff\n"\\[]{}:,;-+.0e'),
    b"null",
    b"true",
    b"1e999",
    b"NaN",
    b"-9223372036854775809",
    b"\\ud800",
    "é".encode(),
    b"[" * 200,
    b'{"a":' * 200,
)


def mutate(data: bytes, choose: random.Random) -> bytes:
    """``data`` with up to eight random changes."""
    changed = bytearray(data)
    for _ in range(choose.randint(1, 8)):
        place = choose.randint(0, len(changed))
        match choose.randint(0, 4):
            case 0:
                changed[place : place + 1] = bytes([choose.randint(0, 255)])
            case 1:
                changed[place:place] = choose.choice(_PIECES)
            case 2:
                del changed[place : place + choose.randint(1, 8)]
            case 3:
                start = choose.randint(0, len(changed))
                changed[place:place] = changed[start : start + choose.randint(1, 32)]
            case _:
                changed[place : place + choose.randint(1, 4)] = choose.choice(_PIECES)
    return bytes(changed[: LONGEST + 1])


def run_seeded(runs: int, seed: int) -> None:
    """The seeds, then ``runs`` inputs made from them; an input that raises is named in a note."""
    choose = random.Random(seed)
    seeds = seed_inputs()
    for number in range(-len(seeds), runs):
        data = seeds[number] if number < 0 else mutate(choose.choice(seeds), choose)
        try:
            run_one(data)
        except BaseException as error:
            error.add_note(f"input {number} of seed {seed}: {data!r}")
            raise


def run_atheris(arguments: list[str]) -> None:
    """Coverage-guided, until a finding or the limits in ``arguments``."""
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], *arguments], run_one)
    atheris.Fuzz()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--atheris", action="store_true", help="pass the other arguments to atheris")
    parser.add_argument("--replay", nargs="+", type=Path, default=(), metavar="FILE")
    options, rest = parser.parse_known_args()
    if options.atheris:
        run_atheris(rest)
    elif rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    elif options.replay:
        for path in options.replay:
            run_one(path.read_bytes())
    else:
        run_seeded(options.runs, options.seed)


if __name__ == "__main__":
    main()
