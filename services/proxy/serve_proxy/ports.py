"""What the proxy's shell needs from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from serve_common.wires.proxy import ProxyReport


class Bus(Protocol):
    """The data plane's bus; `serve_common.bus.connection.BusConnection` is one."""

    @property
    def is_connected(self) -> bool:
        """True while publishing is possible."""
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
    ) -> tuple[int, bytes]:
        """A token and its reply subject; see `Inbox.new_reply`."""
        ...

    def forget(self, token: int) -> None:
        """Let go of a token."""
        ...


class ControlPlane(Protocol):
    """The bus that leads to the controller."""

    async def send_report(self, report: ProxyReport) -> None:
        """Publish it; raises `BusUnavailable`."""
        ...
