"""The process of a replica: starts and stops its two threads and its NATS connection."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import msgspec
import structlog

from serve_common.config.backend import LoggingConfig
from serve_common.errors import BusUnavailable, PermanentError
from serve_common.identities.credentials import UserIdentity
from serve_common.nats.connection import BusConnection
from serve_common.nats.login import RenewableLogin, build_login
from serve_common.nats.options import BusOptions, Login, NotConnected, OutboundFull
from serve_common.nats.protocol import Subscription
from serve_common.protocol.evaluation import Evaluation, EvaluationResult
from serve_common.protocol.reports import ReplicaGoal
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.health import ThreadLoopLag
from serve_common.runtime.heap import keep_freed_memory
from serve_common.runtime.request_context import CurrentReplica, current_replica, set_replica_context
from serve_common.runtime.settings import BusSettings, DirectMode
from serve_common.runtime.tasks import TaskOwner
from serve_common.runtime.threads import LoopThread
from serve_common.telemetry.catalogue.replicas import REPLICA_LAG
from serve_common.telemetry.metrics import process_metrics
from serve_common.telemetry.request_traces import open_tracing
from serve_common.telemetry.trace_context import read_tracing_settings
from serve_replica_host.ports import RequestMetrics
from serve_replica_host.replica.archives import store_uploads
from serve_replica_host.replica.io.replica_io import ReplicaIO
from serve_replica_host.replica.telemetry.logs import ReplicaLogs
from serve_replica_host.replica.telemetry.remote import RemoteTelemetry
from serve_replica_host.replica.telemetry.traces import Traces, user_traceback
from serve_replica_host.replica.user.code import UserCode, UserCodeUnusable
from serve_replica_host.replica.user.evaluations import Evaluations

if TYPE_CHECKING:
    from serve_common.telemetry.otlp import OtlpTracing
    from serve_replica_host.adapters.replica_metrics import PrometheusHandleMetrics

MODELS_MAX: Final = 1_000
"""Maximum model ids published for one replica; routers prefer replicas by those."""


class StartReplicaRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to a replica's process to start."""

    goal: ReplicaGoal
    bus: BusSettings
    """The replica's own settings: its name, and its first identity."""
    app_dir: str
    """Absolute path; empty for none."""
    code_dir: str = ""
    """Directory on the host's machine with all that was uploaded for the goal, by digest; archives are unpacked."""
    uploads: dict[str, bytes] = {}
    """What was uploaded, by digest, for a replica on another machine."""
    tracing: dict[str, str] = {}
    """The host's OTEL_… variables, for a replica on a machine whose environment has none."""


class ControlOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a start, a reconfigure or a health check ended."""

    error: str | None = None
    """The user's traceback, or another error; None on success."""
    is_unusable: bool = False
    """True when no other start of this code can succeed."""
    telemetry: RemoteTelemetry | None = None
    """The final telemetry of this process; None if its host need not fetch it."""


_log = structlog.get_logger(__name__)

METRICS_S: Final = 0.5
MODELS_INTERVAL_S: Final = 5.0
_SHUTDOWN_TIMEOUT_S: Final = 10.0
"""Maximum seconds of an ASGI application's shutdown; after that it is cancelled."""
_CONNECT_TIMEOUT_S: Final = 30.0
_FLUSH_TIMEOUT_S: Final = 2.0
_LINKS_TIMEOUT_S: Final = 5.0
"""Seconds in which routers must leave the links of a drained replica; those that hang are cut off."""
_UNSUBSCRIBE_TIMEOUT_S: Final = 10.0
"""Seconds until NATS must have delivered what it has for a drained replica: what is given up is lost."""
_RETRY_S: Final = 0.1
_STOP_TIMEOUT_S: Final = 1.0
_PROBE_WAIT_MAX_S: Final = 12.0
"""Maximum seconds that a drained replica stays up for probes of routers, however often NATS reconnects."""
_POLL_S: Final = 0.05


