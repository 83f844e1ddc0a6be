"""Admin API behind NATS: JSON requests and replies, waits for goals, backups in pages."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from serve_common.api import commands as c
from serve_common.api import queries as q
from serve_common.api.commands import BACKUP_PAGE_BYTES_MAX, Command, Restore, RestoreReply
from serve_common.api.queries import GetBackup, sanitize_principal
from serve_common.api.views import BackupPage, EndpointView, GoalStatus, GoalView
from serve_common.clock import Clock
from serve_common.errors import BadField, FencedOut, LimitReached, NotFound, NotLeading
from serve_common.names import GoalId
from serve_common.values import shown
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.commands.restoring import RestoreFrom, check_backup
from serve_controller.core.observed import ObservedState
from serve_controller.core.views.deployments import view_endpoints
from serve_controller.core.views.hosts import view_goal
from serve_controller.shell.boundary import Boundary
from serve_controller.shell.checkpoint_rows import read_backup, write_backup
from serve_controller.shell.code_store import CodeStore
from serve_controller.shell.control_loop import Term
from serve_controller.shell.queries import QueryApi, ReadLoad, parse_request

FILES_MAX: Final = 4
"""Most backups, and most uploads, in progress at once; beyond it the one written longest ago is dropped."""
FILE_BYTES_MAX: Final = 64 * 1024 * 1024
IDLE_S: Final = 60.0


class _StoredFile(msgspec.Struct):
    """A file, or the part of it received so far."""

    data: bytes
    used_at: float


class BackupTransfers:
    """Backups and uploads in progress. They belong to one process: after a change of leader they start over.

    The leader writes and reads backups: only controllers connect to Postgres, and the checkpoint of the leader's term
    is what was recorded, complete and as of one moment, however much changes meanwhile.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._taken: dict[str, _StoredFile] = {}
        self._uploads: dict[str, _StoredFile] = {}

    async def page(self, term: Term, query: GetBackup) -> BackupPage:
        """A page of a backup, which is taken with the first one. Raises `NotFound`, `BadField`."""
        backup_id = query.backup_id or uuid.uuid4().hex
        if not query.backup_id:
            # Checkpoints are immutable: another thread may read one while the next is decided.
            data = await asyncio.to_thread(write_backup, term.checkpoint, term.epoch, self._clock.now())
            self._store(self._taken, backup_id, data)
        stored = self._find(self._taken, backup_id)
        if stored is None:
            raise NotFound("backup_id: there is no such backup (any more); begin anew")
        pages = -(-len(stored.data) // BACKUP_PAGE_BYTES_MAX)
        if not 0 <= query.page < pages:
            raise BadField("page", f"must be 0 to {pages - 1}")
        start = query.page * BACKUP_PAGE_BYTES_MAX
        data = stored.data[start : start + BACKUP_PAGE_BYTES_MAX]
        return BackupPage(backup_id=backup_id, page=query.page, pages=pages, data=data)

    async def take(self, command: Restore) -> tuple[str, Checkpoint] | RestoreReply:
        """Receive a page; with the last one, return the contents of the whole file, as a summary and a checkpoint.

        Raises `BadField` for a page out of order and for a file that cannot be restored, `LimitReached` for a size.
        """
        if not 1 <= command.pages <= FILE_BYTES_MAX // BACKUP_PAGE_BYTES_MAX:
            raise LimitReached(f"pages: a backup has at most {FILE_BYTES_MAX} bytes")
        if len(command.data) > BACKUP_PAGE_BYTES_MAX:
            raise LimitReached(f"data: a page has at most {BACKUP_PAGE_BYTES_MAX} bytes")
        if not 0 <= command.page < command.pages:
            raise BadField("page", f"must be 0 to {command.pages - 1}")
        if not 0 < len(command.upload_id) <= 100:
            raise BadField("upload_id", "must have 1 to 100 characters")
        before = b""
        if command.page > 0:
            stored = self._find(self._uploads, command.upload_id)
            start = command.page * BACKUP_PAGE_BYTES_MAX
            if stored is None or len(stored.data) < start:
                raise BadField("page", "comes before the one before it; send all pages anew, from 0")
            before = stored.data[:start]
        data = before + command.data
        self._store(self._uploads, command.upload_id, data)
        if command.page < command.pages - 1:
            return RestoreReply()
        taken_at, saved = await asyncio.to_thread(read_backup, data)
        return f"taken at {taken_at:.0f} s since 1970: {check_backup(saved)}", saved

    def _store(self, files: dict[str, _StoredFile], name: str, data: bytes) -> None:
        files.pop(name, None)
        files[name] = _StoredFile(data, self._clock.now())
        while len(files) > FILES_MAX:
            del files[next(iter(files))]

    def _find(self, files: dict[str, _StoredFile], name: str) -> _StoredFile | None:
        now = self._clock.now()
        for old in [known for known, stored in files.items() if now - stored.used_at > IDLE_S]:
            del files[old]
        stored = files.get(name)
        if stored is not None:
            stored.used_at = now
        return stored


WAITERS_MAX: Final = 20_000


class GoalWaiters:
    """Callers that wait for goals, by goal.

    A thousand may wait while other goals come and go, and none should check again before its own goal has changed.
    """

    def __init__(self) -> None:
        self._waiting: dict[GoalId, set[asyncio.Future[None]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    async def changed(self, goal_id: GoalId) -> None:
        """Return when `wake` names the goal, or at `wake_all`. Raises `LimitReached` when too many wait already."""
        if self._count >= WAITERS_MAX:
            raise LimitReached(f"{WAITERS_MAX} callers wait for goals already")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(goal_id, set()).add(waiter)
        self._count += 1
        try:
            await waiter
        finally:
            self._count -= 1
            others = self._waiting.get(goal_id)
            if others is not None:
                others.discard(waiter)
                if not others:
                    del self._waiting[goal_id]

    def wake(self, goal_ids: Iterable[GoalId]) -> None:
        """Wake the callers that wait for one of these goals."""
        for goal_id in goal_ids:
            for waiter in self._waiting.get(goal_id, ()):
                if not waiter.done():
                    waiter.set_result(None)

    def wake_all(self) -> None:
        """Wake all waiting callers."""
        self.wake(list(self._waiting))


class GoalViews:
    """Cache of views of pending goals while nothing changes: a thousand waits for one goal may time out at once."""

    def __init__(self) -> None:
        self._source: tuple[Checkpoint, ObservedState] | None = None
        self._views: dict[GoalId, GoalView] = {}

    def view(self, checkpoint: Checkpoint, observed: ObservedState, goal_id: GoalId) -> GoalView:
        """View one goal. Raises `NotFound` for an unknown or forgotten id."""
        if self._source is None or self._source[0] is not checkpoint or self._source[1] is not observed:
            self._source, self._views = (checkpoint, observed), {}
        view = self._views.get(goal_id)
        if view is None:
            view = view_goal(checkpoint, observed, goal_id)
            if view.status is GoalStatus.PENDING:
                self._views[goal_id] = view
        return view


class AdminApi:
    """Serves every admin verb from the current term.

    It does not depend on NATS: what is accepted and how errors read is the same for every transport.
    """

    def __init__(
        self,
        controller_id: str,
        clock: Clock,
        boundary: Boundary,
        current_term: Callable[[], Term | None],
        *,
        read_load: ReadLoad | None = None,
        code: CodeStore | None = None,
    ) -> None:
        """``current_term`` returns the term while this controller leads; replies to commands cross ``boundary``.

        ``read_load`` scrapes all services; None disables that verb. ``code`` None disables uploads.
        """
        self._code = code
        self._transfers = BackupTransfers(clock)
        self._boundary = boundary
        self._current_term = current_term
        self._queries = QueryApi(controller_id, clock, read_load)
        self._waits = GoalWaiters()
        self._goal_views = GoalViews()

    def list_endpoints(self) -> list[EndpointView]:
        """All endpoints; none while this controller does not lead."""
        term = self._current_term()
        return [] if term is None else view_endpoints(term.checkpoint)

    def on_goals(self, goal_ids: Collection[GoalId]) -> None:
        """These goals were recorded: wake the callers that wait for one of them."""
        self._waits.wake(goal_ids)

    def on_term_end(self) -> None:
        """Wake all waiting callers: the term has ended and they must ask the next leader, or the checkpoint was
        reloaded and any goal may have changed."""
        self._goal_views = GoalViews()
        self._waits.wake_all()

    async def handle(self, verb: str, payload: bytes, principal: str = "") -> bytes:
        """Handle a request; returns the reply as JSON. Raises a `ServeError` for errors to report to the caller.

        ``principal`` is the name that the caller gives for itself, for the audit log.
        """
        request = parse_request(verb, payload)
        term = self._term()
        if isinstance(request, c.Restore):
            return await self._restore(term, request, sanitize_principal(principal))
        if isinstance(request, c.UploadCode):
            return await self._upload(term, request, sanitize_principal(principal))
        if isinstance(request, q.GetBackup) and request.code:
            data, pages = await self._stored_code().read(request.code, request.page)
            view = BackupPage(backup_id=request.backup_id, page=request.page, pages=pages, data=data)
            return msgspec.json.encode(view)
        if isinstance(request, q.GetBackup):
            return msgspec.json.encode(await self._transfers.page(term, request))
        if isinstance(request, Command):
            return await self._command(term, request, payload, sanitize_principal(principal))
        if isinstance(request, q.WaitForGoal):
            return msgspec.json.encode(await self._wait_for_goal(request))
        return msgspec.json.encode(await self._queries.handle(term, request))

    def _term(self) -> Term:
        term = self._current_term()
        if term is None:
            raise NotLeading("this controller does not lead; try again")
        return term

    async def _restore(self, term: Term, request: c.Restore, principal: str) -> bytes:
        taken = await self._transfers.take(request)
        if isinstance(taken, c.RestoreReply):
            return msgspec.json.encode(taken)
        summary, saved = taken
        if not request.confirm:
            plan = self._queries.plan(term, RestoreFrom(saved=saved, summary=summary))
            return msgspec.json.encode(c.RestoreReply(summary=summary, plan=plan))
        # The file itself is no part of the audit log.
        payload = msgspec.json.encode({"upload_id": request.upload_id, "backup": summary})
        return await self._command(term, RestoreFrom(saved=saved, summary=summary), payload, principal)

    async def _upload(self, term: Term, request: c.UploadCode, principal: str) -> bytes:
        is_stored = await self._stored_code().take(request)
        if is_stored and request.pages:
            # The code itself is no part of the audit log.
            payload = msgspec.json.encode({"digest": request.digest, "pages": request.pages})
            with _converted_fence(term):
                await term.note_upload(request, payload, principal)
        return msgspec.json.encode(c.UploadCodeReply(is_stored=is_stored))

    def _stored_code(self) -> CodeStore:
        if self._code is None:
            raise NotLeading("this controller stores no code")
        return self._code

    async def _command(self, term: Term, command: Command[Any], payload: bytes, principal: str) -> bytes:
        if self._code is not None:
            await self._code.prepare(command)

        async def encoded() -> bytes:
            return msgspec.json.encode(reply)

        with _converted_fence(term):
            reply = await term.execute(command, payload, principal)
            return await self._boundary.cross("reply", encoded)

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
            pass  # reply with the goal as it is now
        term = self._term()
        return self._goal_views.view(term.checkpoint, term.observed, request.goal_id)


@contextmanager
def _converted_fence(term: Term) -> Iterator[None]:
    """To a caller, a write that was fenced is a change of leader like any other: nothing was written."""
    try:
        yield
    except FencedOut as error:
        term.on_change()
        raise NotLeading(f"this controller leads no more ({error}); try again") from error
