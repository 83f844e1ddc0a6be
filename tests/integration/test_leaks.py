"""Thousands of requests, a third of whose clients leave when they like, leave nothing behind.

The full figure, with a hundred thousand requests, is `python -m bench.leaks`.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from bench import leaks
from bench.uploads import (
    GIVEN_BACK_WITHIN_S,
    RSS_BYTES_MAX,
    add_sink,
    upload_at_once,
    upload_too_much,
)
from tests.support.stacks.bare_stack import BareStack

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]

WARM_UP = 1500
REQUESTS = 5000
RSS_GROWTH_MAX_BYTES = 12 * 1024 * 1024
"""A leak of a whole body of each upload would be twenty times as much; allocators alone move by some of it."""


async def test_clients_that_leave_at_random_moments_leave_nothing_behind(tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    async with BareStack.running(tmp_path) as stack:
        await leaks.start(stack)
        outcome = await leaks.run(stack, seed=seed, warm_up=WARM_UP, requests=REQUESTS)
    print("\n".join(outcome.lines()))
    assert outcome.requests >= REQUESTS
    assert 0.25 <= outcome.cancelled / outcome.requests <= 0.35
    assert outcome.unexpected == {}
    assert outcome.held() == []
    for growth in outcome.growths:
        assert growth.rss_growth_bytes <= RSS_GROWTH_MAX_BYTES, growth


# More uploads at once than a proxy has memory for: each is answered soon, the memory is bounded and given back.


ANSWERED_WITHIN_S = 2.0
"""On a machine of our own, as `make bench-uploads` demands it; here others may keep it busy."""


async def test_300_uploads_at_once_are_each_answered_in_bounded_memory(tmp_path: Path) -> None:
    others = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    async with BareStack.running(tmp_path) as stack:
        proxy = await add_sink(stack, tmp_path)
        burst = await upload_too_much(proxy)
        (again,) = await upload_at_once(proxy, 1)
    print(burst.text)
    assert all(upload.is_well for upload in burst.uploads)
    assert {upload.status for upload in burst.uploads} == {200, 503}
    first_done_s = min(upload.answered_after_s for upload in burst.uploads if upload.status == 200)
    # However slow the machine is: who is refused is told when it asks, not when the proxy has time for it.
    answered_s = max(upload.answered_after_s for upload in burst.refused)
    assert answered_s < first_done_s
    assert answered_s < ANSWERED_WITHIN_S * others
    assert burst.most_bytes < RSS_BYTES_MAX
    assert burst.given_back_after_s < GIVEN_BACK_WITHIN_S
    assert again.status == 200, "there is room again"
