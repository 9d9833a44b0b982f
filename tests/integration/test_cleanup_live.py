"""`hami cleanup` on an API server: what it lists, what it removes, when it refuses (operations.md J9)."""

from __future__ import annotations

import asyncio
import base64
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hami.cli.main import main
from hami.kube.certificates import create_authority, issue
from hami.local.api.apiserver import ApiServer
from hami.local.api.resources import DEPLOYMENTS, LEASES, MUTATING_WEBHOOKS, NODES, SECRETS
from hami.node.exact.cdi import document_file

LABELS = {"app.kubernetes.io/component": "hami-scheduler"}


def _certificate(host: str) -> dict[str, str]:
    """A Secret's data with a certificate for one server."""
    now = time.time()
    pair = issue(create_authority("ca", now), host, now, hosts=[host])
    return {"tls.crt": base64.b64encode(pair.certificate_pem).decode()}


async def _secret(api: ApiServer, name: str, **members: Any) -> None:
    labels = members.pop("labels", {})
    body = {"metadata": {"name": name, "labels": labels}, "data": {}, **members}
    await api.registry.create(SECRETS, "default", body)


async def _cleanup(kubeconfig: Path, *words: str, text: str = "") -> Result:
    arguments = ["cleanup", "--kubeconfig", str(kubeconfig), "--hami-namespace", "default", *words]
    return await asyncio.to_thread(lambda: CliRunner().invoke(main, arguments, input=text, prog_name="hami"))


async def _leave(api: ApiServer) -> None:
    notes = {"hami.io/node-nvidia-register": "[]", "hami.io/mutex.lock": "x", "other.io/kept": "1"}
    await api.registry.create(NODES, "", {"metadata": {"name": "n1", "annotations": notes}})
    await _secret(api, "hami-scheduler-tls", labels=LABELS)
    holder = {"holderIdentity": "hami-scheduler-7d9-x_5b1"}
    await api.registry.create(LEASES, "default", {"metadata": {"name": "hami-scheduler"}, "spec": holder})
    await api.registry.create(LEASES, "default", {"metadata": {"name": "somebody-else"}, "spec": {}})
    hook: dict[str, Any] = {
        "name": "vgpu.hami.io",
        "admissionReviewVersions": ["v1"],
        "clientConfig": {"url": "https://127.0.0.1:1/webhook"},
        "sideEffects": "None",
        "failurePolicy": "Ignore",
        "rules": [],
    }
    await api.registry.create(
        MUTATING_WEBHOOKS, "", {"metadata": {"name": "hami-webhook"}, "webhooks": [hook]}
    )


def _names(api: ApiServer) -> set[str]:
    """What is there of the kinds that were made."""
    kinds = ((SECRETS, "default"), (LEASES, "default"), (MUTATING_WEBHOOKS, ""))
    return {item["metadata"]["name"] for kind, space in kinds for item in api.store.list(kind, space)}


async def test_a_dry_run_lists_and_a_run_removes_what_is_hamis_and_nothing_else(
    embedded_api: ApiServer, kubeconfig: Path
) -> None:
    await _leave(embedded_api)
    listed = await _cleanup(kubeconfig, "--dry-run")
    assert listed.exit_code == 0, listed.output
    for line in (
        "MutatingWebhookConfiguration hami-webhook",
        "Secret default/hami-scheduler-tls",
        "Lease default/hami-scheduler",
        "Node n1: annotations hami.io/mutex.lock, hami.io/node-nvidia-register",
    ):
        assert line in listed.output
    assert "/usr/local/vgpu" in listed.output
    assert f"/var/run/cdi/{document_file('*')}" in listed.output
    before = embedded_api.store.get(NODES, "", "n1")
    assert "hami.io/mutex.lock" in before["metadata"]["annotations"]
    refused = await _cleanup(kubeconfig, text="n\n")
    assert refused.exit_code == 1
    assert embedded_api.store.get(NODES, "", "n1") == before
    done = await _cleanup(kubeconfig, text="y\n")
    assert done.exit_code == 0, done.output
    assert "removed 4" in done.output
    assert embedded_api.store.get(NODES, "", "n1")["metadata"]["annotations"] == {"other.io/kept": "1"}
    assert _names(embedded_api) == {"somebody-else"}
    again = await _cleanup(kubeconfig, "--yes")
    assert "nothing is left in the cluster" in again.output


