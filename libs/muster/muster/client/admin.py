"""Connects to a stack: sends any request to its leading controller, and calls its endpoints."""

from __future__ import annotations

import asyncio
import getpass
import hashlib
import os
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import msgspec

from muster.client.captures import CaptureReader
from muster.client.requests import (
    AdminReply,
    NoListeners,
    NoReply,
    Requests,
    StackAddress,
    ignore,
    parse_error,
)
from serve_common.api.commands import (
    BACKUP_PAGE_BYTES_MAX,
    Command,
    Request,
    Restore,
    RestoreReply,
    UploadCode,
)
from serve_common.api.queries import (
    PRINCIPAL_HEADER,
    PRINCIPAL_LENGTH_MAX,
    GetBackup,
    GetStatus,
    ListDeployments,
    PagedQuery,
    WaitForGoal,
)
from serve_common.api.views import GoalStatus, GoalView, StatusView
from serve_common.errors import (
    BadField,
    DeadlineExceeded,
    FencedOut,
    LimitReached,
    NotFound,
    ServeError,
    TransientError,
)
from serve_common.names import EndpointTag, GoalId, deployment_tag
from serve_common.nats.protocol import Greeting
from serve_common.protocol.code import compare_digests, split
from serve_common.protocol.subjects import ADMIN_SERVICE, Subjects
from serve_common.telemetry.trace_context import headers_from_environment

ATTEMPT_S: Final = 5.0
"""Seconds that one attempt waits for its reply; a reply lost with its controller costs this much."""
RESTORE_ATTEMPT_S: Final = 30.0
"""Seconds per attempt of a restore: the whole file is checked with its last page."""
UPLOAD_ATTEMPT_S: Final = 30.0
"""Seconds per attempt of a page of code."""
WAIT_SLICE_S: Final = 1.0
"""Seconds per `WaitForGoal` query, so that progress is shown about once a second."""
SLICE_SLACK_S: Final = 2.0
"""Seconds that a reply to `WaitForGoal` may take beyond its own timeout."""
PAGE_LIMIT: Final = 500
"""Items of a list per page."""
BACKUP_TRIES: Final = 3
"""Attempts to fetch a backup; a change of leader between two pages restarts it."""

Reply = TypeVar("Reply")


class _ServicePing(msgspec.Struct, frozen=True):
    """A service's reply to NATS' own discovery of services."""

    version: str = ""


