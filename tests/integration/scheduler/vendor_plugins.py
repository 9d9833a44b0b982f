"""Stand-ins of vendors' node plugins that do what the vendors' documents say of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hami.protocol.allocation import decode_allocation, encode_allocation

MERGE = "application/merge-patch+json"
LOCK, DSMLU = "hami.io/mutex.lock", "cambricon.com/dsmlu.lock"


class PluginError(Exception):
    """kubelet's Allocate fails with this text."""


@dataclass
class Plugin:
    """A HAMi plugin: reports, finds its pod by the lock, serves one container a call, says success."""

    word: str
    limits: dict[str, str]
    allocated: str  # the key with the record
    work: str = ""  # the key with what is left to do
    register: str = ""
    handshake: str = ""
    cards: str = ""  # register text
    capacity: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)  # further annotations of its node
    says: dict[str, str] = field(default_factory=dict)  # annotations of its pods
    slots: int = 1  # that a pod takes, over all its cards
    calls_per_pod: int = 1
    obeys: bool = True  # gives out the devices that the scheduler chose
    node: str = ""
    served: set[str] = field(default_factory=set)  # names of pods

    async def start(self, world: Any, node: str) -> None:
        """The node as kubelet and the plugin show it."""
        self.node = node
        annotations = dict(self.marks)
        if self.register:
            annotations[self.register] = self.cards
        if self.handshake:
            annotations.setdefault(self.handshake, "Reported 2026-08-22 10:00:00.123 +0800 CST m=+12")
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": node, "annotations": annotations, "labels": self.labels},
            "status": {"capacity": self.capacity, "allocatable": self.capacity},
        }
        await world.request("POST", "/api/v1/nodes", body)
        await world.until(lambda: node in world.scheduler.state.node_names())

    async def allocate(self, world: Any) -> list[str]:
        """kubelet asks for the devices of one container: their ids."""
        pod = await self.find(world)
        text = pod["metadata"]["annotations"][self.work]
        left = [slot for slot in decode_allocation(text) if slot]  # these plugins forget empty entries
        if not left:
            raise PluginError("nothing left to allocate")
        await self.annotate(world, pod, {self.work: encode_allocation(left[1:]) if left[1:] else ";"})
        if not left[1:]:
            await self.finish(world, pod)
        return [device.uuid for device in left[0]]

    async def find(self, world: Any) -> Any:
        """The pod that holds the node's lock."""
        node = await world.request("GET", f"/api/v1/nodes/{self.node}")
        held = node["metadata"]["annotations"].get(LOCK, "")
        if not held:
            raise PluginError("the node is not locked")
        _, namespace, name = held.split(",")
        assert namespace == "default"
        return await world.pod(name)

    async def finish(self, world: Any, pod: Any) -> None:
        await self.annotate(world, pod, {"hami.io/bind-phase": "success"})
        await self.unlock(world)

    async def fail(self, world: Any) -> None:
        """kubelet asked for another number of devices than there are in the record."""
        pod = await self.find(world)
        await self.annotate(world, pod, {"hami.io/bind-phase": "failed"})
        await self.unlock(world)

    async def annotate(self, world: Any, pod: Any, annotations: Mapping[str, str]) -> None:
        path = f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}"
        await world.request("PATCH", path, {"metadata": {"annotations": annotations}}, MERGE)

    async def unlock(self, world: Any, key: str = LOCK) -> None:
        path = f"/api/v1/nodes/{self.node}"
        await world.request("PATCH", path, {"metadata": {"annotations": {key: None}}}, MERGE)

    async def pending(self, world: Any) -> list[Any]:
        """Pods of the node that have not been served."""
        found = (await world.request("GET", "/api/v1/namespaces/default/pods"))["items"]
        return [one for one in found if one["spec"].get("nodeName") == self.node]


class BirenPlugin(Plugin):
    """Reads and uses up the allocated key, and never says success."""

    async def allocate(self, world: Any) -> list[str]:
        pod = await self.find(world)
        left = [slot for slot in decode_allocation(pod["metadata"]["annotations"][self.allocated]) if slot]
        await self.annotate(world, pod, {self.allocated: encode_allocation(left[1:]) if left[1:] else ";"})
        if not left[1:]:
            await self.unlock(world)
        return [device.uuid for device in left[0]]


