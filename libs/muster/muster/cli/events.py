"""`muster events`: what happened, and what happens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec
import typer
from rich.text import Text

from muster.cli import output
from muster.cli.session import Session
from muster.cli.streaming import streaming
from muster.cli.tables import moment, print_table, styled, table
from muster.client.address import StackAddress
from muster.client.feed import Heard
from serve_common.adapters.system_clock import SystemClock
from serve_common.errors import BadField
from serve_common.names import ReplicaTag, backend_tag_of, deployment_tag
from serve_common.subjects import Subjects
from serve_common.wires.queries import GetEvents
from serve_common.wires.unreadable import UNREADABLE
from serve_common.wires.views import EventView, GoalView

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
            output.print_json(found)
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


def read_event(heard: Heard, subjects: Subjects, now: float) -> EventView | None:
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
    with output.Progress("events") as progress:
        async with session.connect(address, progress, retry_for_s=_RETRY_S) as stack:
            return await stack.admin.get_events(query)


def _show_each(events: Sequence[EventView], *, as_json: bool) -> None:
    console = output.get_console()
    for event in events:
        if as_json:
            output.print_json_line(msgspec.json.encode(event).decode())
            continue
        text = Text(f"{moment(event.at)} ", style="dim")
        text.append(f"{event.kind:<11} ", style="")
        text.append(f"{output.short_name(event.subject)} ", style="cyan")
        text.append_text(styled(event.state))
        text.append(f" {output.brief(event.message)}")
        console.print(text, soft_wrap=True)


def _show_events(views: Sequence[EventView]) -> None:
    rows = table("at", "kind", "subject", "state", "message")
    for view in views:
        rows.add_row(
            Text(moment(view.at)),
            Text(view.kind),
            Text(output.short_name(view.subject)),
            styled(view.state),
            Text(output.brief(view.message)),
        )
    print_table("Events", rows)