@final
class ReplicaProcess:
    """One replica. Control methods may be called from any thread but its own two; each blocks until done.

    Why it is not the Ray actor itself: nothing here depends on Ray, so tests and tools can run a replica in any
    process.
    """

    def __init__(
        self, order: StartReplicaRequest, metrics: RequestMetrics, logs: ReplicaLogs | None = None
    ) -> None:
        """Starts the threads; nothing is served before `start`. ``logs`` are published once the bus is connected."""
        self._logs = logs
        self._order = order
        self._metrics = metrics
        self._handle_metrics: PrometheusHandleMetrics | None = None
        self._write_span_metrics: Callable[[], None] | None = None
        self._user = LoopThread("replica-user")
        self._lag = ThreadLoopLag(self._user.loop, process_metrics.distribution(REPLICA_LAG).observe)
        self._bus = LoopThread("replica-bus")
        self._code: UserCode | None = None
        self.is_unusable = False
        """True after a start that failed, and would wherever it is tried."""
        self._evaluations: Evaluations | None = None
        self._io: ReplicaIO | None = None
        self._connection: BusConnection | None = None
        self._subscription: Subscription | None = None
        self._tasks: TaskOwner | None = None
        self._tracing: OtlpTracing | None = None
        self._login = build_login(order.bus)
        self._model_ids: list[str] = []
        """Loaded models, replaced atomically by user code on any thread."""
        self._models_subject = Subjects(order.bus.subject_prefix).models(order.goal.replica_tag)

    def start(self) -> str | None:
        """Construct the user's code, then subscribe the replica's subject. Returns None, or the error.

        Waits for NATS without a limit: the host kills a start that takes too long.
        """
        keep_freed_memory()
        goal = self._order.goal
        context = CurrentReplica(
            replica_tag=goal.replica_tag,
            backend_tag=goal.backend_tag,
            bus=self._order.bus,
            login=self._login,
            may_call=goal.may_call,
            code_version=goal.code_version,
            peer_versions=dict(goal.peer_versions),
            is_program=bool(goal.replica_config.code),
            rank=goal.rank,
            world_size=goal.world_size,
            goal=goal,
            publish_models=self._publish_models,
        )
        set_replica_context(context)
        if self._logs is not None:
            self._logs.configure(goal.logging_config)
        error = self._call_user(self._construct, context)
        if error is not None:
            return error
        assert self._code is not None, "it was constructed"
        self._evaluations = Evaluations(self._code, self._user.submit)
        self._tracing = _open_tracing(self._order)
        if self._tracing is not None:
            from serve_replica_host.adapters.replica_metrics import PrometheusSpanMetrics  # noqa: PLC0415 - as below

            self._write_span_metrics = PrometheusSpanMetrics(self._tracing.counts).write
        try:
            self._bus.submit(self._serve(self._code)).result()
        except PermanentError as error:
            return f"the replica cannot use NATS: {error}"
        return None

    def reconfigure(self, goal: ReplicaGoal) -> str | None:
        """Apply ``goal``'s configuration in place. Returns None, or the user's traceback if nothing was applied."""
        code, bus_io = self._code, self._io
        if code is None or bus_io is None:
            return "the replica does not run"
        context, before = current_replica(), self._order.goal
        if context is not None:  # as the code must see them when it is told of them
            context.rank, context.world_size = goal.rank, goal.world_size
        if goal.user_config != before.user_config or (code.takes_rank and goal.rank != before.rank):
            error = self._call_user(code.reconfigure, goal.user_config, goal.rank)
            if error is not None:
                return error
        if goal.max_concurrent_queries != bus_io.max_concurrent_queries:
            self._user.loop.call_soon_threadsafe(code.resize, goal.max_concurrent_queries)
            bus_io.max_concurrent_queries = goal.max_concurrent_queries
        if goal.logging_config != self._order.goal.logging_config:
            if self._logs is not None:
                self._logs.configure(goal.logging_config)
            self._user.loop.call_soon_threadsafe(self._log_requests, bus_io, goal.logging_config)
        self._order = msgspec.structs.replace(self._order, goal=goal)
        if context is not None:
            context.code_version = goal.code_version
            context.may_call = goal.may_call
            context.peer_versions = dict(goal.peer_versions)
            context.goal = goal
        return None

    @staticmethod
    def _log_requests(bus_io: ReplicaIO, config: LoggingConfig | None) -> None:
        bus_io.user_executor.log_requests(enabled=config is not None and config.enable_access_log)

    def renew(self, identity: UserIdentity) -> None:
        """Log in with ``identity`` from now on; open connections do so at once."""
        if isinstance(self._login, RenewableLogin):
            self._login.replace(identity)

    def check_health(self) -> str | None:
        """Run the user's health check on its loop; returns None, or the error."""
        return "the replica does not run" if self._code is None else self._call_user(self._code.check_health)

    def evaluate(self, evaluation: Evaluation) -> EvaluationResult:
        """Evaluate for the controller; errors are part of the result."""
        if self._evaluations is None:
            return EvaluationResult(error="the replica does not run")
        return self._evaluations.evaluate(evaluation)

    @property
    def in_flight(self) -> int:
        """Requests that hold a slot."""
        return 0 if self._io is None else self._io.in_flight

    def drain(self) -> None:
        """Refuse new requests, wait for those in flight, then disconnect and discard the user's object."""
        if self._io is not None:
            self._bus.submit(self._drain(self._io)).result()
        if self._code is not None:
            error = self._call_user(self._stop, self._code)
            if error is not None:
                _log.error("application_shutdown_failed", traceback=error)
            self._user.loop.call_soon_threadsafe(self._code.discard)
        if self._evaluations is not None:
            self._evaluations.close()
        self._user.stop(_STOP_TIMEOUT_S)
        self._bus.stop(_STOP_TIMEOUT_S)
        if self._logs is not None:
            self._logs.end()
        if self._tracing is not None:
            self._tracing.close(_STOP_TIMEOUT_S)

    def _call_user(self, method: Callable[..., Any], *arguments: Any) -> str | None:
        """Call ``method`` on the user loop; returns None, or the traceback of what it raised."""
        try:
            error = self._user.submit(_capture_error(method(*arguments))).result()
        except Exception as gone:  # noqa: BLE001 - the loop has ended
            error = gone
        return None if error is None else user_traceback(error)

    @staticmethod
    async def _stop(code: UserCode) -> None:
        async with asyncio.timeout(_SHUTDOWN_TIMEOUT_S):
            await code.stop()

    def _publish_models(self, model_ids: Sequence[str]) -> None:
        """Publish the ids of the loaded models, the most recently used last; for `CurrentReplica.publish_models`."""
        self._model_ids = list(model_ids)[-MODELS_MAX:]
        if self._connection is not None:
            self._bus.loop.call_soon_threadsafe(self._send_models, self._connection)

    async def _construct(self, context: CurrentReplica) -> None:
        def constructed(target: object) -> None:
            context.servable_object = target

        try:
            self._code = await UserCode.construct(
                self._order.goal, self._order.app_dir, constructed, self._code_dir()
            )
            await self._code.check_health()  # as in Ray Serve, what is not healthy has not started
        except UserCodeUnusable:
            self.is_unusable = True
            raise
        except ModuleNotFoundError as error:
            error.add_note(missing_package_hint(error))
            raise

    def _code_dir(self) -> str:
        """The directory with what was uploaded; on another machine than the host's, made for this process."""
        uploads = self._order.uploads
        return (
            store_uploads(uploads, self._order.goal.replica_config.archives)
            if uploads
            else self._order.code_dir
        )

    # -- on the bus loop ------------------------------------------------------------------------------------------

    async def _serve(self, code: UserCode) -> None:
        options = _options(self._order.bus, self._login, self._order.goal.replica_tag)
        connection = BusConnection(options, random.SystemRandom())
        limit = self._order.goal.max_concurrent_queries
        bus_io = ReplicaIO(connection, code, self._user.loop, self._metrics, limit, traces=self._traces())
        self._log_requests(bus_io, self._order.goal.logging_config)
        subject = Subjects(self._order.bus.subject_prefix).replica(self._order.goal.replica_tag)
        self._subscription = bus_io.subscribe(subject)
        self._tasks = TaskOwner("replica")
        bus_io.start(self._tasks)
        self._connection, self._io = connection, bus_io
        if self._logs is not None:
            self._logs.join(connection, Subjects(self._order.bus.subject_prefix))
        await self._accept_links(bus_io, self._tasks)
        await _connect(connection)
        self._renew_on_new_identity(connection)
        self._tasks.start(self._write_metrics(bus_io), "write_metrics")
        self._tasks.start(self._send_models_periodically(connection), "tell_models")

    async def _accept_links(self, bus_io: ReplicaIO, tasks: TaskOwner) -> None:
        """Accept direct links, where that is configured; what cannot be made leaves everything to the bus."""
        bus = self._order.bus
        if bus.direct is not DirectMode.OFF and (bus.direct_dir or bus.direct_host):
            await bus_io.accept_links(bus, tasks)

    def _renew_on_new_identity(self, connection: BusConnection) -> None:
        loop, tasks = asyncio.get_running_loop(), self._tasks
        assert tasks is not None

        def renew() -> None:
            loop.call_soon_threadsafe(lambda: tasks.start(connection.renew(), "renew"))

        if isinstance(self._login, RenewableLogin):
            self._login.listen(renew)

    def _traces(self) -> Traces | None:
        goal = self._order.goal
        if self._tracing is None:
            return None
        return Traces(self._tracing.tracer, goal.backend_tag, goal.replica_tag)

    async def _write_metrics(self, bus_io: ReplicaIO) -> None:
        while True:
            bus_io.write_metrics()
            self._lag.measure()
            self._write_handle_metrics()
            if self._write_span_metrics is not None:
                self._write_span_metrics()
            await asyncio.sleep(METRICS_S)

    def _write_handle_metrics(self) -> None:
        replica = current_replica()
        if replica is None:
            return
        if self._handle_metrics is None:
            # prometheus_client reads PROMETHEUS_MULTIPROC_DIR once, when it is imported, which has happened by now.
            from serve_replica_host.adapters.replica_metrics import PrometheusHandleMetrics  # noqa: PLC0415 - as above

            self._handle_metrics = PrometheusHandleMetrics()
        self._handle_metrics.write(replica)

    async def _send_models_periodically(self, connection: BusConnection) -> None:
        """Publish the loaded models periodically, for new routers; routers forget models without updates."""
        while True:
            if self._model_ids:
                self._send_models(connection)
            await asyncio.sleep(MODELS_INTERVAL_S)

    def _send_models(self, connection: BusConnection) -> None:
        try:
            connection.publish(self._models_subject, msgspec.msgpack.encode(self._model_ids))
        except (NotConnected, OutboundFull):
            _log.debug("models_not_told")  # published again in a few seconds

    async def _drain(self, bus_io: ReplicaIO) -> None:
        await bus_io.drain()
        await asyncio.wrap_future(self._user.submit(bus_io.user_executor.wait_idle()))
        # Links before the bus: the router of a request that is lost with a link probes for it there.
        await bus_io.drain_links(_LINKS_TIMEOUT_S)
        # Responses sent while the bus was disconnected were lost; routers are about to probe for them.
        deadline = time.monotonic() + _PROBE_WAIT_MAX_S
        while (left_s := bus_io.seconds_until_probed()) > 0 and time.monotonic() < deadline:  # noqa: ASYNC110 - it polls the time
            await asyncio.sleep(min(left_s, _POLL_S))
        if self._subscription is not None:
            # Requests that are already delivered are still refused, so that their routers retry elsewhere.
            await self._subscription.drain(_UNSUBSCRIBE_TIMEOUT_S)
        if self._logs is not None:
            await self._logs.part()
        if self._connection is not None:
            await self._connection.close()
        if self._tasks is not None:
            await self._tasks.close(_STOP_TIMEOUT_S)
        bus_io.write_metrics()
        self._write_handle_metrics()


