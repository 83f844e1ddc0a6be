"""One request in dispatch: its specification, state and response; and the interfaces that dispatch needs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, final

import msgspec

from serve_common.direct.link import DirectLink
from serve_common.direct.pipes import PipedBytes
from serve_common.dispatch.admission import Endpoint
from serve_common.dispatch.request_body import RequestBody
from serve_common.dispatch.sockets import ReplicaSocket
from serve_common.errors import ServeError
from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.frames import (
    FRAME_BODY_BYTES_MAX,
    WINDOW_FRAMES,
    CallHead,
    CreditHead,
    Headers,
    RequestKind,
)
from serve_common.protocol.streams import IncomingStream, OutgoingStream, WholeBody
from serve_common.routing.queues import Dispatch, Refusal, RequestKey
from serve_common.routing.request_counts import RequestCounter
from serve_common.routing.router import Router
from serve_common.telemetry.request_traces import RequestObserver


@final
class ResponseBody:
    """The body of a response that comes in pieces; it has one reader.

    Why credit is given as pieces are read, not as they arrive: a slow reader then slows down the replica, and nothing
    piles up here.
    """

    __slots__ = (
        "_failure",
        "_grant_credit",
        "_is_taken",
        "_is_whole",
        "_pieces",
        "_reader",
        "incoming",
    )

    def __init__(self, first: bytes | memoryview, grant_credit: Callable[[CreditHead], None]) -> None:
        """``grant_credit`` sends a credit to the replica, while more is to come."""
        self.incoming: Final = IncomingStream(WINDOW_FRAMES)
        self._pieces: deque[bytes | memoryview] = deque((first,))
        self._grant_credit: Callable[[CreditHead], None] | None = grant_credit
        self._is_taken = False
        self._is_whole = False
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def take_first(self) -> bytes | memoryview:
        """The piece that came with the head, possibly empty; before any `read`."""
        self._is_taken = True
        return self._pieces.popleft()

    async def read(self) -> bytes | memoryview | None:
        """The next piece, possibly empty; None at the end. The previous piece then counts as finished.

        Raises the exception passed to `fail`, after the pieces that came before it.
        """
        if self._is_taken and self._grant_credit is not None and self.incoming.process(1):
            self._grant_credit(self.incoming.credit())
        self._is_taken = False
        while not self._pieces:
            if self._failure is not None:
                raise self._failure
            if self._is_whole:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._is_taken = True
        return self._pieces.popleft()

    def add(self, piece: bytes | memoryview, *, last: bool) -> None:
        """Append the next piece; nothing may be added after ``last``."""
        self._pieces.append(piece)
        if last:
            self._is_whole = True
            # It leads back to the call: the pieces would wait for the garbage collector.
            self._grant_credit = None
        self._wake()

    def fail(self, failure: Exception) -> None:
        """End the body with an error; does nothing when it is complete or has failed."""
        if not self._is_whole and self._failure is None:
            self._failure = failure
            self._grant_credit = None
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


# Tracked by the garbage collector, as `RequestSpec` is: a stream references its call, and the call its request.
class Response(msgspec.Struct, frozen=True):
    """A replica's response. ``stream`` is None when ``body`` is complete; ``socket`` is that of a 101."""

    status: int
    headers: Headers
    body: bytes | memoryview
    stream: ResponseBody | None
    socket: ReplicaSocket | None = None


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A request to an endpoint, as the caller specifies it."""

    endpoint: Endpoint
    kind: RequestKind = RequestKind.HTTP
    method: str
    path: str
    route: str
    """The prefix that matched; empty for a call that came without a path."""
    query: str
    headers: Headers
    body: bytes
    upload: RequestBody | None = None
    """The body when it is still arriving; ``body`` is then empty."""
    request_id: str
    traceparent: str
    client: str = ""
    """Address of the client as ``host:port``; empty when there is none."""
    scheme: str = "http"
    call: CallHead | None = None
    is_repeatable: bool
    """True when running it twice does no harm."""
    shard_key: str = ""
    """Requests with the same key go to the same backend and replica; empty pins nothing."""
    backend_tag: BackendTag | None = None
    """The backend that the caller selected by name; None lets the traffic policy choose."""
    code_versions: Mapping[BackendTag, int] | None = None
    """Preferred code versions by backend, from `ReplicaGoal.peer_versions`."""
    outlives_client: bool = False
    """True when a client that leaves before the response does not cancel it."""
    deadline: float
    """Seconds by the loop's clock."""
    replica: ReplicaTag | None = None
    """Set by `Dispatcher.start_at`: it goes to this replica only."""
    shadow_backend: BackendTag | None = None
    """Set for a shadow copy: it goes to this backend only, after all real requests, and is dropped when it cannot be
    sent."""
    trace: RequestObserver | None = None
    """Observer of a traced or logged request; ``traceparent`` names the request's own span when it is traced."""


