"""Line coverage of the C sources from a build with -DHAMI_COVERAGE=ON, read with gcov.

    python tools/native_coverage.py build/native-coverage [--source native/vgpu] [--minimum 85]

A line counts as executed if any program or library that was built from its file has executed it. Ends with 1
when the total is below the minimum.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BATCH = 64


def documents(build: Path) -> Iterator[dict[str, Any]]:
    """What gcov says about every object that was compiled, run or not."""
    notes = sorted(path.resolve() for path in build.rglob("*.gcno"))
    for start in range(0, len(notes), BATCH):
        command = ["gcov", "--json-format", "--stdout", *map(str, notes[start : start + BATCH])]
        done = subprocess.run(command, cwd=build, capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                yield json.loads(line)


def executed_lines(build: Path, source: Path) -> dict[Path, dict[int, int]]:
    """Executions of each line of the files below ``source``, without its tests."""
    lines: dict[Path, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for document in documents(build):
        for entry in document["files"]:
            path = Path(document["current_working_directory"], entry["file"]).resolve()
            if path.is_relative_to(source) and "test" not in path.relative_to(source).parts:
                for line in entry["lines"]:
                    lines[path][line["line_number"]] += line["count"]
    return lines


def report(lines: dict[Path, dict[int, int]], source: Path, *, missing: bool) -> float:
    """Print a table; the result is the percentage of all lines that were executed."""
    total = executed = 0
    width = max(len(str(path.relative_to(source))) for path in lines)
    print(f"{'file':{width}}  lines  executed")
    for path in sorted(lines):
        counts = lines[path]
        hit = sum(count > 0 for count in counts.values())
        total, executed = total + len(counts), executed + hit
        rest = ranges([number for number in sorted(counts) if not counts[number]]) if missing else ""
        name = str(path.relative_to(source))
        print(f"{name:{width}}  {len(counts):5}  {100 * hit / len(counts):7.1f} %  {rest}".rstrip())
    share = 100 * executed / total
    print(f"{'total':{width}}  {total:5}  {share:7.1f} %")
    return share


def ranges(numbers: list[int]) -> str:
    """``3-5, 9`` for ``[3, 4, 5, 9]``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("build", type=Path)
    parser.add_argument("--source", type=Path, default=ROOT / "native" / "vgpu")
    parser.add_argument("--minimum", type=float, default=0.0, help="percent")
    parser.add_argument("--missing", action="store_true", help="list the lines that were not executed")
    options = parser.parse_args()
    source = options.source.resolve()
    lines = executed_lines(options.build, source)
    if not lines:
        print(f"no counts of {source} in {options.build}: build it with -DHAMI_COVERAGE=ON", file=sys.stderr)
        return 1
    share = report(lines, source, missing=options.missing)
    if share < options.minimum:
        print(f"{share:.1f} % is below {options.minimum:.1f} %", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
