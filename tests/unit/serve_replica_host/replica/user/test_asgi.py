"""ASGI applications inside a replica: lifespan, paths, streams, files, errors, WebSockets' denial."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fastapi
import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route
from structlog.testing import capture_logs

from serve_common.protocol.frames import (
    WINDOW_FRAMES,
    BodyHead,
    CancelHead,
    ErrorHead,
    MessageHead,
    RequestKind,
    ResponseHead,
)
from serve_common.protocol.reports import ReplicaGoal
from serve_common.protocol.streams import FRAMES_OVER_MAX
from serve_replica_host.replica.io.body_frames import REQUEST_BODY_BYTES_MAX
from serve_replica_host.replica.user.code import UserCode, UserCodeUnusable
from tests.support.replica_rig import PIECE, UNKNOWN, Rig, build_goal, importable

APP = """
from contextlib import asynccontextmanager
import fastapi
import muster
from fastapi import FastAPI
told = []

@asynccontextmanager
async def lifespan(app):
    told.append("up")
    yield {"model": "m"}
    told.append("down")

app = FastAPI(lifespan=lifespan)

@app.get("/hello/{name}")
def hello(name: str):
    return {"hello": name}

@asynccontextmanager
async def broken(app):
    raise OSError("no weights")
    yield

broken_app = FastAPI(lifespan=broken)

async def bare(scope, receive, send):
    if scope["type"] != "http":
        raise RuntimeError("only http")
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})

class Ingress:
    __muster_asgi__ = staticmethod(bare)

    def __init__(self, greeting="hi"):
        self.greeting = greeting

    async def greet(self, name):
        return f"{self.greeting} {name}"

class Factory:
    def __muster_asgi__(self):
        return app

shop = FastAPI()

@muster.ingress(shop)
class Shop:
    def __init__(self, greeting="hi"):
        self.greeting = greeting

    @shop.get("/greet/{name}")
    def greet(self, name: str):
        return f"{self.greeting} {name}"

    @shop.websocket("/ws")
    async def talk(self, socket: fastapi.WebSocket):
        await socket.accept()
        await socket.send_text(self.greeting)
        await socket.close()

class Own:
    async def __call__(self, scope, receive, send):
        await bare(scope, receive, send)
