"""Credentials that renew themselves: static, from files that rotate, from exec plugins.

A source is asked before every request and answers from its cache; files are read again after ``REREAD_S``
seconds, an exec plugin is run again when its credential is about to expire or after the API server refused
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Protocol

import msgspec

from hami.kube.errors import UNDECODABLE, CredentialError

REREAD_S = 60.0
_EXPIRY_MARGIN_S = 30.0
_MAX_FILE_BYTES = 1 << 20
_EXEC_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Credential:
    """What one request presents: the Authorization header (empty: none) and a client certificate with key
    (PEM)."""

    authorization: str = ""
    certificate_pem: bytes = b""
    key_pem: bytes = b""


class CredentialSource(Protocol):
    """Where credentials come from."""

    async def current(self) -> Credential:
        """The credential to present now; raises ``CredentialError``."""
        ...

    def invalidate(self) -> None:
        """The API server answered 401: do not answer from the cache next time."""
        ...


class StaticCredential:
    """A credential that never changes."""

    def __init__(self, credential: Credential) -> None:
        self._credential = credential

    async def current(self) -> Credential:
        return self._credential

    def invalidate(self) -> None:
        """Nothing newer can be had."""


@dataclass(slots=True)
class FileCredential:
    """Token and/or client certificate in files that are rewritten while we run (projected tokens, node
    certificates).

    ``fixed`` supplies the parts that are not in files. A file that cannot be read later leaves the last
    content.
    """

    token_path: Path | None = None
    certificate_path: Path | None = None
    key_path: Path | None = None
    fixed: Credential = field(default_factory=Credential)
    clock: Callable[[], float] = time.monotonic
    _cached: Credential | None = None
    _read_at: float = 0.0

    async def current(self) -> Credential:
        if self._cached is None or self.clock() - self._read_at >= REREAD_S:
            try:
                self._cached = await asyncio.to_thread(self._read)
            except CredentialError:
                if self._cached is None:
                    raise
            self._read_at = self.clock()
        return self._cached

    def invalidate(self) -> None:
        self._read_at = -REREAD_S

    def _read(self) -> Credential:
        token = read_small_file(self.token_path).decode("ascii", "replace").strip() if self.token_path else ""
        if self.token_path and not token:
            raise CredentialError(f"token file {self.token_path} is empty")
        return Credential(
            f"Bearer {token}" if token else self.fixed.authorization,
            read_small_file(self.certificate_path) if self.certificate_path else self.fixed.certificate_pem,
            read_small_file(self.key_path) if self.key_path else self.fixed.key_pem,
        )


class _ExecStatus(msgspec.Struct, rename="camel"):
    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: datetime | None = None


class _ExecCredential(msgspec.Struct, rename="camel"):
    kind: str
    api_version: str
    status: _ExecStatus


_exec_decoder = msgspec.json.Decoder(_ExecCredential)


@dataclass(slots=True)
class ExecCredential:
    """A ``client.authentication.k8s.io`` exec plugin (cloud providers' kubeconfigs); one run at a time."""

    command: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    api_version: str = "client.authentication.k8s.io/v1"
    cluster_info: dict[str, object] | None = None
    install_hint: str = ""
    wall_clock: Callable[[], float] = time.time
    _cached: Credential | None = None
    _expires_at: float = 0.0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def current(self) -> Credential:
        async with self._lock:
            if self._cached is None or self.wall_clock() >= self._expires_at - _EXPIRY_MARGIN_S:
                status = await self._run()
                self._expires_at = (
                    status.expiration_timestamp.timestamp() if status.expiration_timestamp else float("inf")
                )
                self._cached = Credential(
                    f"Bearer {status.token}" if status.token else "",
                    status.client_certificate_data.encode(),
                    status.client_key_data.encode(),
                )
            return self._cached

    def invalidate(self) -> None:
        self._cached = None

    async def _run(self) -> _ExecStatus:
        spec: dict[str, object] = {"interactive": False}
        if self.cluster_info is not None:
            spec["cluster"] = self.cluster_info
        info = {"kind": "ExecCredential", "apiVersion": self.api_version, "spec": spec}
        env = {**os.environ, **self.env, "KUBERNETES_EXEC_INFO": msgspec.json.encode(info).decode()}
        try:
            process = await asyncio.create_subprocess_exec(
                self.command,
                *self.args,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=None,
                start_new_session=True,
            )
        except OSError as error:
            hint = f"; {self.install_hint}" if self.install_hint else ""
            raise CredentialError(f"cannot run credential plugin {self.command}: {error}{hint}") from error
        try:
            async with asyncio.timeout(_EXEC_TIMEOUT_S):
                output = await self._read_output(process)
                code = await process.wait()
        except TimeoutError as error:
            raise CredentialError(
                f"credential plugin {self.command} did not answer in {_EXEC_TIMEOUT_S:.0f}s"
            ) from error
        finally:
            await _end(process)
        if code != 0:
            raise CredentialError(f"credential plugin {self.command} failed with exit status {code}")
        return self._parse(output)

    async def _read_output(self, process: asyncio.subprocess.Process) -> bytes:
        assert process.stdout is not None
        output = bytearray()
        while chunk := await process.stdout.read(65536):
            output += chunk
            if len(output) > _MAX_FILE_BYTES:
                raise CredentialError(
                    f"credential plugin {self.command} printed more than {_MAX_FILE_BYTES} bytes"
                )
        return bytes(output)

    def _parse(self, output: bytes) -> _ExecStatus:
        try:
            answer = _exec_decoder.decode(output)
        except UNDECODABLE as error:
            raise CredentialError(f"credential plugin {self.command}: {error}") from error
        if answer.kind != "ExecCredential" or answer.api_version != self.api_version:
            raise CredentialError(
                f"credential plugin {self.command} answered {answer.api_version} {answer.kind}, expected "
                f"{self.api_version} ExecCredential"
            )
        status = answer.status
        if not status.token and not (status.client_certificate_data and status.client_key_data):
            raise CredentialError(
                f"credential plugin {self.command} answered neither a token nor a client certificate"
            )
        return status


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill what is left of a plugin, its children included, and read its pipe to the end so that it is
    closed."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout is not None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5.0):
            while await process.stdout.read(1 << 20):
                pass
            await process.wait()


def read_small_file(path: Path) -> bytes:
    """The whole file, at most 1 MiB; raises ``CredentialError``."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CredentialError(f"cannot read {path}: {error.strerror or error}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise CredentialError(f"{path} is larger than {_MAX_FILE_BYTES} bytes")
    return data
