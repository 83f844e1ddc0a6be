"""`muster top`: who bears what just now, looked at again and again."""

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
from rich.table import Table
from rich.text import Text

from muster.cli import output
from muster.cli.ports import AdminPort
from muster.cli.session import Session
from muster.cli.streaming import streaming
from muster.cli.tables import table
from muster.cli.top_rows import TopRow, top_rows
from muster.client.address import StackAddress
from serve_common.errors import LimitReached, TransientError
from serve_common.wires.queries import GetStatus, ListDeployments
from serve_common.wires.views import LoadView, StatusView

_RETRY_S: Final = 15.0
_ERROR_SHARE_BAD: Final = 0.01


@streaming
async def top(
    session: Session,
    address: StackAddress,
    *,
    interval: Annotated[
        float, typer.Option("--interval", min=0.2, max=3600.0, help="Between two looks, in seconds.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look once, after one interval, and end; so in pipes, too.")
    ] = False,
    as_json: bool = False,
) -> None:
    """Watch requests, times, queues and replicas of every deployment.

    Examples:
      muster top
      muster top --once --interval 10
      muster top --json

    With --json a line of JSON after each interval, or one document with
    --once. Times are from the head of a request to its answer.
    """
    with output.Progress("top") as progress, ExitStack() as screen:
        async with session.connect(address, progress, retry_for_s=_RETRY_S) as stack:
            before = await stack.admin.get_load()
            progress.stop()
            live = None
            if sys.stdout.isatty() and not as_json and not once:
                live = screen.enter_context(
                    Live(console=output.get_console(), auto_refresh=False, screen=True)
                )
            while True:
                await asyncio.sleep(interval)
                try:
                    after, rows = await _look(stack.admin, before)
                except TransientError as error:
                    if live is None:
                        raise
                    live.update(Text(str(error), style="red"), refresh=True)
                    continue
                before = after
                if as_json:
                    _print(rows, after, once=once)
                elif live is None:
                    output.get_console().print(_shown(rows, after))
                else:
                    live.update(_shown(rows, after), refresh=True)
                if once:
                    return


async def _look(admin: AdminPort, before: LoadView) -> tuple[LoadView, list[TopRow]]:
    after = await admin.get_load()
    return after, top_rows(before, after, await _status(admin), await admin.get_autoscaling())


async def _status(admin: AdminPort) -> StatusView:
    try:
        return await admin.get_status(GetStatus())
    except LimitReached:
        view = await admin.get_status(GetStatus(deployments=False))
    return msgspec.structs.replace(view, deployments=await admin.list_deployments(ListDeployments()))


def _print(rows: Sequence[TopRow], load: LoadView, *, once: bool) -> None:
    document = {"at": load.at, "rows": msgspec.to_builtins(rows), "unreachable": load.unreachable}
    if once:
        output.print_json(document)
    else:
        output.print_json_line(msgspec.json.encode(document).decode())


def _shown(rows: Sequence[TopRow], load: LoadView) -> Group:
    shown: list[Table | Text] = [_table(rows)]
    if load.unreachable:
        text = f"not counted, for they do not answer: {', '.join(load.unreachable)}"
        shown.append(Text(text, style="yellow"))
    return Group(*shown)


def _table(rows: Sequence[TopRow]) -> Table:
    made = table("name", "req/s", "errors/s", "p50", "p99", "queued", "in flight", "replicas", "autoscaling")
    for column in made.columns[1:8]:
        column.justify = "right"
    for row in rows:
        is_bad = (row.errors_per_s or 0.0) > _ERROR_SHARE_BAD * (row.requests_per_s or 0.0)
        is_short = row.running is not None and row.wanted is not None and row.running < row.wanted
        made.add_row(
            Text(output.short_name(row.name)),
            Text(_number(row.requests_per_s, 1)),
            Text(_number(row.errors_per_s, 1), style="red" if is_bad else ""),
            Text(_milliseconds(row.p50_s)),
            Text(_milliseconds(row.p99_s)),
            Text(_number(row.queued, 0), style="yellow" if row.queued else ""),
            Text(_number(row.in_flight, 0)),
            Text(_replicas(row), style="yellow" if is_short else ""),
            Text(row.autoscaling or "-"),
        )
    return made


def _replicas(row: TopRow) -> str:
    if row.running is None:
        return "-" if row.wanted is None else f"?/{row.wanted}"
    return f"{row.running}/{row.wanted}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
