"""Signing in and out: by a password that opens the person's identity, or by a proxy in front."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

import structlog
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from muster.client.people import address_of_person
from muster.client.requests import StackAddress
from serve_common.clock import Clock
from serve_common.errors import BusAuthorizationFailed, BusUnavailable, LimitReached, ServeError
from serve_common.identities.credentials import CredentialsUnusable
from serve_common.identities.people import (
    CHOSEN_COSTS,
    NAME_LENGTH_MAX,
    PasswordWrong,
    Person,
    check_person_name,
    open_person,
)
from serve_common.identities.roles import Role
from serve_console.core.attempts import Attempts
from serve_console.settings import ConsoleSettings, TrustedSignIn
from serve_console.shell.sessions import PersonSession, Sessions, StackPort
from serve_console.web.security import SIGN_IN_BYTES_MAX, check_csrf, check_origin, is_local_path
from serve_console.web.shared import Renderer, Shared

_log = structlog.get_logger(__name__)

COOKIE: Final = "muster_session"
_FORM_COOKIE: Final = "muster_sign_in"
_CONNECT_S: Final = 4.0
_AT_ONCE: Final = 2
"""Passwords that are tried at once: each takes 64 MiB and a third of a second."""
_WAITING_MAX: Final = 20
_WRONG: Final = "The name or the password is wrong."
_UNKNOWN_PERSON: Final = Person(
    name="nobody", role=Role.VIEW, salt="AAAAAAAAAAAAAAAAAAAAAA==", nonce="AAAAAAAAAAAAAAAA", sealed="AAAA",
    costs=CHOSEN_COSTS,
)  # fmt: skip
"""Opened in place of an unknown person, so that the time tells no names."""

_RESULTS: Final[dict[type[ServeError], str]] = {
    PasswordWrong: "wrong",
    LimitReached: "limited",
    BusUnavailable: "bus_away",
}

ClientAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
OpenStack = Callable[[StackAddress, str], StackPort]


@final
class SignIn:
    """Finds the session of a request, and begins sessions."""

    def __init__(
        self,
        settings: ConsoleSettings,
        sessions: Sessions,
        clock: Clock,
        *,
        read_people: Callable[[], dict[str, Person]],
        open_stack: OpenStack,
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._clock = clock
        self._read_people = read_people
        self._open_stack = open_stack
        self._by_name = Attempts(free=3, longest_s=30.0)
        self._by_address = Attempts(free=20, longest_s=60.0)
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0
        self._trusted: dict[tuple[str, Role], str] = {}
        self._trusted_starts = asyncio.Lock()
        self.results = dict.fromkeys(("ok", *dict.fromkeys(_RESULTS.values()), "refused"), 0)
        """Attempts to sign in so far, by what became of them."""

    async def find(self, request: Request) -> PersonSession | None:
        """The session of a request's cookie, or of the person whom a trusted proxy names."""
        session = self._sessions.find(request.cookies.get(COOKIE, ""))
        if session is not None and session.proof:
            # At once, as rights that were taken away must not serve for one request more.
            person = (await asyncio.to_thread(self._read_people)).get(session.person.name)
            if person is None or person.sealed != session.proof:
                await self._sessions.end_session(session)
                session = None
        trusted = self._settings.trusted
        if session is not None or trusted is None:
            return session
        return await self._find_trusted(request, trusted)

    async def _find_trusted(self, request: Request, trusted: TrustedSignIn) -> PersonSession | None:
        names = request.headers.getlist(trusted.header)
        name = names[0] if len(names) == 1 else ""  # two: a browser may have sent one of them
        client = parse_client(request)
        if not name or client is None or not any(client in network for network in trusted.networks):
            return None
        try:
            check_person_name(name)
        except ServeError:
            return None
        roles = request.headers.getlist(trusted.role_header) if trusted.role_header else []
        if len(roles) > 1:
            return None
        text = (roles[0] if roles else "") or trusted.role.value
        role = {each.value: each for each in trusted.credentials}.get(text)
        if role is None:
            return None
        async with self._trusted_starts:  # a browser's first requests come at once, and are of one session
            session = self._sessions.find(self._trusted.get((name, role), ""))
            return session or await self._start_trusted(name, role, trusted.credentials[role])

    async def _start_trusted(self, name: str, role: Role, path: str) -> PersonSession:
        try:
            identity = await asyncio.to_thread(Path(path).read_text, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            _log.error("credentials_unreadable", path=path, reason=str(error))
            raise CredentialsUnusable(f"the file of the role {role.value} cannot be read") from error
        stack = self._open_stack(address_of_person(self._settings.stack, name, role, identity), name)
        token, session = await self._sessions.start(name, role, stack, "")
        self._trusted = {key: cookie for key, cookie in self._trusted.items() if self._sessions.has(cookie)}
        self._trusted[name, role] = token
        self.results["ok"] += 1
        return session

    async def start(self, name: str, password: str, address: str) -> tuple[str, PersonSession]:
        """Sign a person in; ``address`` is the browser's.

        Raises `PasswordWrong`, `LimitReached`, `BusUnavailable`, `BusAuthorizationFailed`, and `CredentialsUnusable`
        for an identity that is none.
        """
        try:
            started = await self._start(name, password, address)
        except ServeError as error:
            self.results[_RESULTS.get(type(error), "refused")] += 1
            raise
        self.results["ok"] += 1
        return started

    async def _start(self, name: str, password: str, address: str) -> tuple[str, PersonSession]:
        now = self._clock.now()
        wait_s = max(self._by_name.get_delay_s(name, now), self._by_address.get_delay_s(address, now))
        if wait_s > 0:
            raise LimitReached(f"Too many attempts. Try again in {wait_s:.0f} s.")
        if self._waiting >= _WAITING_MAX:
            raise LimitReached("Too many people sign in at the moment. Try again in some seconds.")
        # Counted before it is tried, so that attempts at once are no way around the limit.
        self._by_name.fail(name, now)
        self._by_address.fail(address, now)
        self._waiting += 1  # before the first wait, so that attempts at once are no way around the limit
        try:
            person = (await asyncio.to_thread(self._read_people)).get(name)
            identity = await self._open(_UNKNOWN_PERSON if person is None else person, password)
        finally:
            self._waiting -= 1
        if person is None:
            raise PasswordWrong(_WRONG)
        self._by_name.succeed(name)
        self._by_address.succeed(address)
        stack = self._open_stack(
            address_of_person(self._settings.stack, person.name, person.role, identity), person.name
        )
        try:
            await stack.connect(_CONNECT_S)
            started = await self._sessions.start(person.name, person.role, stack, person.sealed)
        except BaseException:
            await stack.close()
            raise
        return started

    async def _open(self, person: Person, password: str) -> str:
        try:
            async with self._slots:
                return await asyncio.to_thread(open_person, person, password)
        except PasswordWrong as error:
            raise PasswordWrong(_WRONG) from error


def parse_client(request: Request) -> ClientAddress | None:
    """The address that a request came from; an IPv4 one also where the socket is IPv6. None: it is unknown."""
    try:
        address = ipaddress.ip_address("" if request.client is None else request.client.host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def get_attempts_key(client: ClientAddress) -> str:
    """What attempts are counted by: with IPv6 the network, as one machine has all addresses of it."""
    if isinstance(client, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(client), 64), strict=False))
    return str(client)


