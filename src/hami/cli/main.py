"""Entry point of the ``hami`` command; subcommands are imported when they are called."""

from __future__ import annotations

import importlib

import click

# subcommand -> module that defines the click command of the same (underscored) name
_COMMANDS: dict[str, str] = {
    "cluster": "hami.cli.cluster",
    "demo": "hami.cli.demo",
    "scheduler": "hami.cli.scheduler",
    "device-plugin": "hami.cli.device_plugin",
    "install-library": "hami.cli.install_library",
    "monitor": "hami.cli.monitor",
}


class _LazyGroup(click.Group):
    """A group that imports a subcommand's module only when the subcommand is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = importlib.import_module(module).command
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hami")
def main() -> None:
    """Share GPUs and other accelerators between Kubernetes pods, with enforced limits."""
