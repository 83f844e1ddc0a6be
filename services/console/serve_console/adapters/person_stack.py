"""A person's own connection to the stack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, final

from muster.client.admin import AdminClient, Caller
from muster.client.nats import NatsRequests
from muster.client.requests import AdminReply, StackAddress
from serve_common.errors import BusAuthorizationFailed
from serve_common.protocol.subjects import Subjects

_RETRY_FOR_S: Final = 8.0
"""A change of leader takes 2 to 5 s."""


@final
class PersonRequests:
    """Implements `muster.client.requests.Requests`; once closed, it never connects again.

    Why: a session may end while one of its requests runs, and an identity must not be used after that.
    """

    def __init__(self, address: StackAddress) -> None:
        """Connects at the first request, and again whenever the connection was lost."""
        self._inner = NatsRequests(address)
        self._is_closed = False

    @property
    def where(self) -> str:
        """The URLs of NATS, without passwords."""
        return self._inner.where

    async def connect(self, within_s: float) -> None:
        """Raises `BusUnavailable` and `BusAuthorizationFailed`."""
        self._check_open()
        try:
            await self._inner.connect(within_s=within_s)
        finally:
            await self._close_again()

    async def request(
        self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> AdminReply:
        """Send one request and wait for its reply; errors as in `Requests`."""
        self._check_open()
        try:
            return await self._inner.request(subject, body, timeout_s=timeout_s, headers=headers)
        finally:
            await self._close_again()

    async def close(self) -> None:
        """Disconnect for good."""
        self._is_closed = True
        await self._inner.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise BusAuthorizationFailed("the session has ended; sign in again")

    async def _close_again(self) -> None:
        """Close what a request opened that was under way at `close`."""
        if self._is_closed:
            await self._inner.close()


@final
class PersonStack:
    """Implements `serve_console.shell.sessions.StackPort`; connects at the first request, and again when it must."""

    def __init__(self, address: StackAddress, name: str) -> None:
        """``name`` is the person's, for the audit log."""
        self._requests = PersonRequests(address)
        subjects = Subjects(address.subject_prefix)
        self.address = address
        self.admin = AdminClient(self._requests, subjects, principal=name, retry_for_s=_RETRY_FOR_S)
        self.live = AdminClient(self._requests, subjects, retry_for_s=0.0)
        self.caller = Caller(self._requests, subjects, retry_for_s=2.0)

    async def connect(self, within_s: float) -> None:
        """Raises `BusUnavailable` and `BusAuthorizationFailed`."""
        await self._requests.connect(within_s)

    async def close(self) -> None:
        """Disconnect for good."""
        await self._requests.close()