async def test_nothing_is_removed_while_hami_is_installed(embedded_api: ApiServer, kubeconfig: Path) -> None:
    await _leave(embedded_api)
    spec = {
        "replicas": 0,
        "selector": {"matchLabels": LABELS},
        "template": {
            "metadata": {"labels": LABELS},
            "spec": {"containers": [{"name": "c", "image": "i", "command": ["true"]}]},
        },
    }
    await embedded_api.registry.create(
        DEPLOYMENTS, "default", {"metadata": {"name": "gpu-hami-scheduler", "labels": LABELS}, "spec": spec}
    )
    refused = await _cleanup(kubeconfig, "--yes")
    assert refused.exit_code == 1
    assert "still installed: Deployment default/gpu-hami-scheduler" in refused.output
    assert _names(embedded_api) >= {"hami-scheduler-tls", "hami-scheduler", "hami-webhook"}


async def test_the_secret_of_a_release_of_any_name_is_found(
    embedded_api: ApiServer, kubeconfig: Path
) -> None:
    for name in ("gpu-hami-scheduler-tls", "my-hami-scheduler-tls", "other-hami-scheduler-tls"):
        data = _certificate(f"{name.removesuffix('-tls')}.default.svc")
        await _secret(embedded_api, name, data=data)
    for release in ("gpu", "my-hami"):
        done = await _cleanup(kubeconfig, "--yes", "--release", release)
        assert "removed 1" in done.output
    assert _names(embedded_api) == {"other-hami-scheduler-tls"}


@pytest.mark.parametrize("data", [{}, {"tls.crt": "bm8gUEVN"}, _certificate("shop.default.svc")])
async def test_a_secret_of_that_name_that_hami_did_not_make_stays(
    embedded_api: ApiServer, kubeconfig: Path, data: dict[str, str]
) -> None:
    await _secret(embedded_api, "hami-scheduler-tls", data=data)
    done = await _cleanup(kubeconfig, "--yes")
    assert done.exit_code == 0, done.output
    assert "Secret default/hami-scheduler-tls (stays: not made by HAMi" in done.output
    assert "nothing is to be removed in the cluster" in done.output
    assert _names(embedded_api) == {"hami-scheduler-tls"}


@pytest.mark.parametrize(("holder", "kept"), [("", False), ("hami-scheduler-1_u", False), ("shop-1_u", True)])
async def test_a_lease_of_that_name_stays_if_others_held_it(
    embedded_api: ApiServer, kubeconfig: Path, holder: str, kept: bool
) -> None:
    spec = {"holderIdentity": holder} if holder else {}
    lease = {"metadata": {"name": "hami-scheduler"}, "spec": spec}
    await embedded_api.registry.create(LEASES, "default", lease)
    done = await _cleanup(kubeconfig, "--yes")
    assert done.exit_code == 0, done.output
    assert ("(stays: held by shop-1_u" in done.output) == kept
    assert bool(_names(embedded_api)) == kept


async def test_a_webhook_configuration_that_others_share_stays(
    embedded_api: ApiServer, kubeconfig: Path
) -> None:
    await _leave(embedded_api)
    found = embedded_api.store.get(MUTATING_WEBHOOKS, "", "hami-webhook")
    ours = found["webhooks"][0]
    body = {"metadata": {"name": "shared"}, "webhooks": [ours, {**ours, "name": "shop.example.com"}]}
    await embedded_api.registry.create(MUTATING_WEBHOOKS, "", body)
    done = await _cleanup(kubeconfig, "--yes")
    assert "shared (stays: webhooks of others are in it: shop.example.com)" in done.output
    assert _names(embedded_api) == {"shared", "somebody-else"}
