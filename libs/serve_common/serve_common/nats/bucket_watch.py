"""Follows the bucket of snapshots without a JetStream consumer; and a router's connection for it.

Why no consumer, as nats-py's own watch has: JetStream delivers to any subject that the creator of a consumer names,
regardless of permissions, so only the controller may create one. The bucket's stream republishes every change instead
(``republish``), and a watch starts by reading everything with batched direct gets (ADR-31), page by page.

A change is reported only if it directly follows everything reported before. Any gap (a message was lost; the stream
was lost, restored or purged) is found at the next change or the next check of the stream's state, and then everything
is read again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, final

import msgspec
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from serve_common.errors import BusUnavailable
from serve_common.nats.client import close_nats, connect_nats
from serve_common.nats.options import Login
from serve_common.protocol.snapshots import Snapshot, SnapshotListener
from serve_common.protocol.subjects import UNREADABLE, Subjects
from serve_common.runtime.settings import BusSettings
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_lines import RefusedMessages

_log = structlog.get_logger()

POSITION_CHECK_S: Final = 2.0
"""Seconds between comparisons of the watch's position with the stream's."""
_RETRY_WAIT_S: Final = 0.25
_TIMEOUT_S: Final = 3.0
"""Seconds from a request to its first response, and between two messages of a response."""
_PAGE_MESSAGES: Final = 1_000
_PAGE_BYTES: Final = 4 * 1024 * 1024
_BUFFERED_MAX: Final = 10_000
_BUFFERED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Limits of the changes buffered during a full read; beyond them the read starts again."""

Entries = Mapping[str, tuple[int, bytes | None]]
"""Revision and value by key; None for a deleted key."""
OnEntries = Callable[[Entries, bool], None]
"""Called with changed entries; the second argument is true when they are everything the bucket holds."""
OpenBucket = Callable[[], Awaitable[None]]


class _Change(msgspec.Struct, frozen=True):
    """One message of the bucket's stream."""

    key: str
    sequence: int
    previous: int
    """The previous sequence as the server reports it: of the same key, for a message that was just published."""
    value: bytes | None


class _State(msgspec.Struct):
    last_seq: int = 0
    num_subjects: int = 0
    """Number of keys, deleted ones included: the bucket keeps one message for each."""


class _Stream(msgspec.Struct):
    """The response of `$JS.API.STREAM.INFO`."""

    created: str = ""
    state: _State = msgspec.field(default_factory=_State)
    error: dict[str, object] | None = None


class _ResponseCollector:
    """Collects the messages of one response, until ``is_last`` is true of one."""

    def __init__(self, is_last: Callable[[Msg], bool]) -> None:
        self.messages: list[Msg] = []
        self.came = asyncio.Event()
        self.is_complete = False
        self._is_last = is_last

    async def take(self, message: Msg) -> None:
        """Subscription callback."""
        self.messages.append(message)
        self.is_complete = self.is_complete or self._is_last(message)
        self.came.set()


def _ends_page(message: Msg) -> bool:
    """A status ends a page of direct gets; a message outside a page is the only response of an old server."""
    return "Status" in _headers(message) or "Nats-Num-Pending" not in _headers(message)


def _is_state_response(message: Msg) -> bool:
    """False for the error of our own account without JetStream, sent when the stream is another account's."""
    return b'"err_code":10039' not in message.data.replace(b" ", b"")


def _headers(message: Msg) -> Mapping[str, str]:
    return message.headers or {}


