"""A replica's user side: requests become tasks, and each ends in exactly one outcome."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import msgspec
import pytest
from pydantic import BaseModel, Field, SecretStr
from starlette.background import BackgroundTask
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from structlog.testing import capture_logs

from serve_common.errors import (
    BadField,
    BusUnavailable,
    DeadlineExceeded,
    LimitReached,
    NoReplicaAvailable,
    NotFound,
    ReplicaDied,
    ServeError,
)
from serve_common.protocol.frames import RequestHead, RequestKind
from serve_common.runtime import request_context
from serve_replica_host.replica.io import response_stream
from serve_replica_host.replica.io.flow import BodyReader
from serve_replica_host.replica.io.request import (
    UNSENT_BYTES_MAX,
    Drop,
    Ended,
    Failed,
    Flow,
    IoEvent,
    Opened,
    Piece,
    ReplicaRequest,
    WholeResponseEvent,
    Writable,
)
from serve_replica_host.replica.io.response_stream import (
    NotAResponse,
    ResponseStream,
    WholeResponse,
    to_response,
)
from serve_replica_host.replica.user.asgi import LazyRequest
from serve_replica_host.replica.user.code import UserCode
from serve_replica_host.replica.user.executor import RequestTasks, UserExecutor
from serve_replica_host.replica.user.threads import PlainThreads


class Bench:
    """A user side with the bus side made of a list."""

    def __init__(self, handler: Callable[..., Any] | None, target: Any = None) -> None:
        self.outcomes: list[IoEvent] = []
        self._came = asyncio.Event()
        self.side = UserExecutor(UserCode(target or handler, handler, 4), self._put)

    def _put(self, outcome: IoEvent) -> None:
        self.outcomes.append(outcome)
        self._came.set()

    async def until(self, count: int) -> list[IoEvent]:
        async with asyncio.timeout(30):
            while len(self.outcomes) < count:
                self._came.clear()
                await self._came.wait()
        return self.outcomes

    def drop(self, exchange: ReplicaRequest) -> None:
        exchange.is_dropped = True
        self.side.take(Drop(exchange))

    async def serve(self, exchange: ReplicaRequest) -> IoEvent:
        self.side.take(exchange)
        await asyncio.wait_for(self.side.wait_idle(), 30)
        return self.outcomes[-1]


def exchange(body: bytes = b"", **head: Any) -> ReplicaRequest:
    fields: dict[str, Any] = {
        "kind": RequestKind.HTTP,
        "method": "POST",
        "path": "/shop/a%2Fb",
        "route": "/shop",
        "query": "x=1&y=%20",
        "headers": [(b"content-type", b"application/json"), (b"x-a", "ü".encode("latin-1"))],
        "timeout_s": 5.0,
        "body_bytes": len(body),
        "endpoint_tag": "default/shop",
        "request_id": "r1",
    }
    made = ReplicaRequest(b"_INBOX.1", RequestHead(**(fields | head)), 0.0)
    made.body = body
    return made


def request_of(body: bytes) -> Request:
    return LazyRequest(exchange().head, BodyReader(body))


async def test_a_request_looks_as_starlette_and_asgi_define_it() -> None:
    request = request_of(b'{"a": 1}')

    assert (request.method, request.scope["path"], request.scope["root_path"]) == (
        "POST",
        "/shop/a/b",
        "/shop",
    )
    assert request.scope["raw_path"] == b"/shop/a%2Fb"
    assert dict(request.query_params) == {"x": "1", "y": " "}
    assert request.headers["x-a"] == "ü"
    assert await request.json() == {"a": 1}
    assert await request.body() == b'{"a": 1}'


async def test_a_body_can_be_read_as_a_stream() -> None:
    request = request_of(b"abc")

    assert b"".join([piece async for piece in request.stream()]) == b"abc"


@pytest.mark.parametrize(
    ("result", "content_type", "body"),
    [
        ("hi", "text/plain; charset=utf-8", b"hi"),
        (b"\x00", "text/plain", b"\x00"),
        ({"a": [1, None]}, "application/json", b'{"a":[1,null]}'),
        (
            {None: 1, True: [2.0], 3: {False: "é"}},
            "application/json",
            '{"null":1,"true":[2.0],"3":{"false":"é"}}'.encode(),
        ),
        (None, "text/plain", b""),
        (1.5, "application/json", b"1.5"),
    ],
)
def test_plain_values_become_answers_as_in_ray_serve(result: Any, content_type: str, body: bytes) -> None:
    answer = to_response(result)

    assert answer == WholeResponse(200, [(b"content-type", content_type.encode())], body)


def test_numpy_values_are_json_and_other_objects_are_refused_by_name() -> None:
    numpy = pytest.importorskip("numpy")
    answer = to_response({"p": numpy.array([1.5, 2.0]), "n": numpy.int64(3)})

    assert isinstance(answer, WholeResponse)
    assert msgspec.json.decode(answer.body) == {"p": [1.5, 2.0], "n": 3}
    with pytest.raises(NotAResponse, match="holds a LazyRequest"):
        to_response([request_of(b"")])


def test_paths_decimals_mappings_and_plain_objects_are_json_as_in_ray_serve() -> None:
    class Prediction:
        def __init__(self) -> None:
            self.label, self.path = "cat", Path("/models/cat")

    answer = to_response([Decimal("1.5"), Headers({"X-A": "b"}), Prediction()])

    assert isinstance(answer, WholeResponse)
    assert answer.body == b'[1.5,{"x-a":"b"},{"label":"cat","path":"/models/cat"}]'


def test_models_are_json_by_alias_without_their_secrets_as_in_ray_serve() -> None:
    class Prediction(BaseModel):
        class_name: str = Field("cat", alias="className")
        raw: bytes = b"x"
        key: SecretStr = SecretStr("hidden")

    answer = to_response([Prediction(), {"key": SecretStr("hidden")}])

    assert isinstance(answer, WholeResponse)
    assert answer.body == b'[{"className":"cat","raw":"x","key":"**********"},{"key":"**********"}]'


def test_a_program_s_json_has_ray_serves_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_context, "_current", SimpleNamespace(is_program=True))
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    answer = to_response(
        {
            "é": [math.nan, -math.inf, 1.0, None],
            None: {True: b"raw", 7: bytearray(b"more")},
            "at": [at, at.replace(tzinfo=None), at.date(), timedelta(seconds=90)],
            "decimals": [Decimal("1.50"), Decimal(2), Decimal("NaN")],
            "more": (Path("/a"), {1}, UUID(int=5), Colour.RED, deque([1])),
        }
    )

    assert isinstance(answer, WholeResponse)
    assert answer.body == (
        rb'{"\u00e9":[NaN,-Infinity,1.0,null],"null":{"true":"raw","7":"more"},'
        b'"at":["2026-01-02T03:04:05+00:00","2026-01-02T03:04:05","2026-01-02",90.0],'
        b'"decimals":[1.5,2,NaN],'
        b'"more":["/a",[1],"00000000-0000-0000-0000-000000000005","red",[1]]}'
    )
    with pytest.raises(NotAResponse, match="utf-8"):
        to_response([b"\xff"])


class Colour(Enum):
    RED = "red"


def test_values_that_fastapi_can_encode_are_json() -> None:
    class Table:
        columns = ("a",)

        def to_dict(self, *, orient: str) -> list[dict[str, int]]:
            return [{"a": 1}] if orient == "records" else []

    answer = to_response(
        [
            *(ValueError("boom"), deque([1, 2]), re.compile("a.b"), ip_address("1.2.3.4")),
            *((number for number in range(2)), Table()),
        ]
    )

    assert isinstance(answer, WholeResponse)
    assert answer.body == b'["boom",[1,2],"a.b","1.2.3.4",[0,1],[{"a":1}]]'


async def test_a_response_keeps_its_status_and_headers() -> None:
    async def handler(request: Request) -> Response:
        return JSONResponse({"a": 1}, 201, headers={"X-B": "c"})

    outcome = await Bench(handler).serve(exchange())

    assert isinstance(outcome, WholeResponseEvent)
    assert (outcome.status, outcome.body) == (201, b'{"a":1}')
    assert (b"x-b", b"c") in outcome.headers


async def test_an_exception_is_one_line_for_the_caller_and_a_traceback_in_the_log() -> None:
    def handler(request: Request) -> None:
        raise ValueError("no such digit")

    with capture_logs() as logs:
        outcome = await Bench(handler).serve(exchange())

    assert isinstance(outcome, Failed)
    assert (outcome.error_code, outcome.status) == ("user_code_raised", 500)
    assert outcome.message == "ValueError: no such digit"
    assert logs[0]["request_id"] == "r1"
    assert "in handler" in logs[0]["traceback"]


async def test_an_http_exception_is_its_status() -> None:
    async def handler(request: Request) -> None:
        raise HTTPException(404, "nothing here", {"X-Why": "so"})

    outcome = await Bench(handler).serve(exchange())

    assert isinstance(outcome, WholeResponseEvent)
    assert (outcome.status, outcome.body) == (404, b"nothing here")
    assert (b"x-why", b"so") in outcome.headers


async def raised_by(error: Exception, **head: Any) -> tuple[str, int]:
    async def handler(request: Any) -> None:
        raise error

    with capture_logs():
        outcome = await Bench(handler).serve(exchange(**head))
    assert isinstance(outcome, Failed)
    return outcome.error_code, outcome.status


def of_call(error: ServeError) -> ServeError:
    error.is_of_call = True
    return error


@pytest.mark.parametrize("kind", [RequestKind.HTTP, RequestKind.CALL])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (of_call(DeadlineExceeded("late")), ("deadline_exceeded", 504)),
        (of_call(NoReplicaAvailable("full")), ("no_replica_available", 503)),
        (of_call(LimitReached("much")), ("limit_reached", 429)),
        (of_call(ReplicaDied("gone")), ("replica_died", 502)),
        (of_call(BusUnavailable("away")), ("bus_unavailable", 503)),
        (of_call(NotFound("no deployment")), ("user_code_raised", 500)),
        (of_call(BadField("arguments", "odd")), ("bad_field", 400)),
        (DeadlineExceeded("of the code's own"), ("user_code_raised", 500)),
    ],
)
async def test_what_a_call_by_handle_ended_with_keeps_its_status_and_what_code_raises_does_not(
    kind: RequestKind, error: ServeError, told: tuple[str, int]
) -> None:
    assert await raised_by(error, kind=kind) == told


async def test_a_stream_waits_while_the_network_is_slower() -> None:
    sent = 0

    async def handler(request: Request) -> StreamingResponse:
        async def pieces() -> Any:
            nonlocal sent
            for _ in range(5):
                sent += 1
                yield b"x" * (UNSENT_BYTES_MAX // 2 + 1)

        return StreamingResponse(pieces())

    bench, request = Bench(handler), exchange()
    bench.side.take(request)
    outcomes = await bench.until(1)
    while request.writable is None:  # noqa: ASYNC110 - what waits there says so to nobody else
        await asyncio.sleep(0)
    assert isinstance(outcomes[0], Opened)
    assert sent == 2
    assert request.pieces is not None
    data = b""
    while request.pieces or not isinstance(bench.outcomes[-1], Ended):
        request.is_notified = False
        while request.pieces:
            data += request.pieces.popleft()
        request.sent_bytes = len(data)
        if request.writable is not None:
            bench.side.take(Writable(request))
        await asyncio.sleep(0)

    assert len(data) == 5 * (UNSENT_BYTES_MAX // 2 + 1)
    assert bench.outcomes[-2] == Piece(request, b"", last=True)


async def test_work_after_the_answer_is_waited_for_by_a_drain() -> None:
    go = asyncio.Event()

    async def handler(request: Request) -> Response:
        return Response(b"ok", background=BackgroundTask(go.wait))

    bench = Bench(handler)
    bench.side.take(exchange())
    outcomes = await bench.until(1)
    assert isinstance(outcomes[0], WholeResponseEvent)
    assert outcomes[0].body == b"ok"
    async with asyncio.timeout(30), asyncio.TaskGroup() as waiting:
        idle = waiting.create_task(bench.side.wait_idle())
        await asyncio.sleep(0)
        assert not idle.done()
        go.set()


async def test_a_dropped_request_is_cancelled_and_ends() -> None:
    entered = asyncio.Event()

    async def handler(request: Request) -> None:
        entered.set()
        await asyncio.Event().wait()

    bench, request = Bench(handler), exchange()
    bench.side.take(request)
    await entered.wait()
    bench.drop(request)

    assert await bench.until(1) == [Ended(request)]
    await bench.side.wait_idle()


async def test_a_request_dropped_before_it_began_never_runs_and_still_ends() -> None:
    async def handler(request: Request) -> None:
        raise AssertionError("must not run")

    bench, request = Bench(handler), exchange()
    bench.side.take(request)
    bench.drop(request)
    await asyncio.wait_for(bench.side.wait_idle(), 30)
    await asyncio.sleep(0)

    assert bench.outcomes == [Ended(request)]


async def test_code_that_listens_for_the_caller_hears_that_it_is_gone() -> None:
    heard: list[str] = []
    listening = asyncio.Event()

    async def handler(request: Request) -> None:
        await request.body()
        listening.set()
        try:
            heard.append((await request.receive())["type"])
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise

    bench, request = Bench(handler), exchange()
    bench.side.take(request)
    await listening.wait()
    await asyncio.sleep(0)
    bench.drop(request)
    await asyncio.wait_for(bench.side.wait_idle(), 30)

    assert heard in (["http.disconnect"], ["cancelled"])


async def test_a_plain_call_takes_json_and_bad_json_is_the_callers_fault() -> None:
    async def handler(argument: Any) -> Any:
        return {"got": argument}

    bench = Bench(handler)

    good = await bench.serve(exchange(b"[1]", kind=RequestKind.CALL))
    empty = await bench.serve(exchange(b"", kind=RequestKind.CALL))
    bad = await bench.serve(exchange(b"{", kind=RequestKind.CALL))

    assert isinstance(good, WholeResponseEvent)
    assert good.body == b'{"got":[1]}'
    assert isinstance(empty, WholeResponseEvent)
    assert empty.body == b'{"got":null}'
    assert isinstance(bad, Failed)
    assert bad.status == 400


async def test_generators_are_streamed() -> None:
    def handler(request: Request) -> Any:
        yield "a"
        yield "b"

    bench, request = Bench(handler), exchange()
    await bench.serve(request)

    assert isinstance(bench.outcomes[0], Opened)
    assert b"".join(request.pieces or ()) == b"ab"
    assert bench.outcomes[-2] == Piece(request, b"", last=True)


@pytest.mark.parametrize("is_paced", [True, False])
@pytest.mark.parametrize("is_plain", [True, False])
async def test_only_a_stream_whose_second_part_is_there_at_once_stands_still_for_the_first(
    monkeypatch: pytest.MonkeyPatch, *, is_plain: bool, is_paced: bool
) -> None:
    pauses: list[int] = []
    monkeypatch.setattr(response_stream, "_let_first_part_leave", lambda: pauses.append(len(taken)))
    request = exchange()
    taken: list[bytes] = []

    def take(outcome: IoEvent) -> None:
        if is_paced and isinstance(outcome, Opened | Flow):  # the other thread has sent what there is
            request.is_notified = False
            taken.extend(request.pieces or ())

    stream = ResponseStream(request, take)
    stream.open(200, [], soon=False)
    if is_plain:
        stream.run_plain([b"a", b"b", b"c"], "utf-8")
    else:
        stream.put(b"a")
        stream.put(b"b")
        stream.put(b"c")
    assert len(pauses) == (0 if is_paced else 1)


# Threads for plain functions, and tasks that begin at once.


variable: ContextVar[str] = ContextVar("variable", default="")


async def test_a_call_has_its_callers_context_and_returns_or_raises_what_the_function_does() -> None:
    threads = PlainThreads(2)

    def told(*args: Any, **kwargs: Any) -> Any:
        return variable.get(), args, kwargs, threading.current_thread() is threading.main_thread()

    def stops() -> None:
        raise StopIteration("early")

    variable.set("mine")
    assert await threads.run(told, 1, b=2) == ("mine", (1,), {"b": 2}, False)
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="early"):
        await threads.run(stops)
    threads.close()


async def test_no_more_threads_run_than_are_allowed_and_the_rest_waits() -> None:
    threads = PlainThreads(2)
    at_once, most = 0, 0
    lock = threading.Lock()
    together = threading.Barrier(2, timeout=30)

    def work() -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        together.wait()
        with lock:
            at_once -= 1

    await asyncio.wait_for(asyncio.gather(*(threads.run(work) for _ in range(10))), 40)

    assert most == 2
    threads.close()


async def test_a_cancelled_call_ends_when_its_function_does_however_often_it_is_cancelled() -> None:
    threads = PlainThreads(1)
    entered, released = threading.Event(), threading.Event()

    def blocks() -> None:
        entered.set()
        released.wait(40)

    async with asyncio.TaskGroup() as group:
        call = group.create_task(threads.run(blocks))
        await asyncio.to_thread(entered.wait, 30)
        for _ in range(3):
            call.cancel()
            await asyncio.sleep(0)
        assert not call.done()
        released.set()
    assert call.cancelled()
    assert await threads.run(lambda: "next") == "next"
    threads.close()


async def test_a_closed_pool_takes_nothing_and_its_threads_end() -> None:
    threads = PlainThreads(1)
    thread = await threads.run(threading.current_thread)

    threads.close()

    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="has stopped"):
        await threads.run(print)


async def in_a_callback(call: Any) -> Any:
    """What ``call`` returns outside of any task, as in the mailbox."""
    loop = asyncio.get_running_loop()
    result = loop.create_future()
    loop.call_soon(lambda: result.set_result(call()))
    return await result


async def test_a_task_begins_at_once_and_one_that_never_waits_is_done_at_once() -> None:
    tasks = RequestTasks()
    seen: list[Any] = []

    async def quick() -> None:
        current = asyncio.current_task()
        variable.set("inside")
        seen.append(current is not None and current.get_name())
        async with asyncio.timeout(1):  # noqa: ASYNC100 - that it works without a turn of the loop is the point
            seen.append(variable.get())

    assert await in_a_callback(lambda: (tasks.start(quick()), list(seen))) == (None, ["request", "inside"])
    assert variable.get() == ""


async def test_a_task_that_waits_goes_on_and_can_be_cancelled() -> None:
    tasks = RequestTasks()
    go = asyncio.Event()
    seen: list[str] = []

    async def waits() -> None:
        try:
            seen.append("begun")
            await go.wait()
            seen.append("gone on")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    task, begun = await in_a_callback(lambda: (tasks.start(waits()), list(seen)))
    assert begun == ["begun"]
    go.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await tasks.close(1)

    assert task.cancelled()
    assert seen == ["begun", "gone on", "cancelled"]


async def test_a_task_that_is_started_by_a_task_begins_at_the_next_turn() -> None:
    tasks = RequestTasks()
    seen: list[str] = []

    async def quick() -> None:
        seen.append("ran")

    task = tasks.start(quick())
    assert seen == []
    assert task is not None
    await task
    assert seen == ["ran"]


async def test_a_task_that_dies_is_reported() -> None:
    tasks = RequestTasks()

    async def dies() -> None:
        raise ValueError("bug")

    with capture_logs() as logs:
        await in_a_callback(lambda: tasks.start(dies()))

    assert [line["event"] for line in logs] == ["task_failed"]


@pytest.mark.parametrize(
    ("head", "handler", "line"),
    [
        ({}, lambda: "x", "POST /shop/a%2Fb 200"),
        ({}, lambda: Response(status_code=404), "POST /shop/a%2Fb 404"),
        ({}, lambda: StreamingResponse(iter([b"x"]), status_code=201), "POST /shop/a%2Fb 201"),
        ({}, lambda: 1 / 0, "POST /shop/a%2Fb 500"),
        ({"kind": RequestKind.CALL, "body_bytes": 0}, lambda: "x", "CALL __call__ OK"),
        ({"kind": RequestKind.CALL, "body_bytes": 0}, lambda: 1 / 0, "CALL __call__ ERROR"),
    ],
)
async def test_each_request_has_a_line_while_they_are_logged(
    head: dict[str, Any], handler: Callable[..., Any], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(handler)
    with caplog.at_level("INFO", logger="ray.serve"):
        await bench.serve(exchange(**head))
        assert not caplog.records
        bench.side.log_requests(enabled=True)
        await bench.serve(exchange(**head))
        bench.side.log_requests(enabled=False)
        await bench.serve(exchange(**head))
    [record] = caplog.records
    logged, _, duration = record.getMessage().rpartition(" ")
    assert (record.levelname, logged) == ("INFO", line)
    assert float(duration.removesuffix("ms")) > 0


async def test_a_cancelled_request_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    async def wait() -> None:
        await asyncio.sleep(60)

    bench, asked = Bench(wait), exchange()
    bench.side.log_requests(enabled=True)
    with caplog.at_level("INFO", logger="ray.serve"):
        bench.side.take(asked)
        await asyncio.sleep(0)
        bench.drop(asked)
        await bench.until(1)
    [record] = caplog.records
    assert record.getMessage().startswith("POST /shop/a%2Fb CANCELLED ")


async def test_http_to_a_class_without_a_call_method_is_an_error_of_the_code() -> None:
    class NotCallable:
        def other(self) -> str:
            return "other"

    bench = Bench(None, NotCallable())
    with capture_logs():
        failed = await bench.serve(exchange())
    assert isinstance(failed, Failed)
    assert failed.status == 500
    assert "'__call__' that does not exist. Available methods: ['other'] of NotCallable" in failed.message
