"""Who leads: gained when free, kept, lost, gained again, and given back."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from serve_common.errors import CheckpointUnreadable, FencedOut, StoreUnavailable
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
        monkeypatch.setattr(leadership, name, 0.005)


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
    async with asyncio.timeout(30.0):
        while leader.epoch is not None:  # noqa: ASYNC110 - it happens in the leader's own loop
            await asyncio.sleep(0.005)
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
    async with asyncio.timeout(30.0):
        while store.lease_expires_at == until:  # noqa: ASYNC110 - it happens in the leader's own loop
            await asyncio.sleep(0.005)
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
