"""How a command reaches a live cluster: the options that name it, and a client whose failures are said in
words."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.decorators import FC

from hami.cli.terminal import plain

if TYPE_CHECKING:
    from hami.kube.client import Client
    from hami.kube.config import ClientConfig

T = TypeVar("T")

_OPTIONS = (
    click.option(
        "--kubeconfig", type=click.Path(path_type=Path, dir_okay=False), default=None, help="Kubeconfig file."
    ),
    click.option("--context", default="", help="Context of the kubeconfig."),
)


def cluster_options(command: FC) -> FC:
    """Give a command `kubeconfig` and `context`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def config_of(kubeconfig: Path | None, context: str) -> ClientConfig:
    """The cluster that the options name, as kubectl finds it. Raises `KubeError`."""
    from hami.kube.config import load_config

    environ = dict(os.environ)
    if kubeconfig is not None:
        environ["KUBECONFIG"] = str(kubeconfig)
    return load_config(environ, context=context)


@asynccontextmanager
async def connected(kubeconfig: Path | None, context: str) -> AsyncIterator[Client]:
    """A client of that cluster. An API server that does not answer is an `AnswerError` that names it."""
    from hami.answers.errors import AnswerError
    from hami.kube.client import Client
    from hami.kube.errors import TransportError

    config = config_of(kubeconfig, context)
    async with Client(config, user_agent="hami-cli") as client:
        try:
            yield client
        except TransportError as error:
            raise AnswerError(f"the API server {config.server} does not answer: {error}") from error


def answered(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run it; what HAMi's errors say becomes the command's last line."""
    from hami.protocol.errors import HamiError

    try:
        return asyncio.run(work())
    except HamiError as error:
        raise click.ClickException(plain(" ".join(str(error).splitlines()))) from error
