"""Self-managed TLS (decision 12, chart.md §7.3): the scheduler makes its own authority and certificate.

Both live in one Secret that all replicas share. Whoever comes first creates it; afterwards the leader
renews what has passed two thirds of its life and keeps the `caBundle` of the webhook configuration equal to
the Secret's `ca.crt`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from hami.kube.certificates import KeyPair, create_authority, issue, write_pair
from hami.kube.client import JSON_PATCH, Client
from hami.kube.errors import AlreadyExists, Conflict, KubeError, NotFound
from hami.kube.resources import MUTATING_WEBHOOKS, SECRETS
from hami.protocol.keys import COMPONENT_LABEL, COMPONENT_SCHEDULER
from hami.scheduler.edge.leader import Leadership

_CHECK_EVERY_S = 20.0
_RETRY_S = 2.0
_LOOK_S = 0.5
_AUTHORITY_DAYS, _SERVING_DAYS = 3650, 365
_RENEW_AT = 2 / 3

log = logging.getLogger(__name__)


class _Meta(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _Secret(msgspec.Struct):
    metadata: _Meta = msgspec.field(default_factory=_Meta)
    data: dict[str, str] | None = None


class _ClientConfig(msgspec.Struct, rename="camel"):
    ca_bundle: str = ""


class _Webhook(msgspec.Struct, rename="camel"):
    name: str
    client_config: _ClientConfig = msgspec.field(default_factory=_ClientConfig)


class _Configuration(msgspec.Struct):
    webhooks: list[_Webhook] | None = None


@dataclass(frozen=True, slots=True)
class Material:
    """What the Secret holds: the authorities to trust (newest first), the newest one's key, the serving
    pair."""

    bundle_pem: bytes
    authority: KeyPair
    serving: KeyPair

    def data(self) -> dict[str, str]:
        """As the Secret's ``data``."""
        parts = {
            "ca.crt": self.bundle_pem,
            "ca.key": self.authority.key_pem,
            "tls.crt": self.serving.certificate_pem,
            "tls.key": self.serving.key_pem,
        }
        return {key: base64.b64encode(value).decode() for key, value in parts.items()}


def new_material(hosts: Sequence[str], now: float, before: Material | None = None) -> Material:
    """A new authority and serving certificate; an authority in use before stays trusted."""
    authority = create_authority("hami-scheduler", now, _AUTHORITY_DAYS)
    bundle = authority.certificate_pem + (before.authority.certificate_pem if before else b"")
    return Material(bundle, authority, issue(authority, hosts[0], now, hosts=hosts, days=_SERVING_DAYS))


def renewed(material: Material, hosts: Sequence[str], now: float) -> Material:
    """The material to use at ``now``: itself, or with what is due, or no longer fits ``hosts``, made anew."""
    if _is_due(material.authority, now):
        return new_material(hosts, now, material)
    if _is_due(material.serving, now) or not _serves(material, hosts):
        pair = issue(material.authority, hosts[0], now, hosts=hosts, days=_SERVING_DAYS)
        return Material(material.bundle_pem, material.authority, pair)
    return material


def read_material(data: Mapping[str, str]) -> Material | None:
    """The material of a Secret, None when it is incomplete or broken."""
    try:
        parts = {
            key: base64.b64decode(data[key], validate=True)
            for key in ("ca.crt", "ca.key", "tls.crt", "tls.key")
        }
        bundle = x509.load_pem_x509_certificates(parts["ca.crt"])
        first = bundle[0].public_bytes(serialization.Encoding.PEM)
        material = Material(
            parts["ca.crt"], KeyPair(first, parts["ca.key"]), KeyPair(parts["tls.crt"], parts["tls.key"])
        )
        for pair in (material.authority, material.serving):
            key = serialization.load_pem_private_key(pair.key_pem, None)
            certificate = x509.load_pem_x509_certificate(pair.certificate_pem)
            if key.public_key() != certificate.public_key():
                return None
        x509.load_pem_x509_certificate(material.serving.certificate_pem).verify_directly_issued_by(bundle[0])
    except (KeyError, IndexError, ValueError, TypeError, binascii.Error, InvalidSignature):
        return None
    return material


