"""That a pulse that is told to stop stops, though NATS answered its ping in the same moment."""

from __future__ import annotations

import asyncio

import pytest

from serve_common.runtime.health import BusHealthCheck


async def test_a_pulse_that_is_cancelled_as_an_answer_comes_ends() -> None:
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def ping(within_s: float) -> None:
        await asyncio.wait_for(answer, within_s)  # as nats-py's flush does

    pulse = BusHealthCheck("bus", is_connected=lambda: True, ping=ping, silent_after_s=400.0)
    running = asyncio.get_running_loop().create_task(pulse.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answer.set_result(None)
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=20)
    running.cancel()
    assert done
    with pytest.raises(asyncio.CancelledError):
        await running
