#!/usr/bin/env python3
"""Build the release form of libvgpu.so: x86-64 and aarch64, glibc 2.17 and newer, the same bytes everywhere.

With it comes vgpu-region, static (musl), for images without Python.

Usage: release.py [--machine x86_64|aarch64]... [--output DIR] [--work DIR]

The compiler is zig, whose version and hashes uv.lock pins (group ``release``); it lands outside the
checkout, like all that is made on the way (--work, default ${XDG_CACHE_HOME:-~/.cache}/hami/release).
CMakeLists.txt says what is compiled and with which options; zig's own link step is replaced, because it
names every part of glibc as a dependency, where this library may need libc.so.6 alone. In DIR/<machine>/
appear libvgpu.so, stripped, and libvgpu.so.debug, the same with symbols; both bear the same build-id, a
hash of the library, and the program vgpu-region. sources.sha256 says of what all this was made:
wheels and images take it while that holds (native/vgpu/release.cmake).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import resource
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLIBC = "2.17"
EMULATIONS = {"x86_64": "elf_x86_64", "aarch64": "aarch64linux"}
PATTERNS = ["libc_nonshared.a", "libc.so.6", "libcompiler_rt.a"]
"""What is linked of zig's own, in this order: libc before the run-time library, which has a memcpy too."""
OPEN_FILES = 2048
"""zig holds every part of musl open while it makes the static libc: about 1,300."""

COMPILER = """#!/bin/sh
export ZIG_GLOBAL_CACHE_DIR={cache} ZIG_LOCAL_CACHE_DIR={cache}
for argument; do
    if [ "$argument" = -shared ]; then
        exec {python} {script} link {machine} {zig} {cache} "$@"
    fi
done
exec {zig} cc -target {machine}-linux-{library} \\
    -g -ffile-prefix-map={source}=. -fdebug-compilation-dir=. "$@"
"""


def cache_folder() -> Path:
    """Where things that can be made again are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hami"


def allow_open_files() -> None:
    """As many files at once as zig needs; ends the program where this process may not have them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        sys.exit(
            f"release: zig needs {OPEN_FILES} open files at once and this process may have {hard}: raise the "
            f"limit (a shell: ulimit -n {OPEN_FILES}; docker, podman, buildah: --ulimit nofile={OPEN_FILES})"
        )
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))


def installed_zig() -> Path:
    """The locked compiler, in an environment of its own; HAMI_ZIG names another."""
    given = os.environ.get("HAMI_ZIG")
    if given:
        return Path(given).resolve()
    venv = cache_folder() / "release-venv"
    uv = Path(sys.executable).with_name("uv")
    environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(venv)}
    environment.pop("VIRTUAL_ENV", None)
    command = [str(uv), "sync", "--quiet", "--frozen", "--only-group", "release", "--project", str(ROOT)]
    subprocess.run(command, env=environment, check=True)
    zig = next((venv / "lib").glob("python*/site-packages/ziglang/zig"), None)
    if zig is None:
        sys.exit(f"release: {venv} has no zig: remove it and try again")
    return zig


def linker_arguments(arguments: list[str]) -> list[str]:
    """Options of a compiler that links, as the linker itself wants them."""
    out: list[str] = []
    for argument in arguments:
        if argument.startswith("-Wl,"):
            out += argument.removeprefix("-Wl,").split(",")
        elif not argument.startswith(("-f", "-O", "-D", "-g", "-W", "-std", "-m")):
            out.append(argument)
    return [argument for argument in out if not argument.startswith("--build-id")]


def link(machine: str, zig: str, cache: Path, arguments: list[str]) -> None:
    """Link as the compiler would, against libc alone; beside the library OUT appears OUT.debug."""
    target = Path(arguments[arguments.index("-o") + 1])
    ours = [str(found) for pattern in PATTERNS for found in [the_newest(cache, pattern, zig, machine)]]
    common = ["-m", EMULATIONS[machine], "-z", "defs", "--gc-sections", "--eh-frame-hdr", "--hash-style=gnu"]

    def run(*more: str) -> None:
        command = [zig, "ld.lld", *linker_arguments(arguments), *common, *ours, *more]
        subprocess.run(command, check=True)

    run("--strip-all", "--build-id=none")
    identity = f"--build-id=0x{hashlib.sha1(target.read_bytes(), usedforsecurity=False).hexdigest()}"
    run(identity)
    target.replace(target.with_name(f"{target.name}.debug"))
    run(identity, "--strip-all")


