"""Build the images of the test cluster into the cache and print the paths of their archives, one a line.

usage: images.py [NAME...]      without a name: all. Run by hami-cluster, with its environment.

Each archive's name carries a hash over all that went into it, so nothing is built twice. The content of
hami and test-program is that of the Dockerfiles below images/, made without a registry and without a daemon.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from oci import ImageConfig, make_layer, write_image

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = Path(os.environ.get("HAMI_CACHE") or Path.home() / ".cache/hami") / "images"
PROGRAMS = Path(os.environ.get("KUBE_BIN", ""))
NATIVE = Path(os.environ.get("HAMI_NATIVE_BUILD") or ROOT / "build/native")
PACKAGES = "usr/local/lib/python3.11/dist-packages"
NOBODY = "65534:65534"
TAG = "dev"
"""Tag of our own images in the test cluster; an image with the same content has the same digest."""
NEXT_VERSION = "99.0.0"
"""What hami-next says it is."""


def main(names: list[str]) -> None:
    """Print the archive of each image, built if its content is not in the cache yet."""
    os.umask(0o022)
    CACHE.mkdir(parents=True, exist_ok=True)
    images = {
        "pause": pause,
        "kube-scheduler": kube_scheduler,
        "hami": hami,
        "hami-next": hami_next,
        "test-program": test_program,
    }
    unknown = sorted(set(names) - set(images))
    if unknown:
        sys.exit(f"images: unknown image {', '.join(unknown)}; there are {', '.join(images)}")
    for name in names or images:
        print(images[name](), flush=True)


def pause() -> Path:
    """PID 1 of pod sandboxes."""

    def fill(folder: Path) -> None:
        run("gcc", "-static", "-Os", "-s", "-o", str(folder / "pause"), str(HERE / "pause.c"))

    layer = cached_layer("pause", [HERE / "pause.c"], fill)
    return image("pause", "hami.local/pause:1", [layer], ImageConfig(entrypoint=["/pause"], user=NOBODY))


def kube_scheduler() -> Path:
    """The scheduler that build.sh made, alone."""
    program = PROGRAMS / "kube-scheduler"

    def fill(folder: Path) -> None:
        (folder / "usr/local/bin").mkdir(parents=True)
        shutil.copy2(program, folder / "usr/local/bin/kube-scheduler")

    version = os.environ["K8S_VERSION"]
    layer = cached_layer("kube-scheduler", [program], fill)
    return image("kube-scheduler", f"hami.local/kube-scheduler:v{version}", [layer], ImageConfig(user=NOBODY))


def hami() -> Path:
    """All roles of this project in one image."""
    return image("hami", f"hami.local/hami:{TAG}", hami_layers(), hami_config(project_version()))


def hami_next() -> Path:
    """The same with another version number and another build of the library, for tests of upgrades."""
    sources = [ROOT / name for name in ("pyproject.toml", "LICENSE", "README.md")] + files(ROOT / "native")
    layer = cached_layer("next-version", [*sources, HERE / "images.py"], fill_next_version)
    return image("hami-next", "hami.local/hami:next", [*hami_layers(), layer], hami_config(NEXT_VERSION))


def hami_layers() -> list[Path]:
    """Debian, the dependencies, the program."""
    lock = (ROOT / "pyproject.toml", ROOT / "uv.lock")
    dependencies = cached_layer("dependencies", [*lock, HERE / "images.py"], fill_dependencies)
    sources = [
        *files(ROOT / "src/hami"),
        *files(ROOT / "native"),
        *files(ROOT / "images/hami/bin"),
        ROOT / "tools/release.py",
    ]
    program = cached_layer("hami-program", [*lock, ROOT / "LICENSE", *sources], fill_program)
    return [base(), dependencies, program]


def hami_config(version: str) -> ImageConfig:
    """Settings of the image, with its version."""
    config = from_dockerfile(ROOT / "images/hami/Dockerfile")
    config.labels["org.opencontainers.image.version"] = version
    return config


def test_program() -> Path:
    """A CUDA program and nvidia-ml-py; the driver comes from the node's runtime, as on a real node."""
    program = NATIVE / "fakegpu/gpuprog"

    def fill(folder: Path) -> None:
        (folder / "usr/local/bin").mkdir(parents=True)
        shutil.copy2(program, folder / "usr/local/bin/gpuprog")
        version = next(p["version"] for p in locked() if p["name"] == "nvidia-ml-py")
        install([f"nvidia-ml-py=={version}"], folder / PACKAGES)
        compile_sources(folder)

    layer = cached_layer("test-program", [program, ROOT / "uv.lock"], fill)
    config = from_dockerfile(ROOT / "images/test-program/Dockerfile")
    return image("test-program", f"hami.local/test-program:{TAG}", [base(), layer], config)


