"""Which IMEX channels containers get (device-plugin.md §8.5)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hami.node.errors import SettingsError
from hami.node.plugin import imex


@pytest.mark.parametrize(("text", "channels"), [("", ()), ("[]", ()), ("0", ("0",)), ("[0]", ("0",))])
def test_nothing_and_channel_0_can_be_asked_for(text: str, channels: tuple[str, ...]) -> None:
    assert imex.parse_channels(text) == channels


@pytest.mark.parametrize("text", ["1", "0,1", "x", "-0"])
def test_other_channels_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="imex-channel-ids"):
        imex.parse_channels(text)


def test_a_channel_is_a_character_device_below_one_of_the_roots(tmp_path: Path) -> None:
    folder = tmp_path / "dev/nvidia-caps-imex-channels"
    folder.mkdir(parents=True)
    (folder / "channel0").symlink_to("/dev/null")
    assert imex.available(["0"], ["/nowhere", str(tmp_path)], required=True) == ("0",)
    assert imex.available([], ["/nowhere"], required=True) == ()


def test_a_missing_channel_is_left_out_or_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "dev/nvidia-caps-imex-channels").mkdir(parents=True)
    (tmp_path / "dev/nvidia-caps-imex-channels/channel0").touch()
    with caplog.at_level(logging.WARNING):
        assert imex.available(["0"], [str(tmp_path)], required=False) == ()
    assert caplog.messages == ["imex.missing"]
    with pytest.raises(SettingsError, match="channel 0 is required"):
        imex.available(["0"], [str(tmp_path)], required=True)
