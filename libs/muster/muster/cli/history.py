"""`muster history`, `muster revisions`, `muster events`: what was changed and what happened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec
import typer

from muster.cli.completion import complete_backend
from muster.cli.output import (
    Cell,
    format_time,
    print_cells,
    print_json,
    print_json_line,
    print_line,
    print_table,
    shorten,
    style_state,
    table,
)
from muster.cli.queries import ReadRequest, query_command, stream_command
from muster.cli.session import Session
from muster.client.requests import FeedMessage, StackAddress
from serve_common.api.queries import GetEvents, GetHistory, GetRevisions
from serve_common.api.views import EventView, HistoryView, RevisionView
from serve_common.errors import BadField
from serve_common.names import ReplicaTag, deployment_tag, parse_backend_tag, short_name
from serve_common.protocol.subjects import UNREADABLE, Subjects

_RETRY_S: Final = 15.0


@stream_command
async def events(
    session: Session,
    address: StackAddress,
    *,
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Name of a deployment, backend, endpoint, host, proxy or change, whatever has it. Default: all.",
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            "--limit", metavar="N", min=1, max=1000, help="Number of newest events to show, 1 to 1000."
        ),
    ] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new events until Ctrl-C.")
    ] = False,
    as_json: bool = False,
) -> None:
    """Show recent events, the newest last.

    Examples:
      muster events digits --limit 20
      muster events --follow

    With --follow and --json, prints a line of JSON for each event.
    """
    query = GetEvents(limit=limit, subject=subject)
    if not follow:
        found = await _query(session, address, query)
        if as_json:
            print_json(found)
        else:
            _show_events(found)
        return
    subjects = Subjects(address.subject_prefix)
    event_filter = EventFilter(subject)
    # Subscribe first: an event between the two is received twice rather than never.
    async with session.listen(address, [subjects.events]) as feed:
        shown = await _query(session, address, query)
        event_filter.add_goals(shown)
        _show_each(shown, as_json=as_json)
        while True:
            message = await feed.receive()
            event = None if message is None else decode_event(message)
            if event is not None and event_filter.matches(event) and event not in shown:
                _show_each([event], as_json=as_json)


class EventFilter:
    """Filters events by subject, like the controller's `GetEvents`, as far as the client can."""

    def __init__(self, subject: str | None) -> None:
        """``subject``: a name, tag or id; None matches all events."""
        self._subject = subject
        self._names: set[str] = set()
        self._goals: set[str] = set()
        if subject is not None:
            self._names.add(subject)
            try:
                self._names.add(deployment_tag(subject))
            except BadField:
                self._goals.add(subject)  # a replica's tag or a goal's id, say

    def add_goals(self, events: Iterable[EventView]) -> None:
        """Also match the goals of these events, which matched."""
        self._goals |= {event.goal_id for event in events if event.goal_id}

    def matches(self, event: EventView) -> bool:
        """Whether the event is about the subject."""
        if self._subject is None:
            return True
        matches = (
            event.subject in self._names
            or event.goal_id in (self._subject, *self._goals)
            or (event.kind == "replica" and parse_backend_tag(ReplicaTag(event.subject)) in self._names)
        )
        if matches:
            self.add_goals([event])
        return matches


def decode_event(message: FeedMessage) -> EventView | None:
    """Decode the event in a message; None for one that this version cannot read."""
    try:
        return msgspec.json.decode(message.payload, type=EventView)
    except UNREADABLE:
        return None


async def _query(session: Session, address: StackAddress, query: GetEvents) -> list[EventView]:
    return await session.with_stack(
        address, "events", lambda stack, _progress: stack.admin.call(query), retry_for_s=_RETRY_S
    )


def _show_each(events: Sequence[EventView], *, as_json: bool) -> None:
    for event in events:
        if as_json:
            print_json_line(msgspec.json.encode(event).decode())
            continue
        print_cells(
            Cell(format_time(event.at), "dim"),
            Cell(f"{event.kind:<11}"),
            Cell(short_name(event.subject), "cyan"),
            style_state(event.state),
            Cell(shorten(event.message)),
        )


def _show_events(views: Sequence[EventView]) -> None:
    rows = table("at", "kind", "subject", "state", "message")
    for view in views:
        rows.add_row(
            Cell(format_time(view.at)),
            Cell(view.kind),
            Cell(short_name(view.subject)),
            style_state(view.state),
            Cell(shorten(view.message)),
        )
    print_table("Events", rows)


@query_command
def history(
    *,
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Name of a deployment, backend, endpoint or host, whatever has it. Default: all.",
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            "--limit", metavar="N", min=1, max=500, help="Number of newest changes to show, 1 to 500."
        ),
    ] = 50,
    before: Annotated[
        int | None,
        typer.Option("--before", metavar="ID", min=1, help="Show only changes before the one with this id."),
    ] = None,
) -> ReadRequest[list[HistoryView]]:
    """Show changes, the newest first, with the name that each client gave.

    Examples:
      muster history digits
      muster history --json

    The name is not verified. With --json each change has its command, and the state before and after.
    """
    query = GetHistory(limit=limit, subject=subject, before=before)

    def show(views: Sequence[HistoryView]) -> None:
        _show_history(views)
        if len(views) == limit:
            print_line(f"older ones: --before {views[-1].id}")

    return ReadRequest(query, show)


@query_command
def revisions(
    *,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name of the deployment or backend; APP/NAME if it belongs to an application.",
            autocompletion=complete_backend,
        ),
    ],
) -> ReadRequest[list[RevisionView]]:
    """Show the revisions that 'muster rollback' can return to, the newest first.

    Example:
      muster revisions digits

    Failed ones are listed too, marked as such.
    """
    tag = deployment_tag(name)

    def show(views: Sequence[RevisionView]) -> None:
        _show_revisions(views)
        if len(views) > 1:
            print_line(f"'muster rollback {short_name(tag)} --to-revision N' goes back to one")

    return ReadRequest(GetRevisions(name=tag), show)


def _show_history(views: Sequence[HistoryView]) -> None:
    rows = table("id", "at", "claimed by", "verb", "subject", "goal")
    for view in views:
        rows.add_row(
            Cell(str(view.id)),
            Cell(format_time(view.at)),
            Cell(view.principal or "-"),
            Cell(view.verb),
            Cell(short_name(view.subject)),
            Cell(view.goal_id or "-"),
        )
    print_table("Changes", rows)


def _show_revisions(views: Sequence[RevisionView]) -> None:
    rows = table("revision", "at", "status", "version", "import path", "replicas", "route")
    for view in views:
        rows.add_row(
            Cell(f"{view.revision}{' (now)' if view.is_current else ''}"),
            Cell(format_time(view.at)),
            style_state(view.status.value),
            Cell(view.version or "-"),
            Cell(view.import_path),
            Cell(str(view.num_replicas)),
            Cell(view.route_prefix or "-"),
        )
    print_table("Revisions", rows)
