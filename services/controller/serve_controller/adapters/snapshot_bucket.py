"""The bucket that carries snapshots to the routers: what it holds comes in, what it should hold goes out.

Why watched by the leader too: the bucket may be lost or restored by itself, and only what is known to be in it is
known to reach the routers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

import msgspec
import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError
from nats.js.api import KeyValueConfig, RePublish, StorageType
from nats.js.errors import NotFoundError
from nats.js.kv import KeyValue

from serve_common.adapters.bucket_watch import BucketWatch, Entries
from serve_common.errors import BusUnavailable, LimitReached
from serve_common.subjects import Subjects
from serve_common.wires.snapshots import Snapshot
from serve_common.wires.unreadable import UNREADABLE

_log = structlog.get_logger()

BUCKET_BYTES_MAX = 256 * 1024 * 1024
_TIMEOUT_S = 2.0


def bucket_config(subjects: Subjects) -> KeyValueConfig:
    """The bucket as it is made: routers read it by direct gets, and hear what changes from its republish."""
    return KeyValueConfig(
        bucket=subjects.bucket,
        history=1,
        max_bytes=BUCKET_BYTES_MAX,
        storage=StorageType.FILE,
        direct=True,
        republish=RePublish(src=f"$KV.{subjects.bucket}.>", dest=subjects.snapshots),
    )


class OnBucket(Protocol):
    """Who is told what the bucket holds."""

    def __call__(self, entries: Mapping[str, tuple[int, int | None]], *, whole: bool) -> None:
        """Revision and snapshot id by key."""
        ...


class SnapshotBucket:
    """Implements `serve_controller.ports.Publisher`, and tells what the bucket holds."""

    def __init__(self, client: Client, subjects: Subjects, on_bucket: OnBucket) -> None:
        """``on_bucket`` is called between `watch` and `end_watch`."""
        self._client = client
        self._subjects = subjects
        self._on_bucket = on_bucket
        self._bucket: KeyValue | None = None
        self._watch: BucketWatch | None = None

    def watch(self) -> None:
        """Open the bucket, make it where it is missing, and begin to tell what it holds."""
        self._watch = BucketWatch(self._client, self._subjects, self._hear, self._open)
        self._watch.start()

    async def end_watch(self) -> None:
        """Tell no more."""
        if self._watch is not None:
            await self._watch.close()
            self._watch = None

    def reopen(self) -> None:
        """Must be called after every reconnect of the client."""
        if self._watch is not None:
            self._watch.reopen()

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

    async def _open(self) -> None:
        stream = self._client.jetstream(timeout=_TIMEOUT_S)
        try:
            bucket = await stream.key_value(self._subjects.bucket)
            await self._let_routers_read()
        except NotFoundError:
            bucket = await stream.create_key_value(bucket_config(self._subjects))
        self._bucket = bucket

    async def _let_routers_read(self) -> None:
        """Bring the stream of a bucket that was made otherwise up to `bucket_config`, as far as routers need it.

        Not by the library, which would leave out what it does not know of a stream's configuration.
        """
        stream = f"KV_{self._subjects.bucket}"
        answer = await self._client.request(f"$JS.API.STREAM.INFO.{stream}", timeout=_TIMEOUT_S)
        config = msgspec.json.decode(answer.data).get("config")
        if config is None:
            raise NotFoundError(description=f"there is no stream {stream}")
        republish = {"src": f"$KV.{self._subjects.bucket}.>", "dest": self._subjects.snapshots}
        wanted = config | {"allow_direct": True, "republish": republish}
        if wanted == config:
            return
        request = msgspec.json.encode(wanted)
        answer = await self._client.request(f"$JS.API.STREAM.UPDATE.{stream}", request, timeout=_TIMEOUT_S)
        error = msgspec.json.decode(answer.data).get("error")
        if error is not None:
            raise BusUnavailable(
                f"the bucket {self._subjects.bucket} does not tell routers what changes: {error}"
            )
        _log.info("bucket_updated", bucket=self._subjects.bucket)

    def _hear(self, entries: Entries, whole: bool) -> None:  # noqa: FBT001 - OnEntries
        heard: dict[str, tuple[int, int | None]] = {}
        for key, (revision, value) in entries.items():
            heard[key] = (revision, None if value is None else _snapshot_id(key, value))
        self._on_bucket(heard, whole=whole)


def _snapshot_id(key: str, value: bytes) -> int:
    """The id in a bucket's value; 0 for what cannot be read, so that it is put right."""
    try:
        return msgspec.json.decode(value, type=Snapshot).snapshot_id
    except UNREADABLE as error:
        _log.warning("snapshot_unreadable", key=key, error=str(error))
        return 0
