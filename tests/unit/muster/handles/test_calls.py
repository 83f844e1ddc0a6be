"""How calls by handle end: values, exceptions, cancellation, streams; with the real router and a bus made of lists."""

from __future__ import annotations

import asyncio
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from structlog.testing import capture_logs

from muster.handles import (
    BackPressureError,
    RequestCancelledError,
)
from muster.handles.calls import HandleCall
from serve_common.errors import (
    BadField,
    DeadlineExceeded,
    LimitReached,
    UserCodeRaised,
)
from serve_common.protocol.frames import (
    CREDIT_FRAMES,
    CancelHead,
    ErrorHead,
    Raised,
    RefusedHead,
    ResponseHead,
)
from serve_common.runtime.request_context import DisconnectPropagation, RequestContext, request_context
from tests.support.handle_world import World, call, make_world, pickled_items, stream
from tests.support.replica_rig import Request, Rig


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(monkeypatch, "default/a")


# -- failures --


async def test_the_users_exception_is_raised_with_its_remote_traceback(world: World) -> None:
    response = call(world.handle())
    raised = Raised(pickle.dumps(KeyError("digit")), "Traceback: line 7")
    (await world.sent()).say(
        ErrorHead("user_code_raised", 500, "KeyError: 'digit'", 0), msgspec.msgpack.encode(raised)
    )
    for _ in range(2):
        with pytest.raises(KeyError, match="digit") as caught:
            await response
        assert caught.value.__notes__ == ["Remote traceback:\nTraceback: line 7"]


TASK_ERRORS = """
import pickle
import sys

from muster.handles.pickles import to_exception, to_replica_error
from serve_common.dispatch.errors import ReplicaError


class Strict(ValueError):
    def __init__(self, text, code):
        super().__init__(text)
        self.code = code

    def __reduce__(self):
        return Strict, (self.args[0], self.code)


def received(error):
    try:
        raise error
    except Exception as caught:
        here = to_replica_error(caught)
        assert type(to_exception(here)) is type(error), "what this process raised stays as it is"
        return to_exception(ReplicaError(here.code, here.status, str(here), here.raised))


plain = received(Strict("too many", 7))
print(type(plain) is Strict, plain.code, len(plain.__notes__))

import ray
from ray.exceptions import RayTaskError

both = received(Strict("too many", 7))
print(isinstance(both, RayTaskError), isinstance(both, Strict), both.code, type(both).__name__)
print(str(both.cause), "too many" in str(both), "in received" in str(both), len(both.__notes__))
again = received(both)
print(isinstance(again, RayTaskError), isinstance(again, Strict), "too many" in str(again))


class Final(Exception):
    def __init_subclass__(cls):
        raise TypeError("cannot be subclassed")


print(type(received(Final("as it is"))) is Final)

from serve_common.runtime import request_context

class Replica:
    is_program = False


replica = request_context.current_replica.__globals__["_current"] = Replica()
print(type(received(Strict("too many", 7))) is Strict)
replica.is_program = True
print(isinstance(received(Strict("too many", 7)), RayTaskError))
from ray.exceptions import RayActorError
from serve_common.errors import ReplicaDied

died = to_exception(ReplicaDied("it died"))
print(isinstance(died, RayActorError), isinstance(died, ReplicaDied), str(died))
print(type(pickle.loads(pickle.dumps(died))) is ReplicaDied)
from muster.exceptions import RequestCancelledError
from ray.exceptions import TaskCancelledError

cancelled = to_exception(RequestCancelledError("abc"))
print(isinstance(cancelled, TaskCancelledError), isinstance(cancelled, RequestCancelledError), str(cancelled))
print(type(pickle.loads(pickle.dumps(cancelled))) is RequestCancelledError)
replica.is_program = False
print(type(to_exception(ReplicaDied("it died"))) is ReplicaDied)
"""


