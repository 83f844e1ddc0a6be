"""What the proxy's shell needs from outside, beyond what dispatching needs (`serve_common.dispatch.calls`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from serve_common.protocol.reports import ProxyReport


class ControlPlane(Protocol):
    """The bus that leads to the controller."""

    async def send_report(self, report: ProxyReport) -> None:
        """Publish it; raises `BusUnavailable`."""
        ...


class Child(Protocol):
    """One proxy process that a parent has started."""

    @property
    def operations_port(self) -> int | None:
        """Where it answers on the loopback interface; None before it listens."""
        ...

    async def ended(self) -> int:
        """Wait until it has; its exit code, or minus the number of the signal that killed it."""
        ...

    def stop(self) -> None:
        """Let it drain and end; told again, it ends at once."""
        ...

    def kill(self) -> None:
        """End it now."""
        ...


StartChild = Callable[[int], Awaitable[Child]]
"""Start the process of that number. Raises OSError when there is no room for one more."""
