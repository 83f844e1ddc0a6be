"""What dispatching needs from outside: a bus, and reply subjects on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Bus(Protocol):
    """The data plane's bus; `serve_common.bus.connection.BusConnection` is one."""

    @property
    def is_connected(self) -> bool:
        """True while publishing is possible."""
        ...

    @property
    def answers(self) -> bool:
        """False while it is not connected, or has not answered a ping for a while."""
        ...

    def publish(
        self, subject: str | bytes, payload: bytes, reply: bytes = b"", headers: bytes | None = None
    ) -> None:
        """Send at most once; see `BusConnection.publish` for its errors."""
        ...


class Replies(Protocol):
    """Hands out reply subjects; `serve_common.bus.requests.Inbox` is one."""

    def new_reply(
        self, on_reply: Callable[[bytes, bytes, bytes | None], None], on_no_responders: Callable[[], None]
    ) -> tuple[bytes, bytes]:
        """A token and its reply subject; see `Inbox.new_reply`."""
        ...

    def forget(self, token: bytes) -> None:
        """Let go of a token."""
        ...
