"""The one router of a process, shared by all its handles, and how it finds NATS.

Why it starts with the first call: importing, creating and pickling handles must cost nothing in a process that makes no
call.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Final, TypeVar, final

import structlog

from muster.handles.calls import HandleCall
from muster.handles.router import BUCKET_WAIT_S, DISCONNECTED, HandleRouter
from muster.library_logs import use_library_logs
from serve_common.dispatch.dispatcher import Dispatcher
from serve_common.dispatch.routes import ModelHolders, Routes
from serve_common.dispatch.shadows import Shadows
from serve_common.dispatch.timers import RequestTimers
from serve_common.dispatch.upstream import Outgoing
from serve_common.errors import BusAuthorizationFailed, BusUnavailable, ServeError
from serve_common.identities.roles import Role, inbox_prefix
from serve_common.nats.bucket_watch import BucketConnection
from serve_common.nats.connection import BusConnection, Inbox
from serve_common.nats.login import RenewableLogin, build_login
from serve_common.nats.options import ROUTER_PING_INTERVAL_S, ROUTER_PINGS_MAX, BusOptions, Login
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.request_context import current_replica
from serve_common.runtime.settings import BusSettings
from serve_common.runtime.tasks import TaskOwner
from serve_common.runtime.threads import LoopThread, Mailbox

_OWN_VARIABLES: Final = {
    "MUSTER_CLIENT_CREDS_FILE": "MUSTER_NATS_CREDS_FILE",
    "MUSTER_CLIENT_PASSWORD": "MUSTER_NATS_PASSWORD",
    "MUSTER_CLIENT_PASSWORD_FILE": "MUSTER_NATS_PASSWORD_FILE",
}
"""Variables with credentials for handles, and the variables that the command line's search reads instead."""


def find_bus() -> BusSettings:
    """Settings of this process' NATS connection. Raises as `find_bus_outside_replica` does."""
    replica = current_replica()
    return find_bus_outside_replica(os.environ, Path.cwd()) if replica is None else replica.bus


def find_bus_outside_replica(
    variables: Mapping[str, str], directory: Path, nats: str | None = None
) -> BusSettings:
    """Find a stack for a process that is no replica: ``nats``, or what the command line would find.

    Credentials are the file MUSTER_CLIENT_CREDS_FILE, or those stored with the stack or the context. For a NATS with
    plain users the user is MUSTER_CLIENT_USER (``client``), the password MUSTER_CLIENT_PASSWORD or that of the same
    user in the URL.
    Raises `BusUnavailable` when no stack is found, `BadField`, and `SecretUnusable`.

    Why a role of its own, `Role.CLIENT`: a program that can send pickles to replicas runs code there, which tools with
    the admin's credentials need not.
    """
    # Only here: a replica needs none of it.
    from muster.cli.session import StackChoice, find_stack  # noqa: PLC0415 - as above
    from muster.client.contexts import LOCAL, choose_context  # noqa: PLC0415 - as above
    from muster.client.requests import parse_urls  # noqa: PLC0415 - as above

    user = variables.get("MUSTER_CLIENT_USER") or Role.CLIENT.value
    own = {
        name: value
        for name, value in variables.items()
        if not name.startswith(
            ("MUSTER_NATS_CREDS_FILE", "MUSTER_NATS_PASSWORD", "MUSTER_NATS_USER", "MUSTER_CLIENT_")
        )
    }
    own |= {known: variables[name] for name, known in _OWN_VARIABLES.items() if variables.get(name)}
    url = nats or variables.get("MUSTER_NATS_URL")
    context = None if url else choose_context(None, variables)
    if context is not None:
        url = context.nats
        own["MUSTER_SUBJECT_PREFIX"] = context.subject_prefix
        if context.tls_ca_file is not None:
            own["MUSTER_NATS_TLS_CA_FILE"] = context.tls_ca_file
        if context.client_creds is not None and not own.keys() & set(_OWN_VARIABLES.values()):
            own["MUSTER_NATS_CREDS_FILE"] = context.client_creds
    if url:
        parsed = parse_urls(url, "MUSTER_NATS_URL" if nats is None else "nats")
        own["MUSTER_NATS_URL"] = ",".join(parsed.urls)
        if parsed.user == user and parsed.password and not own.keys() & set(_OWN_VARIABLES.values()):
            own["MUSTER_NATS_PASSWORD"] = parsed.password
    own["MUSTER_NATS_USER"] = user
    return find_stack(StackChoice(context=LOCAL), own, directory).bus_settings(inbox_prefix(Role.CLIENT))


_log = structlog.get_logger(__name__)

Reply = TypeVar("Reply")

