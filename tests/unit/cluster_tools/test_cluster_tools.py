"""The test cluster's tools: OCI archives, settings from Dockerfiles, the runtime that puts the driver in."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools/cluster"


def _load(name: str) -> ModuleType:
    sys.path.insert(0, str(TOOLS))
    try:
        spec = importlib.util.spec_from_file_location(f"cluster_tools_{name}", TOOLS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(TOOLS))
    return module


oci, images = _load("oci"), _load("images")


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    stream = archive.extractfile(name)
    assert stream is not None
    return stream.read()


def test_an_archive_leads_from_the_index_to_the_layers(tmp_path: Path) -> None:
    (tmp_path / "root/bin").mkdir(parents=True)
    (tmp_path / "root/bin/program").write_text("x")
    oci.make_layer(tmp_path / "root", tmp_path / "layer.tar")
    config = oci.ImageConfig(entrypoint=["/bin/program"], user="1:1", environment={"A": "b"})
    oci.write_image(tmp_path / "image.tar", "example.test/image:1", [tmp_path / "layer.tar"], config)
    with tarfile.open(tmp_path / "image.tar") as archive:
        index = json.loads(_read(archive, "index.json"))

        def blob(descriptor: dict[str, Any]) -> bytes:
            data = _read(archive, "blobs/" + descriptor["digest"].replace(":", "/"))
            assert hashlib.sha256(data).hexdigest() == descriptor["digest"].removeprefix("sha256:")
            assert len(data) == descriptor["size"]
            return data

        assert index["manifests"][0]["annotations"]["io.containerd.image.name"] == "example.test/image:1"
        manifest = json.loads(blob(index["manifests"][0]))
        settings = json.loads(blob(manifest["config"]))
        assert settings["config"]["Entrypoint"] == ["/bin/program"]
        assert settings["config"]["User"] == "1:1"
        assert "A=b" in settings["config"]["Env"]
        assert settings["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]]
        assert blob(manifest["layers"][0]) == (tmp_path / "layer.tar").read_bytes()


def test_equal_folders_give_equal_layers(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for file in ("two", "one") if name == "a" else ("one", "two"):
            (tmp_path / name / file).write_text(file)
        oci.make_layer(tmp_path / name, tmp_path / f"{name}.tar")
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


@pytest.mark.parametrize("name", ["hami", "test-program"])
def test_images_run_as_nobody_and_their_dockerfiles_copy_what_there_is(name: str) -> None:
    file = ROOT / f"images/{name}/Dockerfile"
    config = images.from_dockerfile(file)
    assert config.user == images.NOBODY
    assert config.labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert config.entrypoint or config.command
    for line in file.read_text().splitlines():
        words = line.split()
        if words[:1] == ["COPY"] and not words[1].startswith("--from"):
            for source in words[1:-1]:
                assert (ROOT / source).exists() or source.startswith("build/"), source


def test_the_image_asks_the_runtime_for_the_driver() -> None:
    environment = images.from_dockerfile(ROOT / "images/hami/Dockerfile").environment
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert environment["PATH"].startswith("/k8s-vgpu/bin:")


def _through_the_runtime(folder: Path, environment: list[str]) -> dict[str, Any]:
    """The runtime configuration that runc gets for a container with this environment."""
    runc = folder / "runc"
    runc.write_text('#!/bin/sh\necho "$@" > ' + str(folder / "arguments") + "\n")
    runc.chmod(0o755)
    text = (TOOLS / "simulated-nvidia-runtime").read_text()
    for name, value in (("@DRIVER@", "/driver"), ("@CARDS@", "/cards"), ("@RUNC@", str(runc))):
        text = text.replace(name, value)
    runtime = folder / "runtime.py"
    runtime.write_text(text)
    (folder / "config.json").write_text(json.dumps({"process": {"env": environment}, "mounts": []}))
    command = [sys.executable, str(runtime), "--root", "/r", "create", "--bundle", str(folder), "name"]
    subprocess.run(command, check=True, timeout=30)
    assert (folder / "arguments").read_text().split() == command[2:]
    spec: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return spec


def test_the_runtime_puts_the_driver_into_containers_that_ask_for_it(tmp_path: Path) -> None:
    spec = _through_the_runtime(tmp_path, ["NVIDIA_VISIBLE_DEVICES=GPU-1"])
    sources = [mount["source"] for mount in spec["mounts"]]
    assert sources == ["/driver/libcuda.so.1", "/driver/libnvidia-ml.so.1", "/cards"]
    assert spec["mounts"][2]["destination"] == "/dev/fakegpu"


@pytest.mark.parametrize("environment", [[], ["NVIDIA_VISIBLE_DEVICES="], ["NVIDIA_VISIBLE_DEVICES=void"]])
def test_the_runtime_leaves_other_containers_alone(tmp_path: Path, environment: list[str]) -> None:
    spec = _through_the_runtime(tmp_path, environment)
    assert spec == {"process": {"env": environment}, "mounts": []}
