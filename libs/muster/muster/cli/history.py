"""`muster history`, `muster revisions`, `muster events`: what was changed and what happened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec
import typer
from rich.text import Text

from muster.cli.output import (
    Progress,
    brief,
    get_console,
    moment,
    print_json,
    print_json_line,
    print_table,
    say,
    short_name,
    styled,
    table,
)
from muster.cli.queries import Question, asking, streaming
from muster.cli.session import Session
from muster.client.address import StackAddress
from muster.client.requests import FeedMessage
from serve_common.api.queries import GetEvents, GetHistory, GetRevisions
from serve_common.api.views import EventView, GoalView, HistoryView, RevisionView
from serve_common.errors import BadField
from serve_common.names import ReplicaTag, backend_tag_of, deployment_tag
from serve_common.protocol.decoding import UNREADABLE
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.clock import SystemClock

_GOAL: Final = "goal"
_RETRY_S: Final = 15.0


@streaming
async def events(
    session: Session,
    address: StackAddress,
    *,
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="SUBJECT", help="Only about this deployment, backend, endpoint, host, proxy or goal."
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="The newest so many.")] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then show what happens, until Ctrl-C.")
    ] = False,
    as_json: bool = False,
) -> None:
    """Show what happened lately, the newest last.

    Examples:
      muster events digits --limit 20
      muster events --follow

    Of everything unless a subject is given. With --follow and --json, a
    line of JSON for each.
    """
    query = GetEvents(limit=limit, subject=subject)
    if not follow:
        found = await _ask(session, address, query)
        if as_json:
            print_json(found)
        else:
            _show_events(found)
        return
    subjects = Subjects(address.subject_prefix)
    matching, clock = Matching(subject), SystemClock()
    # Listening comes first: what happens between the two is told twice rather than never.
    async with session.listen(address, [subjects.events]) as feed:
        shown = await _ask(session, address, query)
        matching.learn(shown)
        _show_each(shown, as_json=as_json)
        while True:
            heard = await feed.hear()
            event = None if heard is None else read_event(heard, subjects, clock.now())
            if event is not None and matching.is_meant(event) and event not in shown:
                _show_each([event], as_json=as_json)


class Matching:
    """Which events are about something; as the controller answers `GetEvents`, as far as that is known here."""

    def __init__(self, subject: str | None) -> None:
        """None: all of them are."""
        self._subject = subject
        self._names: set[str] = set()
        self._goals: set[str] = set()
        if subject is not None:
            self._names.add(subject)
            try:
                self._names.add(deployment_tag(subject))
            except BadField:
                self._goals.add(subject)  # a replica's tag or a goal's id, say

    def learn(self, events: Iterable[EventView]) -> None:
        """Events that are meant: goals that they name are meant too."""
        self._goals |= {event.goal_id for event in events if event.goal_id}

    def is_meant(self, event: EventView) -> bool:
        """Whether it is about the subject."""
        if self._subject is None:
            return True
        is_meant = (
            event.subject in self._names
            or event.goal_id in (self._subject, *self._goals)
            or (event.kind == "replica" and backend_tag_of(ReplicaTag(event.subject)) in self._names)
        )
        if is_meant:
            self.learn([event])
        return is_meant


def read_event(heard: FeedMessage, subjects: Subjects, now: float) -> EventView | None:
    """The event in a message; None for one that this version cannot read."""
    try:
        if not heard.subject.startswith(subjects.event(_GOAL, "")):
            return msgspec.json.decode(heard.payload, type=EventView)
        goal = msgspec.json.decode(heard.payload, type=GoalView)
    except UNREADABLE:
        return None
    return EventView(
        at=now,
        kind=_GOAL,
        subject=goal.goal_id,
        message=goal.error or goal.message,
        state=goal.status.value,
        goal_id=goal.goal_id,
    )


async def _ask(session: Session, address: StackAddress, query: GetEvents) -> list[EventView]:
    with Progress("events") as progress:
        async with session.connect(address, progress, retry_for_s=_RETRY_S) as stack:
            return await stack.admin.get_events(query)


def _show_each(events: Sequence[EventView], *, as_json: bool) -> None:
    console = get_console()
    for event in events:
        if as_json:
            print_json_line(msgspec.json.encode(event).decode())
            continue
        text = Text(f"{moment(event.at)} ", style="dim")
        text.append(f"{event.kind:<11} ", style="")
        text.append(f"{short_name(event.subject)} ", style="cyan")
        text.append_text(styled(event.state))
        text.append(f" {brief(event.message)}")
        console.print(text, soft_wrap=True)


def _show_events(views: Sequence[EventView]) -> None:
    rows = table("at", "kind", "subject", "state", "message")
    for view in views:
        rows.add_row(
            Text(moment(view.at)),
            Text(view.kind),
            Text(short_name(view.subject)),
            styled(view.state),
            Text(brief(view.message)),
        )
    print_table("Events", rows)


@asking
def history(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    subject: Annotated[
        str | None,
        typer.Argument(metavar="SUBJECT", help="Only about this deployment, backend, endpoint or host."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=500, help="The newest so many.")] = 50,
    before: Annotated[
        int | None, typer.Option("--before", min=1, help="Only older than the entry with this id.")
    ] = None,
) -> Question[list[HistoryView]]:
    """Show what was changed, and who claimed to do it, the newest first.

    Examples:
      muster history digits
      muster history --json

    With --json each entry has the command, and what was before and after.
    Who it was is what the client says of itself; nobody has verified it.
    """
    query = GetHistory(limit=limit, subject=subject, before=before)

    def show(views: Sequence[HistoryView]) -> None:
        _show_history(views)
        if len(views) == limit:
            say(f"older ones: --before {views[-1].id}")

    return Question(lambda admin: admin.get_history(query), show)


@asking
def revisions(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a deployment or backend.")],
) -> Question[list[RevisionView]]:
    """Show what a deployment was, the newest first: where rollback can go.

    Example:
      muster revisions digits

    Failed ones are there too, and say so.
    """
    tag = deployment_tag(name)

    def show(views: Sequence[RevisionView]) -> None:
        _show_revisions(views)
        if len(views) > 1:
            say(f"'muster rollback {short_name(tag)} --to-revision N' goes back to one")

    return Question(lambda admin: admin.get_revisions(GetRevisions(name=tag)), show)


def _show_history(views: Sequence[HistoryView]) -> None:
    rows = table("id", "at", "claimed by", "verb", "subject", "goal")
    for view in views:
        rows.add_row(
            Text(str(view.id)),
            Text(moment(view.at)),
            Text(view.who or "-"),
            Text(view.verb),
            Text(short_name(view.subject)),
            Text(view.goal_id or "-"),
        )
    print_table("Changes", rows)


def _show_revisions(views: Sequence[RevisionView]) -> None:
    rows = table("revision", "at", "status", "version", "import path", "replicas", "route")
    for view in views:
        rows.add_row(
            Text(f"{view.revision}{' (now)' if view.is_current else ''}"),
            Text(moment(view.at)),
            styled(view.status.value),
            Text(view.version or "-"),
            Text(view.import_path),
            Text(str(view.num_replicas)),
            Text(view.route_prefix or "-"),
        )
    print_table("Revisions", rows)
