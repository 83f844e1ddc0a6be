"""Two applications that use what Starlette and FastAPI offer, to be served by Muster and by uvicorn alike.

Nothing here may answer differently twice, or tell what only one server knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Cookie, Depends, FastAPI, File, Form, Header, HTTPException, Query, UploadFile
from fastapi import WebSocket as FastWebSocket
from fastapi.responses import JSONResponse as FastJSONResponse
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Host, Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

_DIRECTORY = Path(tempfile.gettempdir()) / f"asgi-features-{os.getpid()}"
_FILE = _DIRECTORY / "file.txt"
_FILE_BYTES = b"".join(b"%06d\n" % number for number in range(3000))
_MODIFIED_AT = 1_700_000_000
_BY_PROXIES = {"x-request-id", "traceparent", "tracestate", "forwarded", "via", "host"} | {
    "connection",
    "upgrade",
    "transfer-encoding",
}
"""Request headers that may differ between the servers: what proxies add, and what is about one connection only."""

notes: list[str] = []
"""What was seen after an answer had left."""


def _write_file() -> None:
    _DIRECTORY.mkdir(exist_ok=True)
    _FILE.write_bytes(_FILE_BYTES)
    os.utime(_FILE, (_MODIFIED_AT, _MODIFIED_AT))


def _told(scope: Scope) -> dict[str, Any]:
    """What an application may rely on."""
    headers = sorted(
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in scope["headers"]
        if name.decode() not in _BY_PROXIES and not name.startswith((b"x-forwarded-", b"sec-websocket-"))
    )
    told = {
        key: scope[key].decode("latin-1") if isinstance(scope[key], bytes) else scope[key]
        for key in ("type", "http_version", "scheme", "path", "raw_path", "query_string", "root_path")
    }
    if scope["type"] == "http":
        told["method"] = scope["method"]
    return {**told, "headers": headers, "host": dict(scope["headers"]).get(b"host", b"").decode()}


async def request_seen(request: Request) -> Response:
    body = await request.body()
    return JSONResponse({**_told(request.scope), "body": body.decode("latin-1")})


async def path_params(request: Request) -> Response:
    return JSONResponse(
        {key: [type(value).__name__, str(value)] for key, value in request.path_params.items()}
    )


async def query_params(request: Request) -> Response:
    return JSONResponse(request.query_params.multi_items())


async def form(request: Request) -> Response:
    told = []
    async with request.form() as fields:
        for name, value in fields.multi_items():
            if isinstance(value, str):
                told.append([name, value])
            else:
                content = await value.read()
                told.append(
                    [
                        name,
                        value.filename,
                        value.content_type,
                        len(content),
                        hashlib.sha256(content).hexdigest(),
                    ]
                )
    return JSONResponse(told)


async def cookies(request: Request) -> Response:
    response = JSONResponse(request.cookies)
    response.set_cookie("one", "1", max_age=60, path="/x", httponly=True, samesite="strict")
    response.set_cookie("two", "zwei; drei", secure=True)
    response.set_cookie("three", "", max_age=0)
    return response


async def repeated(_request: Request) -> Response:
    response = PlainTextResponse("repeated")
    for number in range(3):
        response.headers.append("X-Many", str(number))
    response.headers["X-Latin"] = "grün"
    return response


async def status(request: Request) -> Response:
    code = request.path_params["code"]
    return Response(b"" if code in (204, 304) else b"body", status_code=code)


async def redirect(request: Request) -> Response:
    return RedirectResponse(request.url_for("path_params", number=7, rest="a/b"), status_code=303)


async def urls(request: Request) -> Response:
    return JSONResponse(
        [
            str(request.url),
            str(request.base_url),
            str(request.url_for("query_params")),
            str(request.url_for("sub:inner", name="x y")),
            request.app.url_path_for("query_params"),
        ]
    )


async def stream(request: Request) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        for number in range(int(request.query_params.get("count", "3"))):
            yield b"piece %d\n" % number
            await asyncio.sleep(0)

    return StreamingResponse(pieces(), media_type="text/plain")


async def big_stream(_request: Request) -> Response:
    def pieces() -> Any:
        for number in range(64):
            yield bytes([number]) * 65_536

    return StreamingResponse(pieces(), media_type="application/octet-stream")


async def events(_request: Request) -> Response:
    async def lines() -> AsyncIterator[str]:
        for number in range(5):
            yield f"id: {number}\nevent: tick\ndata: {json.dumps({'n': number})}\n\n"
            await asyncio.sleep(0.001)

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def breaks_off(_request: Request) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        raise RuntimeError("in the middle of an answer")

    return StreamingResponse(pieces())


async def file(_request: Request) -> Response:
    return FileResponse(_FILE, filename="grün.txt", headers={"ETag": '"fixed"'})


async def upload(request: Request) -> Response:
    digest, size = hashlib.sha256(), 0
    async for piece in request.stream():
        digest.update(piece)
        size += len(piece)
    return JSONResponse([size, digest.hexdigest()])


async def unread(_request: Request) -> Response:
    return PlainTextResponse("the body was not looked at")


async def background(request: Request) -> Response:
    async def note() -> None:
        await asyncio.sleep(0.01)
        notes.append(request.query_params["note"])

    return PlainTextResponse("later", background=BackgroundTask(note))


async def noted(_request: Request) -> Response:
    return JSONResponse(notes)


async def raises(_request: Request) -> Response:
    raise RuntimeError("not meant for clients")


async def refuses(_request: Request) -> Response:
    raise StarletteHTTPException(418, "a teapot", headers={"X-Kind": "pot"})


async def handled(_request: Request) -> Response:
    raise KeyError("handled")


async def on_key_error(_request: Request, error: Exception) -> Response:
    return JSONResponse({"missing": str(error)}, status_code=409)


async def state(request: Request) -> Response:
    return JSONResponse([request.state.started, request.app.state.is_started])


async def disconnect_is_not_seen(request: Request) -> Response:
    try:
        await request.body()
    except ClientDisconnect:
        return PlainTextResponse("gone")
    return PlainTextResponse(str(await request.is_disconnected()))


async def inner(request: Request) -> Response:
    return JSONResponse(
        [_told(request.scope), request.path_params["name"], str(request.url_for("inner", name="y"))]
    )


async def raw_asgi(scope: Scope, _receive: Receive, send: Send) -> None:
    await send(
        {"type": "http.response.start", "status": 299, "headers": [(b"x-raw", b"\xff"), (b"x-raw", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": True})
    await send({"type": "http.response.body", "body": b"b"})


async def page(_request: Request) -> Response:
    return HTMLResponse("<p>" + "compress me " * 200 + "</p>")


class Stamps:
    """A plain ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", scope["path"].encode())]
            await send(message)

        await self.app(scope, receive, stamped if scope["type"] == "http" else send)


