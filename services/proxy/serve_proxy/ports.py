"""Ports of the proxy's shell, beyond those of dispatching (`serve_common.dispatch.calls`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from serve_common.protocol.reports import ProxyReport


class Child(Protocol):
    """A proxy process started by a parent."""

    @property
    def operations_port(self) -> int | None:
        """Port of its operations server on the loopback interface; None before it listens."""
        ...

    async def ended(self) -> int:
        """Wait for its exit code; negative for the signal that killed it."""
        ...

    def stop(self) -> None:
        """Make it drain and exit; a second call makes it exit at once."""
        ...

    def kill(self) -> None:
        """Kill it."""
        ...


SendReport = Callable[[ProxyReport], Awaitable[None]]
"""Publish a report to the controller. Raises `BusUnavailable`."""

StartChild = Callable[[int], Awaitable[Child]]
"""Start the process with that number. Raises OSError when it cannot be started."""
