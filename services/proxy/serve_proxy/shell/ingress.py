"""The ingress shared by HTTP requests and NATS calls, and the HTTP options in force."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar, final

import msgspec
import structlog

from serve_common.config.backend import HttpOptions, check_http_options
from serve_common.dispatch.admission import Endpoint, admit, admit_call
from serve_common.dispatch.calls import Call, DataPlaneBus, RequestSpec, Response
from serve_common.dispatch.dispatcher import Dispatcher
from serve_common.dispatch.request_body import UploadMemory
from serve_common.dispatch.response_comparisons import PendingComparison
from serve_common.dispatch.routes import Routes
from serve_common.dispatch.shadows import Shadows
from serve_common.errors import BadField, BusUnavailable, ServeError
from serve_common.names import EndpointTag
from serve_common.protocol.snapshots import Snapshot
from serve_common.protocol.subjects import HTTP_KEY
from serve_common.routing.route_table import HttpChange
from serve_common.runtime.tasks import OwnedTask, TaskOwner
from serve_proxy.shell.busy_polling import BusyPolling
from serve_proxy.shell.captures import Captures, SampledRequest


def request_ids(random_bits: Callable[[int], int]) -> Callable[[], str]:
    """Return a function that makes ids for requests that come without one: 32 hexadecimal digits with hyphens, as in
    UUIDs (8-4-4-4-12).
    """

    def new_request_id() -> str:
        digits = f"{random_bits(128):032x}"
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"

    return new_request_id


OnResponse = Callable[[Call, Response], None]
OnError = Callable[[Call, ServeError], None]


@final
class Ingress:
    """Admits requests and hands them to the dispatcher; a `SnapshotListener`.

    Why it receives the snapshots itself: requests that arrive before the bucket was read wait for that moment
    (`wait_open`).
    """

    def __init__(
        self,
        routes: Routes,
        dispatcher: Dispatcher,
        bus: DataPlaneBus,
        shadows: Shadows,
        http: LiveOptions[Any],
        *,
        captures: Captures,
        on_applied: Callable[[], None],
        bus_wait_s: float,
        memory: UploadMemory | None = None,
        polling: BusyPolling | None = None,
    ) -> None:
        """``on_applied`` is called after each change of the routing state; ``bus_wait_s`` bounds `wait_open`.

        ``polling`` is None where a lone request is not polled for.
        """
        self.is_draining = False
        self.memory: Final = UploadMemory() if memory is None else memory
        """Memory budget for the bodies of all requests."""
        self.routes = routes
        self._dispatcher = dispatcher
        self._bus = bus
        self._shadows = shadows
        self._captures = captures
        self._http = http
        self._on_applied = on_applied
        self._bus_wait_s = bus_wait_s
        self._polling = polling
        self.is_open = False
        """True once requests can be routed by the bucket's snapshots.

        That includes the middlewares of the first options: one of them may authorize requests.
        """
        self._opened = asyncio.Event()

    def on_snapshots(self, snapshots: Mapping[str, Snapshot | None], *, whole: bool) -> None:
        """Apply changed snapshots to the routes and the HTTP options; ``whole`` if they are all of the bucket."""
        try:
            change = self._dispatcher.update(snapshots, whole=whole)
            if change is not None:
                if not self.is_open:  # who starts after a shutdown listens, as Ray Serve's start does
                    change = msgspec.structs.replace(change, is_shut_down=False)
                self._http.take(change)
                if not change.snapshot_id:
                    self.routes.confirm(HTTP_KEY)
        finally:
            self._notify_applied()

    def on_http_options_applied(self, snapshot_id: int) -> None:
        """The HTTP options of ``snapshot_id`` are in force, or were refused."""
        self.routes.confirm(HTTP_KEY, snapshot_id)
        self._notify_applied()

    def routing_error(self) -> str | None:
        """Why no request can be routed now; None when it can."""
        if not self._bus.is_connected:
            return "not connected to NATS"
        if not self.routes.is_filled:
            return "the bucket of snapshots was not read yet"
        return None if self.is_open else self._http.pending_reason

    def readiness_error(self) -> str | None:
        """Why this proxy should get no new requests; None when it should."""
        return "draining" if self.is_draining else self.routing_error()

    async def wait_open(self) -> None:
        """Wait for `is_open`, for a bounded time."""
        with contextlib.suppress(TimeoutError):  # `admit` raises then
            async with asyncio.timeout(self._bus_wait_s):
                await self._opened.wait()

    def admit(self, method: str, path: str) -> Endpoint:
        """The endpoint for an HTTP request. Raises as `admission.admit`, and `BusUnavailable` before `is_open`."""
        if not self.is_open:
            raise BusUnavailable(self.routing_error() or "this proxy is not ready")
        return admit(self.routes.table, self.routes.endpoints, method, path)

    def admit_call(self, tag: EndpointTag) -> Endpoint:
        """The endpoint for a plain call. Raises as `admission.admit_call`."""
        return admit_call(self.routes.endpoints, tag)

    async def send(self, spec: RequestSpec) -> tuple[Call, Response]:
        """Dispatch ``spec`` and copies to the endpoint's shadows; wait for the response. Raises `ServeError`."""
        if not spec.endpoint.is_copied:
            return await self._dispatcher.send(spec)
        pending, sampled = self._copy(spec)
        if sampled is not None:
            spec = msgspec.structs.replace(spec, trace=sampled)
        try:
            call, response = await self._dispatcher.send(spec)
        except BaseException:
            if pending is not None:
                pending.drop()
            raise
        if pending is not None:
            pending.add_response(call, response)
        if sampled is not None:
            self._captures.add(sampled, response)
        return call, response

    def start(
        self,
        spec: RequestSpec,
        on_response: Callable[[Call, Response], None],
        on_error: Callable[[Call, ServeError], None],
    ) -> Call:
        """Dispatch ``spec`` and copies to the endpoint's shadows; the outcome is passed to a callback."""
        if spec.endpoint.is_copied:
            pending, sampled = self._copy(spec)
            if sampled is not None:
                spec = msgspec.structs.replace(spec, trace=sampled)
                on_response = self._capturing(sampled, on_response)
            if pending is not None:
                on_response, on_error = _comparing(pending, on_response, on_error)
        call = self._dispatcher.start(spec, on_response, on_error)
        if self._polling is not None:
            self._polling.expect(call)
        return call

    def _copy(self, spec: RequestSpec) -> tuple[PendingComparison | None, SampledRequest | None]:
        """Send copies to shadows, and decide whether their responses are compared, and the request is captured."""
        pending = self._shadows.copy(spec) if spec.endpoint.shadows else None
        return pending, self._captures.sample(spec)

    def _capturing(self, sampled: SampledRequest, on_response: OnResponse) -> OnResponse:
        def capture(call: Call, response: Response) -> None:
            on_response(call, response)
            self._captures.add(sampled, response)

        return capture

    def abandon(self, call: Call) -> None:
        """Cancel the call; does nothing when it has ended."""
        self._dispatcher.abandon(call)

    def _notify_applied(self) -> None:
        if self.routes.is_filled and self._http.pending_reason is None:
            self.is_open = True
            self._opened.set()
        self._on_applied()


