"""What every bench takes and needs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def parser(description: str | None, quick: str = "") -> argparse.ArgumentParser:
    """Options that every bench has; ``quick`` says what `--quick` leaves out."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", action="store_true", help="print one flat JSON object as the last line")
    if quick:
        made.add_argument("--quick", action="store_true", help=quick)
    return made


def native_build(*needed: str) -> Path:
    """The folder of the native build; ends the process where it does not hold these files."""
    build = Path(os.environ.get("HAMI_NATIVE_BUILD", str(ROOT / "build" / "native"))).resolve()
    if not all((build / name).is_file() for name in needed):
        print(f"not built: {build}; run make native", file=sys.stderr)
        raise SystemExit(2)
    return build
