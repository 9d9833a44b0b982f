"""Rules of the device config across keys: what makes a file unusable although every value has the right type.

Each problem is a complete sentence with the key path and what was expected.
"""

import re
from collections.abc import Iterator
from typing import Final

from hami.protocol import keys
from hami.protocol.mig import profile_problem
from hami.vendors.schema import (
    AscendChip,
    DeviceConfig,
    IluvatarConfig,
    MigAllowlistEntry,
    MthreadsConfig,
    ProfileConfig,
)

CORE_POLICIES: Final = ("", "default", "force", "disable")
MEMORY_SCOPES: Final = ("perCard", "total")
REGISTER_FORMATS: Final = ("json", "csv", "capacity")
IDX_SCOPES: Final = ("concat", "last")
DISCOVERIES: Final = ("auto", "annotation", "capacity")
_MAX_KEY_NAME: Final = 63  # characters of an annotation key behind its "/"
_KEY_WORD: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


def rule_problems(config: DeviceConfig) -> Iterator[str]:
    """Problems of the whole file; none for a usable one."""
    if config.nvidia.core_policy not in CORE_POLICIES:
        yield f"nvidia.gpuCorePolicy is {config.nvidia.core_policy!r}, it must be default, force or disable"
    for position, entry in enumerate(config.nvidia.mig_allowlist):
        yield from _allowlist_problems(entry, f"nvidia.migProfileAllowlist[{position}]")
    if config.vnpus.memory_scope not in MEMORY_SCOPES:
        yield f"vnpus.hamiCoreMemoryScope is {config.vnpus.memory_scope!r}, it must be perCard or total"
    for position, chip in enumerate(config.vnpus.chips):
        yield from _chip_problems(chip, f"vnpus.configs[{position}]")
    if config.kunlun.multi_container_idx not in IDX_SCOPES:
        yield f"kunlun.multiContainerIdx is {config.kunlun.multi_container_idx!r}, it must be concat or last"
    for position, item in enumerate(config.iluvatars):
        yield from _iluvatar_problems(item, f"iluvatars[{position}]")
    yield from _mthreads_problems(config.mthreads)
    for position, profile in enumerate(config.profiles):
        yield from _profile_problems(profile, f"profiles[{position}]")
    yield from _collisions(config)


def rule_warnings(config: DeviceConfig) -> Iterator[str]:
    """What is probably a mistake in a usable file."""
    for position, item in enumerate(config.iluvatars):
        if item.resource_memory_name.endswith(".vCore") or item.resource_core_name.endswith(".vMem"):
            yield (
                f"iluvatars[{position}]: resourceMemoryName {item.resource_memory_name!r} and "
                f"resourceCoreName {item.resource_core_name!r} seem to be exchanged"
            )


def _iluvatar_problems(item: IluvatarConfig, path: str) -> Iterator[str]:
    if item.discovery not in DISCOVERIES:
        yield f"{path}.discovery is {item.discovery!r}, it must be auto, annotation or capacity"
    word = item.common_word
    if not item.resource_count_name:
        return
    chip = keys.iluvatar_keys(word)
    longest = max(len(key.partition("/")[2]) for key in (chip.to_allocate, chip.handshake, chip.register))
    if _KEY_WORD.fullmatch(word) is None or longest > _MAX_KEY_NAME:
        yield (
            f"{path}.commonWord is {word!r}, it must be letters, digits, '-', '_' and '.', with a letter or "
            f"digit at both ends, short enough for annotation keys such as {chip.to_allocate}"
        )


def _mthreads_problems(config: MthreadsConfig) -> Iterator[str]:
    for name, units in (
        ("memoryUnitsPerDevice", config.memory_units),
        ("coreUnitsPerDevice", config.core_units),
    ):
        if units < 1:
            yield f"mthreads.{name} is {units}, it must be at least 1"
    for position, units in enumerate(config.legal_slices):
        if units < 1:
            yield f"mthreads.legalMemorySlices[{position}] is {units}, it must be at least 1"


def _allowlist_problems(entry: MigAllowlistEntry, path: str) -> Iterator[str]:
    if not entry.models:
        yield f"{path}.models needs at least one model"
    if not entry.profiles:
        yield f"{path}.profiles needs at least one profile"
    for position, profile in enumerate(entry.profiles):
        problem = profile_problem(profile)
        if problem:
            yield f"{path}.profiles[{position}] is {profile!r}, {problem}"


def _chip_problems(chip: AscendChip, path: str) -> Iterator[str]:
    if chip.resource_count_name and not chip.common_word:
        yield f"{path}.commonWord is empty, it must name the chip"
    if chip.memory_capacity < chip.memory_allocatable:
        yield (
            f"{path}.memoryCapacity is {chip.memory_capacity}, it must be at least memoryAllocatable "
            f"({chip.memory_allocatable})"
        )
    for position, template in enumerate(chip.templates):
        where = f"{path}.templates[{position}]"
        if not template.name:
            yield f"{where}.name is empty, it must name a template of the chip"
        if not 0 < template.memory < chip.memory_allocatable:
            yield (
                f"{where}.memory is {template.memory}, it must be at least 1 and less than "
                f"memoryAllocatable ({chip.memory_allocatable})"
            )
    smallest = min((template.memory for template in chip.templates), default=None)
    if smallest is not None and chip.memory_factor > smallest:
        yield (
            f"{path}.memoryFactor is {chip.memory_factor}, it must not be more than the smallest template "
            f"({smallest} MiB)"
        )


def _profile_problems(profile: ProfileConfig, path: str) -> Iterator[str]:
    word = profile.common_word
    if not word or any(sign in word for sign in ",:; "):
        yield f"{path}.commonWord is {word!r}, it must be a word without comma, colon, semicolon and space"
    if not profile.resource_count_name:
        yield f"{path}.resourceCountName is empty, it must name the resource that counts cards"
    if profile.register_format not in REGISTER_FORMATS:
        yield f"{path}.registerFormat is {profile.register_format!r}, it must be json, csv or capacity"
    if profile.register_format == "capacity" and not profile.cards.slots:
        yield f"{path}.cards.slots is 0, it must be at least 1"


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
    for position, profile in enumerate(config.profiles):
        yield f"profiles[{position}]", profile.common_word, profile.resource_count_name
