"""The host's client of its Ray runtime: starts the process, sends it calls and receives its events.

Why the host exits when the runtime does: the replicas are its children. A restarted host reports an empty inventory and
gets a goal of what to start, which is the only way in which a host recovers.

Nothing here waits for the runtime: unsent calls are bounded, notices are read at a limited rate, and a silent runtime
shows in ``/healthz``.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import msgspec
import structlog

from serve_common.clock import TokenBucket
from serve_common.errors import BadField
from serve_common.identities.credentials import SigningKey, UserIdentity
from serve_common.identities.roles import Role, call_tags, inbox_prefix
from serve_common.names import ReplicaTag
from serve_common.nats.login import mint_now
from serve_common.protocol.reports import ReplicaGoal
from serve_common.protocol.subjects import tokens
from serve_common.runtime import guardian
from serve_common.runtime.child_process import describe_exit
from serve_common.runtime.settings import BusSettings
from serve_replica_host.adapters.local_process import UnixUser, drop_privileges
from serve_replica_host.adapters.ray_protocol import (
    NOTICE_BYTES_MAX,
    RESOURCES_INTERVAL_S,
    UNSENT_BYTES_MAX,
    Call,
    CheckHealth,
    Close,
    Drain,
    Evaluate,
    Kill,
    KillByForce,
    Notice,
    Open,
    OpenFailed,
    RayProtocolError,
    RaySettings,
    RayUnavailable,
    Reconfigure,
    Renew,
    Resources,
    Start,
    decode_notice,
    encode,
    read_body,
)
from serve_replica_host.core.events import ProcessEnded, Reconfigured, ReplicaEvent, ReplicaStartFailed
from serve_replica_host.settings import HostSettings

_log = structlog.get_logger(__name__)

COMMAND: Final = (sys.executable, "-m", "serve_replica_host.ray_main")
CLOSE_TIMEOUT_S: Final = 12.0
"""Seconds to wait for the runtime's exit; longer than Ray's own shutdown may take."""
_KILL_TIMEOUT_S: Final = 5.0
"""Seconds to wait after a kill; longer than the guardian takes to kill the remaining processes."""
_NOTICES_PER_S: Final = 2_000.0
_NOTICES_BURST: Final = 20_000.0
_BACKLOG_MAX: Final = 500
"""Unprocessed inputs of the host above which no notices are read, so that goals are not delayed."""
_PAUSE_S: Final = 0.02

_INHERITED: Final = frozenset(
    {"MUSTER_LOG_LEVEL", "MUSTER_UNCOUNTED", "MUSTER_STACK_ID", "MUSTER_PROCESS", "MUSTER_STATE_DIR"}
)
_RAY_DEFAULTS: Final = {"RUNTIME_ENV_RETRY_TIMES": "1"}
"""Ray would try three times to install a package that does not exist; the controller starts replicas again as it is."""
_HOST_VARIABLES: Final = re.compile(r"MUSTER_.*|PROMETHEUS_MULTIPROC_DIR")


def runtime_environment(variables: Mapping[str, str], user: UnixUser | None = None) -> dict[str, str]:
    """The variables that the runtime, and with it user code, inherits: none of the host's own settings."""
    inherited = _RAY_DEFAULTS | {
        name: value
        for name, value in variables.items()
        if name in _INHERITED or _HOST_VARIABLES.fullmatch(name.upper()) is None
    }
    return (
        inherited
        if user is None
        else inherited | {"HOME": user.home, "USER": user.name, "LOGNAME": user.name}
    )


def ray_settings(settings: HostSettings, log_socket: str) -> RaySettings:
    """The settings of the runtime; ``log_socket`` is empty if there is none."""
    return RaySettings(
        temp_dir=settings.ray_temp_dir,
        address=settings.ray_address,
        num_cpus=settings.num_cpus,
        app_root=settings.app_root,
        metrics_dir=settings.metrics_dir,
        code_dir=settings.code_dir,
        host_id=settings.host_id,
        spare_replicas=settings.spare_replicas,
        log_socket=log_socket,
        tracing={} if settings.tracing is None else settings.tracing.variables,
    )


