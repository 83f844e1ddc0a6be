"""What every `Store` must do, asked of the real one and of the simulation's twin alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import asyncpg
import msgspec
import pytest

from serve_common.api.views import GoalStatus, HistoryView
from serve_common.errors import CheckpointUnreadable, FencedOut, StoreUnavailable
from serve_common.names import BackendTag, ControllerId, GoalId, HostId, replica_tag
from serve_controller.adapters import postgres_store
from serve_controller.adapters.postgres_store import PostgresStore
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import (
    Counters,
    Goal,
    GoalKind,
    HostRecord,
    ObjectChanges,
    ObjectKind,
    Replica,
    ReplicaState,
    get_key,
)
from serve_controller.ports import HistoryEntry, Store
from tests.support.memory_store import MemoryStore
from tests.support.servers.postgres_server import PostgresServer

pytestmark = pytest.mark.timeout(180)

A, B = ControllerId("a"), ControllerId("b")
TTL_S = 600.0


class World(Protocol):
    """A store with what a test must do behind its back."""

    store: Store

    def another(self) -> Store:
        """The same database as another controller reaches it."""

    async def expire_lease(self) -> None: ...

    async def go_back(self) -> None:
        """As where a dump was restored that was made one write ago, in the same term."""

    async def row_versions(self) -> dict[tuple[str, str], object]:
        """Something per row that changes whenever the row is written."""

    async def history(self) -> list[tuple[str, str, str | None, Any]]:
        """Verb, subject, goal id and request, oldest first."""

    async def spoil_rows(self, kind: str) -> None:
        """Give the rows of a kind a schema version from the future."""


class MemoryWorld:
    def __init__(self) -> None:
        self.time = 1000.0
        self.store = MemoryStore(lambda: self.time)

    def another(self) -> Store:
        return self.store

    async def expire_lease(self) -> None:
        self.time += TTL_S

    async def go_back(self) -> None:
        self.store.writes -= 1

    async def row_versions(self) -> dict[tuple[str, str], object]:
        return {key: id(row) for key, row in self.store.rows.items()}

    async def history(self) -> list[tuple[str, str, str | None, Any]]:
        return [(e.verb, e.subject, e.goal_id, json.loads(e.request)) for e in self.store.history]

    async def spoil_rows(self, kind: str) -> None:
        rows = self.store.rows
        rows.update({k: type(r)(r.kind, r.key, 99, r.value) for k, r in rows.items() if r.kind == kind})


class PostgresWorld:
    def __init__(self, dsn: str, password: str) -> None:
        self._dsn, self._password = dsn, password
        self._stores: list[PostgresStore] = []
        self.store = self.another()

    def another(self) -> PostgresStore:
        self._stores.append(PostgresStore(self._dsn, self._password, application_name="store-contract"))
        return self._stores[-1]

    async def sql(self, query: str, *arguments: object) -> list[asyncpg.Record]:
        connection = await asyncpg.connect(
            self._dsn, password=self._password, server_settings={"search_path": "muster"}
        )
        try:
            return await connection.fetch(query, *arguments)
        finally:
            await connection.close()

    async def expire_lease(self) -> None:
        await self.sql("UPDATE leader SET lease_expires_at = clock_timestamp()")

    async def go_back(self) -> None:
        await self.sql("UPDATE leader SET writes = writes - 1")

    async def row_versions(self) -> dict[tuple[str, str], object]:
        rows = await self.sql("SELECT kind, key, xmin::text FROM checkpoint_rows")
        return {(kind, key): xmin for kind, key, xmin in rows}

    async def history(self) -> list[tuple[str, str, str | None, Any]]:
        rows = await self.sql("SELECT verb, subject, goal_id, request FROM history ORDER BY id")
        return [(*row[:3], json.loads(row[3])) for row in map(tuple, rows)]

    async def spoil_rows(self, kind: str) -> None:
        await self.sql("UPDATE checkpoint_rows SET schema_version = 99 WHERE kind = $1", kind)

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time-outs are not what is shown here, and the database may stand still for a moment."""
    monkeypatch.setattr(postgres_store, "CONNECT_TIMEOUT_S", 30.0)
    monkeypatch.setattr(postgres_store, "COMMAND_TIMEOUT_S", 30.0)
    monkeypatch.setattr(postgres_store, "LEASE_TIMEOUT_S", 30.0)


