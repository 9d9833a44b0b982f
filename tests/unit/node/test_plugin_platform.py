"""Which machine this is, what is registered where no card can be offered, how containers learn of cards."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from node_cards import U1
from plugin_world import Node

from hami.cli import device_plugin
from hami.node.cdi import kinds
from hami.node.cdi.edits import CdiError
from hami.node.errors import NvmlError, SettingsError
from hami.node.plugin.answer import CdiDelivery
from hami.node.plugin.platform import Platform, Signs, check_strategy, choose, look, refuse_cdi
from hami.node.plugin.process import ProcessConfig
from hami.node.plugin.strategies import STRATEGIES, cdi_delivery, check_id_strategy, parse_strategies

REGISTER = "hami.io/node-nvidia-register"
Make = Callable[..., Any]
Until = Callable[..., Awaitable[None]]


@pytest.fixture
def node(cluster: Any, make_nvml: Make) -> Iterator[Node]:
    folder = tempfile.mkdtemp(prefix="hq")
    yield Node(cluster, make_nvml([(U1, "NVIDIA A", 1 << 30)]), Path(folder))
    shutil.rmtree(folder)


# ---- platform ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signs", "platform"),
    [
        (Signs(dxcore=True, tegra_files=True, nvml=True), Platform.WSL),
        (Signs(dxcore=False, tegra_files=True, nvml=False), Platform.TEGRA),
        (Signs(dxcore=False, tegra_files=True, nvml=True), Platform.NVML),
        (Signs(dxcore=False, tegra_files=False, nvml=True, names=("Orin (nvgpu)",)), Platform.TEGRA),
        (Signs(dxcore=False, tegra_files=False, nvml=True, names=("NVIDIA Thor",)), Platform.TEGRA),
        (Signs(dxcore=False, tegra_files=False, nvml=True, names=("NVIDIA H200",)), Platform.NVML),
        (Signs(dxcore=False, tegra_files=False, nvml=False), Platform.UNKNOWN),
    ],
)
def test_the_platform_follows_from_the_signs(signs: Signs, platform: Platform) -> None:
    assert choose("auto", signs) is platform


def test_an_explicit_discovery_strategy_is_obeyed() -> None:
    nothing = Signs(dxcore=False, tegra_files=False, nvml=False)
    everything = Signs(dxcore=True, tegra_files=True, nvml=True)
    assert choose("nvml", everything) is choose("nvml", nothing) is Platform.NVML
    assert choose("tegra", everything) is choose("tegra", nothing) is Platform.TEGRA
    with pytest.raises(SettingsError, match="must be one of auto, nvml, tegra"):
        check_strategy("vfio")


def test_signs_are_found_below_a_root(tmp_path: Path) -> None:
    def absent() -> list[str]:
        raise NvmlError("cannot load")

    def signs(**files: str) -> Signs:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return look(str(tmp_path / "no-such-library.so"), absent, (str(tmp_path),))

    assert signs() == Signs(dxcore=False, tegra_files=False, nvml=False)
    assert not signs(sys__devices__soc0__family="Snapdragon\n").tegra_files
    assert signs(sys__devices__soc0__family="Tegra\n").tegra_files
    (tmp_path / "sys/devices/soc0/family").unlink()
    assert signs(etc__nv_tegra_release="# R36").tegra_files
    assert look("x", lambda: ["NVIDIA A"], (str(tmp_path / "x"),)) == Signs(
        dxcore=False, tegra_files=False, nvml=True, names=("NVIDIA A",)
    )


async def test_a_tegra_board_registers_no_card_and_says_so_once(node: Node, until: Until) -> None:
    node.plugin._find_platform = lambda: Platform.TEGRA
    async with node:
        await until(lambda: node.cluster.node_annotations.get(REGISTER) == "[]")
        node.plugin.reload()
        await until(lambda: node.plugin.rounds == 2)
        await until(lambda: not node.plugin._reload.is_set())
    assert node.kubelet.registered == []
    told = [text for _, reason, text in node.cluster.events if reason == "HAMiNoCards"]
    assert told == ["this is a Tegra board, whose devices cannot be shared: no card is registered"]


async def test_a_node_whose_driver_comes_later_gets_its_cards(node: Node, until: Until) -> None:
    found = [Platform.UNKNOWN]
    node.plugin._find_platform = lambda: found[0]
    node.plugin._options = replace(node.plugin._options, fail_on_init_error=False, retry_s=0.05)
    async with node:
        await until(lambda: node.cluster.node_annotations.get(REGISTER) == "[]")
        found[0] = Platform.NVML
        await until(lambda: node.kubelet.registered)
        await until(lambda: U1 in node.cluster.node_annotations[REGISTER])


async def test_without_nvml_the_plugin_ends_with_nvml_s_own_words(node: Node) -> None:
    node.plugin._find_platform = lambda: Platform.UNKNOWN
    node.nvml.list_error = NvmlError("cannot load libnvidia-ml.so.1")
    with pytest.raises(NvmlError, match="cannot load libnvidia-ml"):
        await node.plugin.run()


async def test_cdi_without_nvml_is_refused_at_start(node: Node) -> None:
    options = node.plugin._options
    cdi = CdiDelivery(cri=True, only=True)
    node.plugin._options = replace(options, delivery=replace(options.delivery, cdi=cdi))
    node.plugin._find_platform = lambda: Platform.TEGRA
    with pytest.raises(CdiError, match="need NVIDIA cards with NVML, and this is a Tegra board; use"):
        await node.plugin.run()


def test_only_cards_with_nvml_have_cdi_documents() -> None:
    refuse_cdi(Platform.NVML)
    for platform in (Platform.WSL, Platform.TEGRA, Platform.UNKNOWN):
        with pytest.raises(CdiError):
            refuse_cdi(platform)


# ---- strategies --------------------------------------------------------------------------------------------


def test_strategies_are_repeated_flags_or_comma_lists() -> None:
    assert parse_strategies(["envvar, cdi-cri", "envvar"]) == ("envvar", "cdi-cri")
    assert parse_strategies([""]) == ("envvar",)
    assert parse_strategies(STRATEGIES) == STRATEGIES
    with pytest.raises(SettingsError, match="unknown cdi, x; known are envvar, volume-mounts, cdi-ann"):
        parse_strategies(["cdi,envvar", "x"])


def test_cdi_strategies_make_a_cdi_delivery() -> None:
    assert cdi_delivery(["envvar", "volume-mounts"], "", ()) is None
    both = cdi_delivery(["cdi-cri", "cdi-annotations"], "x.io/", [kinds.GDS])
    assert both is not None
    assert (both.annotations, both.cri, both.only, both.extras) == (True, True, True, (kinds.GDS,))
    beside = cdi_delivery(["cdi-cri", "envvar"], "cdi.k8s.io/", ())
    assert beside is not None
    assert (beside.annotations, beside.only) == (False, False)


@pytest.mark.parametrize("prefix", ["", "/", "cdi.k8s.io", "CDI.io/", "a b/", "a//", "a/b/", "x" * 300 + "/"])
def test_a_prefix_without_a_valid_key_is_refused(prefix: str) -> None:
    with pytest.raises(SettingsError, match="cdi-annotation-prefix"):
        cdi_delivery(["cdi-annotations"], prefix, ())


def test_the_id_strategy_is_uuid_or_index() -> None:
    check_id_strategy("index")
    with pytest.raises(SettingsError, match="'minor' must be uuid or index"):
        check_id_strategy("minor")


# ---- command line ------------------------------------------------------------------------------------------


def config_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> ProcessConfig:
    monkeypatch.setenv("NODE_NAME", "n1")
    (tmp_path / "device-config.yaml").write_text("nvidia: {}\n")
    arguments = [f"--config-file={tmp_path / 'device-config.yaml'}", f"--host-root={tmp_path}", *flags]
    context = device_plugin.command.make_context("device-plugin", arguments)
    config: ProcessConfig = device_plugin._process_config(context.params)
    return config


def test_the_command_line_switches_cdi_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVICE_LIST_STRATEGY", "envvar,cdi-annotations")
    monkeypatch.setenv("CDI_ANNOTATION_PREFIX", "x.io/")
    monkeypatch.setenv("GDS_ENABLED", "true")
    flags = ("--nvidia-driver-root=/run/nvidia/driver", "--nvidia-ctk-path=/opt/nvidia-ctk")
    config = config_of(tmp_path, monkeypatch, *flags, "--device-discovery-strategy=nvml")
    cdi = config.options.delivery.cdi
    assert cdi is not None
    assert (cdi.annotations, cdi.cri, cdi.only, cdi.prefix) == (True, False, False, "x.io/")
    assert cdi.extras == (kinds.GDS,)
    assert config.options.delivery.extras == {"NVIDIA_GDS": "enabled"}
    assert (config.options.driver_host_root, config.options.dev_root) == ("/run/nvidia/driver",) * 2
    assert (config.options.cdi_hook, config.discovery) == ("/opt/nvidia-ctk", "nvml")


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--device-list-strategy=cdi", "unknown cdi"),
        ("--device-id-strategy=x", "must be uuid or index"),
        ("--device-discovery-strategy=x", "must be one of auto, nvml, tegra"),
    ],
)
def test_unknown_values_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, text: str
) -> None:
    monkeypatch.delenv("DEVICE_LIST_STRATEGY", raising=False)
    with pytest.raises(SettingsError, match=text):
        config_of(tmp_path, monkeypatch, flag)
