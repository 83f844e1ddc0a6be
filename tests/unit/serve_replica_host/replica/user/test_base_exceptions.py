"""User code that exits, is interrupted or raises a cancellation of its own: told as what it raised, wherever it did."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it ships no hints
import msgspec
import pytest
from fastapi import FastAPI, WebSocket
from starlette.middleware.base import BaseHTTPMiddleware
from structlog.testing import capture_logs

import muster as serve
from muster.handles.pickles import to_exception
from muster.multiplexing.models import close_model
from serve_common.config.backend import ReplicaConfig
from serve_common.dispatch.errors import ReplicaError
from serve_common.errors import UserCodeRaised
from serve_common.protocol.frames import (
    CallHead,
    CancelHead,
    CloseHead,
    ErrorHead,
    Raised,
    RequestKind,
    ResponseHead,
)
from serve_common.runtime.request_context import set_replica_context
from serve_common.runtime.settings import BusSettings
from serve_common.runtime.threads import LoopThread
from serve_replica_host.replica.process import ReplicaProcess, StartReplicaRequest
from serve_replica_host.replica.user.code import Lifespan, UserCode
from tests.support.replica_rig import NoRefusals, Rig, build_goal, importable

WAIT_S = 30.0
"""A guard only."""


class Odd(BaseException):
    """No exception that anybody catches."""


class Unpicklable(BaseException):
    """Its way to a caller raises something else."""

    def __reduce__(self) -> Any:
        raise SystemExit("while it was pickled")


KINDS: list[Callable[[], BaseException]] = [
    lambda: SystemExit(3),
    lambda: KeyboardInterrupt("stop"),
    lambda: asyncio.CancelledError("own"),
    lambda: GeneratorExit("own"),
    lambda: Odd("why"),
]
NAMES = ["SystemExit", "KeyboardInterrupt", "CancelledError", "GeneratorExit", "Odd"]
each_kind = pytest.mark.parametrize(("make", "name"), list(zip(KINDS, NAMES, strict=True)), ids=NAMES)
each_kind_or_error = pytest.mark.parametrize(
    ("make", "name"),
    [*zip(KINDS, NAMES, strict=True), (lambda: ValueError("no such digit"), "ValueError: no such digit")],
    ids=[*NAMES, "ValueError"],
)


def raised_in(logs: list[Any], name: str) -> bool:
    return any(
        line["event"] == "user_code_raised" and name in line["error"] and name in line["traceback"]
        for line in logs
    )


# -- ASGI ---------------------------------------------------------------------------------------------------------


@each_kind_or_error
@pytest.mark.parametrize("where", ["before", "between", "after"])
async def test_an_application_that_raises(make: Any, name: str, where: str) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        if where == "before":
            raise make()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": where == "between"})
        await asyncio.sleep(0)
        raise make()

    rig = Rig(application=application)
    with capture_logs() as logs:
        answer = await rig.call()
        await rig.idle()

    assert raised_in(logs, name)
    if where == "before":
        assert (answer.status, answer.body) == (500, b"Internal Server Error")
    elif where == "between":
        assert isinstance(answer.head, ErrorHead)
        assert (answer.head.error_code, name in answer.head.message) == ("user_code_raised", True)
    else:
        assert (answer.status, answer.body) == (200, b"one")
    assert len(logs) == 1


def shop(make: Any) -> Any:
    app = FastAPI()
    app.add_middleware(BaseHTTPMiddleware, dispatch=lambda request, call_next: call_next(request))

    @serve.ingress(app)
    class Shop:
        @app.post("/async")
        async def waiting(self) -> None:
            raise make()

        @app.post("/plain")
        def plain(self) -> None:
            raise make()

        @app.post("/well")
        async def well(self) -> int:
            return 1

        @app.websocket("/ws")
        async def talk(self, socket: WebSocket) -> None:
            await socket.accept()
            raise make()

        @app.websocket("/early")
        async def early(self, socket: WebSocket) -> None:
            raise make()

    return Shop()


def on_loop_thread(work: Callable[[], Any]) -> Any:
    """On the loop that replicas have for user code; a task that raises SystemExit reaches the loop itself."""
    thread = LoopThread("test")
    try:
        return thread.submit(work()).result(WAIT_S)
    finally:
        thread.stop(WAIT_S)
        assert thread.loop.is_closed()


@pytest.mark.parametrize("path", ["async", "plain"])
@pytest.mark.parametrize(("make", "name"), [(KINDS[0], NAMES[0]), (KINDS[1], NAMES[1]), (KINDS[4], NAMES[4])])
def test_a_route_that_raises_in_a_task_of_its_middleware(make: Any, name: str, path: str) -> None:
    async def work() -> None:
        rig = Rig(application=shop(make).__muster_asgi__)
        with capture_logs() as logs:
            assert (await rig.call(f"/app/{path}")).status == 500
        assert any(line["event"] == "user_code_raised" and name in line["traceback"] for line in logs)
        assert (await rig.call("/app/well")).body == b"1"
        await rig.idle()

    on_loop_thread(work)


@each_kind_or_error
async def test_a_websocket_handler_that_raises(make: Any, name: str) -> None:
    rig = Rig(application=shop(make).__muster_asgi__)
    with capture_logs() as logs:
        request = rig.begin("/app/ws", kind=RequestKind.WEBSOCKET, method="GET")
        opened, _ = await request.frame()
        closed, _ = await request.frame()
        early = await rig.begin("/app/early", kind=RequestKind.WEBSOCKET, method="GET").answer()
        await rig.idle()

    assert isinstance(opened, ResponseHead)
    assert isinstance(closed, CloseHead)
    assert (opened.status, closed.code, early.status) == (101, 1011, 500)
    assert raised_in(logs, name)
    assert [line["event"] for line in logs] == ["user_code_raised"] * 2


@each_kind
@pytest.mark.parametrize("says_so", [True, False])
async def test_a_lifespan_that_raises_fails_the_start(make: Any, name: str, says_so: bool) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if says_so:  # as Starlette does
            await send({"type": "lifespan.startup.failed", "message": "m"})
        raise make()

    with pytest.raises(BaseException) as raised:  # noqa: PT011 - it is looked at below
        async with asyncio.timeout(WAIT_S):
            await Lifespan(application).start()
    assert type(raised.value).__name__ == name


@each_kind
async def test_a_lifespan_that_raises_in_its_shutdown_is_logged(make: Any, name: str) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        raise make()

    lifespan = Lifespan(application)
    await lifespan.start()
    with capture_logs() as logs:
        await asyncio.wait_for(lifespan.stop(), WAIT_S)
    assert [(line["event"], name in line["traceback"]) for line in logs] == [("shutdown_failed", True)]


# -- functions ----------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("items_before", [None, 0, 1], ids=["no stream", "first", "later"])
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("is_call", [True, False], ids=["handle", "http"])
async def test_a_function_or_generator_that_raises(
    make: Any, name: str, items_before: int | None, *, is_async: bool, is_call: bool
) -> None:
    async def waiting(*_: Any) -> None:
        raise make()

    def plain(*_: Any) -> None:
        raise make()

    async def items(*_: Any) -> AsyncIterator[str]:
        for _item in range(items_before or 0):
            yield "one"
        raise make()

    def plain_items(*_: Any) -> Iterator[str]:
        for _item in range(items_before or 0):
            yield "one"
        raise make()

    is_stream = items_before is not None
    rig = Rig((items if is_async else plain_items) if is_stream else (waiting if is_async else plain))
    call: dict[str, Any] = {
        "kind": RequestKind.PYTHON,
        "body": cloudpickle.dumps(((), {})),
        "call": CallHead(stream=is_stream, is_pickled=True),
    }
    with capture_logs() as logs:
        answer = await rig.call(**call if is_call else {})
        await rig.idle()

    assert isinstance(answer.head, ErrorHead)
    assert (answer.head.error_code, answer.head.status) == ("user_code_raised", 500)
    assert name in answer.head.message
    assert is_call or answer.body in (b"", b"one" * (items_before or 0))
    assert raised_in(logs, name)


# -- calls by handles ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*KINDS, Unpicklable])
async def test_what_is_no_exception_reaches_the_caller_as_an_error_with_its_text_and_traceback(
    make: Any,
) -> None:
    async def handler() -> None:
        raise make()

    body = cloudpickle.dumps(((), {}))
    request = Rig(handler).begin(
        kind=RequestKind.PYTHON, first=body, body_bytes=len(body), call=CallHead(is_pickled=True)
    )
    with capture_logs():
        head, raised = await request.frame()
    assert isinstance(head, ErrorHead)
    error = to_exception(ReplicaError(head.error_code, head.status, head.message, raised=raised))

    assert type(error) is UserCodeRaised
    assert type(make()).__name__ in str(error)
    assert "in handler" in error.__notes__[0]
    if make is Unpicklable:
        decoded = msgspec.msgpack.decode(raised, type=Raised)
        assert (decoded.pickled, "Unpicklable" in decoded.traceback) == (b"", True)


@pytest.mark.parametrize("served", ["call", "handler", "application"])
async def test_work_that_is_really_cancelled_ends_without_a_word_and_is_cleaned_up(served: str) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def waits() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await waits()

    rig = Rig(application=application) if served == "application" else Rig(waits)
    kind, body = RequestKind.HTTP, b""
    if served == "call":
        kind, body = RequestKind.PYTHON, cloudpickle.dumps(((), {}))
    with capture_logs() as logs:
        request = rig.begin(kind=kind, first=body, body_bytes=len(body), call=CallHead(is_pickled=True))
        await asyncio.wait_for(begun.wait(), WAIT_S)
        request.send(CancelHead())
        await asyncio.wait_for(ended.wait(), WAIT_S)
        await rig.idle()
    assert [line["event"] for line in logs if line["event"] == "user_code_raised"] == []


# -- batches and models -------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("streams", [False, True])
async def test_a_batch_that_raises(make: Any, name: str, *, streams: bool) -> None:
    is_broken = True

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=WAIT_S)
    async def single(items: list[int]) -> list[int]:
        if is_broken:
            raise make()
        return items

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=WAIT_S)
    async def stream(items: list[int]) -> AsyncIterator[list[int]]:
        yield items
        if is_broken:
            raise make()

    async def ask(item: int) -> Any:
        try:
            return [value async for value in stream(item)] if streams else await single(item)
        except BaseException as error:
            return error

    failed = await asyncio.gather(ask(1), ask(2))
    for error in failed:
        assert isinstance(error, BaseException)
        assert name in f"{type(error).__name__} {error}"
        assert not isinstance(error, asyncio.CancelledError | serve.BatchCancelled)
    is_broken = False
    assert list(await asyncio.gather(ask(1), ask(2))) == ([[1], [2]] if streams else [1, 2])


@each_kind
async def test_a_batch_size_fn_that_raises(make: Any, name: str) -> None:
    def size(items: list[Any]) -> int:
        if items[0] == "bad":
            raise make()
        return len(items)

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=0, batch_size_fn=size)
    async def work(items: list[Any]) -> list[Any]:
        return items

    with pytest.raises(BaseException) as raised:  # noqa: PT011 - it is looked at below
        await work("bad")
    assert name in f"{type(raised.value).__name__} {raised.value}"
    assert not isinstance(raised.value, asyncio.CancelledError)
    assert await asyncio.wait_for(work("good"), WAIT_S) == "good"


@each_kind
async def test_a_model_loader_that_raises(make: Any, name: str) -> None:
    is_broken = True

    class Server:
        @serve.multiplexed(max_num_models_per_replica=1)
        async def get(self, model_id: str) -> str:
            if is_broken:
                raise make()
            return f"model {model_id}"

    server = Server()
    with pytest.raises(BaseException) as raised:  # noqa: PT011 - it is looked at below
        await server.get("a")
    assert name in f"{type(raised.value).__name__} {raised.value}"
    assert not isinstance(raised.value, asyncio.CancelledError)
    is_broken = False
    assert await asyncio.wait_for(server.get("a"), WAIT_S) == "model a"


@each_kind
async def test_a_model_that_raises_when_it_is_closed_is_logged_and_let_go(make: Any, name: str) -> None:
    class Model:
        async def aclose(self) -> None:
            raise make()

    held = [Model()]
    with capture_logs() as logs:
        await close_model("m", held)
    assert held == []
    assert [(line["event"], name in line["error"]) for line in logs] == [("model_not_closed", True)]


# -- what the host asks for ---------------------------------------------------------------------------------------

APP = """
import asyncio