def get_proofs(people: dict[str, Person]) -> dict[str, str]:
    """What signed each person in, for `Sessions.end_changed`."""
    return {name: person.sealed for name, person in people.items()}


@final
class SignInPages:
    """The pages for it."""

    def __init__(
        self, settings: ConsoleSettings, renderer: Renderer, sign_in: SignIn, sessions: Sessions
    ) -> None:
        self._settings = settings
        self._renderer = renderer
        self._sign_in = sign_in
        self._sessions = sessions

    def routes(self, shared: Shared) -> list[BaseRoute]:
        """Their routes."""
        return [
            Route("/sign-in", self._show, methods=["GET"]),
            Route("/sign-in", self._submit, methods=["POST"], max_body_size=SIGN_IN_BYTES_MAX),
            shared.post("/sign-out", self._sign_out),
        ]

    async def _show(self, request: Request) -> Response:
        target = request.query_params.get("next", "/")
        if await self._sign_in.find(request) is not None:
            return RedirectResponse(target if is_local_path(target) else "/", status_code=303)
        return self._form(request, error="", name="", target=target)

    async def _submit(self, request: Request) -> Response:
        check_origin(request)
        await check_csrf(request, request.cookies.get(_FORM_COOKIE) or secrets.token_hex())
        form = await request.form()
        name, password, target = (str(form.get(key, "")) for key in ("name", "password", "next"))
        name = name.strip()[:NAME_LENGTH_MAX]
        client = parse_client(request)
        address = "" if client is None else get_attempts_key(client)
        try:
            token, _ = await self._sign_in.start(name, password, address)
        except (PasswordWrong, LimitReached) as error:
            return self._form(request, error=str(error), name=name, target=target, status=403)
        except BusUnavailable:
            error_text = "NATS is away, so nobody can sign in. Try again when it is back."
            return self._form(request, error=error_text, name=name, target=target, status=503)
        except (BusAuthorizationFailed, CredentialsUnusable) as error:
            _log.warning("identity_refused", person=name, reason=str(error))
            error_text = (
                "NATS refuses this person's identity: set the password anew with 'muster console user'."
            )
            return self._form(request, error=error_text, name=name, target=target, status=403)
        await self._sessions.end(request.cookies.get(COOKIE, ""))  # no cookie leads to it any more
        response = RedirectResponse(target if is_local_path(target) else "/", status_code=303)
        response.set_cookie(
            COOKIE, token, httponly=True, samesite="strict", secure=self._settings.is_https, path="/"
        )
        response.delete_cookie(_FORM_COOKIE, path="/sign-in")
        return response

    def _form(self, request: Request, *, error: str, name: str, target: str, status: int = 200) -> Response:
        token = request.cookies.get(_FORM_COOKIE) or secrets.token_urlsafe(32)
        response = self._renderer.page(
            request,
            None,
            "sign_in.html",
            status=status,
            error=error,
            name=name,
            next=target,
            form_csrf=token,
        )
        response.set_cookie(
            _FORM_COOKIE,
            token,
            httponly=True,
            samesite="strict",
            secure=self._settings.is_https,
            path="/sign-in",
        )
        return response

    async def _sign_out(self, request: Request, _session: PersonSession) -> Response:
        await self._sessions.end(request.cookies.get(COOKIE, ""))
        response = RedirectResponse("/sign-in", status_code=303)
        response.delete_cookie(COOKIE, path="/")
        return response
