"""The bucket of code in JetStream: one message for each page, under its own subject.

Why no object store of the library: reading one needs a consumer, and JetStream delivers to any subject that the creator
of a consumer names, regardless of permissions. Hosts read by direct gets, and may read nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import DiscardPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from serve_common.errors import BusUnavailable
from serve_common.protocol.code import PAGES_HEADER
from serve_common.protocol.subjects import Subjects

BYTES_MAX: Final = 1024 * 1024 * 1024
"""Largest size of the bucket; the oldest pages make room, and come back when a host misses them."""
_TIMEOUT_S: Final = 5.0
_MARK: Final = b"\0"
"""First byte of each page: JetStream could be made to send one where commands are expected, and this is no JSON."""


def code_bucket_config(subjects: Subjects) -> StreamConfig:
    """Configuration of the bucket."""
    return StreamConfig(
        name=subjects.code_bucket,
        description="Code for hosts to fetch; may be deleted at any time",
        subjects=[subjects.code("*", "*")],
        max_bytes=BYTES_MAX,
        max_msgs_per_subject=1,
        discard=DiscardPolicy.OLD,
        storage=StorageType.FILE,
        allow_direct=True,
    )


class JetStreamCodeBucket:
    """Implements `serve_controller.ports.CodeBucket`."""

    def __init__(self, client: Client, subjects: Subjects) -> None:
        self._client = client
        self._subjects = subjects

    async def has_code(self, digest: str, pages: int) -> bool:
        """Whether all pages of the code are in the bucket."""
        stream = self._client.jetstream(timeout=_TIMEOUT_S)
        with _converted_errors(digest):
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    info = await stream.stream_info(
                        self._subjects.code_bucket, subjects_filter=self._subjects.code(digest, "*")
                    )
            except NotFoundError:
                return False
        return len(info.state.subjects or {}) == pages

    async def put_code_page(self, digest: str, page: int, pages: int, data: bytes) -> None:
        """Put one page, of ``pages``; creates a missing bucket."""
        subject, headers = self._subjects.code(digest, page), {PAGES_HEADER: str(pages)}
        stream = self._client.jetstream(timeout=_TIMEOUT_S)
        with _converted_errors(digest):
            async with asyncio.timeout(_TIMEOUT_S):
                try:
                    await stream.publish(subject, _MARK + data, headers=headers)
                except NoStreamResponseError:
                    await stream.add_stream(code_bucket_config(self._subjects))
                    await stream.publish(subject, _MARK + data, headers=headers)

    async def drop_code(self, digest: str) -> None:
        """Remove all pages."""
        stream = self._client.jetstream(timeout=_TIMEOUT_S)
        with _converted_errors(digest):
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await stream.purge_stream(
                        self._subjects.code_bucket, subject=self._subjects.code(digest, "*")
                    )
            except NotFoundError:
                return


@contextmanager
def _converted_errors(digest: str) -> Iterator[None]:
    try:
        yield
    except (NatsError, APIError, OSError, TimeoutError) as error:
        raise BusUnavailable(f"the bucket of code does not answer for {digest}: {error!r}") from error
