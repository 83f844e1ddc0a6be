"""The controller on NATS: admin verbs as a service, reports in, host goals and snapshots out.

Why nats.micro: ``nats micro ls|info|stats|ping`` and every foreign client then see the admin API as what it is. Only
the leader offers it, so a call with no leader is answered "no responders" at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import msgspec
import nats.micro
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError
from nats.js.api import KeyValueConfig, StorageType
from nats.js.errors import NotFoundError
from nats.js.kv import KeyValue
from nats.micro.request import Request as MicroRequest
from nats.micro.service import Service, ServiceConfig

from serve_common.adapters.bucket_watch import BucketWatch, Entries
from serve_common.errors import BadField, BusUnavailable, LimitReached, ServeError
from serve_common.names import check_name
from serve_common.subjects import ADMIN_SERVICE, Subjects
from serve_common.tasks import TaskOwner
from serve_common.tracing.operations import operation
from serve_common.tracing.spans import SpanKind
from serve_common.tracing.trace_context import TRACEPARENT, TRACESTATE, usable_tracestate
from serve_common.wires.admin import COMMANDS, VERBS, WHO_HEADER, WHO_LENGTH_MAX
from serve_common.wires.host import HostGoal, HostReport
from serve_common.wires.proxy import LeaderNotice, ProxyReport
from serve_common.wires.snapshots import Snapshot
from serve_common.wires.views import EventView
from serve_common.wires.wake import Wake
from serve_controller.adapters.event_stream import EventStream, recent_events
from serve_controller.shell.requests import error_view

_log = structlog.get_logger()

CALLS_MAX = 1000
"""Admin calls under way at once; most of them wait for goals."""
_TIMEOUT_S = 2.0
_LAST_CALLS_S = 0.5
BUCKET_BYTES_MAX = 256 * 1024 * 1024
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Listener(Protocol):
    """Who is told what came from the bus."""

    def hear(self, report: HostReport | ProxyReport) -> None:
        """A report."""
        ...

    def hear_bucket(self, entries: Mapping[str, tuple[int, int | None]], *, whole: bool) -> None:
        """Revision and snapshot id by key."""
        ...

    def hear_leader(self, notice: LeaderNotice) -> None:
        """A controller began to lead."""
        ...

    def hear_wake(self, wake: Wake) -> None:
        """Requests wait for a backend that has no replica."""
        ...


class Admin(Protocol):
    """Who answers the admin verbs."""

    async def answer(self, verb: str, payload: bytes, who: str) -> bytes:
        """The reply. Raises a `ServeError` for everything that a caller can understand."""
        ...


class NatsBus:
    """Implements `serve_controller.ports.Bus`."""

    def __init__(self, client: Client, subjects: Subjects, version: str) -> None:
        """``version`` is shown by ``nats micro info``."""
        self._client = client
        self._subjects = subjects
        self._version = version
        self._bucket: KeyValue | None = None
        self._watch: BucketWatch | None = None
        self._service: Service | None = None
        self._listener: Listener | None = None
        self._admin: Admin | None = None
        self._tasks = TaskOwner("admin_calls")
        self._events: EventStream | None = None

    async def start(self, listener: Listener, admin: Admin) -> None:
        """Subscribe to the reports. Raises `BusUnavailable`."""
        self._listener = listener
        self._admin = admin
        subscribe = self._client.subscribe
        try:
            await subscribe(self._subjects.host_reports, cb=self._report_handler(HostReport))
            await subscribe(self._subjects.proxy_reports, cb=self._report_handler(ProxyReport))
            await subscribe(self._subjects.leader, cb=self._hear_leader)
            await subscribe(self._subjects.wakes, cb=self._hear_wake)
        except (NatsError, OSError, TimeoutError) as error:
            raise BusUnavailable(f"NATS refused the controller's subscriptions: {error!r}") from error

    async def close(self) -> None:
        """Let go of everything but the client."""
        await self.end_term()
        await self._tasks.close(timeout_s=1.0)

    @property
    def is_connected(self) -> bool:
        """Whether NATS is there right now."""
        return bool(self._client.is_connected)

    def reopen(self) -> None:
        """Must be called after every reconnect of the client."""
        if self._watch is not None:
            self._watch.reopen()
        if self._events is not None:
            self._events.reopen()

    def _report_handler(self, report_type: type[HostReport | ProxyReport]) -> Callable[[Msg], Any]:
        decoder = msgspec.json.Decoder(report_type)

        async def handle(message: Msg) -> None:
            try:
                report = decoder.decode(message.data)
                _check_sender(report, message.subject)
            except (*_UNREADABLE, BadField) as error:
                _log.error("report_unreadable", subject=message.subject, error=str(error))
                return
            if self._listener is not None:
                self._listener.hear(report)

        return handle

    async def _hear_leader(self, message: Msg) -> None:
        try:
            notice = msgspec.json.decode(message.data, type=LeaderNotice)
        except _UNREADABLE as error:
            _log.error("leader_notice_unreadable", error=str(error))
            return
        if self._listener is not None:
            self._listener.hear_leader(notice)

    async def _hear_wake(self, message: Msg) -> None:
        try:
            wake = msgspec.json.decode(message.data, type=Wake)
            _check_woken(wake, self._subjects.backend_of_wake(message.subject))
        except (*_UNREADABLE, BadField) as error:
            _log.error("wake_unreadable", subject=message.subject, error=str(error))
            return
        if self._listener is not None:
            self._listener.hear_wake(wake)

    async def begin_term(self, notice: LeaderNotice) -> None:
        """See `ports.Bus.begin_term`; keeps trying while NATS is away."""
        self._events = EventStream(self._client, self._subjects)
        self._events.start()
        self._watch = BucketWatch(self._client, self._subjects.bucket, self._hear_bucket, self._open_bucket)
        self._watch.start()
        while True:
            try:
                async with asyncio.timeout(2 * _TIMEOUT_S):
                    await self._client.publish(self._subjects.leader, msgspec.json.encode(notice))
                    await self._offer_service()
                return
            except (NatsError, OSError, TimeoutError) as error:
                _log.warning("term_not_announced", error=repr(error))
                await self._withdraw_service()
                await asyncio.sleep(0.5)

    async def end_term(self) -> None:
        """See `ports.Bus.end_term`."""
        if self._watch is not None:
            await self._watch.close()
            self._watch = None
        await self._withdraw_service()
        if self._events is not None:
            await self._events.close()
            self._events = None

    def publish_event(self, subject_kind: str, subject: str, payload: bytes) -> None:
        """See `ports.EventSink.publish_event`. Outside of a term there is nothing to tell."""
        if self._events is not None:
            self._events.publish_event(subject_kind, subject, payload)

    async def recent_events(self, limit: int) -> list[EventView]:
        """See `ports.EventSink.recent_events`."""
        return await recent_events(self._client, self._subjects, limit)

    async def _offer_service(self) -> None:
        config = ServiceConfig(
            name=ADMIN_SERVICE,
            version=self._version,
            description="Muster's commands and queries",
        )
        self._service = await nats.micro.add_service(self._client, config)
        group = self._service.add_group(name=self._subjects.admin_group, queue_group="controllers")
        for verb in VERBS:
            await group.add_endpoint(name=verb, handler=self._admin_handler(verb))

    async def _withdraw_service(self) -> None:
        service, self._service = self._service, None
        if service is None:
            return
        await self._take_last_calls(service)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await service.stop()
        except (NatsError, OSError, TimeoutError) as error:
            # The server forgets the subscriptions with the connection, or learns of it at the reconnect.
            _log.warning("service_not_withdrawn", error=repr(error))

    def _admin_handler(self, verb: str) -> Callable[[MicroRequest], Any]:
        async def handle(request: MicroRequest) -> None:
            # Each call in a task of its own: one that waits must not hold up the others of its verb.
            if len(self._tasks) >= CALLS_MAX:
                await _respond_error(request, LimitReached(f"{CALLS_MAX} admin calls are under way"))
                return
            self._tasks.start(self._answer(verb, request), name=f"admin {verb}")

        return handle

    async def _answer(self, verb: str, request: MicroRequest) -> None:
        assert self._admin is not None
        try:
            with _traced(verb, request):
                reply = await self._admin.answer(verb, request.data, _who(request))
        except ServeError as error:
            await _respond_error(request, error)
            return
        except Exception:
            await _respond_error(request, ServeError("an internal error; the controller's log has it"))
            raise
        if len(reply) > self._client.max_payload:
            text = f"the answer has {len(reply)} bytes and NATS carries {self._client.max_payload} in one message"
            await _respond_error(request, LimitReached(f"{text}; ask for less: use limit and after"))
            return
        await request.respond(reply)

    async def _take_last_calls(self, service: Service) -> None:
        """Let the server hand no more calls to us, and take in all that it has handed to us already.

        Why: `Service.stop` drops those, and their callers would wait in vain; and its subscriptions' own ``drain``
        keeps them for the next connection when NATS goes away meanwhile.
        """
        if not self._client.is_connected:
            return
        known = [endpoint._subscription for endpoint in service._endpoints]  # noqa: SLF001 - there is no other way
        try:
            async with asyncio.timeout(_LAST_CALLS_S):
                for subscription in filter(None, known):
                    await self._client._send_unsubscribe(subscription._id)  # noqa: SLF001 - as above
                for _ in range(2):  # the first PING overtakes what the client still holds back
                    await self._client.flush()
                for subscription in filter(None, known):
                    await subscription._pending_queue.join()  # noqa: SLF001 - as above
        except (NatsError, OSError, TimeoutError) as error:
            _log.warning("last_calls_not_taken", error=repr(error))

    def _hear_bucket(self, entries: Entries, whole: bool) -> None:  # noqa: FBT001 - OnEntries
        heard: dict[str, tuple[int, int | None]] = {}
        for key, (revision, value) in entries.items():
            heard[key] = (revision, None if value is None else _snapshot_id(key, value))
        if self._listener is not None:
            self._listener.hear_bucket(heard, whole=whole)

    async def _open_bucket(self) -> KeyValue:
        stream = self._client.jetstream(timeout=_TIMEOUT_S)
        try:
            self._bucket = await stream.key_value(self._subjects.bucket)
        except NotFoundError:
            self._bucket = await stream.create_key_value(
                KeyValueConfig(
                    bucket=self._subjects.bucket,
                    history=1,
                    max_bytes=BUCKET_BYTES_MAX,
                    storage=StorageType.FILE,
                )
            )
        return self._bucket

    async def publish(self, key: str, snapshot: Snapshot) -> int:
        """See `ports.Publisher.publish`."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._opened().put(key, msgspec.json.encode(snapshot))
        except MaxPayloadError as error:
            raise LimitReached(f"the snapshot {key} is larger than NATS' max_payload") from error
        except (NatsError, OSError, TimeoutError) as error:
            raise BusUnavailable(f"the snapshot {key} was not published: {error!r}") from error

    async def retract(self, key: str, revision: int) -> None:
        """See `ports.Publisher.retract`."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._opened().delete(key, last=revision or None)
        except (NatsError, OSError, TimeoutError) as error:
            raise BusUnavailable(f"the key {key} was not retracted: {error!r}") from error

    def _opened(self) -> KeyValue:
        if self._bucket is None or not self._client.is_connected:
            raise BusUnavailable("NATS is not connected")
        return self._bucket

    async def send_goal(self, goal: HostGoal) -> None:
        """See `ports.HostLink.send_goal`."""
        if not self._client.is_connected:
            raise BusUnavailable("NATS is not connected")
        try:
            await self._client.publish(self._subjects.host_goal(goal.host_id), msgspec.json.encode(goal))
        except MaxPayloadError as error:
            raise LimitReached(f"the goal of {goal.host_id} is larger than NATS' max_payload") from error
        except (NatsError, OSError) as error:
            raise BusUnavailable(f"the goal of {goal.host_id} was not sent: {error!r}") from error


def _snapshot_id(key: str, value: bytes) -> int:
    """The id in a bucket's value; 0 for what cannot be read, so that it is put right."""
    try:
        return msgspec.json.decode(value, type=Snapshot).snapshot_id
    except _UNREADABLE as error:
        _log.warning("snapshot_unreadable", key=key, error=str(error))
        return 0


