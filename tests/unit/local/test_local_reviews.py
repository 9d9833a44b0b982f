"""ServiceAccount tokens, and the reviews that ask about users."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from hami.local.api.errors import ApiError
from hami.local.api.objects import Object
from hami.local.api.resources import (
    ACCESS_REVIEWS,
    PODS,
    SELF_ACCESS_REVIEWS,
    SELF_RULES_REVIEWS,
    SELF_SUBJECT_REVIEWS,
    SERVICEACCOUNTS,
    TOKENREVIEWS,
)
from hami.local.api.reviews import answer
from hami.local.api.store import Store
from hami.local.api.tokens import ADMIN, AUDIENCE, Tokens


class World:
    """A store with one ServiceAccount and one pod, a clock, and tokens."""

    def __init__(self, admin: str | None = None) -> None:
        self.now = 1_800_000_000.0
        self.store = Store()
        self.account = self.add(SERVICEACCOUNTS, "sa")
        self.tokens = Tokens(self.store, lambda: self.now, admin)

    def add(self, resource: Any, name: str) -> Object:
        body = {"metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}"}}
        return self.store.create(resource, body)

    def issue(self, **spec: Any) -> str:
        return str(self.tokens.request(self.account, {"spec": spec})["status"]["token"])


@pytest.fixture
def world() -> World:
    return World()


def test_a_token_names_its_account(world: World) -> None:
    user = world.tokens.verify(world.issue())
    assert user is not None
    assert user.username == "system:serviceaccount:team:sa"
    assert "system:serviceaccounts:team" in user.groups
    assert user.uid == "uid-sa"


def test_a_token_expires(world: World) -> None:
    token = world.issue(expirationSeconds=600)
    world.now += 599
    assert world.tokens.verify(token) is not None
    world.now += 1
    assert world.tokens.verify(token) is None


def test_a_changed_token_is_not_believed(world: World) -> None:
    header, payload, signature = world.issue().split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    claims["exp"] += 10_000
    forged = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    assert world.tokens.verify(f"{header}.{forged}.{signature}") is None
    assert Tokens(world.store, lambda: world.now, None).verify(f"{header}.{payload}.{signature}") is None


@pytest.mark.parametrize("token", ["", "a", "a.b.c", "ä.b.c", "." * 5, "x" * 100_000])
def test_what_is_no_token_is_nobody(world: World, token: str) -> None:
    assert world.tokens.verify(token) is None


def test_a_token_ends_with_its_account(world: World) -> None:
    token = world.issue()
    world.store.delete(SERVICEACCOUNTS, world.account)
    assert world.tokens.verify(token) is None


def test_a_bound_token_ends_with_its_pod(world: World) -> None:
    pod = world.add(PODS, "p")
    token = world.issue(boundObjectRef={"kind": "Pod", "name": "p", "uid": "uid-p"})
    assert world.tokens.verify(token) is not None
    world.store.delete(PODS, pod)
    assert world.tokens.verify(token) is None


@pytest.mark.parametrize(
    ("spec", "code"),
    [({"expirationSeconds": 1}, 422), ({"expirationSeconds": "1h"}, 422), ({"audiences": "x"}, 400),
     ({"boundObjectRef": {"kind": "Node", "name": "n"}}, 400),
     ({"boundObjectRef": {"kind": "Pod", "name": "gone"}}, 404)],
)  # fmt: skip
def test_a_bad_token_request_is_refused(world: World, spec: Object, code: int) -> None:
    with pytest.raises(ApiError) as refused:
        world.issue(**spec)
    assert refused.value.code == code


def test_without_an_administrators_token_everybody_is_the_administrator(world: World) -> None:
    assert world.tokens.user_of("") == ADMIN
    assert world.tokens.user_of("Bearer nonsense") == ADMIN


def test_with_one_only_known_tokens_pass() -> None:
    world = World(admin="secret")
    assert world.tokens.user_of("") is None
    assert world.tokens.user_of("Bearer nonsense") is None
    assert world.tokens.user_of("Basic secret") is None
    assert world.tokens.user_of("Bearer secret") == ADMIN
    user = world.tokens.user_of(f"Bearer {world.issue()}")
    assert user is not None
    assert user.username == "system:serviceaccount:team:sa"


def ask(world: World, resource: Any, spec: Any) -> Object:
    status: Object = answer(resource, {"spec": spec}, ADMIN, world.tokens)["status"]
    return status


def test_a_token_review_tells_who_and_for_which_audience(world: World) -> None:
    token = world.issue(audiences=["vault", AUDIENCE])
    status = ask(world, TOKENREVIEWS, {"token": token})
    assert status["authenticated"] is True
    assert status["user"]["username"] == "system:serviceaccount:team:sa"
    assert status["audiences"] == [AUDIENCE]
    assert ask(world, TOKENREVIEWS, {"token": token, "audiences": ["vault"]})["audiences"] == ["vault"]
    assert ask(world, TOKENREVIEWS, {"token": token, "audiences": ["other"]})["authenticated"] is False
    assert ask(world, TOKENREVIEWS, {"token": "x"})["error"] == "invalid bearer token"


def test_access_reviews_say_what_this_server_does(world: World) -> None:
    attributes = {"resourceAttributes": {"verb": "get", "resource": "pods"}}
    assert ask(world, SELF_ACCESS_REVIEWS, attributes)["allowed"] is True
    assert ask(world, ACCESS_REVIEWS, {**attributes, "user": "jane"})["allowed"] is True
    assert ask(world, SELF_RULES_REVIEWS, {"namespace": "default"})["resourceRules"][0]["verbs"] == ["*"]
    assert ask(world, SELF_SUBJECT_REVIEWS, {})["userInfo"]["username"] == ADMIN.username


@pytest.mark.parametrize(
    ("resource", "body", "code"),
    [
        (ACCESS_REVIEWS, {"spec": {"resourceAttributes": {"verb": "get"}}}, 422),
        (ACCESS_REVIEWS, {"spec": {"user": "jane"}}, 422),
        (SELF_ACCESS_REVIEWS, {"spec": {"resourceAttributes": {}, "nonResourceAttributes": {}}}, 422),
        (TOKENREVIEWS, {"spec": {}}, 400),
        (TOKENREVIEWS, [], 400),
        (TOKENREVIEWS, {"spec": 7}, 400),
        (TOKENREVIEWS, {"kind": "Pod"}, 400),
    ],
)
def test_a_review_that_asks_nothing_is_refused(world: World, resource: Any, body: Any, code: int) -> None:
    with pytest.raises(ApiError) as refused:
        answer(resource, body, ADMIN, world.tokens)
    assert refused.value.code == code
