"""What the page of a deployment reads by itself: the history and the revisions.

Why notes and no errors: without a leader these cannot be read, and the rest of the page still can be shown.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, final

import msgspec
import structlog
from starlette.requests import Request

from serve_common.api.queries import GetHistory, GetRevisions
from serve_common.api.views import DeploymentView, HistoryView
from serve_common.errors import BadField, ServeError
from serve_console.core.config_diff import list_settings
from serve_console.core.deployment_page import diff_entry, diff_revisions
from serve_console.core.plain_text import clean_text
from serve_console.core.timeline import describe_change
from serve_console.shell.sessions import PersonSession

_log = structlog.get_logger(__name__)

_ENTRIES: Final = 20
"""Entries of the history on a page."""
_RECENT: Final = 30
"""Changes in the timeline."""
_SEARCHED: Final = 200
"""Newest changes in which the configurations of revisions are looked for."""
_NAMES_MAX: Final = 100


class ShownEntry(msgspec.Struct, frozen=True):
    """One entry of the history as it is shown."""

    id: int
    at: float
    title: str
    verb: str
    principal: str
    goal_id: str
    diff: list[str]


@final
class DeploymentQueries:
    """Reads, and remembers the newest changes of some deployments for their timelines."""

    def __init__(self) -> None:
        self._recent: OrderedDict[str, list[HistoryView]] = OrderedDict()

    def get_recent(self, name: str) -> list[HistoryView]:
        """The newest changes that were read last."""
        return self._recent.get(name, [])

    async def read_recent(self, session: PersonSession, view: DeploymentView) -> None:
        """Read the newest changes; those that were read before stay if that fails."""
        found, _note = await _read_entries(session, view, _RECENT, None)
        if found is None:
            return
        self._recent[view.name] = found
        self._recent.move_to_end(view.name)
        while len(self._recent) > _NAMES_MAX:
            self._recent.popitem(last=False)

    async def read_history(
        self, request: Request, session: PersonSession, view: DeploymentView
    ) -> dict[str, Any]:
        """Variables of the tab History."""
        before = _parse_number(request, "before")
        found, note = await _read_entries(session, view, _ENTRIES + 1, before)
        entries = [
            ShownEntry(
                entry.id,
                entry.at,
                describe_change(entry),
                entry.verb,
                clean_text(entry.principal, 200),
                entry.goal_id or "",
                diff_entry(entry, view.name),
            )
            for entry in (found or [])[:_ENTRIES]
        ]
        older = entries[-1].id if len(found or []) > _ENTRIES else None
        return {"entries": entries, "note": note, "older": older, "before": before}

    async def read_configuration(
        self, request: Request, session: PersonSession, view: DeploymentView
    ) -> dict[str, Any]:
        """Variables of the tab Configuration."""
        groups = [
            list_settings("Replicas and their treatment", view.backend_config),
            list_settings("Code and resources", view.replica_config),
            list_settings("Endpoint", view.endpoint_options),
        ]
        new, old = _parse_number(request, "to"), _parse_number(request, "from")
        found: dict[str, Any] = {
            "groups": groups, "revisions": [], "note": "", "difference": None, "from": old, "to": new,
        }  # fmt: skip
        try:
            revisions = await session.stack.live.call(GetRevisions(name=view.name))
        except ServeError as error:
            return {**found, "note": f"The revisions cannot be read now: {clean_text(str(error), 300)}"}
        found["revisions"] = revisions
        if len(revisions) > 1:
            new = revisions[0].revision if new is None else new
            old = _find_earlier([each.revision for each in revisions], new) if old is None else old
            history, note = await _read_entries(session, view, _SEARCHED, None)
            if history is None:
                return {**found, "note": note}
            if old is not None:
                found["difference"] = diff_revisions(revisions, history, view.name, old, new)
            if found["difference"] is None:
                found["note"] = "There is no such revision to compare with."
        return found


def _find_earlier(numbers: list[int], number: int) -> int | None:
    return max((each for each in numbers if each < number), default=None)


async def _read_entries(
    session: PersonSession, view: DeploymentView, limit: int, before: int | None
) -> tuple[list[HistoryView] | None, str]:
    """Changes of a deployment and of its application, the newest first; None and why if that cannot be read."""
    subjects = [view.name, *([view.application] if view.application else [])]
    found: list[HistoryView] = []
    try:
        for subject in subjects:
            query = GetHistory(limit=limit, subject=subject, before=before)
            found += await session.stack.live.call(query)
    except ServeError as error:
        _log.info("history_unreadable", deployment=view.name, reason=str(error))
        return None, f"The history cannot be read now: {clean_text(str(error), 300)}"
    return sorted(found, key=lambda entry: entry.id, reverse=True)[:limit], ""


def _parse_number(request: Request, field: str) -> int | None:
    text = request.query_params.get(field, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 15:
        raise BadField(field, "must be a number")
    return int(text)
