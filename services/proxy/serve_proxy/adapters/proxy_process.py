"""The link between a parent and its proxy processes: the child process, a socket pair, a shared port.

Why a socket pair: through it the child reports its operations port, which the system chose, and detects that its parent
is gone, however it ended. A child without a parent drains and exits, so that none is left behind.
"""

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

from serve_common.runtime.child_process import ChildLink, ChildProcess
from serve_common.runtime.tasks import TaskOwner
from serve_proxy.core.processes import PARENT_FD

_log = structlog.get_logger(__name__)

_LINE_BYTES_MAX: Final = 64
_CLOSE_TIMEOUT_S: Final = 1.0


@final
class ProxyProcess:
    """A proxy process, as its parent controls it."""

    def __init__(self, process: ChildProcess, link: ChildLink) -> None:
        self._process = process
        self._link = link
        self._operations_port: int | None = None
        self._tasks = TaskOwner("proxy_process")
        self._tasks.start(self._receive_port(), "receive_port")

    @classmethod
    async def start(cls, environment: Mapping[str, str]) -> Self:
        """Start a proxy process with ``environment``. Raises OSError."""
        link = ChildLink()
        argv = [sys.executable, "-m", "serve_proxy"]
        env = {**environment, PARENT_FD: str(link.child_fd)}
        return cls(await ChildProcess.start(argv, env=env, link=link), link)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def operations_port(self) -> int | None:
        """Its operations port; None until it has reported it."""
        return self._operations_port

    async def ended(self) -> int:
        """Wait for the exit code; negative for the signal that killed it."""
        code = await self._process.ended()
        await self._tasks.close(_CLOSE_TIMEOUT_S)
        self._link.close()
        return code

    def stop(self) -> None:
        """Send SIGTERM."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.send_signal(signal.SIGKILL)

    async def _receive_port(self) -> None:
        # None when it exited before it listened; its exit code is the reason.
        self._operations_port = await self._link.read_number()


@final
class ParentLink:
    """The link to the parent, as a child uses it."""

    def __init__(self, fd: int, on_gone: Callable[[], None]) -> None:
        """``on_gone`` is called once, when the parent has exited. Raises OSError when ``fd`` is not a socket."""
        os.set_inheritable(fd, False)  # noqa: FBT003 - positional only
        self._socket = socket.socket(fileno=fd)
        self._socket.settimeout(0)
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)

    def report_port(self, operations_port: int) -> None:
        """Report to the parent that this process listens, and its operations port."""
        with contextlib.suppress(ConnectionError):  # the reader detects that the parent has exited
            self._socket.send(b"%d\n" % operations_port)

    def close(self) -> None:
        """Stop watching the parent."""
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
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Reserve a port for sockets with SO_REUSEPORT while the block runs; 0 lets the system choose.

    Raises OSError when the port is in use, or the host has no address.

    Why: with SO_REUSEPORT a second stack of the same user would share the port unnoticed, and get half of the first
    one's requests. And where the system chooses the port, all processes must get the same one.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    if port:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)  # without SO_REUSEPORT, so it fails when the port is in use
    with socket.socket(family, kind, protocol) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)  # and never listens, so it gets no connection
        yield int(holder.getsockname()[1])
