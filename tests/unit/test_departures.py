"""What threads wait for ends with the caller of their request; with a real replica's sides and the real router."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from structlog.testing import capture_logs

from muster.handles import RequestCancelled
from serve_common.protocol.frames import CancelHead, ErrorHead
from serve_common.runtime.request_context import DisconnectPropagation
from tests.unit.handle_world import World, call, make_world, stream
from tests.unit.replica_rig import Request, Rig


class Begun:
    def __init__(self) -> None:
        self.cancels = 0

    def cancel(self) -> None:
        self.cancels += 1


def test_what_a_request_has_begun_is_cancelled_once_and_what_it_begins_later_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve_common.runtime.request_context.DISCONNECTED_MAX", 1)
    known = DisconnectPropagation()
    first, other, ended, late, after = (Begun() for _ in range(5))
    known.watch(b"a", first)
    known.watch(b"a", ended)
    known.watch(b"b", other)
    known.forget(b"a", ended)
    known.leave(b"a")
    known.watch(b"a", late)
    known.forget(b"a", first)
    known.leave(b"c")  # and the first one is forgotten
    known.watch(b"a", after)

    assert [one.cancels for one in (first, other, ended, late, after)] == [1, 0, 0, 1, 0]
    known.forget(b"a", after)
    known.forget(b"b", other)
    assert len(known) == 0


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> DisconnectPropagation:
    """The rigs give their requests the same keys again and again, which no router does."""
    known = DisconnectPropagation()
    monkeypatch.setattr("muster.handles.calls.disconnect_propagation", known)
    monkeypatch.setattr("serve_replica_host.replica.user.executor.disconnect_propagation", known)
    return known


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(monkeypatch, "default/a")


def rig_of(function: Any, way: str) -> Rig:
    """A replica that runs ``function`` in a thread."""
    if way == "framework":
        return Rig(application=Starlette(routes=[Route("/x", function, methods=["POST"])]))
    if way == "own thread":

        async def handler(request: Any) -> Any:
            return await asyncio.to_thread(function, request)

        return Rig(handler)
    return Rig(function)


async def left(world: World, rig: Rig, request: Request) -> None:
    await world.sent()
    with capture_logs() as logs:
        request.send(CancelHead())
        await rig.idle()
        await world.settle()
    assert logs == []


@pytest.mark.parametrize("way", ["plain method", "framework", "own thread"])
async def test_a_thread_that_waits_for_a_call_hears_that_its_caller_has_left(world: World, way: str) -> None:
    raised: asyncio.Queue[Exception] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def waits(request: Any) -> PlainTextResponse:
        unawaited = call(world.handle())
        for _ in range(2):  # the second one never leaves
            try:
                call(world.handle()).result()
            except RequestCancelled as error:
                loop.call_soon_threadsafe(raised.put_nowait, error)
        with pytest.raises(RequestCancelled):
            unawaited.result()
        return PlainTextResponse("nobody reads it")

    rig = rig_of(waits, way)
    await left(world, rig, rig.begin("/app/x"))

    for _ in range(2):
        assert isinstance(await asyncio.wait_for(raised.get(), 30), RequestCancelled)
    assert CancelHead() in world.told


async def test_a_thread_that_reads_a_stream_hears_it_too(world: World) -> None:
    ended: list[str] = []

    def reads(request: Any) -> None:
        try:
            for _ in stream(world.handle()):
                pass
        except RequestCancelled:
            ended.append("cancelled")

    rig = Rig(reads)
    await left(world, rig, rig.begin())
    assert ended == ["cancelled"]


async def test_the_deadline_of_a_request_ends_what_its_thread_waits_for(world: World) -> None:
    def waits(request: Any) -> Any:
        return call(world.handle()).result()

    rig = Rig(waits)
    request = rig.begin(timeout_s=60)
    await world.sent()
    for exchange in rig.bus_side._exchanges.values():
        exchange.deadline = 0.0
    rig.bus_side.sweep()

    assert isinstance((await request.frame())[0], ErrorHead)
    await rig.idle()
    await world.settle()
    assert world.told == [CancelHead()]


async def test_an_answered_request_leaves_nothing_behind(world: World, known: DisconnectPropagation) -> None:
    def asks(request: Any) -> Any:
        return call(world.handle()).result()

    rig = Rig(asks)
    request = rig.begin()
    (await world.sent()).answer("ok")

    assert (await request.answer()).body == b"ok"
    await rig.idle()
    assert len(known) == 0
    assert world.is_idle
