"""What is removed from texts and objects before they are handed on."""

from __future__ import annotations

import base64
import json
import string
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.answers.hashing import digest
from hami.answers.scrub import Renaming, names_in, scrub, scrub_all, without_secrets
from hami.kube.certificates import create_authority

SALT = b"salt"
TEMPLATES = (
    "password={}", "--token={} --v=4", '{{"authToken": "{}", "a": 1}}', "Authorization: Bearer {}",
    "dial https://user:{}@host/x", "api_key: '{}'", '"text": "client_secret=\\"{}\\" refused"',
    "API-KEY={};x", "privateKey: {}\nnext", "credentials = {}",
    "run --token x{} --v=4", '["--password", "x{}"]', '"[\\"--api-key\\",\\"x{}\\"]"',
    "redis://:{}@host:6379", "Cookie: session={}", "passphrase={}",
)  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
@given(secret=st.text(string.ascii_letters + string.digits + "+/=_-", min_size=12, max_size=40))
def test_a_secret_is_removed_wherever_texts_keep_them(template: str, secret: str) -> None:
    text = scrub(template.format(secret))
    assert secret not in text
    assert "(removed)" in text


def test_keys_and_tokens_are_known_by_their_looks() -> None:
    key = create_authority("ca", time.time()).key_pem.decode()
    assert scrub(f"a {key} b") == "a (removed)\n b"
    assert "MHcCAQ" not in scrub(json.dumps({"log": key})).replace(key[28:60], "MHcCAQ")
    jwt = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl"
    assert scrub(f"got {jwt}!") == "got (removed)!"


@pytest.mark.parametrize(
    "text",
    [
        "--tls-secret=kube-system/hami-scheduler-tls --v=4",
        '{"event":"pod.bound","pod":"team/train-0","key":"x"}',
        "tokens: 12 of 20",
        "0/2 nodes are available: 1 1/2 CardNotHealth",
        "a\r\nb\n\nc",
        "",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert scrub(text) == text


@given(st.text(max_size=200))
def test_any_text_is_scrubbed_and_scrubbing_again_changes_nothing(text: str) -> None:
    once = scrub(text)
    assert scrub(once) == once


def test_a_user_of_an_address_is_removed_whole() -> None:
    assert scrub("git https://ghp0token@host/x, a@b") == "git https://(removed)@host/x, a@b"
    assert scrub("dial https://user:p@ss@host/x") == "dial https://(removed)@host/x"
    assert scrub("cloned with ghp_abcdefghijklmnop0123456789 now") == "cloned with (removed) now"


def test_data_loses_what_members_and_flags_of_secret_names_hold() -> None:
    data = {
        "data": {"password": "hush", "config.yaml": "a: b"},
        "command": ["run", "--token", "hush", "--password", "--v=4"],
        "pairs": [{"name": "DB_PASSWORD", "value": "hush"}, {"name": "MODE", "value": "exact"}],
        "volume": {"secret": {"secretName": "tls"}, "tls-secret": "kube-system/tls"},
    }
    kept = {
        "data": {"password": "(removed)", "config.yaml": "a: b"},
        "command": ["run", "--token", "(removed)", "--password", "--v=4"],
        "pairs": [{"name": "DB_PASSWORD", "value": "(removed)"}, {"name": "MODE", "value": "exact"}],
        "volume": {"secret": {"secretName": "tls"}, "tls-secret": "kube-system/tls"},
    }
    assert scrub_all(data) == kept
    assert without_secrets(data) == kept


def test_an_object_loses_values_of_variables_foreign_annotations_and_field_history() -> None:
    annotations = {"hami.io/allocation-mode": "lock", "example.com/x": "hush", "checksum/config": "ab"}
    ref = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    env = [{"name": "A", "value": "hush"}, {"name": "B", "valueFrom": ref}, "hush"]
    pod: dict[str, Any] = {
        "metadata": {"name": "p", "annotations": annotations, "managedFields": [{"manager": "hush"}]},
        "spec": {"containers": [{"name": "c", "env": env, "args": ["--v=4", "--token=hush"]}], "n": 1},
    }
    kept = without_secrets(pod)
    assert "hush" not in json.dumps(kept)
    assert kept["metadata"]["annotations"] == {**annotations, "example.com/x": "(removed)"}
    (container,) = kept["spec"]["containers"]
    assert container["env"] == [{"name": "A", "value": "(removed)"}, env[1], "(removed)"]
    assert (container["args"], kept["spec"]["n"]) == (["--v=4", "--token=(removed)"], 1)
    assert "managedFields" not in kept["metadata"]


def test_of_a_ca_bundle_it_is_told_whose_it_is_and_until_when() -> None:
    pem = create_authority("hami-scheduler", 1_787_400_000.0, 10).certificate_pem
    hook = {"clientConfig": {"caBundle": base64.b64encode(pem * 2).decode()}}
    told = without_secrets(hook)["clientConfig"]["caBundle"]
    assert told == "; ".join(["CN=hami-scheduler until 2026-09-01T12:00:00Z"] * 2)
    broken = without_secrets({"caBundle": "bm9uZQ=="})["caBundle"]
    assert broken == "(8 characters, no certificates)"


# --- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("on gpu-1: team/train-0", "on NODE: NS/POD"),
        ("gpu-1-metax-0 and x-gpu-1", "NODE-metax-0 and x-NODE"),
        ("train-0.team.svc.cluster.local:443", "POD.NS.svc.cluster.local:443"),
        ("2026-08-21T08:20:39Z,team,train-0", "2026-08-21T08:20:39Z,NS,POD"),
        ('hami_gpu_memory{node="gpu-1"} team_1 gpu-10', 'hami_gpu_memory{node="NODE"} team_1 gpu-10'),
        ("127.0.0.1 ::1 0.0.0.0 04:05:06", "127.0.0.1 ::1 0.0.0.0 04:05:06"),
    ],
)
def test_names_are_replaced_where_they_stand_as_words(text: str, wanted: str) -> None:
    renaming = Renaming({"gpu-1": "NODE", "team": "NS", "train-0": "POD"}, SALT)
    assert renaming.text(text) == wanted


def test_addresses_are_replaced_by_digests_that_stay_equal() -> None:
    renaming = Renaming({}, SALT)
    first, second = renaming.text("10.1.2.3:443 fd00::1").split()
    assert first == f"{digest('ip', '10.1.2.3', SALT)}:443"
    assert second == digest("ip", "fd00::1", SALT)
    assert renaming.text("10.1.2.3") == first.removesuffix(":443")


def test_texts_say_which_of_their_words_are_names() -> None:
    log = '{"pod":"team/train-0","node":"gpu-1"} pod="a/b" \\"namespace\\":\\"c\\" node_name="d" owner:"e/f"'
    assert set(names_in(log)) == {
        ("ns", "team"), ("pod", "train-0"), ("node", "gpu-1"), ("ns", "a"), ("pod", "b"), ("ns", "c"),
        ("node", "d"), ("ns", "e"), ("pod", "f"),
    }  # fmt: skip


@given(st.text(string.ascii_lowercase + ".-_:/ 0123456789", max_size=60))
def test_any_text_can_be_renamed(text: str) -> None:
    renaming = Renaming({"node": "NODE"}, SALT)
    assert "node" not in renaming.text(f"{text} node").split(" ")
