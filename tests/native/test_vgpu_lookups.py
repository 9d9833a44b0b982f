"""What real CUDA runtimes ask for, replayed; the list of hooks against their headers.

``cuda_runtimes.json`` is what ``tools/cuda_runtimes.py`` recorded of runtimes 11.7 to 13.5.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from vgpu_harness import Node

ROOT = Path(__file__).resolve().parents[2]
VGPU = ROOT / "native" / "vgpu"

ASK = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
out = []
for line in json.loads({lookups!r}):
    name, version, flags = line.split()
    name = b"" if name == "-" else name.encode()
    at, status = ctypes.c_void_p(), ctypes.c_int(99)
    result = cuda.cuGetProcAddress_v2(
        name, ctypes.byref(at), int(version), ctypes.c_uint64(int(flags)), ctypes.byref(status))
    out.append([result, status.value, at.value or 0])
def base(library):
    handle = ctypes.CDLL(library)._handle
    return ctypes.cast(handle, ctypes.POINTER(ctypes.c_size_t))[0]  # the loader's record begins with it
print(json.dumps([out, base("libcuda.so.1"), base({ours!r})]))
"""


@functools.cache
def record() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(__file__).parent / "cuda_runtimes.json").read_text())
    return content


@functools.cache
def hooks() -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = tomllib.loads((VGPU / "hooks.toml").read_text())["hook"]
    return listed


def declared(name: str, version: int, flags: int) -> str:
    """The symbol that a look-up means by the list; "" for one that is not hooked."""
    plain, twin = "", ""
    for variant in next((hook["variants"] for hook in hooks() if hook["base"] == name), []):
        if "version" in variant and variant["version"] <= version:
            plain = variant["symbol"]
        if "twin" in variant and variant["twin"] <= version:
            twin = variant["symbol"] + "_ptsz"
    return twin if flags & 2 and twin else plain


def symbols(library: Path) -> dict[int, set[str]]:
    """Exported names by their offset in the library."""
    done = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    )
    found: dict[int, set[str]] = {}
    for line in done.stdout.splitlines():
        at, _, name = line.split()
        found.setdefault(int(at, 16), set()).add(name)
    return found


def answers(node: Node, lookups: list[str], **env: str) -> list[tuple[int, int, str]]:
    """Result, status and ``ours:`` or ``driver:`` with the symbol, or "" where there is no function."""
    code = ASK.format(lookups=json.dumps(lookups), ours=str(node.build.libvgpu))
    rows, driver, ours = json.loads(node.python(code, **env))
    known = {
        driver + at: f"driver:{name}"
        for at, names in symbols(node.build.driver / "libcuda.so.1").items()
        for name in names
    }
    known |= {
        ours + at: f"ours:{name}" for at, names in symbols(node.build.libvgpu).items() for name in names
    }
    return [(result, status, known[at] if at else "") for result, status, at in rows]


@pytest.mark.parametrize("driver", ["13990", "12080", "11070"])
def test_recorded_lookups_get_the_drivers_answer_or_the_declared_hook(node: Node, driver: str) -> None:
    """A35: 505 look-ups of six runtimes; the driver hides what is newer than itself."""
    lookups = list(record()["lookups"])
    assert len(lookups) > 500
    bare = answers(node, lookups, LD_PRELOAD="", FAKEGPU_CUDA_VERSION=driver)
    ours = answers(node, lookups, FAKEGPU_CUDA_VERSION=driver)
    for lookup, (result, status, function), seen in zip(lookups, bare, ours, strict=True):
        name, version, flags = lookup.split()
        hook = declared(name, min(int(version), int(driver)), int(flags)) if function else ""
        assert seen == (result, status, f"ours:{hook}" if hook else function), lookup


def test_the_replay_reaches_most_hooks(node: Node) -> None:
    """A replay that matched no hook would show nothing."""
    lookups = list(record()["lookups"])
    hooked = {
        function
        for _, _, function in answers(node, lookups, FAKEGPU_CUDA_VERSION="13990")
        if function.startswith("ours:")
    }
    assert len(hooked) > 60


def test_the_legacy_flag_changes_no_answer(node: Node) -> None:
    """A105, for every recorded look-up without flags."""
    plain = [lookup for lookup in record()["lookups"] if lookup.endswith(" 0") and not lookup.startswith("-")]
    legacy = [lookup.removesuffix("0") + "1" for lookup in plain]
    assert answers(node, plain, FAKEGPU_CUDA_VERSION="13990") == answers(
        node, legacy, FAKEGPU_CUDA_VERSION="13990"
    )


