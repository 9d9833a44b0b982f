"""Reads the configuration files; bad ones never change what is in force (device-plugin.md §3.2)."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

from hami.kube.mounted import Content, problem_of, read_mounted
from hami.node.cluster import Cluster
from hami.node.config import (
    MAX_CONFIG_BYTES,
    NodeOverride,
    Overrides,
    Settings,
    build_settings,
    foreign_sections,
    parse_device_config,
    parse_node_overrides,
    parse_sharing,
)
from hami.node.errors import SettingsError

_HASH_DIGITS: Final = 16

log = logging.getLogger(__name__)


class SettingsLoader:
    """Builds the settings at every start of the plugin, and again when a file has changed."""

    def __init__(self, device_config: Path, node_config: Path, given: Overrides, cluster: Cluster) -> None:
        self._device_config = device_config
        self._node_config = node_config
        self._given = given
        self._cluster = cluster
        self._last: Settings | None = None
        self._seen: tuple[Content, Content] = (None, None)
        self._applied = ""

    @property
    def applied(self) -> str:
        """First 16 hex digits of the SHA-256 of the config.json in force, empty where none is."""
        return self._applied

    def load(self) -> Settings:
        """The settings to use now.

        At start a bad device config is a :class:`SettingsError`; a bad config.json gives the base values.
        Later a bad file leaves the settings in force, and a resource keeps its name until the process starts
        anew. The node gets a Warning event about either.
        """
        self._seen = device, node = self._contents()
        try:
            content = _readable(self._device_config, device)
            base = parse_device_config(content)
            foreign = foreign_sections(content, self._given.mig_strategy or "none")
            if foreign:
                log.warning("config.sections_without_effect", extra={"sections": list(foreign)})
            overrides, applied = self._overrides(node)
            settings = build_settings(base, overrides, self._given, parse_sharing(content))
        except SettingsError as error:
            if self._last is None:
                raise
            self._report(f"{error}; the settings in force stay")
            return self._last
        settings = self._with_names_kept(settings)
        self._last, self._applied = settings, applied
        return settings

    def refreshed(self) -> bool:
        """Whether a file has changed since :meth:`load` read it, and with it the settings; those are in force
        then.
        """
        before = self._last
        if before is None or self._contents() == self._seen:
            return False
        after = self.load()
        log.info("config.read_again", extra={"applied": self._applied, "changed": after != before})
        return after != before

    def _contents(self) -> tuple[Content, Content]:
        return _read(self._device_config), _read(self._node_config)

    def _overrides(self, found: Content) -> tuple[tuple[NodeOverride, ...], str]:
        if found is None:
            return (), ""
        try:
            content = _readable(self._node_config, found)
            entries = parse_node_overrides(content, self._cluster.node_name)
        except SettingsError as error:
            if self._last is not None:
                raise
            self._report(f"{error}; the node runs in mode hami-core with the values of the device config")
            return (), ""
        if len(entries) > 1:
            log.warning("config.node_listed_again", extra={"entries": len(entries), "rule": "the last wins"})
        return entries, hashlib.sha256(content).hexdigest()[:_HASH_DIGITS]

    def _with_names_kept(self, settings: Settings) -> Settings:
        last = self._last
        if last is None:
            return settings
        names = (last.resource_name, last.priority_resource)
        wanted = (settings.resource_name, settings.priority_resource)
        if names != wanted:
            changes = ", ".join(
                f"{old} to {new}" for old, new in zip(names, wanted, strict=True) if old != new
            )
            self._report(f"resource names change only when the plugin starts anew: {changes}")
        return replace(settings, resource_name=last.resource_name, priority_resource=last.priority_resource)

    def _report(self, text: str) -> None:
        log.warning("config.bad", extra={"cause": text})
        self._cluster.node_event("Warning", "HAMiNodeConfigInvalid", text)


def _read(path: Path) -> Content:
    return read_mounted(path, MAX_CONFIG_BYTES)


def _readable(path: Path, content: Content) -> bytes:
    if isinstance(content, bytes):
        return content
    raise SettingsError(problem_of(path, content))
