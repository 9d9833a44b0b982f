"""Leader and follower, pending pods, TLS, and the webhook over HTTPS from the API server."""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from hami.kube.certificates import KeyPair, create_authority, issue, write_pair

LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"


async def write_lease(world: Any, holder: str, transitions: int, *, create: bool = False) -> None:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 60, "leaseTransitions": transitions}
    if create:
        lease = {"metadata": {"name": "hami-scheduler", "namespace": "kube-system"}, "spec": spec}
        await world.request("POST", LEASES, lease)
    else:
        path = f"{LEASES}/hami-scheduler"
        await world.request("PATCH", path, {"spec": spec}, "application/merge-patch+json")


async def test_a_follower_answers_the_webhook_and_writes_nothing(start: Any) -> None:
    async with start(lease=("kube-system", "hami-scheduler")) as world:
        await write_lease(world, "other_1", 1, create=True)
        await world.add_node("n1")
        pod = await world.add_pod("p")
        review = {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "request": {"uid": "r1", "operation": "CREATE", "namespace": "default", "object": pod},
        }
        world.api.seen.clear()
        answer = await world.call("webhook", review)
        assert answer["response"]["allowed"] is True
        waiting = asyncio.create_task(world.filter(pod, "n1"))
        await asyncio.sleep(0.1)
        assert not waiting.done(), "the gate is closed for a follower"
        assert world.writes(events=True) == []
        await write_lease(world, "host_1", 2)
        assert (await waiting)["NodeNames"] == ["n1"]


async def test_losing_leadership_drops_reservations_and_stops_binding(start: Any) -> None:
    async with start(lease=("kube-system", "hami-scheduler")) as world:
        await write_lease(world, "host_1", 1, create=True)
        await world.until(lambda: world.scheduler.gate.is_open)
        await world.add_node("n1")
        pod = await world.add_pod("p")
        await world.filter(pod, "n1")
        await write_lease(world, "host-2_1", 2)
        await world.until(lambda: not world.scheduler.gate.is_open)
        assert world.used_mib("n1") == [0]
        assert await world.bind(pod, "n1") == "no reservation for pod default/p, it will be scheduled again"


async def test_leadership_lost_between_bind_and_post_sends_no_binding(start: Any) -> None:
    async with start(lease=("kube-system", "hami-scheduler")) as world:
        await write_lease(world, "host_1", 1, create=True)
        await world.until(lambda: world.scheduler.gate.is_open)
        await world.add_node("n1")
        pod = await world.add_pod("p")
        await world.filter(pod, "n1")
        leadership = world.scheduler.leadership
        locks = world.scheduler.binder._locks.node_locks
        acquire = locks.acquire

        async def acquire_then_lose(*arguments: Any) -> Any:
            text = await acquire(*arguments)
            leadership._lease.forget()
            return text

        locks.acquire = acquire_then_lose
        world.api.seen.clear()
        assert await world.bind(pod, "n1") == "not the leader"
        assert not any(path.endswith("/binding") for _, path in world.api.seen)
        node = await world.request("GET", "/api/v1/nodes/n1")
        assert "hami.io/mutex.lock" not in node["metadata"]["annotations"]
        assert world.used_mib("n1") == [0]


async def test_leadership_lost_before_the_lock_is_written_writes_none(start: Any) -> None:
    """A pod may wait for its turn longer than a Lease lasts."""
    async with start(lease=("kube-system", "hami-scheduler")) as world:
        await write_lease(world, "host_1", 1, create=True)
        await world.until(lambda: world.scheduler.gate.is_open)
        await world.add_node("n1")
        pod = await world.add_pod("p")
        await world.filter(pod, "n1")

        async def lose(request: web.Request) -> None:
            if (request.method, request.path) == ("GET", "/api/v1/nodes/n1"):
                world.scheduler.leadership._lease.forget()

        world.api.intercept = lose
        await world.scheduler.recorder.flush(60)
        world.api.seen.clear()
        assert await world.bind(pod, "n1") == "not the leader"
        await world.scheduler.recorder.flush(60)
        assert world.writes(events=True) == []
        assert world.used_mib("n1") == [0]


async def test_a_binding_without_an_answer_is_not_sent_again_once_another_replica_has_led(start: Any) -> None:
    """The other one may have given the cards away."""
    async with start(lease=("kube-system", "hami-scheduler")) as world:
        await write_lease(world, "host_1", 1, create=True)
        await world.until(lambda: world.scheduler.gate.is_open)
        await world.add_node("n1")
        pod = await world.add_pod("p", mem=8000)
        await world.filter(pod, "n1")
        binder, sent, looks = world.scheduler.binder, list[str](), list[str]()
        binder._settings = type(binder._settings)(late_s=0.5)

        async def answer(request: web.Request) -> web.StreamResponse | None:
            if request.path.endswith("/pods/p/binding"):
                sent.append(request.path)
                if len(sent) == 1:
                    term = world.scheduler.leadership.term
                    await write_lease(world, "other_1", 2)
                    await write_lease(world, "host_1", 3)
                    await world.until(lambda: world.scheduler.leadership.term == term + 2)
                    return web.json_response({"message": "lost"}, status=504)
            elif (request.method, request.path) == ("GET", "/api/v1/namespaces/default/pods/p"):
                looks.append(request.path)
            return None

        world.api.intercept = answer
        assert await world.bind(pod, "n1") == "not the leader"
        assert len(sent) == 1
        assert len(looks) > 1, "it may have landed late"
        assert world.used_mib("n1") == [0]
        node = await world.request("GET", "/api/v1/nodes/n1")
        assert "hami.io/mutex.lock" not in node["metadata"]["annotations"]