@final
class Attempt:
    """One sending of a request to one replica."""

    __slots__ = (
        "is_cancelled",
        "is_head_missing",
        "last_seen_at",
        "link",
        "may_have_arrived",
        "outgoing",
        "probed_at",
        "probed_sent",
        "probes",
        "replica",
        "reply",
        "response_link",
        "sent_at",
        "subject",
        "token",
        "undelivered",
        "upload",
    )

    def __init__(
        self, replica: ReplicaTag, subject: bytes, token: bytes, reply: bytes, spec: RequestSpec
    ) -> None:
        self.replica = replica
        self.subject = subject
        self.token = token
        self.reply = reply
        self.upload = spec.upload
        self.outgoing: OutgoingStream[bytes | memoryview | PipedBytes] | None = None
        """The body; None when it is sent with the head."""
        if spec.upload is not None:
            self.outgoing = OutgoingStream(spec.upload, WINDOW_FRAMES)
        elif len(spec.body) > FRAME_BODY_BYTES_MAX:
            self.outgoing = OutgoingStream(WholeBody(spec.body), WINDOW_FRAMES)
        self.link: DirectLink | None = None
        """The way of its frames; None is the bus."""
        self.response_link: DirectLink | None = None
        """The way of the response's frames, and of what is said about them."""
        self.undelivered = 0
        """Frames, probes included, that had no subscriber."""
        self.sent_at = 0.0
        self.last_seen_at = 0.0
        """When the replica's last message came; initially, when the request was sent."""
        self.probed_at = 0.0
        self.probed_sent = 0
        """Frames that were sent before the last probe, so that its answer says whether they have arrived."""
        self.is_head_missing = False
        """True when a part of the response has arrived before its head; a probe then asks for it."""
        self.is_cancelled = False
        """True when its replica was told that its response is not wanted."""
        self.probes = 0
        """Probes that were sent over the bus."""
        self.may_have_arrived = False
        """True when its replica has sent a frame, or frames took a link: then "no responders", however often, does not
        mean that the request never arrived."""

    @property
    def has_arrived(self) -> bool:
        """False when all frames sent so far were undeliverable: then nothing was started."""
        sent_frames = 1 if self.outgoing is None else self.outgoing.sent
        return self.may_have_arrived or self.undelivered < sent_frames + self.probes


