"""The documents name things that exist, and explain what users meet."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import yaml

from hami.cli.cleanup import NODE_LEFTOVERS
from hami.cli.main import main
from hami.node.monitor.series import HELP
from hami.node.plugin.counters import PluginCounters
from hami.node.plugin.metrics import plugin_metrics
from hami.protocol.allocation import decode_allocation
from hami.protocol.inventory import decode_json
from hami.scheduler.edge import metric_texts
from hami.vendors import reasons
from hami.vendors.config import parse_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
READMES = sorted(
    path
    for folder in ("bench", "charts", "images", "native", "src", "tests", "tools")
    for path in (ROOT / folder).rglob("README.md")
)
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCES = "\n".join(path.read_text() for path in sorted((ROOT / "src" / "hami").rglob("*.py")))
FOREIGN_OPTIONS = {
    *("--dry-run", "--reuse-values", "--wait", "--set", "--all"),  # helm
    *("--device-strategy", "--rename-on-die"),  # Vastai's device plugin
    "--help",
}
NO_VALUES = {"scheduler.failed", "scheduler.kubeScheduler.imageTag"}
"""Names that look like values of the chart: an event of the log, a value that the chart refuses."""


class Block(NamedTuple):
    """A fenced block of a document."""

    where: str
    language: str
    text: str


def blocks(path: Path) -> Iterator[Block]:
    """The fenced blocks of a document; the text of an indented one is moved to the margin."""
    fence = re.compile(r"^( *)```([^\n`]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
    text = path.read_text()
    for found in fence.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        body = re.sub(f"^{found[1]}", "", found[3], flags=re.MULTILINE)
        yield Block(f"{path.relative_to(ROOT)}:{line}", found[2], body)


BLOCKS = [block for path in [*DOCUMENTS, *READMES] for block in blocks(path)]


def shell_lines() -> Iterator[tuple[str, str]]:
    """Every line of a shell block, continued ones joined, and every command in running text; and where."""
    for block in BLOCKS:
        if block.language == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                yield block.where, line
    for path in [*DOCUMENTS, *READMES]:
        for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", path.read_text()):
            yield str(path.relative_to(ROOT)), code


def words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # an apostrophe: prose, not a command
        return []


def options_of(command: click.Command) -> set[str]:
    found = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return {name for name in found if name.startswith("-")} | {"--help", "-h"}


def our_commands() -> dict[str, click.Command]:
    context = click.Context(main)
    return {name: main.get_command(context, name) or main for name in main.list_commands(context)}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.where)
def test_a_block_names_its_language_and_is_written_in_it(block: Block) -> None:
    assert block.language in ("sh", "yaml", "json", "text")
    if block.language == "sh":
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    elif block.language == "yaml":
        assert all(isinstance(one, dict) for one in yaml.safe_load_all(block.text))
    elif block.language == "json":
        assert json.loads(block.text)


def test_commands_of_hami_exist_with_the_options_that_documents_give_them() -> None:
    commands, wrong, seen = our_commands(), [], 0
    for where, line in shell_lines():
        for part in re.split(r"[|;&]+ ", line):
            call = words(part)
            if call[:2] == ["kubectl", "hami"]:
                call = call[1:]
            if len(call) < 2 or call[0] not in ("hami", ".venv/bin/hami") or not re.match(r"[a-z]", call[1]):
                continue
            seen += 1
            name = call[1]
            own = call[2 : call.index("--")] if "--" in call else call[2:]
            given = {word.split("=")[0] for word in own if word.startswith("-")}
            if name not in commands or given - options_of(commands[name]):
                wrong.append((where, part))
    assert wrong == []
    assert seen > 10


def test_options_in_running_text_are_options_of_some_command() -> None:
    known = FOREIGN_OPTIONS.union(*(options_of(command) for command in our_commands().values()))
    wrong = []
    for path in DOCUMENTS:
        for code in re.findall(r"(?<!`)`(-[^`\n]+)`(?!`)", path.read_text()):
            name = re.split(r"[= ]", code)[0]
            if path.name != "values.md" and name.startswith("--") and name not in known:
                wrong.append((path.name, code))
    assert wrong == []


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [(where, words(line)) for where, line in shell_lines() if line.startswith("make ")]
    wrong = [
        (where, word)
        for where, call in named
        for word in call[1:]
        if re.fullmatch(r"[a-z][a-z0-9-]*", word) and word not in targets
    ]
    assert wrong == []
    assert named


def test_files_of_the_repository_in_commands_exist() -> None:
    named = {
        (where, name)
        for where, line in shell_lines()
        for name in re.findall(
            r"(?<![\w/.])((?:examples|charts|images|bench|tools|tests|docs|src)/[\w./-]+)", line
        )
    }
    assert named
    assert sorted((where, name) for where, name in named if not _is_there(where, name.rstrip("."))) == []


def _is_there(where: str, name: str) -> bool:
    """Whether some file begins so, from the root or from the document's folder."""
    folders = (ROOT, (ROOT / where.split(":")[0]).parent)
    return any(True for folder in folders for _ in folder.glob(f"{name.rstrip('/')}*"))


def test_values_that_are_set_are_values_of_the_chart() -> None:
    values = yaml.safe_load((ROOT / "charts" / "hami" / "values.yaml").read_text())
    given = {
        (where, name) for where, line in shell_lines() for name in re.findall(r"--set ([\w.]+)=", line)
    } | {
        (path.name, name)
        for path in DOCUMENTS
        for name in re.findall(r"`((?:scheduler|devicePlugin|global|devices)\.[\w.]+)[=:`]", path.read_text())
        if path.name != "values.md" and name not in NO_VALUES
    }
    assert len(given) > 20
    assert sorted((where, name) for where, name in given if not _is_value(values, name)) == []


