"""Joins a replica's two threads and its NATS connection, and takes them apart again."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, final

import msgspec
import structlog

from serve_common.errors import BusUnavailable, PermanentError
from serve_common.identities.credentials import UserIdentity
from serve_common.nats.connection import BusConnection
from serve_common.nats.login import HeldLogin, login_of
from serve_common.nats.options import BusOptions, Login, NotConnected, OutboundFull
from serve_common.nats.subscriptions import Subscription
from serve_common.protocol.reports import ReplicaGoal
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.health import OtherLoopsLag
from serve_common.runtime.request_context import CurrentReplica, current_replica, set_replica_context
from serve_common.runtime.settings import BusSettings
from serve_common.runtime.tasks import TaskOwner
from serve_common.runtime.threads import LoopThread
from serve_common.telemetry.catalogue.replicas import REPLICA_LAG
from serve_common.telemetry.metrics import measures
from serve_common.telemetry.otlp import OpenTracing, open_tracing
from serve_common.telemetry.tracer import read_tracing_settings
from serve_replica_host.ports import HandleMetrics, RequestMetrics
from serve_replica_host.replica.io.replica_io import ReplicaIO
from serve_replica_host.replica.telemetry.logs import ReplicaLogs
from serve_replica_host.replica.telemetry.remote import RemoteTelemetry
from serve_replica_host.replica.telemetry.traces import Traces, user_traceback
from serve_replica_host.replica.user.code import UserCode

MODELS_MAX: Final = 1_000
"""Told of one replica; routers choose by those, and the others are found by chance."""


@final
class LoadedModels:
    """The ids of the models; reading and replacing them is one step, so any thread may."""

    __slots__ = ("_model_ids",)

    def __init__(self) -> None:
        self._model_ids: list[str] = []

    @property
    def has_any(self) -> bool:
        """True while at least one is held."""
        return bool(self._model_ids)

    def hold(self, model_ids: Sequence[str]) -> None:
        """These are held now, the most recently used last."""
        self._model_ids = list(model_ids)[-MODELS_MAX:]

    def encoded(self) -> bytes:
        """What is published: msgpack, a list of texts."""
        return msgspec.msgpack.encode(self._model_ids)


class StartReplicaRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a replica's process needs."""

    goal: ReplicaGoal
    bus: BusSettings
    """The replica's own: its name, and its identity until the next one comes."""
    app_dir: str
    """Absolute; empty for none."""
    tracing: dict[str, str] = {}
    """The host's OTEL_… variables, for a replica on a machine whose environment has none."""


class ControlOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a start, a reconfigure or a health check ended."""

    error: str | None = None
    """The user's traceback, or what else went wrong; None when all is well."""
    fetched: RemoteTelemetry | None = None
    """The last that there is to say before this process is ended; None where its host need not fetch it."""


def encode(value: StartReplicaRequest | ControlOutcome | ReplicaGoal | UserIdentity) -> bytes:
    """The bytes that travel through Ray."""
    return msgspec.msgpack.encode(value)


def decode_order(data: bytes) -> StartReplicaRequest:
    """A `StartReplicaRequest`; raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=StartReplicaRequest)


def decode_goal(data: bytes) -> ReplicaGoal:
    """A `ReplicaGoal`; raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=ReplicaGoal)


def decode_identity(data: bytes) -> UserIdentity:
    """A `UserIdentity`; raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=UserIdentity)


def decode_outcome(data: bytes) -> ControlOutcome:
    """A `ControlOutcome`; raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=ControlOutcome)


_log = structlog.get_logger(__name__)

METRICS_S: Final = 0.5
MODELS_EVERY_S: Final = 5.0
_SHUTDOWN_TIMEOUT_S: Final = 10.0
"""For the shutdown of an ASGI application; what it does after that is cut off."""
_CONNECT_TIMEOUT_S: Final = 30.0
_FLUSH_TIMEOUT_S: Final = 2.0
_RETRY_S: Final = 0.1
_STOP_TIMEOUT_S: Final = 1.0
_ASKED_WITHIN_MAX_S: Final = 6.0
"""So long does a drained replica stay for routers at most, however often NATS comes and goes."""
_LOOK_S: Final = 0.05


