#!/usr/bin/env python3
"""Record what real CUDA runtimes ask a driver for, and what their headers say of the functions that we hook.

Usage: cuda_runtimes.py [--output FILE] [--work DIR]

Run by hand when a CUDA release appears (add it to ``RUNTIMES``) or the list of hooks grows; it needs a
package index, gcc's C++ compiler and the native build. Each runtime is installed as a wheel into a folder
of its own and started on the simulated driver: it asks for all its functions and then gives up, since
nothing behind it is imitated. Our sources have to compile beside its cuda.h. The record holds facts alone:
names, versions, flags, and the size of each parameter and structure. Nothing of NVIDIA's is kept.

``tests/native/test_vgpu_lookups.py`` replays the record without any of this.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "native" / "cuda_runtimes.json"
NEWEST_DRIVER = "13990"
"""What the simulated driver calls itself, so that it hides nothing from the newest runtime."""

SIGNATURE = re.compile(
    r"\*PFN_(?P<name>cu\w+?)_v(?P<version>\d+)(?P<twin>_ptsz|_ptds)?\)\s*\((?P<args>[^;]*)\);"
)

STRUCTURES = {
    "vg_location": ("CUmemLocation", {"type": "type", "id": "id"}),
    "vg_alloc_prop": ("CUmemAllocationProp", {"type": "type", "location": "location"}),
    "vg_pool_props": ("CUmemPoolProps", {"type": "allocType", "location": "location"}),
    "vg_array_desc": ("CUDA_ARRAY_DESCRIPTOR", {"width": "Width", "height": "Height", "format": "Format"}),
    "vg_array3d_desc": (
        "CUDA_ARRAY3D_DESCRIPTOR",
        {"width": "Width", "depth": "Depth", "format": "Format", "channels": "NumChannels", "flags": "Flags"},
    ),
    "vg_launch_config": (
        "CUlaunchConfig",
        {"grid_x": "gridDimX", "block_x": "blockDimX", "stream": "hStream"},
    ),
    "vg_launch_params": (
        "CUDA_LAUNCH_PARAMS",
        {"function": "function", "grid_x": "gridDimX", "block_x": "blockDimX", "stream": "hStream"},
    ),
}
"""Our structure, NVIDIA's, and our field names beside theirs."""


@dataclass(frozen=True)
class Runtime:
    """One wheel with a CUDA runtime."""

    package: str
    version: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


RUNTIMES = [
    Runtime("nvidia-cuda-runtime-cu11", "11.7.99"),
    Runtime("nvidia-cuda-runtime-cu12", "12.1.105"),
    Runtime("nvidia-cuda-runtime-cu12", "12.4.127"),
    Runtime("nvidia-cuda-runtime-cu12", "12.9.79"),
    Runtime("nvidia-cuda-runtime", "13.0.96"),
    Runtime("nvidia-cuda-runtime", "13.5.37"),
]

ASK = """
import ctypes, sys
count = ctypes.c_int()
print(ctypes.CDLL(sys.argv[1]).cudaGetDeviceCount(ctypes.byref(count)))
"""

SHAPES = """
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cstddef>
#include <cstdio>
#include <type_traits>
template <typename T> void one() { printf(" %s%zu", std::is_pointer<T>::value ? "p" : "i", sizeof(T)); }
template <typename R, typename... A> void shape(const char *name, R (*)(A...)) {
    printf("%s", name);
    (one<A>(), ...);
    printf("\\n");
}
int main() {
"""


def installed(runtime: Runtime, work: Path) -> Path:
    """The folder with the wheel's files; installed there unless it is already."""
    folder = work / runtime.version
    if not folder.is_dir():
        uv = Path(sys.executable).with_name("uv")
        command = [
            str(uv),
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(folder),
            runtime.requirement,
        ]
        subprocess.run(command, check=True)
    return folder