class Odd(BaseException):
    pass

def fail(name):
    kinds = {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt,
             "CancelledError": asyncio.CancelledError, "GeneratorExit": GeneratorExit, "Odd": Odd}
    raise kinds[name]("said by the code")

class Constructed:
    def __init__(self, name):
        fail(name)

    async def __call__(self):
        pass

class Model:
    def __init__(self):
        self.health = None

    async def __call__(self):
        return 1

    def reconfigure(self, name):
        fail(name)

class AsyncModel(Model):
    async def reconfigure(self, name):
        fail(name)

class Ill(Model):
    def check_health(self):
        fail("NAME")

class AsyncIll(Model):
    async def check_health(self):
        fail("NAME")
"""


def make_process(directory: Path, attribute: str, source: str = APP, **config: Any) -> ReplicaProcess:
    """A process that was not started yet, with ``source`` as its module of user code."""
    (directory / "unit_exit_app.py").write_text(source)
    replica_config = ReplicaConfig(import_path=f"unit_exit_app:{attribute}", **config)
    bus = BusSettings(
        servers=["nats://127.0.0.1:1"], user="replica", inbox_prefix="_INBOX_replica", subject_prefix="serve"
    )
    request = StartReplicaRequest(
        goal=build_goal(replica_config=replica_config), bus=bus, app_dir=str(directory)
    )
    return ReplicaProcess(request, NoRefusals())


@pytest.fixture
def app_dir(tmp_path: Path) -> Iterator[Path]:
    with importable(tmp_path, unit_exit_app=APP):
        yield tmp_path
    set_replica_context(None)  # which a process that was started leaves behind


def in_time(function: Callable[[], Any]) -> Any:
    """What a thread gets, where a hang must not hang the tests."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(WAIT_S)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["constructor", "module"])