class BucketWatch:
    """Reports the contents of the bucket of snapshots to a listener, until it is closed."""

    def __init__(
        self, client: Client, subjects: Subjects, on_entries: OnEntries, open_bucket: OpenBucket | None = None
    ) -> None:
        """``open_bucket`` may create the bucket; by default a missing one is waited for."""
        self._client = client
        self._bucket = subjects.bucket
        self._snapshots: Final = subjects.snapshots
        self._stream = f"KV_{subjects.bucket}"
        self._on_entries = on_entries
        self._open_bucket = open_bucket
        self._owner = TaskOwner(f"bucket_watch {subjects.bucket}")
        self._subscription: Subscription | None = None
        self._must_reread = asyncio.Event()
        """Everything must be read again."""
        self._created = ""
        """Creation time of the stream that was read."""
        self._position = 0
        """Everything up to this sequence was reported."""
        self._keys: dict[str, int] = {}
        """The last reported sequence of each key."""
        self._buffered: dict[int, _Change] | None = {}
        """Changes by sequence that arrived during a full read; None while each is reported at once."""
        self._buffered_bytes = 0
        self._is_closed = False

    def start(self) -> None:
        """Start watching."""
        self._owner.start(self._run(), name="watch")

    async def close(self) -> None:
        """Stop watching."""
        self._is_closed = True
        self._must_reread.set()
        await self._owner.close(timeout_s=_TIMEOUT_S)
        if self._subscription is not None:
            with contextlib.suppress(NatsError, OSError):  # with the connection it is gone anyway
                await self._subscription.unsubscribe()

    def reopen(self) -> None:
        """Read everything again, as is needed after every reconnect of the client."""
        if self._buffered is None:
            self._buffered, self._buffered_bytes = {}, 0
        self._must_reread.set()

    async def _run(self) -> None:
        failures = 0
        # A flag beside the cancellation: in Python 3.11 `wait_for`, in which the library waits for responses, loses a
        # cancellation that comes together with one.
        while not self._is_closed:
            self._must_reread.clear()
            try:
                await self._read()
                failures = 0
                await self._follow()
            except (NatsError, OSError, TimeoutError, BusUnavailable, *UNREADABLE) as error:
                failures += 1
                if failures in (1, 20):
                    _log.warning(
                        "bucket_watch_failed", bucket=self._bucket, error=repr(error), failures=failures
                    )
            except Exception:  # noqa: BLE001 - logged, and restarted
                # A defect here or in the listener, or a response that the library does not expect. A watch that
                # ended would stay silent for ever; one that restarts reports everything again.
                failures += 1
                _log.exception("bucket_watch_failed", bucket=self._bucket, failures=failures)
            await asyncio.sleep(_RETRY_WAIT_S)

    async def _read(self) -> None:
        """Read everything and report it, with the changes that arrived meanwhile."""
        self._buffered, self._buffered_bytes = {}, 0  # what came before is in the stream by now
        async with asyncio.timeout(2 * _TIMEOUT_S):
            if self._subscription is None:
                self._subscription = await self._client.subscribe(self._snapshots, cb=self._on_message)
            if self._open_bucket is not None:
                await self._open_bucket()
            stream = await self._get_state()
        entries: dict[str, tuple[int, bytes | None]] = {}
        # A key that changed after the read began, before its page was read, is not among the pages; its change was
        # buffered.
        position = await self._read_pages(entries)
        if position == self._position and stream.created == self._created:
            # Read to the same end again, so that what was behind it was purged, and is not late.
            position = max(position, stream.state.last_seq)
        for sequence, change in sorted(self._buffered.items()):
            if sequence == position + 1:
                entries[change.key] = (sequence, change.value)
                position = sequence
            elif sequence > position:
                raise BusUnavailable(f"the change {position + 1} of the bucket was not heard")
        if len(entries) < stream.state.num_subjects:
            raise BusUnavailable(f"of {stream.state.num_subjects} keys {len(entries)} could be read")
        if self._is_closed or self._must_reread.is_set():
            return
        self._created, self._position = stream.created, position
        self._keys = {key: sequence for key, (sequence, _) in entries.items()}
        self._buffered = None
        self._on_entries(entries, True)  # noqa: FBT003 - OnEntries

    async def _read_pages(self, entries: dict[str, tuple[int, bytes | None]]) -> int:
        """Fill ``entries``; returns the last sequence that was read, 0 for none."""
        position = 0
        while True:
            *messages, end = await self._page(position + 1)
            for message in messages:
                change = self._parse_change(message)
                if change is None or change.sequence <= position:
                    raise BusUnavailable("a direct get was answered by what was not asked for")
                position = change.sequence
                entries[change.key] = (position, change.value)
            headers = _headers(end)
            if headers.get("Status") == "404" or headers.get("Nats-Num-Pending") == "0":
                return position
            if headers.get("Status") != "204" or not messages:
                raise BusUnavailable(
                    f"the bucket cannot be read: {dict(headers)} (it must allow direct gets, "
                    "and nats-server be 2.11 or newer)"
                )

    async def _page(self, sequence: int) -> list[Msg]:
        """The next messages of the stream, beginning with ``sequence``, and the one that ends them."""
        request = {
            "seq": sequence,
            "next_by_subj": f"$KV.{self._bucket}.>",
            "batch": _PAGE_MESSAGES,
            "max_bytes": _PAGE_BYTES,
        }
        subject = f"$JS.API.DIRECT.GET.{self._stream}"
        return await self._request(subject, msgspec.json.encode(request), _ends_page)

    async def _request(self, subject: str, request: bytes, is_last: Callable[[Msg], bool]) -> list[Msg]:
        collector = _ResponseCollector(is_last)
        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe(inbox, cb=collector.take)
        try:
            await self._client.publish(subject, request, reply=inbox)
            while not collector.is_complete:
                collector.came.clear()
                async with asyncio.timeout(_TIMEOUT_S):
                    await collector.came.wait()
        finally:
            await subscription.unsubscribe()
        return collector.messages

    async def _follow(self) -> None:
        """Compare the position with the stream's now and then, until everything must be read again."""
        behind_at: int | None = None
        while not self._must_reread.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POSITION_CHECK_S):
                    await self._must_reread.wait()
                return
            position, count = self._position, len(self._keys)
            stream = await self._get_state()
            last = stream.state.last_seq
            # Behind once, a change may be in flight; behind twice at the same position, it will not come. And fewer
            # keys than were reported mean that some were purged, which publishes nothing.
            is_stuck = last > self._position and behind_at == self._position
            is_other = stream.created != self._created or last < position or stream.state.num_subjects < count
            if is_other or is_stuck:
                _log.warning("bucket_watch_out_of_step", bucket=self._bucket, position=position, last=last)
                return
            behind_at = self._position if last > self._position else None

    async def _on_message(self, message: Msg) -> None:
        """Subscription callback: a change that the stream published."""
        try:
            change = self._parse_change(message)
            if change is None or message.subject != self._snapshots.replace(">", change.key):
                # Any client may direct JetStream's responses into these subjects; those are not changes.
                _log.debug("bucket_watch_foreign_message", subject=message.subject)
            elif self._buffered is not None:
                self._buffer(self._buffered, change)
            else:
                self._apply(change)
        except Exception:  # noqa: BLE001 - logged, and restarted, as in `_run`
            _log.exception("bucket_watch_failed", bucket=self._bucket)
            self.reopen()

    def _buffer(self, buffered: dict[int, _Change], change: _Change) -> None:
        self._buffered_bytes += len(change.value or b"")
        if len(buffered) >= _BUFFERED_MAX or self._buffered_bytes > _BUFFERED_BYTES_MAX:
            buffered.clear()
            self._buffered_bytes = 0
            self._must_reread.set()
            return
        buffered[change.sequence] = change

    def _apply(self, change: _Change) -> None:
        known = self._keys.get(change.key, 0)
        if change.sequence == known:
            return  # a copy republished by a client that may read it
        if change.sequence != self._position + 1 or change.previous != known:
            _log.warning(
                "bucket_watch_out_of_step",
                bucket=self._bucket,
                position=self._position,
                buffered=change.sequence,
            )
            self.reopen()
            assert self._buffered is not None
            self._buffer(self._buffered, change)
            return
        self._position = self._keys[change.key] = change.sequence
        self._on_entries({change.key: (change.sequence, change.value)}, False)  # noqa: FBT003 - OnEntries

    def _parse_change(self, message: Msg) -> _Change | None:
        """The change in a message; None unless JetStream made it from a message of this bucket."""
        headers = _headers(message)
        prefix = f"$KV.{self._bucket}."
        subject = headers.get("Nats-Subject", "")
        if headers.get("Nats-Stream") != self._stream or not subject.startswith(prefix):
            return None
        is_deleted = "KV-Operation" in headers or "Nats-Marker-Reason" in headers
        return _Change(
            key=subject.removeprefix(prefix),
            sequence=int(headers.get("Nats-Sequence", "0")),
            previous=int(headers.get("Nats-Last-Sequence", "0")),
            value=None if is_deleted else message.data,
        )

    async def _get_state(self) -> _Stream:
        """The stream's current state. Raises `BusUnavailable` when it does not exist."""
        collector = await self._request(f"$JS.API.STREAM.INFO.{self._stream}", b"", _is_state_response)
        if "Status" in _headers(collector[-1]):
            raise BusUnavailable("JetStream does not answer")
        stream = msgspec.json.decode(collector[-1].data, type=_Stream)
        if stream.error is not None:
            raise BusUnavailable(f"the bucket is not there: {stream.error}")
        return stream