class SelfManagedTls:
    """Keeps the Secret, the files the server loads, and the webhook configuration in agreement."""

    def __init__(
        self,
        client: Client,
        leadership: Leadership,
        secret: tuple[str, str],
        webhook_configuration: str,
        hosts: Sequence[str],
        folder: Path,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.certificate_path = folder / "tls.crt"
        self.key_path = folder / "tls.key"
        self._client = client
        self._leadership = leadership
        self._namespace, self._name = secret
        self._configuration = webhook_configuration
        self._hosts = tuple(hosts)
        self._clock = clock
        self._written: Material | None = None

    async def prepare(self) -> None:
        """Return once there is a certificate to serve with."""
        while True:
            try:
                await self._take(await self._current())
            except KubeError as error:
                log.warning("self_tls.failed", extra={"reason": str(error)})
                await asyncio.sleep(_RETRY_S)
            else:
                return

    async def run(self) -> None:
        """Keep everything in agreement until cancelled."""
        while True:
            try:
                await self.check()
            except KubeError as error:
                log.warning("self_tls.failed", extra={"reason": str(error)})
            await self._pause()

    async def _pause(self) -> None:
        """Until the next pass: at once when this replica begins to lead, as the bundle may wait for it."""
        led = self._leadership.is_leader()
        until = time.monotonic() + _CHECK_EVERY_S
        # a Lease also expires, which sets no event
        while time.monotonic() < until and (led or not self._leadership.is_leader()):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    async def check(self) -> None:
        """One pass; raises ``KubeError``."""
        material = await self._current()
        if self._leadership.is_leader():
            await self._keep_bundle(material.bundle_pem)
        await self._take(material)

    async def _current(self) -> Material:
        """The Secret's material; created when missing, renewed by the leader when due."""
        try:
            secret = await self._client.get(SECRETS, self._name, _Secret, namespace=self._namespace)
        except NotFound:
            return await self._create()
        material = read_material(secret.data or {})
        now = self._clock()
        wanted = new_material(self._hosts, now) if material is None else renewed(material, self._hosts, now)
        if wanted is material:
            return wanted
        if material is not None and not self._leadership.is_leader():
            return material
        if self._leadership.is_leader():
            await self._keep_bundle(wanted.bundle_pem)  # trusted before it is served
        try:
            await self._update(wanted, secret.metadata.resource_version)
        except Conflict:
            return await self._current()
        log.info("self_tls.renewed", extra={"secret": f"{self._namespace}/{self._name}"})
        return wanted

    async def _create(self) -> Material:
        material = new_material(self._hosts, self._clock())
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                "labels": {COMPONENT_LABEL: COMPONENT_SCHEDULER},
            },
            "type": "kubernetes.io/tls",
            "data": material.data(),
        }
        try:
            await self._client.create(SECRETS, secret, msgspec.Raw, namespace=self._namespace)
        except AlreadyExists:
            return await self._current()
        log.info("self_tls.created", extra={"secret": f"{self._namespace}/{self._name}"})
        return material

    async def _update(self, material: Material, resource_version: str) -> None:
        patch = {"metadata": {"resourceVersion": resource_version}, "data": material.data()}
        await self._client.patch(SECRETS, self._name, patch, msgspec.Raw, namespace=self._namespace)

    async def _take(self, material: Material) -> None:
        """Write the files that the server loads."""
        if self._written != material:
            await asyncio.to_thread(write_pair, material.serving, self.certificate_path, self.key_path)
            self._written = material

    async def _keep_bundle(self, bundle_pem: bytes) -> None:
        if not self._configuration:
            return
        try:
            found = await self._client.get(MUTATING_WEBHOOKS, self._configuration, _Configuration)
        except NotFound:
            return
        wanted = base64.b64encode(bundle_pem).decode()
        operations = []
        for position, webhook in enumerate(found.webhooks or []):
            if webhook.client_config.ca_bundle != wanted:
                path = f"/webhooks/{position}"
                operations.append({"op": "test", "path": f"{path}/name", "value": webhook.name})
                operations.append({"op": "add", "path": f"{path}/clientConfig/caBundle", "value": wanted})
        if operations:
            await self._client.patch(
                MUTATING_WEBHOOKS, self._configuration, operations, msgspec.Raw, content_type=JSON_PATCH
            )
            log.info("self_tls.bundle_patched", extra={"configuration": self._configuration})


def _is_due(pair: KeyPair, now: float) -> bool:
    certificate = x509.load_pem_x509_certificate(pair.certificate_pem)
    start, end = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    return now >= start + (end - start) * _RENEW_AT


def _serves(material: Material, hosts: Sequence[str]) -> bool:
    certificate = x509.load_pem_x509_certificate(material.serving.certificate_pem)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    served = set(names.get_values_for_type(x509.DNSName))
    served.update(str(address) for address in names.get_values_for_type(x509.IPAddress))
    return served.issuperset(hosts)
