"""A controller that stands by costs the database little; one that stood still knows that it may lead no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from serve_common.errors import PermanentError
from serve_common.names import ControllerId
from serve_common.runtime.tasks import TaskOwner
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.shell import leadership
from serve_controller.shell.leadership import Leadership
from tests.simulation.twins.memory_store import MemoryStore

ONE, TWO = ControllerId("one"), ControllerId("two")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RENEW_EVERY_S", "STANDBY_POLL_S", "STORE_RETRY_S"):
        monkeypatch.setattr(leadership, name, 0.01)


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
        async with asyncio.timeout(30):
            while getattr(self.store, name) < count:  # noqa: ASYNC110 - it happens in the leadership's own loop
                await asyncio.sleep(0.005)


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
    async with asyncio.timeout(30):
        while not world.failures:  # noqa: ASYNC110 - the task reports its failure and nothing else
            await asyncio.sleep(0.005)
    assert isinstance(world.failures[0], PermanentError)
    assert not world.leads.is_set()
    assert world.store.lease_expires_at == float("-inf"), "the next one leads at once"


async def test_a_store_that_hangs_for_longer_than_the_lease_is_away_and_no_reason_to_doubt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks it waits all that time, and yet this process does not stand still."""
    monkeypatch.setattr(leadership, "BEAT_S", 0.01)
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
        beat_at = world.leadership._beat_at
        async with asyncio.timeout(30):
            while world.leadership._beat_at == beat_at:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.005)
        assert world.leadership.is_sure
    assert world.leadership.is_store_slow
    assert not world.lost.is_set()
    answers.set()
    async with asyncio.timeout(30):
        while world.leadership.is_store_slow:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
    assert world.leadership.is_sure