def _comparing(
    pending: PendingComparison, on_response: OnResponse, on_error: OnError
) -> tuple[OnResponse, OnError]:
    """The same callbacks, which end the comparison as well, after the caller has what it gets."""

    def responded(call: Call, response: Response) -> None:
        on_response(call, response)
        pending.add_response(call, response)

    def failed(call: Call, error: ServeError) -> None:
        pending.drop()
        on_error(call, error)

    return responded, failed


_log = structlog.get_logger(__name__)

LOAD_TIMEOUT_S: Final = 30.0
"""Seconds that importing all middlewares may take."""
_LISTEN_AGAIN_S: Final = 0.5
_ERROR_LENGTH_MAX: Final = 1000

M = TypeVar("M")
"""Loaded middlewares; opaque outside the adapter."""


class MiddlewareRefused(ServeError):
    """A middleware cannot be imported, or is invalid."""

    error_code = "middleware_refused"


@final
class LiveOptions(Generic[M]):
    """Applies one `HttpChange` after the other.

    Why this is more than one assignment: middlewares are imported, which takes time and can fail. Until they are
    imported, or when they cannot be, the former options stay in force, and the proxy must not report the snapshot as
    applied before that is settled.
    """

    def __init__(
        self,
        defaults: HttpOptions,
        *,
        nothing: M,
        load: Callable[[Sequence[str]], Awaitable[M]],
        use: Callable[[HttpOptions, M], None],
        listen: Callable[[bool], Awaitable[None]] | None,
        on_applied: Callable[[int], None],
    ) -> None:
        """``defaults`` apply until a snapshot has options; ``nothing`` represents no middlewares.

        ``load`` imports middlewares and raises `MiddlewareRefused`; ``use`` puts options in force for requests that
        arrive from then on; ``listen`` closes the HTTP port after a shutdown and opens it for the next deploy, or
        raises OSError (None: it stays open); ``on_applied`` receives the snapshot id that was applied or refused, with
        all before it.
        """
        self.options = defaults
        """The options for requests that arrive now."""
        self.error = ""
        """Why the newest snapshot is not in force; empty when it is."""
        self.error_snapshot_id = 0
        """Id of the snapshot that was refused; 0 when there is none."""
        self._defaults = defaults
        self._load = load
        self._use = use
        self._listen = listen
        self._is_shut_down = False
        self._on_applied = on_applied
        self._tasks = TaskOwner("live_options")
        self._nothing = self._loaded = nothing
        self._loading: OwnedTask | None = None
        self._step = ""
        self._newest_id = 0

    @property
    def pending_reason(self) -> str | None:
        """Why the newest options are not in force (yet); None when they are."""
        if self._loading is not None:
            return self._step
        return self.error or None

    def take(self, change: HttpChange) -> None:
        """Put ``change`` in force: at once where nothing is to be imported or opened, otherwise in the background.

        Only the newest counts: an import in progress for an older one is cancelled.
        """
        if 0 < change.snapshot_id <= self._newest_id:
            return  # a duplicate
        self._newest_id = max(self._newest_id, change.snapshot_id)
        if self._loading is not None:
            self._loading.cancel()
            self._loading = None
        if self._apply_at_once(change):
            self._on_applied(change.snapshot_id)
        else:
            self._loading = self._tasks.start(self._load_and_apply(change), name="load")

    async def close(self, timeout_s: float) -> None:
        """Cancel an import in progress."""
        await self._tasks.close(timeout_s)

    def _get_options(self, change: HttpChange) -> HttpOptions:
        return self._defaults if change.options is None else change.options

    def _apply_at_once(self, change: HttpChange) -> bool:
        """Apply ``change`` if nothing must be imported and no port opened or closed; False otherwise."""
        loaded = self._known(self._get_options(change).middlewares)
        if loaded is None or (self._listen is not None and change.is_shut_down != self._is_shut_down):
            return False
        self._apply(change, loaded)
        return True

    def _known(self, middlewares: Sequence[str]) -> M | None:
        """These middlewares if nothing must be imported for them; otherwise None."""
        if not middlewares:
            return self._nothing
        return self._loaded if middlewares == self.options.middlewares else None

    async def _load_and_apply(self, change: HttpChange) -> None:
        self._step = "the middlewares are being imported"
        middlewares = self._get_options(change).middlewares
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                loaded = self._known(middlewares)
                if loaded is None:
                    loaded = await self._load(middlewares)
        except MiddlewareRefused as error:
            self._refuse(change, str(error))
        except TimeoutError:
            self._refuse(change, f"importing {', '.join(middlewares)} took more than {LOAD_TIMEOUT_S:g} s")
        else:
            self._apply(change, loaded)
        await self._switch(change.is_shut_down)
        self._loading = None
        self._on_applied(change.snapshot_id)

    async def _switch(self, is_shut_down: bool) -> None:  # noqa: FBT001 - the only argument
        """Close or open the port; where another program has it meanwhile, goals wait until it is free."""
        while self._listen is not None and is_shut_down != self._is_shut_down:
            try:
                await self._listen(not is_shut_down)
            except OSError as error:
                if self._step != (step := f"the HTTP port cannot be opened again: {error}"):
                    _log.error("http_port_stays_closed", reason=str(error))
                self._step = step
                await asyncio.sleep(_LISTEN_AGAIN_S)
            else:
                self._is_shut_down = is_shut_down

    def _apply(self, change: HttpChange, loaded: M) -> None:
        options = self._get_options(change)
        try:
            if change.options is not None:
                check_http_options(options)
        except BadField as error:
            self._refuse(change, str(error))
            return
        self._use(options, loaded)
        self.options, self._loaded = options, loaded
        self.error, self.error_snapshot_id = "", 0
        _log.info(
            "http_options_in_force",
            snapshot_id=change.snapshot_id,
            request_timeout_s=options.request_timeout_s,
            body_bytes_max=options.body_bytes_max,
            middlewares=options.middlewares,
            access_log=options.access_log,
        )

    def _refuse(self, change: HttpChange, reason: str) -> None:
        self.error = reason[:_ERROR_LENGTH_MAX]
        self.error_snapshot_id = change.snapshot_id
        _log.error("http_options_refused", snapshot_id=change.snapshot_id, reason=self.error)
