"""`ingress`: routes that are methods, of FastAPI and Starlette, and applications of any other kind."""

from __future__ import annotations

import asyncio
import functools
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import pytest
from fastapi import APIRouter, Body, Depends, FastAPI, Header, WebSocket
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Mount, Route

import muster as serve
from serve_common.config.backend import BackpressureConfig
from serve_common.dispatch.errors import BackPressureError
from serve_common.errors import NoReplicaAvailable
from serve_common.names import BackendTag
from serve_common.protocol.snapshots import BackendProtection

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it would rather have another HTTP client
    from starlette.testclient import TestClient


class Item(BaseModel):
    name: str
    size: int = 1


def client(instance) -> TestClient:
    return TestClient(instance.__muster_asgi__)


def logged(function):
    @functools.wraps(function)
    async def wrapper(*args, **kwargs):
        return "logged " + await function(*args, **kwargs)

    return wrapper


def suffix(x_suffix: Annotated[str, Header()] = "!") -> str:
    return x_suffix


def real() -> str:
    return "real"


def make_fastapi():
    app = FastAPI()

    @serve.ingress(app)
    class Service:
        def __init__(self, name: str) -> None:
            self.name = name

        @app.get("/hello/{times}")
        async def hello(self, times: int, suffix: Annotated[str, Depends(suffix)], loud: bool = False) -> str:
            text = self.name * times + suffix
            return text.upper() if loud else text

        @app.post("/items", status_code=201, tags=["things"], summary="Make one")
        def make(self, item: Item, note: Annotated[str, Body()] = "") -> Item:
            return Item(name=f"{self.name}/{item.name}{note}", size=item.size)

        @app.get("/same")
        async def twice(self) -> int:
            return 1

        @app.get("/other")
        async def twice(self) -> int:  # noqa: F811 - what it is about
            return 2

        @app.get("/logged")
        @logged
        async def with_decorator(self, q: str) -> str:
            return self.name + q

        @app.get("/static")
        @staticmethod
        async def static(q: int) -> int:
            return q

        @app.get("/stream")
        async def stream(self) -> StreamingResponse:
            async def steps() -> AsyncIterator[str]:
                for letter in self.name:
                    yield letter

            return StreamingResponse(steps())

        @app.websocket("/ws/{room}")
        async def chat(self, websocket: WebSocket, room: str) -> None:
            await websocket.accept()
            async for text in websocket.iter_text():
                await websocket.send_text(f"{self.name}/{room}: {text}")

        def not_a_route(self) -> str:
            return self.name

    @app.get("/plain")
    def plain() -> str:
        return "plain"

    return app, Service


def test_methods_of_fastapi_get_their_self_and_all_else_is_as_it_was() -> None:
    _, service_class = make_fastapi()
    service = service_class("ab")
    with client(service) as http:
        assert http.get("/hello/2?loud=true", headers={"X-Suffix": "?"}).json() == "ABAB?"
        made = http.post("/items", json={"item": {"name": "x"}, "note": "n"})
        assert (made.status_code, made.json()) == (201, {"name": "ab/xn", "size": 1})
        assert http.get("/same").json() == 1
        assert http.get("/other").json() == 2
        assert http.get("/logged?q=z").json() == "logged abz"
        assert http.get("/stream").text == "ab"
        assert http.get("/static?q=3").json() == 3
        assert http.get("/plain").json() == "plain"
        refused = http.get("/hello/many")
        assert refused.status_code == 422
        assert [part["loc"] for part in refused.json()["detail"]] == [["path", "times"]]
        with http.websocket_connect("/ws/r1") as socket:
            socket.send_text("hi")
            assert socket.receive_text() == "ab/r1: hi"
    assert service.not_a_route() == "ab"
    assert asyncio.run(service.hello(1, "!")) == "ab!"


def test_two_instances_answer_for_themselves() -> None:
    _, service_class = make_fastapi()
    one, two = service_class("one"), service_class("two")
    assert client(one).get("/hello/1").json() == "one!"
    assert client(two).get("/hello/1").json() == "two!"


