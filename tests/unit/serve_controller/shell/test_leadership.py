"""Who leads: gained when free, kept, lost, gained again, and given back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from serve_common.errors import CheckpointUnreadable, FencedOut, PermanentError, StoreUnavailable
from serve_common.names import ControllerId
from serve_common.runtime.tasks import TaskOwner
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.shell import leadership
from serve_controller.shell.leadership import Leadership
from tests.support.memory_store import MemoryStore
from tests.support.waiting import eventually

ONE, TWO = ControllerId("one"), ControllerId("two")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RENEW_EVERY_S", "STANDBY_POLL_S", "STORE_RETRY_S"):
        monkeypatch.setattr(leadership, name, 0.01)


class Leading:
    """Counts terms; each lasts until it is ended."""

    def __init__(self) -> None:
        self.epochs: asyncio.Queue[int] = asyncio.Queue()
        self.ended: asyncio.Queue[int] = asyncio.Queue()

    async def __call__(self, epoch: int, checkpoint: Checkpoint) -> None:
        assert checkpoint.counters is not None
        self.epochs.put_nowait(epoch)
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.put_nowait(epoch)


def store_of_now() -> MemoryStore:
    return MemoryStore(asyncio.get_running_loop().time)


async def next_of(queue: asyncio.Queue[int]) -> int:
    async with asyncio.timeout(30.0):
        return await queue.get()


async def test_one_of_two_leads_and_the_other_takes_over_at_once_when_it_stops() -> None:
    store, first, second = store_of_now(), Leading(), Leading()
    one, two = TaskOwner("one"), TaskOwner("two")
    one.start(Leadership(ONE, store, first).run(), "run")
    assert await next_of(first.epochs) == 1
    two.start(Leadership(TWO, store, second).run(), "run")
    await one.close(timeout_s=20.0)
    assert await next_of(first.ended) == 1
    assert await next_of(second.epochs) == 2
    assert first.epochs.empty()
    await two.close(timeout_s=20.0)


async def test_a_fenced_leader_ends_its_term_and_stands_by_until_the_lease_is_free() -> None:
    store, leading, tasks = store_of_now(), Leading(), TaskOwner("one")
    leader = Leadership(ONE, store, leading)
    tasks.start(leader.run(), "run")
    assert await next_of(leading.epochs) == 1
    store.controller_id, store.epoch, store.lease_expires_at = TWO, 2, float("inf")
    assert await next_of(leading.ended) == 1
    await eventually(lambda: leader.epoch is None)
    await asyncio.sleep(0.02)
    assert leading.epochs.empty()
    store.lease_expires_at = float("-inf")
    assert await next_of(leading.epochs) == 3
    await tasks.close(timeout_s=20.0)


async def test_a_store_that_is_away_ends_no_term_and_delays_the_first() -> None:
    store, leading, tasks = store_of_now(), Leading(), TaskOwner("one")
    store.available = False
    tasks.start(Leadership(ONE, store, leading).run(), "run")
    await asyncio.sleep(0.03)
    assert leading.epochs.empty()
    store.available = True
    assert await next_of(leading.epochs) == 1
    store.available = False
    await asyncio.sleep(0.03)
    assert leading.ended.empty()
    await tasks.close(timeout_s=20.0)
    assert len(tasks) == 0, "nor does it keep the process from stopping"


async def test_a_new_epoch_within_the_term_is_what_is_renewed_from_then_on() -> None:
    store, leading, tasks = store_of_now(), Leading(), TaskOwner("one")
    leader = Leadership(ONE, store, leading)
    tasks.start(leader.run(), "run")
    await next_of(leading.epochs)
    assert await leader.regain() == 2
    until = store.lease_expires_at
    await eventually(lambda: store.lease_expires_at != until)
    assert leader.epoch == 2
    assert leading.ended.empty()
    store.controller_id, store.lease_expires_at = TWO, float("inf")
    with pytest.raises(FencedOut):
        await leader.regain()
    await tasks.close(timeout_s=20.0)


async def test_an_unreadable_checkpoint_ends_the_controller_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of_now()

    async def unreadable() -> Checkpoint:
        raise CheckpointUnreadable("row backend default/a")

    monkeypatch.setattr(store, "load", unreadable)
    with pytest.raises(CheckpointUnreadable):
        await Leadership(ONE, store, Leading()).run()


async def test_a_lost_answer_while_loading_is_tried_again_under_a_higher_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, leading, tasks, load = store_of_now(), Leading(), TaskOwner("one"), None
    load = store.load
    calls = 0

    async def fails_once() -> Checkpoint:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise StoreUnavailable("gone")
        return await load()

    monkeypatch.setattr(store, "load", fails_once)
    tasks.start(Leadership(ONE, store, leading).run(), "run")
    assert await next_of(leading.epochs) == 2
    await tasks.close(timeout_s=20.0)


async def test_who_waits_for_the_store_ends_also_when_its_cancellation_is_lost_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drivers lose one that comes together with a result."""
    store, tasks, asked = store_of_now(), TaskOwner("one"), asyncio.Event()

    async def loses_it(*_: object) -> None:
        asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    monkeypatch.setattr(store, "acquire_leadership", loses_it)
    running = tasks.start(Leadership(ONE, store, Leading()).run(), "run")
    async with asyncio.timeout(30.0):
        await asked.wait()
    monkeypatch.setattr(store, "acquire_leadership", holds_another)
    await tasks.close(timeout_s=20.0)
    assert running.is_done