def test_a_constructor_or_module_that_raises_is_a_failed_start(app_dir: Path, name: str, where: str) -> None:
    if where == "module":
        process = make_process(app_dir, "Model", APP + f"\nfail({name!r})\n")
    else:
        process = make_process(app_dir, "Constructed", init_args=[name])

    told = in_time(process.start)

    assert told is not None
    assert f"{name}: said by the code" in told
    assert "in __init__" in told or where == "module"
    assert process._user._thread.is_alive()
    in_time(process.drain)


@pytest.mark.parametrize("attribute", ["Ill", "AsyncIll"])
def test_a_replica_whose_first_health_check_fails_has_not_started(app_dir: Path, attribute: str) -> None:
    process = make_process(app_dir, attribute, APP.replace("NAME", "Odd"))
    told = in_time(process.start)
    assert told is not None
    assert "Odd: said by the code" in told
    assert "in check_health" in told
    in_time(process.drain)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("attribute", ["Ill", "AsyncIll"])
def test_a_health_check_that_raises_is_an_unhealthy_replica_every_time(
    app_dir: Path, name: str, attribute: str
) -> None:
    process = make_process(app_dir, attribute, APP.replace("NAME", name))
    process._code = process._user.submit(UserCode.construct(process._order.goal, str(app_dir))).result(WAIT_S)

    for _ in range(3):
        told = in_time(process.check_health)
        assert f"{name}: said by the code" in told
        assert "in check_health" in told
    in_time(process.drain)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("attribute", ["Model", "AsyncModel"])
