"""The device config file: what it says now, and which of its changes a running scheduler can follow."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hami.kube.mounted import Content, problem_of, read_mounted
from hami.scheduler.edge.settings import SettingsError
from hami.vendors.config import MAX_CONFIG_BYTES, ConfigError, DeviceConfig, load_profiles, parse_config
from hami.vendors.types import VendorProfile

log = logging.getLogger(__name__)

Profiles = tuple[VendorProfile, ...]


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a file says."""

    config: DeviceConfig
    profiles: Profiles


class DeviceConfigFile:
    """One ``--device-config-file``, and what of it is in force. ``load`` and ``refreshed`` block."""

    def __init__(self, path: Path, *, enable_ascend: bool = False, enable_iluvatar: bool = False) -> None:
        self._path = path
        self._enable_ascend = enable_ascend
        self._enable_iluvatar = enable_iluvatar
        self._seen: Content = None
        self._in_force: Parsed | None = None
        self.differs = False  # the file says something else than what is in force

    def load(self) -> Profiles:
        """The vendors it describes, in force from now on; raises ``SettingsError``, which names the file."""
        self._seen = self._read()
        self._in_force = self._parse(self._seen)
        return self._in_force.profiles

    def refreshed(self) -> Parsed | None:
        """What the file says since it was changed, None as long as nothing has changed that has an effect.

        Raises ``SettingsError``, once for every content, for one that cannot be used, or not without a
        restart. What this returns is in force after ``accept``, and not returned again.
        """
        found = self._read()
        if found == self._seen:
            return None
        self._seen, self.differs = found, True
        parsed = self._parse(found)
        before = self._in_force
        if before is not None and parsed.config == before.config:
            self.differs = False
            return None
        problem = needs_restart(before.profiles if before is not None else (), parsed.profiles)
        if problem:
            raise SettingsError(f"--device-config-file {self._path}: {problem}")
        return parsed

    def accept(self, parsed: Parsed) -> None:
        """This is in force now."""
        self._in_force, self.differs = parsed, False

    def _read(self) -> Content:
        return read_mounted(self._path, MAX_CONFIG_BYTES)

    def _parse(self, content: Content) -> Parsed:
        problem = problem_of(self._path, content)
        if not isinstance(content, bytes):
            raise SettingsError(f"--device-config-file: {problem}")
        try:
            config = parse_config(content)
        except ConfigError as error:
            raise SettingsError(f"--device-config-file {self._path}: {error}") from error
        for warning in config.warnings:
            log.warning("config.warning", extra={"file": str(self._path), "text": warning})
        profiles = load_profiles(
            config, enable_ascend=self._enable_ascend, enable_iluvatar=self._enable_iluvatar
        )
        return Parsed(config, profiles)


def needs_restart(before: Sequence[VendorProfile], after: Sequence[VendorProfile]) -> str:
    """Why a running scheduler cannot go over to these profiles, else "".

    Vendors may be added, and whatever a vendor's numbers, policies, templates and switches are may change.
    What others hold on to must stay: kube-scheduler asks about the resource names it was started with, pods
    that wait were written with them, and pods that run are counted by their annotations.
    """
    now = {profile.common_word: _held_on_to(profile) for profile in after}
    problems = []
    for profile in before:
        word = profile.common_word
        if word not in now:
            problems.append(f"vendor {word} is gone")
            continue
        was, new = _held_on_to(profile), now[word]
        problems.extend(
            f"{what} of vendor {word} changes from {was[what] or 'none'} to {new[what] or 'none'}"
            for what in was
            if was[what] != new[what]
        )
    if not problems:
        return ""
    return f"{'; '.join(problems)}: this takes a restart of the scheduler pods, kube-scheduler included"


def _held_on_to(profile: VendorProfile) -> Mapping[str, str]:
    names, rules = profile.names, profile.rules
    return {
        "the count resource": names.count,
        "the memory resource": names.memory,
        "the cores resource": names.cores,
        "the set of other resources": " ".join(
            [*(f"{role}={name}" for role, name in sorted(names.extra.items())), *sorted(names.also_counted)]
        ),
        "the register annotation": f"{rules.register.kind} {rules.register.key}".strip(),
        "the handshake annotation": rules.handshake or "",
        "the allocation annotation": rules.allocated,
        "the annotation for its node plugin": rules.to_allocate or "",
        "the node lock": f"{rules.lock} per {rules.lock_covers}",
    }
