"""Who makes a request: the administrator, or a ServiceAccount by a token that this server has issued."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from secrets import token_bytes
from typing import Any

import msgspec

from hami.local.api.errors import bad_request, invalid
from hami.local.api.objects import Object, dig, meta, name_of, namespace_of, rfc3339
from hami.local.api.resources import PODS, SECRETS, SERVICEACCOUNTS
from hami.local.api.store import Store

ISSUER = "https://kubernetes.default.svc.cluster.local"
AUDIENCE = ISSUER
_MIN_S, _DEFAULT_S, _MAX_S = 600, 3600, 1 << 32
_MAX_TOKEN = 16 * 1024
_BOUND = {"Pod": PODS, "Secret": SECRETS}


@dataclass(frozen=True, slots=True)
class User:
    """An identity as ``authentication.k8s.io/v1 UserInfo`` shows it."""

    username: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    audiences: tuple[str, ...] = (AUDIENCE,)

    def info(self) -> Object:
        found: Object = {"username": self.username, "groups": list(self.groups)}
        if self.uid:
            found["uid"] = self.uid
        return found


ADMIN = User("embedded-admin", groups=("system:masters", "system:authenticated"))


class Tokens:
    """Issues and checks ServiceAccount tokens: JSON Web Tokens signed with a key of this process.

    ``admin``: the bearer token of the administrator; None lets requests without a token pass as theirs.
    """

    def __init__(self, store: Store, clock: Callable[[], float], admin: str | None) -> None:
        self._store = store
        self._clock = clock
        self._admin = admin
        self._key = token_bytes(32)

    def user_of(self, authorization: str) -> User | None:
        """The user of an ``Authorization`` header; None where there is none or it is not valid."""
        scheme, _, token = authorization.partition(" ")
        known = self.verify(token.strip()) if scheme.lower() == "bearer" else None
        return ADMIN if known is None and self._admin is None else known

    def verify(self, token: str) -> User | None:
        """The user of a token; None where it is forged, expired, or its account has gone."""
        if self._admin is not None and hmac.compare_digest(token.encode(), self._admin.encode()):
            return ADMIN
        claims = self._claims(token)
        if claims is None or not claims["nbf"] <= self._clock() < claims["exp"]:
            return None
        about = claims["kubernetes.io"]
        namespace, name, uid = (
            about["namespace"],
            about["serviceaccount"]["name"],
            about["serviceaccount"]["uid"],
        )
        account = self._store.find(SERVICEACCOUNTS, namespace, name)
        if account is None or meta(account)["uid"] != uid or not self._bound_exists(namespace, about):
            return None
        groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated")
        return User(f"system:serviceaccount:{namespace}:{name}", uid, groups, tuple(claims["aud"]))

    def request(self, account: Object, body: Any) -> Object:
        """The answer to a TokenRequest for ``account``: the request with its status. Raises 400, 404, 422."""
        if not isinstance(body, dict) or body.get("kind", "TokenRequest") != "TokenRequest":
            raise bad_request("the body of the request is not a TokenRequest")
        spec = body.get("spec") or {}
        audiences = spec.get("audiences") or [AUDIENCE]
        seconds = spec.get("expirationSeconds") or _DEFAULT_S
        if not isinstance(audiences, list) or not all(isinstance(item, str) for item in audiences):
            raise bad_request("spec.audiences is not a list of strings")
        if not isinstance(seconds, int) or isinstance(seconds, bool) or not _MIN_S <= seconds <= _MAX_S:
            raise invalid(
                "TokenRequest", "authentication.k8s.io", name_of(account),
                [("spec.expirationSeconds",
                  f"Invalid value: {seconds!r}: must be between {_MIN_S} and {_MAX_S} seconds")],
            )  # fmt: skip
        bound = self._bound(namespace_of(account), spec.get("boundObjectRef"))
        token = self._issue(account, audiences, seconds, bound)
        return {
            "kind": "TokenRequest",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {"name": name_of(account), "namespace": namespace_of(account),
                         "creationTimestamp": rfc3339(self._clock())},
            "spec": {**spec, "audiences": audiences, "expirationSeconds": seconds},
            "status": {"token": token, "expirationTimestamp": rfc3339(self._clock() + seconds)},
        }  # fmt: skip

    def _bound(self, namespace: str, reference: Any) -> Object:
        """The claims on the object that the token is bound to."""
        if not reference:
            return {}
        resource = _BOUND.get(str(dig(reference, "kind")))
        if resource is None:
            raise bad_request(f"cannot bind token to {reference!r}: only Pod and Secret are supported")
        found = self._store.get(resource, namespace, str(reference.get("name")))
        wanted = reference.get("uid")
        if wanted and wanted != meta(found)["uid"]:
            raise bad_request(f"the UID in the bound object reference ({wanted}) does not match")
        return {str(reference["kind"]).lower(): {"name": name_of(found), "uid": meta(found)["uid"]}}

    def _bound_exists(self, namespace: str, about: Object) -> bool:
        for kind, resource in _BOUND.items():
            bound = about.get(kind.lower())
            if bound is not None:
                found = self._store.find(resource, namespace, bound["name"])
                if found is None or meta(found)["uid"] != bound["uid"]:
                    return False
        return True

    def _issue(self, account: Object, audiences: Sequence[str], seconds: int, bound: Object) -> str:
        now = int(self._clock())
        namespace, name = namespace_of(account), name_of(account)
        claims = {
            "iss": ISSUER,
            "aud": audiences,
            "sub": f"system:serviceaccount:{namespace}:{name}",
            "iat": now,
            "nbf": now,
            "exp": now + seconds,
            "kubernetes.io": {
                "namespace": namespace,
                "serviceaccount": {"name": name, "uid": meta(account)["uid"]},
                **bound,
            },
        }
        text = f"{_encode({'alg': 'HS256', 'typ': 'JWT'})}.{_encode(claims)}"
        return f"{text}.{self._signature(text)}"

    def _claims(self, token: str) -> Object | None:
        if len(token) > _MAX_TOKEN or not token.isascii() or token.count(".") != 2:
            return None
        text, _, signature = token.rpartition(".")
        if not hmac.compare_digest(signature, self._signature(text)):
            return None
        payload = text.partition(".")[2]
        try:
            claims: Object = msgspec.json.decode(
                base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
            )
        except (binascii.Error, ValueError, msgspec.DecodeError):
            return None
        return claims

    def _signature(self, text: str) -> str:
        return _plain(hmac.new(self._key, text.encode(), hashlib.sha256).digest())


def _encode(value: Any) -> str:
    return _plain(msgspec.json.encode(value))


def _plain(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
