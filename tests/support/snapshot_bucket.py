"""What the bucket of snapshots holds, as a router would read it."""

from __future__ import annotations

import contextlib

from nats.aio.client import Client
from nats.js.errors import KeyNotFoundError

from serve_common.protocol.subjects import Subjects


async def read_bucket(client: Client, subjects: Subjects) -> dict[str, bytes]:
    """The value of every key that is not deleted.

    Raises:
        NotFoundError: There is no bucket.
    """
    # Not by `keys()`, which watches: the word that a watch has told everything may come before what it tells.
    stream, prefix = f"KV_{subjects.bucket}", f"$KV.{subjects.bucket}."
    context = client.jetstream()
    held = (await context.stream_info(stream, subjects_filter=f"{prefix}>")).state.subjects
    kv = await context.key_value(subjects.bucket)
    found = {}
    for key in (subject.removeprefix(prefix) for subject in held or ()):
        with contextlib.suppress(KeyNotFoundError):  # deleted, and only its deletion is there
            found[key] = (await kv.get(key)).value or b""
    return found
