"""Following a NATS key-value bucket without ever going silent.

Why not nats-py's watch alone: after the NATS server restarts, its ephemeral ordered consumer is gone and the watch
stays silent for ever, without an error. So this one opens a new watch after every reconnect, and every few seconds
compares its position with the bucket's last sequence. Each newly opened watch begins with everything the bucket holds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec
import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.kv import KeyValue

from serve_common.ports import SnapshotListener
from serve_common.tasks import TaskOwner
from serve_common.wires.snapshots import Snapshot

_log = structlog.get_logger()

POSITION_CHECK_S: Final = 2.0
"""How stale a silent watch can get before it is noticed."""
_RETRY_WAIT_S: Final = 0.25
_TIMEOUT_S: Final = 3.0

Entries = Mapping[str, tuple[int, bytes | None]]
"""Revision and value by key; None for a deleted key."""
OnEntries = Callable[[Entries, bool], None]
"""Told of changed entries; the second argument says that this is everything the bucket holds."""
OpenBucket = Callable[[], Awaitable[KeyValue]]


class BucketWatch:
    """Tells a listener what a bucket holds, for ever."""

    def __init__(
        self, client: Client, bucket: str, on_entries: OnEntries, open_bucket: OpenBucket | None = None
    ) -> None:
        """``open_bucket`` may create the bucket; by default a missing one is waited for."""
        self._client = client
        self._bucket = bucket
        self._on_entries = on_entries
        self._open_bucket = open_bucket or self._existing_bucket
        self._reopen = asyncio.Event()
        self._scope: asyncio.Timeout | None = None
        self._owner = TaskOwner(f"bucket_watch {bucket}")
        self._position = 0
        self._keys: set[str] = set()
        """Every key of which this watch has seen a value or a deletion; the bucket keeps one message for each."""
        self._is_closed = False

    async def _existing_bucket(self) -> KeyValue:
        return await self._client.jetstream(timeout=_TIMEOUT_S).key_value(self._bucket)

    def start(self) -> None:
        """Begin to watch."""
        self._owner.start(self._run(), name="watch")

    async def close(self) -> None:
        """Stop watching."""
        self._is_closed = True
        await self._owner.close(timeout_s=_TIMEOUT_S)

    def reopen(self) -> None:
        """Open the watch anew, as is needed after every reconnect of the client."""
        self._reopen.set()
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def _run(self) -> None:
        failures = 0
        # A flag beside the cancellation: in Python 3.11 `wait_for`, in which the library waits for entries, loses a
        # cancellation that comes together with an entry.
        while not self._is_closed:
            self._reopen.clear()
            try:
                await self._watch_once()
                failures = 0
            except (NatsError, OSError, TimeoutError) as error:
                failures += 1
                if failures in (1, 20):
                    _log.warning(
                        "bucket_watch_failed", bucket=self._bucket, error=repr(error), failures=failures
                    )
            except Exception:  # noqa: BLE001 - logged, and begun anew
                # A defect here or in the listener, or an answer that the library does not expect. A watch that
                # ended would be silent for ever; one that begins anew tells everything again.
                failures += 1
                _log.exception("bucket_watch_failed", bucket=self._bucket, failures=failures)
            await asyncio.sleep(_RETRY_WAIT_S)

    async def _watch_once(self) -> None:
        """Open a watch and follow it until it must be opened anew."""
        async with asyncio.timeout(2 * _TIMEOUT_S):
            bucket = await self._open_bucket()
            last, messages = await self._state_of(bucket)
            watcher = await bucket.watchall()
        try:
            # Everything up to ``last`` is in what the watch begins with, or was purged from the bucket.
            await self._read_whole(watcher, last, is_empty=messages == 0)
            await self._follow_until_reopened(bucket, watcher)
        finally:
            try:
                async with asyncio.timeout(1.0):
                    await watcher.stop()
            except (NatsError, OSError, TimeoutError) as error:
                # Its consumer may be gone with the server; the server forgets it by itself.
                _log.debug("bucket_watch_stop_failed", bucket=self._bucket, error=repr(error))

    async def _read_whole(self, watcher: KeyValue.KeyWatcher, position: int, *, is_empty: bool) -> None:
        entries: dict[str, tuple[int, bytes | None]] = {}
        self._keys.clear()
        is_told_early = is_last = False
        while not is_last:
            entry = await watcher.updates(timeout=_TIMEOUT_S)
            if entry is None:
                # The library also says that this was everything when the server has sent all and nothing has come yet,
                # for what is sent and that it was sent come on two ways. Then the last entry says that it is the last.
                if is_empty or entries:
                    break
                is_told_early = True
                continue
            is_last = is_told_early and entry.delta == 0
            position = max(position, entry.revision or 0)
            self._keys.add(entry.key)
            value = None if entry.operation is not None else entry.value or b""
            entries[entry.key] = (entry.revision or 0, value)
            if self._is_closed:
                return
        self._position = position
        self._on_entries(entries, True)  # noqa: FBT003 - see OnEntries

    async def _follow_until_reopened(self, bucket: KeyValue, watcher: KeyValue.KeyWatcher) -> None:
        try:
            async with asyncio.timeout(None) as self._scope:
                if not self._reopen.is_set():
                    await self._follow(bucket, watcher)
        except TimeoutError:
            if not self._reopen.is_set():
                raise
        finally:
            self._scope = None

    async def _follow(self, bucket: KeyValue, watcher: KeyValue.KeyWatcher) -> None:
        """Hand on every entry; return when the watch turns out to be out of step with the bucket."""
        loop = asyncio.get_running_loop()
        behind_at: int | None = None
        check_at = loop.time() + POSITION_CHECK_S
        while not self._is_closed and not self._reopen.is_set():
            wait_s = check_at - loop.time()
            if wait_s > 0:
                # Nothing new in time: the position is checked below.
                with contextlib.suppress(NatsTimeoutError, TimeoutError):
                    self._hear(await watcher.updates(timeout=wait_s))
                continue
            position, count = self._position, len(self._keys)
            last, messages = await self._state_of(bucket)
            # Behind once, an entry may be under way; behind twice at the same place, it will not come. And fewer
            # messages than keys mean that some were purged, of which a watch is told nothing.
            is_stuck = last > position and behind_at == position
            if last < self._position or messages < count or is_stuck:
                _log.warning("bucket_watch_out_of_step", bucket=self._bucket, position=position, last=last)
                return
            behind_at = position if last > position else None
            check_at = loop.time() + POSITION_CHECK_S

    def _hear(self, entry: KeyValue.Entry | None) -> None:
        if entry is None:
            return
        self._position = max(self._position, entry.revision or 0)
        self._keys.add(entry.key)
        value = None if entry.operation is not None else entry.value or b""
        self._on_entries({entry.key: (entry.revision or 0, value)}, False)  # noqa: FBT003 - see OnEntries

    async def _state_of(self, bucket: KeyValue) -> tuple[int, int]:
        """The bucket's last sequence, and how many messages it holds."""
        async with asyncio.timeout(_TIMEOUT_S):
            status = await bucket.status()
        state = status.stream_info.state
        return int(state.last_seq), int(state.messages)


class SnapshotWatch:
    """A `BucketWatch` whose values are snapshots; a value that cannot be understood is left out and logged."""

    def __init__(self, client: Client, bucket: str, listener: SnapshotListener) -> None:
        self._listener = listener
        self._watch = BucketWatch(client, bucket, self._hear)
        self._decoder = msgspec.json.Decoder(Snapshot)

    def start(self) -> None:
        """Begin to watch."""
        self._watch.start()

    def reopen(self) -> None:
        """Open the watch anew, as is needed after every reconnect of the client."""
        self._watch.reopen()

    async def close(self) -> None:
        """Stop watching."""
        await self._watch.close()

    def _hear(self, entries: Entries, whole: bool) -> None:  # noqa: FBT001 - OnEntries
        snapshots: dict[str, Snapshot | None] = {}
        for key, (_revision, value) in entries.items():
            if value is None:
                snapshots[key] = None
                continue
            try:
                snapshots[key] = self._decoder.decode(value)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                _log.error("snapshot_unreadable", key=key, error=str(error))
        self._listener.on_snapshots(snapshots, whole=whole)