def base() -> Path:
    """Layer with a small Debian and its Python."""
    script = HERE / "base-image.sh"
    return cached_layer("debian", [script], lambda folder: run(str(script), str(folder)))


def fill_dependencies(folder: Path) -> None:
    """What uv.lock names for run time, without the packages' own tests and debugging symbols."""
    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch) / "requirements.txt"
        run(
            *(uv(), "export", "--quiet", "--frozen", "--no-dev", "--no-emit-project"),
            *("--project", str(ROOT), "--output-file", str(requirements)),
        )
        install(["--require-hashes", "--no-deps", "-r", str(requirements)], folder / PACKAGES)
    for tests in sorted(folder.rglob("tests")):
        if tests.is_dir() and (tests.parent / "__init__.py").exists():
            shutil.rmtree(tests)
    shutil.rmtree(folder / PACKAGES / "bin", ignore_errors=True)
    # numpy's libraries were rewritten after linking (patchelf), strip could break those
    modules = [path for path in sorted(folder.rglob("*.so")) if "numpy" not in str(path.relative_to(folder))]
    run("strip", "--strip-debug", *map(str, modules))
    compile_sources(folder)


def fill_program(folder: Path) -> None:
    """The project's wheel with the released library, and the commands under the names that charts use."""
    make_release()
    packages = folder / PACKAGES
    packages.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        run(uv(), "build", "--quiet", "--wheel", "--out-dir", scratch, str(ROOT))
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            wheel.extractall(packages)
    commands = folder / "k8s-vgpu/bin"
    shutil.copytree(ROOT / "images/hami/bin", commands)
    for command in commands.iterdir():
        command.chmod(0o755)
    shutil.copy2(ROOT / "LICENSE", folder / "k8s-vgpu/LICENSE")
    (folder / "k8s-vgpu/VERSION").write_text(f"v{project_version()}\n")
    compile_sources(folder)


def make_release() -> None:
    """What the wheel takes its library from."""
    script, output = ROOT / "tools/release.py", ROOT / "build/release"
    command = [sys.executable, str(script), "--machine", platform.machine(), "--output", str(output)]
    subprocess.run(command, stdout=sys.stderr, check=True)


def fill_next_version(folder: Path) -> None:
    """What differs in the next version: its library, compiled otherwise, and its number."""
    library = folder / PACKAGES / "hami/lib"
    numbers = folder / PACKAGES / f"hami-{project_version()}.dist-info"
    for made in (library, numbers, folder / "k8s-vgpu"):
        made.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "source"
        (tree / "src/hami").mkdir(parents=True)
        (tree / "src/hami/__init__.py").touch()
        shutil.copytree(ROOT / "native", tree / "native")
        for name in ("LICENSE", "README.md"):
            shutil.copy2(ROOT / name, tree)
        settings = (ROOT / "pyproject.toml").read_text()
        settings = settings.replace(f'version = "{project_version()}"', f'version = "{NEXT_VERSION}"', 1)
        (tree / "pyproject.toml").write_text(settings)
        other = "cmake.define.CMAKE_C_FLAGS_RELEASE=-O1 -DNDEBUG"
        run(uv(), "build", "--quiet", "--wheel", "--config-setting", other, "--out-dir", scratch, str(tree))
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            (library / "libvgpu.so").write_bytes(wheel.read("hami/lib/libvgpu.so"))
            (numbers / "METADATA").write_bytes(wheel.read(f"hami-{NEXT_VERSION}.dist-info/METADATA"))
    (folder / "k8s-vgpu/VERSION").write_text(f"v{NEXT_VERSION}\n")


