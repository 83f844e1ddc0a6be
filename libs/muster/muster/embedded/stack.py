"""The whole stack on one machine: real servers and services, all state in one directory."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Self

import msgspec
import structlog

from muster.embedded.disk import DiskWatch
from muster.embedded.leftovers import kill_marked
from muster.embedded.options import (
    DEFAULT_STATE_DIR,
    STARTED_IN_BACKGROUND,
    PortTaken,
    StackFailed,
    StackOptions,
    StatePaths,
)
from muster.embedded.postgres import EmbeddedPostgres, postgres_dsn
from muster.embedded.process import PROCESS_MARK, STACK_MARK, OnEvent, ProcessEvent, ProcessSpec
from muster.embedded.run_record import (
    RunRecord,
    describe_full_disk,
    get_stack_id,
    lock_state,
    read_record,
    write_record,
)
from muster.embedded.services import (
    CONSOLE,
    CONTROLLER,
    HOST,
    NATS,
    PROXY,
    ServiceSpecs,
    nats_config,
    nats_spec,
    prepare_nats,
)
from muster.embedded.supervisor import Supervisor
from muster.secrets import generate
from serve_common.runtime.child_process import ensure_private_directory
from serve_common.runtime.tasks import TaskOwner

LOOPBACK = "127.0.0.1"


class ChosenPorts(msgspec.Struct, frozen=True):
    """The ports by use, and notices about them for the user."""

    by_use: dict[str, int]
    notices: list[str]
    holders: list[socket.socket]
    """Bound sockets that never listen: they reserve the ports, except for servers, which set SO_REUSEADDR; and a claim
    on each port, which other stacks see.

    To be closed when the ports are no longer needed.
    """


def choose_ports(options: StackOptions, used_before: Mapping[str, int]) -> ChosenPorts:
    """Choose ports for one run of the stack, all different: the requested or earlier ones, as far as they are free.

    They are chosen before any process starts, so that a taken port is reported by its number and not in some process'
    log. From then on the sockets in ``holders`` reserve them: otherwise the system would give them to
    connections without a port of their own, of which a starting stack opens hundreds, as may other programs.

    Raises `PortTaken` when another program listens on the HTTP port.
    """
    wanted = {
        "nats": options.nats_port,
        "controller_ops": options.controller_ops_port,
        "proxy_ops": options.proxy_ops_port,
        "host_ops": options.host_ops_port,
        # Used within the stack only, so any free one will do.
        "nats_monitor": 0,
        "postgres": 0,
    }
    if options.has_console:
        wanted |= {"console": options.console_port, "console_ops": options.console_ops_port}
    by_use: dict[str, int] = {}
    holders: list[socket.socket] = []
    notices = []
    http_wanted = options.http_port or used_before.get("http", 0)
    if options.http_port and not is_free(options.http_port, options.http_host):
        raise PortTaken(
            f"port {options.http_port} of {options.http_host} is taken by another program; stop that one, or choose "
            "another HTTP port"
        )
    by_use["http"] = _reserve([http_wanted], options.http_host, holders)
    if options.http_port not in (0, by_use["http"]):
        for holder in holders:
            holder.close()
        raise PortTaken(
            f"port {options.http_port} of {options.http_host} is taken by another stack that starts now"
        )
    for use, port in wanted.items():
        by_use[use] = _reserve([port, used_before.get(use, 0)], LOOPBACK, holders)
        if port not in (0, by_use[use]):
            notices.append(f"port {port} is taken, so {_NAMES[use]} listens on {by_use[use]}")
    return ChosenPorts(by_use, notices, holders)


_NAMES = {
    "nats": "NATS",
    "controller_ops": "the controller's operations port",
    "proxy_ops": "the proxy's operations port",
    "host_ops": "the replica host's operations port",
    "console": "the console",
    "console_ops": "the console's operations port",
}


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen on the port now."""
    try:
        with _bound(host, port) as probe:
            probe.listen(1)
    except OSError:
        return False
    return True


def _reserve(candidates: list[int], host: str, holders: list[socket.socket]) -> int:
    """Reserve the first free candidate, or any other free port, by adding to ``holders``; return the port."""
    for candidate in candidates:
        if candidate and is_free(candidate, host) and (claim := _claim(candidate)) is not None:
            holders += [claim, _bound(host, candidate)]
            return candidate
    while True:
        found = _bound(host, 0)
        port: int = found.getsockname()[1]
        if (claim := _claim(port)) is not None:
            holders += [claim, found]
            return port
        found.close()


