"""Output through rich: tables that fit a terminal, colours, live lines.

Why apart: importing rich takes a fifth of the time that `muster status` may take, and only a terminal needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from muster.cli.output import Cell, Table, plain

_PIPED_WIDTH = 100_000
"""Columns of what is not written to a terminal: nothing is cut there."""


class _PlainConsole(Console):
    """Writes texts through `plain`; rich's own control sequences stay."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            segment if segment.control else Segment(plain(segment.text), segment.style) for segment in buffer
        )


def get_console(*, stderr: bool = False) -> Console:
    """A console on standard output, or on standard error."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return _PlainConsole(stderr=stderr, width=None if is_terminal else _PIPED_WIDTH, highlight=False)


def render(rows: Table) -> RichTable:
    """The table as rich draws it; cells that do not fit are folded."""
    made = RichTable(
        box=box.SIMPLE_HEAD if rows.columns else None,
        show_header=bool(rows.columns),
        pad_edge=False,
        show_edge=False,
    )
    for column in rows.columns:
        made.add_column(column, overflow="fold")
    for row in rows.rows:
        made.add_row(*map(_text, row))
    return made


def print_table(title: str, rows: Table) -> None:
    """Print a table under its title, if it has one."""
    console = get_console()
    if title:
        console.print(Text(title, style="bold"))
    console.print(render(rows))
    if title:
        console.print()


def print_cells(cells: Sequence[Cell]) -> None:
    """Print one line, which the terminal wraps."""
    get_console().print(Text(" ").join(map(_text, cells)), soft_wrap=True)


def _text(cell: Cell) -> Text:
    return Text(cell.text, style=cell.style)
