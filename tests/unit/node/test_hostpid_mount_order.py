"""X11: a container runtime that makes mounts strictly in the order in which it is given them."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from exact_world import World, gpus
from hostpid_world import LIMIT_S, socket_file
from node_cards import U1
from plugin_world import Node

from hami.node.api import deviceplugin_v1beta1_pb2 as pb
from hami.node.hostpid.child import BrokerChild
from hami.node.paths import HostPaths
from hami.node.plugin.answer import Delivery

Make = Callable[..., Any]
Entry = tuple[str, str, bool]
"""Path on the host, path in the container, whether read-only."""

#: Arguments: the container's root; source, target, and "ro" or "rw" of each mount. Makes what a mount lies
#: on, binds it, and never looks at one before it again.
RUNTIME = """
set -e
root=$1
shift
mount -t tmpfs tmpfs "$root"
while [ $# -gt 0 ]; do
    target=$root$2
    if [ -d "$1" ]; then mkdir -p "$target"; else mkdir -p "$(dirname "$target")"; : > "$target"; fi
    mount --bind "$1" "$target"
    mount -o "remount,bind,$3" "$target"
    shift 3
done
cd "$root/tmp/vgpulock"
[ ! -S hostpid/broker.sock ] || echo seen
[ ! -w hostpid ] || echo writable
[ -w . ]
"""


def seen(root: Path, mounts: Sequence[Entry]) -> list[str]:
    """What a container with these mounts finds: ``seen`` the socket, ``writable`` its directory."""
    container = root / "container"
    container.mkdir(exist_ok=True)
    words = [word for source, target, ro in mounts for word in (source, target, "ro" if ro else "rw")]
    for user in ((), ("--user", "--map-root-user")):
        command = ["unshare", *user, "--mount", "sh", "-c", RUNTIME, "sh", str(container), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode == 0:
            return done.stdout.split()
    pytest.fail(f"this test makes mounts: run it as root or with user namespaces. {done.stderr}")


def shown_in_order_only(root: Path, mounts: Sequence[Entry]) -> None:
    """In the order of the list the socket is there, read-only; the other way round the parent hides it."""
    assert seen(root, mounts) == ["seen"]
    assert "seen" not in seen(root, mounts[::-1])


async def test_x11_mounts_of_an_answer_made_in_their_order_show_the_broker(
    cluster: Any, make_nvml: Make, make_pod: Make, until: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBVGPU_HOSTPID_BROKER", "1")
    cluster.add(make_pod("p", f"{U1},NVIDIA,300,30:;"))
    # a Unix socket path has at most 107 characters
    with tempfile.TemporaryDirectory(prefix="hn") as folder:
        root = Path(folder)
        broker = BrokerChild(HostPaths(folder))
        async with Node(cluster, make_nvml([(U1, "A", 1 << 30)]), root, broker) as node:
            await until(lambda: node.kubelet.registered)
            async with node.kubelet.plugin() as stub:
                request = pb.AllocateRequest(container_requests=[{"devices_ids": [f"{U1}-0"]}])
                (answer,) = (await stub.Allocate(request)).container_responses
            mounts = [(mount.host_path, mount.container_path, mount.read_only) for mount in answer.mounts]
            shown_in_order_only(root, mounts)


async def test_x11_mounts_of_a_cdi_document_made_in_their_order_show_the_broker(
    cluster: Any, host: HostPaths, make_pod: Make
) -> None:
    world = World(cluster, host)
    world.delivery = Delivery(broker=True, extras={}, device_nodes={})
    cluster.add(make_pod("p", f"{U1},NVIDIA,3000,30:;"))
    world.held[("p", "app")] = gpus(0)
    await world.started("p")
    mounts = [
        (mount["hostPath"], mount["containerPath"], "ro" in mount["options"])
        for mount in world.edits(gpus(0))["mounts"]
    ]
    socket_file(Path(host.root)).parent.mkdir(parents=True)
    os.mknod(socket_file(Path(host.root)), stat.S_IFSOCK | 0o666)
    shown_in_order_only(Path(host.root), mounts)
