"""Engine, codecs and machines have no clock, randomness, environment or I/O (decisions, row 45)."""

import ast
from pathlib import Path

import pytest

import hami.protocol
import hami.vendors

MODULES = sorted(
    module
    for package in (hami.protocol, hami.vendors)
    for module in Path(str(package.__file__)).parent.glob("*.py")
)
FORBIDDEN = {
    "asyncio",
    "io",
    "logging",
    "os",
    "pathlib",
    "random",
    "secrets",
    "select",
    "socket",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
}
HARMLESS = {("sys", "intern")}
CALLS = {"open", "print", "input", "now", "utcnow", "today", "default_rng"}


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN:
            found += [str(node.module) for alias in node.names if (node.module, alias.name) not in HARMLESS]
        elif isinstance(node, ast.Call):
            called = node.func
            name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            found += [name] if name in CALLS else []
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_module_reaches_nothing_outside_its_arguments(module: Path) -> None:
    assert offences(module.read_text()) == []


def test_the_check_sees_what_it_forbids() -> None:
    source = "import os.path\nfrom time import time\ndatetime.now()\nopen('x')\n"
    assert sorted(offences(source)) == ["now", "open", "os.path", "time"]
