"""Where the answering commands get their cluster from: a snapshot file, or a live cluster that is only
read."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hami.cli.terminal import plain, plain_json

if TYPE_CHECKING:
    from hami.answers.snapshot import Snapshot
    from hami.kube.config import ClientConfig


class Source:
    """The options that say which cluster; `read` takes a snapshot of it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    @property
    def is_live(self) -> bool:
        """Whether the cluster is asked, not a file."""
        return self._options["snapshot_file"] is None

    @property
    def namespace(self) -> str:
        """The namespace to look in; "": not given."""
        return str(self._options["namespace"] or "")

    @property
    def pod_namespace(self) -> str:
        """Where a pod is that names no namespace: of the option, else of the kubeconfig's context, as kubectl
        has it. Raises `HamiError` when there is no usable kubeconfig."""
        if self.namespace or not self.is_live:
            return self.namespace or "default"
        return self._config().namespace

    def _config(self) -> ClientConfig:
        from hami.kube.config import load_config

        environ = dict(os.environ)
        if self._options["kubeconfig"] is not None:
            environ["KUBECONFIG"] = str(self._options["kubeconfig"])
        return load_config(environ, context=self._options["context"])

    def read(self, *, with_usage: bool = False) -> Snapshot:
        """The snapshot. Raises `click.ClickException` with what is wrong."""
        from hami.answers.snapshot import MAX_FILE_BYTES, decode_snapshot
        from hami.protocol.errors import HamiError

        path: Path | None = self._options["snapshot_file"]
        try:
            if path is None:
                file = self._options["device_config_file"]
                config = None if file is None else file.read_text(encoding="utf-8", errors="replace")
                return asyncio.run(self._collect(config, with_usage=with_usage))
            with path.open("rb") as file:
                return decode_snapshot(file.read(MAX_FILE_BYTES + 1))
        except OSError as error:
            raise click.ClickException(f"{error.filename or path}: {error.strerror or error}") from error
        except HamiError as error:
            raise click.ClickException(str(error) if path is None else f"{path}: {error}") from error

    async def _collect(self, device_config: str | None, *, with_usage: bool) -> Snapshot:
        from hami.answers.collect import Overrides, collect
        from hami.answers.errors import AnswerError
        from hami.kube.client import Client
        from hami.kube.errors import TransportError

        options = self._options
        flags = {
            "node-scheduler-policy": options["node_scheduler_policy"],
            "gpu-scheduler-policy": options["gpu_scheduler_policy"],
            "scheduler-name": options["scheduler_name"],
        }
        overrides = Overrides(
            options["hami_namespace"],
            device_config,
            {name: text for name, text in flags.items() if text},
            options["monitor_url"],
            with_usage,
        )
        cluster = self._config()
        async with Client(cluster, user_agent="hami-cli") as client:
            try:
                return await collect(client, overrides, time.time())
            except TransportError as error:
                raise AnswerError(f"the API server {cluster.server} does not answer: {error}") from error


_OPTIONS = (
    click.option(
        "--snapshot",
        "snapshot_file",
        type=click.Path(path_type=Path, dir_okay=False),
        default=None,
        help="Answer from a file of `hami snapshot` instead of a live cluster.",
    ),
    click.option(
        "-n", "--namespace", default=None, help="Namespace of pods (default: the context's; top: all)."
    ),
    click.option(
        "--kubeconfig", type=click.Path(path_type=Path, dir_okay=False), default=None, help="Kubeconfig file."
    ),
    click.option("--context", default="", help="Context of the kubeconfig."),
    click.option(
        "--hami-namespace", default="", metavar="NAMESPACE", help="Where HAMi is installed (default: found)."
    ),
    click.option(
        "--device-config-file",
        type=click.Path(path_type=Path, dir_okay=False),
        default=None,
        help="device-config.yaml (default: from HAMi's ConfigMap).",
    ),
    click.option("--node-scheduler-policy", default="", metavar="POLICY", help="As the scheduler's flag."),
    click.option("--gpu-scheduler-policy", default="", metavar="POLICY", help="As the scheduler's flag."),
    click.option("--scheduler-name", default="", metavar="NAME", help="As the scheduler's flag."),
    click.option(
        "--monitor-url",
        multiple=True,
        metavar="URL",
        help="A monitor's /metrics to read usage from; repeatable (default: each node's monitor, through the "
        "API server, which takes the permission pods/proxy).",
    ),
)


def from_cluster(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that say which cluster; it gets them as one `source`."""

    @functools.wraps(command)
    def with_source(**options: Any) -> Any:
        mine = {name: options.pop(name) for name in _NAMES}
        try:
            return command(source=Source(mine), **options)
        except click.UsageError:
            raise  # names what the caller typed
        except click.ClickException as error:
            raise type(error)(plain(" ".join(error.message.splitlines()))) from error

    decorated: Callable[..., Any] = with_source
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


_NAMES = (
    "snapshot_file",
    "namespace",
    "kubeconfig",
    "context",
    "hami_namespace",
    "device_config_file",
    "node_scheduler_policy",
    "gpu_scheduler_policy",
    "scheduler_name",
    "monitor_url",
)

output_option = click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Format."
)


def show(lines: list[str], answer: object, output: str) -> None:
    """Print an answer as text or as JSON."""
    import msgspec

    if output == "json":
        click.echo(plain_json(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()))
    else:
        click.echo("\n".join(map(plain, lines)))
