"""The way in that HTTP requests and plain NATS calls share: is this proxy ready, and for how long may they take.

Why it also hears the bucket: whoever came before the bucket was read waits for that moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final, Protocol, final

from serve_common.dispatch.admission import Endpoint, admit, admit_call
from serve_common.dispatch.calls import Answer, Ask, Call
from serve_common.dispatch.dispatcher import Dispatcher
from serve_common.dispatch.ports import Bus
from serve_common.dispatch.request_body import UploadRoom
from serve_common.dispatch.routes import Routes
from serve_common.dispatch.shadows import Shadows
from serve_common.errors import BusUnavailable, ServeError
from serve_common.names import EndpointTag
from serve_common.routing.snapshot_table import HttpChange
from serve_common.subjects import HTTP_KEY
from serve_common.wires.snapshots import Snapshot


class HttpState(Protocol):
    """The HTTP options in force; `LiveOptions` is one."""

    @property
    def why_not_in_force(self) -> str | None:
        """Why the newest options are not in force (yet); None when they are."""
        ...

    def take(self, change: HttpChange) -> None:
        """See `LiveOptions.take`."""
        ...


@final
class Ingress:
    """Admits requests and hands them to the dispatcher; a `SnapshotListener`."""

    def __init__(
        self,
        routes: Routes,
        dispatcher: Dispatcher,
        bus: Bus,
        shadows: Shadows,
        http: HttpState,
        *,
        on_applied: Callable[[], None],
        bus_wait_s: float,
        room: UploadRoom | None = None,
    ) -> None:
        """``on_applied`` is called after each change of the routing state."""
        self.is_draining = False
        self.room: Final = UploadRoom() if room is None else room
        """For the bodies of all requests."""
        self.routes = routes
        self._dispatcher = dispatcher
        self._bus = bus
        self._shadows = shadows
        self._http = http
        self._on_applied = on_applied
        self._bus_wait_s = bus_wait_s
        self._opened = asyncio.Event()

    def on_snapshots(self, snapshots: Mapping[str, Snapshot | None], *, whole: bool) -> None:
        """See `SnapshotListener`."""
        try:
            change = self._dispatcher.update(snapshots, whole=whole)
            if change is not None:
                self._http.take(change)
                if not change.snapshot_id:
                    self.routes.confirm(HTTP_KEY)
        finally:
            self._change_heard()

    def http_settled(self, snapshot_id: int) -> None:
        """The HTTP options of ``snapshot_id`` are in force, or were refused."""
        self.routes.confirm(HTTP_KEY, snapshot_id)
        self._change_heard()

    @property
    def is_open(self) -> bool:
        """True once requests can be routed as the bucket says.

        Not before the middlewares of the first options that were found are there: one of them may guard what is behind.
        """
        return self._opened.is_set()

    def why_not_routing(self) -> str | None:
        """Why no request can be routed now; None when it can."""
        if not self._bus.is_connected:
            return "not connected to NATS"
        if not self.routes.is_filled:
            return "the bucket of snapshots was not read yet"
        return None if self.is_open else self._http.why_not_in_force

    def why_not_ready(self) -> str | None:
        """Why this proxy should get no new requests; None when it should."""
        return "draining" if self.is_draining else self.why_not_routing()

    async def wait_open(self) -> None:
        """Wait for `is_open`, for a bounded time."""
        with contextlib.suppress(TimeoutError):  # `admit` says so
            async with asyncio.timeout(self._bus_wait_s):
                await self._opened.wait()

    def admit(self, method: str, path: str) -> Endpoint:
        """The endpoint for an HTTP request; see `core.admission.admit`. Raises `BusUnavailable` before `is_open`."""
        if not self.is_open:
            raise BusUnavailable(self.why_not_routing() or "this proxy is not ready")
        return admit(self.routes.table, self.routes.endpoints, method, path)

    def admit_call(self, tag: EndpointTag) -> Endpoint:
        """The endpoint for a plain call; see `core.admission.admit_call`."""
        return admit_call(self.routes.endpoints, tag)

    async def ask(self, ask: Ask) -> tuple[Call, Answer]:
        """See `Dispatcher.ask`; copies go where the endpoint's shadows want them."""
        if ask.endpoint.shadows:
            self._shadows.copy(ask)
        return await self._dispatcher.ask(ask)

    def begin(
        self,
        ask: Ask,
        on_answer: Callable[[Call, Answer], None],
        on_error: Callable[[Call, ServeError], None],
    ) -> Call:
        """See `Dispatcher.begin`; copies go where the endpoint's shadows want them."""
        if ask.endpoint.shadows:
            self._shadows.copy(ask)
        return self._dispatcher.begin(ask, on_answer, on_error)

    def abandon(self, call: Call) -> None:
        """See `Dispatcher.abandon`."""
        self._dispatcher.abandon(call)

    def _change_heard(self) -> None:
        if self.routes.is_filled and self._http.why_not_in_force is None:
            self._opened.set()
        self._on_applied()
