"""Requests to the admin API, retried on transient errors; decoding of replies and errors; feeds of messages."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Protocol, TypeVar

import msgspec

from muster.client.address import StackAddress
from serve_common import errors
from serve_common.api.commands import Command, Request
from serve_common.api.queries import PagedQuery
from serve_common.api.verbs import VERBS, WHO_HEADER, WHO_LENGTH_MAX, ErrorView
from serve_common.errors import BadField, FencedOut, LimitReached, ServeError, TransientError
from serve_common.protocol.subjects import Subjects


class NoListeners(TransientError):
    """NATS reported at once that the subject has no subscriber; the request was not delivered."""


class NoReply(TransientError):
    """No reply arrived in time, or the connection was lost meanwhile; the request may have taken effect."""


class AdminReply(msgspec.Struct, frozen=True):
    """A reply, possibly an error."""

    body: bytes
    headers: Mapping[str, str] = {}


class Requests(Protocol):
    """Request and reply over NATS; an interface, so that retries and errors are tested without NATS."""

    @property
    def where(self) -> str:
        """The URLs of NATS for messages, without passwords."""
        ...

    async def request(
        self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> AdminReply:
        """Send one request and wait for its reply.

        Raises `NoListeners`, `NoReply`, `BusUnavailable` when NATS cannot be reached, `BusAuthorizationFailed` when
        it refuses this user or this subject, and `BadField` when the body exceeds its largest message.
        """
        ...


ERROR_HEADER: Final = "Nats-Service-Error"
ERROR_CODE_HEADER: Final = "Nats-Service-Error-Code"

ERRORS_BY_CODE: Final[dict[str, type[ServeError]]] = {
    kind.error_code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ServeError)
}
"""Every error class that a service can send, by its stable error code."""

_FOREIGN_BODY_MAX: Final = 2000


class UnknownError(ServeError):
    """An error whose code this version does not know: from a newer service, or from the user's code."""

    def __init__(self, code: str, message: str) -> None:
        """``code`` is the received error code."""
        super().__init__(message)
        self.code = code


class _GatewayError(msgspec.Struct, frozen=True):
    """An error of a proxy, over HTTP and NATS alike: an extension member of problem details (RFC 9457)."""

    error: ErrorView


def _read_error(body: bytes) -> ErrorView:
    try:
        return msgspec.json.decode(body, type=_GatewayError).error
    except msgspec.ValidationError:
        return msgspec.json.decode(body, type=ErrorView)


def restore_error(view: ErrorView) -> ServeError:
    """Restore the error that the service raised; an unknown code becomes an `UnknownError`."""
    kind = ERRORS_BY_CODE.get(view.code)
    if kind is None:
        return UnknownError(view.code, view.message or view.code)
    if kind is BadField:
        field, colon, reason = view.message.partition(": ")
        if view.field:
            return BadField(view.field, view.message.removeprefix(f"{view.field}: "))
        return BadField(field, reason) if colon else BadField("request", view.message)
    return kind(view.message or view.code)


