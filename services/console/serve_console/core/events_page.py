"""What the page of events and history shows: which events pass its filter, and changes in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from serve_common.api.views import EventView, HistoryView
from serve_common.names import short_name
from serve_console.core.line_diff import compare_lines
from serve_console.core.plain_text import clean_text

ROWS_MAX: Final = 500
KINDS: Final = ("goal", "replica", "backend", "rollout", "autoscaling", "host", "proxy", "store", "audit")
HISTORY_PAGE: Final = 50
"""Entries of the history on one page."""
_FILTER_MAX: Final = 120
_BLOCK_S: Final = 30.0
_DIFF_LINES_MAX: Final = 80
_JSON_MAX: Final = 20_000


class EventSelection(msgspec.Struct, frozen=True):
    """Which events are shown; empty fields let all pass."""

    kind: str = ""
    subject: str = ""
    text: str = ""

    @property
    def query(self) -> str:
        """The filter in an address."""
        return urlencode({name: value for name, value in msgspec.structs.asdict(self).items() if value})

    @property
    def is_empty(self) -> bool:
        """Whether all events pass."""
        return not (self.kind or self.subject or self.text)

    def passes(self, event: EventView) -> bool:
        """Whether an event is shown. A subject also stands for its replicas and parts, by the beginning of its name."""
        if self.kind and event.kind != self.kind:
            return False
        if self.subject and not _is_subject(self.subject, event):
            return False
        text = self.text.casefold()
        return not text or any(
            text in part.casefold() for part in (event.message, event.subject, event.state, event.kind)
        )


class EventBlocks(msgspec.Struct, frozen=True):
    """Events, the newest first, in two parts: the second one stays the same for a while."""

    latest: tuple[EventView, ...]
    earlier: tuple[EventView, ...]
    is_cut: bool
    """Whether there are more than are shown."""

    @property
    def count(self) -> int:
        """Events that are shown."""
        return len(self.latest) + len(self.earlier)


class HistoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One change."""

    id: int
    at: float
    person: str
    verb: str
    subject: str
    title: str
    """The subject as its user typed it."""
    goal_id: str
    request: str
    """The command as JSON."""
    diff: list[str]
    """Lines of what the change altered; empty where nothing did."""


class HistoryPage(msgspec.Struct, frozen=True):
    """One page of the audit log."""

    rows: list[HistoryRow]
    before: int | None
    """Id for the next page; None: this is the last."""


def parse_filter(query: Mapping[str, str]) -> EventSelection:
    """The filter of an address; what is too long is cut, and an unknown kind finds nothing."""
    found = {
        name: clean_text(query.get(name, "")).strip()[:_FILTER_MAX] for name in ("kind", "subject", "text")
    }
    return EventSelection(**found)


def select_events(events: Iterable[EventView], wanted: EventSelection) -> EventBlocks:
    """The newest events that pass, of ``events`` with the oldest last; at most 500."""
    found = list(islice((event for event in events if wanted.passes(event)), ROWS_MAX + 1))
    if not found:
        return EventBlocks((), (), is_cut=False)
    split = found[0].at // _BLOCK_S * _BLOCK_S
    latest = [event for event in found if event.at >= split]
    earlier = [event for event in found if event.at < split]
    half = ROWS_MAX // 2
    return EventBlocks(
        tuple(latest[:half]),
        tuple(earlier[:half]),
        is_cut=len(latest) > half or len(earlier) > half,
    )


def build_history(views: list[HistoryView]) -> HistoryPage:
    """One page of the history, the newest first."""
    rows = [build_history_row(view) for view in views[:HISTORY_PAGE]]
    return HistoryPage(rows, rows[-1].id if len(views) > HISTORY_PAGE else None)


def build_history_row(view: HistoryView) -> HistoryRow:
    """One change in words."""
    return HistoryRow(
        id=view.id,
        at=view.at,
        person=view.principal,
        verb=view.verb,
        subject=view.subject,
        title=short_name(view.subject),
        goal_id=view.goal_id or "",
        request=_cut(_format_json(view.request)),
        diff=build_diff(view.old, view.new),
    )


def build_diff(old: Any, new: Any) -> list[str]:
    """What a change altered, as lines of a unified difference without its heading; at most 80."""
    if old == new:
        return []
    before = [] if old is None else _format_json(old).splitlines()
    after = [] if new is None else _format_json(new).splitlines()
    lines = list(islice(compare_lines(before, after, 2), _DIFF_LINES_MAX + 1))
    if len(lines) > _DIFF_LINES_MAX:
        lines = [*lines[:_DIFF_LINES_MAX], " …"]
    marked = ["@@ …" if line.startswith("@@") else clean_text(line) for line in lines]
    return marked[1:]


def _is_subject(wanted: str, event: EventView) -> bool:
    if event.goal_id == wanted:
        return True
    names = (event.subject, short_name(event.subject))
    return any(name == wanted or name.startswith((f"{wanted}#", f"{wanted}--")) for name in names)


def _format_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def _cut(text: str) -> str:
    return text if len(text) <= _JSON_MAX else f"{text[:_JSON_MAX]}…"