async def test_a_new_leader_answers_only_after_its_watch_passed_a_fresh_read(start: Any) -> None:
    async with start(lease=("kube-system", "hami-scheduler")) as world:
        await write_lease(world, "other_1", 1, create=True)
        await world.add_node("n1")
        lists = world.scheduler.informers.pods.counters.lists
        await write_lease(world, "host_1", 2)
        await world.until(lambda: world.scheduler.gate.is_open)
        reads = [path for method, path in world.api.seen if method == "GET" and "pods?limit=1" in path]
        assert reads, "a quorum read was made after leadership was gained"
        assert world.scheduler.informers.pods.counters.lists >= lists


async def test_the_leader_labels_the_scheduler_pods(start: Any) -> None:
    settings = {
        "lease": ("kube-system", "hami-scheduler"),
        "pod_name": "me",
        "pod_namespace": "default",
    }
    async with start() as first:
        for name in ("me", "you"):
            await first.add_pod(name, labels={"app.kubernetes.io/component": "hami-scheduler"})
        await write_lease(first, "host_1", 1, create=True)
    async with start(**settings) as world:
        await world.until(lambda: world.scheduler.gate.is_open)
        roles: dict[str, str] = {}
        while len(roles) < 2:
            for name in ("me", "you"):
                labels = (await world.pod(name))["metadata"]["labels"]
                if "hami.io/scheduler-role" in labels:
                    roles[name] = labels["hami.io/scheduler-role"]
            await asyncio.sleep(0.05)
        assert roles == {"me": "leader", "you": "follower"}


async def test_a_rejected_pod_that_fits_now_is_touched_once(world: Any) -> None:
    await world.add_node("n1")
    first, second = await world.add_pod("first", mem=8000), await world.add_pod("second", mem=8000)
    never = await world.add_pod("never", mem=99999)
    await world.filter(first, "n1")
    assert (await world.filter(second, "n1"))["NodeNames"] is None
    assert (await world.filter(never, "n1"))["NodeNames"] is None
    pending = world.scheduler.pending
    for waiting in pending._pods.values():
        waiting.filtered_at -= 60
    await world.request("DELETE", "/api/v1/namespaces/default/pods/first", {"gracePeriodSeconds": 0})
    await world.until(lambda: pending.touches > 0)
    await pending.touch_fitting()
    assert pending.touches == 1
    found: dict[str, str] = {}
    while "hami.io/requeue" not in found:
        found = (await world.pod("second"))["metadata"].get("annotations", {})
    assert "hami.io/requeue" not in (await world.pod("never"))["metadata"].get("annotations", {})
    assert (await world.filter(second, "n1"))["NodeNames"] == ["n1"]
    assert len(pending) == 1


def certificate(authority: KeyPair, folder: Path) -> tuple[Path, Path]:
    paths = folder / "tls.crt", folder / "tls.key"
    write_pair(issue(authority, "webhook", time.time(), hosts=["127.0.0.1"]), *paths)
    return paths


@pytest.mark.parametrize(
    ("named", "stored_name"),
    [("default-scheduler", "hami-scheduler"), pytest.param("volcano", "volcano", id="61")],
)
async def test_the_api_server_calls_the_webhook_over_https(
    start: Any, tmp_path: Path, named: str, stored_name: str
) -> None:
    authority = create_authority("webhook authority", time.time())
    cert_file, key_file = certificate(authority, tmp_path)
    async with start(cert_file=cert_file, key_file=key_file) as world:
        configuration = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": "hami-webhook"},
            "webhooks": [
                {
                    "name": "vgpu.hami.io",
                    "admissionReviewVersions": ["v1"],
                    "clientConfig": {
                        "url": f"https://127.0.0.1:{world.scheduler.ports['extender']}/webhook",
                        "caBundle": base64.b64encode(authority.certificate_pem).decode(),
                    },
                    "failurePolicy": "Fail",
                    "sideEffects": "None",
                    "rules": [
                        {
                            "apiGroups": [""],
                            "apiVersions": ["v1"],
                            "operations": ["CREATE"],
                            "resources": ["pods"],
                        }
                    ],
                }
            ],
        }
        path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
        await world.request("POST", path, configuration)
        pod = {
            "metadata": {
                "name": "p",
                "namespace": "default",
                "annotations": {"hami.io/vgpu-devices-allocated": "forged", "mine": "1"},
            },
            "spec": {
                "schedulerName": named,
                "containers": [{"name": "a", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
            },
        }
        stored = await world.request("POST", "/api/v1/namespaces/default/pods", pod)
        assert stored["spec"]["schedulerName"] == stored_name
        assert stored["metadata"]["annotations"] == {"mine": "1"}


async def test_a_new_certificate_is_served_without_a_restart(start: Any, tmp_path: Path) -> None:
    old, new = create_authority("old", time.time()), create_authority("new", time.time())
    cert_file, key_file = certificate(old, tmp_path)

    async def is_trusted(world: Any, authority: KeyPair) -> bool:
        context = ssl.create_default_context(cadata=authority.certificate_pem.decode())
        url = f"https://127.0.0.1:{world.scheduler.ports['extender']}/healthz"
        async with aiohttp.ClientSession() as session:
            try:
                async with session.get(url, ssl=context) as response:
                    return bool(response.status == 200)
            except aiohttp.ClientConnectorError:
                return False

    async with start(cert_file=cert_file, key_file=key_file) as world:
        assert await is_trusted(world, old)
        assert world.scheduler.tls is not None
        key_file.write_bytes(b"half written")
        assert world.scheduler.tls.check() is False
        assert await is_trusted(world, old), "a broken pair changes nothing"
        certificate(new, tmp_path)
        assert world.scheduler.tls.check() is True
        assert await is_trusted(world, new)
        assert not await is_trusted(world, old)
