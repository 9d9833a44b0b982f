from __future__ import annotations

import base64
import json
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from hami.kube.auth import ExecCredential, FileCredential
from hami.kube.certificates import KeyPair, create_authority, issue, write_pair
from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig, load_config, load_in_cluster, load_kubeconfig
from hami.kube.errors import ConfigError, CredentialError, TransportError
from hami.kube.resources import NODES
from hami.local.serving import serving

EXEC = {"command": "x", "apiVersion": "client.authentication.k8s.io/v1"}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def kubeconfig(path: Path, cluster: dict[str, Any], user: dict[str, Any], **context: str) -> Path:
    document = {
        "current-context": "c",
        "clusters": [{"name": "k", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", **context}}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


async def test_a_token_of_the_kubeconfig_is_presented(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", {"server": "http://h:1/"}, {"token": "t"}, namespace="ns")
    config = load_config({"KUBECONFIG": str(path)})
    assert (config.server, config.namespace) == ("http://h:1", "ns")
    assert (await config.credentials.current()).authorization == "Bearer t"


def test_home_is_used_without_kubeconfig_and_the_pod_without_both(tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    kubeconfig(tmp_path / ".kube" / "config", {"server": "http://home:1"}, {})
    assert load_config({"HOME": str(tmp_path)}).server == "http://home:1"
    with pytest.raises(ConfigError, match="set KUBECONFIG"):
        load_config({"HOME": str(tmp_path / "nobody")})


async def test_in_cluster_reads_the_service_account(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("kube-system")
    (tmp_path / "ca.crt").write_text("pem")
    env = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    config = load_in_cluster(env, tmp_path)
    assert (config.server, config.namespace) == ("https://[fd00::1]:443", "kube-system")
    assert (await config.credentials.current()).authorization == "Bearer first"


async def test_a_token_file_is_read_again_after_a_minute_or_a_refusal(tmp_path: Path) -> None:
    now = [1000.0]
    path = tmp_path / "token"
    path.write_text("one")
    source = FileCredential(token_path=path, clock=lambda: now[0])
    assert (await source.current()).authorization == "Bearer one"
    path.write_text("two")
    assert (await source.current()).authorization == "Bearer one"
    now[0] += 61
    assert (await source.current()).authorization == "Bearer two"
    path.write_text("three")
    source.invalidate()
    assert (await source.current()).authorization == "Bearer three"
    path.unlink()
    now[0] += 61
    assert (await source.current()).authorization == "Bearer three", "the last content stays"


async def test_a_missing_or_empty_token_file_says_which(tmp_path: Path) -> None:
    with pytest.raises(CredentialError, match="nothing-here"):
        await FileCredential(token_path=tmp_path / "nothing-here").current()
    (tmp_path / "token").write_text("\n")
    with pytest.raises(CredentialError, match="is empty"):
        await FileCredential(token_path=tmp_path / "token").current()


def test_files_of_a_list_are_merged_and_the_first_wins(tmp_path: Path) -> None:
    first = kubeconfig(tmp_path / "a", {"server": "http://first:1"}, {})
    second = kubeconfig(tmp_path / "b", {"server": "http://second:1"}, {})
    assert load_kubeconfig([tmp_path / "missing", first, second]).server == "http://first:1"


@pytest.mark.parametrize(
    ("cluster", "user", "text"),
    [
        ({"server": "ftp://h"}, {}, "not an http or https URL"),
        ({"server": "http://h", "proxy-url": "http://p"}, {}, "proxy-url is not supported"),
        ({"server": "http://h", "certificate-authority-data": "!"}, {}, "not base64"),
        ({"server": "http://h"}, {"auth-provider": {"name": "gcp"}}, "auth-provider"),
        ({"server": "http://h"}, {"client-certificate": "x"}, "needs its key"),
        ({"server": "http://h"}, {"exec": {"command": "x", "apiVersion": "v0"}}, "exec apiVersion 'v0'"),
        (
            {"server": "http://h"},
            {"exec": {**EXEC, "interactiveMode": "Always"}},
            "exec plugin x wants a terminal",
        ),
        (
            {"server": "http://h"},
            {"exec": {**EXEC, "env": [{"value": "v"}]}},
            "an exec env entry has no name",
        ),
        ({"server": 5}, {}, r"kubeconfig .*server"),
    ],
)
def test_what_cannot_work_is_refused_with_its_name(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        load_kubeconfig([kubeconfig(tmp_path / "config", cluster, user)])


async def test_a_user_with_a_password_is_presented_as_such(tmp_path: Path) -> None:
    user = {"username": "me", "password": "secret"}
    config = load_kubeconfig([kubeconfig(tmp_path / "config", {"server": "http://h:1"}, user)])
    assert (await config.credentials.current()).authorization == f"Basic {b64(b'me:secret')}"


def test_a_relative_plugin_is_looked_up_beside_its_kubeconfig(tmp_path: Path) -> None:
    user = {"exec": {**EXEC, "command": "bin/login", "env": [{"name": "WHO", "value": "me"}]}}
    config = load_kubeconfig([kubeconfig(tmp_path / "config", {"server": "http://h:1"}, user)])
    assert isinstance(config.credentials, ExecCredential)
    assert config.credentials.command == str(tmp_path / "bin" / "login")
    assert config.credentials.env == {"WHO": "me"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"current-context": ""}, "has no current-context"),
        ({"current-context": "other"}, "has no context 'other'"),
        ({"clusters": []}, "names cluster 'k', which is not defined"),
        ({"users": []}, "names user 'u', which is not defined"),
    ],
)
def test_names_that_lead_nowhere_are_told(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    path = kubeconfig(tmp_path / "config", {"server": "http://h:1"}, {})
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(ConfigError, match=text):
        load_kubeconfig([path])


def test_a_list_of_files_that_are_all_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_kubeconfig([tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize("text", ["{", "- 1", "current-context: nope", "contexts: 5"])
def test_a_broken_kubeconfig_is_a_config_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(ConfigError):
        load_kubeconfig([tmp_path / "config"])


def plugin(tmp_path: Path, script: str) -> ExecCredential:
    path = tmp_path / "plugin"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return ExecCredential(str(path), env={"WHO": "me"}, cluster_info={"server": "https://s"})


def answer(status: str) -> str:
    version = "client.authentication.k8s.io/v1"
    return f'echo \'{{"kind":"ExecCredential","apiVersion":"{version}","status":{status}}}\''


async def test_an_exec_plugin_is_run_again_when_its_credential_expires(tmp_path: Path) -> None:
    script = f"echo run >> {tmp_path}/runs\n" + answer(
        '{"token":"t","expirationTimestamp":"2026-01-01T00:10:00Z"}'
    )
    source = plugin(tmp_path, script)
    expiry = 1767226200.0
    now = [expiry - 600]
    source.wall_clock = lambda: now[0]
    for _ in range(3):
        assert (await source.current()).authorization == "Bearer t"
    assert (tmp_path / "runs").read_text() == "run\n"
    now[0] = expiry - 10
    await source.current()
    assert (tmp_path / "runs").read_text() == "run\nrun\n"


async def test_an_exec_plugin_gets_its_environment_and_the_cluster(tmp_path: Path) -> None:
    script = f'echo "$WHO $KUBERNETES_EXEC_INFO" > {tmp_path}/env\n' + answer('{"token":"t"}')
    await plugin(tmp_path, script).current()
    text = (tmp_path / "env").read_text()
    assert text.startswith("me {")
    assert '"cluster":{"server":"https://s"}' in text


async def test_an_exec_plugin_without_expiry_is_run_again_after_a_refusal(tmp_path: Path) -> None:
    source = plugin(tmp_path, f"echo run >> {tmp_path}/runs\n" + answer('{"token":"t"}'))
    await source.current()
    source.invalidate()
    await source.current()
    assert (tmp_path / "runs").read_text() == "run\nrun\n"


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("exit 3", "exit status 3"),
        ("echo nonsense", "plugin"),
        (answer("{}"), "neither a token nor a client certificate"),
        ("yes", "printed more than"),
    ],
)
async def test_a_failing_exec_plugin_is_a_credential_error(tmp_path: Path, script: str, text: str) -> None:
    with pytest.raises(CredentialError, match=text):
        await plugin(tmp_path, script).current()


async def test_a_missing_exec_plugin_names_the_command_and_the_hint() -> None:
    with pytest.raises(CredentialError, match=r"no-such-plugin.*install it"):
        await ExecCredential("no-such-plugin", install_hint="install it").current()


@pytest.fixture(scope="module")
def authority() -> KeyPair:
    return create_authority("test authority", time.time())


@pytest.fixture
async def tls_url(authority: KeyPair, tmp_path: Path) -> AsyncIterator[str]:
    """An HTTPS server that answers with the common name of the client certificate it demands."""
    server = issue(authority, "server", time.time(), hosts=["127.0.0.1"])
    write_pair(server, tmp_path / "server.crt", tmp_path / "server.key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=authority.certificate_pem.decode())
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED

    async def who(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        subject = request.transport.get_extra_info("peercert")["subject"]
        return web.json_response({"subject": dict(pair for part in subject for pair in part)})

    app = web.Application()
    app.router.add_get("/{tail:.*}", who)
    async with serving(app, context) as port:
        yield f"https://127.0.0.1:{port}"


@pytest.mark.parametrize("inline", [True, False])
async def test_a_client_certificate_is_presented(
    tmp_path: Path, authority: KeyPair, tls_url: str, inline: bool
) -> None:
    pair = issue(authority, "system:me", time.time(), organizations=["system:masters"])
    write_pair(pair, tmp_path / "me.crt", tmp_path / "me.key")
    (tmp_path / "ca.crt").write_bytes(authority.certificate_pem)
    if inline:
        cluster = {"server": tls_url, "certificate-authority-data": b64(authority.certificate_pem)}
        user = {"client-certificate-data": b64(pair.certificate_pem), "client-key-data": b64(pair.key_pem)}
    else:
        cluster = {"server": tls_url, "certificate-authority": "ca.crt"}
        user = {"client-certificate": "me.crt", "client-key": "me.key"}
    config = load_kubeconfig([kubeconfig(tmp_path / "config", cluster, user)])
    async with Client(config, Limits(qps=0)) as client:
        answer = await client.get(NODES, "n1", dict)
    assert answer["subject"] == {"organizationName": "system:masters", "commonName": "system:me"}


async def test_a_rotated_client_certificate_is_used_from_the_next_read_on(
    tmp_path: Path, authority: KeyPair, tls_url: str
) -> None:
    source = FileCredential(certificate_path=tmp_path / "me.crt", key_path=tmp_path / "me.key")
    config = ClientConfig(tls_url, source, ca_pem=authority.certificate_pem)
    names = []
    async with Client(config, Limits(qps=0)) as client:
        for name in ("before", "after"):
            write_pair(issue(authority, name, time.time()), tmp_path / "me.crt", tmp_path / "me.key")
            source.invalidate()
            names.append((await client.get(NODES, "n1", dict))["subject"]["commonName"])
    assert names == ["before", "after"]


async def test_a_server_of_another_authority_is_not_trusted_unless_told_so(
    tmp_path: Path, authority: KeyPair, tls_url: str
) -> None:
    pair = issue(authority, "me", time.time())
    write_pair(pair, tmp_path / "me.crt", tmp_path / "me.key")
    source = FileCredential(certificate_path=tmp_path / "me.crt", key_path=tmp_path / "me.key")
    other = create_authority("other", time.time()).certificate_pem
    async with Client(ClientConfig(tls_url, source, ca_pem=other), Limits(qps=0)) as client:
        with pytest.raises(TransportError, match=r"(?i)certificate"):
            await client.get(NODES, "n1", dict)
    async with Client(ClientConfig(tls_url, source, ca_pem=other, insecure=True), Limits(qps=0)) as client:
        assert (await client.get(NODES, "n1", dict))["subject"]["commonName"] == "me"


@pytest.mark.parametrize("watching", [False, True])
async def test_a_rotated_authority_is_trusted_once_the_old_one_does_not_fit(
    tmp_path: Path, authority: KeyPair, tls_url: str, watching: bool
) -> None:
    """A process that lives for months outlives the authority of its cluster."""
    write_pair(issue(authority, "me", time.time()), tmp_path / "me.crt", tmp_path / "me.key")
    source = FileCredential(certificate_path=tmp_path / "me.crt", key_path=tmp_path / "me.key")
    ca = tmp_path / "ca.crt"
    ca.write_bytes(create_authority("other", time.time()).certificate_pem)

    async def ask(client: Client) -> None:
        if watching:
            async with client.stream("/api/v1/nodes", query={}, idle_timeout_s=60) as lines:
                assert [line async for line in lines]
        else:
            await client.get(NODES, "n1", dict)

    async with Client(ClientConfig(tls_url, source, ca_path=ca), Limits(qps=0)) as client:
        for _ in range(2):
            with pytest.raises(TransportError, match=r"(?i)certificate"):
                await ask(client)
        ca.write_bytes(authority.certificate_pem)
        await ask(client)


async def test_the_tls_server_name_replaces_the_address_in_the_check(
    tmp_path: Path, authority: KeyPair, tls_url: str
) -> None:
    write_pair(issue(authority, "me", time.time()), tmp_path / "me.crt", tmp_path / "me.key")
    source = FileCredential(certificate_path=tmp_path / "me.crt", key_path=tmp_path / "me.key")
    config = ClientConfig(
        tls_url, source, ca_pem=authority.certificate_pem, tls_server_name="kubernetes.other"
    )
    async with Client(config, Limits(qps=0)) as client:
        with pytest.raises(TransportError):
            await client.get(NODES, "n1", dict)


async def test_an_exec_plugin_of_a_kubeconfig_is_told_about_its_cluster(tmp_path: Path) -> None:
    path = tmp_path / "bin" / "plugin"
    path.parent.mkdir()
    path.write_text(
        "#!/bin/sh\n"
        f'echo "$KUBERNETES_EXEC_INFO" > {tmp_path}/info\n'
        'echo "{\\"kind\\":\\"ExecCredential\\",\\"apiVersion\\":\\"client.authentication.k8s.io/v1\\",'
        '\\"status\\":{\\"token\\":\\"$1-$WHO\\"}}"\n'
    )
    path.chmod(0o755)
    (tmp_path / "ca.pem").write_bytes(b"PEM")
    cluster = {"server": "https://s", "certificate-authority": "ca.pem", "tls-server-name": "t"}
    plugin_spec = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "./bin/plugin",
        "args": ["arg"],
        "env": [{"name": "WHO", "value": "me"}],
        "provideClusterInfo": True,
    }
    config = load_kubeconfig([kubeconfig(tmp_path / "config", cluster, {"exec": plugin_spec})])
    assert (await config.credentials.current()).authorization == "Bearer arg-me"
    info = json.loads((tmp_path / "info").read_text())
    assert info["spec"] == {
        "interactive": False,
        "cluster": {
            "server": "https://s",
            "certificate-authority-data": b64(b"PEM"),
            "tls-server-name": "t",
        },
    }
