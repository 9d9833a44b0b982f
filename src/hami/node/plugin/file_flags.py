"""Sections of NVIDIA's own plugin in device-config.yaml: ``flags`` and ``imex`` count as flags of the
command line, the rest is refused or told (device-plugin.md §3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hami.node.config import MAX_CONFIG_BYTES, yaml_mapping
from hami.node.errors import SettingsError

_MAX_LIST: Final = 16


@dataclass(frozen=True, slots=True)
class FileFlags:
    """``values`` by the name of the command line's parameter; ``warnings`` about what has no effect."""

    values: Mapping[str, Any]
    warnings: tuple[str, ...]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a text")
    return value


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("true or false")
    return value


def _texts(value: object) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    if len(items) > _MAX_LIST:
        raise TypeError(f"at most {_MAX_LIST} texts")
    return tuple(_text(item) for item in items)


_Reader = Callable[[object], Any]
_FLAGS: Final[Mapping[str, tuple[str, _Reader]]] = {
    "migStrategy": ("mig_strategy", _text),
    "failOnInitError": ("fail_on_init_error", _switch),
    "nvidiaDriverRoot": ("nvidia_driver_root", _text),
    "nvidiaDevRoot": ("dev_root", _text),
    "devRoot": ("dev_root", _text),
    "driverRootCtrPath": ("driver_root_ctr_path", _text),
    "containerDriverRoot": ("driver_root_ctr_path", _text),
    "passDeviceSpecs": ("pass_device_specs", _switch),
    "deviceListStrategy": ("device_list_strategy", _texts),
    "deviceIDStrategy": ("device_id_strategy", _text),
    "deviceIdStrategy": ("device_id_strategy", _text),
    "gdrcopyEnabled": ("gdrcopy_enabled", _switch),
    "gdsEnabled": ("gds_enabled", _switch),
    "mofedEnabled": ("mofed_enabled", _switch),
    "kubeletSocket": ("kubelet_socket", _text),
    "cdiAnnotationPrefix": ("cdi_annotation_prefix", _text),
    "nvidiaCDIHookPath": ("nvidia_cdi_hook_path", _text),
    "nvidiaCdiHookPath": ("nvidia_cdi_hook_path", _text),
    "nvidiaCTKPath": ("nvidia_cdi_hook_path", _text),
    "nvidiaCtkPath": ("nvidia_cdi_hook_path", _text),
    "deviceDiscoveryStrategy": ("device_discovery_strategy", _text),
}
"""Keys of ``flags`` and, as NVIDIA's plugin has it, of ``flags.plugin``."""


def parse_file_flags(document: Mapping[str, Any]) -> FileFlags:
    """The sections of a device config. Raises :class:`SettingsError` for values of a wrong type and for what
    would be dangerous to ignore (MPS).
    """
    values: dict[str, Any] = {}
    warnings: list[str] = []
    flags = _section(document, "flags")
    _read_flags(flags, "flags", values, warnings)
    _read_flags(_section(flags, "plugin", "flags."), "flags.plugin", values, warnings)
    _read_imex(_section(document, "imex"), values, warnings)
    sharing = _section(document, "sharing")
    _refuse_mps(sharing, values)
    _judge_sharing(_section(sharing, "timeSlicing", "sharing."), warnings)
    return FileFlags(values, tuple(warnings))


def read_file_flags(path: Path) -> FileFlags:
    """The sections of the device config at ``path``. Raises :class:`SettingsError`."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror or error}") from error
    return parse_file_flags(yaml_mapping(content))


def merged_flags(
    given: Mapping[str, Any], is_default: Callable[[str], bool], found: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Parameters of the command line, those that were not given taken from the file; and the names of the
    latter.
    """
    taken = {name: value for name, value in found.items() if name in given and is_default(name)}
    return {**given, **taken}, tuple(sorted(taken))


def _read_flags(section: Mapping[str, Any], where: str, values: dict[str, Any], warnings: list[str]) -> None:
    for key, value in section.items():
        if value is None or (where == "flags" and key == "plugin"):
            continue
        known = _FLAGS.get(str(key))
        if known is None:
            warnings.append(f"{where}.{str(key)[:64]} has no effect")
            continue
        name, read = known
        values[name] = _read(read, value, f"{where}.{key}")


def _read_imex(section: Mapping[str, Any], values: dict[str, Any], warnings: list[str]) -> None:
    for key, value in section.items():
        if key == "channelIDs":
            if value not in ([], [0], None):
                raise SettingsError(
                    f"device config, imex.channelIDs: only [] and [0] are possible, not {str(value)[:64]}"
                )
            values["imex_channel_ids"] = "0" if value else ""
        elif key == "required":
            values["imex_required"] = _read(_switch, value, "imex.required")
        else:
            warnings.append(f"imex.{str(key)[:64]} has no effect")


def _refuse_mps(sharing: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    mps = _section(sharing, "mps", "sharing.")
    if not mps.get("resources"):
        return
    if values.get("mig_strategy") == "mixed":
        raise SettingsError("device config: sharing.mps cannot be used with migStrategy mixed")
    raise SettingsError(
        "device config: sharing.mps needs an MPS root, and this plugin has none; remove it: "
        "deviceSplitCount shares cards"
    )


def _judge_sharing(slicing: Mapping[str, Any], warnings: list[str]) -> None:
    where = "sharing.timeSlicing"
    by_default = _read(_switch, slicing.get("renameByDefault") or False, f"{where}.renameByDefault")
    if by_default:
        warnings.append(f"{where}.renameByDefault has no effect: resources keep their names")
    resources = slicing.get("resources")
    if resources is None:
        return
    if not isinstance(resources, list):
        raise SettingsError(f"device config, {where}.resources: expected a list")
    for position, item in enumerate(resources):
        place = f"{where}.resources[{position}]"
        if not isinstance(item, Mapping):
            raise SettingsError(f"device config, {place}: expected a mapping")
        name, rename = item.get("name"), item.get("rename")
        if rename and not (by_default and rename == f"{name}.shared"):
            warnings.append(f"{place}.rename has no effect")
        if item.get("devices") not in (None, "all"):
            warnings.append(f"{place}.devices has no effect: all devices of {name} are shared")


def _section(parent: Mapping[str, Any], key: str, before: str = "") -> Mapping[str, Any]:
    """A section, empty where it is absent or null."""
    found = parent.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise SettingsError(f"device config, {before}{key}: expected a mapping")
    return found


def _read(read: _Reader, value: object, where: str) -> Any:
    try:
        return read(value)
    except TypeError as error:
        raise SettingsError(f"device config, {where}: expected {error}, not {str(value)[:64]!r}") from error