"""


@pytest.fixture
def app_dir(tmp_path: Path) -> Iterator[str]:
    with importable(tmp_path, unit_asgi_app=APP) as directory:
        yield directory


def goal(attribute: str) -> ReplicaGoal:
    return build_goal(f"unit_asgi_app:{attribute}")


async def test_an_application_is_served_with_its_lifespan_around_it(app_dir: str) -> None:
    code = await UserCode.construct(goal("app"), app_dir)
    told = sys.modules["unit_asgi_app"].told
    assert code.asgi is not None
    assert (told, code.asgi.state) == (["up"], {"model": "m"})
    assert code.streams_bodies

    rig = Rig(application=code.asgi.application)
    answer = await rig.call("/app/hello/you", method="GET")

    assert (answer.status, answer.body) == (200, b'{"hello":"you"}')
    assert answer.headers[b"content-length"] == b"15"
    assert isinstance(answer.head, ResponseHead)
    assert answer.head.last
    await code.stop()
    await code.stop()
    assert told == ["up", "down"]
    code.discard()


async def test_a_start_up_that_fails_fails_the_start_with_its_own_error(app_dir: str) -> None:
    with pytest.raises(OSError, match="no weights"):
        await UserCode.construct(goal("broken_app"), app_dir)


@pytest.mark.parametrize("attribute", ["bare", "Ingress", "Own"])
async def test_what_knows_no_lifespan_is_served_all_the_same(app_dir: str, attribute: str) -> None:
    code = await UserCode.construct(goal(attribute), app_dir)
    assert code.asgi is not None

    answer = await Rig(application=code.asgi.application).call()

    assert answer.status == 204
    await code.stop()
    code.discard()


async def test_an_ingress_class_may_give_its_application_by_a_function_and_keeps_its_methods(
    app_dir: str,
) -> None:
    factory = await UserCode.construct(goal("Factory"), app_dir)
    ingress = await UserCode.construct(goal("Ingress"), app_dir)

    assert isinstance(factory.asgi and factory.asgi.application, fastapi.FastAPI)
    assert await ingress.call("you", method_name="greet") == "hi you"
    await factory.stop()
    factory.discard()
    ingress.discard()


async def test_an_ingress_class_answers_http_and_websockets_as_its_own_instance(app_dir: str) -> None:
    code = await UserCode.construct(goal("Shop"), app_dir)
    assert code.asgi is not None
    rig = Rig(application=code.asgi.application)

    answer = await rig.call("/app/greet/you", method="GET")
    socket = rig.begin("/app/ws", kind=RequestKind.WEBSOCKET, method="GET")
    await socket.frame()

    assert answer.body == b'"hi you"'
    assert await socket.frame() == (MessageHead(1, True, True), b"hi")
    await rig.idle()
    assert await code.call("me", method_name="greet") == "hi me"
    await code.stop()
    code.discard()


async def test_a_class_that_is_not_callable_and_no_application_is_refused(app_dir: str) -> None:
    with pytest.raises(UserCodeUnusable, match="neither a class nor a function"):
        await UserCode.construct(goal("told"), app_dir)


async def test_paths_are_those_of_an_application_mounted_at_the_route() -> None:
    seen: list[dict[str, Any]] = []

    async def show(request: Request) -> JSONResponse:
        seen.append(dict(request.scope))
        return JSONResponse(
            {
                "url": str(request.url),
                "for": str(request.url_for("show", rest="x")),
                "state": request.state.model,
            }
        )

    inner = Starlette(routes=[Route("/show/{rest:path}", show, name="show")])
    application = Starlette(routes=[Mount("/in", inner)])

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["model"] = "m"
        await application(scope, receive, send)

    answer = await Rig(application=with_state).call(
        "/app/in/show/a%20b", query="q=1", headers=[(b"host", b"api.example:81")], method="GET"
    )

    assert answer.body == (
        b'{"url":"http://api.example:81/app/in/show/a b?q=1",'
        b'"for":"http://api.example:81/app/in/show/x","state":"m"}'
    )
    (scope,) = seen
    assert (scope["path"], scope["root_path"]) == ("/app/in/show/a b", "/app/in")
    assert scope["raw_path"] == b"/app/in/show/a%20b"
    assert (scope["client"], scope["server"]) == (("10.0.0.1", 5), ("api.example", 81))


@pytest.mark.parametrize("sent", [[], [(b"x-request-id", b"one that the proxy refused")]])
async def test_the_application_gets_the_id_of_the_request_as_a_header(
    sent: list[tuple[bytes, bytes]],
) -> None:
    async def show(request: Request) -> JSONResponse:
        return JSONResponse(request.headers.getlist("x-request-id"))

    application = Starlette(routes=[Route("/app", show)])
    rig = Rig(application=application)
    answer = await rig.call("/app", method="GET", route="/", headers=[*sent, (b"host", b"h")])
    assert answer.body == b'["r1"]'


async def test_server_sent_events_leave_one_by_one_and_their_head_before_the_first() -> None:
    go: asyncio.Queue[str] = asyncio.Queue()

    async def events(request: Request) -> StreamingResponse:
        async def lines() -> AsyncIterator[str]:
            while (word := await go.get()) != "end":
                yield f"data: {word}\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    rig = Rig(application=Starlette(routes=[Route("/app", events)]))
    request = rig.begin(method="GET", route="/")
    head, body = await request.frame()
    assert isinstance(head, ResponseHead)
    assert (body, dict(head.headers)[b"content-type"]) == (b"", b"text/event-stream; charset=utf-8")
    for word in ("one", "two"):
        go.put_nowait(word)
        assert (await request.frame())[1] == f"data: {word}\n\n".encode()
    go.put_nowait("end")

    _, body = await request.frame()

    assert body == b""
    await rig.idle()


async def test_files_ranges_and_work_after_the_answer(tmp_path: Path) -> None:
    content = bytes(range(256)) * 1000
    (tmp_path / "f.bin").write_bytes(content)
    ran: list[str] = []

    async def file(request: Request) -> FileResponse:
        return FileResponse(tmp_path / "f.bin", background=BackgroundTask(ran.append, "ran"))

    rig = Rig(application=Starlette(routes=[Route("/app", file)]))
    whole = await rig.call(method="GET", route="/")
    part = await rig.call(method="GET", route="/", headers=[(b"range", b"bytes=1-3")])
    await rig.idle()

    assert whole.body == content
    assert (part.status, part.body) == (206, b"\x01\x02\x03")
    assert ran == ["ran", "ran"]


async def test_a_handler_may_return_a_file(tmp_path: Path) -> None:
    (tmp_path / "f.txt").write_text("file")

    def handler(request: Request) -> FileResponse:
        return FileResponse(tmp_path / "f.txt")

    rig = Rig(handler)
    answer = await rig.call()

    assert (answer.body, answer.headers[b"content-type"]) == (b"file", b"text/plain; charset=utf-8")
    await rig.idle()  # it closes the file after its last part
    rig.code.discard()


async def test_an_application_that_says_nothing_is_answered_for() -> None:
    async def says_nothing(scope: Any, receive: Any, send: Any) -> None:
        return

    answer = await Rig(application=says_nothing).call()

    assert answer.status == 500
    assert isinstance(answer.head, ErrorHead)
    assert answer.head.message == "the application returned without an answer"


async def test_starlettes_own_middlewares_work() -> None:
    async def middle(request: Request, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["x-middle"] = "yes"
        return response

    async def hello(request: Request) -> PlainTextResponse:
        return PlainTextResponse(await request.body())

    application = Starlette(
        routes=[Route("/app", hello, methods=["POST"])],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=middle)],
    )
    rig = Rig(application=application)

    answer = await rig.call(body=b"hi", route="/")

    assert (answer.body, answer.headers[b"x-middle"]) == (b"hi", b"yes")
    await rig.idle()


async def test_a_caller_who_leaves_cancels_a_stream_without_an_error_in_the_log() -> None:
    stopped = asyncio.Event()

    async def endless(request: Request) -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x"
                    await asyncio.sleep(0)
            finally:
                stopped.set()

        return StreamingResponse(pieces())

    with capture_logs() as logs:
        rig = Rig(application=Starlette(routes=[Route("/app", endless)]))
        request = rig.begin(method="GET", route="/")
        await request.frame()
        request.send(CancelHead())
        await rig.idle()
        await asyncio.wait_for(stopped.wait(), 30)

    assert logs == []
    assert rig.metrics.answered == [499]


@asynccontextmanager
async def _nothing(_: Any) -> AsyncIterator[None]:
    yield


async def test_forms_and_files_are_parsed_from_a_body_in_pieces() -> None:
    application = fastapi.FastAPI(lifespan=_nothing)

    @application.post("/form")
    async def form(name: str = fastapi.Form(), file: fastapi.UploadFile = fastapi.File()) -> dict[str, Any]:  # noqa: B008
        return {"name": name, "size": len(await file.read())}

    application.router.routes[-1].endpoint.__annotations__.update(name=str, file=fastapi.UploadFile)  # type: ignore[attr-defined]
    content = b"y" * 1_500_000
    body = (
        b'--b\r\nContent-Disposition: form-data; name="name"\r\n\r\nA\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        + content
        + b"\r\n--b--\r\n"
    )
    rig = Rig(application=application)

    answer = await rig.call(
        "/app/form", body=body, headers=[(b"content-type", b"multipart/form-data; boundary=b")]
    )

    assert answer.body == b'{"name":"A","size":1500000}'
    await rig.idle()


# Bodies that come in pieces: read as they come, with credit for what was read and no more.


FRAMES = WINDOW_FRAMES * 5


async def test_an_async_handler_reads_a_body_of_unknown_size_while_it_comes() -> None:
    read: list[bytes] = []
    has_read = asyncio.Event()

    async def handler(request: Request) -> int:
        async for piece in request.stream():
            read.append(piece)
            has_read.set()
        return sum(map(len, read))

    rig = Rig(handler)
    request = rig.begin(first=b"one", body_bytes=UNKNOWN)
    await asyncio.wait_for(has_read.wait(), 30)
    assert read == [b"one"]
    await request.upload([b"two"], ends=False)
    await request.upload([b"", b"three"])

    answer = await request.answer()

    assert (answer.status, answer.body) == (200, b"11")
    await rig.idle()


async def test_a_slow_reader_holds_the_router_back_and_memory_is_bounded() -> None:
    go = asyncio.Event()
    total = 0

    async def handler(request: Request) -> int:
        nonlocal total
        stream = request.stream()
        total += len(await anext(stream))
        await go.wait()
        async for piece in stream:
            total += len(piece)
        return total

    rig = Rig(handler)
    request = rig.begin(first=PIECE, body_bytes=FRAMES * len(PIECE))
    async with asyncio.TaskGroup() as group:
        upload = group.create_task(request.upload([PIECE] * (FRAMES - 1)))
        done, _ = await asyncio.wait([upload], timeout=0.05)
        assert not done
        assert request.sequence <= WINDOW_FRAMES + 1
        go.set()
        answer = await request.answer()

    assert int(answer.body) == FRAMES * len(PIECE)


async def test_a_plain_function_gets_the_whole_body() -> None:
    seen: list[Any] = []

    def handler(request: Request) -> str:
        seen.append(asyncio.run(_whole(request)))
        return "ok"

    async def _whole(request: Request) -> bytes:
        return await request.body()

    rig = Rig(handler)
    request = rig.begin(first=b"ab", body_bytes=UNKNOWN)
    await asyncio.sleep(0)
    assert seen == []
    await request.upload([b"cd", b"ef"])

    assert (await request.answer()).body == b"ok"
    assert seen == [b"abcdef"]
    rig.code.discard()


async def test_plain_calls_are_limited_in_size_also_when_it_was_not_said() -> None:
    rig = Rig(lambda argument: argument)
    request = rig.begin(kind=RequestKind.CALL, first=PIECE, body_bytes=UNKNOWN)
    pieces = REQUEST_BODY_BYTES_MAX // len(PIECE)
    await request.upload([PIECE] * pieces, ends=False)

    answer = await request.answer()

    assert answer.status == 413
    await rig.idle()


async def test_an_answer_may_come_before_the_end_of_the_body() -> None:
    async def handler(request: Request) -> str:
        await anext(request.stream())
        return "enough"

    rig = Rig(handler)
    request = rig.begin(first=b"one", body_bytes=UNKNOWN)

    answer = await request.answer()
    request.send(BodyHead(1, False), b"two")
    request.send(BodyHead(2, True), b"three")

    assert answer.body == b"enough"
    assert request.is_silent
    await rig.idle()


async def test_the_callers_leaving_ends_the_reading() -> None:
    ended: list[str] = []
    reading = asyncio.Event()

    async def handler(request: Request) -> None:
        try:
            async for _ in request.stream():
                reading.set()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    rig = Rig(handler)
    request = rig.begin(first=b"one", body_bytes=UNKNOWN)
    await asyncio.wait_for(reading.wait(), 30)
    request.send(CancelHead())
    await rig.idle()

    assert ended == ["cancelled"]
    assert rig.metrics.answered == [499]


async def test_an_application_that_ignores_its_cancellation_hears_of_the_leaving() -> None:
    heard: list[str] = []
    reading = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        reading.set()
        try:
            await receive()
        except asyncio.CancelledError:
            heard.append((await receive())["type"])

    rig = Rig(application=application)
    request = rig.begin(first=b"one", body_bytes=UNKNOWN)
    await asyncio.wait_for(reading.wait(), 30)
    await asyncio.sleep(0)
    request.send(CancelHead())
    await rig.idle()

    assert heard == ["http.disconnect"]


@pytest.mark.parametrize(
    ("head", "piece", "why"),
    [
        (BodyHead(1, True), b"x", "5 bytes instead of 6"),
        (BodyHead(1, False), b"xxx", "7 bytes instead of 6"),
    ],
)
async def test_a_body_with_a_wrong_size_ends_the_work(head: BodyHead, piece: bytes, why: str) -> None:
    async def handler(request: Request) -> bytes:
        return await request.body()

    rig = Rig(handler)
    request = rig.begin(first=b"four", body_bytes=6)
    await asyncio.sleep(0)
    request.send(head, piece)

    error, _ = await request.frame()

    assert isinstance(error, ErrorHead)
    assert error.status == 502
    assert why in error.message
    await rig.idle()


async def test_a_router_that_ignores_the_window_is_cut_off() -> None:
    async def handler(request: Request) -> None:
        await asyncio.Event().wait()

    rig = Rig(handler)
    request = rig.begin(first=b"x", body_bytes=UNKNOWN)
    for sequence in range(1, WINDOW_FRAMES + FRAMES_OVER_MAX + 1):
        request.send(BodyHead(sequence, False), b"x")

    error, _ = await request.frame()

    assert isinstance(error, ErrorHead)
    assert "sends more than it was allowed" in error.message
    await rig.idle()


async def test_a_large_body_is_echoed_whole_in_constant_memory_both_ways() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        more = True
        while more:
            message = await receive()
            more = message["more_body"]
            await send({"type": "http.response.body", "body": message["body"], "more_body": more})

    rig = Rig(application=application)
    request = rig.begin(first=PIECE, body_bytes=FRAMES * len(PIECE))
    async with asyncio.TaskGroup() as group:
        upload = group.create_task(request.upload([PIECE] * (FRAMES - 1)))
        answer = await request.answer()

    assert upload.done()
    assert len(answer.body) == FRAMES * len(PIECE)
    assert rig.metrics.answered == [200]