@final
class Call:
    """A request from its admission to the end of its response.

    Why one object: the callbacks of the bus, the timers and the waiting handler all share it, and it is dropped as a
    whole.
    """

    __slots__ = (
        "_on_no_responders",
        "_on_reply",
        "attempt",
        "is_suspect",
        "judged_by",
        "judged_since",
        "key",
        "lost_attempts",
        "lost_with",
        "may_queue",
        "on_error",
        "on_response",
        "reconnect_deadline",
        "response_reader",
        "router",
        "spec",
        "status",
        "was_admitted",
    )

    def __init__(
        self,
        key: RequestKey,
        spec: RequestSpec,
        on_response: Callable[[Call, Response], None],
        on_error: Callable[[Call, ServeError], None],
        *,
        on_reply: Callable[[Call, bytes, bool], None],
        on_no_responders: Callable[[Call], None],
    ) -> None:
        self.key = key
        self.spec = spec
        self.on_response = on_response
        """Called once with the head of the response."""
        self.on_error = on_error
        """Called once with the reason why there is no response; a broken stream raises in its reader instead."""
        self.may_queue = False
        """True when it may queue in the replica, after a refusal as busy (`RequestHead.may_queue`)."""
        self.status = 0
        """Status of the response; 0 before it begins."""
        self.router: Router | None = None
        """The router in whose queue or slot it is; None while it waits for a reconnect."""
        self.attempt: Attempt | None = None
        """The current attempt; None while it waits."""
        self.response_reader: ResponseBody | ReplicaSocket | None = None
        """Set once the client may have received a part of the response."""
        self.lost_attempts = 0
        """How often a replica got it and lost it."""
        self.lost_with: tuple[ReplicaTag, ...] = ()
        """Replicas that died while they had it."""
        self.is_suspect = False
        """True when it may have killed one of them, and healthy ones were left (`Router.submit`)."""
        self.reconnect_deadline = 0.0
        self.was_admitted = False
        self.judged_by: RequestCounter | None = None
        """Counts what becomes of it, where its backend takes part in a rollout."""
        self.judged_since = 0.0
        self._on_reply = on_reply
        self._on_no_responders = on_no_responders

    @property
    def is_whole(self) -> bool:
        """True while everything received of the request is still in memory."""
        return self.spec.upload is None or self.spec.upload.is_from_start

    @property
    def runs_on(self) -> bool:
        """True while a client that leaves does not cancel it: it is sent whole, and its response has not begun."""
        has_all = self.spec.upload is None or self.spec.upload.has_arrived
        return self.spec.outlives_client and has_all and self.status == 0

    def take_reply(self, payload: bytes, reply: bytes, _headers: bytes | None) -> None:
        """Process a frame for the current attempt; ``reply`` is not empty when a link brought it."""
        self._on_reply(self, payload, bool(reply))

    def take_no_responders(self) -> None:
        """The subject of the current attempt's replica has no subscriber."""
        self._on_no_responders(self)


class CallRegistry(Protocol):
    """Owns the active calls; the dispatcher.

    Why a protocol: responses, snapshot updates, losses and reconnects each end and resend calls for reasons of their
    own; how a call is sent, and how its slot is released, stays in one place.
    """

    @property
    def calls(self) -> Mapping[RequestKey, Call]:
        """Active calls by request."""
        ...

    def submit(self, call: Call) -> None:
        """Choose a router for a call that has none, and send it or let it wait."""
        ...

    def perform(self, router: Router, dispatches: Sequence[Dispatch]) -> None:
        """Send the requests that the router gave a slot."""
        ...

    def leave_router(self, call: Call) -> bool:
        """Release the call's slot or its place in the queue; False when that ended the call."""
        ...

    def responded(self, call: Call) -> None:
        """The replica has sent its complete response."""
        ...

    def refused(self, call: Call, reason: Refusal) -> None:
        """The replica did not start the request."""
        ...

    def never_started(self, call: Call) -> None:
        """The replica is certain that it did not start the request, and will not."""
        ...

    def request_unknown(self, call: Call) -> None:
        """The replica does not know the request (any more)."""
        ...

    def end_with(self, call: Call, error: ServeError) -> None:
        """End the call without a (complete) response."""
        ...

    def fail(self, call: Call, error: ServeError) -> None:
        """As `end_with`, and notify the replica, which may still work on it."""
        ...


class DataPlaneBus(Protocol):
    """The data plane's bus, such as `serve_common.nats.connection.BusConnection`."""

    @property
    def is_connected(self) -> bool:
        """True while publishing is possible."""
        ...

    @property
    def is_responding(self) -> bool:
        """False while it is not connected, or has not responded to a ping for a while."""
        ...

    def publish(
        self, subject: str | bytes, payload: bytes, reply: bytes = b"", headers: bytes | None = None
    ) -> None:
        """Send at most once. Raises as `BusConnection.publish`."""
        ...


class Replies(Protocol):
    """Provides reply subjects, such as `serve_common.nats.connection.Inbox`."""

    def new_reply(
        self, on_reply: Callable[[bytes, bytes, bytes | None], None], on_no_responders: Callable[[], None]
    ) -> tuple[bytes, bytes]:
        """Register a token; return it with its reply subject, as `Inbox.new_reply`."""
        ...

    def replace(self, token: bytes, on_reply: Callable[[bytes, bytes, bytes | None], None]) -> None:
        """Let further replies to a token go to ``on_reply``, as `Inbox.replace`."""
        ...

    def forget(self, token: bytes) -> None:
        """Release a token."""
        ...

    def deliver(self, token: bytes, payload: bytes) -> None:
        """Bring a reply that came over a direct link to its callback, as `Inbox.deliver`."""
        ...
