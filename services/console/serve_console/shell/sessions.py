"""Who is signed in. Sessions live in memory: a restart of the console ends them, and nothing of a person is stored."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Final, Protocol, final

import msgspec
import structlog

from muster.client.admin import AdminClient, Caller
from muster.client.requests import StackAddress
from serve_common.clock import Clock
from serve_common.errors import LimitReached
from serve_common.identities.roles import VERBS_OF, Role

_log = structlog.get_logger(__name__)

SESSIONS_MAX: Final = 500
"""Most sessions at once; beyond that the one that was unused the longest ends."""
SESSIONS_OF_PERSON_MAX: Final = 20
"""Most sessions of one person, so that nobody signs the others out."""
_TOKEN_BYTES: Final = 32


class StackPort(Protocol):
    """A connection to the stack with the rights of one person."""

    address: StackAddress
    admin: AdminClient
    """Retries while the leader changes; sends the person's name with each command."""
    live: AdminClient
    """Never retries: what it reads is read again a second later."""
    caller: Caller

    async def connect(self, within_s: float) -> None:
        """Raises `BusUnavailable` and `BusAuthorizationFailed`."""

    async def close(self) -> None:
        """Disconnect."""


class SignedIn(msgspec.Struct, frozen=True):
    """A person as pages show them."""

    name: str
    role: str


@final
class PersonSession:
    """One browser of one person."""

    def __init__(self, name: str, role: Role, stack: StackPort, *, proof: str, now: float) -> None:
        """``proof`` is what signed the person in; the session ends when that changes."""
        self.person = SignedIn(name, role.value)
        self.proof = proof
        self.role = role
        self.stack = stack
        self.csrf = secrets.token_urlsafe(_TOKEN_BYTES)
        self.started_at = now
        self.used_at = now
        self.is_over = False

    def may(self, verb: str) -> bool:
        """Whether the role may send this command or query; NATS enforces the same table."""
        return verb in VERBS_OF[self.role]

    @property
    def may_call(self) -> bool:
        """Whether the role may call endpoints."""
        return self.role is not Role.VIEW


@final
class Sessions:
    """All sessions by their cookies."""

    def __init__(self, clock: Clock, *, idle_s: float, longest_s: float) -> None:
        """A session ends ``idle_s`` after its last use, and ``longest_s`` after it began."""
        self._clock = clock
        self._idle_s = idle_s
        self._longest_s = longest_s
        self._sessions: dict[str, PersonSession] = {}

    async def start(self, name: str, role: Role, stack: StackPort, proof: str) -> tuple[str, PersonSession]:
        """Start a session; returns the cookie's value with it. Raises `LimitReached` for one person's too many.

        ``proof`` is the person's sealed identity, or empty where something in front of the console signs people in.
        """
        await self.end_old()
        own = [token for token, session in self._sessions.items() if session.person.name == name]
        if len(own) >= SESSIONS_OF_PERSON_MAX:
            raise LimitReached(f"{name} is signed in {len(own)} times already; sign out somewhere")
        if len(self._sessions) >= SESSIONS_MAX:
            await self._end(min(self._sessions, key=lambda token: self._sessions[token].used_at))
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        session = PersonSession(name, role, stack, proof=proof, now=self._clock.now())
        self._sessions[token] = session
        _log.info("signed_in", person=name, role=role.value)
        return token, session

    def find(self, token: str) -> PersonSession | None:
        """The session of a cookie, which this uses."""
        session = self._sessions.get(token)
        if session is None or self._is_old(session):
            return None
        session.used_at = self._clock.now()
        return session

    def has(self, token: str) -> bool:
        """Whether there is a session of that cookie; this does not use it."""
        return token in self._sessions

    def find_reader(self) -> PersonSession | None:
        """The session whose rights read what all share: the one that began last, as its identity is the newest."""
        alive = [session for session in self._sessions.values() if not self._is_old(session)]
        return alive[-1] if alive else None

    async def end(self, token: str) -> None:
        """End a session; does nothing for an unknown one."""
        if token in self._sessions:
            await self._end(token)

    async def end_changed(self, proofs: Mapping[str, str]) -> None:
        """End the sessions of people who were removed or got another password; ``proofs`` are by name."""
        for token, session in list(self._sessions.items()):
            if session.proof and proofs.get(session.person.name) != session.proof:
                await self._end(token)

    async def end_session(self, session: PersonSession) -> None:
        """End a session that NATS refuses."""
        for token in [token for token, other in self._sessions.items() if other is session]:
            await self._end(token)

    async def end_old(self) -> None:
        """End the sessions that are over."""
        for token in [token for token, session in self._sessions.items() if self._is_old(session)]:
            await self._end(token)

    async def close(self) -> None:
        """End all."""
        for token in list(self._sessions):
            await self._end(token)

    def __len__(self) -> int:
        return len(self._sessions)

    def _is_old(self, session: PersonSession) -> bool:
        now = self._clock.now()
        return now - session.used_at > self._idle_s or now - session.started_at > self._longest_s

    async def _end(self, token: str) -> None:
        session = self._sessions.pop(token)
        session.is_over = True
        _log.info("signed_out", person=session.person.name)
        await session.stack.close()
