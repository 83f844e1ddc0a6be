"""The host's end of its Ray runtime: starts the process, sends it calls and takes its events.

Why the host ends when it does: the replicas are its children. A host that comes back reports an empty inventory and is
told what to start, which is the one way in which a host recovers from anything.

What can be stopped by the other end waits for nothing here: calls are written behind a limit, notices are taken at
the host's own pace, and a runtime that says nothing shows in ``/healthz``.
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

import structlog

from serve_common.errors import BadField
from serve_common.identities.credentials import UserIdentity
from serve_common.names import ReplicaTag
from serve_common.protocol.reports import ReplicaGoal
from serve_common.runtime import guardian
from serve_common.runtime.settings import BusSettings
from serve_common.telemetry.log_forwarder import PublishedRate
from serve_replica_host.adapters.local_process import UnixUser, drop_privileges
from serve_replica_host.adapters.ray_protocol import (
    NOTICE_BYTES_MAX,
    RESOURCES_EVERY_S,
    UNSENT_BYTES_MAX,
    Call,
    CheckHealth,
    Close,
    Drain,
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
"""Longer than Ray's own shutdown may take in it."""
_KILL_TIMEOUT_S: Final = 5.0
"""Longer than a guardian takes to kill what is left."""
_NOTICES_PER_S: Final = 2_000.0
_NOTICES_BURST: Final = 20_000.0
_BACKLOG_MAX: Final = 500
"""Inputs that the host has not looked at yet; beyond it no more are read, which leaves room for goals."""
_PAUSE_S: Final = 0.02

_KEPT: Final = frozenset({"MUSTER_LOG_LEVEL", "MUSTER_UNCOUNTED", "MUSTER_STACK_ID", "MUSTER_PROCESS"})
_OURS: Final = re.compile(r"MUSTER_.*|PROMETHEUS_MULTIPROC_DIR")


def runtime_environment(variables: Mapping[str, str], user: UnixUser | None = None) -> dict[str, str]:
    """What the runtime, and with it user code, inherits of the host's ``variables``: nothing that the host is told."""
    kept = {
        name: value
        for name, value in variables.items()
        if name in _KEPT or _OURS.fullmatch(name.upper()) is None
    }
    return kept if user is None else kept | {"HOME": user.home, "USER": user.name, "LOGNAME": user.name}


def ray_settings(settings: HostSettings, log_socket: str) -> RaySettings:
    """What the runtime is told of the host's settings; ``log_socket`` is empty where there is none."""
    return RaySettings(
        temp_dir=settings.ray_temp_dir,
        address=settings.ray_address,
        num_cpus=settings.num_cpus,
        app_root=settings.app_root,
        metrics_dir=settings.metrics_dir,
        host_id=settings.host_id,
        spare_replicas=settings.spare_replicas,
        log_socket=log_socket,
        tracing={} if settings.tracing is None else settings.tracing.variables,
    )