BUS_WAIT_S: Final = 5.0
"""Seconds that a call waits for NATS to come back; the same as in a proxy."""
_CONNECT_ROUND_S: Final = 10.0
_FLUSH_S: Final = 5.0
_CLOSE_TIMEOUT_S: Final = 2.0
_START_TIMEOUT_S: Final = 10.0
_RETRY_AFTER_S: Final = 1.0
"""Seconds between a failure and a new attempt: a program that calls in a loop must not connect as often."""


@final
class _Parts:
    """Components on the router's thread."""

    def __init__(self, settings: BusSettings, login: Login | None, name: str) -> None:
        """Creates all components and starts none; must be called on the loop."""
        rng = random.Random()  # noqa: S311 - spreads load, guards nothing
        self._settings = settings
        self._bus = BusConnection(
            BusOptions(
                servers=settings.servers,
                login=login,
                user=settings.user or None,
                password=settings.password or None,
                name=name,
                inbox_prefix=settings.inbox_prefix,
                tls_ca_file=settings.tls_ca_file,
                ping_interval_s=ROUTER_PING_INTERVAL_S,
                outstanding_pings_max=ROUTER_PINGS_MAX,
            ),
            rng,
        )
        subjects, loop = Subjects(settings.subject_prefix), asyncio.get_running_loop()
        routes = Routes(rng.random)
        inbox = Inbox(self._bus, f"handles-{uuid.uuid4().hex[:12]}")
        outgoing = Outgoing(self._bus, inbox, subjects, settings.direct)
        dispatcher = Dispatcher(routes, outgoing, bus_wait_s=BUS_WAIT_S)
        shadows = Shadows(dispatcher, rng.random, loop.time)
        self.router = HandleRouter(dispatcher, routes, shadows)
        self.mailbox: Mailbox[HandleCall] = Mailbox(loop, self.router.take)
        self._bucket = BucketConnection(
            settings, name=f"{name} routes", login=login, listener=self.router, on_closed=self._bucket_closed
        )
        models = ModelHolders(routes, subjects, loop.time)
        self._bus.subscribe(subjects.all_models, models.take)
        self._timers = RequestTimers(dispatcher, routes, outgoing, models)
        self._tasks = TaskOwner("handles", on_failure=self._task_failed)
        self._bus.on_connected.append(dispatcher.bus_reconnected)
        self._bus.on_bus_responds_again.append(dispatcher.bus_responds_again)
        self._links = outgoing.links
        self._login = login
        self._loop = loop

    def start(self) -> None:
        """Connect in the background; calls wait meanwhile."""
        self._tasks.start(self._connect(), "connect")
        self._tasks.start(self._timers.run(), "beat")
        if isinstance(self._login, RenewableLogin):
            self._login.listen(self._renew)

    async def close(self) -> None:
        """Fail calls under way and disconnect."""
        if isinstance(self._login, RenewableLogin):
            self._login.forget(self._renew)
        await self.router.close()
        await self._tasks.close(_CLOSE_TIMEOUT_S)
        await self._bucket.close()
        await self._links.close()
        await self._bus.close()

    async def _connect(self) -> None:
        """Connect until the bucket is watched. A permanent error fails all calls."""
        try:
            await self._connect_bus()
            await self._bucket.open()
        except BusAuthorizationFailed as error:
            user = self._settings.user
            failure = BusAuthorizationFailed(f"NATS does not let the user {user!r} call deployments: {error}")
            self.router.fail_all(failure)
        except ServeError as error:
            self.router.fail_all(error)

    async def _connect_bus(self) -> None:
        where = ", ".join(self._settings.servers)
        self.router.routing_error = f"NATS at {where} does not answer yet"
        while True:
            try:
                await self._bus.connect(_CONNECT_ROUND_S)
                break
            except BusUnavailable as error:
                self.router.routing_error = f"NATS at {where} does not answer: {error}"
                _log.warning("bus_unavailable", reason=str(error))
        await self._bus.flush(_FLUSH_S)
        if self._bus.permission_violations:
            raise BusAuthorizationFailed(
                "it may not receive replies; outside of replicas, handles come as 'client'"
            )
        self.router.routing_error = (
            f"the bucket of snapshots at {where} was not read within {BUCKET_WAIT_S:g} s; "
            "has a controller ever run there?"
        )

    def _renew(self) -> None:
        """Reconnect with the new login; called on any thread."""
        self._loop.call_soon_threadsafe(lambda: self._tasks.start(self._bus.renew(), "renew"))

    def _bucket_closed(self) -> None:
        self.router.fail_all(BusUnavailable("the connection to NATS was closed for good"))

    def _task_failed(self, _name: str, error: BaseException) -> None:
        failure = error if isinstance(error, ServeError) else BusUnavailable(f"handles failed: {error!r}")
        self.router.fail_all(failure)


