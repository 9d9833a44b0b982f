"""Where the API server is and who we are: in-cluster or kubeconfig.

Order: ``$KUBECONFIG`` (a list of files, merged), else ``~/.kube/config`` if it exists, else the pod's
service account.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import yaml

from hami.kube.auth import (
    Credential,
    CredentialSource,
    ExecCredential,
    FileCredential,
    StaticCredential,
    read_small_file,
)
from hami.kube.errors import ConfigError, CredentialError

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_EXEC_VERSIONS = frozenset({"client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"})


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """All that a client needs: server URL (a path prefix is kept), trust, credentials and the default
    namespace."""

    server: str
    credentials: CredentialSource = field(default_factory=lambda: StaticCredential(Credential()))
    ca_pem: bytes = b""
    ca_path: Path | None = None
    insecure: bool = False
    tls_server_name: str = ""
    namespace: str = "default"

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.server)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # half an IPv6 address, a port beyond 65535
            usable = False
        if not usable or parts.query or parts.fragment or not self.server.isprintable():
            raise ConfigError(f"server {self.server!r} is not an http or https URL")

    def read_ca(self) -> bytes:
        """The CA bundle as PEM, empty for the system's; blocking. Raises ``CredentialError``."""
        return read_small_file(self.ca_path) if self.ca_path is not None else self.ca_pem


def load_config(environ: Mapping[str, str] | None = None, *, context: str = "") -> ClientConfig:
    """The configuration for this environment; raises ``ConfigError`` saying what is missing and where it
    was looked for.

    ``context`` selects a kubeconfig context other than the current one.
    """
    env = os.environ if environ is None else environ
    listed = [Path(part) for part in env.get("KUBECONFIG", "").split(os.pathsep) if part]
    if listed:
        return load_kubeconfig(listed, context=context)
    home_config = Path(env["HOME"]) / ".kube" / "config" if env.get("HOME") else None
    if home_config is not None and home_config.is_file():
        return load_kubeconfig([home_config], context=context)
    return load_in_cluster(env)


