"""`muster top`: the load of each endpoint and backend, refreshed periodically."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from muster.cli.output import Cell, Progress, Table, print_json, print_json_line, table
from muster.cli.queries import stream_command
from muster.cli.session import Session
from muster.cli.terminal import get_console, render
from muster.client.admin import AdminClient
from muster.client.rates import LoadRates, compute_rates
from muster.client.requests import StackAddress
from serve_common.api.queries import GetAutoscaling, GetLoad
from serve_common.api.views import LoadView
from serve_common.errors import TransientError
from serve_common.names import short_name

_RETRY_S: Final = 15.0
_ERROR_SHARE_BAD: Final = 0.01


@stream_command
async def top(
    session: Session,
    address: StackAddress,
    *,
    interval_s: Annotated[
        float,
        typer.Option(
            "--interval-s",
            metavar="SECONDS",
            min=0.2,
            max=3600.0,
            help="Seconds between samples, 0.2 to 3600.",
        ),
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one sample, after one interval, and exit.")
    ] = False,
    as_json: bool = False,
) -> None:
    """Watch requests, latency, queues and replicas of every deployment.

    Examples:
      muster top
      muster top --once --interval-s 10
      muster top --json

    Latency is from the headers of a request to the end of its response. With --json, prints a line of JSON after each
    interval, or one document with --once.
    """
    with Progress("top") as progress, ExitStack() as screen:
        async with session.connect(address, progress, retry_for_s=_RETRY_S) as stack:
            before = await stack.admin.call(GetLoad())
            progress.stop()
            live = None
            if sys.stdout.isatty() and not as_json and not once:
                live = screen.enter_context(Live(console=get_console(), auto_refresh=False, screen=True))
            while True:
                await asyncio.sleep(interval_s)
                try:
                    after, rows = await _sample(stack.admin, before)
                except TransientError as error:
                    if live is None:
                        raise
                    live.update(Text(str(error), style="red"), refresh=True)
                    continue
                before = after
                if as_json:
                    _print(rows, after, once=once)
                elif live is None:
                    get_console().print(_render(rows, after))
                else:
                    live.update(_render(rows, after), refresh=True)
                if once:
                    return


async def _sample(admin: AdminClient, before: LoadView) -> tuple[LoadView, list[LoadRates]]:
    after = await admin.call(GetLoad())
    return after, compute_rates(before, after, await admin.fetch_status(), await admin.call(GetAutoscaling()))


def _print(rows: Sequence[LoadRates], load: LoadView, *, once: bool) -> None:
    document = {"at": load.at, "rows": msgspec.to_builtins(rows), "unreachable": load.unreachable}
    if once:
        print_json(document)
    else:
        print_json_line(msgspec.json.encode(document).decode())


def _render(rows: Sequence[LoadRates], load: LoadView) -> Group:
    drawn = render(_table(rows))
    for column in drawn.columns[1:8]:
        column.justify = "right"
    shown: list[RichTable | Text] = [drawn]
    if load.unreachable:
        text = f"not counted, because they do not answer: {', '.join(load.unreachable)}"
        shown.append(Text(text, style="yellow"))
    return Group(*shown)


def _table(rows: Sequence[LoadRates]) -> Table:
    made = table("name", "req/s", "errors/s", "p50", "p99", "queued", "in flight", "replicas", "autoscaling")
    for row in rows:
        is_bad = (row.errors_per_s or 0.0) > _ERROR_SHARE_BAD * (row.requests_per_s or 0.0)
        is_short = row.running is not None and row.wanted is not None and row.running < row.wanted
        made.add_row(
            Cell(short_name(row.name)),
            Cell(_number(row.requests_per_s, 1)),
            Cell(_number(row.errors_per_s, 1), style="red" if is_bad else ""),
            Cell(_milliseconds(row.p50_s)),
            Cell(_milliseconds(row.p99_s)),
            Cell(_number(row.queued, 0), style="yellow" if row.queued else ""),
            Cell(_number(row.in_flight, 0)),
            Cell(_replicas(row), style="yellow" if is_short else ""),
            Cell(row.autoscaling or "-"),
        )
    return made


def _replicas(row: LoadRates) -> str:
    if row.running is None:
        return "-" if row.wanted is None else f"?/{row.wanted}"
    return f"{row.running}/{row.wanted}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