class AdminClient:
    """Client of one stack's admin API. Raises the controller's errors, as classes of `serve_common.errors`.

    Why it retries: a controller that dies is restarted or replaced within seconds, and every verb is idempotent
    (commands that are not so by themselves carry a request id that is made once), so a caller need not know that it
    happened. Permanent errors are raised at once.
    """

    def __init__(
        self,
        requests: Requests,
        subjects: Subjects,
        *,
        principal: str = "",
        headers: Mapping[str, str] | None = None,
        retry_for_s: float = 30.0,
        retry_pause_s: float = 0.25,
        on_retry: Callable[[str], None] = ignore,
    ) -> None:
        """Retries transient errors for ``retry_for_s`` seconds; ``on_retry`` is called with the reason.

        ``headers`` are sent with every command; so is ``principal``, the client's name in the audit log, unless empty.
        """
        self._requests = requests
        self._subjects = subjects
        own = {PRINCIPAL_HEADER: principal[:PRINCIPAL_LENGTH_MAX]} if principal else {}
        self._headers = {**(headers or {}), **own} or None
        self._retry_for_s = retry_for_s
        self._retry_pause_s = retry_pause_s
        self._on_retry = on_retry

    async def call(self, request: Request[Reply], *, attempt_s: float = ATTEMPT_S) -> Reply:
        """Send a command or query, with retries, and return its reply.

        The reply to a command means that the change is recorded, not that it is done; `wait_for_goal` waits for that.
        A list is returned whole, fetched page by page, unless the query asks for one page with its ``limit``.
        ``attempt_s`` is the number of seconds that one attempt waits for its reply.
        """
        if isinstance(request, PagedQuery) and request.limit is None:
            whole: Reply = await self._read_pages(request)
            return whole
        body = msgspec.json.encode(_with_request_id(request))
        headers = self._headers if isinstance(request, Command) else None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._retry_for_s
        while True:
            try:
                return await self._attempt(request, body, headers, attempt_s)
            # Fenced out means that another controller leads by now: retry with that one.
            except (TransientError, FencedOut) as error:
                if loop.time() + self._retry_pause_s >= deadline:
                    raise self._describe_error(error) from error
                self._on_retry(str(self._describe_error(error)))
            await asyncio.sleep(self._retry_pause_s)

    async def _attempt(
        self, request: Request[Reply], body: bytes, headers: Mapping[str, str] | None, attempt_s: float
    ) -> Reply:
        subject = self._subjects.admin(request.verb)
        admin_reply = await self._requests.request(subject, body, timeout_s=attempt_s, headers=headers)
        error = parse_error(admin_reply)
        if error is not None:
            raise error
        try:
            reply: Reply = msgspec.json.decode(admin_reply.body, type=request.reply_type())
        except msgspec.DecodeError as unreadable:
            raise ServeError(f"the answer to {request.verb} cannot be read: {unreadable}") from unreadable
        return reply

    async def _read_pages(self, query: PagedQuery[Any]) -> Any:
        """Fetch a whole list. A page that is too large for one message is requested again in smaller ones."""
        whole: list[Any] = []
        after, limit = query.after, PAGE_LIMIT
        while True:
            try:
                page = await self.call(msgspec.structs.replace(query, limit=limit, after=after))
            except LimitReached:
                if limit == 1:
                    raise
                limit = max(1, limit // 4)
                continue
            whole.extend(page)
            if len(page) != limit:
                return whole
            last = getattr(page[-1], query.ordered_by)
            if last <= after:
                raise ServeError(f"the answer to {query.verb} repeats itself after {after!r}")
            after = last

    def _describe_error(self, error: ServeError) -> ServeError:
        if isinstance(error, NoListeners):
            return TransientError(f"no controller answers at {self._requests.where}; is one running?")
        if isinstance(error, NoReply):
            return TransientError(f"no controller answered in time at {self._requests.where}: {error}")
        return error

    async def fetch_version(self) -> str:
        """The version of a controller; empty when none says it. Raises what `Requests.request` raises."""
        reply = await self._requests.request(f"$SRV.PING.{ADMIN_SERVICE}", b"", timeout_s=ATTEMPT_S)
        try:
            return msgspec.json.decode(reply.body, type=_ServicePing).version
        except msgspec.DecodeError:
            return ""

    async def wait_for_goal(
        self,
        goal_id: GoalId,
        *,
        deadline_s: float,
        on_progress: Callable[[GoalView], None] = ignore,
    ) -> GoalView:
        """Wait at most ``deadline_s`` for a goal to end; a view that is still PENDING means the deadline passed.

        ``on_progress`` is called with every view, about once a second. Raises `NotFound` for an unknown id.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        while True:
            slice_s = min(WAIT_SLICE_S, max(0.0, deadline - loop.time()))
            query = WaitForGoal(goal_id=goal_id, timeout_s=slice_s)
            view = await self.call(query, attempt_s=slice_s + SLICE_SLACK_S)
            on_progress(view)
            if view.status is not GoalStatus.PENDING or loop.time() >= deadline:
                return view

    async def fetch_status(self) -> StatusView:
        """Get the status of the whole system, with deployments fetched in pages when they exceed one message."""
        try:
            return await self.call(GetStatus())
        except LimitReached:
            view = await self.call(GetStatus(deployments=False))
        return msgspec.structs.replace(view, deployments=await self.call(ListDeployments()))

    async def fetch_backup(self) -> bytes:
        """Take a new backup and return its file. Raises `NotFound` when the leader changed during every attempt."""
        for _ in range(BACKUP_TRIES - 1):
            try:
                return await self._fetch_backup()
            except NotFound:
                continue
        return await self._fetch_backup()

    async def _fetch_backup(self) -> bytes:
        first = await self.call(GetBackup())
        pages = [first.data]
        for number in range(1, first.pages):
            page = await self.call(GetBackup(backup_id=first.backup_id, page=number))
            pages.append(page.data)
        return b"".join(pages)

    async def fetch_code(self, digest: str) -> AsyncIterator[bytes]:
        """The pages of uploaded code. Raises `NotFound` before the first, and `CodeCorrupt` after the last."""
        found, page, pages = hashlib.sha256(), 0, 1
        while page < pages:
            view = await self.call(GetBackup(code=digest, page=page))
            found.update(view.data)
            yield view.data
            page, pages = page + 1, view.pages
        compare_digests(found.hexdigest(), digest)

    async def has_code(self, digest: str) -> bool:
        """Whether code is stored, and so can be deployed for the next hour."""
        return (await self.call(UploadCode(digest=digest))).is_stored

    async def upload_code(self, digest: str, code: bytes) -> None:
        """Upload code unless it is stored."""
        pages = split(code)
        while not await self.has_code(digest):
            try:
                for number, data in enumerate(pages):
                    page = UploadCode(digest=digest, page=number, pages=len(pages), data=data)
                    if (await self.call(page, attempt_s=UPLOAD_ATTEMPT_S)).is_stored:
                        return
            except BadField as error:
                if error.field != "page":
                    raise
                self._on_retry("the leader changed during an upload, which starts over")

    async def send_backup(self, data: bytes, *, confirm: bool) -> RestoreReply:
        """Restore from a backup's file; without ``confirm`` it is only checked.

        Raises `BadField` with the reason when the file is invalid; nothing is changed then.
        """
        upload_id, size = uuid.uuid4().hex, BACKUP_PAGE_BYTES_MAX
        parts = [data[at : at + size] for at in range(0, len(data), size)] or [b""]
        reply = RestoreReply()
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            page = Restore(
                upload_id=upload_id,
                page=number,
                pages=len(parts),
                data=part,
                confirm=confirm and is_last,
            )
            reply = await self.call(page, attempt_s=RESTORE_ATTEMPT_S)
        return reply


def _with_request_id(request: Request[Reply]) -> Request[Reply]:
    """Set ``request_id`` to a new id if the request has the field and it is None."""
    if getattr(request, "request_id", "") is not None:
        return request
    return msgspec.structs.replace(request, request_id=uuid.uuid4().hex)


class Caller:
    """Calls endpoints through the proxies' gateway, by plain request and reply, as any NATS client can."""

    def __init__(
        self,
        requests: Requests,
        subjects: Subjects,
        *,
        retry_for_s: float = 5.0,
        retry_pause_s: float = 0.25,
    ) -> None:
        """A call without any listener is sent again for ``retry_for_s``; any other is sent once."""
        self._requests = requests
        self._subjects = subjects
        self._retry_for_s = retry_for_s
        self._retry_pause_s = retry_pause_s

    async def call(
        self, name: str, body: bytes, *, headers: Mapping[str, str], timeout_s: float
    ) -> AdminReply:
        """Send one request to an endpoint and return its response.

        Raises as `exchange`, and the error that the response carries.
        """
        reply = await self.exchange(name, body, headers=headers, timeout_s=timeout_s)
        failure = parse_error(reply)
        if failure is not None:
            raise failure
        return reply

    async def exchange(
        self, name: str, body: bytes, *, headers: Mapping[str, str], timeout_s: float
    ) -> AdminReply:
        """Send one request to an endpoint and return its response, whatever its status is.

        Raises `BadField` for an invalid name, `TransientError` when no proxy listens, and `DeadlineExceeded`.
        """
        subject = self._subjects.call(EndpointTag(deployment_tag(name)))
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        while True:
            try:
                left_s = max(0.1, started_at + timeout_s - loop.time())
                return await self._requests.request(subject, body, timeout_s=left_s, headers=headers)
            except NoListeners as error:
                if loop.time() >= started_at + min(self._retry_for_s, timeout_s):
                    raise TransientError(
                        f"no proxy answers calls at {self._requests.where}; is one running?"
                    ) from error
            except NoReply as error:
                raise DeadlineExceeded(f"{name} did not answer within {timeout_s:g} s: {error}") from error
            await asyncio.sleep(self._retry_pause_s)


def default_principal() -> str:
    """``user@host`` in characters that a NATS header can carry, at most `PRINCIPAL_LENGTH_MAX` of them.

    In the audit log it is a claim, not a proof.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid-{os.getuid()}"  # a container's user often has no name
    principal = f"{user}@{socket.gethostname()}"
    return "".join(char if char.isascii() and char.isprintable() else "?" for char in principal)[
        :PRINCIPAL_LENGTH_MAX
    ]


class Stack(msgspec.Struct, frozen=True):
    """A connected stack."""

    admin: AdminClient
    caller: Caller
    captures: Callable[[EndpointTag], CaptureReader] | None = None
    """Reads the captured requests of an endpoint."""
    nats: Greeting | None = None
    """What its NATS server says of itself."""


@asynccontextmanager
async def connect_stack(
    address: StackAddress,
    *,
    connect_within_s: float = 5.0,
    retry_for_s: float = 30.0,
    on_retry: Callable[[str], None] = ignore,
    principal: str | None = None,
) -> AsyncIterator[Stack]:
    """Connect, and disconnect at the end.

    ``principal`` is the name in the audit log; None is ``user@host`` of this process.

    Changes belong to the trace in the environment variables TRACEPARENT and TRACESTATE, if they are set.

    Raises `BusUnavailable` when NATS does not answer within ``connect_within_s``, and `BusAuthorizationFailed`.
    """
    # Only here: the driver takes longer to import than `muster --help` should take.
    from muster.client.nats import NatsRequests  # noqa: PLC0415 - as above

    requests = NatsRequests(address)
    subjects = Subjects(address.subject_prefix)
    principal = default_principal() if principal is None else principal
    try:
        await requests.connect(within_s=connect_within_s, on_retry=on_retry)
        yield Stack(
            admin=AdminClient(
                requests,
                subjects,
                principal=principal,
                headers=headers_from_environment(os.environ),
                retry_for_s=retry_for_s,
                on_retry=on_retry,
            ),
            caller=Caller(requests, subjects),
            captures=lambda endpoint_tag: CaptureReader(requests, subjects, endpoint_tag),
            nats=requests.greeting,
        )
    finally:
        await requests.close()
