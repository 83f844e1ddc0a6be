"""When a proxy gives memory back to the system, and when it takes what is left for needed."""

from __future__ import annotations

import asyncio

import pytest

from serve_common.dispatch.request_body import UploadMemory
from serve_proxy.http import bodies as given_back

MIB = 1024 * 1024


async def test_what_is_still_held_at_the_first_try_is_given_back_at_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resident = [60 * MIB]
    freed_by_try = [60 * MIB, 0, 40 * MIB]
    tries = [0]

    def trim(_pad: int) -> int:
        resident[0] -= freed_by_try[tries[0]] if tries[0] < len(freed_by_try) else 0
        tries[0] += 1
        return 1

    async def settle(count: int) -> None:
        async with asyncio.timeout(30):
            while tries[0] < count:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert tries[0] == count

    monkeypatch.setattr(given_back, "_find_trim", lambda: trim)
    monkeypatch.setattr(given_back, "resident_bytes", lambda: resident[0])
    monkeypatch.setattr(given_back, "MEMORY_CHECK_PERIOD_S", 0)
    giving = asyncio.get_running_loop().create_task(given_back.give_back_memory(UploadMemory()))
    await asyncio.sleep(0)
    resident[0] = 160 * MIB
    await settle(3)
    assert resident[0] == 60 * MIB
    resident[0] = 100 * MIB
    await settle(3 + given_back._TRIES_MAX)
    giving.cancel()
    await asyncio.gather(giving, return_exceptions=True)
