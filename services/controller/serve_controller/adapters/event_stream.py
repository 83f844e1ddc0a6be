"""What happened, told to whoever listens, and kept for a while in a JetStream stream.

Why plain publishes and no acknowledgements: events are for people. Whoever subscribes now hears them, the stream that
has the same subjects keeps them, and a bus that is slow or away costs events and never holds up a decision.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import Final

import msgspec
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, DiscardPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from serve_common.bus.quiet_log import QuietLog
from serve_common.subjects import Subjects
from serve_common.tasks import TaskOwner
from serve_common.wires.unreadable import UNREADABLE
from serve_common.wires.views import EventView, GoalView

_log = structlog.get_logger()

QUEUE_MAX: Final = 1_000
"""Events that wait to be sent; beyond it the oldest are dropped."""
STREAM_CHECK_S: Final = 5.0
"""A stream that was lost is made anew at the first event after so long; until then no event is kept."""
READ_TIMEOUT_S: Final = 10.0
"""What is not read by then is not remembered by this term; nobody waits for it."""
_TIMEOUT_S: Final = 2.0
_BURST: Final = 100
"""Events that are sent before others get a turn."""
_LOG_EVERY_S: Final = 10.0

MESSAGES_MAX: Final = 10_000
MESSAGES_PER_SUBJECT_MAX: Final = 100
BYTES_MAX: Final = 64 * 1024 * 1024
AGE_MAX_S: Final = 7 * 24 * 3600.0

GOAL: Final = "goal"
"""The kind of events whose payload is a `GoalView`."""
_TOKEN = r"(?:(?![.*>])[!-~])+"  # noqa: S105 - of a subject
_SUBJECT: Final = re.compile(rf"{_TOKEN}(?:\.{_TOKEN})+")


def stream_config(subjects: Subjects) -> StreamConfig:
    """The stream as it is made."""
    return StreamConfig(
        name=subjects.event_stream,
        description="What happened lately in this instance of Muster; may be deleted at any time",
        subjects=[subjects.events],
        max_msgs=MESSAGES_MAX,
        max_bytes=BYTES_MAX,
        max_age=AGE_MAX_S,
        max_msgs_per_subject=MESSAGES_PER_SUBJECT_MAX,
        discard=DiscardPolicy.OLD,
        storage=StorageType.FILE,
    )


class EventStream:
    """The way out for the events of one term."""

    def __init__(self, client: Client, subjects: Subjects) -> None:
        self.dropped = 0
        """Events that were never sent."""
        self._client = client
        self._subjects = subjects
        self._queue: deque[tuple[str, bytes]] = deque()
        self._wake = asyncio.Event()
        self._tasks = TaskOwner("event_stream")
        self._is_closed = False
        self._check_at = 0.0
        """When to look next whether the stream exists, by the loop's time."""
        self._drops = QuietLog(_log.warning, _LOG_EVERY_S)
        self._failures = QuietLog(_log.warning, _LOG_EVERY_S)

    def start(self) -> None:
        """Begin to send, and make the stream where it is missing."""
        self._wake.set()
        self._tasks.start(self._run(), name="send")

    def reopen(self) -> None:
        """Must be called after every reconnect of the client: the server may have lost the stream."""
        self._check_at = 0.0
        self._wake.set()

    async def close(self) -> None:
        """Send what still waits if that takes little time, and end."""
        self._is_closed = True
        await self._tasks.close(timeout_s=1.0)
        try:
            async with asyncio.timeout(1.0):
                await self._send_queued()
        except (NatsError, OSError, TimeoutError) as error:
            _log.warning("events_not_sent", error=repr(error), events=len(self._queue))
        self._queue.clear()

    def publish_event(self, subject_kind: str, subject: str, payload: bytes) -> None:
        """See `ports.EventSink.publish_event`."""
        full = self._subjects.event(subject_kind, subject)
        if self._is_closed:
            self._drop("the term is over", full)
        elif _SUBJECT.fullmatch(full) is None:
            # The server would end the connection over it.
            self._drop("it has no valid subject", full)
        else:
            if len(self._queue) >= QUEUE_MAX:
                self._drop("too many wait", self._queue.popleft()[0])
            self._queue.append((full, payload))
            self._wake.set()

    async def _run(self) -> None:
        while not self._is_closed:
            await self._wake.wait()
            self._wake.clear()
            if not self._client.is_connected:
                continue  # `reopen` wakes this again
            await self._ensure_stream()
            await self._send_queued()

    async def _send_queued(self) -> None:
        sent = 0
        while self._queue and self._client.is_connected:
            subject, payload = self._queue.popleft()
            try:
                await self._client.publish(subject, payload)
            except MaxPayloadError:
                self._drop("it is larger than NATS' max_payload", subject)
            except (NatsError, OSError) as error:
                self._drop(repr(error), subject)
            sent += 1
            if sent % _BURST == 0:
                await asyncio.sleep(0)

    async def _ensure_stream(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._check_at:
            return
        self._check_at = now + STREAM_CHECK_S
        manager = self._client.jetstream(timeout=_TIMEOUT_S)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                try:
                    await manager.stream_info(self._subjects.event_stream)
                except NotFoundError:
                    await manager.add_stream(stream_config(self._subjects))
                    _log.info("event_stream_created", stream=self._subjects.event_stream)
        except (NatsError, OSError, TimeoutError) as error:
            # Events go out all the same, to those who listen now.
            self._failures.log(now, "event_stream_missing", error=repr(error))

    def _drop(self, reason: str, subject: str) -> None:
        self.dropped += 1
        now = asyncio.get_running_loop().time()
        self._drops.log(now, "event_dropped", reason=reason, subject=subject[:200], dropped=self.dropped)


async def recent_events(client: Client, subjects: Subjects, limit: int) -> list[EventView]:
    """See `ports.EventSink.recent_events`."""
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            messages = await _read(client, subjects, limit)
    except NotFoundError:
        return []  # of a new system, or lost
    except (NatsError, OSError, TimeoutError) as error:
        _log.warning("events_not_read", error=repr(error))
        return []
    views, unreadable = [], 0
    for message in messages:
        try:
            views.append(_view(message, subjects))
        except UNREADABLE:
            unreadable += 1
    if unreadable:
        _log.warning("events_unreadable", count=unreadable)
    return views


async def _read(client: Client, subjects: Subjects, limit: int) -> deque[Msg]:
    newest: deque[Msg] = deque(maxlen=limit)
    context = client.jetstream(timeout=READ_TIMEOUT_S)
    state = (await context.stream_info(subjects.event_stream)).state
    if state.messages == 0:
        return newest
    is_read = asyncio.Event()

    async def hear(message: Msg) -> None:
        newest.append(message)
        if message.metadata.num_pending == 0:
            is_read.set()

    # A consumer that pushes: the library's pulls cost a task for each message and wait for a full batch.
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox, cb=hear)
    try:
        consumer = ConsumerConfig(
            deliver_subject=inbox,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            # Sequences have gaps where a subject had more than is kept of it, so it is begun further back.
            opt_start_seq=max(state.first_seq, state.last_seq - 2 * limit + 1),
            ack_policy=AckPolicy.NONE,
            inactive_threshold=READ_TIMEOUT_S,
            mem_storage=True,
        )
        await context.add_consumer(subjects.event_stream, consumer)
        await is_read.wait()
    finally:
        await subscription.unsubscribe()
    return newest


def _view(message: Msg, subjects: Subjects) -> EventView:
    if not message.subject.startswith(subjects.event(GOAL, "")):
        return msgspec.json.decode(message.data, type=EventView)
    goal = msgspec.json.decode(message.data, type=GoalView)
    return EventView(
        at=message.metadata.timestamp.timestamp(),
        kind=GOAL,
        subject=goal.goal_id,
        message=goal.error or goal.message,
        state=goal.status.value,
        goal_id=goal.goal_id,
    )
