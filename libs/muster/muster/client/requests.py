"""Asks the admin API one thing, again while what is wrong may pass; replies as values or errors; feeds of messages."""

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


class NobodyListens(TransientError):
    """The bus is there, and knows at once that nobody would hear the request; it was not delivered."""


class NoAnswer(TransientError):
    """No answer came in time, or the connection was lost meanwhile; the request may have had its effect."""


class AdminReply(msgspec.Struct, frozen=True):
    """What came back, an error included."""

    body: bytes
    headers: Mapping[str, str] = {}


class Requests(Protocol):
    """Request and reply over the bus."""

    @property
    def where(self) -> str:
        """The bus' addresses for people; holds no password."""
        ...

    async def request(
        self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> AdminReply:
        """Send one request and wait for its answer.

        Raises `NobodyListens`, `NoAnswer`, `BusUnavailable` when there is no bus, `BusAuthorizationFailed` when it
        refuses this user or this subject, and `BadField` when the body is larger than it carries.
        """
        ...


ERROR_HEADER: Final = "Nats-Service-Error"
ERROR_CODE_HEADER: Final = "Nats-Service-Error-Code"

ERRORS_BY_CODE: Final[dict[str, type[ServeError]]] = {
    kind.error_code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ServeError)
}
"""Every error that a service can send, by its stable word."""

_FOREIGN_BODY_MAX: Final = 2000


class UnknownError(ServeError):
    """An error whose code this version does not know: of a later service, or of the user's code."""

    def __init__(self, code: str, message: str) -> None:
        """``code`` is the word that came."""
        super().__init__(message)
        self.code = code


class _GatewayError(msgspec.Struct, frozen=True):
    """How proxies put it, over HTTP and over NATS alike: within problem details (RFC 9457)."""

    error: ErrorView


def _read_error(body: bytes) -> ErrorView:
    try:
        return msgspec.json.decode(body, type=_GatewayError).error
    except msgspec.ValidationError:
        return msgspec.json.decode(body, type=ErrorView)


def error_from_view(view: ErrorView) -> ServeError:
    """The error that was raised on the other side; an unknown code becomes an `UnknownError`."""
    kind = ERRORS_BY_CODE.get(view.code)
    if kind is None:
        return UnknownError(view.code, view.message or view.code)
    if kind is BadField:
        field, colon, reason = view.message.partition(": ")
        if view.field:
            return BadField(view.field, view.message.removeprefix(f"{view.field}: "))
        return BadField(field, reason) if colon else BadField("request", view.message)
    return kind(view.message or view.code)


def error_of(answer: AdminReply) -> ServeError | None:
    """The error that an answer bears, or None."""
    short = answer.headers.get(ERROR_HEADER)
    number = answer.headers.get(ERROR_CODE_HEADER)
    if short is None and number is None:
        return None
    said = short or f"error {number}"
    try:
        view = _read_error(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Not one of ours: what the user's code answered, or the micro library's own answer to an exception.
        text = answer.body[:_FOREIGN_BODY_MAX].decode(errors="replace").strip()
        return ServeError(f"{said}: {text}" if text else said)
    return error_from_view(view)


def read_reply(verb: str, answer: AdminReply, reply_type: Any) -> Any:
    """The reply to ``verb``; raises the error that the answer bears, or `ServeError` for what cannot be read."""
    error = error_of(answer)
    if error is not None:
        raise error
    try:
        return msgspec.json.decode(answer.body, type=reply_type)
    except msgspec.DecodeError as unreadable:
        raise ServeError(f"the answer to {verb} cannot be read: {unreadable}") from unreadable


ATTEMPT_S: Final = 5.0
"""How long one try waits for its answer; a reply lost with its controller costs this much."""
PAGE_LIMIT: Final = 500
"""How much of a list is asked for at once."""

VERB_OF: Final = {request_type: verb for verb, (request_type, _reply_type) in VERBS.items()}

Item = TypeVar("Item")


def ignore(_what: object) -> None:
    """Hear something and do nothing."""
    return


class Asker:
    """Sends requests to whichever controller leads. Errors are those of `serve_common.errors`, as it raised them."""

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
        """Transient errors are tried again for ``retry_for_s``; ``on_retry`` hears why, for people.

        ``who`` stands in the audit log beside every change; empty says nothing. ``headers`` go with every change too.
        """
        self._requests = requests
        self._subjects = subjects
        own = {WHO_HEADER: who[:WHO_LENGTH_MAX]} if who else {}
        self._headers = {**(headers or {}), **own} or None
        self._retry_for_s = retry_for_s
        self._retry_pause_s = retry_pause_s
        self._on_retry = on_retry

    async def ask(self, request: Request, *, attempt_s: float = ATTEMPT_S) -> Any:
        """The reply, of the type that `VERBS` names."""
        verb = VERB_OF[type(request)]
        subject = self._subjects.admin(verb)
        is_command = isinstance(request, Command)
        body = msgspec.json.encode(with_request_id(request) if is_command else request)
        headers = self._headers if is_command else None
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._retry_for_s
        while True:
            try:
                answer = await self._requests.request(subject, body, timeout_s=attempt_s, headers=headers)
                return read_reply(verb, answer, VERBS[verb][1])
            # Fenced out means for us that another controller leads by now: ask that one.
            except (TransientError, FencedOut) as error:
                if loop.time() + self._retry_pause_s >= give_up_at:
                    raise self._last_word(error) from error
                self._on_retry(str(self._last_word(error)))
            await asyncio.sleep(self._retry_pause_s)

    async def ask_all(self, query: PagedQuery, name_of: Callable[[Item], str]) -> list[Item]:
        """The whole list, page by page, unless ``query`` asks for one page by its ``limit``.

        A page that is too large for one message is asked for again in smaller ones.
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
                raise ServeError(f"the answer to {VERB_OF[type(query)]} repeats itself after {after!r}")
            after = last

    def _last_word(self, error: ServeError) -> ServeError:
        if isinstance(error, NobodyListens):
            return TransientError(f"no controller answers at {self._requests.where}; is one running?")
        if isinstance(error, NoAnswer):
            return TransientError(f"no controller answered in time at {self._requests.where}: {error}")
        return error


class AdminRequests:
    """What asks: base of the commands and of the queries."""

    def __init__(self, asker: Asker) -> None:
        """``asker`` reaches the controller that leads."""
        self._asker = asker


def with_request_id(request: Request) -> Request:
    """The same, with an id of its own where one belongs there and none was given."""
    if getattr(request, "request_id", "") is not None:
        return request
    return msgspec.structs.replace(request, request_id=uuid.uuid4().hex)


class FeedMessage(msgspec.Struct, frozen=True):
    """One message."""

    subject: str
    payload: bytes


class Feed(Protocol):
    """Messages of some subjects, in the order in which they came."""

    async def hear(self, within_s: float | None = None) -> FeedMessage | None:
        """The next one; None when none came in time. None as a time waits for ever."""
        ...

    async def publish(self, subject: str, payload: bytes) -> None:
        """Say something to all who hear it. Raises `BusUnavailable`."""
        ...


class Listen(Protocol):
    """Opens a feed; see `listen_to_stack`."""

    def __call__(self, address: StackAddress, subjects: Sequence[str]) -> AbstractAsyncContextManager[Feed]:
        """Raises `BusUnavailable` and `BusAuthorizationFailed` when entered."""
        ...


@asynccontextmanager
async def listen_to_stack(address: StackAddress, subjects: Sequence[str]) -> AsyncIterator[Feed]:
    """Hear ``subjects``, wildcards included, until the end; NATS may go and come back meanwhile.

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