def test_functions_of_new_releases_are_hooked_where_the_driver_has_them(node: Node) -> None:
    """A106."""
    lookups = [
        "cuGraphExecUpdate 10020 0",
        "cuGraphExecUpdate 12000 0",
        "cuMemSetMemPool 13000 0",
        "cuMemSetMemPool 12080 0",
        "cuMemGetDefaultMemPool 13000 0",
        "cuMemGetMemPool 13000 0",
        "cuStreamBeginCaptureToCig 13010 0",
        "cuStreamBeginCaptureToCig 13010 2",
        "cuStreamBeginRecaptureToGraph 13030 0",
    ]
    new = [function for _, _, function in answers(node, lookups, FAKEGPU_CUDA_VERSION="13990")]
    assert new == [
        "ours:cuGraphExecUpdate",
        "ours:cuGraphExecUpdate_v2",
        "ours:cuMemSetMemPool",
        "",
        "ours:cuMemGetDefaultMemPool",
        "ours:cuMemGetMemPool",
        "ours:cuStreamBeginCaptureToCig",
        "ours:cuStreamBeginCaptureToCig_ptsz",
        "ours:cuStreamBeginRecaptureToGraph",
    ]
    old = answers(node, lookups, FAKEGPU_CUDA_VERSION="12080")
    assert [function for _, _, function in old] == [*new[:2], *[""] * 7]
    assert old[2:] == answers(node, lookups, FAKEGPU_CUDA_VERSION="12080", LD_PRELOAD="")[2:]


NEWER_DRIVER = """
typedef int (*function)(void);
int cuInit(unsigned flags) { return (int)flags * 0; }
int cuMemAlloc_v2(void) { return 2; }
int cuMemAlloc_v9(void) { return 9; }
int cuGetProcAddress_v2(const char *name, void **at, int version, unsigned long flags, int *status) {
    (void)name;
    (void)flags;
    *at = version >= 14000 ? (void *)cuMemAlloc_v9 : (void *)cuMemAlloc_v2;
    *status = 0;
    return 0;
}
"""


def test_a_variant_that_is_newer_than_the_list_is_left_to_the_driver(node: Node, tmp_path: Path) -> None:
    """A hook with the arguments of an older variant would be called with those of the newer one."""
    (tmp_path / "driver.c").write_text(NEWER_DRIVER)
    library = tmp_path / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", "-o", str(library)]
    subprocess.run([*command, str(tmp_path / "driver.c")], check=True)
    code = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
newer = ctypes.cast(cuda.cuMemAlloc_v9, ctypes.c_void_p).value
for version in (3020, 13000, 14000, 3020):
    at, status = ctypes.c_void_p(), ctypes.c_int()
    cuda.cuGetProcAddress_v2(
        b"cuMemAlloc", ctypes.byref(at), version, ctypes.c_uint64(0), ctypes.byref(status))
    print("newer" if at.value == newer else "hook")
"""
    done = node.run(sys.executable, "-c", code, LD_LIBRARY_PATH=str(tmp_path))
    assert done.stdout.split() == ["hook", "hook", "newer", "hook"]
    assert "cuMemAlloc of CUDA 14000 is newer than this library: not limited" in done.stderr


POINTER = re.compile(r"[*\[]")
WIDTHS = {"int": "i4", "unsigned": "i4", "uint32_t": "i4", "size_t": "i8", "uint64_t": "i8"}


def shape(args: str) -> str:
    """Parameters of a hook as the record writes them: p8 a pointer, i4 and i8 numbers."""
    parts = [] if args == "void" else args.split(",")
    return " ".join("p8" if POINTER.search(part) else WIDTHS[part.split()[0]] for part in parts)


def listed_signatures() -> dict[str, str]:
    """``name@version`` and ``name@version twin`` of the list."""
    out: dict[str, str] = {}
    for hook in hooks():
        for variant in hook["variants"]:
            merged = {**hook, **variant}
            if "version" in merged:
                out[f"{hook['base']}@{merged['version']}"] = shape(merged["args"])
            if "twin" in merged:
                out[f"{hook['base']}@{merged['twin']} twin"] = shape(merged["args"])
    return out


def test_names_versions_and_arguments_are_those_of_the_headers() -> None:
    """A115: no variant too many, none too few, every parameter of the right size."""
    headers: dict[str, str] = record()["signatures"]
    ours = listed_signatures()
    assert sorted(ours) == sorted(headers)
    watched = {name for name in ours if name.startswith("cuGraphInstantiate")}  # forwards six registers
    assert {name: ours[name] for name in ours if name not in watched and ours[name] != headers[name]} == {}
    assert all(ours[name].split()[:2] == headers[name].split()[:2] for name in watched)
    assert all(len(headers[name].split()) <= 6 for name in watched)


def test_structures_are_laid_out_as_in_the_headers(tmp_path: Path) -> None:
    """A115."""
    lines = ['#include "abi.h"']
    for structure, facts in record()["structures"].items():
        for field, number in facts.items():
            what = (
                f"sizeof(struct {structure})"
                if field == "sizeof"
                else f"offsetof(struct {structure}, {field})"
            )
            lines.append(f'_Static_assert({what} == {number}, "{structure} {field}");')
    assert len(lines) > 20
    (tmp_path / "layout.c").write_text("\n".join(lines) + "\n")
    command = ["gcc", "-std=gnu11", "-fsyntax-only", f"-I{VGPU / 'src'}", str(tmp_path / "layout.c")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
