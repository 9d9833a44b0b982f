"""Hollow nodes: registered cards and renewed leases with no kubelet behind them, for scheduling at scale.

usage: hollow.py --nodes 50 --cards 8 [--mode exact|lock]      $KUBECONFIG names the cluster

Runs until SIGTERM or SIGINT, then removes its nodes. A pod bound to a hollow node stays Pending. With `--mode
lock` the nodes do what a device plugin does last: they release the node lock of a pod that was bound.
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
from hami.kube.resources import LEASES, NODES, PODS
from hami.protocol.inventory import DeviceInfo, encode_json
from hami.protocol.keys import ALLOCATION_MODE, BIND_PHASE, NODE_LOCK, NVIDIA, VENDOR_KEYS

LEASE_NAMESPACE = "kube-node-lease"
RENEW_S = 10.0
SLOTS, MEMORY_MIB = 10, 40960
LABEL = "hami.io/hollow"


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
        """Renew leases, and release locks in mode ``lock``, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew())
            if self._mode == "lock":
                tasks.create_task(self._release())

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

    async def _release(self) -> None:
        while True:
            with contextlib.suppress(KubeError):
                await self._release_once()
            await asyncio.sleep(0.2)

    async def _release_once(self) -> None:
        """What the device plugin does after its last answer: the pod's phase, then the node's lock."""
        nodes = await self._client.json("GET", NODES.path(), dict, query={"labelSelector": LABEL})
        for node in nodes["items"]:
            name, notes = node["metadata"]["name"], node["metadata"].get("annotations", {})
            if NODE_LOCK not in notes:
                continue
            pods = await self._client.json(
                "GET", PODS.path(), dict, query={"fieldSelector": f"spec.nodeName={name}"}
            )
            bound = [
                pod["metadata"]
                for pod in pods["items"]
                if pod["metadata"].get("annotations", {}).get(BIND_PHASE) == "allocating"
            ]
            for pod in bound:
                phase = {"metadata": {"annotations": {BIND_PHASE: "success"}}}
                await self._client.patch(PODS, pod["name"], phase, msgspec.Raw, namespace=pod["namespace"])
            if bound:
                free = {"metadata": {"annotations": {NODE_LOCK: None}}}
                await self._client.patch(NODES, name, free, msgspec.Raw)


async def run(count: int, cards: int, mode: str) -> None:
    """Keep the nodes until a signal comes."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with Client(load_config(), Limits(qps=0)) as client:
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
    parser.add_argument("--mode", choices=("exact", "lock"), default="exact")
    arguments = parser.parse_args()
    if not (1 <= arguments.nodes <= 5000 and 1 <= arguments.cards <= 64):
        sys.exit("hollow: between 1 and 5000 nodes and between 1 and 64 cards")
    asyncio.run(run(arguments.nodes, arguments.cards, arguments.mode))


if __name__ == "__main__":
    main()
