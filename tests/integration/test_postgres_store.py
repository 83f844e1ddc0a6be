"""What only a real database can show: its loss, its locks, its schema. See test_store_contract.py for the rest."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest

from serve_common.errors import FencedOut, PermanentError, StoreUnavailable
from serve_common.names import ControllerId, HostId
from serve_controller.adapters import postgres_store
from serve_controller.adapters.postgres_store import MIGRATIONS, Migration, PostgresStore
from serve_controller.core.objects import HostRecord, ObjectChanges
from serve_controller.ports import HistoryEntry
from tests.support.servers.postgres_server import PostgresServer

pytestmark = pytest.mark.timeout(180)

A, B = ControllerId("a"), ControllerId("b")
NAME = "store-under-test"
PATIENCE_S = 30.0


def host(generation: int, name: str = "h1") -> ObjectChanges:
    return ObjectChanges(puts=(HostRecord(host_id=HostId(name), generation=generation),))


async def generation(store: PostgresStore) -> int:
    return (await store.load()).hosts[HostId("h1")].generation


@contextlib.asynccontextmanager
async def connected(dsn: str, password: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn, password=password, server_settings={"search_path": "muster"})
    try:
        yield connection
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def store_on(dsn: str, password: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(dsn, password, application_name=NAME)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The database may stand still for a moment. Where a time-out is what is shown, it is set, far below these."""
    monkeypatch.setattr(postgres_store, "CONNECT_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(postgres_store, "COMMAND_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(postgres_store, "LEASE_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
async def database(postgres_server: PostgresServer) -> tuple[str, str]:
    return await postgres_server.make_database()


@pytest.fixture
async def store(database: tuple[str, str]) -> AsyncIterator[PostgresStore]:
    async with store_on(*database) as store:
        await store.migrate()
        yield store


@pytest.fixture
async def observer(database: tuple[str, str], store: PostgresStore) -> AsyncIterator[asyncpg.Connection]:
    """A connection of the same role, after the schema was made."""
    async with connected(*database) as connection:
        yield connection


@contextlib.contextmanager
def unavailable() -> Iterator[None]:
    """It is known long before the time-outs of `patient`, however busy the machine is."""
    began = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        yield
    assert time.monotonic() - began < PATIENCE_S / 2
    assert caught.value.__cause__ is not None, "chained to what the driver said"


async def waiting_backends(observer: asyncpg.Connection, count: int = 1) -> list[int]:
    """The backends of the stores, once that many of them wait for a lock."""
    query = "SELECT pid FROM pg_stat_activity WHERE application_name = $1 AND wait_event_type = 'Lock'"
    async with asyncio.timeout(20):
        while True:
            pids = [pid for (pid,) in await observer.fetch(query, NAME)]
            if len(pids) == count:
                return pids
            await asyncio.sleep(0.01)  # Postgres tells nobody that a backend waits


# -- the schema


async def test_the_role_needs_no_superuser_rights(store: PostgresStore, observer: asyncpg.Connection):
    assert await observer.fetchval("SELECT rolsuper FROM pg_roles WHERE rolname = current_user") is False
    tables = await observer.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'muster'")
    assert {name for (name,) in tables} == {
        "checkpoint_rows",
        "code",
        "code_pages",
        "history",
        "leader",
        "schema_migrations",
    }


async def test_controllers_that_migrate_at_the_same_moment_do_it_once(database: tuple[str, str]):
    async with contextlib.AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(store_on(*database)) for _ in range(4)]
        await asyncio.gather(*(store.migrate() for store in stores))
        connection = await stack.enter_async_context(connected(*database))
        versions = await connection.fetch("SELECT version FROM schema_migrations ORDER BY version")
        assert [version for (version,) in versions] == [migration.version for migration in MIGRATIONS]
        assert await connection.fetchval("SELECT count(*) FROM leader") == 1


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (
            "INSERT INTO schema_migrations (version, name) VALUES (97, 'future')",
            "1 initial, 2 code, 97 future; ",
        ),
        ("UPDATE schema_migrations SET name = 'checkpoint' WHERE version = 1", "1 checkpoint, 2 code; "),
    ],
    ids=["newer than the code", "of other code with the same number"],
)
async def test_a_database_of_another_version_is_refused_unchanged(
    store: PostgresStore, observer: asyncpg.Connection, made: str, shown: str
):
    await observer.execute(made)
    before = await observer.fetch("SELECT version, name FROM schema_migrations")
    with pytest.raises(PermanentError, match=rf"{shown}.*1 initial, 2 code\).* an empty database"):
        await store.migrate()
    assert await observer.fetch("SELECT version, name FROM schema_migrations") == before


