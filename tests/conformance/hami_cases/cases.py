"""Reading recorded cases: files, times, and the device config each case starts from."""

from __future__ import annotations

import copy
import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hami.protocol import timestamps

from .marks import missing_marks

NOW = 1_790_000_000
"""The moment of every case, Unix seconds (2026-09-21T14:13:20Z): after every date written in the cases."""

GROUPS = ("codec", "request", "webhook", "register", "filter", "accounting", "allocate", "bind")

OWN_FOLDER = Path(__file__).resolve().parent.parent / "cases"
"""The copy of the cases that comes with the tests."""

_CONFIG_FILE = "device-config-default.json"
_TIME = re.compile(r"@now([+-][0-9]+)?\|(rfc3339|hs|hsdot|unix)@")
_FORMS: Mapping[str, Callable[[float], str]] = {
    "rfc3339": timestamps.format_rfc3339,
    "hs": timestamps.format_handshake,
    "hsdot": timestamps.format_handshake_dotted,
    "unix": lambda now: str(int(now)),
}


@dataclass(frozen=True)
class Case:
    """One recorded case, times filled in. ``device_config`` is the whole config, differences applied."""

    group: str
    id: str
    what: str
    input: Mapping[str, Any]
    answers: tuple[Any, ...]
    ours: tuple[str, ...]
    maybe_ours: tuple[str, ...]
    config: Mapping[str, Any]
    device_config: Mapping[str, Any]

    @property
    def vendor(self) -> str:
        """The vendor word in the id (``nvidia``, ``Ascend910B4-1``, ``multi``, ``codec``)."""
        return self.id.removeprefix(f"{self.group}-").rpartition("-")[0]


def load(folder: Path) -> Iterator[Case]:
    """Every case of a folder, in the order of :data:`GROUPS`; both ``group/*.json[.gz]`` and
    ``group.json.gz``.

    Raises ``FileNotFoundError`` when the folder holds no case file at all.
    """
    default = _default_config(folder)
    files = [(group, path) for group in GROUPS for path in _files(folder, group)]
    if not files:
        raise FileNotFoundError(f"{folder} holds no recorded cases (looked for {', '.join(GROUPS)})")
    for group, path in files:
        for plain in _read(path):
            yield _case(group, plain, default)


def _files(folder: Path, group: str) -> list[Path]:
    inside = (folder / group).glob("*.json*") if (folder / group).is_dir() else ()
    packed = (folder / f"{group}.json", folder / f"{group}.json.gz")
    return sorted([*inside, *(path for path in packed if path.is_file())])


def _default_config(folder: Path) -> Mapping[str, Any]:
    path = folder / _CONFIG_FILE
    config: Mapping[str, Any] = json.loads(
        (path if path.is_file() else OWN_FOLDER / _CONFIG_FILE).read_text()
    )
    return config


def _read(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    cases: list[dict[str, Any]] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return cases


def _case(group: str, plain: dict[str, Any], default: Mapping[str, Any]) -> Case:
    config = plain.get("config") or {}
    device_config = configured(default, config.get("set") or {})
    answers = plain["expect_any"] if "expect_any" in plain else [plain["expect"]]
    return Case(
        group=group,
        id=plain["id"],
        what=plain.get("what", ""),
        input=with_times(plain["input"]),
        answers=tuple(answers),
        ours=tuple(plain.get("ours") or ()),
        maybe_ours=(*(plain.get("ours?") or ()), *missing_marks(plain, device_config)),
        config=config,
        device_config=device_config,
    )


def with_times(value: Any) -> Any:
    """``value`` with every ``@now-120|rfc3339@`` replaced by that moment in that form."""
    if isinstance(value, str):
        return _TIME.sub(lambda match: _FORMS[match[2]](NOW + int(match[1] or 0)), value)
    if isinstance(value, list):
        return [with_times(item) for item in value]
    if isinstance(value, dict):
        return {key: with_times(item) for key, item in value.items()}
    return value


def configured(default: Mapping[str, Any], changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The device config with changes applied: ``/``-separated path -> value, ``__delete__`` removes a key."""
    config = copy.deepcopy(dict(default))
    for path, value in changes.items():
        *parents, last = path.split("/")
        target: Any = config
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target.setdefault(part, {})
        key: Any = int(last) if isinstance(target, list) else last
        if value == "__delete__":
            del target[key]
        elif isinstance(target, list) and key == len(target):
            target.append(value)
        else:
            target[key] = value
    return config
