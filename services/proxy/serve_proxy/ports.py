"""What the proxy's shell needs from outside, beyond what dispatching needs (`serve_common.dispatch.ports`)."""

from __future__ import annotations

from typing import Protocol

from serve_common.wires.proxy import ProxyReport


class ControlPlane(Protocol):
    """The bus that leads to the controller."""

    async def send_report(self, report: ProxyReport) -> None:
        """Publish it; raises `BusUnavailable`."""
        ...
