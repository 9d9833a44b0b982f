"""Texts and objects without what nobody should hand on: keys, tokens, passwords, values of environments.

For what goes into a support bundle. Whole members are removed by where they stand; inside of texts, where a
secret can stand anywhere, by what it looks like. Pure.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, Final

from cryptography import x509

from hami.answers.hashing import digest

REMOVED: Final = "(removed)"
_KEPT_ANNOTATIONS: Final = ("hami.io", "checksum", "deployment.kubernetes.io", "meta.helm.sh")
_DROPPED: Final = frozenset({"managedFields"})
_KEY: Final = re.compile(r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?(?:-----END \1-----|\Z)", re.DOTALL)
_JWT: Final = re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?")
_SCHEME: Final = re.compile(r"(?i)\b(bearer|basic)(\s+)[A-Za-z0-9._~+/=-]{8,}")
_LOOKS: Final = re.compile(
    r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|hf_[A-Za-z0-9]{20,})"
)
_USER: Final = re.compile(r"(?<=://)(?:[^/?#\s:@\"'<>]{0,200}:[^\s\"'<>]{1,400}|[^/?#\s\"'<>]{1,400})(?=@)")
_WORDS: Final = (
    *("password", "passwd", "passphrase", "pwd", "token", "secret", "key", "credential", "authorization"),
    "cookie",
)
_NAME: Final = (
    r"[\w-]{0,40}(?:password|passwd|passphrase|pwd|token|(?<!tls-)secret|api[_-]?key|access[_-]?key"
    r"|private[_-]?key|credentials?|authorization|cookie)"
)
_VALUE: Final = (
    r"(\\\"(?:[^\"\\]|\\[^\"])*(?:\\\"|\Z)|\"(?:[^\"\\]|\\.)*(?:\"|\Z)|'[^']*(?:'|\Z)|[^\s\"'\\,;&}\]]+)"
)
_ASSIGNED: Final = re.compile(rf"(?i)(?<![\w-])({_NAME}(?:\\?[\"'])?\s{{0,4}}[:=]\s{{0,4}}){_VALUE}")
_FLAGGED: Final = re.compile(
    rf"(?i)(?<![\w-])(--?{_NAME}(?:\\?[\"']\s{{0,4}},\s{{0,4}}|\s{{1,4}}))(?!\\?[\"']?[-=:]){_VALUE}"
)
_SECRET_NAME: Final = re.compile(rf"(?i){_NAME}")
_SECRET_FLAG: Final = re.compile(rf"(?i)--?{_NAME}")


def scrub(text: str) -> str:
    """A text without private keys, tokens, passwords in addresses, and values of names such as `token`."""
    text = _KEY.sub(REMOVED, text)
    text = _JWT.sub(REMOVED, text)
    text = _SCHEME.sub(rf"\1\2{REMOVED}", text)
    text = _LOOKS.sub(REMOVED, text)
    text = _USER.sub(REMOVED, text)
    return "".join(map(_line, text.splitlines(keepends=True)))


def _line(line: str) -> str:
    lowered = line.lower()
    if not any(word in lowered for word in _WORDS):  # most lines, so that megabytes take no time
        return line
    return _FLAGGED.sub(_without_value, _ASSIGNED.sub(_without_value, line))


def _without_value(found: re.Match[str]) -> str:
    name, value = found.groups()
    quote = re.match(r"\\?[\"']|", value)
    mark = quote[0] if quote else ""
    return f"{name}{mark}{REMOVED}{mark}"


def scrub_all(value: Any) -> Any:
    """Plain data with every text in it scrubbed, and without what members and flags of such names hold."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, Mapping):
        return {key: REMOVED if _is_secret(value, key) else scrub_all(value[key]) for key in value}
    return [scrub_all(one) for one in _without_flagged(value)] if isinstance(value, list) else value


def _is_secret(obj: Mapping[str, Any], member: str) -> bool:
    """Whether a member holds a secret by its name, or by the name that stands beside its value."""
    if not isinstance(obj[member], str):
        return False
    name = obj.get("name") if member == "value" else member
    return isinstance(name, str) and _SECRET_NAME.fullmatch(name) is not None


def _without_flagged(values: list[Any]) -> list[Any]:
    """A list, such as the arguments of a command, without the values that follow a flag such as `--token`."""
    kept = []
    flagged = False
    for one in values:
        text = one if isinstance(one, str) else ""
        kept.append(REMOVED if flagged and text and not text.startswith("-") else one)
        flagged = _SECRET_FLAG.fullmatch(text) is not None
    return kept


