"""Runs `wrk` and reads what it prints.

Why wrk: a load generator in Python is slower than what it would measure here, so it would measure itself.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

import msgspec

HOW_TO_INSTALL = "wrk is not installed: `apt-get install wrk` (Debian, Ubuntu) or `brew install wrk` (macOS)"
_EXTRA_S = 15.0
"""How much longer than asked for wrk may take: it waits for its connections at first."""

_MS_OF_UNIT = {"us": 0.001, "ms": 1.0, "s": 1_000.0, "m": 60_000.0, "h": 3_600_000.0}
_PERCENTILE = r"^\s+{}%\s+([0-9.]+)(us|ms|s|m|h)\s*$"
_REQUESTS = re.compile(r"^\s*(\d+) requests in ", re.MULTILINE)
_RATE = re.compile(r"^Requests/sec:\s+([0-9.]+)\s*$", re.MULTILINE)
_SOCKET_ERRORS = re.compile(r"^\s+Socket errors: (.*)$", re.MULTILINE)
_BAD_STATUSES = re.compile(r"^\s+Non-2xx or 3xx responses: (\d+)\s*$", re.MULTILINE)


class WrkFailed(RuntimeError):
    """wrk could not run or printed what cannot be read; the message tells what it said."""


class WrkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of wrk measured."""

    requests: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    socket_errors: int
    """Failed connects, reads and writes, and answers that took longer than two seconds."""
    bad_statuses: int
    """Answers with a status of 400 or more."""

    @property
    def errors(self) -> int:
        """Everything that did not end as it should.

        No answer at all is one: wrk itself says nothing about requests that are still waiting at its end.
        """
        return self.socket_errors + self.bad_statuses + (self.requests == 0)


def parse_wrk(text: str) -> WrkFigures:
    """Read what ``wrk --latency`` printed; raises `WrkFailed` when a figure is missing."""
    socket_errors = _SOCKET_ERRORS.search(text)
    bad_statuses = _BAD_STATUSES.search(text)
    return WrkFigures(
        requests=int(_found(_REQUESTS, text)[1]),
        requests_per_s=float(_found(_RATE, text)[1]),
        p50_ms=_percentile_ms(text, 50),
        p99_ms=_percentile_ms(text, 99),
        socket_errors=sum(map(int, re.findall(r"\d+", socket_errors[1]))) if socket_errors else 0,
        bad_statuses=int(bad_statuses[1]) if bad_statuses else 0,
    )


def _percentile_ms(text: str, percent: int) -> float:
    match = _found(re.compile(_PERCENTILE.format(percent), re.MULTILINE), text)
    return float(match[1]) * _MS_OF_UNIT[match[2]]


def _found(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    match = pattern.search(text)
    if match is None:
        raise WrkFailed(f"nothing in wrk's output matches {pattern.pattern!r}:\n{text}")
    return match


def find_wrk() -> str:
    """Where wrk is; raises `WrkFailed` that says how to install it."""
    path = shutil.which("wrk")
    if path is None:
        raise WrkFailed(HOW_TO_INSTALL)
    return path


async def run_wrk(
    wrk: str, url: str, connections: int, seconds: int, script: Path | None = None
) -> WrkFigures:
    """Load ``url`` from one thread over so many kept-alive connections, each with one request at a time.

    ``script`` is wrk's own, in Lua: it says what is sent when that is more than a GET.
    """
    process = await asyncio.create_subprocess_exec(
        *(wrk, "-t1", f"-c{connections}", f"-d{seconds}s", "--latency"),
        *(() if script is None else ("-s", str(script))),
        url,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for us; we end it below
    )
    try:
        async with asyncio.timeout(seconds + _EXTRA_S):
            output, _ = await process.communicate()
    except TimeoutError as error:
        raise WrkFailed(f"wrk did not end {_EXTRA_S:g} s after its {seconds} s against {url}") from error
    finally:
        if process.returncode is None:
            process.kill()
            _ = await process.wait()
    text = output.decode("utf-8", "replace")
    if process.returncode != 0:
        raise WrkFailed(f"wrk against {url} ended with code {process.returncode}:\n{text}")
    return parse_wrk(text)
