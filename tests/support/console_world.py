"""A console without a stack: its people, sessions, hub and pages over replies that tests choose."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx

from muster.client.requests import Feed, FeedMessage, StackAddress
from serve_common.api.queries import (
    GetAllApplications,
    GetAllEndpoints,
    GetEvents,
    GetLoad,
    GetRollouts,
)
from serve_common.api.views import EventView, LoadView, StatusView
from serve_common.errors import ServeError
from serve_common.identities.people import (
    GENERATED_COSTS,
    NONCE_BYTES,
    SALT_BYTES,
    Person,
    PlainUser,
    encode_plain_user,
    seal_person,
)
from serve_common.identities.roles import Role
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.settings import Environment
from serve_common.runtime.tasks import TaskOwner
from serve_console.settings import ConsoleSettings, read_settings
from serve_console.shell.hub import Hub
from serve_console.shell.sessions import PersonSession, Sessions
from serve_console.web.app import build_app
from serve_console.web.shared import Renderer, Shared
from serve_console.web.sign_in import SignIn, SignInPages

PASSWORD = "correct horse"


class MovedClock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.time = 1_000.0

    def now(self) -> float:
        return self.time


def seal(name: str, role: Role = Role.ADMIN, password: str = PASSWORD) -> Person:
    """A person whose password is quick to try."""
    identity = encode_plain_user(PlainUser(user=role.value, password="of the role"))
    return seal_person(
        name,
        role,
        password,
        identity,
        salt=bytes(SALT_BYTES),
        nonce=bytes(NONCE_BYTES),
        costs=GENERATED_COSTS,
    )


def status(snapshot_id: int = 1, **more: Any) -> StatusView:
    """The status of a stack in which nothing is deployed."""
    fields: dict[str, Any] = {"store_available": True, "deployments": [], "hosts": [], "proxies": []}
    return StatusView(controller_id="c", epoch=1, snapshot_id=snapshot_id, **{**fields, **more})


def event(at: float, message: str = "happened") -> EventView:
    return EventView(at=at, kind="host", subject="h", message=message)


class FakeController:
    """What all people's connections reach: counts what it was requested, and fails as tests say."""

    def __init__(self) -> None:
        self.status = status()
        self.events: list[EventView] = []
        self.load = LoadView(at=0.0, endpoints=[], backends=[], unreachable=[])
        self.fails: ServeError | None = None
        self.requests: list[str] = []
        self.published: asyncio.Queue[bytes] = asyncio.Queue()
        self.feeds: list[str] = []

    async def fetch_status(self) -> StatusView:
        return cast(StatusView, await self._reply("get_status", self.status))

    async def call(self, request: Any) -> Any:
        match request:
            case GetAllApplications() | GetAllEndpoints() | GetRollouts():
                return await self._reply(request.verb, [])
            case GetEvents():
                return await self._reply(request.verb, list(self.events))
            case GetLoad():
                return await self._reply(request.verb, self.load)
        raise AssertionError(f"{request.verb} is not played")

    async def _reply(self, verb: str, reply: Any) -> Any:
        self.requests.append(verb)
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        return reply

    @asynccontextmanager
    async def listen(self, address: StackAddress, subjects: Sequence[str]) -> AsyncIterator[Feed]:
        self.feeds.append(address.user)
        yield cast(Feed, self)

    async def receive(self, within_s: float | None = None) -> FeedMessage | None:
        try:
            async with asyncio.timeout(0.02):
                return FeedMessage("serve.event.host.h", await self.published.get())
        except TimeoutError:
            return None


class FakeStack:
    """One person's connection."""

    def __init__(self, controller: FakeController, address: StackAddress, name: str) -> None:
        self.address = address
        self.admin = self.live = self.caller = cast(Any, controller)
        self.name = name
        self.is_closed = False
        self.refuses: ServeError | None = None

    async def connect(self, within_s: float) -> None:
        if self.refuses is not None:
            raise self.refuses

    async def close(self) -> None:
        self.is_closed = True


class ConsoleWorld:
    """The parts of a console that need no server."""

    def __init__(self, *people: Person, **variables: str) -> None:
        """``variables`` are settings without their prefix ``MUSTER_CONSOLE_``."""
        self.clock = MovedClock()
        self.people = {person.name: person for person in people}
        self.controller = FakeController()
        self.stacks: list[FakeStack] = []
        self.refuses: ServeError | None = None
        named = {f"MUSTER_CONSOLE_{name}": value for name, value in variables.items()}
        self.settings: ConsoleSettings = read_settings(
            Environment({"MUSTER_CONSOLE_USERS_FILE": "/people.json", **named})
        )
        self.sessions = Sessions(self.clock, idle_s=100.0, longest_s=1000.0)
        self.hub = Hub(self.sessions, Subjects("serve"), self.controller.listen, self.clock)
        renderer = Renderer(self.settings)
        self.sign_in = SignIn(
            self.settings,
            self.sessions,
            self.clock,
            read_people=lambda: self.people,
            open_stack=self.open_stack,
        )
        self.shared = Shared(
            settings=self.settings,
            hub=self.hub,
            sessions=self.sessions,
            renderer=renderer,
            clock=self.clock,
            tasks=TaskOwner("test"),
            find_session=self.sign_in.find,
        )
        pages = SignInPages(self.settings, renderer, self.sign_in, self.sessions)
        self.app = build_app(self.shared, pages, self.settings.allowed_hosts)

    def open_stack(self, address: StackAddress, name: str) -> FakeStack:
        stack = FakeStack(self.controller, address, name)
        stack.refuses = self.refuses
        self.stacks.append(stack)
        return stack

    async def start_session(self, name: str = "ada", role: Role = Role.ADMIN) -> tuple[str, PersonSession]:
        """A session without the form; the cookie's value with it."""
        person = self.people.setdefault(name, seal(name, role))
        return await self.sessions.start(name, role, self.open_stack(StackAddress(), name), person.sealed)

    def browser(self, address: str = "192.0.2.9", **headers: str) -> httpx.AsyncClient:
        """A browser without cookies, at that address."""
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False, client=(address, 50_000))
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


async def submit(
    browser: httpx.AsyncClient, name: str, password: str = PASSWORD, **fields: str
) -> httpx.Response:
    """Fill the form of signing in, and send it."""
    page = await browser.get("/sign-in", params={"next": fields["next"]} if "next" in fields else None)
    token = re.search(r'name="csrf" value="([^"]+)"', page.text)
    assert token is not None
    form = {"csrf": token[1], "name": name, "password": password, **fields}
    return await browser.post("/sign-in", data=form)


def cookies_set(response: httpx.Response) -> deque[str]:
    """The headers that set cookies."""
    return deque(response.headers.get_list("set-cookie"))
