"""Runs the recorded cases of a folder: ``python tests/conformance/run.py [--undecided] [--group G]
[FOLDER]``.

Without FOLDER the copy that comes with the tests is used. Exit status 1 when a case fails, 2 when there is
none.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hami_cases.cases import GROUPS, OWN_FOLDER, load
from hami_cases.runner import judge_all, report


def main() -> int:
    parser = argparse.ArgumentParser(description="Run recorded cases against our code.")
    parser.add_argument("folder", nargs="?", type=Path, default=OWN_FOLDER, help="folder of recorded cases")
    parser.add_argument("--group", action="append", choices=GROUPS, help="only this group (may be repeated)")
    parser.add_argument("--id", help="only ids that contain this text")
    parser.add_argument("--undecided", action="store_true", help="also list the undecided cases")
    options = parser.parse_args()
    try:
        cases = [
            case
            for case in load(options.folder)
            if (not options.group or case.group in options.group)
            and (not options.id or options.id in case.id)
        ]
    except (OSError, ValueError, KeyError) as error:
        print(f"cannot read the cases in {options.folder}: {error}", file=sys.stderr)
        return 2
    lines, failures = report(judge_all(cases), show_undecided=options.undecided)
    print("\n".join(lines))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