def load_in_cluster(environ: Mapping[str, str], account_dir: Path = SERVICE_ACCOUNT_DIR) -> ClientConfig:
    """The service account of the pod we run in; the token file is read again while we run."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "")
    token = account_dir / "token"
    if not host or not port or not token.exists():
        raise ConfigError(
            "no Kubernetes configuration: set KUBECONFIG, create ~/.kube/config, "
            "or run in a pod with a service account"
        )
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    namespace_file = account_dir / "namespace"
    namespace = "default"
    if namespace_file.exists():
        namespace = _read(namespace_file).decode("utf-8", "replace").strip() or "default"
    return ClientConfig(
        server=f"https://{host}:{port}",
        credentials=FileCredential(token_path=token),
        ca_path=account_dir / "ca.crt",
        namespace=namespace,
    )


class _Exec(msgspec.Struct, rename="camel"):
    command: str
    api_version: str = ""
    args: list[str] | None = None
    env: list[dict[str, str]] | None = None
    install_hint: str | None = None
    provide_cluster_info: bool = False
    interactive_mode: str = "IfAvailable"


class _User(msgspec.Struct, rename="kebab"):
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    token: str = ""
    token_file: str = msgspec.field(default="", name="tokenFile")
    username: str = ""
    password: str = ""
    exec: _Exec | None = None
    auth_provider: dict[str, Any] | None = None


class _Cluster(msgspec.Struct, rename="kebab"):
    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False
    tls_server_name: str = ""
    proxy_url: str = ""


class _Context(msgspec.Struct):
    cluster: str
    user: str = ""
    namespace: str = ""


class _NamedUser(msgspec.Struct):
    name: str
    user: _User = msgspec.field(default_factory=_User)


class _NamedCluster(msgspec.Struct):
    name: str
    cluster: _Cluster


class _NamedContext(msgspec.Struct):
    name: str
    context: _Context


class _Kubeconfig(msgspec.Struct, rename="kebab"):
    current_context: str | None = ""
    clusters: list[_NamedCluster] | None = None
    contexts: list[_NamedContext] | None = None
    users: list[_NamedUser] | None = None


@dataclass(slots=True)
class _Merged:
    current: str = ""
    clusters: dict[str, tuple[_Cluster, Path]] = field(default_factory=dict)
    contexts: dict[str, _Context] = field(default_factory=dict)
    users: dict[str, tuple[_User, Path]] = field(default_factory=dict)


def load_kubeconfig(paths: list[Path], *, context: str = "") -> ClientConfig:
    """Merge the files as kubectl does (first value of a name wins, missing files are skipped) and pick a
    context."""
    merged = _Merged()
    found = [path for path in paths if path.exists()]
    if not found:
        raise ConfigError(f"kubeconfig {', '.join(map(str, paths))} does not exist")
    for path in found:
        _merge_file(merged, path)
    name = context or merged.current
    if not name:
        raise ConfigError(f"kubeconfig {found[0]} has no current-context")
    chosen = merged.contexts.get(name)
    if chosen is None:
        raise ConfigError(f"kubeconfig {found[0]} has no context {name!r}")
    if chosen.cluster not in merged.clusters:
        raise ConfigError(f"context {name!r} names cluster {chosen.cluster!r}, which is not defined")
    cluster, cluster_dir = merged.clusters[chosen.cluster]
    if cluster.proxy_url:
        raise ConfigError(f"cluster {chosen.cluster!r}: proxy-url is not supported")
    user, user_dir = merged.users.get(chosen.user, (_User(), Path()))
    if chosen.user and chosen.user not in merged.users:
        raise ConfigError(f"context {name!r} names user {chosen.user!r}, which is not defined")
    ca_pem = _inline("certificate-authority-data", cluster.certificate_authority_data)
    return ClientConfig(
        server=cluster.server.rstrip("/"),
        credentials=_credentials(chosen.user, user, user_dir, cluster, cluster_dir),
        ca_pem=ca_pem,
        ca_path=cluster_dir / cluster.certificate_authority
        if cluster.certificate_authority and not ca_pem
        else None,
        insecure=cluster.insecure_skip_tls_verify,
        tls_server_name=cluster.tls_server_name,
        namespace=chosen.namespace or "default",
    )


def _merge_file(merged: _Merged, path: Path) -> None:
    try:
        parsed = msgspec.convert(yaml.safe_load(_read(path)) or {}, _Kubeconfig)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"kubeconfig {path} is not YAML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"kubeconfig {path}: {error}") from error
    folder = path.parent
    merged.current = merged.current or parsed.current_context or ""
    for cluster in parsed.clusters or []:
        merged.clusters.setdefault(cluster.name, (cluster.cluster, folder))
    for context in parsed.contexts or []:
        merged.contexts.setdefault(context.name, context.context)
    for user in parsed.users or []:
        merged.users.setdefault(user.name, (user.user, folder))


def _credentials(
    name: str, user: _User, folder: Path, cluster: _Cluster, cluster_dir: Path
) -> CredentialSource:
    if user.auth_provider is not None:
        raise ConfigError(f"user {name!r}: auth-provider is not supported, use an exec plugin")
    if user.exec is not None:
        info = _cluster_info(cluster, cluster_dir) if user.exec.provide_cluster_info else None
        return _exec_credentials(name, user.exec, folder, info)
    certificate = _inline("client-certificate-data", user.client_certificate_data)
    key = _inline("client-key-data", user.client_key_data)
    has_certificate = bool(certificate or user.client_certificate)
    if has_certificate != bool(key or user.client_key):
        raise ConfigError(f"user {name!r}: a client certificate needs its key and the other way round")
    certificate_path = (
        folder / user.client_certificate if user.client_certificate and not certificate else None
    )
    key_path = folder / user.client_key if user.client_key and not key else None
    token_path = folder / user.token_file if user.token_file else None
    if token_path or certificate_path or key_path:
        return FileCredential(
            token_path=token_path,
            certificate_path=certificate_path,
            key_path=key_path,
            fixed=Credential(_authorization(user), certificate, key),
        )
    return StaticCredential(Credential(_authorization(user), certificate, key))


def _authorization(user: _User) -> str:
    if user.token:
        return f"Bearer {user.token}"
    if user.username:
        return "Basic " + base64.b64encode(f"{user.username}:{user.password}".encode()).decode()
    return ""


def _exec_credentials(
    name: str, plugin: _Exec, folder: Path, cluster_info: dict[str, object] | None
) -> ExecCredential:
    if plugin.api_version not in _EXEC_VERSIONS:
        raise ConfigError(f"user {name!r}: exec apiVersion {plugin.api_version!r} is not supported")
    if plugin.interactive_mode == "Always":
        raise ConfigError(
            f"user {name!r}: exec plugin {plugin.command} wants a terminal, which a server has not"
        )
    env: dict[str, str] = {}
    for pair in plugin.env or []:
        if "name" not in pair:
            raise ConfigError(f"user {name!r}: an exec env entry has no name")
        env[pair["name"]] = pair.get("value", "")
    command = plugin.command
    if os.sep in command and not Path(command).is_absolute():
        command = str(folder / command)
    return ExecCredential(
        command=command,
        args=tuple(plugin.args or ()),
        env=env,
        api_version=plugin.api_version,
        cluster_info=cluster_info,
        install_hint=plugin.install_hint or "",
    )


def _cluster_info(cluster: _Cluster, folder: Path) -> dict[str, object]:
    """What an exec plugin is told about the cluster (``spec.cluster`` of its input)."""
    info: dict[str, object] = {"server": cluster.server}
    if cluster.certificate_authority_data:
        info["certificate-authority-data"] = cluster.certificate_authority_data
    elif cluster.certificate_authority:
        pem = _read(folder / cluster.certificate_authority)
        info["certificate-authority-data"] = base64.b64encode(pem).decode()
    if cluster.tls_server_name:
        info["tls-server-name"] = cluster.tls_server_name
    if cluster.insecure_skip_tls_verify:
        info["insecure-skip-tls-verify"] = True
    return info


def _inline(what: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"kubeconfig: {what} is not base64: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return read_small_file(path)
    except CredentialError as error:
        raise ConfigError(str(error)) from error
