"""Self-managed TLS against the embedded API server (decision 12; chart.md case 36)."""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from cryptography import x509

from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.local.api.apiserver import ApiServer
from hami.scheduler.edge.leader import Leadership
from hami.scheduler.edge.self_tls import SelfManagedTls, new_material, read_material, renewed

DAY = 86400.0
HOSTS = ("hami-scheduler.kube-system.svc", "127.0.0.1")
SECRET = "/api/v1/namespaces/kube-system/secrets/hami-scheduler-tls"
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


def test_material_survives_its_secret_and_broken_secrets_are_none() -> None:
    material = new_material(HOSTS, time.time())
    data = material.data()
    assert read_material(data) == material
    other = new_material(HOSTS, time.time()).data()
    for broken in (
        {},
        {**data, "tls.key": other["tls.key"]},
        {**data, "tls.crt": other["tls.crt"], "tls.key": other["tls.key"]},
        {**data, "ca.crt": "!"},
        {**data, "ca.key": base64.b64encode(b"no key").decode()},
    ):
        assert read_material(broken) is None


def test_certificates_are_renewed_at_two_thirds_of_their_life() -> None:
    now = time.time()
    material = new_material(HOSTS, now)
    assert renewed(material, HOSTS, now + 240 * DAY) is material
    later = renewed(material, HOSTS, now + 245 * DAY)
    assert later.serving != material.serving
    assert (later.authority, later.bundle_pem) == (material.authority, material.bundle_pem)
    aged = renewed(material, HOSTS, now + 2500 * DAY)
    assert aged.authority != material.authority
    assert len(x509.load_pem_x509_certificates(aged.bundle_pem)) == 2, "the old authority stays trusted"
    assert renewed(material, (*HOSTS, "new.example"), now).serving != material.serving


@pytest.fixture
def manage(embedded_api: ApiServer, tmp_path: Path) -> Callable[..., SelfManagedTls]:
    def make(
        client: Client, *, leader: bool = True, clock: Callable[[], float] = time.time
    ) -> SelfManagedTls:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        leadership = Leadership("h", electing=not leader)
        secret = ("kube-system", "hami-scheduler-tls")
        return SelfManagedTls(client, leadership, secret, "hami-webhook", HOSTS, folder, clock=clock)

    return make


async def configure(client: Client) -> None:
    webhook = {
        "name": "vgpu.hami.io",
        "admissionReviewVersions": ["v1"],
        "clientConfig": {"url": "https://127.0.0.1:1/webhook"},
        "sideEffects": "None",
    }
    body = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "hami-webhook"},
        "webhooks": [webhook],
    }
    await client.request("POST", CONFIGURATION, body=msgspec.json.encode(body))


async def bundle(client: Client) -> bytes:
    found: dict[str, Any] = await client.json("GET", f"{CONFIGURATION}/hami-webhook", dict)
    return base64.b64decode(found["webhooks"][0]["clientConfig"].get("caBundle", ""))


async def secret_data(client: Client) -> dict[str, str]:
    found: dict[str, Any] = await client.json("GET", SECRET, dict)
    data: dict[str, str] = found["data"]
    return data


async def test_the_secret_is_made_and_the_bundle_kept_right(
    embedded_api: ApiServer, manage: Callable[..., SelfManagedTls]
) -> None:
    async with Client(ClientConfig(embedded_api.url), Limits(qps=0)) as client:
        await configure(client)
        tls = manage(client)
        await tls.prepare()
        await tls.check()
        data = await secret_data(client)
        assert base64.b64decode(data["tls.crt"]) == tls.certificate_path.read_bytes()
        assert await bundle(client) == base64.b64decode(data["ca.crt"])
        writes = [path for method, path in embedded_api.seen if method not in ("GET",)]
        await tls.check()
        assert [path for method, path in embedded_api.seen if method not in ("GET",)] == writes, (
            "nothing to do"
        )
        await client.request("DELETE", SECRET)
        await tls.check()
        assert await bundle(client) == base64.b64decode((await secret_data(client))["ca.crt"])


async def test_two_replicas_share_one_certificate_and_only_the_leader_renews(
    embedded_api: ApiServer, manage: Callable[..., SelfManagedTls]
) -> None:
    now = [time.time()]
    async with Client(ClientConfig(embedded_api.url), Limits(qps=0)) as client:
        await configure(client)
        leader = manage(client, clock=lambda: now[0])
        follower = manage(client, leader=False, clock=lambda: now[0])
        await leader.prepare()
        await follower.prepare()
        first = leader.certificate_path.read_bytes()
        assert follower.certificate_path.read_bytes() == first
        now[0] += 300 * DAY
        await follower.check()
        assert follower.certificate_path.read_bytes() == first
        await leader.check()
        await follower.check()
        assert leader.certificate_path.read_bytes() != first
        assert follower.certificate_path.read_bytes() == leader.certificate_path.read_bytes()


async def test_the_scheduler_serves_https_with_its_own_certificate(start: Any) -> None:
    secret = ("kube-system", "hami-scheduler-tls")
    async with start(tls_secret=secret, tls_hosts=HOSTS, webhook_configuration="hami-webhook") as world:
        authority = base64.b64decode((await secret_data(world.scheduler.client))["ca.crt"]).decode()
        url = f"https://127.0.0.1:{world.scheduler.ports['extender']}/healthz"
        context = ssl.create_default_context(cadata=authority)
        async with aiohttp.ClientSession() as session, session.get(url, ssl=context) as response:
            assert response.status == 200


async def test_a_new_leader_writes_the_bundle_at_once(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hami.scheduler.edge.self_tls._CHECK_EVERY_S", 3600.0)
    secret = ("kube-system", "hami-scheduler-tls")
    lease = {
        "metadata": {"name": "hami-scheduler", "namespace": "kube-system"},
        "spec": {"holderIdentity": "host_1", "leaseDurationSeconds": 600, "leaseTransitions": 1},
    }
    async with start(
        lease=("kube-system", "hami-scheduler"),
        tls_secret=secret,
        tls_hosts=HOSTS,
        webhook_configuration="hami-webhook",
    ) as world:
        await configure(world.scheduler.client)
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
        await world.request("POST", leases, lease)
        while not await bundle(world.scheduler.client):  # noqa: ASYNC110 -- a time-out ends a wait in vain
            await asyncio.sleep(0.05)
