"""``hami verify``: does the installation work?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from hami.cli.checking import checks_of_cluster

if TYPE_CHECKING:
    from hami.answers.checks import Check, Objects


@click.command(name="verify", short_help="Does the installation work?")
@checks_of_cluster
def command(objects: Objects) -> list[Check]:
    """Look at an installed HAMi: one line per check, with what to do.

    Reads only. The exit status is 1 if a check failed.
    """
    from hami.answers.checks import verify

    return verify(objects, time.time())
