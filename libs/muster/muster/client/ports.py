"""What the client needs from a bus, so that its retries and errors are tested without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from serve_common.errors import TransientError


class NobodyListens(TransientError):
    """The bus is there, and knows at once that nobody would hear the request; it was not delivered."""


class NoAnswer(TransientError):
    """No answer came in time, or the connection was lost meanwhile; the request may have had its effect."""


class Answer(msgspec.Struct, frozen=True):
    """What came back, an error included."""

    body: bytes
    headers: Mapping[str, str] = {}


class Requests(Protocol):
    """Request and reply over the bus."""

    @property
    def where(self) -> str:
        """The bus' addresses for people; holds no password."""
        ...

    async def request(
        self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send one request and wait for its answer.

        Raises `NobodyListens`, `NoAnswer`, `BusUnavailable` when there is no bus, `BusAuthorizationFailed` when it
        refuses this user or this subject, and `BadField` when the body is larger than it carries.
        """
        ...
