"""Uploaded code in a real Postgres and a real bucket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from nats.js.errors import NotFoundError

from serve_common.nats.client import close_nats
from serve_common.protocol.code import PAGE_BYTES_MAX, digest_code, split
from serve_common.protocol.subjects import Subjects
from serve_controller.adapters.code_bucket import JetStreamCodeBucket
from serve_controller.adapters.postgres_store import PostgresStore
from serve_controller.shell.code_store import CodeStore
from tests.support.servers.nats_server import NatsServer, connected
from tests.support.servers.postgres_server import PostgresServer

CODE = bytes(range(256)) * (PAGE_BYTES_MAX // 256) + b"end"
DIGEST = digest_code(CODE)
SUBJECTS = Subjects("serve")


@pytest.fixture
async def rows(postgres_server: PostgresServer) -> AsyncIterator[PostgresStore]:
    dsn, password = await postgres_server.make_database()
    store = PostgresStore(dsn, password, application_name="muster-test")
    await store.migrate()
    yield store
    await store.close()


async def add(rows: PostgresStore, data: bytes) -> str:
    digest, pages = digest_code(data), split(data)
    for number, page in enumerate(pages):
        await rows.add_code_page(digest, number, page)
    await rows.complete_code(digest, len(pages))
    return digest


async def test_rows_keep_code_and_what_is_named(rows: PostgresStore) -> None:
    await rows.add_code_page(DIGEST, 0, b"first try")
    assert await rows.touch_code([DIGEST]) == set()
    assert await rows.code_pages(DIGEST) == 0
    assert await add(rows, CODE) == DIGEST
    assert await rows.touch_code([DIGEST, "f" * 64]) == {DIGEST}
    assert await rows.code_pages(DIGEST) == 2
    assert b"".join([await rows.read_code_page(DIGEST, page) or b"" for page in range(2)]) == CODE
    assert await rows.read_code_page(DIGEST, 2) is None
    other = await add(rows, b"other")
    await rows.add_code_page("0" * 64, 0, b"given up")
    assert await rows.trim_code([DIGEST], 3600) == []
    assert await rows.trim_code([DIGEST], 0) == [other]
    assert await rows.read_code_page("0" * 64, 0) is None
    assert await rows.read_code_page(other, 0) is None
    assert await rows.code_pages(DIGEST) == 2


async def test_the_bucket_is_filled_from_the_rows_and_again_when_it_was_lost(
    rows: PostgresStore, server: NatsServer
) -> None:
    client = await connected(server, SUBJECTS)
    try:
        bucket = JetStreamCodeBucket(client, SUBJECTS)
        assert not await bucket.has_code(DIGEST, 2)
        await bucket.drop_code(DIGEST)
        await add(rows, CODE)
        store = CodeStore(rows, bucket)
        await store.publish([DIGEST])
        assert await bucket.has_code(DIGEST, 2)
        stream = client.jetstream()
        message = await stream.get_msg(SUBJECTS.code_bucket, subject=SUBJECTS.code(DIGEST, 1), direct=True)
        assert message.data == b"\0end"
        assert message.headers is not None
        assert message.headers["Muster-Pages"] == "2"
        await stream.delete_stream(SUBJECTS.code_bucket)
        await store.publish([DIGEST], again=True)
        assert await bucket.has_code(DIGEST, 2)
        await bucket.drop_code(DIGEST)
        assert not await bucket.has_code(DIGEST, 2)
        with pytest.raises(NotFoundError):
            await stream.get_msg(SUBJECTS.code_bucket, subject=SUBJECTS.code(DIGEST, 1), direct=True)
    finally:
        await close_nats(client)
