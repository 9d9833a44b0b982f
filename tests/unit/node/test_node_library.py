"""Installing and verifying libvgpu.so (device-plugin.md §12, cases D21, D22), and the command lines."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hami.cli import device_plugin, install_library
from hami.cli.device_plugin import command
from hami.node.errors import SettingsError, UnsafePathError
from hami.node.paths import HostPaths
from hami.node.plugin.library import LibraryError, install, verify
from hami.node.plugin.recovery_rules import RecoveryMode, RecoveryRules
from hami.node.plugin.scores import PairScores


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    root = tmp_path / "host"
    root.mkdir()
    return HostPaths(str(root), "/usr/local", "v1.0.0")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "libvgpu.so"
    file.write_bytes(b"one")
    return file


def test_the_library_and_the_preload_file_are_installed_once(paths: HostPaths, source: Path) -> None:
    placed = install(source, paths)
    target = Path(placed.library_candidates[0])
    assert str(target).endswith("/usr/local/vgpu/lib/v1.0.0/libvgpu.so")
    assert (target.read_bytes(), stat.S_IMODE(target.stat().st_mode)) == (b"one", 0o644)
    assert Path(paths.preload).read_text() == "/usr/local/vgpu/libvgpu.so\n"
    before = target.stat().st_mtime_ns, Path(paths.preload).stat().st_mtime_ns
    assert install(source, paths) == placed
    assert (target.stat().st_mtime_ns, Path(paths.preload).stat().st_mtime_ns) == before
    assert verify(source, paths) == placed


def test_d22_the_same_version_with_other_content_gets_its_own_directory(
    paths: HostPaths, source: Path
) -> None:
    first = Path(install(source, paths).library_candidates[0])
    source.write_bytes(b"two")
    second = install(source, paths)
    digest = hashlib.sha256(b"two").hexdigest()
    assert second.library_version == f"v1.0.0-{digest[:12]}"
    assert first.read_bytes() == b"one"
    assert verify(source, paths) == second


def test_d21_a_changed_library_is_named_with_both_sums_and_stays(paths: HostPaths, source: Path) -> None:
    target = Path(install(source, paths).library_candidates[0])
    target.write_bytes(b"onE")
    with pytest.raises(LibraryError) as caught:
        verify(source, paths)
    for content in (b"one", b"onE"):
        assert hashlib.sha256(content).hexdigest() in str(caught.value)
    assert target.read_bytes() == b"onE"


def test_a_missing_library_is_an_error(paths: HostPaths, source: Path) -> None:
    with pytest.raises(LibraryError, match="missing"):
        verify(source, paths)


def test_a_planted_link_is_not_followed(paths: HostPaths, source: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"victim")
    target = Path(paths.library_candidates[0])
    target.parent.mkdir(parents=True)
    target.symlink_to(victim)
    with pytest.raises(UnsafePathError):
        install(source, paths)
    Path(paths.preload).symlink_to(victim)
    target.unlink()
    install(source, paths)
    assert victim.read_bytes() == b"victim"
    assert Path(paths.preload).read_text() == "/usr/local/vgpu/libvgpu.so\n"


def test_what_a_runtime_made_of_a_missing_mount_source_is_replaced(paths: HostPaths, source: Path) -> None:
    places = Path(paths.library_candidates[0]), Path(paths.preload)
    for place in places:
        place.mkdir(parents=True)
    install(source, paths)
    assert [place.is_file() for place in places] == [True, True]


@pytest.mark.parametrize("what", ["preload", "library"])
def test_a_directory_with_something_in_it_stays_and_is_named(
    paths: HostPaths, source: Path, what: str
) -> None:
    path = paths.preload if what == "preload" else paths.library_candidates[0]
    kept = Path(path, "kept")
    kept.mkdir(parents=True)
    with pytest.raises((OSError, UnsafePathError), match=path):
        install(source, paths)
    assert kept.exists()


def test_files_that_users_in_containers_cannot_read_are_installed_anew(
    paths: HostPaths, source: Path
) -> None:
    """The loader goes on without a library that it cannot read: there would be no limits."""
    install(source, paths)
    places = Path(paths.library_candidates[0]), Path(paths.preload)
    for place in places:
        place.chmod(0o600)
    install(source, paths)
    assert [stat.S_IMODE(place.stat().st_mode) for place in places] == [0o644, 0o644]


def test_a_folder_that_is_a_link_is_named_as_that(paths: HostPaths, source: Path, tmp_path: Path) -> None:
    Path(paths.host(paths.hook)).mkdir(parents=True)
    Path(paths.host(paths.vgpu)).symlink_to(tmp_path)
    with pytest.raises(UnsafePathError, match="vgpu is a symlink"):
        install(source, paths)


def test_the_install_command_says_where_the_library_is(tmp_path: Path, source: Path) -> None:
    arguments = ["--library", str(source), "--host-root", str(tmp_path)]
    result = CliRunner().invoke(install_library.command, arguments, env={"HOOK_PATH": "/opt"})
    assert result.exit_code == 0, result.output
    assert Path(result.output.strip()).read_bytes() == b"one"
    missing = CliRunner().invoke(install_library.command, ["--library", str(tmp_path / "absent")])
    assert missing.exit_code != 0


def configure(*arguments: str, **env: str) -> Any:
    """What the process is started with for a command line and an environment."""
    context = command.make_context("device-plugin", [*arguments], auto_envvar_prefix=None)
    return device_plugin._process_config(context.params)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("NODE_NAME", "HOOK_PATH", "CONFIG_FILE", "DISABLE_CORE_LIMIT", "DEVICE_SPLIT_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NODE_NAME", "n1")
    monkeypatch.setenv("CONFIG_FILE", "/device-config.yaml")
    return monkeypatch


def test_defaults_of_the_command_line(environment: pytest.MonkeyPatch) -> None:
    config = configure()
    assert config.node_name == "n1"
    assert config.device_config == Path("/device-config.yaml")
    assert config.options.kubelet_socket == "/var/lib/kubelet/device-plugins/kubelet.sock"
    assert config.options.paths.hook == "/usr/local"
    assert config.options.delivery.limits_file
    assert config.given.disable_core_limit is None
    assert configure("--kubelet-socket=").options.kubelet_socket == ""


def test_d16_flags_and_variables_that_hami_ignores_work(environment: pytest.MonkeyPatch) -> None:
    assert configure("--disable-core-limit=true").given.disable_core_limit is True
    assert configure("--disable-core-limit").given.disable_core_limit is True
    environment.setenv("DISABLE_CORE_LIMIT", "true")
    environment.setenv("DEVICE_SPLIT_COUNT", "4")
    assert configure().given.disable_core_limit is True
    assert configure().given.split_count == 4
    assert configure("--disable-core-limit=false").given.disable_core_limit is False


def test_the_runtime_is_told_uuids_or_indexes(environment: pytest.MonkeyPatch) -> None:
    assert not configure().options.by_index
    environment.setenv("DEVICE_ID_STRATEGY", "index")
    assert configure().options.by_index


def test_device_list_strategies_are_a_comma_list_or_repeated(environment: pytest.MonkeyPatch) -> None:
    assert configure("--device-list-strategy", "envvar,volume-mounts").options.delivery.volume_mounts
    assert not configure("--device-list-strategy=envvar").options.delivery.volume_mounts
    extras = configure("--gds-enabled", "--mofed-enabled=true").options.delivery.extras
    assert extras == {"NVIDIA_GDS": "enabled", "NVIDIA_MOFED": "enabled"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device-list-strategy=magic"],
        ["--device-list-strategy=cdi-cri", "--cdi-annotation-prefix=/"],
        ["--device-id-strategy=name"],
        ["--mig-strategy=all"],
        ["--device-discovery-strategy=magic"],
        ["--allocation-mode=magic"],
        ["--allocation-mode=exact", "--kubelet-socket="],
        ["--imex-channel-ids=1"],
        ["--host-root=relative"],
    ],
    ids=lambda arguments: str(arguments[0]),
)
def test_what_is_not_possible_is_refused_at_start(
    environment: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    with pytest.raises(SettingsError):
        configure(*arguments)


@pytest.mark.parametrize("name", ["NODE_NAME", "CONFIG_FILE"])
def test_a_missing_variable_is_named(environment: pytest.MonkeyPatch, name: str) -> None:
    environment.delenv(name)
    with pytest.raises(SettingsError, match=name):
        configure()


def test_a_real_kubelet_socket_is_refused_with_a_host_root(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    socket = "--kubelet-socket=/var/lib/kubelet/device-plugins/kubelet.sock"
    with pytest.raises(SettingsError, match="--host-root"):
        configure(f"--host-root={tmp_path}", socket)


def test_recovery_of_cards_is_switched_on_by_the_environment(environment: pytest.MonkeyPatch) -> None:
    assert configure().options.recovery == RecoveryRules()
    environment.setenv("HAMI_HEALTH_RECOVERY", "timed")
    environment.setenv("HAMI_HEALTH_TRANSIENT_XIDS", "63,94")
    environment.setenv("HAMI_HEALTH_QUIET_PERIOD", "5m")
    rules = RecoveryRules(RecoveryMode.TIMED, frozenset({63, 94}), 300.0)
    assert configure().options.recovery == rules
    environment.setenv("HAMI_HEALTH_RECOVERY", "on")
    with pytest.raises(SettingsError, match="must be off, reset or timed"):
        configure()


def test_pair_scores_are_computed_unless_switched_off(environment: pytest.MonkeyPatch) -> None:
    assert configure().options.pair_scores is PairScores.IF_POSSIBLE
    for text, meaning in (("true", PairScores.REQUIRED), ("false", PairScores.OFF)):
        environment.setenv("ENABLE_TOPOLOGY_SCORE", text)
        assert configure().options.pair_scores is meaning
    environment.setenv("ENABLE_TOPOLOGY_SCORE", "True")
    with pytest.raises(SettingsError, match="ENABLE_TOPOLOGY_SCORE must be true or false, not 'True'"):
        configure()


@pytest.mark.parametrize("text", ["-v=x", "-v=-1", "--v="])
def test_a_verbosity_that_is_no_number_is_refused(environment: pytest.MonkeyPatch, text: str) -> None:
    result = CliRunner().invoke(command, [text])
    assert result.exit_code == 2
    assert "is not a number" in result.output


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(command, ["version"])
    assert result.output.startswith("NVIDIA Device Plugin version: v")
