"""Thousands of requests, a third of whose clients leave when they like, leave nothing behind.

The full figure, with a hundred thousand requests, is `python -m tests.bench.leaks`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.integration import leaving_load
from tests.integration.bare_stack import BareStack

pytestmark = [pytest.mark.alone, pytest.mark.integration, pytest.mark.timeout(600)]

WARM_UP = 1500
REQUESTS = 5000
RSS_GROWTH_MAX_BYTES = 12 * 1024 * 1024
"""A leak of a whole body of each upload would be twenty times as much; allocators alone move by some of it."""


async def test_clients_that_leave_at_random_moments_leave_nothing_behind(tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    async with BareStack.running(tmp_path) as stack:
        await leaving_load.start(stack)
        outcome = await leaving_load.run(stack, seed=seed, warm_up=WARM_UP, requests=REQUESTS)
    print("\n".join(outcome.lines()))
    assert outcome.requests >= REQUESTS
    assert 0.25 <= outcome.cancelled / outcome.requests <= 0.35
    assert outcome.unexpected == {}
    assert outcome.held() == []
    for growth in outcome.growths:
        assert growth.rss_growth_bytes <= RSS_GROWTH_MAX_BYTES, growth
