"""The environment and volumes of a container as kubelet makes them out of the pod."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hami.local.api.objects import Object, dig, meta, namespace_of
from hami.local.kubelet.containers import ContainerStartError, Mount
from hami.local.scheduling.amounts import milli

Lookup = Callable[[str, str, str], Object | None]
"""(``configmaps`` or ``secrets``, namespace, name) -> object."""

_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_][A-Za-z0-9_.-]*)\))")
_FIELD = re.compile(r"^(metadata\.(?:labels|annotations))\['([^']+)'\]$")


def expand(text: str, env: Mapping[str, str]) -> str:
    """Kubernetes' ``$(NAME)`` expansion; ``$$(NAME)`` is literal, unknown names stay as they are."""

    def value(found: re.Match[str]) -> str:
        if found[1] == "$":
            return "$"
        return env.get(found[2], found[0])

    return _REFERENCE.sub(value, text)


def container_env(
    pod: Object, container: Object, node: Object, base: Mapping[str, str], lookup: Lookup
) -> dict[str, str]:
    """``base`` (what plugins answered) with the pod's own variables over it.

    Raises :class:`ContainerStartError` for a missing ConfigMap, Secret or key that is not optional.
    """
    env = dict(base)
    namespace = namespace_of(pod)
    for source in container.get("envFrom") or []:
        for field, plural in (("configMapRef", "configmaps"), ("secretRef", "secrets")):
            reference = source.get(field)
            if reference is not None:
                found = _referenced(reference, plural, namespace, lookup)
                prefix = source.get("prefix") or ""
                env.update((prefix + key, text) for key, text in found.items())
    for item in container.get("env") or []:
        value = item.get("value")
        if value is None and item.get("valueFrom"):
            value = _from_source(item["valueFrom"], pod, container, node, lookup)
            if value is None:
                continue
            env[item["name"]] = value
        else:
            env[item["name"]] = expand(value or "", env)
    return env


def _from_source(source: Object, pod: Object, container: Object, node: Object, lookup: Lookup) -> str | None:
    if source.get("fieldRef"):
        return field_value(pod, str(source["fieldRef"].get("fieldPath")))
    if source.get("resourceFieldRef"):
        return _resource_value(source["resourceFieldRef"], pod, container, node)
    for field, plural in (("configMapKeyRef", "configmaps"), ("secretKeyRef", "secrets")):
        reference = source.get(field)
        if reference is not None:
            found = _referenced(reference, plural, namespace_of(pod), lookup)
            key = str(reference.get("key"))
            if key in found:
                return found[key]
            if reference.get("optional"):
                return None
            raise ContainerStartError(f"couldn't find key {key} in {plural[:-1]} {reference.get('name')}")
    raise ContainerStartError(f"valueFrom {sorted(source)} is not supported")


def _referenced(reference: Object, plural: str, namespace: str, lookup: Lookup) -> dict[str, str]:
    """The text data of a ConfigMap or Secret; {} if it is missing and optional."""
    name = str(reference.get("name"))
    found = lookup(plural, namespace, name)
    if found is None:
        if reference.get("optional"):
            return {}
        raise ContainerStartError(f'{plural[:-1]} "{name}" not found')
    return {key: data.decode(errors="replace") for key, data in _data(found).items()}


def _data(obj: Object) -> dict[str, bytes]:
    secret = obj.get("kind") == "Secret"
    result: dict[str, bytes] = {}
    for key, text in (obj.get("data") or {}).items():
        try:
            result[key] = base64.b64decode(text, validate=True) if secret else str(text).encode()
        except binascii.Error as error:
            raise ContainerStartError(f"key {key} of secret {meta(obj)['name']} is not base64") from error
    for key, text in (obj.get("binaryData") or {}).items():
        result[key] = base64.b64decode(text)
    for key, text in (obj.get("stringData") or {}).items():
        result[key] = str(text).encode()
    return result


def field_value(pod: Object, path: str) -> str:
    """``fieldRef`` of the downward API. Raises :class:`ContainerStartError` for an unsupported path."""
    found = _FIELD.match(path)
    if found:
        return str((dig(pod, *found[1].split(".")) or {}).get(found[2], ""))
    if path in ("metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName",
                "spec.serviceAccountName", "status.hostIP", "status.podIP", "status.podIPs"):  # fmt: skip
        return str(dig(pod, *path.split(".")) or "")
    raise ContainerStartError(f"unsupported fieldPath: {path}")


def _resource_value(reference: Object, pod: Object, container: Object, node: Object) -> str:
    side, _, name = str(reference.get("resource")).partition(".")
    owner = container
    wanted = reference.get("containerName")
    for other in dig(pod, "spec", "containers") or []:
        if wanted and other.get("name") == wanted:
            owner = other
    amount = (dig(owner, "resources", side) or {}).get(name)
    if amount is None and side == "limits":
        amount = (dig(node, "status", "allocatable") or {}).get(name)
    divisor = milli(reference.get("divisor") or "1") or 1000
    return str(-(-milli(amount or 0) // divisor))


def volume_mounts(pod: Object, container: Object, directory: Path, lookup: Lookup) -> list[Mount]:
    """The mounts of a container's volumes; their contents are written below ``directory``.

    Raises :class:`ContainerStartError` for a volume type that this kubelet does not have.
    """
    volumes = {volume.get("name"): volume for volume in dig(pod, "spec", "volumes") or []}
    mounts: list[Mount] = []
    for wanted in container.get("volumeMounts") or []:
        volume = volumes.get(wanted.get("name"))
        if volume is None:
            raise ContainerStartError(f"volume {wanted.get('name')!r} is not defined in the pod")
        source = _volume(pod, volume, directory / str(wanted["name"]), lookup)
        if wanted.get("subPath"):
            source = source / str(wanted["subPath"]).lstrip("/")
            if ".." in source.parts:
                raise ContainerStartError("subPath must not contain '..'")
            source.mkdir(parents=True, exist_ok=True)
        mounts.append(Mount(str(source), str(wanted["mountPath"]), bool(wanted.get("readOnly"))))
    return mounts


def _volume(pod: Object, volume: Object, directory: Path, lookup: Lookup) -> Path:
    namespace = namespace_of(pod)
    if volume.get("hostPath") is not None:
        path = Path(str(volume["hostPath"].get("path")))
        if volume["hostPath"].get("type") == "DirectoryOrCreate":
            path.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            raise ContainerStartError(f"hostPath {path} does not exist")
        return path
    if "emptyDir" in volume:
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o777)
        return directory
    for field, plural, key in (("configMap", "configmaps", "name"), ("secret", "secrets", "secretName")):
        source: Any = volume.get(field)
        if source is None:
            continue
        found = lookup(plural, namespace, str(source.get(key)))
        if found is None and not source.get("optional"):
            raise ContainerStartError(f'{plural[:-1]} "{source.get(key)}" not found')
        data = _data(found) if found else {}
        directory.mkdir(parents=True, exist_ok=True)
        items = source.get("items")
        files = {item["path"]: data[item["key"]] for item in items if item["key"] in data} if items else data
        for name, content in files.items():
            target = directory / name
            if ".." in target.parts:
                raise ContainerStartError(f"item path {name} must not contain '..'")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return directory
    raise ContainerStartError(f"volume {volume.get('name')!r} is of a type that this kubelet does not have")