class AmdPlugin(Plugin):
    """Commits ranges of compute units, only with the pod's lock in hand; done after one container."""

    async def allocate(self, world: Any) -> list[str]:
        pod = await self.find(world)
        (slot,) = [slot for slot in decode_allocation(pod["metadata"]["annotations"][self.work]) if slot]
        units = json.dumps({one.uuid: f"0-{one.usedcores - 1}" for one in slot})
        await self.annotate(world, pod, {"hami.io/amd-cu-allocated": units, self.work: ";"})
        await self.finish(world, pod)
        return [device.uuid for device in slot]


class CambriconPlugin(Plugin):
    """Finds the one pod whose flag (in its own spelling) is false; two calls, one for each resource."""

    calls = 0

    async def allocate(self, world: Any) -> list[str]:
        flag = "CAMBRICON_DSMLU_ASSIGHED"
        waiting = [
            pod
            for pod in await self.pending(world)
            if pod["metadata"]["annotations"].get(flag) == "false" and self.asks(pod)
        ]
        if len(waiting) != 1:
            raise PluginError(f"{len(waiting)} candidates")
        profile = waiting[0]["metadata"]["annotations"]["CAMBRICON_DSMLU_PROFILE"]
        slot, _, _ = (int(part) for part in profile.split("_"))
        self.calls += 1
        if self.calls % 2 == 0:
            done = {flag: "true", "CAMBRICON_DSMLU_PROFILE_INSTANCE": f"{profile}_1_2_3"}
            await self.annotate(world, waiting[0], done)
            await self.unlock(world, DSMLU)
        return [f"{self.node}-cambricon-mlu-{slot}"]

    def asks(self, pod: Any) -> bool:
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        return any(".smlu.v" in name for name in limits)


class MthreadsPlugin(Plugin):
    """Takes the pod with the oldest predicate time on its node."""

    async def allocate(self, world: Any) -> list[str]:
        waiting = [pod for pod in await self.pending(world) if pod["metadata"]["name"] not in self.served]
        pod = min(waiting, key=lambda one: int(one["metadata"]["annotations"]["mthreads.com/predicate-time"]))
        assert pod["metadata"]["annotations"]["mthreads.com/predicate-node"] == self.node
        self.served.add(pod["metadata"]["name"])
        indices = pod["metadata"]["annotations"]["mthreads.com/gpu-index"].split(",")
        return [f"{self.node}-mthreads-{index}" for index in indices]


class NeuronPlugin(Plugin):
    """Takes the oldest pod that is not allocated, and says that it is."""

    async def allocate(self, world: Any) -> list[str]:
        waiting = [
            pod
            for pod in await self.pending(world)
            if pod["metadata"]["annotations"]["NEURON_ALLOCATED"] == "false"
        ]
        pod = min(waiting, key=lambda one: int(one["metadata"]["annotations"]["NEURON_ALLOC_TIME"]))
        written = pod["metadata"]["annotations"]
        assert written["NEURON_RESOURCE_TYPE"] == "aws.amazon.com/neuroncore"
        await self.annotate(world, pod, {"NEURON_ALLOCATED": "true"})
        cores = [int(core) for core in written["AWS_NEURON_IDS"].split(",")]
        return sorted({f"{self.node}-AWSNeuron-{core // 2}" for core in cores})


class ChoosingPlugin(Plugin):
    """Gives out cards of its own choice, and reads and writes nothing: the pod stays `allocating`."""

    async def allocate(self, world: Any) -> list[str]:
        waiting = [pod for pod in await self.pending(world) if pod["metadata"]["name"] not in self.served]
        self.served.add(waiting[0]["metadata"]["name"])
        return [f"silicon-{len(self.served)}"]


