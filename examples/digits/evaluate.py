"""Measures what a caller gets: every held-out digit through HTTP, each answer compared with the truth.

It is also the witness of every failure test: with `--forever` it keeps asking while parts of the stack are
killed, and whatever a caller would have noticed ends up in the count of failures.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import math
import sys
import time
import urllib.parse
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from split import held_out_part

ACCURACY_MIN = 0.95
REASONS_KEPT = 5  # distinct reasons for each kind of failure; further ones are only counted
REASON_CHARS_MAX = 200
PAUSE_AFTER_FAILED_CONNECT_S = 0.05  # a server that is down is asked again, not hammered
SAMPLE_INDEX = 131  # a 7 of which the model is sure, yet less than 99 %
SAMPLE_SCALE = 16


@dataclass(frozen=True)
class Case:
    """One held-out image, ready to send, and the digit it shows."""

    png: bytes
    label: int


class Latencies:
    """Durations in buckets 1 % apart, so that a run of any length needs a few kilobytes."""

    _GROWTH = math.log(1.01)

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()

    def add(self, duration_s: float) -> None:
        """Counts one duration."""
        self._buckets[math.floor(math.log(max(duration_s, 1e-6)) / self._GROWTH)] += 1

    def quantile_ms(self, share: float) -> float | None:
        """The duration that `share` (0..1) of all stay below, within 1 %; None without any."""
        rank = share * self._buckets.total()
        for bucket, seen in itertools.accumulate(
            sorted(self._buckets.items()), lambda before, item: (item[0], before[1] + item[1])
        ):
            if seen >= rank:
                return round(1000 * math.exp((bucket + 0.5) * self._GROWTH), 3)
        return None


@dataclass
class Tally:
    """What came back so far."""

    answered: int = 0
    correct: int = 0
    unsure: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=dict)
    latencies: Latencies = field(default_factory=Latencies)
    seconds: float = 0.0

    def answer(self, digit: int | str, label: int, duration_s: float) -> None:
        """Counts an answer, right or wrong."""
        self.answered += 1
        self.correct += digit == label
        self.unsure += digit == "unsure"
        self.latencies.add(duration_s)

    def failure(self, kind: str, reason: str) -> None:
        """Counts a request without a proper answer; `kind` is the HTTP status or what broke."""
        self.failures[kind] += 1
        seen = self.reasons.setdefault(kind, Counter())
        reason = reason.strip()[:REASON_CHARS_MAX]
        if reason in seen or len(seen) < REASONS_KEPT:
            seen[reason] += 1

    @property
    def accuracy(self) -> float:
        """Right answers among all answers; 0 when nothing was answered."""
        return self.correct / self.answered if self.answered else 0.0

    @property
    def passed(self) -> bool:
        """Whether a user of the service would be content."""
        return not self.failures.total() and self.accuracy >= ACCURACY_MIN

    def summary(self) -> dict[str, Any]:
        """All figures, as the one JSON object that `--json` prints."""
        requests = self.answered + self.failures.total()
        return {
            "requests": requests,
            "answered": self.answered,
            "correct": self.correct,
            "unsure": self.unsure,
            "accuracy": round(self.accuracy, 4),
            "failures": self.failures.total(),
            "failures_by_kind": {
                kind: {"count": count, "first_reasons": dict(self.reasons[kind])}
                for kind, count in self.failures.most_common()
            },
            "seconds": round(self.seconds, 3),
            "requests_per_s": round(requests / self.seconds, 1) if self.seconds else 0.0,
            "p50_ms": self.latencies.quantile_ms(0.50),
            "p99_ms": self.latencies.quantile_ms(0.99),
            "passed": self.passed,
        }


def encode_png(pixels: np.ndarray, scale: int = 1) -> bytes:
    """64 brightnesses as a grayscale PNG, light ink on a dark ground, `scale` screen pixels to each."""
    levels = np.rint(pixels.reshape(8, 8) * (255 / 16)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(levels.repeat(scale, axis=0).repeat(scale, axis=1)).save(out, format="PNG", optimize=True)
    return out.getvalue()


def held_out_cases(limit: int | None = None) -> list[Case]:
    """The held-out images, or the first `limit` of them."""
    part = held_out_part()
    pairs = zip(part.pixels, part.labels, strict=True)
    return [Case(encode_png(pixels), int(label)) for pixels, label in itertools.islice(pairs, limit)]


def write_sample(path: Path) -> int:
    """Writes one held-out image, large enough to look at; returns the digit it shows."""
    part = held_out_part()
    path.write_bytes(encode_png(part.pixels[SAMPLE_INDEX], scale=SAMPLE_SCALE))
    return int(part.labels[SAMPLE_INDEX])


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


def print_summary(summary: dict[str, Any], concurrency: int) -> None:
    """The figures for people."""
    print(
        f"accuracy    {summary['accuracy']:.4f}  "
        f"({summary['correct']} of {summary['answered']} answers right, {summary['unsure']} unsure)"
    )
    print(f"failures    {summary['failures']}")
    for kind, failed in summary["failures_by_kind"].items():
        print(f"  {kind}: {failed['count']}")
        for reason, count in failed["first_reasons"].items():
            print(f"    {count} x {reason}")
    print(
        f"requests/s  {summary['requests_per_s']}  "
        f"({summary['requests']} in {summary['seconds']:.1f} s, {concurrency} at once)"
    )
    if summary["p50_ms"] is not None:
        print(f"latency     p50 {summary['p50_ms']:.1f} ms, p99 {summary['p99_ms']:.1f} ms")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Exits with code 2 and a reason when the command line is wrong."""
    parser = argparse.ArgumentParser(description="Send every held-out digit over HTTP and judge the answers.")
    parser.add_argument("url", nargs="?", type=_http_url, help="for example http://127.0.0.1:8000/digits")
    parser.add_argument("--concurrency", type=_count, default=16, metavar="N", help="requests at once (16)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--repeat", type=_count, default=1, metavar="N", help="send everything N times (1)")
    length.add_argument(
        "--forever",
        type=_seconds,
        nargs="?",
        const=math.inf,
        metavar="SECONDS",
        help="go on for SECONDS, or until Ctrl-C",
    )
    parser.add_argument("--limit", type=_count, metavar="N", help="only the first N images")
    parser.add_argument(
        "--timeout", type=_seconds, default=30.0, metavar="SECONDS", help="for each request (30)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--write-sample", type=Path, metavar="FILE", help="write one held-out digit as PNG and stop"
    )
    arguments = parser.parse_args(argv)
    if arguments.url is None and arguments.write_sample is None:
        parser.error("give the URL of the deployment")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was answered and right often enough, 1 when not, 130 when stopped by Ctrl-C."""
    arguments = parse_arguments(argv)
    if arguments.write_sample is not None:
        digit = write_sample(arguments.write_sample)
        print(f"{arguments.write_sample} shows a {digit}")
        return 0
    cases = held_out_cases(arguments.limit)
    tally = Tally()
    console = Console(stderr=True)
    stopped = False
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        total = None if arguments.forever is not None else len(cases) * arguments.repeat
        bar = progress.add_task("asking", total=total)

        has_begun = console.is_terminal or arguments.forever is None

        def on_done() -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                print("asking; Ctrl-C ends it", file=sys.stderr, flush=True)
            failed = tally.failures.total()
            progress.update(bar, advance=1, description=f"asking ({failed} failed)" if failed else "asking")

        try:
            asyncio.run(
                send_all(
                    arguments.url,
                    rounds(cases, repeat=arguments.repeat, forever_s=arguments.forever),
                    concurrency=arguments.concurrency,
                    timeout_s=arguments.timeout,
                    tally=tally,
                    on_done=on_done,
                )
            )
        except KeyboardInterrupt:
            stopped = True
    summary = tally.summary()
    if arguments.json:
        print(json.dumps({"url": arguments.url, "concurrency": arguments.concurrency, **summary}))
    else:
        print_summary(summary, arguments.concurrency)
    return 130 if stopped else 0 if tally.passed else 1


def _http_url(text: str) -> str:
    parts = urllib.parse.urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not an http:// or https:// address")
    return text


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:10]) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1000000")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