class SnapshotWatch:
    """A `BucketWatch` whose values are snapshots; a value that cannot be understood is left out and logged."""

    def __init__(
        self, client: Client, subjects: Subjects, listener: SnapshotListener, refused: RefusedMessages
    ) -> None:
        self._listener = listener
        self._refused = refused
        self._watch = BucketWatch(client, subjects, self._on_message)
        self._decoder = msgspec.json.Decoder(Snapshot)

    def start(self) -> None:
        """Start watching."""
        self._watch.start()

    def reopen(self) -> None:
        """Read everything again, as is needed after every reconnect of the client."""
        self._watch.reopen()

    async def close(self) -> None:
        """Stop watching."""
        await self._watch.close()

    def _on_message(self, entries: Entries, whole: bool) -> None:  # noqa: FBT001 - OnEntries
        snapshots: dict[str, Snapshot | None] = {}
        for key, (_revision, value) in entries.items():
            if value is None:
                snapshots[key] = None
                continue
            try:
                snapshots[key] = self._decoder.decode(value)
            except UNREADABLE as error:
                self._refused.refuse("snapshot", key, error)
        self._listener.on_snapshots(snapshots, whole=whole)


_CONNECT_ROUND_S: Final = 10.0
"""Seconds of failed attempts after which a warning is logged; attempts continue."""