class MetaxSharePlugin(Plugin):
    """Obeys its own list of cards, reports the policy that a card then runs, and gives the lock back."""

    async def allocate(self, world: Any) -> list[str]:
        pod = await self.find(world)
        written = pod["metadata"]["annotations"]
        assert int(written["metax-tech.com/predicate-time"]) > 10**18
        (container,) = json.loads(written["metax-tech.com/gpu-devices-allocated"])
        assert all((card["compute"], card["vRam"]) == (30, 8192) for card in container)
        given = [card["uuid"] for card in container]
        cards = json.loads(self.cards)
        for card in cards:
            if card["uuid"] in given:
                card |= {"model": "sgpu", "qosPolicy": written["metax-tech.com/sgpu-qos-policy"]}
        self.cards = json.dumps(cards)
        body = {"metadata": {"annotations": {self.register: self.cards}}}
        await world.request("PATCH", f"/api/v1/nodes/{self.node}", body, MERGE)
        await self.unlock(world)
        return given


class DrsPlugin(Plugin):
    """Takes the oldest pod that is not assigned, makes an instance of the size, and says which."""

    async def allocate(self, world: Any) -> list[str]:
        waiting = [
            pod
            for pod in await self.pending(world)
            if pod["metadata"]["annotations"].get("enflame.com/gcu-assigned") == "false"
        ]
        pod = min(
            waiting, key=lambda one: int(one["metadata"]["annotations"]["enflame.com/gcu-assigned-time"])
        )
        written = pod["metadata"]["annotations"]
        minors = {one["index"]: one["minor"] for one in json.loads(self.cards)["devices"]}
        index = written["enflame.com/gcu-assigned-index"]
        assert written["enflame.com/gcu-assigned-minor"] == minors[index]
        assert written["enflame.com/gcu-request-size"] == str(self.slots)
        containers = json.loads(written["assigned-containers"])
        for held in containers.values():
            assert (held["profileID"], held["profileName"]) == ("2", "3g.24gb")
            held |= {"allocated": True, "instanceID": "7", "instanceUUID": "f3b1"}
        done = {"enflame.com/gcu-assigned": "true", "assigned-containers": json.dumps(containers)}
        await self.annotate(world, pod, done)
        return [f"{self.node}-enflame-drs-{index}"]


class AscendPlugin(Plugin):
    """Cuts what its own entry says; blanks the container's entry; done after one container."""

    async def allocate(self, world: Any) -> list[str]:
        pod = await self.find(world)
        written = pod["metadata"]["annotations"]
        slots = decode_allocation(written[self.work])
        position = next(at for at, slot in enumerate(slots) if slot)
        devices = json.loads(written[f"huawei.com/{self.word}"])
        given = [device.uuid for device in slots[position]]
        assert [one["UUID"] for one in devices] == given
        cut = {key: devices[0][key] for key in devices[0] if key != "UUID"}
        if written.get("huawei.com/vnpu-mode") == "hami-core":
            assert cut == {"memory": 28672, "core": 40}
        else:
            assert cut == {"temp": "vir02", "memory": 6144}
        left = [() if at == position else slot for at, slot in enumerate(slots)]
        await self.annotate(world, pod, {self.work: encode_allocation(left)})
        await self.finish(world, pod)
        return given


class KunlunPlugin(Plugin):
    """Reads the indexes of the pod's cards, writes nothing: the pod stays `allocating`."""

    async def allocate(self, world: Any) -> list[str]:
        waiting = [pod for pod in await self.pending(world) if pod["metadata"]["name"] not in self.served]
        (pod,) = waiting
        self.served.add(pod["metadata"]["name"])
        indexes = pod["metadata"]["annotations"]["BAIDU_COM_DEVICE_IDX"].split(",")
        return [f"{self.node}-kunlun-{index}" for index in indexes]


def json_cards(kind: str, count: int, **more: Any) -> str:
    plain = {"count": count, "devmem": 32768, "devcore": 100, "type": kind, "health": True, **more}
    return json.dumps([{**plain, "id": f"{kind.replace(' ', '-')}-{n}", "index": n} for n in range(2)])


