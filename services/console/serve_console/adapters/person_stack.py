"""A person's own connection to the stack."""

from __future__ import annotations

from typing import Final, final

from muster.client.admin import AdminClient, Caller
from muster.client.nats import NatsRequests
from muster.client.requests import StackAddress
from serve_common.protocol.subjects import Subjects

_RETRY_FOR_S: Final = 8.0
"""A change of leader takes 2 to 5 s."""


@final
class PersonStack:
    """Implements `serve_console.shell.sessions.StackPort`; connects at the first request, and again when it must."""

    def __init__(self, address: StackAddress, name: str) -> None:
        """``name`` is the person's, for the audit log."""
        self._requests = NatsRequests(address)
        subjects = Subjects(address.subject_prefix)
        self.address = address
        self.admin = AdminClient(self._requests, subjects, principal=name, retry_for_s=_RETRY_FOR_S)
        self.live = AdminClient(self._requests, subjects, retry_for_s=0.0)
        self.caller = Caller(self._requests, subjects, retry_for_s=2.0)

    async def connect(self, within_s: float) -> None:
        """Raises `BusUnavailable` and `BusAuthorizationFailed`."""
        await self._requests.connect(within_s=within_s)

    async def close(self) -> None:
        """Disconnect."""
        await self._requests.close()