@final
class Runtime:
    """A running router; callable from any thread but its own."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        """Starts the router's thread; connects in the background."""
        self.settings: Final = settings
        replica = current_replica()
        if replica is None:
            use_library_logs()
        self._thread = LoopThread("muster-handles")
        login = build_login(settings) if replica is None or settings is not replica.bus else replica.login
        self._parts = self._thread.submit(_start_parts(settings, login, name)).result(_START_TIMEOUT_S)
        self._mailbox = self._parts.mailbox
        if replica is not None:
            replica.handle_queues = self._parts.router.queues

    @property
    def is_spent(self) -> bool:
        """True when it has failed permanently, long enough ago to replace it by a new one."""
        router = self._parts.router
        return router.failure is not None and time.monotonic() - router.failed_at >= _RETRY_AFTER_S

    def submit(self, question: Callable[[HandleRouter], Coroutine[object, object, Reply]]) -> Future[Reply]:
        """Run ``question`` on the router's thread."""
        return self._thread.submit(question(self._parts.router))

    def post(self, call: HandleCall) -> None:
        """Hand ``call`` to the router."""
        if not self._mailbox.put(call):
            call.fail(BusUnavailable(DISCONNECTED))

    def close(self) -> None:
        """Fail calls under way and stop the thread, in bounded time."""
        if self._thread.loop.is_closed():
            return
        try:
            self._thread.submit(self._parts.close()).result(2 * _CLOSE_TIMEOUT_S)
        except (FutureTimeoutError, ServeError, OSError) as error:
            _log.warning("handles_not_closed", error=repr(error))
        self._thread.stop(_CLOSE_TIMEOUT_S)


async def _start_parts(settings: BusSettings, login: Login | None, name: str) -> _Parts:
    parts = _Parts(settings, login, name)
    parts.start()
    return parts


_lock = threading.Lock()
_runtime: Runtime | None = None
_chosen_settings: BusSettings | None = None
"""Settings that `connect` or `use` was called with; None: search for a stack."""


def runtime() -> Runtime:
    """The process' runtime, started when there is none. Raises as `find_bus` when no stack is found."""
    global _runtime  # noqa: PLW0603 - one for the process, as the module's text says
    running = _runtime
    if running is not None and not running.is_spent:
        return running
    with _lock:
        if _runtime is not None and _runtime.is_spent:
            _runtime.close()
            _runtime = None
        if _runtime is None:
            _runtime = Runtime(_chosen_settings or find_bus(), _own_name())
        return _runtime


def is_running() -> bool:
    """Whether this process has a router."""
    return _runtime is not None


def connect(
    nats: str | None = None,
    *,
    creds: str | None = None,
    user: str | None = None,
    password: str | None = None,
    subject_prefix: str | None = None,
) -> None:
    """Choose the stack of this process' handles, instead of letting the first call search for one.

    ``nats`` has the format of MUSTER_NATS_URL, ``creds`` is a file of NATS credentials; ``user`` and ``password`` are
    for a NATS with plain users. Calls under way over another connection fail. Returns before the connection is
    established; raises `BusUnavailable` when nothing is given and no stack is found, `BadField` for invalid values.
    """
    overrides = {
        "MUSTER_CLIENT_CREDS_FILE": creds,
        "MUSTER_CLIENT_USER": user,
        "MUSTER_CLIENT_PASSWORD": password,
        "MUSTER_SUBJECT_PREFIX": subject_prefix,
    }
    variables = {**os.environ, **{name: value for name, value in overrides.items() if value is not None}}
    if creds is None and (user or password):
        variables.pop("MUSTER_CLIENT_CREDS_FILE", None)
    use(find_bus_outside_replica(variables, Path.cwd(), nats))


def use(settings: BusSettings) -> None:
    """Like `connect`, with complete settings."""
    global _runtime, _chosen_settings  # noqa: PLW0603 - as above
    with _lock:
        _chosen_settings = settings
        if _runtime is not None:
            _runtime.close()
        _runtime = Runtime(settings, _own_name())


def disconnect() -> None:
    """Fail the calls under way, disconnect, and discard the settings of `connect`; the next call connects again."""
    global _runtime, _chosen_settings
    with _lock:
        running, _runtime, _chosen_settings = _runtime, None, None
        if running is not None:
            running.close()


def _own_name() -> str:
    replica = current_replica()
    return f"handles of {'process ' + str(os.getpid()) if replica is None else replica.replica_tag}"


def _reset_after_fork() -> None:
    """Discard the runtime in a forked child: its thread does not exist there, its calls belong to the parent."""
    global _runtime, _lock  # noqa: PLW0603 - as above
    _runtime = None
    _lock = threading.Lock()


atexit.register(disconnect)
os.register_at_fork(after_in_child=_reset_after_fork)
