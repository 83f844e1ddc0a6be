"""Wires the parts of the console, starts them, and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Final, final

import structlog
import uvicorn
from prometheus_client import CollectorRegistry

from muster.client.requests import listen_to_stack
from serve_common.clock import SystemClock
from serve_common.identities.people import Person
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.health import LoopLag
from serve_common.runtime.operations import OperationsServer, ProcessPages, register_process_metrics
from serve_common.runtime.tasks import TaskOwner
from serve_console.adapters.console_metrics import ConsoleMetrics
from serve_console.adapters.people_file import PeopleFile
from serve_console.adapters.person_stack import PersonStack
from serve_console.settings import ConsoleSettings
from serve_console.shell.hub import Hub
from serve_console.shell.sessions import Sessions
from serve_console.web.app import build_app
from serve_console.web.shared import Renderer, Shared
from serve_console.web.sign_in import SignIn, SignInPages, get_proofs

_log = structlog.get_logger(__name__)

_PEOPLE_S: Final = 2.0
"""Seconds between two looks at the file of people."""
_CLOSE_S: Final = 2.0
STALLED_S: Final = 60.0
"""Seconds after which the system ends the connection of a browser that takes nothing of what is sent to it."""


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@final
class Console:
    """The parts of the process."""

    def __init__(self, settings: ConsoleSettings, *, on_failure: Callable[[], None]) -> None:
        """Creates all parts and starts none; call it on a running loop.

        ``on_failure`` is called when the process cannot continue and should be restarted.
        """
        self._settings = settings
        self._clock = SystemClock()
        self._tasks = TaskOwner("console", on_failure=lambda _name, _error: on_failure())
        self._sessions = Sessions(
            self._clock, idle_s=settings.session_idle_s, longest_s=settings.session_longest_s
        )
        self._people = None if settings.people_file is None else PeopleFile(settings.people_file)
        self._hub = Hub(self._sessions, Subjects(settings.stack.subject_prefix), listen_to_stack, self._clock)
        renderer = Renderer(settings)
        sign_in = SignIn(
            settings, self._sessions, self._clock, read_people=self._read_people, open_stack=PersonStack
        )
        shared = Shared(
            settings=settings,
            hub=self._hub,
            sessions=self._sessions,
            renderer=renderer,
            clock=self._clock,
            tasks=self._tasks,
            find_session=sign_in.find,
        )
        pages = SignInPages(settings, renderer, sign_in, self._sessions)
        app = build_app(shared, pages, settings.allowed_hosts)
        config = uvicorn.Config(
            app,
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=int(_CLOSE_S),
        )
        self._server = _Server(config)
        self._socket: socket.socket | None = None
        registry = CollectorRegistry()
        lag = LoopLag()
        register_process_metrics(registry, lag, {}, None)
        registry.register(
            ConsoleMetrics(lambda: self._hub.watchers, lambda: len(self._sessions), sign_in.results)
        )
        self._lag = lag
        self.operations = OperationsServer(
            settings.operations, ProcessPages(registry, readiness_error=self._readiness_error)
        )

    @property
    def port(self) -> int:
        """The port that pages are served on."""
        assert self._socket is not None, "start comes first"
        port: int = self._socket.getsockname()[1]
        return port

    async def start(self) -> None:
        """Listen and begin. Raises OSError when a port is taken."""
        await self.operations.start()
        host = self._settings.http_host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Its connections inherit that. Otherwise one would hold a stream, and what is rendered for it, for good.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALLED_S * 1000))
        self._socket.bind((host, self._settings.http_port))
        self._socket.listen()  # who reads in the log that it serves may connect at once
        self._tasks.start(self._lag.run(), "loop lag")
        self._tasks.start(self._server.serve(sockets=[self._socket]), "pages")
        self._tasks.start(self._hub.run(), "hub")
        self._tasks.start(self._hub.sample_load(), "load")
        self._tasks.start(self._hub.follow_events(), "events")
        self._tasks.start(self._watch_people(), "people")
        _log.info("console_serves", host=host, port=self.port)

    async def close(self) -> None:
        """End everything."""
        await self._hub.close()
        self._server.should_exit = True
        await asyncio.sleep(0)
        await self._tasks.close(timeout_s=_CLOSE_S)
        if self._socket is not None:
            self._socket.close()
        await self._sessions.close()
        await self.operations.close()

    def _read_people(self) -> dict[str, Person]:
        return {} if self._people is None else self._people.read()

    async def _watch_people(self) -> None:
        """End the sessions of people who were removed or got another password, and those that are old."""
        while True:
            await self._sessions.end_old()
            if self._people is not None and len(self._sessions):
                people = await asyncio.to_thread(self._people.read)
                await self._sessions.end_changed(get_proofs(people))
            await asyncio.sleep(_PEOPLE_S)

    def _readiness_error(self) -> str | None:
        return None if self._server.started else "it does not listen yet"