async def test_a_migration_that_fails_leaves_nothing_of_itself(
    store: PostgresStore, database: tuple[str, str], observer: asyncpg.Connection
):
    next_version = len(MIGRATIONS) + 1
    broken = Migration(next_version, "broken", "CREATE TABLE muster.half (); SELECT 1/0")
    later = PostgresStore(*database, application_name=NAME, migrations=[*MIGRATIONS, broken])
    with pytest.raises(asyncpg.DivisionByZeroError):
        await later.migrate()
    assert await observer.fetchval("SELECT to_regclass('half')") is None
    await store.migrate()

    fixed = Migration(next_version, "fixed", "CREATE TABLE muster.half ()")
    await PostgresStore(*database, application_name=NAME, migrations=[*MIGRATIONS, fixed]).migrate()
    assert await observer.fetchval("SELECT max(version) FROM schema_migrations") == next_version


# -- the fence


async def test_a_record_waits_for_a_takeover_in_progress_and_is_then_fenced_out(
    store: PostgresStore, observer: asyncpg.Connection, database: tuple[str, str]
):
    epoch = await store.acquire_leadership(A, 60)
    await store.record(epoch, host(1))
    async with connected(*database) as successor:
        async with successor.transaction():
            await successor.execute("UPDATE leader SET epoch = epoch + 1, controller_id = 'b'")
            recording = asyncio.gather(store.record(epoch, host(2)), return_exceptions=True)
            await waiting_backends(observer)
        [outcome] = await recording
    assert isinstance(outcome, FencedOut)
    assert await generation(store) == 1


async def test_a_takeover_waits_for_a_record_in_progress(
    store: PostgresStore, observer: asyncpg.Connection, database: tuple[str, str]
):
    """Otherwise the new leader could load a checkpoint that the old one then still changes."""
    epoch = await store.acquire_leadership(A, 0)
    await store.record(epoch, host(1))
    async with connected(*database) as blocker, store_on(*database) as standby:
        async with blocker.transaction():
            await blocker.execute("SELECT FROM checkpoint_rows FOR UPDATE")
            recording = asyncio.gather(store.record(epoch, host(2)), return_exceptions=True)
            await waiting_backends(observer)
            takeover = asyncio.gather(standby.acquire_leadership(B, 60))
            await waiting_backends(observer, 2)
        assert await recording == [None]
        assert await takeover == [epoch + 1]
        assert await generation(standby) == 2


# -- bounds


