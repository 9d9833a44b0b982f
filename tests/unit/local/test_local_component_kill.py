"""A component can be killed at any moment of its life."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from hami.local.components import Component


async def test_a_component_is_killed_even_before_it_leads_a_process_group(tmp_path: Path) -> None:
    component = Component("c", lambda: ["sleep", "600"], {"PATH": os.defpath}, tmp_path)
    for _ in range(3):
        await component.start()
        async with asyncio.timeout(30):
            await component.kill(stay_down=True)
        assert not component.running
