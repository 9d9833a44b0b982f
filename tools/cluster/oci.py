"""OCI image archives without a registry and without a daemon, for `ctr images import` and `docker load`.

A layer is a tar file made from a folder: owned by root, dated 1970, names sorted, so equal folders give equal
digests. An archive is an OCI image layout in a tar file.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BLOCK = 1 << 20


@dataclass(slots=True)
class ImageConfig:
    """What a container of the image starts with; ``environment`` may replace PATH."""

    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    user: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


def make_layer(folder: Path, target: Path) -> None:
    """Write the layer with the content of ``folder`` to ``target`` (by a temporary name)."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = 0
        return member

    temporary = target.with_name(target.name + ".new")
    with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as archive:
        for entry in sorted(folder.iterdir()):
            archive.add(entry, arcname=entry.name, filter=plain)
    temporary.replace(target)


def write_image(target: Path, name: str, layers: Sequence[Path], config: ImageConfig) -> None:
    """Write the archive of an image ``NAME:TAG`` with these layers, lowest first (by a temporary name)."""
    platform_of = {"architecture": ARCHITECTURES[platform.machine()], "os": "linux"}
    blobs: dict[str, bytes | Path] = {}
    digests = [_digest(layer) for layer in layers]
    descriptors = []
    for digest, layer in zip(digests, layers, strict=True):
        blobs[digest] = layer
        descriptors.append(
            {
                "mediaType": "application/vnd.oci.image.layer.v1.tar",
                "digest": f"sha256:{digest}",
                "size": layer.stat().st_size,
            }
        )
    settings: dict[str, Any] = {
        "Env": [f"{key}={value}" for key, value in ({"PATH": _PATH} | config.environment).items()],
        "Labels": config.labels,
    }
    for key, value in (("Entrypoint", config.entrypoint), ("Cmd", config.command)):
        if value:
            settings[key] = value
    if config.user:
        settings["User"] = config.user
    image = {
        **platform_of,
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            **_document(blobs, image),
        },
        "layers": descriptors,
    }
    index = {
        "schemaVersion": 2,
        "manifests": [
            {
                "mediaType": manifest["mediaType"],
                **_document(blobs, manifest),
                "annotations": {
                    "io.containerd.image.name": name,
                    "org.opencontainers.image.ref.name": name.rpartition(":")[2],
                },
                "platform": platform_of,
            }
        ],
    }
    temporary = target.with_name(target.name + ".new")
    with tarfile.open(temporary, "w") as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(archive, "index.json", json.dumps(index).encode())
        for digest, content in blobs.items():
            _add(archive, f"blobs/sha256/{digest}", content)
    temporary.replace(target)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _document(blobs: dict[str, bytes | Path], content: Mapping[str, Any]) -> dict[str, Any]:
    data = json.dumps(content, sort_keys=True).encode()
    digest = hashlib.sha256(data).hexdigest()
    blobs[digest] = data
    return {"digest": f"sha256:{digest}", "size": len(data)}


def _add(archive: tarfile.TarFile, name: str, content: bytes | Path) -> None:
    member = tarfile.TarInfo(name)
    if isinstance(content, bytes):
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
        return
    member.size = content.stat().st_size
    with content.open("rb") as stream:
        archive.addfile(member, stream)