def missing_package_hint(error: ModuleNotFoundError) -> str:
    """What to do about a module that a replica cannot import."""
    package = (error.name or "PACKAGE").partition(".")[0]
    return (
        f"The replica cannot import {package!r}: install it on the hosts, or let the replica have it with "
        f'ray_actor_options={{"runtime_env": {{"pip": ["{package}"]}}}}.'
    )


async def _capture_error(work: Awaitable[None]) -> BaseException | None:
    """Return what ``work`` raises: asyncio would handle SystemExit and cancellation of a task itself."""
    try:
        await work
    except BaseException as error:  # noqa: BLE001 - user code may raise anything
        return error
    return None


async def _connect(connection: BusConnection) -> None:
    """Connect until the server has the subscriptions: the host then reports RUNNING, and routers send at once.

    Raises BusAuthorizationFailed.
    """
    is_first = True
    while True:
        try:
            if is_first:
                await connection.connect(timeout_s=_CONNECT_TIMEOUT_S)
                is_first = False
            await connection.flush(_FLUSH_TIMEOUT_S)
        except BusUnavailable as error:
            _log.warning("bus_away", error=str(error))
            await asyncio.sleep(_RETRY_S)
        else:
            return


def _open_tracing(order: StartReplicaRequest) -> OtlpTracing | None:
    """Open tracing; the replica's own environment overrides its host's."""
    goal = order.goal
    own = {name: value for name, value in os.environ.items() if value}
    opened = open_tracing(
        read_tracing_settings({**order.tracing, **own}),
        "muster-replica",
        goal.replica_tag,
        {"muster.backend_tag": goal.backend_tag},
    )
    if opened is not None:
        opened.serve_user_code()
    return opened


def _options(bus: BusSettings, login: Login | None, replica_tag: str) -> BusOptions:
    return BusOptions(
        servers=bus.servers,
        login=login,
        user=bus.user,
        password=bus.password,
        name=f"replica {replica_tag}",
        inbox_prefix=bus.inbox_prefix,
        is_shared=True,
        tls_ca_file=bus.tls_ca_file,
    )