def the_newest(cache: Path, name: str, zig: str, machine: str) -> Path:
    """A part of glibc that zig has made, or makes now, for this machine; the cache is of one machine."""
    for attempt in range(2):
        found = sorted(cache.glob(f"o/*/{name}"), key=lambda path: path.stat().st_mtime)
        if found:
            return found[-1]
        if attempt == 0:
            probe = cache / "probe"
            probe.with_suffix(".c").write_text("int probe(void) { return 0; }\n")
            command = [zig, "cc", "-target", f"{machine}-linux-gnu.{GLIBC}", "-shared"]
            subprocess.run([*command, "-o", f"{probe}.so", f"{probe}.c"], check=True)
    sys.exit(f"release: zig has made no {name}")


def sources_hash() -> str:
    """Over what is compiled; native/vgpu/release.cmake computes the same."""
    native = ROOT / "native"
    patterns = ("CMakeLists.txt", "vgpu/CMakeLists.txt", "vgpu/src/*", "vgpu/generated/*", "vgpu/tools/*")
    paths = sorted(str(path.relative_to(native)) for pattern in patterns for path in native.glob(pattern))
    hashes = [hashlib.sha256((native / path).read_bytes()).hexdigest() for path in paths]
    text = "".join(f"{digest} {path}\n" for digest, path in zip(hashes, paths, strict=True))
    return hashlib.sha256(text.encode()).hexdigest()


def build(machine: str, zig: Path, output: Path, work: Path) -> list[Path]:
    """The library and the program for one machine; returns where they are."""
    sources = sources_hash()
    checkout = work / hashlib.sha256(str(ROOT).encode()).hexdigest()[:12]
    folder, tool = (
        compile_target(
            machine, library, target, zig, checkout / f"{machine}-{target}", work / f"zig-{machine}"
        )
        for library, target in ((f"gnu.{GLIBC}", "vgpu"), ("musl", "vgpu_region"))
    )
    final = output / machine
    final.mkdir(parents=True, exist_ok=True)
    made = [folder / "libvgpu.so", folder / "libvgpu.so.debug", tool / "vgpu-region"]
    for path in made:
        partial = final / f".{path.name}"
        partial.write_bytes(path.read_bytes())
        partial.chmod(0o644 if path.suffix == ".debug" else 0o755)
        partial.replace(final / path.name)
    (final / "sources.sha256").write_text(sources)
    return [final / path.name for path in made if path.suffix != ".debug"]


def compile_target(machine: str, library: str, target: str, zig: Path, folder: Path, cache: Path) -> Path:
    """One target of CMakeLists.txt, for one machine and C library; returns the folder that it is in."""
    folder.mkdir(parents=True, exist_ok=True)
    cache.mkdir(exist_ok=True)
    compiler = folder / "cc"
    words = {
        "cache": cache,
        "python": sys.executable,
        "script": Path(__file__).resolve(),
        "machine": machine,
        "zig": zig,
        "source": ROOT / "native",
        "library": library,
    }
    compiler.write_text(COMPILER.format(**{key: shlex.quote(str(value)) for key, value in words.items()}))
    compiler.chmod(0o755)
    tools = Path(sys.executable).parent
    settings = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": machine,
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_C_COMPILER": compiler,
        "CMAKE_ASM_COMPILER": compiler,
        "CMAKE_C_COMPILER_WORKS": "ON",
        "CMAKE_TRY_COMPILE_TARGET_TYPE": "STATIC_LIBRARY",
        "CMAKE_EXE_LINKER_FLAGS": "-s",
        "CMAKE_MAKE_PROGRAM": tools / "ninja",
        "SKBUILD": "ON",
        "HAMI_RELEASE_FOLDER": "",
    }
    defined = [f"-D{key}={value}" for key, value in settings.items()]
    configure = [str(tools / "cmake"), "-S", str(ROOT / "native"), "-B", str(folder), "-G", "Ninja", *defined]
    subprocess.run([*configure, "--log-level=WARNING"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(
        [str(tools / "cmake"), "--build", str(folder), "--target", target, "--", "--quiet"], check=True
    )
    return folder


def main() -> None:
    """Command line."""
    if sys.argv[1:2] == ["link"]:
        link(sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", action="append", choices=sorted(EMULATIONS), help="default: all")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--work", type=Path, default=cache_folder() / "release")
    arguments = parser.parse_args()
    allow_open_files()
    zig = installed_zig()
    for machine in arguments.machine or sorted(EMULATIONS, key=lambda name: name != platform.machine()):
        for made in build(machine, zig, arguments.output, arguments.work):
            digest = hashlib.sha256(made.read_bytes()).hexdigest()
            print(f"{made}: {made.stat().st_size} bytes, sha256 {digest}")


if __name__ == "__main__":
    main()
