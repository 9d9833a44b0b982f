"""Hollow nodes: registered cards and renewed leases with no kubelet behind them, for scheduling at scale.

usage: hollow.py --nodes 50 --cards 8 [--mode exact|lock]      $KUBECONFIG names the cluster

Runs until SIGTERM or SIGINT, then removes its nodes. A pod bound to a hollow node stays Pending. The nodes
write what a device plugin writes last: the phase of a bound pod and, in mode `lock`, the release of its lock.
The installation must let them: `allocationPolicy.allowedUsers={admin}`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

from hami.kube.client import Client, Limits
from hami.kube.config import load_config
from hami.kube.errors import AlreadyExists, KubeError, NotFound
from hami.kube.informer import Informer
from hami.kube.operations import Selection
from hami.kube.resources import LEASES, NODES, PODS
from hami.protocol.inventory import DeviceInfo, encode_json
from hami.protocol.keys import (
    ALLOCATION_MODE,
    ASSIGNED_NODE_LABEL,
    BIND_ALLOCATING,
    BIND_PHASE,
    BIND_SUCCESS,
    MODE_EXACT,
    MODE_LOCK,
    NODE_LOCK,
    NVIDIA,
    VENDOR_KEYS,
)
from hami.protocol.views import Pod

LEASE_NAMESPACE = "kube-node-lease"
RENEW_S = 10.0
SLOTS, MEMORY_MIB = 10, 40960
LABEL = "hami.io/hollow"
AT_ONCE = 10
_OF_POD = msgspec.json.Decoder(Pod)


class Hollow:
    """``count`` nodes ``hollow-0…`` with ``cards`` simulated cards each."""

    def __init__(self, client: Client, count: int, cards: int, mode: str) -> None:
        self._client = client
        self._names = [f"hollow-{number}" for number in range(count)]
        self._cards = cards
        self._mode = mode

    async def start(self) -> None:
        """Create the nodes, or bring those that are there already up to date."""
        await self._each(self._create)

    async def serve(self) -> None:
        """Renew leases and answer bound pods, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew())
            tasks.create_task(self._answer())

    async def stop(self) -> None:
        """Remove the nodes and their leases."""
        await self._each(self._remove)

    async def _each(self, action: Any) -> None:
        limit = asyncio.Semaphore(10)

        async def one(name: str) -> None:
            async with limit:
                await action(name)

        await asyncio.gather(*(one(name) for name in self._names))

    async def _create(self, name: str) -> None:
        devices = [
            DeviceInfo(
                id=f"GPU-{name}-{index}",
                index=index,
                count=SLOTS,
                devmem=MEMORY_MIB,
                devcore=100,
                type="NVIDIA-NVIDIA A100-SXM4-40GB",
                health=True,
                mode="hami-core",
            )
            for index in range(self._cards)
        ]
        metadata = {
            "name": name,
            "labels": {LABEL: "true", "gpu": "hollow", "kubernetes.io/hostname": name},
            "annotations": {VENDOR_KEYS[NVIDIA].register: encode_json(devices), ALLOCATION_MODE: self._mode},
        }
        with contextlib.suppress(AlreadyExists):
            await self._client.create(
                NODES, {"apiVersion": "v1", "kind": "Node", "metadata": metadata}, msgspec.Raw
            )
        await self._client.patch(NODES, name, {"metadata": metadata}, msgspec.Raw)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        resources = {"cpu": "64", "memory": "512Gi", "pods": "500", "ephemeral-storage": "1Ti"}
        resources["nvidia.com/gpu"] = str(self._cards * SLOTS)
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Hollow",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
        status = {"capacity": resources, "allocatable": resources, "conditions": [ready]}
        await self._client.patch(NODES, name, {"status": status}, msgspec.Raw, subresource="status")
        await self._renew_one(name)

    async def _remove(self, name: str) -> None:
        for resource, namespace in ((NODES, ""), (LEASES, LEASE_NAMESPACE)):
            with contextlib.suppress(NotFound):
                await self._client.delete(resource, name, namespace=namespace)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(KubeError):
                await self._each(self._renew_one)

    async def _renew_one(self, name: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        lease = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now}
        try:
            await self._client.patch(LEASES, name, {"spec": lease}, msgspec.Raw, namespace=LEASE_NAMESPACE)
        except NotFound:
            body = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": {"name": name}}
            await self._client.create(LEASES, body | {"spec": lease}, msgspec.Raw, namespace=LEASE_NAMESPACE)

    async def _answer(self) -> None:
        """What the device plugin does after its last answer: the pod's phase, then the node's lock."""
        bound = _Bound(set(self._names))
        watch = Informer(
            self._client, PODS, _OF_POD.decode, bound, Selection(label_selector=ASSIGNED_NODE_LABEL)
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch.run())
            for _ in range(AT_ONCE):
                tasks.create_task(self._serve(bound.waiting))

    async def _serve(self, waiting: asyncio.Queue[Pod]) -> None:
        phase = {"metadata": {"annotations": {BIND_PHASE: BIND_SUCCESS}}}
        free = {"metadata": {"annotations": {NODE_LOCK: None}}}
        while True:
            pod = await waiting.get()
            try:
                await self._client.patch(PODS, pod.name, phase, msgspec.Raw, namespace=pod.namespace)
                if self._mode == MODE_LOCK:
                    await self._client.patch(NODES, pod.node_name, free, msgspec.Raw)
            except KubeError as error:
                print(f"hollow: pod {pod.namespace}/{pod.name}: {error}", file=sys.stderr, flush=True)


class _Bound:
    """Pods that are bound to one of our nodes and were not answered yet."""

    def __init__(self, names: set[str]) -> None:
        self.waiting: asyncio.Queue[Pod] = asyncio.Queue()
        self._names = names
        self._seen: set[str] = set()

    def on_add(self, pod: Pod, /) -> None:
        is_ours = pod.node_name in self._names and pod.annotations.get(BIND_PHASE) == BIND_ALLOCATING
        if is_ours and pod.uid not in self._seen:
            self._seen.add(pod.uid)
            self.waiting.put_nowait(pod)

    def on_update(self, _: Pod, pod: Pod, /) -> None:
        self.on_add(pod)

    def on_delete(self, pod: Pod, /) -> None:
        self._seen.discard(pod.uid)


async def run(count: int, cards: int, mode: str) -> None:
    """Keep the nodes until a signal comes."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with Client(load_config(), Limits(qps=0), user_agent="hami-hollow") as client:
        hollow = Hollow(client, count, cards, mode)
        try:
            await hollow.start()
            print(f"hollow: {count} nodes with {cards} cards each are ready", flush=True)
            serving = asyncio.create_task(hollow.serve())
            waiting = asyncio.create_task(stopped.wait())
            await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
            for task in (serving, waiting):
                task.cancel()
            failures = await asyncio.gather(serving, waiting, return_exceptions=True)
        finally:
            await hollow.stop()
    for failure in failures:
        if isinstance(failure, Exception):
            raise failure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--cards", type=int, default=8)
    parser.add_argument("--mode", choices=(MODE_EXACT, MODE_LOCK), default=MODE_EXACT)
    arguments = parser.parse_args()
    if not (1 <= arguments.nodes <= 5000 and 1 <= arguments.cards <= 64):
        sys.exit("hollow: between 1 and 5000 nodes and between 1 and 64 cards")
    asyncio.run(run(arguments.nodes, arguments.cards, arguments.mode))


if __name__ == "__main__":
    main()