def test_the_documentation_of_the_api_does_not_know_self() -> None:
    _, service_class = make_fastapi()
    described = client(service_class("a")).get("/openapi.json").json()
    hello = described["paths"]["/hello/{times}"]["get"]
    assert [parameter["name"] for parameter in hello["parameters"]] == ["times", "loud", "x-suffix"]
    made = described["paths"]["/items"]["post"]
    assert (made["tags"], made["summary"], list(made["responses"])) == (
        ["things"],
        "Make one",
        ["201", "422"],
    )


def test_the_order_of_routes_stays() -> None:
    app = FastAPI()

    @serve.ingress(app)
    class Service:
        @app.get("/a/first")
        def first(self) -> str:
            return "first"

        @app.get("/a/{any_one}")
        def any_one(self, any_one: str) -> str:
            return any_one

    assert client(Service()).get("/a/first").json() == "first"
    assert client(Service()).get("/a/second").json() == "second"


def test_included_routers_and_inherited_methods_are_bound() -> None:
    app, router = FastAPI(), APIRouter(prefix="/inner")
    app.include_router(router, prefix="/v1")

    class Base:
        @app.get("/base")
        def base(self) -> str:
            return type(self).__name__

    @serve.ingress(app)
    class Service(Base):
        @router.get("/it")
        def it(self) -> str:
            return type(self).__name__

        @router.websocket("/ws")
        async def ws(self, websocket: WebSocket) -> None:
            await websocket.accept()
            await websocket.send_text(type(self).__name__)
            await websocket.close()

    http = client(Service())
    assert http.get("/v1/inner/it").json() == "Service"
    assert http.get("/base").json() == "Service"
    with http.websocket_connect("/v1/inner/ws") as socket:
        assert socket.receive_text() == "Service"


def test_an_application_may_be_shared_and_each_class_answers_for_its_own_routes() -> None:
    app = FastAPI()

    @serve.ingress(app)
    class One:
        @app.get("/who")
        def who(self) -> str:
            return "one"

        @app.get("/one")
        def only(self) -> str:
            return "one"

    @serve.ingress(app)
    class Two:
        @app.get("/who")
        def who(self) -> str:
            return "two"

    assert client(One()).get("/who").json() == "one"
    assert client(Two()).get("/who").json() == "two"
    assert client(Two()).get("/one").status_code == 404


def test_overridden_dependencies_hold_for_methods() -> None:
    app = FastAPI()

    @serve.ingress(app)
    class Service:
        @app.get("/it")
        def it(self, value: Annotated[str, Depends(real)]) -> str:
            return value

        @app.websocket("/ws")
        async def ws(self, websocket: WebSocket, value: Annotated[str, Depends(real)]) -> None:
            await websocket.accept()
            await websocket.send_text(value)
            await websocket.close()

    app.dependency_overrides[real] = lambda: "other"
    http = client(Service())
    assert http.get("/it").json() == "other"
    with http.websocket_connect("/ws") as socket:
        assert socket.receive_text() == "other"


def test_a_route_without_an_instance_says_what_to_run_instead() -> None:
    app, _ = make_fastapi()
    with pytest.raises(RuntimeError, match="run the instance's __muster_asgi__"):
        TestClient(app).get("/same")


def test_a_method_without_self_is_refused() -> None:
    app = FastAPI()
    with pytest.raises(ValueError, match=r"Service\.nobody .*needs self"):

        @serve.ingress(app)
        class Service:
            @app.get("/x")
            def nobody() -> str:
                return ""


def test_methods_of_starlette_get_their_self() -> None:
    app = Starlette(routes=[Route("/out", lambda request: PlainTextResponse("out"))])

    @serve.ingress(app)
    class Service:
        name = "s"

        async def hello(self, request):
            return JSONResponse([self.name, request.path_params["who"]])

        def plain(self, request):
            return PlainTextResponse(self.name + request.method)

        async def socket(self, websocket):
            await websocket.accept()
            await websocket.send_text(self.name)
            await websocket.close()

        app.router.add_route("/hello/{who}", hello)
        app.router.add_route("/plain", plain, methods=["POST"])
        app.router.add_websocket_route("/ws", socket)

    http = client(Service())
    assert http.get("/hello/you").json() == ["s", "you"]
    assert http.post("/plain").text == "sPOST"
    assert http.get("/plain").status_code == 405
    assert http.get("/out").text == "out"
    with http.websocket_connect("/ws") as socket:
        assert socket.receive_text() == "s"


