"""Measures what a caller gets: every held-out digit through HTTP, each answer compared with the truth.

It is also the witness of every failure test: with `--forever` it keeps asking while parts of the stack are
killed, and whatever a caller would have noticed ends up in the count of failures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asking import rounds, send_all
from images import held_out_cases, write_sample
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tally import Tally


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
    tally = Tally()
    was_stopped = not _ask_all(arguments, tally)
    summary = tally.summary()
    if arguments.json:
        print(json.dumps({"url": arguments.url, "concurrency": arguments.concurrency, **summary}))
    else:
        print_summary(summary, arguments.concurrency)
    return 130 if was_stopped else 0 if tally.passed else 1


def _ask_all(arguments: argparse.Namespace, tally: Tally) -> bool:
    """Asks what the command line says; False when Ctrl-C ended it."""
    cases = held_out_cases(arguments.limit)
    total = None if arguments.forever is not None else len(cases) * arguments.repeat
    with _progress(total, tally) as on_done:
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
            return False
    return True


@contextmanager
def _progress(total: int | None, tally: Tally) -> Iterator[Callable[[], None]]:
    """Shows how far it is, when a person looks on; gives what is to be called after each request.

    Without a `total` (of requests) and without a person, it says once that asking has begun.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("asking", total=total)
        has_started = console.is_terminal or total is not None

        def on_done() -> None:
            nonlocal has_started
            if not has_started:
                has_started = True
                print("asking; Ctrl-C ends it", file=sys.stderr, flush=True)
            failed = tally.failures.total()
            progress.update(bar, advance=1, description=f"asking ({failed} failed)" if failed else "asking")

        yield on_done


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