@final
class BucketConnection:
    """A connection that reports the contents of the bucket of snapshots to a listener while it is open."""

    def __init__(
        self,
        settings: BusSettings,
        *,
        name: str,
        login: Login | None = None,
        listener: SnapshotListener,
        on_closed: Callable[[], None],
        on_reconnect: Callable[[], None] | None = None,
        refused: RefusedMessages | None = None,
    ) -> None:
        """``login`` overrides ``settings``. ``on_closed`` is called when the connection is closed for good.
        ``refused`` counts snapshots that cannot be read.
        """
        self._refused = RefusedMessages(asyncio.get_running_loop().time) if refused is None else refused
        self.client: Client | None = None
        """None until it is connected for the first time."""
        self.reconnects = 0
        self._settings = settings
        self._name = name
        self._login = login
        self._listener = listener
        self._on_closed = on_closed
        self._on_reconnect = on_reconnect
        self._watch: SnapshotWatch | None = None
        self._is_closing = False

    async def open(self) -> Client:
        """Connect, however long that takes, and start watching. Raises `BusAuthorizationFailed`.

        Why without a deadline: a router may start before NATS, and must then serve as soon as it can, unaided.
        """
        while self.client is None:
            try:
                self.client = await connect_nats(
                    self._settings,
                    name=self._name,
                    deadline_s=_CONNECT_ROUND_S,
                    login=self._login,
                    on_reconnect=self._reconnected,
                    on_closed=self._closed,
                )
            except BusUnavailable as error:
                _log.warning("nats_unavailable", reason=str(error))
        subjects = Subjects(self._settings.subject_prefix)
        self._watch = SnapshotWatch(self.client, subjects, self._listener, self._refused)
        self._watch.start()
        return self.client

    async def close(self) -> None:
        """Stop watching and disconnect."""
        self._is_closing = True
        if self._watch is not None:
            await self._watch.close()
        if self.client is not None and not self.client.is_closed:
            await close_nats(self.client)

    def _reconnected(self) -> None:
        self.reconnects += 1
        if self._watch is not None:
            self._watch.reopen()
        if self._on_reconnect is not None:
            self._on_reconnect()

    def _closed(self) -> None:
        if not self._is_closing:
            self._on_closed()
