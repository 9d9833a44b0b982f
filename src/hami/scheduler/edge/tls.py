"""TLS for the extender and the webhook: the certificate is replaced while the server runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from tempfile import TemporaryDirectory

from hami.kube.certificates import KeyPair, write_pair
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
        self._loaded = self._read()
        self.context = _context(self._loaded)

    @property
    def not_after(self) -> float:
        """End of the certificate in use, Unix seconds."""
        return self._loaded.not_after

    def check(self) -> bool:
        """Load the files if they have changed and fit together; whether that happened. Blocking."""
        pair = self._changed()
        if pair is not None:
            self._use(pair)
        return pair is not None

    async def run(self) -> None:
        """Check every few seconds until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            pair = await asyncio.to_thread(self._changed)
            if pair is not None:
                self._use(pair)  # in the loop: handshakes must not meet a context that is being changed

    def _changed(self) -> KeyPair | None:
        """What the files hold, if it is new and usable; a pair that is only half written is not."""
        try:
            pair = self._read()
            if pair == self._loaded:
                return None
            _context(pair)
        except TlsError as error:
            log.warning("tls.reload_failed", extra={"reason": str(error)})
            return None
        return pair

    def _use(self, pair: KeyPair) -> None:
        _load(self.context, pair)
        self._loaded = pair
        log.info("tls.reloaded", extra={"file": str(self._certificate_path)})

    def _read(self) -> KeyPair:
        try:
            return KeyPair(self._certificate_path.read_bytes(), self._key_path.read_bytes())
        except OSError as error:
            raise TlsError(f"cannot read {error.filename}: {error.strerror}") from error


def _context(pair: KeyPair) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, pair)
    return context


def _load(context: ssl.SSLContext, pair: KeyPair) -> None:
    """From copies of our own, since the files may change while they are read one after the other."""
    with TemporaryDirectory(prefix="hami-tls-") as folder:
        certificate, key = Path(folder, "tls.crt"), Path(folder, "tls.key")
        write_pair(pair, certificate, key)
        try:
            context.load_cert_chain(certificate, key)
        except (ssl.SSLError, OSError) as error:
            raise TlsError(f"the TLS certificate and its key cannot be used: {error}") from error
