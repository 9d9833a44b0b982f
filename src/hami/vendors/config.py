"""The device config file: YAML text or a decoded object in, typed config and vendor profiles out.

Unknown keys are ignored, unknown sections too, with a warning. Every problem of a file is reported in one
error that names the key path of each: a half-understood device config would make pods run without limits.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Final

import yaml

from hami.protocol.errors import HamiError
from hami.protocol.plain import problem_of
from hami.vendors.config_rules import rule_problems, rule_warnings
from hami.vendors.schema import BUILTIN, DeviceConfig
from hami.vendors.types import VendorProfile

__all__ = [
    "BUILTIN",
    "ConfigError",
    "DeviceConfig",
    "decode_config",
    "load_profiles",
    "parse_config",
]

MAX_CONFIG_BYTES: Final = 1024 * 1024


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
    problem = problem_of(document)
    if problem:
        raise ConfigError([f"the file {problem}"])
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
    problems.extend(rule_problems(config))
    if not problems and config == DeviceConfig():
        problems.append("all configurations are empty")
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(config, warnings=(*warnings, *rule_warnings(config)))


def load_profiles(
    config: DeviceConfig, *, enable_ascend: bool = False, enable_iluvatar: bool = False
) -> tuple[VendorProfile, ...]:
    """The profiles of every configured vendor, in vendor order (README 2.1), described ones last.

    A vendor without a count resource name never matches, so it gets no profile. The two flags admit the
    vendors of `vnpus` and `iluvatars`.
    """
    admitted = {"vnpus": enable_ascend, "iluvatars": enable_iluvatar}
    return tuple(
        profile
        for section, build in _builders().items()
        if admitted.get(section, True)
        for profile in build(config)
        if profile.names.count
    )


_MODULES: Final[Mapping[str, str]] = types.MappingProxyType(
    {
        "nvidia": "nvidia",
        "cambricon": "cambricon",
        "hygon": "hygon",
        "enflame": "enflame",
        "mthreads": "mthreads",
        "metax": "metax",
        "kunlun": "kunlun",
        "awsneuron": "awsneuron",
        "amd": "amd",
        "vastai": "vastai",
        "biren": "biren",
        "vnpus": "ascend",
        "iluvatars": "iluvatar",
        "profiles": "described",
    }
)
"""Section -> module of this package, in vendor order; each module has a `build` as in `_builders`."""


@cache
def _builders() -> Mapping[str, Callable[[DeviceConfig], tuple[VendorProfile, ...]]]:
    """Per section what makes its profiles, in vendor order; modules are read when the first one is asked."""
    modules = {section: import_module(f"{__package__}.{name}") for section, name in _MODULES.items()}
    return types.MappingProxyType({section: module.build for section, module in modules.items()})


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
        if hint in (bool, bool | None):
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