@final
class RayProcess:
    """`ports.ReplicaRuntime` by a process of its own; events arrive on the loop that called `open`."""

    def __init__(
        self, settings: RaySettings, user: UnixUser | None = None, *, command: Sequence[str] = COMMAND
    ) -> None:
        """Starts the process as ``user``; it begins to start Ray.

        ``command`` gets its end of the socket as last argument.

        Called on the main thread: its guardian is told when the thread that started it ends. Raises `BadField` when
        ``user`` may not execute Python, and OSError.
        """
        self.resources: dict[str, float] = {}
        """As `ports.ReplicaRuntime`."""
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
                who = "this user" if user is None else user.name
                raise BadField("MUSTER_REPLICA_USER", f"{who} may not execute {sys.executable}") from error
        with contextlib.suppress(OSError):  # its end is told by its exit status
            self._socket.sendall(encode(Open(settings)))

    # -- its life -------------------------------------------------------------------------------------------------

    async def open(self, on_event: Callable[[ReplicaEvent], None], backlog: Callable[[], int]) -> None:
        """Wait until Ray is there; takes seconds. Raises `RayUnavailable`.

        ``backlog`` tells how many events were not looked at yet.
        """
        self._on_event, self._backlog = on_event, backlog
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        notice = await self._next()
        if isinstance(notice, OpenFailed):
            raise RayUnavailable(f"Ray did not start: {notice.error}")
        self._take(notice)
        _log.info("ray_ready", resources=self.resources, pid=self._process.pid)

    async def run(self) -> None:
        """Take what it says, until it ends or says what it may not say: then raises `RayUnavailable`."""
        rate = PublishedRate(_NOTICES_PER_S, _NOTICES_BURST)
        while True:
            if self._backlog() > _BACKLOG_MAX or not rate.take(time.monotonic()):
                await asyncio.sleep(_PAUSE_S)
            else:
                self._take(await self._next())

    async def watch(self) -> None:
        """Count the turns of this loop in which nothing came; so a host that was frozen blames nobody."""
        while True:
            await asyncio.sleep(RESOURCES_EVERY_S)
            self._silent_s += RESOURCES_EVERY_S

    def why_not_healthy(self, silent_after_s: float) -> str | None:
        """None while the process says something at least so often; callable from any thread."""
        if self._silent_s < silent_after_s + RESOURCES_EVERY_S:
            return None
        return f"the Ray runtime has said nothing for {self._silent_s:.0f} s"

    async def close(self) -> None:
        """Have it shut Ray down and end, or kill it."""
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
        """As `ports.ReplicaRuntime`, with ``bus``, which is the replica's own."""
        try:
            self._call(Start(goal, bus))
        except RayProtocolError as error:
            self._on_event(ReplicaStartFailed(goal.replica_tag, str(error)))
            self._on_event(ProcessEnded(goal.replica_tag, str(error)))

    def reconfigure(self, goal: ReplicaGoal) -> None:
        """As `ports.ReplicaRuntime`."""
        try:
            self._call(Reconfigure(goal))
        except RayProtocolError as error:
            self._on_event(Reconfigured(goal.replica_tag, goal.config_version, str(error)))

    def renew(self, replica_tag: ReplicaTag, identity: UserIdentity) -> None:
        """Have the replica log in with ``identity`` from now on."""
        self._call(Renew(replica_tag, identity))

    def check_health(self, replica_tag: ReplicaTag) -> None:
        """As `ports.ReplicaRuntime`."""
        self._call(CheckHealth(replica_tag))

    def drain(self, replica_tag: ReplicaTag) -> None:
        """As `ports.ReplicaRuntime`."""
        self._call(Drain(replica_tag))

    def kill(self, replica_tag: ReplicaTag) -> None:
        """As `ports.ReplicaRuntime`."""
        self._call(Kill(replica_tag))

    def kill_by_force(self, replica_tag: ReplicaTag) -> None:
        """As `ports.ReplicaRuntime`; the runtime does it, for the host may be another user."""
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

    def _take(self, notice: Notice) -> None:
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
        how = "it closed its connection" if ended is None else _describe(ended)
        raise RayUnavailable(f"the Ray runtime is gone, and all replicas with it: {self._failure or how}")

    # -- the process ----------------------------------------------------------------------------------------------

    def _wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def _kill_process(self) -> None:
        try:
            self._process.send_signal(signal.SIGQUIT)  # to its guardian: everything, now
        except PermissionError:  # another user's: it ends by the end of the connection, or with the container
            _log.warning("ray_runtime_not_killed", pid=self._process.pid, reason="it is another user's")


def _start_process(
    command: Sequence[str], connection: socket.socket, user: UnixUser | None
) -> subprocess.Popen[bytes]:
    """With a guardian above it: Ray's agents outlive a raylet that was killed by a minute."""
    as_user: dict[str, Any] = {}
    if user is not None:
        as_user = {"user": user.uid, "group": user.gid, "extra_groups": [], "preexec_fn": _enter}
    return subprocess.Popen(  # noqa: S603 - our own command line
        [
            *(sys.executable, "-I", "-S", str(guardian.__file__)),
            *("--parent", str(os.getpid()), "--stop-signal", str(int(signal.SIGKILL)), "--"),
            *(*command, str(connection.fileno())),
        ],
        env=runtime_environment(os.environ, user),
        stdin=subprocess.DEVNULL,
        pass_fds=(connection.fileno(),),
        start_new_session=True,  # a Ctrl-C is the host's to hear
        **as_user,
    )


def _enter() -> None:
    """As the other user, before the program."""
    drop_privileges()
    if not os.access(".", os.R_OK | os.X_OK):
        os.chdir("/")


def _describe(status: int) -> str:
    """Of the guardian, which tells a signal as a shell does."""
    number = -status if status < 0 else status - 128
    with contextlib.suppress(ValueError):
        if number > 0:
            return f"it was killed by {signal.Signals(number).name}"
    return f"it exited with {status}"
