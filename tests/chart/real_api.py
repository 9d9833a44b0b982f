"""A real etcd and API server on free loopback ports, of the programs that tools/cluster/build.sh makes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

BIN = Path(os.environ.get("HAMI_KUBE_BIN") or "/nonexistent")
LIMIT_S = 90.0
USERS = {"admin": "system:masters", "alice": "tenants"}
"""User (and token) -> group."""


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A free port that nobody else gets: a server may listen on it meanwhile, since both allow its reuse."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextlib.contextmanager
def process(log: Path, *command: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A background process, stopped at the end; its output goes to a file."""
    with log.open("wb") as file:
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={**os.environ, **env}
        )
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(timeout=20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


@dataclass
class ApiServer:
    """The running API server; `folder` holds kubeconfigs and logs."""

    folder: Path
    url: str

    def kubeconfig(self, user: str, token: str) -> Path:
        """A kubeconfig with a bearer token."""
        path = self.folder / f"{user}.conf"
        path.touch(mode=0o600)
        cluster = {"server": self.url, "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "real", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [{"name": user, "context": {"cluster": "real", "user": user}}],
            "current-context": user,
        }
        path.write_text(yaml.safe_dump(config), "utf-8")
        return path

    def kubectl(self, *arguments: str, text: str | None = None, user: str = "admin") -> tuple[int, str]:
        """Exit status, and what it printed."""
        done = subprocess.run(
            [str(BIN / "kubectl"), "--kubeconfig", str(self.kubeconfig(user, user)), *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def ok(self, *arguments: str, text: str | None = None, user: str = "admin") -> str:
        """What it printed; a failure fails the test."""
        code, out = self.kubectl(*arguments, text=text, user=user)
        assert code == 0, out
        return out

    def read(self, kind: str, name: str, namespace: str) -> Any:
        """An object; that there is none fails the test."""
        return json.loads(self.ok("get", kind, name, "--namespace", namespace, "-o", "json"))

    def create(self, *objects: dict[str, Any], user: str = "admin") -> tuple[int, str]:
        """Create objects; exit status and output."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        return self.kubectl("create", "-f", "-", text=json.dumps(listed), user=user)

    def account(self, namespace: str, name: str) -> Path:
        """A kubeconfig of a service account."""
        return self.kubeconfig(name, self.ok("create", "token", name, "--namespace", namespace).strip())


@contextlib.contextmanager
def running(folder: Path) -> Iterator[ApiServer]:
    """Start both and wait until the API server is ready."""
    key = folder / "sa.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    lines = [f'{user},{user},{user},"{group}"\n' for user, group in USERS.items()]
    (folder / "tokens.csv").write_text("".join(lines), "utf-8")
    with held_port() as clients, held_port() as peers, held_port() as port:
        yield from _running(folder, key, clients, peers, port)


def _running(folder: Path, key: Path, clients: int, peers: int, port: int) -> Iterator[ApiServer]:
    etcd = f"http://127.0.0.1:{clients}"
    server = ApiServer(folder, f"https://127.0.0.1:{port}")
    with (
        process(
            folder / "etcd.log",
            str(BIN / "etcd"),
            f"--data-dir={folder / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}",
        ),
        process(
            folder / "api.log",
            str(BIN / "kube-apiserver"),
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={folder / 'certs'}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            # nobody makes the default accounts here
            "--disable-admission-plugins=ServiceAccount",
        ) as api,
    ):
        until(lambda: api.poll() is not None or server.kubectl("get", "--raw", "/readyz")[0] == 0)
        assert api.poll() is None, (folder / "api.log").read_text("utf-8")[-2000:]
        yield server


def until(condition: Any) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.2)
