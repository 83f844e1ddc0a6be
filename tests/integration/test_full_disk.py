"""A full disk under a whole stack: everything lives, every request is answered, and changes work once there is room.

This is a short one; `python -m tests.bench.full_disk` takes the whole minute.
"""

from __future__ import annotations

import pytest

from tests.integration import full_disk

pytestmark = [pytest.mark.alone, pytest.mark.integration, pytest.mark.timeout(480)]

FULL_FOR_S = 10.0


async def test_a_full_disk_ends_nothing_fails_no_request_and_changes_work_once_there_is_room() -> None:
    outcome = await full_disk.full_for(FULL_FOR_S)

    print(outcome.line())
    assert outcome.deaths == []
    assert set(outcome.answers) == {"200"}
    assert outcome.answers["200"] > 20
    assert any("is full" in notice for notice in outcome.notices)
    assert any("has room again" in notice for notice in outcome.notices)
