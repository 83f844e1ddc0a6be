"""One stream of server-sent events for each open tab: the parts of its page that changed.

What tabs of the same page get is rendered once for all of them. A stream ends with its session.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol, TypeAlias, final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from serve_console.core.system import System
from serve_console.shell.sessions import PersonSession
from serve_console.web.shared import EVENT_STREAM, Shared, encode_event, get_banner

STREAMS_MAX: Final = 500
"""Most open tabs."""
STREAMS_OF_PERSON_MAX: Final = 250
"""Most open tabs of one person, so that nobody shuts the others out."""
_SEEN_DIGITS_MAX: Final = 15
_SILENT_S: Final = 10.0
"""Seconds of silence after which a comment shows that the connection lives."""
_TOPICS_MAX: Final = 1000
"""Topics that are retained, as addresses choose them; those that were added first are forgotten."""
_FEED_S: Final = 0.25
"""Seconds between two looks at what only one tab gets."""
_SHOWN_MAX: Final = 4
"""Versions of a page whose tabs need no second copy of what they have."""


@final
class Fragment:
    """One part of a page: what is sent for its element ``sse-swap="<name>"`` when ``key`` changes."""

    def __init__(self, name: str, key: object, render: Callable[[], str]) -> None:
        """``render`` is called at most once, and only if some tab needs it."""
        self.name = name
        self.key = key
        self._render = render
        self._message: bytes | None = None

    @property
    def message(self) -> bytes:
        """The event as it is sent."""
        if self._message is None:
            self._message = encode_event(self.name, self._render())
        return self._message


class TabFeed(Protocol):
    """What only one tab gets besides fragments, such as log lines."""

    def open(self) -> AbstractContextManager[None]:
        """Collect for the block."""
        ...

    def take(self) -> bytes:
        """The events since the last call; empty: none."""
        ...


Build: TypeAlias = Callable[[System], Sequence[Fragment]]


def whole(name: str, html: str) -> Fragment:
    """A fragment that is sent whenever its markup changes."""
    return Fragment(name, html, lambda: html)


@final
class LiveStreams:
    """All streams of the process."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._open = Counter[str]()
        self._built: dict[str, tuple[int, list[Fragment]]] = {}
        self._shown: dict[str, dict[int, dict[str, object]]] = {}

    def note_page(self, topic: str, system: System, build: Build) -> None:
        """Note what a page shows that is rendered now, so that its stream begins with what changed since."""
        self._build(topic, system, build)

    def is_full(self, session: PersonSession) -> bool:
        """Whether the person can open no further stream."""
        own = self._open[session.person.name]
        return own >= STREAMS_OF_PERSON_MAX or self._open.total() >= STREAMS_MAX

    def respond(
        self,
        request: Request,
        session: PersonSession,
        topic: str,
        build: Build,
        feed: TabFeed | None = None,
    ) -> Response:
        """The stream of a tab. ``topic`` names what tabs share: the page, its object, and the role if that matters.

        ``feed`` is what this tab gets besides.
        """
        if request.method == "HEAD":
            return Response(media_type=EVENT_STREAM)  # its stream would never end
        if self.is_full(session):
            return Response("too many open pages", status_code=503)
        keys = self._shown.get(topic, {}).get(_parse_seen(request), {})
        return StreamingResponse(
            self._stream(session, topic, build, dict(keys), feed),
            media_type=EVENT_STREAM,
            headers={"X-Accel-Buffering": "no"},
        )

    async def _stream(
        self,
        session: PersonSession,
        topic: str,
        build: Build,
        sent: dict[str, object],
        feed: TabFeed | None,
    ) -> AsyncIterator[bytes]:
        hub, version, silent_s = self._shared.hub, -1, 0.0
        pause_s = _SILENT_S if feed is None else _FEED_S
        self._open[session.person.name] += 1
        try:
            with hub.watch(), contextlib.nullcontext() if feed is None else feed.open():
                yield b"retry: 1000\n\n"
                while not hub.is_closed:
                    if session.is_over:
                        yield self._shared.end_of_session
                        return
                    lines = b"" if feed is None else feed.take()
                    if lines:
                        yield lines
                        silent_s = 0.0
                    try:
                        async with asyncio.timeout(pause_s):
                            system = await hub.wait_newer(version)
                    except TimeoutError:
                        silent_s += pause_s
                        if silent_s >= _SILENT_S:
                            yield b": still here\n\n"
                            silent_s = 0.0
                        continue
                    version = system.version
                    changed = self._find_changed(topic, system, build, sent)
                    if changed:
                        yield changed
        finally:
            self._open -= Counter([session.person.name])
            if not self._open:
                self._built.clear()
                self._shown.clear()

    def _find_changed(self, topic: str, system: System, build: Build, sent: dict[str, object]) -> bytes:
        messages = []
        for fragment in self._build(topic, system, build):
            if sent.get(fragment.name, fragment) != fragment.key:
                sent[fragment.name] = fragment.key
                messages.append(fragment.message)
        return b"".join(messages)

    def _build(self, topic: str, system: System, build: Build) -> list[Fragment]:
        found = self._built.get(topic)
        if found is None or found[0] != system.version:
            found = (system.version, [self._banner(system), *build(system)])
            self._built[topic] = found
            recalled = self._shown.setdefault(topic, {})
            recalled[system.version] = {fragment.name: fragment.key for fragment in found[1]}
            while len(recalled) > _SHOWN_MAX:
                del recalled[next(iter(recalled))]
            for retained in (self._built, self._shown):
                while len(retained) > _TOPICS_MAX:
                    del retained[next(iter(retained))]
        return found[1]

    def _banner(self, system: System) -> Fragment:
        banner = get_banner(system)
        if banner is None:
            return whole("banner", "")
        return whole("banner", self._shared.renderer.part("macros.html", "banner", **banner))


def _parse_seen(request: Request) -> int:
    """The version of the state that a page shows; -1 where the address has none."""
    seen = request.query_params.get("seen", "")
    return int(seen) if seen.isascii() and seen.isdigit() and len(seen) <= _SEEN_DIGITS_MAX else -1