def the_one(folder: Path, pattern: str) -> Path:
    """The only file below `folder` of that name."""
    found = sorted(folder.rglob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{folder}: {len(found)} files are named {pattern}")
    return found[0]


def lookups(library: Path, driver: Path) -> list[str]:
    """``name version flags`` of every function that the runtime asks for, in its order, each once."""
    with tempfile.TemporaryDirectory() as state:
        log = Path(state) / "lookups"
        env = {
            **os.environ,
            "LD_LIBRARY_PATH": str(driver),
            "FAKEGPU_STATE": state,
            "FAKEGPU_CUDA_VERSION": NEWEST_DRIVER,
            "FAKEGPU_LOOKUP_LOG": str(log),
        }
        subprocess.run([sys.executable, "-c", ASK, str(library)], env=env, check=True, capture_output=True)
        return list(dict.fromkeys(log.read_text().splitlines()))


def hooked_bases() -> set[str]:
    """The names of the list of hooks that have versions."""
    hooks = tomllib.loads((ROOT / "native" / "vgpu" / "hooks.toml").read_text())["hook"]
    return {hook["base"] for hook in hooks if any("version" in variant for variant in hook["variants"])}


def shapes(include: Path, bases: set[str]) -> dict[str, str]:
    """``name@version`` or ``name@version twin`` to the parameters: p8 a pointer, i4 and i8 numbers by size.

    A structure passed by value counts as a number of its size.
    """
    lines = [SHAPES]
    for match in SIGNATURE.finditer((include / "cudaTypedefs.h").read_text()):
        if match["name"] in bases:
            twin = match["twin"] or ""
            label = f"{match['name']}@{match['version']}{' twin' if twin else ''}:"
            lines.append(f'    shape("{label}", (PFN_{match["name"]}_v{match["version"]}{twin})0);')
    lines += ["    return 0;", "}"]
    rows = (line.split(":") for line in compiled(include, "\n".join(lines)).splitlines())
    return {name: parameters.strip() for name, parameters in rows}


def structures(include: Path) -> dict[str, dict[str, int]]:
    """Of each structure of ours what NVIDIA's measures: its size and where its fields are, in bytes."""
    lines = ["#include <cuda.h>", "#include <cstddef>", "#include <cstdio>", "int main() {"]
    for ours, (theirs, fields) in STRUCTURES.items():
        lines.append(f'    printf("{ours} sizeof %zu\\n", sizeof({theirs}));')
        lines += [
            f'    printf("{ours} {field} %zu\\n", offsetof({theirs}, {name}));'
            for field, name in fields.items()
        ]
    lines += ["    return 0;", "}"]
    found: dict[str, dict[str, int]] = {}
    for line in compiled(include, "\n".join(lines)).splitlines():
        structure, field, number = line.split()
        found.setdefault(structure, {})[field] = int(number)
    return found


def compiled(include: Path, source: str) -> str:
    """What a C++ program prints that is compiled against the headers of a runtime."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "facts"
        (Path(folder) / "facts.cc").write_text(source)
        command = [
            "g++",
            "-std=c++17",
            "-w",
            "-D__CUDA_API_VERSION_INTERNAL",
            f"-I{include}",
            "-o",
            str(program),
            str(program) + ".cc",
        ]
        subprocess.run(command, check=True)
        return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout


def compile_ours(include: Path) -> int:
    """Compile every source file of libvgpu.so with a runtime's cuda.h before it; how many there are.

    A name, type or macro of NVIDIA's that collides with ours is an error.
    """
    vgpu = ROOT / "native" / "vgpu"
    sources = sorted((vgpu / "src").glob("*.c"))
    flags = ["-std=gnu11", "-D_GNU_SOURCE=", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    headers = [f"-I{vgpu / 'src'}", f"-I{vgpu / 'generated'}", "-isystem", str(include), "-include", "cuda.h"]
    subprocess.run(["gcc", *flags, *headers, *map(str, sources)], check=True)
    return len(sources)


def merged(runtimes: list[Runtime], asked: list[list[str]]) -> dict[str, str]:
    """Each look-up with the runtimes that make it, as digits: places in the list of runtimes."""
    out: dict[str, str] = {}
    for place, _ in enumerate(runtimes):
        for lookup in asked[place]:
            out[lookup] = out.get(lookup, "") + str(place)
    return out


def record(runtimes: list[Runtime], work: Path, driver: Path) -> dict[str, Any]:
    """The whole record; a signature or structure that differs between two runtimes is an error."""
    asked: list[list[str]] = []
    facts: dict[str, dict[str, Any]] = {"signatures": {}, "structures": {}}
    for runtime in runtimes:
        folder = installed(runtime, work)
        asked.append(lookups(the_one(folder, "libcudart.so.*"), driver))
        include = the_one(folder, "cudaTypedefs.h").parent
        if runtime.version.startswith("11."):
            continue  # its structures lack what came later
        new: dict[str, dict[str, Any]] = {
            "signatures": shapes(include, hooked_bases()),
            "structures": structures(include),
        }
        for kind, values in new.items():
            for name, value in values.items():
                if facts[kind].setdefault(name, value) != value:
                    raise SystemExit(f"{runtime.requirement}: {name} is {value}, was {facts[kind][name]}")
        facts_of_it = f"{len(asked[-1])} look-ups, {len(new['signatures'])} signatures"
        print(
            f"{runtime.requirement}: {facts_of_it}, {compile_ours(include)} sources compile beside its cuda.h"
        )
    return {
        "runtimes": [runtime.requirement for runtime in runtimes],
        "lookups": merged(runtimes, asked),
        **{kind: dict(sorted(values.items())) for kind, values in facts.items()},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RECORD)
    parser.add_argument("--work", type=Path, help="folder for the wheels, kept (default: a temporary one)")
    arguments = parser.parse_args()
    build = Path(os.environ.get("HAMI_NATIVE_BUILD", str(ROOT / "build" / "native")))
    with tempfile.TemporaryDirectory() as temporary:
        made = record(RUNTIMES, arguments.work or Path(temporary), build / "fakegpu")
    arguments.output.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
