"""Files that kubelet mounts from a ConfigMap and exchanges some time after it was edited.

kubelet writes a new folder and renames a symbolic link to it, so a file is always whole; a reader that holds
the path of the old folder finds nothing there. A ConfigMap mounted with ``subPath`` never changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

CHECK_EVERY_S: Final = 5.0
"""How often to look: kubelet itself takes up to about a minute."""

Content = bytes | str | None
"""What a file holds; why it cannot be read; None: it is not there."""


def read_mounted(path: Path, max_bytes: int) -> Content:
    """The file as it is now, at most ``max_bytes`` long. Blocking; never raises ``OSError``."""
    try:
        try:
            content = _head(path, max_bytes)
        except FileNotFoundError:
            content = _head(path, max_bytes)  # kubelet has just exchanged the folder
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot read {path}: {error.strerror or error}"
    if len(content) > max_bytes:
        return f"{path} is longer than {max_bytes} bytes"
    return content


def problem_of(path: Path, content: Content) -> str:
    """Why there is nothing to parse, else ""."""
    if isinstance(content, bytes):
        return ""
    return content or f"cannot read {path}: there is no such file"


def _head(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(max_bytes + 1)