async def test_only_the_newest_history_is_kept(
    store: PostgresStore, observer: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(postgres_store, "HISTORY_ROWS_MAX", 5)
    monkeypatch.setattr(postgres_store, "HISTORY_TRIM_EVERY", 3)
    epoch = await store.acquire_leadership(A, 60)
    for number in range(20):
        note = HistoryEntry(at=1.0, verb=f"v{number}", subject="s", goal_id=None, request="{}")
        await store.record(epoch, ObjectChanges(), [note])
    kept = [verb for (verb,) in await observer.fetch("SELECT verb FROM history ORDER BY id")]
    assert kept[-5:] == ["v15", "v16", "v17", "v18", "v19"]
    assert len(kept) <= 5 + 3


async def test_a_record_that_is_blocked_gives_up_in_time_and_has_written_nothing(
    store: PostgresStore, database: tuple[str, str], monkeypatch: pytest.MonkeyPatch
):
    async with store_on(*database) as impatient, connected(*database) as blocker:
        epoch = await store.acquire_leadership(A, 60)
        with monkeypatch.context() as patch:
            patch.setattr(postgres_store, "COMMAND_TIMEOUT_S", 1.2)
            async with blocker.transaction():
                await blocker.execute("SELECT FROM leader FOR UPDATE")
                with unavailable():
                    await impatient.record(epoch, host(1))
        assert not (await store.load()).hosts
        async with asyncio.timeout(PATIENCE_S):
            while not await is_recorded(impatient, epoch, host(2)):
                pass  # its time-out is short for what nobody blocks, too
        assert await generation(store) == 2


async def is_recorded(store: PostgresStore, epoch: int | None, changes: ObjectChanges) -> bool:
    assert epoch is not None
    try:
        await store.record(epoch, changes)
    except StoreUnavailable:
        return False
    return True


# -- the database goes away


async def test_a_wrong_password_or_database_is_for_a_person_to_correct(database: tuple[str, str]):
    dsn, password = database
    for store in (
        PostgresStore(dsn, "wrong", application_name=NAME),
        PostgresStore(dsn + "_missing", password, application_name=NAME),
        PostgresStore("postgresql://127.0.0.1:not-a-port/x", password, application_name=NAME),
    ):
        with pytest.raises(PermanentError) as caught:
            await store.load()
        assert password not in str(caught.value)
        with pytest.raises(PermanentError):
            await store.migrate()
        await store.close()


async def test_a_closed_store_is_unavailable(store: PostgresStore):
    await store.load()
    await store.close()
    await store.close()
    with pytest.raises(StoreUnavailable):
        await store.load()


async def test_a_backend_that_is_killed_in_the_middle_of_a_record_is_an_unavailable_store(
    store: PostgresStore, observer: asyncpg.Connection, database: tuple[str, str]
):
    epoch = await store.acquire_leadership(A, 60)
    await store.record(epoch, host(1))
    async with connected(*database) as blocker, blocker.transaction():
        await blocker.execute("SELECT FROM checkpoint_rows FOR UPDATE")
        recording = asyncio.gather(store.record(epoch, host(2)), return_exceptions=True)
        [pid] = await waiting_backends(observer)
        assert await observer.fetchval("SELECT pg_terminate_backend($1)", pid)
        [outcome] = await recording
    assert isinstance(outcome, StoreUnavailable)
    assert await generation(store) == 1
    await store.record(epoch, host(3))
    assert await generation(store) == 3


async def test_the_store_works_again_after_postgres_was_killed_and_came_back(
    breakable_postgres: PostgresServer,
):
    await asyncio.to_thread(breakable_postgres.start)
    database = await breakable_postgres.make_database()
    async with store_on(*database) as store, store_on(*database) as never_connected:
        await store.migrate()
        epoch = await store.acquire_leadership(A, 60)
        await store.record(epoch, host(1))
        await asyncio.gather(*(store.load() for _ in range(4)))  # fills the pool

        await asyncio.to_thread(breakable_postgres.kill)
        for each in (store, never_connected):
            for call in (
                each.load(),
                each.record(epoch, host(2)),
                each.renew_leadership(A, epoch, 60),
                each.acquire_leadership(A, 60),
                each.release_leadership(A, epoch),
                each.migrate(),
            ):
                with unavailable():
                    await call

        await asyncio.to_thread(breakable_postgres.start)
        for each in (store, never_connected):
            assert await generation(each) == 1
        await store.renew_leadership(A, epoch, 60)
        await store.record(epoch, host(2))
        assert await generation(never_connected) == 2


async def test_a_frozen_postgres_is_unavailable_in_bounded_time_and_works_again(
    breakable_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
):
    await asyncio.to_thread(breakable_postgres.start)
    database = await breakable_postgres.make_database()
    async with store_on(*database) as store, store_on(*database) as other:
        await store.migrate()
        await other.load()
        epoch = await store.acquire_leadership(A, 60)
        await asyncio.gather(*(store.load() for _ in range(4)))

        breakable_postgres.freeze()
        try:
            with monkeypatch.context() as impatient:  # not before: what it is to answer may take it longer
                impatient.setattr(postgres_store, "CONNECT_TIMEOUT_S", 0.5)
                impatient.setattr(postgres_store, "CLOSE_TIMEOUT_S", 0.5)
                impatient.setattr(postgres_store, "LEASE_TIMEOUT_S", 0.5)
                with unavailable():
                    await store.renew_leadership(A, epoch, 60)
                with unavailable():  # a new connection is not made either
                    await store.renew_leadership(A, epoch, 60)
                with unavailable():
                    await store.migrate()
                async with asyncio.timeout(PATIENCE_S / 2):
                    await other.close()
        finally:
            breakable_postgres.thaw()

        await store.renew_leadership(A, epoch, 60)
        await store.record(epoch, host(1))
        assert await generation(store) == 1
