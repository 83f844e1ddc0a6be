"""The controller's JetStream: the bucket that carries snapshots to routers, and the streams of events and captures."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    KeyValueConfig,
    RePublish,
    StorageType,
    StreamConfig,
)
from nats.js.errors import NotFoundError
from nats.js.kv import KeyValue

from serve_common.api.views import EventView
from serve_common.errors import BusUnavailable, LimitReached
from serve_common.nats.bucket_watch import BucketWatch, Entries
from serve_common.protocol.snapshots import Snapshot
from serve_common.protocol.subjects import UNREADABLE, Subjects
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_lines import RateLimitedLogger

_log = structlog.get_logger()

BUCKET_BYTES_MAX = 256 * 1024 * 1024
_TIMEOUT_S = 2.0


def bucket_config(subjects: Subjects) -> KeyValueConfig:
    """Configuration of the bucket: routers read it by direct gets, and receive changes by its republish."""
    return KeyValueConfig(
        bucket=subjects.bucket,
        history=1,
        max_bytes=BUCKET_BYTES_MAX,
        storage=StorageType.FILE,
        direct=True,
        republish=RePublish(src=f"$KV.{subjects.bucket}.>", dest=subjects.snapshots),
    )


class OnBucket(Protocol):
    """Callback for entries of the bucket."""

    def __call__(self, entries: Mapping[str, tuple[int, int | None]], *, whole: bool) -> None:
        """Receive revision and snapshot id by key (None: removed); with ``whole`` the bucket's whole content."""
        ...


class SnapshotBucket:
    """Writes the bucket of snapshots, and watches it.

    The leader watches it because the bucket may be lost or restored on its own, and only what is known to be in it is
    known to reach the routers.
    """

    def __init__(self, client: Client, subjects: Subjects, on_bucket: OnBucket) -> None:
        """``on_bucket`` is called between `watch` and `stop_watching`."""
        self._client = client
        self._subjects = subjects
        self._on_bucket = on_bucket
        self._bucket: KeyValue | None = None
        self._watch: BucketWatch | None = None

    def watch(self) -> None:
        """Open the bucket, create it if it is missing, and start reporting its content."""
        self._watch = BucketWatch(self._client, self._subjects, self._on_entries, self._open)
        self._watch.start()

    async def stop_watching(self) -> None:
        """Stop reporting the content."""
        if self._watch is not None:
            await self._watch.close()
            self._watch = None

    def reopen(self) -> None:
        """Must be called after every reconnect of the client."""
        if self._watch is not None:
            self._watch.reopen()

    async def publish(self, key: str, snapshot: Snapshot) -> int:
        """Put one key; returns its revision. Raises `BusUnavailable`, or `LimitReached` when it is too large."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._opened().put(key, msgspec.json.encode(snapshot))
        except MaxPayloadError as error:
            raise LimitReached(f"the snapshot {key} is larger than NATS' max_payload") from error
        except (NatsError, OSError, TimeoutError) as error:
            raise BusUnavailable(f"the snapshot {key} was not published: {error!r}") from error

    async def retract(self, key: str, revision: int) -> None:
        """Remove a key if its revision is still ``revision``. Raises `BusUnavailable`."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._opened().delete(key, last=revision or None)
        except (NatsError, OSError, TimeoutError) as error:
            raise BusUnavailable(f"the key {key} was not retracted: {error!r}") from error

    def _opened(self) -> KeyValue:
        if self._bucket is None or not self._client.is_connected:
            raise BusUnavailable("NATS is not connected")
        return self._bucket

    async def _open(self) -> None:
        stream = self._client.jetstream(timeout=_TIMEOUT_S)
        try:
            bucket = await stream.key_value(self._subjects.bucket)
            await self._update_stream()
        except NotFoundError:
            bucket = await stream.create_key_value(bucket_config(self._subjects))
        self._bucket = bucket

    async def _update_stream(self) -> None:
        """Update the stream of an existing bucket to `bucket_config`, as far as routers need it.

        Not by the library, which would drop the fields of a stream's configuration that it does not know.
        """
        stream = f"KV_{self._subjects.bucket}"
        response = await self._client.request(f"$JS.API.STREAM.INFO.{stream}", timeout=_TIMEOUT_S)
        config = msgspec.json.decode(response.data).get("config")
        if config is None:
            raise NotFoundError(description=f"there is no stream {stream}")
        republish = {"src": f"$KV.{self._subjects.bucket}.>", "dest": self._subjects.snapshots}
        desired = config | {"allow_direct": True, "republish": republish}
        if desired == config:
            return
        request = msgspec.json.encode(desired)
        response = await self._client.request(f"$JS.API.STREAM.UPDATE.{stream}", request, timeout=_TIMEOUT_S)
        error = msgspec.json.decode(response.data).get("error")
        if error is not None:
            raise BusUnavailable(
                f"the bucket {self._subjects.bucket} does not tell routers what changes: {error}"
            )
        _log.info("bucket_updated", bucket=self._subjects.bucket)

    def _on_entries(self, entries: Entries, whole: bool) -> None:  # noqa: FBT001 - OnEntries
        snapshot_ids: dict[str, tuple[int, int | None]] = {}
        for key, (revision, value) in entries.items():
            snapshot_ids[key] = (revision, None if value is None else _snapshot_id(key, value))
        self._on_bucket(snapshot_ids, whole=whole)


