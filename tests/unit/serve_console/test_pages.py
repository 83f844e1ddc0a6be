"""What every response has: headers, errors as pages, streams."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import msgspec
import pytest
from starlette.requests import Request

from serve_common.errors import BusAuthorizationFailed, NotFound, StoreUnavailable
from serve_console.core.system import NOTHING_READ, System, Trouble
from serve_console.shell.sessions import PersonSession
from serve_console.web import live as live_module
from serve_console.web.live import LiveStreams, whole
from serve_console.web.shared import encode_event
from serve_console.web.sign_in import COOKIE
from tests.support.console_world import ConsoleWorld, status

HEADERS = {
    "content-security-policy", "x-content-type-options", "referrer-policy", "cross-origin-opener-policy",
    "cross-origin-resource-policy", "permissions-policy", "cache-control",
}  # fmt: skip


async def signed_in(world: ConsoleWorld) -> tuple[httpx.AsyncClient, PersonSession]:
    token, session = await world.start_session()
    world.hub.system = msgspec.structs.replace(NOTHING_READ, status=status(), read_at=world.clock.now())
    browser = world.browser()
    browser.cookies.set(COOKIE, token)
    return browser, session


async def test_every_response_has_the_headers_also_errors_redirects_and_static_files() -> None:
    world = ConsoleWorld()
    browser, _ = await signed_in(world)
    static = world.shared.renderer.static
    async with browser:
        pages = {
            path: await browser.request(method, path)
            for method, path in [
                ("GET", "/"),
                ("GET", "/nothing-there"),
                ("DELETE", "/sign-in"),
                ("GET", f"{static}/console.css"),
                ("GET", f"{static}/../settings.py"),
                ("HEAD", "/sign-in"),
            ]
        }
        world.hub.fresh = fail_with(RuntimeError("a fault"))  # type: ignore[method-assign]
        pages["failed"] = await browser.get("/")
    assert {path: HEADERS - set(page.headers) for path, page in pages.items()} == {
        path: set() for path in pages
    }
    assert pages["failed"].status_code == 500
    assert "a fault" not in pages["failed"].text
    assert "immutable" in pages[f"{static}/console.css"].headers["cache-control"]
    assert {page.headers["cache-control"] for path, page in pages.items() if "css" not in path} == {
        "no-store"
    }


def fail_with(error: Exception) -> Any:
    async def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "status_code"),
    [
        (BusAuthorizationFailed("NATS does not allow ada to do this"), 403),
        (NotFound("there is no <b>such</b>"), 404),
        (StoreUnavailable("Postgres does not answer"), 503),
    ],
)
async def test_an_error_of_the_stack_is_a_page_that_says_it_escaped(
    error: Exception, status_code: int
) -> None:
    world = ConsoleWorld()
    browser, _ = await signed_in(world)
    world.hub.fresh = fail_with(error)  # type: ignore[method-assign]
    async with browser:
        page = await browser.get("/")
    assert page.status_code == status_code
    assert "<b>such" not in page.text
    assert str(error).split("<")[0] in page.text


async def test_whoever_is_not_signed_in_is_led_to_the_sign_in_page_and_a_stream_is_told_to() -> None:
    world = ConsoleWorld()
    async with world.browser() as browser:
        assert (await browser.get("/")).headers["location"] == "/sign-in"
        part = await browser.get("/live/now", headers={"HX-Request": "true"})
    assert (part.status_code, part.headers["hx-redirect"]) == (401, "/sign-in")


async def test_pages_are_compressed() -> None:
    world = ConsoleWorld()
    browser, _ = await signed_in(world)
    async with browser:
        page = await browser.get("/", headers={"accept-encoding": "gzip"})
    assert page.headers["content-encoding"] == "gzip"


# Streams.


class Tab:
    """A stream as its browser reads it."""

    def __init__(self, world: ConsoleWorld, session: PersonSession, streams: LiveStreams, seen: str) -> None:
        scope = {"type": "http", "method": "GET", "query_string": f"seen={seen}".encode(), "headers": []}
        self.response = streams.respond(Request(scope), session, "test", build)
        self.parts: AsyncIterator[bytes] = getattr(self.response, "body_iterator", iter(()))

    async def next(self) -> bytes:
        return await anext(self.parts)


def build(system: System) -> list[live_module.Fragment]:
    leader = "" if system.status is None else system.status.controller_id
    return [whole("leader", leader), whole("fixed", "always so")]


async def show(world: ConsoleWorld, **changes: Any) -> None:
    await world.hub._show(msgspec.structs.replace(world.hub.system, **changes))


async def test_a_stream_sends_what_the_page_has_not_shown_and_then_only_what_changed() -> None:
    world = ConsoleWorld()
    _, session = await world.start_session()
    streams = LiveStreams(world.shared)
    await show(world, status=status())
    streams.note_page("test", world.hub.system, build)
    await show(world, status=msgspec.structs.replace(status(), controller_id="d"))
    tab = Tab(world, session, streams, seen="1")
    assert await tab.next() == b"retry: 1000\n\n"
    assert await tab.next() == encode_event("leader", "d")
    await show(world)
    away = Trouble("bus", "NATS is away.", "")
    await show(world, trouble=away)
    found = await tab.next()
    assert found.startswith(b"event: banner\n")
    assert b"event: fixed" not in found


@pytest.mark.parametrize("seen", ["", "999", "-1", "x"])
async def test_a_tab_whose_page_is_unknown_gets_everything(seen: str) -> None:
    world = ConsoleWorld()
    _, session = await world.start_session()
    await show(world, status=status())
    tab = Tab(world, session, LiveStreams(world.shared), seen)
    await tab.next()
    found = await tab.next()
    assert found.count(b"event: ") == 3


async def test_a_stream_ends_with_its_session_and_says_so() -> None:
    world = ConsoleWorld()
    token, session = await world.start_session()
    tab = Tab(world, session, LiveStreams(world.shared), "")
    await tab.next()
    await tab.next()
    await world.sessions.end(token)
    await show(world)
    found = await tab.next()
    assert found.startswith(b"event: banner\n")
    assert b"Sign in again" in found
    assert found.endswith(encode_event("signed-out", ""))
    with pytest.raises(StopAsyncIteration):
        await tab.next()
    assert world.hub.watchers == 0


@pytest.mark.parametrize("path", ["/live/now", "/live/goals/g1", "/live/deployments/default/gone"])
async def test_a_tab_that_opens_its_stream_after_its_session_was_over_is_told_so(path: str) -> None:
    world = ConsoleWorld()
    async with world.browser() as browser:
        stream = await browser.get(path, headers={"accept": "text/event-stream"})
        page = await browser.get(path)
    assert (stream.status_code, stream.content) == (200, world.shared.end_of_session)
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert page.status_code == 303


async def test_a_silent_stream_shows_that_it_lives_and_ends_with_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_module, "_SILENT_S", 0.01)
    world = ConsoleWorld()
    _, session = await world.start_session()
    tab = Tab(world, session, LiveStreams(world.shared), "")
    await tab.next()
    await tab.next()
    assert await tab.next() == b": still here\n\n"
    await world.hub.close()
    assert [part async for part in tab.parts if b"signed" in part] == []


async def test_streams_have_a_limit_and_one_that_ends_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "STREAMS_MAX", 2)
    world = ConsoleWorld()
    _, session = await world.start_session()
    streams = LiveStreams(world.shared)
    tabs = [Tab(world, session, streams, "") for _ in range(2)]
    for tab in tabs:
        await tab.next()
    assert Tab(world, session, streams, "").response.status_code == 503
    await cast(Any, tabs[0].parts).aclose()
    assert Tab(world, session, streams, "").response.status_code == 200


async def test_the_head_of_a_stream_ends_at_once() -> None:
    world = ConsoleWorld()
    browser, _ = await signed_in(world)
    async with browser:
        response = await browser.head("/live/now")
    assert (response.status_code, world.hub.watchers) == (200, 0)
    assert response.headers["content-type"].startswith("text/event-stream")


async def test_a_stream_is_not_compressed_as_that_would_delay_it() -> None:
    world = ConsoleWorld()
    browser, _ = await signed_in(world)
    await world.hub.close()  # so that it ends
    async with browser:
        response = await browser.get("/live/now", headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in response.headers
    assert response.content.startswith(b"retry: 1000")
    assert not response.content.startswith(gzip.compress(b"")[:2])