# -- WebSockets --


async def ws_echo(socket: WebSocket) -> None:
    await socket.accept()
    with contextlib.suppress(WebSocketDisconnect):
        while True:
            message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                notes.append(f"closed {message.get('code')} {message.get('reason') or ''}")
                return
            if message.get("text") is not None:
                await socket.send_text(message["text"])
            else:
                await socket.send_bytes(message["bytes"])


async def ws_seen(socket: WebSocket) -> None:
    await socket.accept(headers=[(b"x-accepted", b"yes")])
    await socket.send_json(
        {
            **_told(socket.scope),
            "cookies": socket.cookies,
            "params": socket.path_params,
            "url": str(socket.url),
        }
    )
    await socket.close()


async def ws_closes(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("before")
    await socket.close(int(socket.query_params["code"]), socket.query_params.get("reason"))


async def ws_returns(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("before")


async def ws_raises(socket: WebSocket) -> None:
    await socket.accept()
    raise RuntimeError("not meant for clients")


async def ws_refuses(socket: WebSocket) -> None:
    await socket.close(4403)


async def ws_denies(socket: WebSocket) -> None:
    await socket.send_denial_response(JSONResponse({"why": "no"}, status_code=418, headers={"X-Why": "no"}))


async def ws_chooses(socket: WebSocket) -> None:
    offered = socket.scope["subprotocols"]
    await socket.accept(subprotocol=offered[-1] if offered else None)
    await socket.send_json(offered)
    await socket.close()


async def ws_many(socket: WebSocket) -> None:
    await socket.accept()
    for number in range(int(socket.query_params["count"])):
        await socket.send_text(str(number))
    await socket.close(1000, "enough")


async def ws_large(socket: WebSocket) -> None:
    await socket.accept()
    received = await socket.receive_bytes()
    await socket.send_json([len(received), hashlib.sha256(received).hexdigest()])
    await socket.send_bytes(received)
    await socket.close()


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
    _write_file()
    app.state.is_started = True
    yield {"started": "by lifespan"}
    for path in _DIRECTORY.iterdir():
        path.unlink()
    _DIRECTORY.rmdir()


_DIRECTORY.mkdir(exist_ok=True)  # StaticFiles wants it before the start

starlette_app = Starlette(
    routes=[
        Route("/", request_seen, methods=["GET"]),
        Route("/seen", request_seen, methods=["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]),
        Route("/seen/{rest:path}", request_seen),
        Route("/params/{number:int}/{rest:path}", path_params, name="path_params"),
        Route("/query", query_params, name="query_params"),
        Route("/form", form, methods=["POST"]),
        Route("/cookies", cookies),
        Route("/repeated", repeated),
        Route("/status/{code:int}", status, methods=["GET", "POST"]),
        Route("/redirect", redirect),
        Route("/urls", urls),
        Route("/slash/", request_seen),
        Route("/stream", stream),
        Route("/big-stream", big_stream),
        Route("/events", events),
        Route("/breaks-off", breaks_off),
        Route("/file", file),
        Route("/upload", upload, methods=["POST", "PUT"]),
        Route("/unread", unread, methods=["POST"]),
        Route("/background", background),
        Route("/noted", noted),
        Route("/raises", raises),
        Route("/refuses", refuses),
        Route("/handled", handled),
        Route("/state", state),
        Route("/disconnected", disconnect_is_not_seen, methods=["GET", "POST"]),
        Route("/page", page),
        Mount("/raw", raw_asgi),
        Mount(
            "/sub",
            Starlette(routes=[Route("/inner/{name}", inner, name="inner")], middleware=[Middleware(Stamps)]),
            name="sub",
        ),
        Mount("/static", StaticFiles(directory=_DIRECTORY), name="static"),
        Host("other.test", Starlette(routes=[Route("/only-there", unread)])),
        WebSocketRoute("/ws/echo", ws_echo),
        WebSocketRoute("/ws/seen/{number:int}", ws_seen),
        WebSocketRoute("/ws/closes", ws_closes),
        WebSocketRoute("/ws/returns", ws_returns),
        WebSocketRoute("/ws/raises", ws_raises),
        WebSocketRoute("/ws/refuses", ws_refuses),
        WebSocketRoute("/ws/denies", ws_denies),
        WebSocketRoute("/ws/chooses", ws_chooses),
        WebSocketRoute("/ws/many", ws_many),
        WebSocketRoute("/ws/large", ws_large),
    ],
    middleware=[
        Middleware(GZipMiddleware, minimum_size=1000),
        Middleware(
            CORSMiddleware, allow_origins=["https://good.test"], allow_methods=["PUT"], allow_headers=["X-A"]
        ),
    ],
    exception_handlers={KeyError: on_key_error},
    lifespan=lifespan,
)


# -- FastAPI --


class Item(BaseModel):
    """A body and an answer."""

    name: str = Field(min_length=2, max_length=10)
    price: float = Field(gt=0)
    tags: list[str] = []


class Told(BaseModel):
    """Leaves out what is not in it."""

    name: str


class Unlucky(Exception):
    """Has a handler."""


@contextlib.asynccontextmanager
async def fast_lifespan(_app: FastAPI) -> AsyncIterator[dict[str, Any]]:
    yield {"pool": "made by lifespan"}


fastapi_app = FastAPI(title="features", version="1.2.3", lifespan=fast_lifespan)
_router = APIRouter(prefix="/items", tags=["items"])


def who(x_token: Annotated[str, Header()] = "nobody") -> str:
    if x_token == "bad":
        raise HTTPException(401, "bad token", headers={"WWW-Authenticate": "Bearer"})
    return x_token


@_router.get("/{item_id}")
async def get_item(
    item_id: int,
    q: Annotated[str | None, Query(max_length=5)] = None,
    many: Annotated[list[int] | None, Query()] = None,
    token: str = Depends(who),
) -> dict[str, Any]:
    return {"item_id": item_id, "q": q, "many": many, "token": token}


@_router.post("/", status_code=201, response_model=Told)
async def post_item(item: Item) -> Item:
    return item


@_router.delete("/{item_id}", status_code=204)
def delete_item(item_id: int) -> None:
    assert item_id


@fastapi_app.post("/upload")
async def post_upload(file: Annotated[UploadFile, File()], note: Annotated[str, Form()]) -> dict[str, Any]:
    content = await file.read()
    return {
        "name": file.filename,
        "type": file.content_type,
        "size": len(content),
        "digest": hashlib.sha256(content).hexdigest(),
        "note": note,
    }


@fastapi_app.get("/cookie")
def get_cookie(one: Annotated[str | None, Cookie()] = None) -> dict[str, Any]:
    return {"one": one}


@fastapi_app.get("/pool")
async def get_pool(request: Request) -> str:
    return str(request.state.pool)


@fastapi_app.get("/unlucky")
def get_unlucky() -> None:
    raise Unlucky


@fastapi_app.get("/raises")
def get_raises() -> None:
    raise RuntimeError("not meant for clients")


@fastapi_app.exception_handler(Unlucky)
async def on_unlucky(request: Request, _error: Exception) -> FastJSONResponse:
    return FastJSONResponse({"unlucky": request.url.path}, status_code=599)


@fastapi_app.middleware("http")
async def stamp(request: Request, call_next: Any) -> Response:
    response: Response = await call_next(request)
    response.headers["X-Stamp"] = request.method
    return response


@fastapi_app.websocket("/ws/{name}")
async def fast_socket(socket: FastWebSocket, name: str, token: Annotated[str, Query()]) -> None:
    await socket.accept()
    await socket.send_text(f"{name} {token} {await socket.receive_text()}")
    await socket.close(4000, "done")


fastapi_app.include_router(_router)