def _snapshot_id(key: str, value: bytes) -> int:
    """The id in a bucket's value; 0 for an unreadable one, so that it is overwritten."""
    try:
        return msgspec.json.decode(value, type=Snapshot).snapshot_id
    except UNREADABLE as error:
        _log.warning("snapshot_unreadable", key=key, error=str(error))
        return 0


QUEUE_MAX: Final = 1_000
"""Most events waiting to be sent; beyond it the oldest are dropped."""
STREAM_CHECK_S: Final = 5.0
"""Seconds between checks whether the stream exists: a lost one is recreated at the first event after that."""
READ_TIMEOUT_S: Final = 10.0
"""Timeout of reading the stream, seconds; events that are not read by then are missing in this term."""
_STREAM_TIMEOUT_S: Final = 2.0
_BURST: Final = 100
"""Events sent before the event loop gets a turn."""
_LOG_EVERY_S: Final = 10.0

MESSAGES_MAX: Final = 10_000
MESSAGES_PER_SUBJECT_MAX: Final = 100
BYTES_MAX: Final = 64 * 1024 * 1024
AGE_MAX_S: Final = 7 * 24 * 3600.0

_TOKEN = r"(?:(?![.*>])[!-~])+"  # noqa: S105 - of a subject
_SUBJECT: Final = re.compile(rf"{_TOKEN}(?:\.{_TOKEN})+")


def stream_config(subjects: Subjects) -> StreamConfig:
    """Configuration of the stream."""
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


CAPTURES_MAX: Final = 10_000
"""Captured requests of one endpoint that are retained."""
CAPTURE_BYTES_MAX: Final = 64 * 1024 * 1024
CAPTURE_AGE_MAX_S: Final = 24 * 3600.0


def capture_stream_config(subjects: Subjects) -> StreamConfig:
    """Configuration of the stream of captured requests: a ring that all proxies share and that outlives them."""
    return StreamConfig(
        name=subjects.capture_stream,
        description="Captured requests of endpoints, redacted; may be deleted at any time",
        subjects=[subjects.captures],
        max_bytes=CAPTURE_BYTES_MAX,
        max_age=CAPTURE_AGE_MAX_S,
        max_msgs_per_subject=CAPTURES_MAX,
        discard=DiscardPolicy.OLD,
        storage=StorageType.FILE,
        allow_direct=True,
    )


class EventStream:
    """Publishes the events of one term.

    It uses plain publishes without acknowledgements, because events are for people. Current subscribers receive them,
    the stream on the same subjects retains them, and a bus that is slow or unavailable costs events and never delays a
    decision.
    """

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
        """Next time to check that the stream exists, by the loop's clock."""
        self._drops = RateLimitedLogger(_log.warning, _LOG_EVERY_S)
        self._failures = RateLimitedLogger(_log.warning, _LOG_EVERY_S)

    def start(self) -> None:
        """Start sending, and create the streams of events and captures if they are missing."""
        self._wake.set()
        self._tasks.start(self._run(), name="send")

    def reopen(self) -> None:
        """Must be called after every reconnect of the client: the server may have lost the stream."""
        self._check_at = 0.0
        self._wake.set()

    async def close(self) -> None:
        """Send the queued events if that takes little time, and stop."""
        self._is_closed = True
        await self._tasks.close(timeout_s=1.0)
        try:
            async with asyncio.timeout(1.0):
                await self._send_queued()
        except (NatsError, OSError, TimeoutError) as error:
            _log.warning("events_not_sent", error=repr(error), events=len(self._queue))
        self._queue.clear()

    def publish_event(self, subject_kind: str, subject: str, payload: bytes) -> None:
        """Queue an event to be published; returns at once and never raises."""
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
            await self._ensure_streams()
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

    async def _ensure_streams(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._check_at:
            return
        self._check_at = now + STREAM_CHECK_S
        manager = self._client.jetstream(timeout=_STREAM_TIMEOUT_S)
        try:
            async with asyncio.timeout(_STREAM_TIMEOUT_S):
                for config in (stream_config(self._subjects), capture_stream_config(self._subjects)):
                    try:
                        await manager.stream_info(str(config.name))
                    except NotFoundError:
                        await manager.add_stream(config)
                        _log.info("stream_created", stream=config.name)
        except (NatsError, OSError, TimeoutError) as error:
            # Events are sent all the same, to current subscribers.
            self._failures.log(now, "stream_missing", error=repr(error))

    def _drop(self, reason: str, subject: str) -> None:
        self.dropped += 1
        now = asyncio.get_running_loop().time()
        self._drops.log(now, "event_dropped", reason=reason, subject=subject[:200], dropped=self.dropped)


async def recent_events(client: Client, subjects: Subjects, limit: int) -> list[EventView]:
    """The newest retained events, the oldest first; empty when they cannot be read in time."""
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
            views.append(msgspec.json.decode(message.data, type=EventView))
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

    async def on_message(message: Msg) -> None:
        newest.append(message)
        if message.metadata.num_pending == 0:
            is_read.set()

    # A push consumer: the library's pulls cost a task for each message and wait for a full batch.
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox, cb=on_message)
    try:
        consumer = ConsumerConfig(
            deliver_subject=inbox,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            # Sequences have gaps where a subject exceeded its limit, so start further back.
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
