"""The way in that HTTP requests and plain NATS calls share: is this proxy ready, and for how long may they take.

Why it also hears the bucket: whoever came before the bucket was read waits for that moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import final

from serve_common.errors import BusUnavailable
from serve_common.names import EndpointTag
from serve_common.wires.snapshots import Snapshot
from serve_proxy.core.admission import Endpoint, admit, admit_call
from serve_proxy.ports import Bus
from serve_proxy.shell.calls import Answer, Ask, Call
from serve_proxy.shell.dispatch import Dispatcher
from serve_proxy.shell.routes import Routes


@final
class Ingress:
    """Admits requests and hands them to the dispatcher; a `SnapshotListener`."""

    def __init__(
        self,
        routes: Routes,
        dispatcher: Dispatcher,
        bus: Bus,
        *,
        on_applied: Callable[[], None],
        bus_wait_s: float,
    ) -> None:
        """``on_applied`` is called after each change of the routing state."""
        self.is_draining = False
        self.routes = routes
        self._dispatcher = dispatcher
        self._bus = bus
        self._on_applied = on_applied
        self._bus_wait_s = bus_wait_s
        self._filled = asyncio.Event()

    def on_snapshots(self, snapshots: Mapping[str, Snapshot | None], *, whole: bool) -> None:
        """See `SnapshotListener`."""
        self._dispatcher.update(snapshots, whole=whole)
        if self.routes.is_filled:
            self._filled.set()
        self._on_applied()

    def why_not_routing(self) -> str | None:
        """Why no request can be routed now; None when it can."""
        if not self._bus.is_connected:
            return "not connected to NATS"
        if not self.routes.is_filled:
            return "the bucket of snapshots was not read yet"
        return None

    def why_not_ready(self) -> str | None:
        """Why this proxy should get no new requests; None when it should."""
        return "draining" if self.is_draining else self.why_not_routing()

    async def wait_filled(self) -> None:
        """Wait, for a bounded time, until the bucket was read. Raises `BusUnavailable`."""
        try:
            async with asyncio.timeout(self._bus_wait_s):
                await self._filled.wait()
        except TimeoutError as error:
            raise BusUnavailable(self.why_not_routing() or "this proxy is not ready") from error

    def admit(self, method: str, path: str) -> Endpoint:
        """The endpoint for an HTTP request; see `core.admission.admit`."""
        return admit(self.routes.table, self.routes.endpoints, method, path)

    def admit_call(self, tag: EndpointTag) -> Endpoint:
        """The endpoint for a plain call; see `core.admission.admit_call`."""
        return admit_call(self.routes.endpoints, tag)

    async def ask(self, ask: Ask) -> tuple[Call, Answer]:
        """See `Dispatcher.ask`."""
        return await self._dispatcher.ask(ask)

    def abandon(self, call: Call) -> None:
        """See `Dispatcher.abandon`."""
        self._dispatcher.abandon(call)