@final
class RayProcess:
    """Runs replicas in a separate process, by calls as of `ports.ReplicaRuntime`; events arrive on `open`'s loop."""

    def __init__(
        self, settings: RaySettings, user: UnixUser | None = None, *, command: Sequence[str] = COMMAND
    ) -> None:
        """Starts the process as ``user``, which starts Ray.

        ``command`` gets the descriptor of its socket as the last argument.

        Call it on the main thread: the guardian is signalled when the thread that started it ends. Raises `BadField`
        when ``user`` may not execute Python, and OSError.
        """
        self.resources: dict[str, float] = {}
        """Total resources by Ray's names."""
        self._on_event: Callable[[ReplicaEvent], None] = lambda _event: None
        self._backlog: Callable[[], int] = lambda: 0
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._failure = ""
        self._silent_s = 0.0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                self._process = _start_process(command, theirs, user)
            except PermissionError as error:
                self._socket.close()
                user_text = "this user" if user is None else user.name
                raise BadField(
                    "MUSTER_REPLICA_USER", f"{user_text} may not execute {sys.executable}"
                ) from error
        with contextlib.suppress(OSError):  # it has exited, which its exit status shows
            self._socket.sendall(encode(Open(settings)))

    # -- its life -------------------------------------------------------------------------------------------------

    async def open(self, on_event: Callable[[ReplicaEvent], None], backlog: Callable[[], int]) -> None:
        """Wait until Ray has started; takes seconds. Raises `RayUnavailable`.

        ``backlog`` returns the number of unprocessed events.
        """
        self._on_event, self._backlog = on_event, backlog
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        notice = await self._next()
        if isinstance(notice, OpenFailed):
            raise RayUnavailable(f"Ray did not start: {notice.error}")
        self._on_notice(notice)
        _log.info("ray_ready", resources=self.resources, pid=self._process.pid)

    async def run(self) -> None:
        """Process its notices. Raises `RayUnavailable` when it exits or violates the protocol."""
        rate = TokenBucket(_NOTICES_PER_S, _NOTICES_BURST)
        while True:
            if self._backlog() > _BACKLOG_MAX or not rate.take(time.monotonic()):
                await asyncio.sleep(_PAUSE_S)
            else:
                self._on_notice(await self._next())

    async def watch(self) -> None:
        """Count silent seconds in iterations of this loop, so that time in which the host is frozen does not count."""
        while True:
            await asyncio.sleep(RESOURCES_INTERVAL_S)
            self._silent_s += RESOURCES_INTERVAL_S

    def health_error(self, silent_after_s: float) -> str | None:
        """An error when no notice came for ``silent_after_s`` seconds, else None; callable from any thread."""
        if self._silent_s < silent_after_s + RESOURCES_INTERVAL_S:
            return None
        return f"the Ray runtime has said nothing for {self._silent_s:.0f} s"

    async def close(self) -> None:
        """Make it shut Ray down and exit, or kill it."""
        if self._writer is None:
            self._socket.close()
        elif not self._writer.is_closing():
            self._call(Close())
        ended = await asyncio.to_thread(self._wait, CLOSE_TIMEOUT_S)
        if self._writer is not None:
            self._writer.close()
        if ended is None:
            _log.error("ray_runtime_does_not_end", pid=self._process.pid, timeout_s=CLOSE_TIMEOUT_S)
            self._kill_process()
            await asyncio.to_thread(self._wait, _KILL_TIMEOUT_S)

    # -- calls ----------------------------------------------------------------------------------------------------

    def start(self, goal: ReplicaGoal, bus: BusSettings) -> None:
        """Start a replica with ``bus``, its own settings; errors are reported as events."""
        try:
            self._call(Start(goal, bus))
        except RayProtocolError as error:
            self._on_event(ReplicaStartFailed(goal.replica_tag, str(error)))
            self._on_event(ProcessEnded(goal.replica_tag, str(error)))

    def reconfigure(self, goal: ReplicaGoal) -> None:
        """Apply the goal's configuration; the outcome is an event."""
        try:
            self._call(Reconfigure(goal))
        except RayProtocolError as error:
            self._on_event(Reconfigured(goal.replica_tag, goal.config_version, str(error)))

    def renew(self, replica_tag: ReplicaTag, identity: UserIdentity) -> None:
        """Make the replica log in with ``identity`` from now on."""
        self._call(Renew(replica_tag, identity))

    def check_health(self, replica_tag: ReplicaTag) -> None:
        """Request a health check; the outcome is an event."""
        self._call(CheckHealth(replica_tag))

    def evaluate(self, replica_tag: ReplicaTag, request_id: str, body: bytes) -> None:
        """Pass ``body`` to the replica; the outcome is an event, which may be missing."""
        self._call(Evaluate(replica_tag, request_id, body))

    def drain(self, replica_tag: ReplicaTag) -> None:
        """Make the replica refuse new requests and finish those in flight."""
        self._call(Drain(replica_tag))

    def kill(self, replica_tag: ReplicaTag) -> None:
        """Kill the replica's process."""
        self._call(Kill(replica_tag))

    def kill_by_force(self, replica_tag: ReplicaTag) -> None:
        """Kill the process by the kernel; in the runtime, because the host may be another user."""
        self._call(KillByForce(replica_tag))

    def _call(self, call: Call) -> None:
        assert self._writer is not None, "open comes first"
        if self._failure or self._writer.is_closing():
            return
        self._writer.write(encode(call))
        if self._writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self._failure = "it does not read what it is told"
            self._kill_process()
            self._writer.transport.abort()

    # -- notices --------------------------------------------------------------------------------------------------

    def _on_notice(self, notice: Notice) -> None:
        self._silent_s = 0.0
        match notice:
            case Resources(whole=whole):
                self.resources = {name: amount for name, amount in whole.items() if math.isfinite(amount)}
            case OpenFailed(error=error):
                raise RayUnavailable(f"Ray failed: {error}")
            case _:
                self._on_event(notice)

    async def _next(self) -> Notice:
        assert self._reader is not None, "open comes first"
        try:
            body = await read_body(self._reader, NOTICE_BYTES_MAX)
            if body is not None:
                return decode_notice(body)
        except RayProtocolError as error:
            self._failure = f"it broke the protocol: {error}"
            _log.error("ray_runtime_broke_the_protocol", pid=self._process.pid, error=str(error))
            self._kill_process()
        ended = await asyncio.to_thread(self._wait, _KILL_TIMEOUT_S)
        exit_text = "it closed its connection" if ended is None else describe_exit(ended)
        raise RayUnavailable(
            f"the Ray runtime is gone, and all replicas with it: {self._failure or exit_text}"
        )

    # -- the process ----------------------------------------------------------------------------------------------

    def _wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def _kill_process(self) -> None:
        try:
            self._process.send_signal(signal.SIGQUIT)  # makes its guardian kill all processes at once
        except PermissionError:  # another user's: it exits with the connection, or with the container
            _log.warning("ray_runtime_not_killed", pid=self._process.pid, reason="it is another user's")