@final
class ReplicaProcess:
    """One replica. Control methods may be called from any thread but its own two; each waits for its end."""

    def __init__(
        self, order: StartReplicaRequest, metrics: RequestMetrics, logs: ReplicaLogs | None = None
    ) -> None:
        """Starts the threads; nothing is served before `start`. ``logs`` are published once there is a bus."""
        self._logs = logs
        self._order = order
        self._metrics = metrics
        self._handle_metrics: HandleMetrics | None = None
        self._write_span_metrics: Callable[[], None] | None = None
        self._user = LoopThread("replica-user")
        self._lag = OtherLoopsLag(self._user.loop, measures.distribution(REPLICA_LAG).observe)
        self._bus = LoopThread("replica-bus")
        self._code: UserCode | None = None
        self._desk: ReplicaIO | None = None
        self._connection: BusConnection | None = None
        self._subscription: Subscription | None = None
        self._tasks: TaskOwner | None = None
        self._tracing: OpenTracing | None = None
        self._login = login_of(order.bus)
        self._models = LoadedModels()
        self._models_subject = Subjects(order.bus.subject_prefix).models(order.goal.replica_tag)

    def start(self) -> str | None:
        """Construct the user's code, then subscribe the replica's subject. None, or what went wrong.

        Waits for NATS as long as it takes: the host ends a start that takes too long.
        """
        goal = self._order.goal
        context = CurrentReplica(
            replica_tag=goal.replica_tag,
            backend_tag=goal.backend_tag,
            bus=self._order.bus,
            login=self._login,
            may_call=goal.may_call,
            code_version=goal.code_version,
            companions=dict(goal.companions),
            publish_models=self._publish_models,
        )
        set_replica_context(context)
        error = self._call_user(self._construct, context)
        if error is not None:
            return error
        assert self._code is not None, "it was constructed"
        self._tracing = _open_tracing(self._order)
        if self._tracing is not None:
            from serve_replica_host.replica.telemetry.handle_metrics import PrometheusSpanMetrics  # noqa: PLC0415 - as below

            self._write_span_metrics = PrometheusSpanMetrics(self._tracing.counts).write
        try:
            self._bus.submit(self._serve(self._code)).result()
        except PermanentError as error:
            return f"the replica cannot use NATS: {error}"
        return None

    def reconfigure(self, goal: ReplicaGoal) -> str | None:
        """Apply ``goal``'s configuration in place. None, or the user's traceback; then nothing was applied."""
        code, desk = self._code, self._desk
        if code is None or desk is None:
            return "the replica does not run"
        has_config = goal.user_config is not None
        if has_config and goal.user_config != self._order.goal.user_config:
            error = self._call_user(code.reconfigure, goal.user_config)
            if error is not None:
                return error
        if goal.max_concurrent_queries != desk.max_concurrent_queries:
            self._user.loop.call_soon_threadsafe(code.resize, goal.max_concurrent_queries)
            desk.max_concurrent_queries = goal.max_concurrent_queries
        self._order = msgspec.structs.replace(self._order, goal=goal)
        context = current_replica()
        if context is not None:
            context.code_version = goal.code_version
            context.may_call = goal.may_call
            context.companions = dict(goal.companions)
        return None

    def renew(self, identity: UserIdentity) -> None:
        """Log in with ``identity`` from now on; connections that are there do so at once."""
        if isinstance(self._login, HeldLogin):
            self._login.replace(identity)

    def check_health(self) -> str | None:
        """None when the user's code says that it is well, and its loop turns at all."""
        return "the replica does not run" if self._code is None else self._call_user(self._code.check_health)

    @property
    def in_flight(self) -> int:
        """Requests that hold a slot."""
        return 0 if self._desk is None else self._desk.in_flight

    def drain(self) -> None:
        """Refuse what is new, wait for what is in flight, and say goodbye to NATS and to the user's object."""
        if self._desk is not None:
            self._bus.submit(self._drain(self._desk)).result()
        if self._code is not None:
            error = self._call_user(self._stop, self._code)
            if error is not None:
                _log.error("application_shutdown_failed", traceback=error)
            self._user.loop.call_soon_threadsafe(self._code.discard)
        self._user.stop(_STOP_TIMEOUT_S)
        self._bus.stop(_STOP_TIMEOUT_S)
        if self._logs is not None:
            self._logs.end()
        if self._tracing is not None:
            self._tracing.close(_STOP_TIMEOUT_S)

    def _call_user(self, method: Callable[..., Any], *arguments: Any) -> str | None:
        """None, or the traceback of what the user's code raised."""
        try:
            error = self._user.submit(_error_of(method(*arguments))).result()
        except Exception as gone:  # noqa: BLE001 - the loop has ended
            error = gone
        return None if error is None else user_traceback(error)

    @staticmethod
    async def _stop(code: UserCode) -> None:
        async with asyncio.timeout(_SHUTDOWN_TIMEOUT_S):
            await code.stop()

    def _publish_models(self, model_ids: Sequence[str]) -> None:
        """See `CurrentReplica.publish_models`."""
        self._models.hold(model_ids)
        if self._connection is not None:
            self._bus.loop.call_soon_threadsafe(self._tell_models, self._connection)

    async def _construct(self, context: CurrentReplica) -> None:
        def constructed(target: object) -> None:
            context.servable_object = target

        self._code = await UserCode.construct(self._order.goal, self._order.app_dir, constructed)

    # -- on the bus loop ------------------------------------------------------------------------------------------

    async def _serve(self, code: UserCode) -> None:
        options = _options(self._order.bus, self._login, self._order.goal.replica_tag)
        connection = BusConnection(options, random.SystemRandom())
        limit = self._order.goal.max_concurrent_queries
        desk = ReplicaIO(connection, code, self._user.loop, self._metrics, limit, traces=self._traces())
        subject = Subjects(self._order.bus.subject_prefix).replica(self._order.goal.replica_tag)
        self._subscription = desk.subscribe(subject)
        self._tasks = TaskOwner("replica")
        desk.start(self._tasks)
        self._connection, self._desk = connection, desk
        if self._logs is not None:
            self._logs.join(connection, Subjects(self._order.bus.subject_prefix))
        await _connect(connection)
        self._renew_when_told(connection)
        self._tasks.start(self._write_metrics(desk), "write_metrics")
        self._tasks.start(self._keep_telling_models(connection), "tell_models")

    def _renew_when_told(self, connection: BusConnection) -> None:
        loop, tasks = asyncio.get_running_loop(), self._tasks
        assert tasks is not None

        def renew() -> None:
            loop.call_soon_threadsafe(lambda: tasks.start(connection.renew(), "renew"))

        if isinstance(self._login, HeldLogin):
            self._login.listen(renew)

    def _traces(self) -> Traces | None:
        goal = self._order.goal
        if self._tracing is None:
            return None
        return Traces(self._tracing.tracer, goal.backend_tag, goal.replica_tag)

    async def _write_metrics(self, desk: ReplicaIO) -> None:
        while True:
            desk.write_metrics()
            self._lag.ask()
            self._write_handle_metrics()
            if self._write_span_metrics is not None:
                self._write_span_metrics()
            await asyncio.sleep(METRICS_S)

    def _write_handle_metrics(self) -> None:
        replica = current_replica()
        if replica is None:
            return
        if self._handle_metrics is None:
            # prometheus_client looks at PROMETHEUS_MULTIPROC_DIR once, when it is imported; by now that has happened.
            from serve_replica_host.replica.telemetry.handle_metrics import make_handle_metrics  # noqa: PLC0415 - as above

            self._handle_metrics = make_handle_metrics()
        self._handle_metrics.write(replica)

    async def _keep_telling_models(self, connection: BusConnection) -> None:
        """Routers that begin later learn what is held, and those that hear nothing forget it."""
        while True:
            if self._models.has_any:
                self._tell_models(connection)
            await asyncio.sleep(MODELS_EVERY_S)

    def _tell_models(self, connection: BusConnection) -> None:
        try:
            connection.publish(self._models_subject, self._models.encoded())
        except (NotConnected, OutboundFull):
            _log.debug("models_not_told")  # said again in a few seconds

    async def _drain(self, desk: ReplicaIO) -> None:
        await desk.drain()
        await asyncio.wrap_future(self._user.submit(desk.user_side.wait_idle()))
        # Answers that left while the bus was away reached nobody; their routers are about to ask for them.
        give_up_at = time.monotonic() + _ASKED_WITHIN_MAX_S
        while (left_s := desk.seconds_until_asked()) > 0 and time.monotonic() < give_up_at:  # noqa: ASYNC110 - time is looked at
            await asyncio.sleep(min(left_s, _LOOK_S))
        if self._subscription is not None:
            # Requests that the server has sent already are still refused, so that their routers try elsewhere.
            await self._subscription.drain(_FLUSH_TIMEOUT_S)
        if self._logs is not None:
            await self._logs.part()
        if self._connection is not None:
            await self._connection.close()
        if self._tasks is not None:
            await self._tasks.close(_STOP_TIMEOUT_S)
        desk.write_metrics()
        self._write_handle_metrics()


async def _error_of(work: Awaitable[None]) -> BaseException | None:
    """What ``work`` raises, as a result: asyncio takes it for its own if a task raises SystemExit or is cancelled."""
    try:
        await work
    except BaseException as error:  # noqa: BLE001 - user code may raise anything
        return error
    return None


async def _connect(connection: BusConnection) -> None:
    """Until the server knows the subscriptions: the host then reports RUNNING, and routers send at once.

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


def _open_tracing(order: StartReplicaRequest) -> OpenTracing | None:
    """The replica's own environment goes before its host's."""
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
