"""Entry point of the ``hami`` command; subcommands are imported when they are called."""

from __future__ import annotations

import importlib
from typing import Any

import click

# subcommand -> module that defines the click command of the same (underscored) name
_COMMANDS: dict[str, str] = {
    "cluster": "hami.cli.cluster",
    "demo": "hami.cli.demo",
    "scheduler": "hami.cli.scheduler",
    "device-plugin": "hami.cli.device_plugin",
    "install-library": "hami.cli.install_library",
    "monitor": "hami.cli.monitor",
    "region": "hami.cli.region",
    "explain": "hami.cli.explain",
    "top": "hami.cli.top",
    "simulate": "hami.cli.simulate",
    "snapshot": "hami.cli.snapshot",
    "preflight": "hami.cli.preflight",
    "verify": "hami.cli.verify",
    "cleanup": "hami.cli.cleanup",
    "locks": "hami.cli.locks",
    "support-bundle": "hami.cli.support_bundle",
    "dashboard": "hami.cli.dashboard",
}


class _LazyGroup(click.Group):
    """A group that imports a subcommand's module only when the subcommand is used."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """As a plugin of kubectl the program is called by two words."""
        name = "kubectl hami" if info_name == "kubectl-hami" else info_name
        return super().make_context(name, args, parent, **extra)

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
