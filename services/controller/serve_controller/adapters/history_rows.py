"""Between the audit log's rows and what is read of it.

Why apart from the checkpoint's rows: what was asked is kept as the caller wrote it, without types, and must be readable
for ever, also what later versions of the code would refuse.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from serve_common.names import GoalId
from serve_common.wires.views import HistoryView
from serve_controller.adapters.checkpoint_rows import without_surrogates
from serve_controller.ports import HistoryEntry

HISTORY_ROWS_MAX: Final = 10_000
"""History rows that are kept; a store may hold a few more until it next trims."""
HISTORY_PAGE_BYTES_MAX: Final = 700_000
"""JSON of one page of the history: with the names around it, it must fit one NATS message."""


class HistoryRow(msgspec.Struct, frozen=True):
    """One line as it is stored."""

    id: int
    at: float
    who: str
    epoch: int
    verb: str
    subject: str
    goal_id: str | None
    request: str
    """JSON, as are the two below."""
    old: str | None
    new: str | None


def row_of(entry: HistoryEntry, number: int, epoch: int) -> HistoryRow:
    """The row of an entry that the leader of ``epoch`` wrote."""
    return HistoryRow(
        number,
        entry.at,
        entry.who,
        epoch,
        entry.verb,
        entry.subject,
        entry.goal_id,
        entry.request,
        entry.old,
        entry.new,
    )


def view_of(row: HistoryRow) -> HistoryView:
    """The row as callers see it."""
    return HistoryView(
        id=row.id,
        at=row.at,
        who=row.who,
        epoch=row.epoch,
        verb=row.verb,
        subject=row.subject,
        goal_id=None if row.goal_id is None else GoalId(row.goal_id),
        request=_value(row.request),
        old=_value(row.old),
        new=_value(row.new),
    )


def first_page(rows: Iterable[HistoryRow], bytes_max: int) -> list[HistoryRow]:
    """The first of ``rows``, with at most ``bytes_max`` of JSON together; one at least, so that a reader gets on."""
    page: list[HistoryRow] = []
    size = 0
    for row in rows:
        size += sum(len(text.encode()) for text in (row.request, row.old, row.new) if text is not None)
        if page and size > bytes_max:
            break
        page.append(row)
    return page


def _value(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        # A lone surrogate, which Postgres' json takes as an escape. It must not make the whole page unreadable.
        return _lenient(text)


def _lenient(text: str) -> Any:
    try:
        return without_surrogates(json.loads(text))
    except (ValueError, RecursionError):
        return text
