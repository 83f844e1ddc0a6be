"""The controller on NATS: subscriptions of every controller, resources of a term, and wake messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, final

import msgspec
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError

from serve_common.api.views import EventView
from serve_common.errors import BadField, BusUnavailable, LimitReached
from serve_common.names import BackendTag, check_name
from serve_common.nats.client import ping_nats
from serve_common.protocol.reports import HostGoal, HostReport, LeaderNotice, ProxyReport, Wake
from serve_common.protocol.snapshots import Snapshot
from serve_common.protocol.subjects import UNREADABLE, Subjects
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_lines import RefusedMessages
from serve_controller.adapters.admin_service import AdminService
from serve_controller.adapters.jetstream import EventStream, SnapshotBucket, recent_events
from serve_controller.shell.admin import AdminApi
from serve_controller.shell.service import ControllerService

_log = structlog.get_logger()

WAKES_MAX: Final = 1_000
"""Most wake messages of all backends in a second: a router sends one a second for each backend that it waits for."""
WAKES_OF_ONE_MAX: Final = 100
NARROW_S: Final = 10.0
"""Seconds for which only the wake subjects of backends scaled to zero are subscribed after an overload."""
SLEEPING_MAX: Final = 1_000
"""Most backends subscribed then; others wait until all are subscribed again."""
_CHECK_EVERY_S: Final = 1.0


@final
class WakeSubscription:
    """Subscription to wake messages; an overload narrows it for a while.

    All replicas and all programs with handles may publish wake messages, and a leader that reads fifty thousand of them
    a second does nothing else. So beyond a limit it unsubscribes from the common subject, and for a while subscribes
    only to one subject for each backend that was scaled to zero. A sender that floods one of these delays that backend
    alone.
    """

    def __init__(
        self,
        client: Client,
        subjects: Subjects,
        refused: RefusedMessages,
        on_wake: Callable[[Wake], None],
        sleeping: Callable[[], Iterable[BackendTag]],
    ) -> None:
        """``sleeping`` returns the backends that this controller has scaled to zero."""
        self._client = client
        self._subjects = subjects
        self._refused = refused
        self._on_wake = on_wake
        self._sleeping = sleeping
        self._active: dict[str, Subscription] = {}
        """Active subscriptions by subject."""
        self._counts: Counter[str] = Counter()
        """Messages since the last check, by subscribed subject."""
        self._narrow_until: float | None = None
        """When to subscribe to all subjects again, by the loop's clock; None while subscribed to all."""
        self._tasks = TaskOwner("wakes")

    async def open(self) -> None:
        """Subscribe. Raises the errors of the client's ``subscribe``."""
        await self._subscribe(self._subjects.wakes)
        self._tasks.start(self._check_periodically(), "look")

    async def close(self) -> None:
        """Unsubscribe."""
        await self._tasks.close(_CHECK_EVERY_S)
        await self._unsubscribe_others(())

    async def _subscribe(self, subject: str) -> None:
        limit = WAKES_MAX if subject == self._subjects.wakes else WAKES_OF_ONE_MAX

        async def on_message(message: Msg) -> None:
            if subject not in self._active:
                return  # received before the unsubscribe took effect
            self._counts[subject] += 1
            if self._counts[subject] > limit:
                await self._narrow(subject, message.subject)
            else:
                self._dispatch(message)

        self._active[subject] = await self._client.subscribe(subject, cb=on_message)

    def _dispatch(self, message: Msg) -> None:
        try:
            wake = msgspec.json.decode(message.data, type=Wake)
            _check_woken(wake, self._subjects.parse_wake_backend(message.subject))
        except (*UNREADABLE, BadField) as error:
            self._refused.refuse("wake", message.subject, error)
            return
        self._on_wake(wake)

    async def _narrow(self, subject: str, last: str) -> None:
        self._refused.refuse("wake", last, BadField("wake", "more than are listened to came within a second"))
        if subject == self._subjects.wakes:
            self._narrow_until = asyncio.get_running_loop().time() + NARROW_S
            _log.warning("wakes_narrowed", last_heard=repr(last[:200]), seconds=NARROW_S)
        await self._unsubscribe(subject)

    async def _check_periodically(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            try:
                await self._check()
            except (NatsError, OSError) as error:
                _log.warning("wakes_not_subscribed", error=repr(error))

    async def _check(self) -> None:
        self._counts.clear()
        if self._narrow_until is None:
            return
        if asyncio.get_running_loop().time() >= self._narrow_until:
            self._narrow_until = None
            wanted = [self._subjects.wakes]
        else:
            tags = sorted(self._sleeping())[:SLEEPING_MAX]
            wanted = [self._subjects.wake(tag) for tag in tags]
        await self._unsubscribe_others(wanted)
        for subject in wanted:
            if subject not in self._active:
                await self._subscribe(subject)

    async def _unsubscribe_others(self, wanted: Iterable[str]) -> None:
        for subject in set(self._active).difference(wanted):
            await self._unsubscribe(subject)

    async def _unsubscribe(self, subject: str) -> None:
        subscription = self._active.pop(subject, None)
        if subscription is not None:
            try:
                await subscription.unsubscribe()
            except (NatsError, OSError) as error:  # it is gone with its connection anyway
                _log.debug("wakes_not_unsubscribed", error=repr(error))


def _check_woken(wake: Wake, backend_tag: str) -> None:
    if wake.backend_tag != backend_tag:
        raise BadField(
            "backend_tag", f"{wake.backend_tag[:130]!r} is woken on the subject of {backend_tag[:130]!r}"
        )


_ANNOUNCE_TIMEOUT_S = 4.0
_BUCKET_TIMEOUT_S = 2.0
"""Seconds to wait for the bucket's content before admin calls are accepted; until it is known commands are refused."""


class NatsBus:
    """Implements `serve_controller.ports.ControllerBus`.

    One object for the whole bus: a term starts and ends on all of it at once, and every part must be notified of a
    reconnect.
    """

    def __init__(
        self,
        client: Client,
        subjects: Subjects,
        version: str,
        refused: RefusedMessages,
        on_dropped: Callable[[], object] = lambda: None,
    ) -> None:
        """``version`` is shown by ``nats micro info``; ``refused`` counts messages that cannot be decoded;
        ``on_dropped`` is called for each dropped admin call."""
        self._client = client
        self._on_dropped = on_dropped
        self._subjects = subjects
        self._version = version
        self._refused = refused
        self._bucket = SnapshotBucket(client, subjects, self._on_bucket_entries)
        self._is_bucket_known = asyncio.Event()
        self._service: AdminService | None = None
        self._listener: ControllerService | None = None
        self._events: EventStream | None = None
        self._wakes: WakeSubscription | None = None

    async def start(self, listener: ControllerService, admin: AdminApi) -> None:
        """Subscribe to reports; ``admin`` handles calls while this controller leads. Raises `BusUnavailable`."""
        self._listener = listener
        self._service = AdminService(self._client, self._subjects, self._version, admin, self._on_dropped)
        subscribe = self._client.subscribe
        try:
            await subscribe(self._subjects.host_reports, cb=self._report_handler(HostReport))
            await subscribe(self._subjects.proxy_reports, cb=self._report_handler(ProxyReport))
            await subscribe(self._subjects.leader, cb=self._on_leader_notice)
            self._wakes = WakeSubscription(
                self._client, self._subjects, self._refused, listener.on_wake_message, listener.sleeping
            )
            await self._wakes.open()
        except (NatsError, OSError, TimeoutError) as error:
            raise BusUnavailable(f"NATS refused the controller's subscriptions: {error!r}") from error

    async def close(self) -> None:
        """Close everything but the client."""
        await self.end_term()
        if self._wakes is not None:
            await self._wakes.close()
        if self._service is not None:
            await self._service.close()

    @property
    def is_connected(self) -> bool:
        """Whether NATS is connected."""
        return bool(self._client.is_connected)

    def reopen(self) -> None:
        """Must be called after every reconnect of the client."""
        self._bucket.reopen()
        if self._events is not None:
            self._events.reopen()

    def _report_handler(self, report_type: type[HostReport | ProxyReport]) -> Callable[[Msg], Any]:
        decoder = msgspec.json.Decoder(report_type)
        kind = "host_report" if report_type is HostReport else "proxy_report"

        async def handle(message: Msg) -> None:
            try:
                report = decoder.decode(message.data)
                _check_sender(report, message.subject)
            except (*UNREADABLE, BadField) as error:
                self._refused.refuse(kind, message.subject, error)
                return
            if self._listener is not None:
                self._listener.on_report(report)

        return handle

    async def _on_leader_notice(self, message: Msg) -> None:
        try:
            notice = msgspec.json.decode(message.data, type=LeaderNotice)
        except UNREADABLE as error:
            self._refused.refuse("leader_notice", message.subject, error)
            return
        if self._listener is not None:
            self._listener.on_leader_notice(notice)

    def _on_bucket_entries(self, entries: Mapping[str, tuple[int, int | None]], *, whole: bool) -> None:
        if whole:
            self._is_bucket_known.set()
        if self._listener is not None:
            self._listener.on_bucket_entries(entries, whole=whole)

    async def start_term(self, notice: LeaderNotice) -> None:
        """Announce the leader, watch the bucket and accept admin calls; retries while NATS is unavailable."""
        assert self._service is not None
        self._events = EventStream(self._client, self._subjects)
        self._events.start()
        self._is_bucket_known.clear()
        self._bucket.watch()
        while True:
            try:
                async with asyncio.timeout(_ANNOUNCE_TIMEOUT_S):
                    await self._client.publish(self._subjects.leader, msgspec.json.encode(notice))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_BUCKET_TIMEOUT_S):
                            await self._is_bucket_known.wait()
                    await self._service.offer()
                return
            except (NatsError, OSError, TimeoutError) as error:
                _log.warning("term_not_announced", error=repr(error))
                await self._service.withdraw()
                await asyncio.sleep(0.5)

    async def announce(self, notice: LeaderNotice) -> None:
        """Announce the leader to hosts and proxies, so that all report at once. May be lost; never raises."""
        try:
            async with asyncio.timeout(_ANNOUNCE_TIMEOUT_S):
                await self._client.publish(self._subjects.leader, msgspec.json.encode(notice))
        except (NatsError, OSError, TimeoutError) as error:
            _log.warning("leader_not_announced", error=repr(error))

    async def round_trip(self, within_s: float) -> None:
        """Return once NATS has responded. Raises `BusUnavailable` after ``within_s`` seconds."""
        if not self._client.is_connected:
            raise BusUnavailable("NATS is not connected")
        await ping_nats(self._client, within_s)

    async def end_term(self) -> None:
        """Stop accepting admin calls, watching the bucket and publishing events."""
        await self._bucket.stop_watching()
        if self._service is not None:
            await self._service.withdraw()
        if self._events is not None:
            await self._events.close()
            self._events = None

    def publish_event(self, subject_kind: str, subject: str, payload: bytes) -> None:
        """Queue an event to be published; ignored outside of a term."""
        if self._events is not None:
            self._events.publish_event(subject_kind, subject, payload)

    async def recent_events(self, limit: int) -> list[EventView]:
        """The newest retained events, the oldest first; empty when they cannot be read in time."""
        return await recent_events(self._client, self._subjects, limit)

    async def publish(self, key: str, snapshot: Snapshot) -> int:
        """Put one key of the bucket; returns its revision. Raises `BusUnavailable` or `LimitReached`."""
        return await self._bucket.publish(key, snapshot)

    async def retract(self, key: str, revision: int) -> None:
        """Remove a key of the bucket if its revision is still ``revision``. Raises `BusUnavailable`."""
        await self._bucket.retract(key, revision)

    async def send_goal(self, goal: HostGoal) -> None:
        """Send a whole goal; may be lost. Raises `BusUnavailable`, or `LimitReached` when it is too large."""
        if not self._client.is_connected:
            raise BusUnavailable("NATS is not connected")
        try:
            await self._client.publish(self._subjects.host_goal(goal.host_id), msgspec.json.encode(goal))
        except MaxPayloadError as error:
            raise LimitReached(f"the goal of {goal.host_id} is larger than NATS' max_payload") from error
        except (NatsError, OSError) as error:
            raise BusUnavailable(f"the goal of {goal.host_id} was not sent: {error!r}") from error


def _check_sender(report: HostReport | ProxyReport, subject: str) -> None:
    """Raise `BadField` unless the sender in the report matches the subject, which NATS restricts by sender."""
    sender = report.host_id if isinstance(report, HostReport) else report.proxy_id
    check_name(sender, "sender")
    if subject.rpartition(".")[2] != sender:
        raise BadField("sender", f"{sender!r} reports on {subject}")
