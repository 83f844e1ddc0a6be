"""A parent's proxy processes: each child process and the socket pair to it, their shared port, one operations port.

Why a socket pair: through it the child reports its operations port, which the system chose, and detects that its parent
is gone, however it ended. A child without a parent drains and exits, so that none is left behind.

Why one operations port: probes and scrapes then need not know how many processes a container runs. It serves one page
of metrics, and is ready when all children are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, Self, final

import aiohttp
import structlog

from serve_common.runtime.child_process import ChildLink, ChildProcess
from serve_common.runtime.health import HealthProbe
from serve_common.runtime.operations import NAMES_PARAMETER
from serve_common.runtime.tasks import TaskOwner
from serve_proxy.core.processes import PARENT_FD, merge_metrics
from serve_proxy.shell.parent import Child

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


_PAGE_TIMEOUT_S: Final = 2.0
_OK: Final = 200
_NOT_LISTENING: Final = 0
_HANGS: Final = -1


@final
class ChildrenPages:
    """`OperationsPages` merged from all children, which are queried for each response."""

    def __init__(self, children: Mapping[int, Child], readiness_error: HealthProbe) -> None:
        """``children`` is read for each request, by another thread."""
        self._children = children
        self._readiness_error = readiness_error
        self._session: aiohttp.ClientSession | None = None

    async def metrics(self, names: Collection[str]) -> bytes:
        # A child that does not respond is left out: its absence shows, and the others are still exported.
        parameters = [(NAMES_PARAMETER, name) for name in names]
        pages = {
            number: text
            for number, (status, text) in (await self._query_all("/metrics", parameters)).items()
            if status == _OK
        }
        return (await asyncio.to_thread(merge_metrics, pages)).encode()

    async def health_error(self) -> str | None:
        return await self._collect_errors("/healthz", listening_only=True)

    async def readiness_error(self) -> str | None:
        return self._readiness_error() or await self._collect_errors("/readyz", listening_only=False)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _collect_errors(self, path: str, *, listening_only: bool) -> str | None:
        """Errors of the children; ``listening_only`` ignores children that do not listen: the parent restarts them."""
        lines = [
            f"process {number}: {text.strip()}"
            for number, (status, text) in (await self._query_all(path)).items()
            if status != _OK and not (listening_only and status == _NOT_LISTENING)
        ]
        return "\n".join(lines) or None

    async def _query_all(
        self, path: str, parameters: Collection[tuple[str, str]] = ()
    ) -> dict[str, tuple[int, str]]:
        """Status and body by process number; a placeholder status and a reason where there is no response."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PAGE_TIMEOUT_S))
        session = self._session
        children = sorted(dict(self._children).items())
        responses = await asyncio.gather(
            *(_query(session, child.operations_port, path, parameters) for _, child in children)
        )
        return {str(number): response for (number, _), response in zip(children, responses, strict=True)}


async def _query(
    session: aiohttp.ClientSession, port: int | None, path: str, parameters: Collection[tuple[str, str]]
) -> tuple[int, str]:
    if port is None:
        return _NOT_LISTENING, "it starts"
    try:
        async with session.get(f"http://127.0.0.1:{port}{path}", params=list(parameters)) as response:
            return response.status, await response.text()
    except TimeoutError:
        return _HANGS, f"it does not answer within {_PAGE_TIMEOUT_S:g} s"
    except aiohttp.ClientError as error:
        return _NOT_LISTENING, f"it does not answer: {type(error).__name__}"