def test_a_reconfigure_that_raises_is_told_and_the_code_goes_on(
    app_dir: Path, name: str, attribute: str
) -> None:
    process = make_process(app_dir, attribute)
    code = process._code = process._user.submit(UserCode.construct(process._order.goal, str(app_dir))).result(
        WAIT_S
    )

    told = in_time(lambda: process._call_user(code.reconfigure, name))

    assert f"{name}: said by the code" in told
    assert "in reconfigure" in told
    assert process._user.submit(code.call()).result(WAIT_S) == 1
    in_time(process.drain)


# -- the loop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", KINDS[:2])
def test_a_loop_goes_on_when_a_task_or_a_callback_of_the_user_exits(make: Any) -> None:
    thread = LoopThread("test")
    order_: list[int] = []

    async def child() -> None:
        raise make()

    async def parent() -> BaseException | None:
        task = asyncio.create_task(child())  # noqa: TID251 - as user code does
        asyncio.get_running_loop().call_soon(order_.append, 1)
        await asyncio.wait([task])
        return task.exception()

    def exit_() -> None:
        raise make()

    async def after_callbacks(delay_s: float) -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        loop.call_later(delay_s, exit_) if delay_s else loop.call_soon(exit_)
        loop.call_soon(order_.append, 2)
        loop.call_later(delay_s + 0.001, done.set)
        await done.wait()

    with capture_logs() as logs:
        assert isinstance(thread.submit(parent()).result(WAIT_S), type(make()))
        for delay_s in (0, 0.001):  # one after the other: two in one turn of the loop would be logged once
            thread.submit(after_callbacks(delay_s)).result(WAIT_S)
        thread.stop(WAIT_S)
    assert order_ == [1, 2, 2]
    assert [line["event"] for line in logs].count("loop_exit_ignored") == 3
    assert thread.loop.is_closed()


def test_a_loop_that_is_told_to_stop_stops_although_the_users_code_exits_at_that_moment() -> None:
    thread = LoopThread("test")

    def exit_() -> None:
        raise SystemExit

    def in_one_turn() -> None:
        thread.loop.call_soon(thread._end)
        thread.loop.call_soon(exit_)
        thread.loop.call_soon(exit_)

    with capture_logs():
        thread.loop.call_soon_threadsafe(in_one_turn)
        thread._thread.join(WAIT_S)
    assert thread.loop.is_closed()


def test_a_loop_that_the_users_code_stops_goes_on() -> None:
    thread = LoopThread("test")

    async def stops() -> int:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        return 1

    assert [thread.submit(stops()).result(WAIT_S) for _ in range(3)] == [1, 1, 1]
    thread.stop(WAIT_S)
    assert thread.loop.is_closed()