def without_secrets(obj: Mapping[str, Any]) -> dict[str, Any]:
    """An object of HAMi's own (never a Secret): environments without values, no foreign annotations, no
    history of fields, certificates by who signed them and until when, all texts scrubbed."""
    kept: dict[str, Any] = _cleaned(obj, "")
    return kept


def _cleaned(value: Any, member: str) -> Any:
    if isinstance(value, str):
        return _bundle(value) if member == "caBundle" else scrub(value)
    if isinstance(value, Mapping):
        if member == "annotations":
            return {key: _annotation(key, inner) for key, inner in value.items()}
        return {
            key: REMOVED if _is_secret(value, key) else _cleaned(inner, key)
            for key, inner in value.items()
            if key not in _DROPPED
        }
    if isinstance(value, list):
        if member == "env":
            return [_variable(one) for one in value]
        return [_cleaned(one, "") for one in _without_flagged(value)]
    return value


def _annotation(key: str, value: Any) -> Any:
    domain = str(key).partition("/")[0]
    return scrub(value) if domain in _KEPT_ANNOTATIONS and isinstance(value, str) else REMOVED


def _variable(entry: Any) -> Any:
    """A variable's name and where its value comes from, never the value."""
    if not isinstance(entry, Mapping):
        return REMOVED
    kept = {key: entry[key] for key in ("name", "valueFrom") if key in entry}
    return {**kept, "value": REMOVED} if "value" in entry else kept


def _bundle(text: str) -> str:
    """What is worth knowing of a CA bundle."""
    try:
        certificates = x509.load_pem_x509_certificates(base64.b64decode(text, validate=True))
    except (ValueError, binascii.Error):
        return f"({len(text)} characters, no certificates)"
    return "; ".join(_certificate(one) for one in certificates)


def _certificate(certificate: x509.Certificate) -> str:
    until = certificate.not_valid_after_utc.strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"{certificate.subject.rfc4514_string()} until {until}"


# --- names ------------------------------------------------------------------------------------------------

_TOKEN: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")
_ADDRESS6: Final = re.compile(r"(?<![\w:.])[0-9a-fA-F:]{2,39}(?![\w:.])")
_NAMED: Final = re.compile(
    r"\b(pods?|node|nodeName|node_name|host|hostname|namespace|holder|owner)(?:\\?\")?\s{0,4}[:=]\s{0,4}"
    r"\\?\"([^\"\\\s]{1,253})\\?\""
)
_KINDS: Final = {"node": "node", "nodeName": "node", "node_name": "node", "host": "node", "hostname": "node"}
_MAX_PARTS: Final = 63


def names_in(text: str) -> Iterable[tuple[str, str]]:
    """Kind (`node`, `pod`, `ns`) and name of what a log or metrics text says something about."""
    for found in _NAMED.finditer(text):
        member, value = found.groups()
        if member == "namespace":
            yield "ns", value
        elif member in _KINDS:
            yield "node", value
        else:
            namespace, slash, name = value.partition("/")
            if slash:
                yield "ns", namespace
            yield "pod", name or namespace


class Renaming:
    """Replaces names wherever they stand as words, also within longer ones; and addresses of machines."""

    def __init__(self, names: Mapping[str, str], salt: bytes) -> None:
        """``names``: old to new."""
        self._names = names
        self._salt = salt
        self._token = lru_cache(maxsize=1 << 17)(self._renamed)

    def text(self, text: str) -> str:
        """A text with the new names."""
        text = _TOKEN.sub(lambda found: self._token(found[0]), text)
        return _ADDRESS6.sub(lambda found: self._address(found[0]), text)

    def _renamed(self, token: str) -> str:
        known = self._names.get(token)
        if known is not None:
            return known
        parts = re.split(r"([.-])", token)
        if len(parts) == 1 or len(parts) > _MAX_PARTS:
            return token
        if len(parts) == 7 and token.count(".") == 3:
            return self._address(token)
        made, at = "", 0
        while at < len(parts):
            for end in range(len(parts), at, -2):
                new = self._names.get("".join(parts[at:end]))
                if new is not None:
                    made, at = made + new, end
                    break
            else:
                made, at = made + parts[at], at + 1
            if at < len(parts):
                made, at = made + parts[at], at + 1
        return made

    def _address(self, text: str) -> str:
        try:
            address = ip_address(text)
        except ValueError:
            return text
        if address.is_loopback or address.is_unspecified or address.is_multicast:
            return text
        return digest("ip", address.compressed, self._salt)