def _is_value(values: object, name: str) -> bool:
    """Whether a key with dots is there, or lies in a map that is free to fill."""
    for key in name.split("."):
        if not isinstance(values, dict):
            return False
        if values == {}:
            return True
        if key not in values:
            return False
        values = values[key]
    return True


def test_an_upgrade_starts_from_the_values_that_were_set() -> None:
    """Not from old defaults (`--reuse-values`), nor from a file with the heading of helm's table."""
    helm = [(where, line) for where, line in shell_lines() if line.startswith("helm ")]
    saved = [found for found in helm if "get values" in found[1]]
    assert len(saved) > 4
    assert [found for found in saved if " -o yaml > " not in found[1]] == []
    assert [found for found in helm if "--reuse-values" in found[1]] == []


def test_the_page_and_the_command_name_the_same_leftovers_of_a_node() -> None:
    section = (ROOT / "docs/operate.md").read_text().partition("and on each node ")[2].partition("\n\n")[0]
    found = re.compile(r"(?:/usr/local|/tmp|/var/run)/[\w./*-]+[\w*]")
    assert set(found.findall(section)) == set(found.findall(NODE_LEFTOVERS))


def test_the_description_of_a_vendor_is_a_device_config_and_its_data_are_readable() -> None:
    page = ROOT / "docs" / "adding-a-vendor.md"
    by_language = {block.language: block.text for block in blocks(page)}
    (profile,) = parse_config(by_language["yaml"]).profiles
    assert profile.common_word == "Acme"
    (card,) = decode_json(by_language["json"], "Acme").devices
    assert (card.id, card.count, card.devmem) == ("ACME-0", 4, 32768)
    found = re.findall(r"^`(;[^`]+;)` is a pod", page.read_text(), re.MULTILINE)
    assert [[len(slot) for slot in decode_allocation(text)] for text in found] == [[0, 1]]


def test_every_metric_is_listed_once_and_no_other() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    families = [one for one in vars(metric_texts).values() if isinstance(one, (tuple, metric_texts.Family))]
    exported = {
        family.name
        for group in families
        for family in (group if isinstance(group, tuple) else (group,))
        if isinstance(family, metric_texts.Family)
    }
    exported |= {f"{name}_total" if f'counter("{name}"' in SOURCES else name for name in HELP}
    exported |= set(re.findall(r'"(hami_scheduler_[a-z_]+)"', SOURCES))
    own = plugin_metrics(PluginCounters())
    exported |= {f"{one.name}_total" if one.type == "counter" else one.name for one in own}
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    cells = [cell for row in rows for cell in (row.split(" | ")[0], row.split(" | ")[-1])]
    listed = [name for cell in cells for name in re.findall(r"`([A-Za-z]\w{6,})`", cell)]
    assert sorted(listed) == sorted(exported)


def test_metrics_that_documents_name_exist() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    named = {
        (path.name, name)
        for path in DOCUMENTS
        for name in re.findall(r"`(hami_[a-z_]+)", path.read_text())
        if not name.startswith("hami_hostpid_broker")
    }
    assert named
    assert sorted((where, name) for where, name in named if f"`{name}`" not in page) == []


def test_the_chinese_page_has_the_parts_names_and_numbers_of_the_english_one() -> None:
    pages = [(ROOT / "docs" / f"host-pid-broker{ending}").read_text() for ending in (".md", ".zh.md")]
    for pattern in (r"`([^`\n]+)`", r"\d+", r"(?m)^(## |\||- |```)"):
        english, chinese = (Counter(re.findall(pattern, page)) for page in pages)
        assert (english - chinese, chinese - english) == (Counter(), Counter())


def test_modules_and_names_that_the_vendor_guide_gives_exist() -> None:
    text = (ROOT / "docs" / "adding-a-vendor.md").read_text()
    folder = ROOT / "src" / "hami" / "vendors"
    assert [name for name in re.findall(r"`(\w+\.py)`", text) if not (folder / name).exists()] == []
    hooks = importlib.import_module("hami.vendors.types").Hooks.__dataclass_fields__
    bullets = re.findall(r"^   - (.*?):", text, re.MULTILINE)
    named = [
        name
        for line in re.findall(r"^   - .*(?:\n     .*)*", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", line)
    ]
    assert bullets
    assert [name for name in named if name not in hooks] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
    absent = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert absent == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_headings_lead_to_headings(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text())
    absent = [
        (target, anchor)
        for target, anchor in links
        if anchor not in _anchors((path.parent / target) if target else path)
    ]
    assert absent == []


def _anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    ahead = [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
            ahead += [(page.parent / link).resolve() for link in links]
    assert [path.name for path in DOCUMENTS if path not in reached] == []


def test_every_reason_of_a_pending_pod_is_explained() -> None:
    codes = {value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)} - {
        reasons.INTERNAL_ERROR
    }
    assert [code for code in sorted(codes) if f"`{code}`" not in TROUBLESHOOTING] == []


def test_explained_events_are_written_somewhere() -> None:
    events = re.findall(r"^\| `([a-z_]+\.[a-z_]+)`", TROUBLESHOOTING, re.MULTILINE)
    events += re.findall(r"`(HAMi[A-Za-z]+)`", TROUBLESHOOTING)
    assert events
    assert [event for event in events if f'"{event}"' not in SOURCES] == []


def test_files_of_the_examples_are_all_listed() -> None:
    text = (ROOT / "docs" / "getting-started.md").read_text()
    assert [
        path.name for path in sorted((ROOT / "examples").iterdir()) if f"examples/{path.name}" not in text
    ] == []