def metax_cards() -> str:
    """Two idle cards as MetaX's plugin reports them."""
    amounts = {"totalDevCount": 16, "totalCompute": 100, "totalVRam": 65536, "numa": 0, "linkZone": 1}
    card = {"model": "native", "healthy": True, **amounts}
    return json.dumps([{"uuid": f"GPU-3f0c1d2e-{n}", "bdf": f"0000:4{n}:00.0", **card} for n in range(2)])


def csv_cards(kind: str, count: int) -> str:
    return "".join(f"{kind}-{n},{count},32768,100,{kind},0,true:" for n in range(2))


def plugin(word: str) -> Plugin:
    """A fresh stand-in."""
    hami = f"hami.io/{word}-devices"
    match word:
        case "DCU":
            limits = {"hygon.com/dcunum": "1", "hygon.com/dcumem": "2000", "hygon.com/dcucores": "60"}
            return Plugin(
                word,
                limits,
                "hami.io/dcu-devices-allocated",
                "hami.io/dcu-devices-to-allocate",
                "hami.io/node-dcu-register",
                "hami.io/node-handshake-dcu",
                csv_cards("DCU-K100_AI", 4),
                {"hygon.com/dcunum": "8"},
            )
        case "BI-V150":
            limits = {"iluvatar.ai/BI-V150-vgpu": "1", "iluvatar.ai/BI-V150.vMem": "8"}
            return Plugin(
                word,
                limits,
                f"{hami}-allocated",
                f"{hami}-to-allocate",
                "hami.io/node-BI-V150-register",
                "hami.io/node-handshake-BI-V150",
                csv_cards("BI-V150", 10),
                {"iluvatar.ai/BI-V150-vgpu": "20"},
            )
        case "Vastai":
            return Plugin(
                word,
                {"vastaitech.com/va": "1"},
                f"{hami}-allocated",
                f"{hami}-to-allocate",
                "hami.io/node-va-register",
                "hami.io/node-handshake-va",
                json_cards("Vastai", 1),
                {"vastaitech.com/va": "2"},
            )
        case "Biren":
            return BirenPlugin(
                word,
                {"birentech.com/gpu": "1"},
                f"{hami}-allocated",
                f"{hami}-to-allocate",
                "hami.io/node-biren-register",
                "hami.io/node-handshake-biren",
                json_cards("Biren166M", 1),
                {"birentech.com/gpu": "2"},
            )
        case "AMD":
            return AmdPlugin(
                word,
                {"amd.com/gpu": "1", "amd.com/gpumem": "1024", "amd.com/gpucores": "25"},
                "hami.io/amd-devices-allocated",
                "hami.io/amd-devices-to-allocate",
                "hami.io/node-amd-register",
                cards=json_cards("AMD Instinct MI300X VF", 10, devcore=304),
                capacity={"amd.com/gpu": "20"},
            )
        case "MLU":
            smlu = {"cambricon.com/mlu.smlu.vmemory": "20", "cambricon.com/mlu.smlu.vcore": "25"}
            return CambriconPlugin(
                word,
                {"cambricon.com/vmlu": "1", **smlu},
                "hami.io/cambricon-mlu-devices-allocated",
                capacity={"cambricon.com/mlu.smlu.vmemory": "192", "cambricon.com/mlu.smlu.vcore": "200"},
                calls_per_pod=2,
            )
        case "Mthreads":
            return MthreadsPlugin(
                word,
                {"mthreads.com/vgpu": "1", "mthreads.com/sgpu-memory": "32", "mthreads.com/sgpu-core": "8"},
                "hami.io/mthreads-vgpu-devices-allocated",
                capacity={"mthreads.com/sgpu-memory": "192", "mthreads.com/sgpu-core": "32"},
            )
        case "Metax-GPU":
            return ChoosingPlugin(
                word,
                {"metax-tech.com/gpu": "1"},
                "hami.io/metax-gpu-devices-allocated",
                capacity={"metax-tech.com/gpu": "2"},
                marks={"metax-tech.com/gpu.topology.losses": '{"1":40,"2":90}'},
                obeys=False,
            )
        case "Metax-SGPU":
            return MetaxSharePlugin(
                word,
                {"metax-tech.com/sgpu": "1", "metax-tech.com/vcore": "30", "metax-tech.com/vmemory": "8"},
                "hami.io/metax-sgpu-devices-allocated",
                register="metax-tech.com/node-gpu-devices",
                cards=metax_cards(),
                capacity={"metax-tech.com/sgpu": "32"},
                says={"metax-tech.com/sgpu-qos-policy": "fixed-share"},
            )
        case "GCU":
            return ChoosingPlugin(
                word,
                {"enflame.com/gcu": "1"},
                "hami.io/enflame-gcu-devices-allocated",
                capacity={"enflame.com/gcu": "2"},
                obeys=False,
            )
        case "Enflame":
            devices = [{"index": str(n), "minor": str(n + 4), "capacity": 6} for n in range(2)]
            sizes = {"1g.8gb": "0", "2g.16gb": "1", "3g.24gb": "2", "6g.48gb": "3"}
            return DrsPlugin(
                word,
                {"enflame.com/drs-gcu": "3"},
                "hami.io/enflame-vgpu-devices-allocated",
                register="enflame.com/gcu-drs-capacity",
                cards=json.dumps({"devices": devices, "profiles": sizes}),
                capacity={"enflame.com/gcu": "0", "enflame.com/drs-gcu": "12"},
                slots=3,
            )
        case "Ascend310P":
            return ascend(
                word,
                {"huawei.com/Ascend310P": "1", "huawei.com/Ascend310P-memory": "6144"},
                json_cards(word, 7, devmem=21527, devcore=8),
                "14",
                soft=False,
            )
        case "Ascend910B3":
            return ascend(
                word,
                {
                    "huawei.com/Ascend910B3": "1",
                    "huawei.com/Ascend910B3-memory": "28672",
                    "huawei.com/Ascend910B3-core": "40",
                },
                json_cards(word, 4, devmem=65536, custominfo={"NetworkID": 0}),
                "8",
                soft=True,
            )
        case "kunlun":
            return KunlunPlugin(
                word,
                {"kunlunxin.com/xpu": "2"},
                "hami.io/kunlun-allocated",
                capacity={"kunlunxin.com/xpu": "8"},
                slots=2,
            )
        case "XPU":
            return Plugin(
                word,
                {"kunlunxin.com/vxpu": "1", "kunlunxin.com/vxpu-memory": "24576"},
                "hami.io/xpu-devices-allocated",
                "hami.io/xpu-devices-to-allocate",
                "hami.io/node-register-xpu",
                "hami.io/node-handshake-xpu",
                json_cards("XPU", 4, devmem=98304),
                {"kunlunxin.com/vxpu": "8"},
            )
    assert word == "AWSNeuron"
    return NeuronPlugin(
        word,
        {"aws.amazon.com/neuroncore": "2"},
        "hami.io/aws-neuron-devices-allocated",
        capacity={"aws.amazon.com/neuron": "2", "aws.amazon.com/neuroncore": "4"},
        labels={"node.kubernetes.io/instance-type": "inf2.8xlarge"},
    )


def ascend(word: str, limits: dict[str, str], cards: str, count: str, *, soft: bool) -> Plugin:
    """The plugin of one chip; its node is hard or soft."""
    handshake = f"hami.io/node-handshake-{word}"
    return AscendPlugin(
        word,
        limits,
        f"hami.io/{word}-devices-allocated",
        f"hami.io/{word}-devices-to-allocate",
        f"hami.io/node-register-{word}",
        handshake,
        cards,
        {f"huawei.com/{word}": count},
        marks={"hami-vnpu-core": "true" if soft else "false", handshake: "Reported_2026.08.22 10:00:01"},
        says={"huawei.com/vnpu-mode": "hami-core"} if soft else {},
    )


WORDS = (
    "MLU",
    "DCU",
    "Mthreads",
    "AWSNeuron",
    "AMD",
    "Vastai",
    "Biren",
    "BI-V150",
    "Metax-GPU",
    "Metax-SGPU",
    "GCU",
    "Enflame",
    "kunlun",
    "XPU",
    "Ascend310P",
    "Ascend910B3",
)
