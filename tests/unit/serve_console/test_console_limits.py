"""How much one person may use, and what becomes of rights that are taken away."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from starlette.requests import Request

from serve_common.errors import LimitReached
from serve_common.identities.people import PasswordWrong, encode_people
from serve_common.identities.roles import Role
from serve_common.names import GoalId
from serve_common.runtime.settings import Environment
from serve_console import wiring as wiring_module
from serve_console.adapters.people_file import PeopleFile
from serve_console.settings import read_settings
from serve_console.web import goals as goals_module
from serve_console.web import live as live_module
from serve_console.web import sign_in as sign_in_module
from serve_console.web.sign_in import COOKIE
from tests.support.console_world import ConsoleWorld, seal, submit
from tests.support.waiting import eventually
from tests.unit.serve_console.test_pages import signed_in


async def test_attempts_from_many_addresses_at_once_do_not_queue_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, tried, may_go_on = ConsoleWorld(seal("ada")), [], threading.Event()

    def wait(person: object, _password: str) -> str:
        tried.append(person)
        may_go_on.wait(5)
        raise PasswordWrong("wrong")

    monkeypatch.setattr(sign_in_module, "open_person", wait)
    refused = list[LimitReached]()

    async def attempt(number: int) -> None:
        try:
            await world.sign_in.start(f"name{number}", "x", f"192.0.2.{number}")
        except LimitReached as error:
            refused.append(error)
        except PasswordWrong:
            pass

    async with asyncio.TaskGroup() as tasks:
        for number in range(60):
            tasks.create_task(attempt(number))
        await eventually(lambda: len(tried) >= 2)
        may_go_on.set()
    assert len(refused) == 40
    assert len(tried) == 20


async def test_a_person_who_signs_in_again_leaves_no_session_behind() -> None:
    world = ConsoleWorld(seal("ada"), seal("bob", Role.VIEW))
    async with world.browser() as browser:
        form = await browser.get("/sign-in")
        await submit(browser, "ada")
        old = browser.cookies[COOKIE]
        token = form.text.partition('name="csrf" value="')[2].partition('"')[0]
        browser.cookies.set("muster_sign_in", token, path="/sign-in")
        again = await browser.post(
            "/sign-in", data={"csrf": token, "name": "bob", "password": "correct horse"}
        )
        assert again.status_code == 303
    assert not world.sessions.has(old)
    assert len(world.sessions) == 1


def test_a_file_of_people_that_was_removed_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "people.json"
    path.write_text(encode_people([seal("ada")]))
    people = PeopleFile(path)
    assert set(people.read()) == {"ada"}
    path.write_text('[{"name": "a')  # half-written
    assert set(people.read()) == {"ada"}
    path.unlink()
    assert people.read() == {}
    path.write_text(encode_people([seal("bob")]))
    assert set(people.read()) == {"bob"}


async def test_one_person_cannot_take_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "STREAMS_OF_PERSON_MAX", 2)
    world = ConsoleWorld()
    browser, session = await signed_in(world)
    _, other = await world.start_session("bob", Role.VIEW)
    streams = live_module.LiveStreams(world.shared)
    opened = [streams._stream(session, "now", lambda _state: [], {}, None) for _ in range(2)]
    for stream in opened:
        await anext(stream)
    assert streams.is_full(session)
    assert not streams.is_full(other)
    await opened[0].aclose()
    assert not streams.is_full(session)
    await opened[1].aclose()
    await browser.aclose()


async def test_the_stream_of_a_name_that_none_can_have_is_refused() -> None:
    world = ConsoleWorld()
    browser, _ = await signed_in(world)
    await world.hub.close()
    async with browser:
        assert (await browser.get("/live/deployments/" + "x" * 3000)).status_code == 404
        assert (
            await browser.get("/live/deployments/default/gone")
        ).status_code == 200  # it may have been deleted


async def test_the_head_of_a_goals_stream_ends() -> None:
    world = ConsoleWorld()
    browser, _ = await signed_in(world)
    async with browser, asyncio.timeout(2):
        assert (await browser.head("/live/goals/g1")).status_code == 200


async def test_two_names_from_a_proxy_in_front_are_believed_as_little_as_none(tmp_path: Path) -> None:
    path = tmp_path / "view.creds"
    path.write_text('{"user": "view", "password": "p"}')
    world = ConsoleWorld(TRUSTED_HEADER="X-User", TRUSTED_FROM="192.0.2.0/24", VIEW_CREDS_FILE=str(path))
    async with world.browser() as browser:
        one = await browser.get("/sign-in", headers=[("X-User", "ada")])
        two = await browser.get("/sign-in", headers=[("X-User", "root"), ("X-User", "ada")])
    assert (one.status_code, two.status_code) == (303, 200)


async def test_a_person_with_another_role_or_password_loses_all_rights_with_the_next_request() -> None:
    world = ConsoleWorld(seal("ada", Role.ADMIN))
    async with world.browser() as browser:
        assert (await submit(browser, "ada")).status_code == 303
        page = await browser.get("/")
        token = page.text.partition('name="csrf" value="')[2].partition('"')[0]
        world.people["ada"] = seal("ada", Role.VIEW)
        refused = await browser.post("/do/scale/apply", data={"csrf": token, "command": "{}"})
    assert (refused.status_code, refused.headers["location"]) == (303, "/sign-in")
    assert world.stacks[0].is_closed
    assert len(world.sessions) == 0


async def test_one_person_cannot_take_all_streams_of_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goals_module, "STREAMS_OF_PERSON_MAX", 1)
    world = ConsoleWorld()
    _, session = await world.start_session()
    pages = goals_module.GoalPages(world.shared)
    request = Request({"type": "http", "method": "GET", "path_params": {"goal_id": "g1"}, "headers": []})
    stream = pages._stream(session, GoalId("g1"), None)
    await anext(stream)
    assert (await pages._live(request, session)).status_code == 503
    await stream.aclose()


async def test_a_browser_that_takes_nothing_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(wiring_module, "STALLED_S", 0.5)
    (tmp_path / "people.json").write_text(encode_people([seal("ada")]))
    variables = {
        "MUSTER_CONSOLE_USERS_FILE": str(tmp_path / "people.json"),
        "MUSTER_CONSOLE_PORT": "0",
        "MUSTER_OPS_PORT": "0",
    }
    failures = list[None]()
    console = wiring_module.Console(
        read_settings(Environment(variables)), on_failure=lambda: failures.append(None)
    )
    await console.start()
    _, stalled = await asyncio.open_connection("127.0.0.1", console.port, limit=1)
    try:
        request = b"GET /sign-in HTTP/1.1\r\nHost: localhost\r\n\r\n"
        stalled.write(request * 3_000)  # more than the buffers of both ends take
        await eventually(lambda: bool(console._server.server_state.connections))
        await eventually(lambda: not console._server.server_state.connections, within_s=20.0)
        reader, writer = await asyncio.open_connection("127.0.0.1", console.port)
        writer.write(request)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()
    finally:
        stalled.transport.abort()
        await console.close()
    assert failures == []
