"""Clients with conflicting commands: a bystander serves on, everything comes to rest, and nothing stays behind.

These are short storms; `python -m tests.bench.conflicts` takes the whole one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.embedded import run_record as leftovers
from tests.integration import conflicts
from tests.integration.loaded_stack import LoadedStack

pytestmark = [pytest.mark.alone, pytest.mark.integration, pytest.mark.timeout(480)]

STORM_S = 12.0
SEED = 20_001


async def test_conflicting_commands_cost_a_bystander_nothing_and_leave_nothing(tmp_path: Path) -> None:
    async with LoadedStack.running(tmp_path) as stack:
        quiet = await conflicts.storm(stack, STORM_S, SEED)
        print(f"seed {SEED}: {quiet.line()}")
        killed = await conflicts.storm(stack, STORM_S, SEED, kills=True)
        print(f"seed {SEED}: {killed.line()}")

    assert set(quiet.answers) == {"200"}
    assert sum(count for told, count in quiet.commands.items() if told.endswith(" ok")) > conflicts.CLIENTS
    assert killed.kills
    assert leftovers.find_marked(stack.stack_id) == []