def _start_process(
    command: Sequence[str], connection: socket.socket, user: UnixUser | None
) -> subprocess.Popen[bytes]:
    """Start the process under a guardian: Ray's agents outlive a killed raylet by a minute."""
    as_user: dict[str, Any] = {}
    if user is not None:
        as_user = {"user": user.uid, "group": user.gid, "extra_groups": [], "preexec_fn": _prepare_child}
    return subprocess.Popen(  # noqa: S603 - our own command line
        guardian.command([*command, str(connection.fileno())], stop_signal=signal.SIGKILL),
        env=runtime_environment(os.environ, user),
        stdin=subprocess.DEVNULL,
        pass_fds=(connection.fileno(),),
        start_new_session=True,  # the host handles Ctrl-C
        **as_user,
    )


def _prepare_child() -> None:
    """Run as the other user between fork and exec."""
    drop_privileges()
    if not os.access(".", os.R_OK | os.X_OK):
        os.chdir("/")


_RENEWALS: Final = 3
"""Renewals per lifetime of an identity, so that a late one is harmless."""


@final
class IdentifiedReplicas:
    """A `ports.ReplicaRuntime` that issues each replica its own identity on the bus, and renews it in good time.

    Why in front of the runtime: the signing key stays in the host's process, and processes that run user code get the
    replica's own token only. NATS verifies tokens by itself, so a replica can reconnect without controller and host.
    """

    def __init__(self, runtime: RayProcess, bus: BusSettings, lifetime_s: float) -> None:
        """``bus`` has the settings shared by all replicas: a signing key of role replica, or a plain user.

        Identities last ``lifetime_s`` seconds.
        """
        self._runtime = runtime
        self._bus = bus
        self._key = bus.credentials if isinstance(bus.credentials, SigningKey) else None
        self._lifetime_s = lifetime_s
        self._goals: dict[ReplicaTag, ReplicaGoal] = {}
        """Goals of the replicas that have identities."""
        self.kill: Final = runtime.kill
        self.kill_by_force: Final = runtime.kill_by_force
        self.check_health: Final = runtime.check_health
        self.drain: Final = runtime.drain

    @property
    def resources(self) -> dict[str, float]:
        """Total resources by Ray's names."""
        return self._runtime.resources

    def start(self, goal: ReplicaGoal) -> None:
        """Start the replica with a new identity."""
        bus = self._bus
        if self._key is not None:
            self._goals[goal.replica_tag] = goal
            bus = msgspec.structs.replace(
                bus,
                user=f"{Role.REPLICA.value} {goal.replica_tag}",
                credentials=self._mint(self._key, goal),
                inbox_prefix=inbox_prefix(Role.REPLICA, tokens(goal.replica_tag)),
            )
        self._runtime.start(goal, bus)

    def reconfigure(self, goal: ReplicaGoal) -> None:
        """Apply the goal's configuration; renews the identity if ``may_call`` has changed."""
        former = self._goals.get(goal.replica_tag)
        self._runtime.reconfigure(goal)
        if former is not None:
            self._goals[goal.replica_tag] = goal
            if former.may_call != goal.may_call:
                self._renew(goal)

    def take_event(self, event: ReplicaEvent) -> None:
        """Forget replicas that have ended."""
        if isinstance(event, ProcessEnded):
            self._goals.pop(event.replica_tag, None)

    async def run(self) -> None:
        """Renew all identities periodically, until cancelled."""
        while True:
            await asyncio.sleep(self._lifetime_s / _RENEWALS)
            for goal in tuple(self._goals.values()):
                self._renew(goal)

    def _renew(self, goal: ReplicaGoal) -> None:
        if self._key is not None:
            self._runtime.renew(goal.replica_tag, self._mint(self._key, goal))

    def _mint(self, key: SigningKey, goal: ReplicaGoal) -> UserIdentity:
        return mint_now(
            key,
            tokens(goal.replica_tag),
            tags=call_tags(goal.backend_tag, goal.may_call),
            lifetime_s=math.ceil(self._lifetime_s),
        )