def parse_error(answer: AdminReply) -> ServeError | None:
    """The error that a reply carries, or None."""
    short = answer.headers.get(ERROR_HEADER)
    number = answer.headers.get(ERROR_CODE_HEADER)
    if short is None and number is None:
        return None
    summary = short or f"error {number}"
    try:
        view = _read_error(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Not our format: a response of the user's code, or the micro library's own reply to an exception.
        text = answer.body[:_FOREIGN_BODY_MAX].decode(errors="replace").strip()
        return ServeError(f"{summary}: {text}" if text else summary)
    return restore_error(view)


def read_reply(verb: str, answer: AdminReply, reply_type: Any) -> Any:
    """Decode the reply to ``verb``; raises the error that it carries, or `ServeError` if it cannot be decoded."""
    error = parse_error(answer)
    if error is not None:
        raise error
    try:
        return msgspec.json.decode(answer.body, type=reply_type)
    except msgspec.DecodeError as unreadable:
        raise ServeError(f"the answer to {verb} cannot be read: {unreadable}") from unreadable


ATTEMPT_S: Final = 5.0
"""Seconds that one attempt waits for its reply; a reply lost with its controller costs this much."""
PAGE_LIMIT: Final = 500
"""Items of a list per page."""

VERB_BY_REQUEST: Final = {request_type: verb for verb, (request_type, _reply_type) in VERBS.items()}

Item = TypeVar("Item")


def ignore(_what: object) -> None:
    """A callback that does nothing."""
    return


class AdminRequester:
    """Sends requests to the leading controller. Raises its errors, as classes of `serve_common.errors`.

    Why it retries: a controller that dies is restarted or replaced within seconds, and every verb is idempotent
    (commands that are not so by themselves carry a request id that is made once), so a caller need not know that it
    happened. Permanent errors are raised at once.
    """

    def __init__(
        self,
        requests: Requests,
        subjects: Subjects,
        *,
        who: str = "",
        headers: Mapping[str, str] | None = None,
        retry_for_s: float = 30.0,
        retry_pause_s: float = 0.25,
        on_retry: Callable[[str], None] = ignore,
    ) -> None:
        """Retries transient errors for ``retry_for_s`` seconds; ``on_retry`` is called with the reason.

        ``who`` and ``headers`` are sent with every change; ``who`` is the client's name in the audit log, or empty.
        """
        self._requests = requests
        self._subjects = subjects
        own = {WHO_HEADER: who[:WHO_LENGTH_MAX]} if who else {}
        self._headers = {**(headers or {}), **own} or None
        self._retry_for_s = retry_for_s
        self._retry_pause_s = retry_pause_s
        self._on_retry = on_retry

    async def ask(self, request: Request, *, attempt_s: float = ATTEMPT_S) -> Any:
        """Send one request, with retries, and return its reply, of the type in `VERBS`."""
        verb = VERB_BY_REQUEST[type(request)]
        subject = self._subjects.admin(verb)
        is_command = isinstance(request, Command)
        body = msgspec.json.encode(with_request_id(request) if is_command else request)
        headers = self._headers if is_command else None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._retry_for_s
        while True:
            try:
                answer = await self._requests.request(subject, body, timeout_s=attempt_s, headers=headers)
                return read_reply(verb, answer, VERBS[verb][1])
            # Fenced out means that another controller leads by now: retry with that one.
            except (TransientError, FencedOut) as error:
                if loop.time() + self._retry_pause_s >= deadline:
                    raise self._describe_error(error) from error
                self._on_retry(str(self._describe_error(error)))
            await asyncio.sleep(self._retry_pause_s)

    async def request_all(self, query: PagedQuery, name_of: Callable[[Item], str]) -> list[Item]:
        """Fetch a whole list page by page, or a single page if ``query`` has a ``limit``.

        A page that is too large for one message is requested again in smaller ones.
        """
        if query.limit is not None:
            page: list[Item] = await self.ask(query)
            return page
        whole: list[Item] = []
        after, limit = query.after, PAGE_LIMIT
        while True:
            try:
                page = await self.ask(msgspec.structs.replace(query, limit=limit, after=after))
            except LimitReached:
                if limit == 1:
                    raise
                limit = max(1, limit // 4)
                continue
            whole.extend(page)
            if len(page) != limit:
                return whole
            last = name_of(page[-1])
            if last <= after:
                raise ServeError(
                    f"the answer to {VERB_BY_REQUEST[type(query)]} repeats itself after {after!r}"
                )
            after = last

    def _describe_error(self, error: ServeError) -> ServeError:
        if isinstance(error, NoListeners):
            return TransientError(f"no controller answers at {self._requests.where}; is one running?")
        if isinstance(error, NoReply):
            return TransientError(f"no controller answered in time at {self._requests.where}: {error}")
        return error


class AdminRequests:
    """Base of `AdminCommands` and `AdminQueries`."""

    def __init__(self, asker: AdminRequester) -> None:
        """``asker`` sends the requests."""
        self._requester = asker


def with_request_id(request: Request) -> Request:
    """Set ``request_id`` to a new id if the request has the field and it is None."""
    if getattr(request, "request_id", "") is not None:
        return request
    return msgspec.structs.replace(request, request_id=uuid.uuid4().hex)


class FeedMessage(msgspec.Struct, frozen=True):
    """A message of a feed."""

    subject: str
    payload: bytes


class Feed(Protocol):
    """Messages of some subjects, such as log lines and events, in the order of arrival.

    Why not a part of `Requests`: a feed must go on over a restart of NATS, while a lost request must be reported as
    lost.
    """

    async def hear(self, within_s: float | None = None) -> FeedMessage | None:
        """Wait for the next message; None after ``within_s`` seconds. None for ``within_s`` waits forever."""
        ...

    async def publish(self, subject: str, payload: bytes) -> None:
        """Publish a message. Raises `BusUnavailable`."""
        ...


class Listen(Protocol):
    """Opens a feed, as `listen_to_stack` does."""

    def __call__(self, address: StackAddress, subjects: Sequence[str]) -> AbstractAsyncContextManager[Feed]:
        """Raises `BusUnavailable` and `BusAuthorizationFailed` when entered."""
        ...


@asynccontextmanager
async def listen_to_stack(address: StackAddress, subjects: Sequence[str]) -> AsyncIterator[Feed]:
    """Subscribe to ``subjects``, wildcards included, for the block; the feed reconnects when NATS was away.

    Raises `BusUnavailable` when NATS does not answer within seconds, and `BusAuthorizationFailed`.
    """
    # Only here: the driver takes longer to import than `muster --help` should take.
    from muster.client.nats import NatsFeed  # noqa: PLC0415 - as above

    feed = NatsFeed(address)
    try:
        await feed.open(subjects)
        yield feed
    finally:
        await feed.close()