async def test_a_program_that_imports_ray_gets_exceptions_that_are_its_task_errors_too() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TASK_ERRORS, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert out.decode().splitlines() == [
        "True 7 1",
        "True True 7 RayTaskError(Strict)",
        "too many True True 1",
        "True True True",
        "True",
        "True",
        "True",
        "True True it died",
        "True",
        "True True Request abc was cancelled.",
        "True",
        "True",
    ], err.decode()


@pytest.mark.parametrize(
    "pickled", [b"", b"cnowhere\nNothing\n.", pickle.dumps(SystemExit(3)), pickle.dumps(StopIteration(3))]
)
async def test_an_exception_that_cannot_be_here_is_told_in_words(world: World, pickled: bytes) -> None:
    response = call(world.handle())
    body = msgspec.msgpack.encode(Raised(pickled, "Traceback: line 7"))
    (await world.sent()).say(ErrorHead("user_code_raised", 500, "Odd: no", 0), body)
    with pytest.raises(UserCodeRaised, match="Odd: no") as caught:
        await response
    assert "line 7" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("code", "kind"),
    [("deadline_exceeded", DeadlineExceeded), ("limit_reached", LimitReached), ("bad_field", BadField)],
)
async def test_a_replicas_own_refusals_keep_their_kind(
    world: World, code: str, kind: type[Exception]
) -> None:
    response = call(world.handle())
    (await world.sent()).say(ErrorHead(code, 400, "arguments: are odd", 0))
    with pytest.raises(kind, match="arguments: are odd"):
        await response


@pytest.mark.parametrize(
    ("code", "is_of_call"),
    [("deadline_exceeded", True), ("no_replica_available", True), ("user_code_raised", False)],
)
async def test_an_error_tells_whether_the_call_failed_or_the_deployments_code(
    world: World, code: str, *, is_of_call: bool
) -> None:
    responses = call(world.handle()), stream(world.handle())
    body = msgspec.msgpack.encode(Raised(pickle.dumps(DeadlineExceeded("late")), ""))
    for _ in responses:
        (await world.sent()).say(ErrorHead(code, 504, "late", 0), body)
    for failing in (responses[0], anext(responses[1])):
        with pytest.raises(DeadlineExceeded) as caught:
            await failing
        assert caught.value.is_of_call == is_of_call


async def test_a_call_that_cannot_be_made_says_so_too_but_not_one_that_was_cancelled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = call(world.handle())
    response.cancel()
    with pytest.raises(RequestCancelledError) as caught:
        await response
    assert not caught.value.is_of_call
    monkeypatch.setattr("muster.handles.pickles.BODY_BYTES_MAX", 1000)
    with pytest.raises(LimitReached) as large:
        world.handle().remote(bytes(2000))
    assert large.value.is_of_call
    with pytest.raises(DeadlineExceeded) as late:
        await call(world.handle().options(timeout_s=1e-9))
    assert late.value.is_of_call


async def test_overload_is_what_users_of_ray_serve_know(world: World) -> None:
    response = call(world.handle())
    (await world.sent()).say(RefusedHead("busy", 100))
    (await world.sent()).say(
        RefusedHead("busy", 100)
    )  # it would have waited there, and even that was too much
    await world.settle()
    with pytest.raises(BackPressureError):
        await call(world.handle())
    response.cancel()


async def test_a_lost_call_is_sent_again_only_when_that_does_no_harm(world: World) -> None:
    world.deploy("default/a", replicas=2)
    once, twice = call(world.handle(), 1), call(world.handle().options(idempotent=True), 2)
    first, second = await world.sent(), await world.sent()
    first.say(RefusedHead("unknown", 0))
    second.say(RefusedHead("unknown", 0))
    with pytest.raises(Exception, match="may have run"):
        await once
    again = await world.sent()
    assert again.arguments == ((2,), {})
    again.answer("yes")
    assert await twice == "yes"


async def test_an_answer_that_cannot_be_unpickled_says_so(world: World) -> None:
    response = call(world.handle())
    sent = await world.sent()
    sent.open(b"not a pickle")
    sent.more(b"", last=True)
    with pytest.raises(Exception, match="cannot be unpickled here"):
        await response


