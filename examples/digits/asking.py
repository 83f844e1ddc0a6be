"""Sends images over HTTP, many at once, and tells the tally what a caller would have noticed of each.

Why every way to fail has its own kind: "timeout", "connect" and "broken connection" point to different faults.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

import aiohttp
from images import Case
from tally import Tally

PAUSE_AFTER_FAILED_CONNECT_S = 0.05  # a server that is down is asked again, not hammered


async def ask(session: aiohttp.ClientSession, url: str, case: Case, tally: Tally) -> bool:
    """Sends one image and counts what comes of it; False when no connection could be made."""
    # The model is a pure function, so Muster may send the request again when a replica dies under it.
    headers = {"Content-Type": "image/png", "Idempotency-Key": str(uuid.uuid4())}
    started = time.perf_counter()
    try:
        async with session.post(url, data=case.png, headers=headers, allow_redirects=False) as response:
            body = await response.read()
            status = response.status
    except TimeoutError as error:  # before its parents: aiohttp's timeouts are connection errors too
        tally.failure("timeout", str(error) or "no answer in time")
    except aiohttp.ClientConnectorError as error:
        tally.failure("connect", str(error))
        return False
    except (aiohttp.ClientError, OSError) as error:
        tally.failure("broken connection", f"{type(error).__name__}: {error}")
    else:
        judge(status, body, case.label, time.perf_counter() - started, tally)
    return True


def judge(status: int, body: bytes, label: int, duration_s: float, tally: Tally) -> None:
    """Counts a response: only a 200 with a digit in it, or "unsure", is an answer."""
    if status != 200:
        tally.failure(str(status), body.decode(errors="replace"))
        return
    try:
        digit = json.loads(body)["digit"]
    except (ValueError, TypeError, KeyError, RecursionError):
        digit = None
    if digit == "unsure" or (type(digit) is int and 0 <= digit <= 9):
        tally.answer(digit, label, duration_s)
    else:
        tally.failure("200 without a digit", body.decode(errors="replace"))


async def send_all(
    url: str,
    requests: Iterator[Case],
    *,
    concurrency: int,
    timeout_s: float,
    tally: Tally,
    on_done: Callable[[], None],
) -> None:
    """Sends every case of `requests`, at most `concurrency` at once; `on_done` is called after each."""

    async def work(session: aiohttp.ClientSession) -> None:
        for case in requests:
            connected = await ask(session, url, case, tally)
            tally.seconds = time.perf_counter() - started
            on_done()
            if not connected:
                await asyncio.sleep(PAUSE_AFTER_FAILED_CONNECT_S)

    started = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=concurrency)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        asyncio.TaskGroup() as workers,
    ):
        for _ in range(concurrency):
            workers.create_task(work(session))


def rounds(cases: Sequence[Case], *, repeat: int, forever_s: float | None) -> Iterator[Case]:
    """All cases `repeat` times over, or again and again until `forever_s` seconds have passed."""
    if forever_s is None:
        for _ in range(repeat):
            yield from cases
        return
    end = time.perf_counter() + forever_s
    for case in itertools.cycle(cases):
        if time.perf_counter() >= end:
            return
        yield case
