"""Prepare .venv from uv.lock, with nothing but the standard library of Python >= 3.11.

uv is a development dependency, so uv.lock names its wheel and hash: where no uv is installed, that wheel is
fetched, checked and unpacked into ${XDG_CACHE_HOME:-~/.cache}/hami/. Neither pip nor python3-venv is needed.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
FETCH_TIMEOUT_SECONDS = 180


def fail(message: str) -> NoReturn:
    """Stop with one line that says what is wrong and what to do."""
    sys.exit(f"setup: {message}")


def locked_wheel() -> tuple[str, str, str]:
    """Version, URL and SHA-256 of uv's wheel for this machine, from uv.lock."""
    import tomllib

    libc = "musllinux" if platform.libc_ver()[0] == "" else "manylinux"
    suffix = f"_{platform.machine()}.whl"
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    for package in lock["package"]:
        if package["name"] == "uv":
            for wheel in package["wheels"]:
                if libc in wheel["url"] and wheel["url"].endswith(suffix):
                    return package["version"], wheel["url"], wheel["hash"].removeprefix("sha256:")
    fail(f"uv.lock has no uv wheel for {libc} on {platform.machine()}: install uv, then run this again")


def fetched_uv() -> Path:
    """Path of the cached uv program; fetches it on first use."""
    version, url, sha256 = locked_wheel()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hami"
    program = cache / f"uv-{version}"
    if program.exists():
        return program
    print(f"setup: fetching uv {version}", flush=True)
    try:
        with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT_SECONDS) as answer:  # noqa: S310 - from uv.lock
            wheel = answer.read()
    except OSError as error:
        fail(f"cannot fetch uv ({error}): check the network, or install uv, then run this again")
    if hashlib.sha256(wheel).hexdigest() != sha256:
        fail("the fetched uv does not have the hash that uv.lock names: not using it")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        archive = Path(scratch) / "uv.whl"
        archive.write_bytes(wheel)
        with zipfile.ZipFile(archive) as content:
            member = next(name for name in content.namelist() if name.endswith(".data/scripts/uv"))
            extracted = Path(content.extract(member, scratch))
        extracted.chmod(0o755)
        extracted.replace(program)
    return program


def main() -> None:
    """Create or refresh .venv; the file .venv/.synced marks success for make."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this script meets whatever python3 there is
        fail(f"Python {platform.python_version()} is too old, 3.11 is needed: set PYTHON=/path/to/python")
    uv = shutil.which("uv") or str(fetched_uv())
    if not (VENV / "bin" / "python").exists():
        print("setup: creating .venv (about a minute on first use)", flush=True)
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    environment.pop("VIRTUAL_ENV", None)
    command = [uv, "sync", "--frozen", "--quiet", "--project", str(ROOT), "--python", sys.executable]
    if subprocess.run(command, env=environment, check=False).returncode != 0:
        fail("uv could not install what uv.lock names; its message is above")
    (VENV / ".synced").touch()


if __name__ == "__main__":
    main()