def _check_sender(report: HostReport | ProxyReport, subject: str) -> None:
    """Who may publish on a subject speaks for that name only; a report in another's name is refused."""
    sender = report.host_id if isinstance(report, HostReport) else report.proxy_id
    check_name(sender, "sender")
    if subject.rpartition(".")[2] != sender:
        raise BadField("sender", f"{sender!r} reports on {subject}")


def _check_woken(wake: Wake, backend_tag: str) -> None:
    if wake.backend_tag != backend_tag:
        raise BadField(
            "backend_tag", f"{wake.backend_tag[:130]!r} is woken on the subject of {backend_tag[:130]!r}"
        )


def _traced(verb: str, request: MicroRequest) -> AbstractContextManager[object]:
    """A span around a command; queries, which people repeat every second, have none."""
    if verb not in COMMANDS:
        return nullcontext()
    headers = request.headers or {}
    return operation(
        f"admin {verb}",
        {"rpc.system.name": "nats", "muster.who": _who(request)},
        kind=SpanKind.SERVER,
        traceparent=headers.get(TRACEPARENT, ""),
        tracestate=usable_tracestate(headers.get(TRACESTATE, "")),
    )


def _who(request: MicroRequest) -> str:
    """What the caller says of itself, fit to be kept and shown."""
    who = (request.headers or {}).get(WHO_HEADER, "")
    return "".join(c for c in who if c.isprintable())[:WHO_LENGTH_MAX]


async def _respond_error(request: MicroRequest, error: ServeError) -> None:
    view = error_view(error)
    first_line = view.message.splitlines()[0][:500] if view.message else view.code
    # A header can hold neither line ends nor much else; the body has the whole.
    plain = "".join(c if " " <= c <= "~" else "?" for c in first_line)
    await request.respond_error(str(error.status_hint), plain, data=msgspec.json.encode(view))