def _claim(port: int) -> socket.socket | None:
    """Claim the port among the stacks of this machine; None if it is claimed. A claim ends with its process.

    Why beside the bound socket: two sockets with SO_REUSEADDR may be bound to one port while none listens, so of two
    stacks that start at once each would find the other's ports free.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0muster-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


def _bound(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # As servers do; without it the port of a stack that has just ended would seem taken.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


_log = structlog.get_logger()

RAY_DIR_LENGTH_MAX: Final = 40
"""Longest Ray directory: paths of Ray's unix sockets are up to 67 characters longer, and the kernel allows 107."""

_CLOSE_TIMEOUT_S: Final = 1.0

OnNotice = Callable[[str], None]
Substitute = Callable[[ProcessSpec], ProcessSpec]


class EmbeddedStack:
    """A stack that runs from `start` to `stop`. ``async with`` ensures that no process is left, however it ends.

    Why a class and not a script: the command line reports on it, tests run it with other processes, and both stop it
    completely.
    """

    def __init__(
        self,
        state_dir: Path = DEFAULT_STATE_DIR,
        options: StackOptions | None = None,
        *,
        on_event: OnEvent = lambda _event: None,
        on_notice: OnNotice = lambda _text: None,
        substitute: Substitute = lambda spec: spec,
    ) -> None:
        """``on_event`` is called with events of processes, ``on_notice`` with sentences for the user.

        Both are called in the loop's thread. ``substitute`` may replace a process' specification; for tests.
        """
        self._paths = StatePaths(state_dir.resolve())
        self._options = options or StackOptions()
        self._on_event = on_event
        self._on_notice = on_notice
        self._substitute = substitute
        self._lock: IO[str] | None = None
        self._supervisor: Supervisor | None = None
        self._record: RunRecord | None = None
        self._ray_dir: Path | None = None
        self._port_holders: list[socket.socket] = []
        self._tasks: TaskOwner | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def record(self) -> RunRecord:
        """Addresses, ports and processes of the stack; after `start`."""
        assert self._record is not None, "the stack has not been started"
        processes = self._supervisor.processes if self._supervisor is not None else []
        return msgspec.structs.replace(self._record, processes=processes)

    async def start(self) -> None:
        """Start the stack; return when everything is ready.

        Raises `StackFailed` (`AlreadyRunning`, `PortTaken`, `StartFailed`) or `SecretUnusable`, with a message for the
        user; then, and when cancelled, no process is left running.
        """
        self._lock = await asyncio.to_thread(lock_state, self._paths)
        try:
            try:
                specs = await self._prepare_in_thread()
            except OSError as error:
                raise StackFailed(f"{self._paths.root} cannot hold the stack's state: {error}") from error
            self._supervisor = Supervisor(self.record.stack_id, specs, self._on_process_event)
            self._write_record(self.record)
            await self._supervisor.start()
            self._tasks = TaskOwner("stack")
            self._tasks.start(self._disk_watch().run(), "disk_watch")
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop everything within 10 s and leave no process behind. Safe to call again."""
        if self._tasks is not None:
            await self._tasks.close(_CLOSE_TIMEOUT_S)
        if self._supervisor is not None:
            await self._supervisor.stop()
        if self._lock is None:
            return
        for holder in self._port_holders:
            holder.close()
        if self._record is not None:
            self._write_record(msgspec.structs.replace(self.record, pid=0, processes=[]))
        if self._ray_dir is not None and self._ray_dir != self._paths.ray:
            shutil.rmtree(self._ray_dir, ignore_errors=True)  # in no thread, as the supervisor's stop
        self._lock.close()
        self._lock = None

    async def _prepare_in_thread(self) -> Sequence[ProcessSpec]:
        notices: list[str] = []
        preparing = asyncio.get_running_loop().run_in_executor(None, self._prepare, notices)
        try:
            return await asyncio.shield(preparing)
        except asyncio.CancelledError:
            # A thread cannot be cancelled, and the lock must be held while it runs.
            await asyncio.wait({preparing})
            if (failure := preparing.exception()) is not None:
                _log.warning("start_failed_while_cancelled", error=str(failure))
            raise
        finally:
            for notice in notices:
                self._on_notice(notice)

    def _prepare(self, notices: list[str]) -> Sequence[ProcessSpec]:
        """Prepare everything that the first process needs, and return the specifications. Blocks."""
        paths, options = self._paths, self._options
        if (full := describe_full_disk(paths.root)) is not None:
            raise StackFailed(full)
        if options.app_root is not None and not options.app_root.is_dir():
            raise StackFailed(f"{options.app_root} is not a directory")
        for directory in (paths.logs, paths.metrics, paths.nats):
            ensure_private_directory(directory)
        stack_id = get_stack_id(paths)
        left = kill_marked(stack_id)
        if left:
            notices.append(f"killed {left} processes that an earlier run had left behind")
        last = read_record(paths)
        chosen = choose_ports(options, last.ports if last is not None else {})
        self._port_holders = chosen.holders
        notices.extend(chosen.notices)
        passwords = generate(paths.secrets)
        prepare_nats(paths, options, passwords)
        ports = chosen.by_use
        self._ray_dir = _ray_directory(paths, stack_id)
        self._record = self._new_record(stack_id, ports)
        postgres = EmbeddedPostgres(paths, options, passwords, ports["postgres"])
        postgres.prepare()
        services = ServiceSpecs(
            paths, options, passwords, ports, self._ray_dir, http_url=self._record.http_url
        )
        environment = {
            name: value for name, value in os.environ.items() if name not in (STACK_MARK, PROCESS_MARK)
        }
        specs = [nats_spec(paths, ports, environment), postgres.spec(environment), *services.all(environment)]
        return [self._substitute(spec) for spec in specs]

    def _new_record(self, stack_id: str, ports: dict[str, int]) -> RunRecord:
        ops = {CONTROLLER: "controller_ops", PROXY: "proxy_ops", HOST: "host_ops", CONSOLE: "console_ops"}
        has_tls = self._options.http_cert_file or os.environ.get("MUSTER_HTTP_TLS_CERT_FILE")
        scheme = "https" if has_tls else "http"
        return RunRecord(
            stack_id=stack_id,
            state_dir=str(self._paths.root),
            pid=os.getpid(),
            nats_url=f"nats://127.0.0.1:{ports['nats']}",
            nats_monitor_url=f"http://127.0.0.1:{ports['nats_monitor']}",
            http_url=f"{scheme}://{_reachable(self._options.http_host)}:{ports['http']}",
            postgres_dsn=postgres_dsn(ports["postgres"]),
            secrets=str(self._paths.secrets),
            ports=ports,
            ops_urls={name: f"http://127.0.0.1:{ports[use]}" for name, use in ops.items() if use in ports},
            console_url=f"http://127.0.0.1:{ports['console']}" if "console" in ports else "",
            http_host=self._options.http_host,
            is_background=bool(os.environ.get(STARTED_IN_BACKGROUND)),
        )

    def _on_process_event(self, event: ProcessEvent) -> None:
        self._write_record(self.record)
        self._on_event(event)

    def _disk_watch(self) -> DiskWatch:
        def nats_pid() -> int:
            return next((process.pid for process in self.record.processes if process.name == NATS), 0)

        port = self.record.ports["nats_monitor"]
        return DiskWatch(self._paths.root, nats_config(self._paths), port, nats_pid, self._on_notice)

    def _write_record(self, record: RunRecord) -> None:
        try:
            write_record(self._paths, record)
        except OSError as error:  # a full disk must not end a stack that serves
            _log.warning("run_file_not_written", path=str(self._paths.run_file), error=str(error))


def _reachable(host: str) -> str:
    """An address at which a server that listens on ``host`` can be reached from this machine."""
    loopback = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - compared, not listened on
    return loopback.get(host) or (f"[{host}]" if ":" in host else host)


def _ray_directory(paths: StatePaths, stack_id: str) -> Path:
    """Ray's directory: in the state directory if the path is short enough, else a private temporary directory."""
    if len(os.fsencode(paths.ray)) <= RAY_DIR_LENGTH_MAX:
        ensure_private_directory(paths.ray)
        return paths.ray
    for base in (Path(tempfile.gettempdir()), Path("/tmp")):  # noqa: S108 - made this user's alone
        # The second is used if another user has taken the first.
        for name in (f"muster-{stack_id}", f"muster-{secrets.token_hex(8)}"):
            directory = base / name
            if len(os.fsencode(directory)) > RAY_DIR_LENGTH_MAX:
                continue
            try:
                ensure_private_directory(directory)
            except OSError as error:
                _log.warning("ray_directory_not_usable", path=str(directory), error=str(error))
                continue
            return directory
    raise StackFailed(f"no directory is short enough for Ray's sockets and ours; {paths.ray} is too long")
