"""The file that a command makes: all of it or none, and never through a link that somebody put there."""

from __future__ import annotations

import os
from pathlib import Path

import click


def write_file(file: Path, data: bytes) -> None:
    """Write or replace a file; raises `click.ClickException` with what is wrong."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with part.open("xb") as written:
            written.write(data)
        part.replace(file)
    except FileExistsError as error:
        raise click.ClickException(f"{part} exists: remove it") from error
    except OSError as error:
        part.unlink(missing_ok=True)
        raise click.ClickException(f"{file}: {error.strerror or error}") from error