def install(arguments: list[str], target: Path) -> None:
    """Install wheels for the image's Python into ``target``."""
    target.mkdir(parents=True, exist_ok=True)
    run(
        # copies: hard links into uv's cache, or another environment, would be stripped with ours
        *(uv(), "pip", "install", "--quiet", "--link-mode", "copy"),
        *("--only-binary", ":all:", "--python-version", "3.11"),
        *("--python", sys.executable, "--target", str(target), *arguments),
    )
    (target / ".lock").unlink(missing_ok=True)


def compile_sources(folder: Path) -> None:
    """Byte code that is used whatever the files' times are: the image's root may be read-only."""
    run(
        *(sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"),
        *("-s", str(folder), "-p", "/", str(folder / PACKAGES)),
    )


def cached_layer(name: str, inputs: Iterable[Path], fill: Callable[[Path], None]) -> Path:
    """The layer that ``fill`` makes, from the cache if no input changed. Older ones of the name go."""
    target = CACHE / f"layer-{name}-{hash_of(inputs)}.tar"
    if not target.exists():
        print(f"images: building layer {name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            folder = Path(scratch) / "root"
            folder.mkdir()
            fill(folder)
            make_layer(folder, target)
        remove_older(target, f"layer-{name}-")
    return target


def image(name: str, reference: str, layers: list[Path], config: ImageConfig) -> Path:
    """The archive of an image, from the cache if neither its layers nor its settings changed."""
    key = hashlib.sha256(repr((reference, [layer.name for layer in layers], config)).encode())
    target = CACHE / f"image-{name}-{key.hexdigest()[:16]}.tar"
    if not target.exists():
        write_image(target, reference, layers, config)
        remove_older(target, f"image-{name}-")
    return target


def remove_older(target: Path, prefix: str) -> None:
    """Remove other versions of a cached file: what follows the prefix is one hash and the suffix."""
    for other in CACHE.glob(f"{prefix}*.tar"):
        if other != target and "-" not in other.name.removeprefix(prefix):
            other.unlink(missing_ok=True)


def from_dockerfile(path: Path) -> ImageConfig:
    """The settings of a Dockerfile's last stage, so that they are written down once."""
    config = ImageConfig()
    for line in path.read_text().splitlines():
        instruction, _, value = line.partition(" ")
        if instruction == "FROM":
            config = ImageConfig()
        elif instruction == "USER":
            config.user = value
        elif instruction == "ENTRYPOINT":
            config.entrypoint = json.loads(value)
        elif instruction == "CMD":
            config.command = json.loads(value)
        elif instruction in ("ENV", "LABEL"):
            settings = config.environment if instruction == "ENV" else config.labels
            settings.update(item.partition("=")[::2] for item in shlex.split(value))
    return config


def files(folder: Path) -> list[Path]:
    """All files below a folder, without byte code."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def hash_of(inputs: Iterable[Path]) -> str:
    """Hash over names, modes and contents."""
    digest = hashlib.sha256()
    for path in inputs:
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
        digest.update(f"{name} {path.stat().st_mode & 0o111:o}\0".encode())
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def locked() -> list[dict[str, str]]:
    """The packages of uv.lock."""
    packages: list[dict[str, str]] = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    return packages


def project_version() -> str:
    """The version in pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def uv() -> str:
    """uv of the development environment, else the one in PATH."""
    ours = ROOT / ".venv/bin/uv"
    return str(ours) if ours.exists() else "uv"


def run(*command: str) -> None:
    """Run a command; ends with its output if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if result.returncode != 0:
        sys.exit(f"images: {' '.join(command)} failed:\n{result.stdout}{result.stderr}")


if __name__ == "__main__":
    main(sys.argv[1:])
