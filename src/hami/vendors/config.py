"""The device config file: YAML text or a decoded object in, typed config and vendor profiles out.

Unknown keys are ignored, unknown sections too, with a warning. Every problem of a file is reported in one
error that names the key path of each: a half-understood device config would make pods run without limits.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cache
from typing import Any, Final

import yaml

from hami.protocol.errors import HamiError
from hami.vendors import nvidia
from hami.vendors.schema import BUILTIN, DeviceConfig, MigAllowlistEntry
from hami.vendors.types import VendorProfile

__all__ = [
    "BUILTIN",
    "ConfigError",
    "DeviceConfig",
    "built_words",
    "decode_config",
    "load_profiles",
    "parse_config",
]

MAX_CONFIG_BYTES: Final = 1024 * 1024
CORE_POLICIES: Final = ("", "default", "force", "disable")


class ConfigError(HamiError):
    """The device config cannot be used; `problems` are complete sentences with key paths."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("device config: " + "; ".join(problems))
        self.problems = tuple(problems)


def parse_config(text: str | bytes) -> DeviceConfig:
    """Typed config of a YAML text. Raises `ConfigError` with every problem found."""
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError([f"the file has {len(text)} bytes, over the limit of {MAX_CONFIG_BYTES}"])
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError([f"not YAML: {' '.join(str(error).split())}"]) from error
    return decode_config(document)


def decode_config(document: object) -> DeviceConfig:
    """Typed config of a decoded file. Raises `ConfigError` with every problem found."""
    if document is None:
        document = {}
    if not isinstance(document, Mapping):
        raise ConfigError([f"the file must be a mapping of sections, not {_kind(document)}"])
    problems: list[str] = []
    warnings: list[str] = []
    sections = dict(document)
    known = {item.metadata.get("key", item.name) for item in dataclasses.fields(DeviceConfig)}
    warnings.extend(f"unknown section {name!r} is ignored" for name in sections if name not in known)
    if isinstance(sections.get("vnpus"), list):  # the form of releases before 2.10
        sections["vnpus"] = {"configs": sections["vnpus"]}
    section = sections.get("nvidia")
    if isinstance(section, Mapping) and "knownMigGeometries" in section:
        warnings.append("nvidia.knownMigGeometries is no longer used and ignored; see migProfileAllowlist")
    reader = _Reader(problems)
    config: DeviceConfig = reader.read_struct(DeviceConfig, sections, "")
    problems.extend(_rule_problems(config))
    if not problems and config == DeviceConfig():
        problems.append("all configurations are empty")
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(config, warnings=tuple(warnings))


def load_profiles(
    config: DeviceConfig, *, enable_ascend: bool = False, enable_iluvatar: bool = False
) -> tuple[VendorProfile, ...]:
    """The profiles of every configured vendor that this build has a module for, in vendor order (README 2.1).

    A vendor without a count resource name never matches, so it gets no profile. The two flags admit the
    vendors of `vnpus` and `iluvatars`.
    """
    del enable_ascend, enable_iluvatar  # no module for them is in `_BUILDERS`
    profiles: list[VendorProfile] = []
    for build in _BUILDERS.values():
        profile = build(config)
        if profile is not None:
            profiles.append(profile)
    return tuple(profiles)


def built_words() -> frozenset[str]:
    """Common words of the vendors this build has a module for."""
    return frozenset(_BUILDERS)


def _build_nvidia(config: DeviceConfig) -> VendorProfile | None:
    return nvidia.build(config.nvidia) if config.nvidia.resource_count_name else None


_BUILDERS: Final[Mapping[str, Callable[[DeviceConfig], VendorProfile | None]]] = {"NVIDIA": _build_nvidia}


