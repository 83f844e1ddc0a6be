"""Conflicting commands, and a full disk: what serves goes on, everything comes to rest, and nothing stays behind.

These are short storms; `python -m bench.conflicts` and `python -m bench.full_disk` take the whole ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import conflicts, full_disk
from muster.embedded import leftovers
from tests.support.stacks.loaded_stack import LoadedStack

pytestmark = pytest.mark.timeout(480)

STORM_S = 5.0
KILLS_S = 10.0
"""Time for two kills."""
SEED = 20_001


async def test_conflicting_commands_cost_a_bystander_nothing_and_leave_nothing(tmp_path: Path) -> None:
    async with LoadedStack.running(tmp_path) as stack:
        quiet = await conflicts.storm(stack, STORM_S, SEED)
        print(f"seed {SEED}: {quiet.line()}")
        killed = await conflicts.storm(stack, KILLS_S, SEED, kills=True)
        print(f"seed {SEED}: {killed.line()}")

    assert set(quiet.answers) == {"200"}
    assert sum(count for told, count in quiet.commands.items() if told.endswith(" ok")) > conflicts.CLIENTS
    assert killed.kills
    assert leftovers.find_marked(stack.stack_id) == []


FULL_FOR_S = 5.0


async def test_a_full_disk_ends_nothing_fails_no_request_and_changes_work_once_there_is_room() -> None:
    outcome = await full_disk.full_for(FULL_FOR_S)

    print(outcome.line())
    assert outcome.deaths == []
    assert set(outcome.answers) == {"200"}
    assert outcome.answers["200"] > 20
    assert any("is full" in notice for notice in outcome.notices)
    assert any("has room again" in notice for notice in outcome.notices)
