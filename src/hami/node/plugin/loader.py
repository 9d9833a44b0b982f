"""Reads the configuration files; bad ones never change what is in force (device-plugin.md §3.2)."""

from __future__ import annotations

import logging
from pathlib import Path

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
)
from hami.node.errors import SettingsError

log = logging.getLogger(__name__)


class SettingsLoader:
    """Builds the settings at every start of the plugin."""

    def __init__(self, device_config: Path, node_config: Path, given: Overrides, cluster: Cluster) -> None:
        self._device_config = device_config
        self._node_config = node_config
        self._given = given
        self._cluster = cluster
        self._last: Settings | None = None

    def load(self) -> Settings:
        """The settings to use now.

        At start a bad device config is a :class:`SettingsError`; a bad config.json gives the base values.
        Later a bad file leaves the settings in force. Either way the node gets a Warning event.
        """
        try:
            content = _read(self._device_config)
            base = parse_device_config(content)
            foreign = foreign_sections(content)
            if foreign:
                log.warning("config.sections_without_effect", extra={"sections": list(foreign)})
            overrides = self._overrides()
            settings = build_settings(base, overrides, self._given)
            _check_mode(settings)
        except SettingsError as error:
            if self._last is None:
                raise
            self._report(f"{error}; the settings in force stay")
            return self._last
        self._last = settings
        return settings

    def _overrides(self) -> tuple[NodeOverride, ...]:
        if not self._node_config.exists():
            return ()
        try:
            return parse_node_overrides(_read(self._node_config), self._cluster.node_name)
        except SettingsError as error:
            if self._last is not None:
                raise
            self._report(f"{error}; the node runs in mode hami-core with the values of the device config")
            return ()

    def _report(self, text: str) -> None:
        log.warning("config.bad", extra={"cause": text})
        self._cluster.node_event("Warning", "HAMiNodeConfigInvalid", text)


def _check_mode(settings: Settings) -> None:
    if settings.mode == "mig":
        raise SettingsError("operatingmode mig is not available in this version; use hami-core")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror or error}") from error
    if len(content) > MAX_CONFIG_BYTES:
        raise SettingsError(f"{path} is longer than {MAX_CONFIG_BYTES} bytes")
    return content