class _Reader:
    """Reads dataclasses out of decoded YAML and collects what does not fit."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems

    def read_struct(self, kind: type[Any], value: object, path: str) -> Any:
        if value is None:
            return kind()
        if not isinstance(value, Mapping):
            return self._wrong(path, "a mapping", value, kind())
        hints = _hints(typing.cast(Hashable, kind))
        found: dict[str, Any] = {}
        for item in dataclasses.fields(kind):
            name = item.metadata.get("key", item.name)
            if name is not None and value.get(name) is not None:
                where = f"{path}.{name}" if path else name
                found[item.name] = self._read(hints[item.name], value[name], where, item)
        return kind(**found)

    def _read(self, hint: Any, value: object, path: str, item: Any) -> Any:
        if dataclasses.is_dataclass(hint):
            return self.read_struct(typing.cast(type, hint), value, path)
        if typing.get_origin(hint) is tuple:
            if not isinstance(value, list):
                return self._wrong(path, "a list", value, ())
            inner = typing.get_args(hint)[0]
            return tuple(self._read(inner, entry, f"{path}[{n}]", item) for n, entry in enumerate(value))
        return self._read_scalar(hint, value, path, item)

    def _read_scalar(self, hint: Any, value: object, path: str, item: Any) -> Any:
        if hint is str:
            if item.metadata["key"] == "libCudaLogLevel" and type(value) is int:
                return str(value)
            return value if isinstance(value, str) else self._wrong(path, "text", value, "")
        if hint is bool:
            return value if isinstance(value, bool) else self._wrong(path, "true or false", value, False)
        if hint is float:
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                return self._wrong(path, "a number", value, 0.0)
            return (
                float(value) if value >= 0 else self._say(f"{path} is {value}, it must not be negative", 0.0)
            )
        if isinstance(value, bool) or not isinstance(value, int):
            return self._wrong(path, "an integer", value, 0)
        if value < 0:
            return self._say(f"{path} is {value}, it must not be negative", 0)
        top = 2 ** (item.metadata["bits"] - 1) - 1
        return value if value <= top else self._say(f"{path} is {value}, more than {top}", 0)

    def _wrong(self, path: str, wanted: str, value: object, default: Any) -> Any:
        return self._say(f"{path} must be {wanted}, not {_kind(value)}", default)

    def _say(self, problem: str, default: Any) -> Any:
        self._problems.append(problem)
        return default


@cache
def _hints(kind: Hashable) -> Mapping[str, Any]:
    return types.MappingProxyType(typing.get_type_hints(kind))


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list) else repr(value)[:60]


# --- rules across keys ----------------------------------------------------------------------------------


def _rule_problems(config: DeviceConfig) -> Iterator[str]:
    if config.nvidia.core_policy not in CORE_POLICIES:
        yield f"nvidia.gpuCorePolicy is {config.nvidia.core_policy!r}, it must be default, force or disable"
    for position, entry in enumerate(config.nvidia.mig_allowlist):
        yield from _allowlist_problems(entry, f"nvidia.migProfileAllowlist[{position}]")
    if config.vnpus.memory_scope not in ("perCard", "total"):
        yield f"vnpus.hamiCoreMemoryScope is {config.vnpus.memory_scope!r}, it must be perCard or total"
    yield from _collisions(config)


def _allowlist_problems(entry: MigAllowlistEntry, path: str) -> Iterator[str]:
    if not entry.models:
        yield f"{path}.models needs at least one model"
    if not entry.profiles:
        yield f"{path}.profiles needs at least one profile"
    for position, profile in enumerate(entry.profiles):
        slices, dot, memory = profile.partition(".")
        if not (dot and slices.endswith("g") and slices[:-1].isascii() and slices[:-1].isdigit()):
            yield f"{path}.profiles[{position}] is {profile!r}, it must look like 1g.10gb"
        elif not memory or "+" in memory or "." in memory:
            yield f"{path}.profiles[{position}] is {profile!r}: +me and .gfx cannot be selected"


def _collisions(config: DeviceConfig) -> Iterator[str]:
    """Two adapters must not share a common word (allocated keys follow from it) or a count resource."""
    words: dict[str, str] = {}
    names: dict[str, str] = {}
    for path, word, name in _adapters(config):
        for seen, value, what in ((words, word, "common word"), (names, name, "count resource")):
            if value and seen.setdefault(value, path) != path:
                yield f"{what} {value!r} is used by both {seen[value]} and {path}"


def _adapters(config: DeviceConfig) -> Iterator[tuple[str, str, str]]:
    """(path, common word, count resource) of every adapter the file describes."""
    yield "nvidia", "NVIDIA", config.nvidia.resource_count_name
    yield "cambricon", "MLU", config.cambricon.resource_count_name
    yield "hygon", "DCU", config.hygon.resource_count_name
    yield "enflame (whole card)", "GCU", config.enflame.resource_gcu_name
    yield "enflame (DRS)", "Enflame", config.enflame.drs_name
    yield "mthreads", "Mthreads", config.mthreads.resource_count_name
    yield "metax (whole card)", "Metax-GPU", config.metax.resource_count_name
    yield "metax (share)", "Metax-SGPU", config.metax.resource_vcount_name
    yield "kunlun (whole card)", "kunlun", config.kunlun.resource_count_name
    yield "kunlun (share)", "XPU", config.kunlun.resource_vcount_name
    yield "awsneuron", "AWSNeuron", config.awsneuron.resource_count_name
    yield "amd", "AMD", config.amd.resource_count_name
    yield "vastai", "Vastai", config.vastai.resource_count_name
    yield "biren", "Biren", config.biren.resource_count_name
    for position, chip in enumerate(config.vnpus.chips):
        yield f"vnpus.configs[{position}]", chip.common_word, chip.resource_count_name
    for position, item in enumerate(config.iluvatars):
        yield f"iluvatars[{position}]", item.common_word, item.resource_count_name