async def holds_another(*_: object) -> None:
    """Another controller leads."""


# A controller that stands by costs the database little; one that stood still knows that it may lead no more.


class CountingStore(MemoryStore):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop().time)
        self.migrations = self.acquisitions = self.renewals = 0
        self.is_too_new = False

    async def migrate(self) -> None:
        self.migrations += 1
        if self.is_too_new:
            raise PermanentError("the database is newer")

    async def acquire_leadership(
        self, controller_id: ControllerId, ttl_s: float, above: int = 0
    ) -> int | None:
        self.acquisitions += 1
        return await super().acquire_leadership(controller_id, ttl_s, above)

    async def renew_leadership(self, controller_id: ControllerId, epoch: int, ttl_s: float) -> None:
        self.renewals += 1
        await super().renew_leadership(controller_id, epoch, ttl_s)


class World:
    """One controller's leadership over a store."""

    def __init__(self) -> None:
        self.store = CountingStore()
        self.leadership = Leadership(ONE, self.store, self._lead)
        self.leads = asyncio.Event()
        self.lost = asyncio.Event()
        self.failures: list[BaseException] = []
        self.tasks = TaskOwner("world", on_failure=lambda _, error: self.failures.append(error))

    async def _lead(self, epoch: int, checkpoint: Checkpoint) -> None:
        self.leads.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.leads.clear()
            self.lost.set()

    def start(self) -> None:
        self.tasks.start(self.leadership.run(), "run")

    def another_leads(self) -> None:
        self.store.controller_id, self.store.epoch = TWO, self.store.epoch + 1
        self.store.lease_expires_at = float("inf")

    async def until_asked(self, name: str, more: int = 3) -> None:
        count = getattr(self.store, name) + more
        await eventually(lambda: getattr(self.store, name) >= count)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.tasks.close(timeout_s=2.0)


def stand_still(seconds: float = leadership.LEASE_TTL_S + 0.1) -> None:
    """As a stopped process does: the time goes on and the loop does not turn once."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds


async def test_one_that_stood_still_is_not_sure_until_the_store_has_said_so(world: World) -> None:
    world.start()
    async with asyncio.timeout(30):
        await world.leads.wait()
    assert world.leadership.is_sure
    stand_still()
    assert not world.leadership.is_sure, "known at once, before anything else runs"
    await world.until_asked("renewals", 1)
    await asyncio.sleep(0)
    assert world.leadership.is_sure
    assert not world.lost.is_set(), "nobody else led: the term goes on"


async def test_one_that_stood_still_while_another_took_over_loses_its_term_unsure(world: World) -> None:
    world.start()
    async with asyncio.timeout(30):
        await world.leads.wait()
    world.another_leads()
    stand_still()
    assert not world.leadership.is_sure
    async with asyncio.timeout(30):
        await world.lost.wait()
    assert not world.leadership.is_sure


async def test_a_store_that_is_away_is_no_reason_to_doubt_but_it_settles_no_doubt_either(
    world: World,
) -> None:
    world.start()
    async with asyncio.timeout(30):
        await world.leads.wait()
    world.store.available = False
    for _ in range(int(2 * leadership.LEASE_TTL_S)):
        stand_still(1.0)
        await world.until_asked("renewals", 2)
        assert world.leadership.is_sure
    stand_still()
    await world.until_asked("renewals", 3)
    assert not world.leadership.is_sure
    world.store.available = True
    await world.until_asked("renewals", 2)
    assert world.leadership.is_sure
    assert not world.lost.is_set()


async def test_a_standby_migrates_once_and_again_before_it_leads(world: World) -> None:
    world.another_leads()
    world.start()
    await world.until_asked("acquisitions", 5)
    assert world.store.migrations == 1
    world.store.lease_expires_at = float("-inf")
    async with asyncio.timeout(30):
        await world.leads.wait()
    assert world.store.migrations == 2


async def test_a_standby_of_an_older_version_gives_the_lease_back(world: World) -> None:
    world.another_leads()
    world.start()
    await world.until_asked("acquisitions", 2)
    world.store.is_too_new = True
    world.store.lease_expires_at = float("-inf")
    await eventually(lambda: world.failures)
    assert isinstance(world.failures[0], PermanentError)
    assert not world.leads.is_set()
    assert world.store.lease_expires_at == float("-inf"), "the next one leads at once"


async def test_a_store_that_hangs_for_longer_than_the_lease_is_away_and_no_reason_to_doubt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks it waits all that time, and yet this process does not stand still."""
    monkeypatch.setattr(leadership, "HEARTBEAT_S", 0.01)
    world.start()
    async with asyncio.timeout(30):
        await world.leads.wait()
    assert not world.leadership.is_store_slow
    answers, renew = asyncio.Event(), world.store.renew_leadership

    async def hang(*arguments: object) -> None:
        await answers.wait()
        await renew(*arguments)

    monkeypatch.setattr(world.store, "renew_leadership", hang)
    for _ in range(int(2 * leadership.LEASE_TTL_S)):
        stand_still(1.0)
        beat_at = world.leadership._heartbeat_at
        await eventually(lambda before=beat_at: world.leadership._heartbeat_at != before)
        assert world.leadership.is_sure
    assert world.leadership.is_store_slow
    assert not world.lost.is_set()
    answers.set()
    await eventually(lambda: not world.leadership.is_store_slow)
    assert world.leadership.is_sure