async def test_arguments_above_the_limit_do_not_leave(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.handles.pickles.BODY_BYTES_MAX", 1000)
    with pytest.raises(LimitReached, match="at most 1000"):
        world.handle().remote(bytes(2000))
    with pytest.raises(TypeError, match="lock"):
        world.handle().remote(threading.Lock())


async def test_a_failed_call_leaves_nothing_behind(world: World) -> None:
    async def fail() -> weakref.ref[HandleCall]:
        response = call(world.handle())
        (await world.sent()).say(ErrorHead("user_code_raised", 500, "ValueError: no", 0))
        with pytest.raises(UserCodeRaised):
            await response
        return weakref.ref(response.call)

    held = await fail()
    gc.collect()
    assert held() is None


# -- cancelling --


async def test_cancelling_the_waiting_task_cancels_the_call_at_once(world: World) -> None:
    response = call(world.handle())
    await world.sent()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await response
    await world.settle()
    assert world.told == [CancelHead()]
    assert world.is_idle
    assert response.cancelled()
    with pytest.raises(RequestCancelledError):
        await response


async def test_a_request_that_is_cancelled_takes_its_calls_with_it_awaited_or_not(world: World) -> None:
    responses = []
    is_answered = asyncio.Event()

    async def work() -> None:
        request_context.set(RequestContext(request_id="r1"))
        responses.append(call(world.handle(), 1))
        responses.append(call(world.handle(), 2))
        (await world.sent()).answer("done")
        is_answered.set()
        await asyncio.sleep(60)

    working = asyncio.create_task(work())  # noqa: TID251 - awaited below
    await is_answered.wait()
    await world.settle()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    await world.settle()
    assert await responses[0] == "done"
    assert responses[1].cancelled()
    assert world.told == [CancelHead()]
    assert world.is_idle


async def test_a_request_that_ends_leaves_what_it_did_not_wait_for(world: World) -> None:
    responses = []

    async def work() -> None:
        request_context.set(RequestContext(request_id="r1"))
        responses.append(call(world.handle(), 1))

    await asyncio.wait_for(work(), 30)
    (await world.sent()).answer("done")
    assert await responses[0] == "done"


async def test_cancelling_while_nothing_was_sent_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(monkeypatch)
    response = call(world.handle())
    response.cancel()
    with pytest.raises(RequestCancelledError):
        await response
    world.deploy("default/a")
    await world.settle()
    assert world.is_idle


# -- composition --


async def test_a_response_as_an_argument_is_replaced_by_its_value(world: World) -> None:
    first = call(world.handle(), "x")
    second = call(world.handle(), 1, first, scale=first)
    (await world.sent()).answer({"big": [1, 2]})
    sent = await world.sent()
    assert sent.arguments == ((1, {"big": [1, 2]}), {"scale": {"big": [1, 2]}})
    sent.answer("both")
    assert await second == "both"
    third = call(world.handle(), first)
    assert (await world.sent()).arguments == (({"big": [1, 2]},), {})
    third.cancel()


async def test_a_failed_argument_fails_the_call(world: World) -> None:
    first = call(world.handle(), "x")
    second = call(world.handle(), first)
    raised = Raised(pickle.dumps(KeyError("digit")), "")
    (await world.sent()).say(
        ErrorHead("user_code_raised", 500, "KeyError", 0), msgspec.msgpack.encode(raised)
    )
    with pytest.raises(KeyError, match="digit"):
        await second
    assert world.is_idle


async def test_the_deadline_holds_while_an_argument_is_waited_for(world: World) -> None:
    first = call(world.handle(), "x")
    second = call(world.handle().options(timeout_s=0.01), first)
    with pytest.raises(DeadlineExceeded):
        await second
    first.cancel()


# -- streams --


async def test_items_come_one_by_one_wherever_the_pieces_are_cut(world: World) -> None:
    response = stream(world.handle(), 3)
    sent = await world.sent()
    assert sent.head.call is not None
    assert sent.head.call.stream
    data = pickled_items("first", ["second"], bytes(50))
    sent.open(data[:3])
    for at in range(3, len(data), 17):
        sent.more(data[at : at + 17])
        await world.settle()
    sent.more(b"", last=True)
    assert [item async for item in response] == ["first", ["second"], bytes(50)]
    assert world.is_idle
    with pytest.raises(StopAsyncIteration):
        await anext(response)


async def test_a_thread_iterates_too_and_a_loop_may_not(world: World) -> None:
    response = stream(world.handle(), 3)
    with pytest.raises(RuntimeError, match="async for"):
        next(response)
    reading = asyncio.create_task(asyncio.to_thread(list, response))  # noqa: TID251 - awaited below
    sent = await world.sent()
    sent.open(pickled_items(1))
    await asyncio.sleep(0.01)
    sent.more(pickled_items(2, 3), last=True)
    assert await reading == [1, 2, 3]


async def test_a_stream_that_is_whole_at_once_is_a_stream(world: World) -> None:
    response = stream(world.handle(), 0)
    (await world.sent()).say(ResponseHead(200, [], True, 0))
    assert [item async for item in response] == []


@pytest.mark.parametrize("rest", [b"", pickled_items(2)[:-1]])
async def test_what_breaks_a_stream_comes_after_its_pickled_items(world: World, rest: bytes) -> None:
    response = stream(world.handle(), 3)
    sent = await world.sent()
    sent.open(pickled_items(1) + rest)
    raised = Raised(pickle.dumps(KeyError("digit")), "Traceback: line 7")
    await world.settle()
    sent.say(ErrorHead("user_code_raised", 500, "KeyError", 0), msgspec.msgpack.encode(raised))
    assert await anext(response) == 1
    with pytest.raises(KeyError, match="digit"):
        await anext(response)
    with pytest.raises(StopAsyncIteration):  # as of any generator that failed
        await anext(response)


async def test_a_slow_reader_makes_the_replica_wait(world: World) -> None:
    response = stream(world.handle(), 3)
    sent = await world.sent()
    item = pickled_items(bytes(600_000))
    size = len(item) // CREDIT_FRAMES + 1
    frames = [item[at : at + size] for at in range(0, len(item), size)] * 3
    sent.open(frames[0])
    for frame in frames[1:]:
        await world.settle()
        sent.more(frame)
    await world.settle()
    credit = len(world.told)
    await world.settle()
    assert len(world.told) == credit
    assert len(await anext(response)) == 600_000
    assert len(await anext(response)) == 600_000
    await world.settle()
    assert len(world.told) > credit
    sent.more(b"", last=True)
    assert [len(item) async for item in response] == [600_000]


async def test_dropping_a_stream_cancels_it(world: World) -> None:
    response = stream(world.handle(), 3)
    sent = await world.sent()
    sent.open(pickled_items(1))
    assert await anext(response) == 1
    del response
    gc.collect()
    await world.settle()
    assert CancelHead() in world.told
    assert world.is_idle


async def test_a_stream_is_neither_awaited_nor_asked_for_its_result(world: World) -> None:
    response = stream(world.handle())
    with pytest.raises(TypeError, match="async for"):
        await response
    with pytest.raises(TypeError, match=r"doesn't support `\.result\(\)`"):
        response.result()


# What threads wait for ends with the caller of their request; with a real replica's sides and the real router.


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
            except RequestCancelledError as error:
                loop.call_soon_threadsafe(raised.put_nowait, error)
        with pytest.raises(RequestCancelledError):
            unawaited.result()
        return PlainTextResponse("nobody reads it")

    rig = rig_of(waits, way)
    await left(world, rig, rig.begin("/app/x"))

    for _ in range(2):
        assert isinstance(await asyncio.wait_for(raised.get(), 30), RequestCancelledError)
    assert CancelHead() in world.told


async def test_a_thread_that_reads_a_stream_hears_it_too(world: World) -> None:
    ended: list[str] = []

    def reads(request: Any) -> None:
        try:
            for _ in stream(world.handle()):
                pass
        except RequestCancelledError:
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