@pytest.fixture(params=["memory", "postgres"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "memory":
        memory = MemoryWorld()
        await memory.store.migrate()
        yield memory
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    postgres = PostgresWorld(*await server.make_database())
    await postgres.store.migrate()
    yield postgres
    await postgres.close()


def goal(number: int, error: str = "") -> Goal:
    return Goal(
        goal_id=GoalId(f"g{number}"),
        kind=GoalKind.DEPLOY,
        subject="default/a",
        owns=["backends.default.a"],
        status=GoalStatus.FAILED if error else GoalStatus.PENDING,
        created_at=1763700000.123456,
        error=error,
    )


def replica(ordinal: int, state: ReplicaState = ReplicaState.STARTING) -> Replica:
    return Replica(
        replica_tag=replica_tag(BackendTag("default/a"), ordinal),
        backend_tag=BackendTag("default/a"),
        code_version=1,
        config_version=1,
        state=state,
        since=5.0,
    )


def put(*values: Any) -> ObjectChanges:
    return ObjectChanges(puts=values)


def entry(verb: str, request: str = "{}", goal_id: str | None = "g1") -> HistoryEntry:
    return HistoryEntry(at=1763700000.5, verb=verb, subject="default/a", goal_id=goal_id, request=request)


def noted(
    principal: str, subject: str = "default/a", old: str | None = None, new: str | None = None
) -> HistoryEntry:
    return HistoryEntry(
        at=1763700000.25,
        principal=principal,
        verb="deploy",
        subject=subject,
        goal_id="g1",
        request='{"name":"a"}',
        old=old,
        new=new,
    )


def contents(checkpoint: Checkpoint) -> dict[object, object]:
    return {get_key(value): value for value in checkpoint.all_objects()}


def with_counters(*values: Any) -> dict[object, object]:
    return contents(Checkpoint().applied(put(*values)))


async def lead(store: Store, controller_id: ControllerId = A) -> int:
    epoch = await store.acquire_leadership(controller_id, TTL_S)
    assert epoch is not None
    return epoch


async def test_a_new_store_holds_the_empty_checkpoint(world: World):
    assert contents(await world.store.load()) == contents(Checkpoint())


async def test_what_was_recorded_is_loaded_by_everybody(world: World):
    epoch = await lead(world.store)
    values = [
        goal(1),
        replica(1),
        replica(2),
        HostRecord(host_id=HostId("h1"), generation=7),
        Counters(goal=1),
    ]
    await world.store.record(epoch, put(*values))
    assert contents(await world.store.load()) == with_counters(*values)
    assert contents(await world.another().load()) == with_counters(*values)


async def test_a_second_record_replaces_and_deletes(world: World):
    epoch = await lead(world.store)
    await world.store.record(epoch, put(goal(1), replica(1), replica(2)))
    running = replica(1, ReplicaState.RUNNING)
    gone = (ObjectKind.REPLICA, replica(2).replica_tag)
    await world.store.record(
        epoch, ObjectChanges(puts=(running,), deletes=(gone, (ObjectKind.GOAL, "never-was")))
    )
    assert contents(await world.store.load()) == with_counters(goal(1), running)


async def test_a_change_writes_its_own_rows_only(world: World):
    epoch = await lead(world.store)
    await world.store.record(epoch, put(goal(1), *map(replica, range(1, 50))))
    before = await world.row_versions()
    await world.store.record(epoch, put(replica(7, ReplicaState.RUNNING)))
    after = await world.row_versions()
    assert {key for key in after if after[key] != before[key]} == {("replica", "default/a#7")}
    assert len(after) == len(before)


async def test_an_empty_change_is_recorded_as_nothing(world: World):
    epoch = await lead(world.store)
    await world.store.record(epoch, ObjectChanges())
    assert await world.row_versions() == {}
    assert await world.history() == []


async def test_the_same_record_twice_is_as_once(world: World):
    epoch = await lead(world.store)
    changes = ObjectChanges(puts=(goal(1),), deletes=((ObjectKind.GOAL, "g0"),))
    await world.store.record(epoch, changes)
    await world.store.record(epoch, changes)
    assert contents(await world.store.load()) == with_counters(goal(1))


@pytest.mark.parametrize(
    "text", ["nul \0 in it", "lone \udcff surrogate", "\U0001f600 '; DROP TABLE leader; --"]
)
async def test_any_text_can_be_recorded(world: World, text: str):
    epoch = await lead(world.store)
    request = json.dumps({"user_config": {"note": text}})
    await world.store.record(epoch, put(goal(1, error=text)), [entry("deploy", request)])
    loaded = (await world.store.load()).goals[GoalId("g1")]
    assert loaded.error == text.encode("utf-8", "backslashreplace").decode()
    assert [note["user_config"]["note"] for *_, note in await world.history()] == [text]


async def test_history_is_written_with_its_change_and_in_order(world: World):
    epoch = await lead(world.store)
    notes = [entry("deploy", '{"name":"a","n":1.0}'), entry("delete_deployment", goal_id=None)]
    await world.store.record(epoch, put(goal(1)), notes)
    await world.store.record(epoch, ObjectChanges(), [entry("deploy", "[1]")])
    assert await world.history() == [
        ("deploy", "default/a", "g1", {"name": "a", "n": 1.0}),
        ("delete_deployment", "default/a", None, {}),
        ("deploy", "default/a", "g1", [1]),
    ]


async def test_history_is_read_as_it_was_written(world: World):
    epoch = await lead(world.store)
    await world.store.record(epoch, ObjectChanges(), [noted("ann", new='{"n":[1,2.5,null]}')])
    await world.store.record(
        epoch, ObjectChanges(), [noted("", old="[]", new="{}"), entry("delete", goal_id=None)]
    )
    views = await world.another().read_history(10, None, None)
    assert [view.id for view in views] == sorted({view.id for view in views}, reverse=True)
    third, second, first = views
    assert first == HistoryView(
        id=first.id,
        at=1763700000.25,
        principal="ann",
        epoch=epoch,
        verb="deploy",
        subject="default/a",
        goal_id=GoalId("g1"),
        request={"name": "a"},
        old=None,
        new={"n": [1, 2.5, None]},
    )
    assert (second.principal, second.old, second.new) == ("", [], {})
    assert (third.verb, third.at, third.goal_id, third.old, third.new) == (
        "delete",
        1763700000.5,
        None,
        None,
        None,
    )


async def test_history_is_read_page_by_page_and_by_subject(world: World):
    epoch = await lead(world.store)
    notes = [noted(f"w{number}", subject=f"default/{'ab'[number % 2]}") for number in range(7)]
    for note in notes:
        await world.store.record(epoch, ObjectChanges(), [note])
    read = world.store.read_history

    newest = await read(3, None, None)
    assert [view.principal for view in newest] == ["w6", "w5", "w4"]
    assert [view.principal for view in await read(3, None, newest[-1].id)] == ["w3", "w2", "w1"]
    of_b = await read(2, "default/b", None)
    assert [view.principal for view in of_b] == ["w5", "w3"]
    assert [view.principal for view in await read(2, "default/b", of_b[-1].id)] == ["w1"]
    assert await read(5, "default/nobody", None) == []
    assert await read(5, None, (await read(7, None, None))[-1].id) == []
    assert len(await read(500, None, 2**63 - 1)) == 7


async def test_a_page_of_history_fits_one_message_and_the_next_goes_on(world: World):
    epoch = await lead(world.store)
    large = json.dumps("x" * 300_000)
    notes = [noted("w0", old=large), noted("w1", new=large), noted("w2", old=large, new=large)]
    giant = [noted("giant", old=json.dumps("y" * 900_000))]
    await world.store.record(epoch, ObjectChanges(), [*notes, *giant])
    seen, before = [], None
    while views := await world.store.read_history(500, None, before):
        seen.append([view.principal for view in views])
        before = views[-1].id
    assert seen == [["giant"], ["w2"], ["w1", "w0"]]


async def test_history_that_no_json_can_hold_is_read_with_escapes(world: World):
    epoch = await lead(world.store)
    await world.store.record(
        epoch, ObjectChanges(), [entry("deploy", '{"a\\udcff":"nul \\u0000 \\ud83d\\ude00"}')]
    )
    [view] = await world.store.read_history(1, None, None)
    assert view.request == {"a\\udcff": "nul \0 \U0001f600"}
    msgspec.json.encode(view)


async def test_a_fenced_record_writes_nothing(world: World):
    old = await lead(world.store)
    await world.store.record(old, put(goal(1)), [entry("first")])
    await world.expire_lease()
    new_leader = world.another()
    new = await lead(new_leader, B)
    assert new > old

    changes = ObjectChanges(puts=(goal(2), goal(1, "overwritten")), deletes=((ObjectKind.GOAL, "g1"),))
    with pytest.raises(FencedOut):
        await world.store.record(old, changes, [entry("second")])
    with pytest.raises(FencedOut):
        await world.store.record(new + 1, changes, [entry("third")])

    assert contents(await new_leader.load()) == with_counters(goal(1))
    assert [verb for verb, *_ in await world.history()] == ["first"]
    await new_leader.record(new, put(goal(2)))


async def test_a_second_controller_waits_until_the_lease_is_over(world: World):
    first = await lead(world.store)
    other = world.another()
    assert await other.acquire_leadership(B, TTL_S) is None
    assert await other.acquire_leadership(B, TTL_S) is None
    await world.expire_lease()
    second = await lead(other, B)
    assert second > first
    assert await world.store.acquire_leadership(A, TTL_S) is None


async def test_an_epoch_can_be_asked_to_be_above_what_others_have_seen(world: World):
    first = await lead(world.store)
    second = await world.store.acquire_leadership(A, TTL_S, 1000)
    assert second == 1001
    assert await world.store.acquire_leadership(A, TTL_S, first) == 1002


async def test_a_leader_whose_last_write_is_not_there_any_more_leads_no_more(world: World):
    epoch = await lead(world.store)
    await world.store.record(epoch, put(goal(1)))
    await world.store.renew_leadership(A, epoch, TTL_S)
    await world.go_back()
    with pytest.raises(FencedOut):
        await world.store.renew_leadership(A, epoch, TTL_S)
    before = await world.row_versions()
    with pytest.raises(FencedOut):
        await world.store.record(epoch, put(goal(2)))
    assert await world.row_versions() == before
    again = await lead(world.store)
    await world.store.record(again, put(goal(2)))
    await world.store.renew_leadership(A, again, TTL_S)


@pytest.mark.parametrize("world", ["postgres"], indirect=True)
async def test_who_has_an_epoch_that_a_restored_database_gave_to_another_writes_nothing(world: PostgresWorld):
    """Nothing but the term itself was lost. The simulation asks the same of its twin."""
    await world.store.record(await lead(world.store), put(goal(1)))
    epoch = await lead(world.store)
    await world.sql("UPDATE leader SET epoch = epoch - 1, lease_expires_at = clock_timestamp()")
    other = world.another()
    assert await lead(other, B) == epoch
    before = await world.row_versions()
    with pytest.raises(FencedOut):
        await world.store.record(epoch, put(goal(2)))
    assert await world.row_versions() == before
    await other.record(epoch, put(goal(2)))


@pytest.mark.parametrize("world", ["postgres"], indirect=True)
async def test_a_controller_never_leads_twice_with_one_epoch_though_the_database_went_back(
    world: PostgresWorld,
):
    """Else what its former term has under way would be written into the new one. The simulation asks the same."""
    first = await lead(world.store)
    await world.sql("UPDATE leader SET epoch = epoch - 1")
    with pytest.raises(FencedOut):
        await world.store.renew_leadership(A, first, TTL_S)
    again = await lead(world.store)
    assert again > first
    with pytest.raises(FencedOut):
        await world.store.record(first, put(goal(1)))
    await world.store.record(again, put(goal(2)))


async def test_of_many_that_want_to_lead_exactly_one_does(world: World):
    stores = [world.another() for _ in range(5)]
    epochs = await asyncio.gather(
        *(store.acquire_leadership(ControllerId(f"c{i}"), TTL_S) for i, store in enumerate(stores))
    )
    assert len([epoch for epoch in epochs if epoch is not None]) == 1


async def test_a_controller_that_came_back_leads_again_at_once_in_a_new_term(world: World):
    first = await lead(world.store)
    second = await lead(world.another())
    assert second > first
    with pytest.raises(FencedOut):
        await world.store.record(first, put(goal(1)))
    with pytest.raises(FencedOut):
        await world.store.renew_leadership(A, first, TTL_S)


async def test_a_renewed_lease_keeps_others_away_in_the_same_term(world: World):
    epoch = await world.store.acquire_leadership(A, 0.0)
    assert epoch is not None
    await world.store.renew_leadership(A, epoch, TTL_S)
    assert await world.another().acquire_leadership(B, TTL_S) is None
    await world.store.record(epoch, put(goal(1)))


async def test_who_was_replaced_cannot_renew(world: World):
    old = await lead(world.store)
    await world.expire_lease()
    new = await lead(world.another(), B)
    with pytest.raises(FencedOut):
        await world.store.renew_leadership(A, old, TTL_S)
    with pytest.raises(FencedOut):
        await world.store.renew_leadership(A, new, TTL_S)


async def test_a_lease_that_is_over_but_not_taken_can_be_renewed(world: World):
    epoch = await lead(world.store)
    await world.expire_lease()
    await world.store.renew_leadership(A, epoch, TTL_S)
    assert await world.another().acquire_leadership(B, TTL_S) is None


async def test_it_is_the_term_that_fences_not_the_lease(world: World):
    epoch = await lead(world.store)
    await world.expire_lease()
    await world.store.record(epoch, put(goal(1)))
    assert contents(await world.store.load()) == with_counters(goal(1))


async def test_a_released_lease_lets_the_next_one_in_at_once(world: World):
    old = await lead(world.store)
    await world.store.release_leadership(A, old)
    assert await lead(world.another(), B) > old


async def test_who_was_replaced_releases_nothing(world: World):
    old = await lead(world.store)
    await world.expire_lease()
    other = world.another()
    await lead(other, B)
    await world.store.release_leadership(A, old)
    assert await world.store.acquire_leadership(A, TTL_S) is None


async def test_a_row_from_the_future_makes_the_checkpoint_unreadable(world: World):
    epoch = await lead(world.store)
    await world.store.record(epoch, put(goal(1), replica(1)))
    await world.spoil_rows("replica")
    with pytest.raises(CheckpointUnreadable, match=r"row replica 'default/a#1': .*99"):
        await world.store.load()


async def test_migrating_again_changes_nothing(world: World):
    epoch = await lead(world.store)
    await world.store.record(epoch, put(goal(1)))
    await world.store.migrate()
    await world.another().migrate()
    assert contents(await world.store.load()) == with_counters(goal(1))
    await world.store.renew_leadership(A, epoch, TTL_S)


def every_call(store: Store) -> Sequence[Any]:
    return [
        store.migrate(),
        store.acquire_leadership(A, TTL_S),
        store.renew_leadership(A, 1, TTL_S),
        store.release_leadership(A, 1),
        store.load(),
        store.record(1, put(goal(2))),
        store.read_history(1, None, None),
    ]


async def test_the_twin_that_is_down_does_nothing():
    world = MemoryWorld()
    await lead(world.store)
    world.store.available = False
    for call in every_call(world.store):
        with pytest.raises(StoreUnavailable):
            await call
    world.store.available = True
    assert contents(await world.store.load()) == contents(Checkpoint())


async def test_the_twin_that_loses_answers_does_its_work():
    world = MemoryWorld()
    epoch = await lead(world.store)
    world.store.loses_answers = True
    with pytest.raises(StoreUnavailable):
        await world.store.record(epoch, put(goal(1)))
    world.store.loses_answers = False
    assert contents(await world.store.load()) == with_counters(goal(1))


async def test_the_twin_never_suspends():
    world = MemoryWorld()
    for call in every_call(world.store):
        with pytest.raises((StopIteration, FencedOut)):
            call.send(None)
