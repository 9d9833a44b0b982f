"""TLS for the extender and the webhook: the certificate is replaced while the server runs."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from pathlib import Path

from hami.protocol.errors import HamiError

_CHECK_EVERY_S = 5.0

log = logging.getLogger(__name__)


class TlsError(HamiError):
    """The certificate or its key cannot be used."""


class ReloadingTls:
    """A server context whose certificate follows two files. New connections get the newest pair that fits
    together."""

    def __init__(self, certificate_path: Path, key_path: Path) -> None:
        self._certificate_path = certificate_path
        self._key_path = key_path
        self._loaded = self._digest()
        self.context = self._new_context()
        self.reloads = 0

    def check(self) -> bool:
        """Load the files if they have changed and fit together; whether that happened. Blocking."""
        try:
            digest = self._digest()
            if digest == self._loaded:
                return False
            self._new_context()  # a pair that is only half written fails here and changes nothing
            self.context.load_cert_chain(self._certificate_path, self._key_path)
        except (TlsError, ssl.SSLError, OSError) as error:
            log.warning("tls.reload_failed", extra={"reason": str(error)})
            return False
        self._loaded = digest
        self.reloads += 1
        log.info("tls.reloaded", extra={"file": str(self._certificate_path)})
        return True

    async def run(self) -> None:
        """Check every few seconds until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            await asyncio.to_thread(self.check)

    def _new_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._certificate_path, self._key_path)
        except (ssl.SSLError, OSError) as error:
            raise TlsError(f"cannot use {self._certificate_path} with {self._key_path}: {error}") from error
        return context

    def _digest(self) -> bytes:
        try:
            certificate, key = self._certificate_path.read_bytes(), self._key_path.read_bytes()
        except OSError as error:
            raise TlsError(f"cannot read {error.filename}: {error.strerror}") from error
        return hashlib.sha256(certificate + b"\0" + key).digest()
