"""Commands and queries as they come from the bus: JSON in, JSON or an error out.

Why apart from NATS: what is accepted and how errors read is the same for every way in, and is tested without a bus.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import msgspec

from serve_common.errors import BadField, FencedOut, NotLeading
from serve_common.limits import shown
from serve_common.names import GoalId
from serve_common.ports import Clock
from serve_common.wires import commands as c
from serve_common.wires import queries as q
from serve_common.wires.admin import sanitized_who
from serve_common.wires.commands import AnyCommand
from serve_common.wires.views import GoalView
from serve_controller.core.commands.restoring import RestoreFrom
from serve_controller.ports import Backups
from serve_controller.shell.backups import BackupDesk
from serve_controller.shell.boundary import Boundary
from serve_controller.shell.goal_waits import GoalViews, GoalWaits
from serve_controller.shell.leading_term import LeadingTerm
from serve_controller.shell.queries import Queries, ReadLoad
from serve_controller.shell.requests import parse_request


class Admin:
    """Answers every verb from the current term."""

    def __init__(
        self,
        controller_id: str,
        clock: Clock,
        boundary: Boundary,
        current_term: Callable[[], LeadingTerm | None],
        read_load: ReadLoad | None = None,
        *,
        backups: Backups | None = None,
    ) -> None:
        """``current_term`` gives the term while this controller leads; replies to commands cross ``boundary``.

        ``read_load`` scrapes all services, ``backups`` writes and reads files; None: this controller cannot.
        """
        self._backups = None if backups is None else BackupDesk(backups, clock)
        self._boundary = boundary
        self._current_term = current_term
        self._queries = Queries(controller_id, clock, read_load)
        self._waits = GoalWaits()
        self._seen = GoalViews()

    def on_goals(self, goal_ids: Collection[GoalId]) -> None:
        """These goals changed, as recorded: let those who wait for one of them look again."""
        self._waits.wake(goal_ids)

    def on_term_end(self) -> None:
        """Nothing more will be heard of any goal: who waits must ask the next leader. Also after a checkpoint was
        read anew, when any goal may have changed."""
        self._seen = GoalViews()
        self._waits.wake_all()

    async def answer(self, verb: str, payload: bytes, who: str = "") -> bytes:
        """The reply as JSON. Raises a `ServeError` for everything that a caller can understand.

        ``who`` is what the caller says of itself, for the audit log.
        """
        request = parse_request(verb, payload)
        term = self._term()
        if isinstance(request, c.Restore):
            return await self._restore(term, request, sanitized_who(who))
        if isinstance(request, q.GetBackup):
            return msgspec.json.encode(await self._desk.page(term, request))
        if isinstance(request, AnyCommand):
            return await self._command(term, request, payload, sanitized_who(who))
        if isinstance(request, q.WaitForGoal):
            return msgspec.json.encode(await self._wait_for_goal(request))
        return msgspec.json.encode(await self._queries.answer(term, request))

    def _term(self) -> LeadingTerm:
        term = self._current_term()
        if term is None:
            raise NotLeading("this controller does not lead; try again")
        return term

    @property
    def _desk(self) -> BackupDesk:
        if self._backups is None:
            raise NotLeading("this controller has no backups")
        return self._backups

    async def _restore(self, term: LeadingTerm, request: c.Restore, who: str) -> bytes:
        taken = await self._desk.take(request)
        if isinstance(taken, c.RestoreReply):
            return msgspec.json.encode(taken)
        summary, saved = taken
        if not request.confirm:
            return msgspec.json.encode(c.RestoreReply(summary=summary))
        # The file itself is no part of the audit log.
        payload = msgspec.json.encode({"upload_id": request.upload_id, "backup": summary})
        return await self._command(term, RestoreFrom(saved=saved, summary=summary), payload, who)

    async def _command(
        self, term: LeadingTerm, command: AnyCommand | RestoreFrom, payload: bytes, who: str
    ) -> bytes:
        async def encoded() -> bytes:
            return msgspec.json.encode(reply)

        try:
            reply = await term.execute(command, payload, who)
            return await self._boundary.cross("reply", encoded)
        except FencedOut as error:
            # The fence wrote nothing; to a caller this is a change of leader like any other.
            term.on_change()
            raise NotLeading(f"this controller leads no more ({error}); try again") from error

    async def _wait_for_goal(self, request: q.WaitForGoal) -> GoalView:
        if not 0 <= request.timeout_s <= q.WAIT_TIMEOUT_S_MAX:
            raise BadField(
                "timeout_s",
                f"is {shown(request.timeout_s)}; it must be between 0 and {q.WAIT_TIMEOUT_S_MAX:g}",
            )
        try:
            async with asyncio.timeout(request.timeout_s):
                while request.goal_id in self._term().checkpoint.pending:
                    await self._waits.changed(request.goal_id)
        except TimeoutError:
            pass  # it is answered with what is known now
        term = self._term()
        return self._seen.view(term.checkpoint, term.observed, request.goal_id)
