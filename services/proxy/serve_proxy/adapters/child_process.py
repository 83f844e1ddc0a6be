"""A proxy process and its parent, each from the other's side: a process, a socket between them, a shared port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Self, final

import structlog

from serve_common.runtime.tasks import TaskOwner
from serve_proxy.core.processes import PARENT_FD

_log = structlog.get_logger(__name__)

_LINE_BYTES_MAX: Final = 64
_CLOSE_TIMEOUT_S: Final = 1.0


@final
class ChildProcess:
    """A child, from its parent's side."""

    def __init__(self, process: asyncio.subprocess.Process, link: socket.socket) -> None:
        self._process = process
        self._link = link
        self._operations_port: int | None = None
        self._tasks = TaskOwner("child_process")
        self._tasks.start(self._hear_port(), "hear_port")

    @classmethod
    async def start(cls, environment: Mapping[str, str]) -> Self:
        """Start one with that environment. Raises OSError."""
        own, other = socket.socketpair()
        with other:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "serve_proxy"),
                    env={**environment, PARENT_FD: str(other.fileno())},
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[other.fileno()],
                    start_new_session=True,  # Ctrl-C in a terminal is for the parent alone, which passes it on
                )
            except OSError:
                own.close()
                raise
        own.settimeout(0)
        return cls(process, own)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def operations_port(self) -> int | None:
        """As `Child.operations_port`."""
        return self._operations_port

    async def ended(self) -> int:
        """As `Child.ended`."""
        code = await self._process.wait()
        await self._tasks.close(_CLOSE_TIMEOUT_S)
        self._link.close()
        return code

    def stop(self) -> None:
        """As `Child.stop`."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """As `Child.kill`."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            self._process.send_signal(number)

    async def _hear_port(self) -> None:
        loop = asyncio.get_running_loop()
        line = b""
        while not line.endswith(b"\n"):
            try:
                part = await loop.sock_recv(self._link, _LINE_BYTES_MAX)
            except ConnectionError:
                part = b""
            if not part:
                return  # it ended before it listened; its exit code says why
            line += part
        self._operations_port = int(line)


@final
class ParentLink:
    """The parent, from its child's side."""

    def __init__(self, fd: int, on_gone: Callable[[], None]) -> None:
        """``on_gone`` is called once, when the parent is no more. Raises OSError when ``fd`` is no socket."""
        os.set_inheritable(fd, False)  # noqa: FBT003 - positional only
        self._socket = socket.socket(fileno=fd)
        self._socket.settimeout(0)
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)

    def tell_port(self, operations_port: int) -> None:
        """Say that this process listens, and where it answers for its operations."""
        with contextlib.suppress(ConnectionError):  # a parent that is gone is noticed by reading
            self._socket.send(b"%d\n" % operations_port)

    def close(self) -> None:
        """Stop watching."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _read(self) -> None:
        try:
            if self._socket.recv(_LINE_BYTES_MAX):
                return
        except BlockingIOError:
            return
        except ConnectionError as error:
            _log.debug("parent_link_broke", reason=str(error))
        self.close()
        _log.warning("parent_is_gone")
        self._on_gone()


@contextlib.contextmanager
def held_port(host: str, port: int) -> Iterator[int]:
    """The port, kept for sockets with SO_REUSEPORT while the block runs; 0 lets the system choose.

    Raises OSError when something listens there already, or the host has no address.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    if port:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)  # without SO_REUSEPORT: fails where anybody listens
    with socket.socket(family, kind, protocol) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)  # and never listens, so it gets no connection
        yield int(holder.getsockname()[1])