def test_lifespan_middlewares_and_mounts_of_the_application_work() -> None:
    log = []

    @asynccontextmanager
    async def lifespan(app):
        log.append("up")
        yield
        log.append("down")

    inner = FastAPI()
    app = FastAPI(lifespan=lifespan, routes=[Mount("/inner", inner)])

    @app.middleware("http")
    async def mark(request, call_next):
        response = await call_next(request)
        response.headers["x-mark"] = "1"
        return response

    @serve.ingress(app)
    class Service:
        @inner.get("/it")
        def it(self) -> str:
            return "it"

    with client(Service()) as http:
        answer = http.get("/inner/it")
        assert (answer.json(), answer.headers["x-mark"]) == ("it", "1")
    assert log == ["up", "down"]


async def plain_application(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


def test_any_asgi_application_will_do_and_no_class_is_needed() -> None:
    service_class = serve.ingress(plain_application)()
    service = service_class(1, two=2)
    assert (service.args, service.kwargs) == ((1,), {"two": 2})
    assert client(service).get("/x").text == "/x"


def test_an_application_can_be_built_when_the_instance_is_there() -> None:
    built = []

    def build():
        built.append(1)
        return Starlette(routes=[Route("/x", lambda request: PlainTextResponse("built"))])

    service = serve.ingress(build)()()
    assert built == []
    assert client(service).get("/x").text == client(service).get("/x").text == "built"
    assert built == [1]


@pytest.mark.parametrize("name", ["__muster_build_asgi__", "__serve_build_asgi_app__"])
def test_a_class_can_build_its_own_application(name: str) -> None:
    class Service:
        text = "own"

        def build(self):
            return Starlette(routes=[Route("/x", lambda request: PlainTextResponse(self.text))])

    setattr(Service, name, Service.build)
    service = serve.ingress()(Service)()
    assert client(service).get("/x").text == "own"


def test_a_builder_that_fails_says_why() -> None:
    def build():
        return None.nothing

    with pytest.raises(RuntimeError, match="could not be built: 'NoneType'"):
        serve.ingress(build)()().__muster_asgi__  # noqa: B018 - reading it builds it
    with pytest.raises(TypeError, match="no ASGI application"):
        serve.ingress(lambda: 3)()().__muster_asgi__  # noqa: B018 - as above


def test_what_is_no_application_or_no_class_is_refused() -> None:
    with pytest.raises(TypeError, match="needs an ASGI application"):
        serve.ingress("app")
    with pytest.raises(TypeError, match="is a class"):
        serve.ingress(FastAPI)
    with pytest.raises(ValueError, match="must be used with a class"):
        serve.ingress(FastAPI())(lambda: None)
    with pytest.raises(ValueError, match="may not have __call__"):
        serve.ingress(FastAPI())(type("Both", (), {"__call__": print}))
    with pytest.raises(ValueError, match="__muster_build_asgi__"):

        @serve.ingress()
        class Nothing:
            pass


@pytest.mark.parametrize("make_application", [FastAPI, Starlette])
def test_a_full_deployment_behind_an_application_is_told_as_such(make_application) -> None:
    application = make_application()
    full = BackPressureError.of_backend(
        BackendTag("default/b"),
        1,
        BackendProtection(backpressure_config=BackpressureConfig(status_code=429, retry_after_s=6.5)),
    )

    async def raises(request: Request):
        raise full if request.query_params else NoReplicaAvailable("none runs")

    application.add_route("/", raises)

    @serve.ingress(application)
    class Front:
        pass

    with client(Front()) as http:
        response = http.get("/?full=1")
        assert (response.status_code, response.headers["retry-after"]) == (429, "7")
        assert response.text.startswith("Request dropped due to backpressure")
        response = http.get("/")
        assert (response.status_code, response.text) == (503, "none runs")
        assert "retry-after" not in response.headers


def test_an_applications_own_handler_of_full_deployments_is_before_ours() -> None:
    application = FastAPI()

    @application.exception_handler(NoReplicaAvailable)
    async def own(_: Request, error: Exception) -> PlainTextResponse:
        return PlainTextResponse(f"own: {error}", 502)

    @application.get("/")
    async def raises() -> None:
        raise NoReplicaAvailable("none runs")

    @serve.ingress(application)
    class Front:
        pass

    with client(Front()) as http:
        response = http.get("/")
    assert (response.status_code, response.text) == (502, "own: none runs")
