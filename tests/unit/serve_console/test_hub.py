"""The hub: one reader for all tabs, and what it says when something is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from serve_common.api.views import BackendLoad, LoadView
from serve_common.errors import BusAuthorizationFailed, BusUnavailable, ServeError, TransientError
from serve_common.identities.roles import Role
from serve_console.shell import hub as hub_module
from serve_console.shell.hub import EVENTS_MAX, POINTS_MAX
from tests.support.console_world import ConsoleWorld, event, status
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_WATCHED_S", "_UNWATCHED_S", "_LOAD_S", "_AFTER_EVENT_S"):
        monkeypatch.setattr(hub_module, name, 0.01)


@asynccontextmanager
async def running(world: ConsoleWorld, *, events: bool = False) -> AsyncIterator[None]:
    world.shared.tasks.start(world.hub.run(), "hub")
    if events:
        world.shared.tasks.start(world.hub.follow_events(), "events")
    try:
        yield
    finally:
        await world.shared.tasks.close(1.0)


async def test_nothing_is_read_while_nobody_is_signed_in() -> None:
    world = ConsoleWorld()
    async with running(world):
        await asyncio.sleep(0.05)
    assert world.controller.requests == []


async def test_many_watchers_share_one_read_and_all_get_it() -> None:
    world = ConsoleWorld()
    await world.start_session()
    async with running(world):
        waiting = [asyncio.ensure_future(world.hub.wait_newer(0)) for _ in range(50)]  # noqa: TID251 - a test
        found = await asyncio.gather(*waiting)
        reads = world.controller.requests.count("get_status")
    assert {system.version for system in found} == {1}
    assert reads <= 2


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (BusUnavailable("no NATS"), "bus"),
        (TransientError("no controller answers"), "leader"),
        (ServeError("unreadable"), "leader"),
    ],
)
async def test_what_is_away_is_said_with_the_last_state_and_forgotten_when_it_is_back(
    failure: ServeError, kind: str
) -> None:
    world = ConsoleWorld()
    await world.start_session()
    async with running(world):
        await eventually(lambda: world.hub.system.status is not None)
        world.controller.fails = failure
        await eventually(lambda: world.hub.system.trouble is not None)
        seen = world.hub.system
        world.controller.fails = None
        await eventually(lambda: world.hub.system.trouble is None)
    assert seen.trouble is not None
    assert (seen.trouble.kind, seen.status) == (kind, world.controller.status)


async def test_a_database_that_is_away_is_trouble_that_still_comes_with_a_new_state() -> None:
    world = ConsoleWorld()
    await world.start_session()
    world.controller.status = status(store_available=False)
    async with running(world):
        await eventually(lambda: world.hub.system.trouble is not None)
    assert world.hub.system.trouble is not None
    assert world.hub.system.trouble.kind == "store"


async def test_a_reader_that_nats_refuses_ends_and_the_next_session_reads() -> None:
    world = ConsoleWorld()
    _, first = await world.start_session("ada")
    token, refused = await world.start_session("bob")
    reads = []

    async def refuse() -> None:
        reads.append("refused")
        raise BusAuthorizationFailed("NATS refused the identity")

    refused.stack.live = type("Refused", (), {"fetch_status": staticmethod(refuse)})()  # type: ignore[assignment]
    async with running(world):
        await eventually(lambda: world.hub.system.status is not None)
    assert reads == ["refused"]
    assert (first.is_over, refused.is_over, world.sessions.find(token)) == (False, True, None)
    assert world.hub.system.trouble is None


async def test_without_any_other_session_it_says_that_nats_refuses_everyone() -> None:
    world = ConsoleWorld()
    await world.start_session()
    world.controller.fails = BusAuthorizationFailed("NATS refused the identity")
    async with running(world):
        await eventually(lambda: world.hub.system.trouble is not None)
    assert world.hub.system.trouble is not None
    assert world.hub.system.trouble.kind == "refused"
    assert len(world.sessions) == 0


async def test_a_session_that_ends_while_it_reads_is_no_trouble() -> None:
    world = ConsoleWorld()
    token, session = await world.start_session("ada")
    await world.hub._read(session)

    async def end_and_fail() -> None:
        await world.sessions.end(token)
        raise BusUnavailable("the connection was closed")

    session.stack.live = type("Ending", (), {"fetch_status": staticmethod(end_and_fail)})()  # type: ignore[assignment]
    await world.hub._read(session)
    assert world.hub.system.trouble is None


async def test_events_of_the_feed_are_merged_with_those_that_the_controller_still_has() -> None:
    world = ConsoleWorld()
    world.controller.events = [event(1.0), event(3.0)]
    await world.start_session("ada", Role.VIEW)
    async with running(world, events=True):
        await eventually(lambda: len(world.hub.events) == 2)
        world.controller.published.put_nowait(msgspec.json.encode(event(4.0, "new")))
        world.controller.published.put_nowait(b"no event")
        await eventually(lambda: len(world.hub.events) == 3)
        world.controller.events = [event(3.0), event(2.0), event(4.0, "new")]
        world.hub._events_are_whole = False
        await eventually(lambda: len(world.hub.events) == 4)
    assert [each.at for each in world.hub.events] == [1.0, 2.0, 3.0, 4.0]


async def test_the_events_that_are_retained_have_a_limit() -> None:
    world = ConsoleWorld()
    _, session = await world.start_session()
    world.controller.events = [event(float(number)) for number in range(EVENTS_MAX + 50)]
    await world.hub._read_events(session)
    assert len(world.hub.events) == EVENTS_MAX
    assert world.hub.events[0].at == 50.0


def load(at: float, *names: str) -> LoadView:
    backends = [BackendLoad(backend_tag=name, in_flight=0, queued=0) for name in names]
    return LoadView(at=at, endpoints=[], backends=backends, unreachable=[])


async def test_the_history_of_loads_has_a_limit_and_drops_what_is_gone() -> None:
    world = ConsoleWorld()
    for at in range(POINTS_MAX + 10):
        world.hub._add_load(load(float(at), "default/a", "default/b"), world.controller.status)
    world.hub._add_load(load(5.0, "default/a"), world.controller.status)  # an older sample says nothing
    assert len(world.hub.history["default/a"]) == POINTS_MAX
    for at in range(1000, 1002):
        world.hub._add_load(load(float(at), "default/a"), world.controller.status)
    assert set(world.hub.history) == {"default/a"}


async def test_who_waits_is_woken_when_the_process_ends() -> None:
    world = ConsoleWorld()
    waiting = asyncio.ensure_future(world.hub.wait_newer(99))  # noqa: TID251 - a test
    await asyncio.sleep(0)
    await world.hub.close()
    assert (await waiting).version == 0
