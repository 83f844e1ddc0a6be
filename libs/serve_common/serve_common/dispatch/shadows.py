"""Copies of requests for backends that are tried out with real traffic.

Why so careful: a copy is worth nothing to the caller, so it is sent after the real request, waits behind all real ones,
is given up rather than kept, and both its number and its memory have limits. What becomes of copies is counted only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, final

import msgspec
import structlog

from serve_common.dispatch.admission import ShadowOutcome
from serve_common.dispatch.calls import Call, RequestSpec, Response
from serve_common.dispatch.errors import ReplicaError
from serve_common.errors import ServeError
from serve_common.names import BackendTag
from serve_common.protocol.frames import RequestKind
from serve_common.routing.replica_choice import Draw
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_lines import RateLimitedLogger

_log = structlog.get_logger(__name__)

SHADOWS_MAX: Final = 512
"""Copies under way at once in this process."""
SHADOWS_PER_BACKEND_MAX: Final = 128
"""So that a backend that hangs does not use up the room of the others."""
SHADOW_BODY_BYTES_MAX: Final = 32 * 1024 * 1024
"""Of all copies under way; half of what may wait for the bus, so that real requests find room there."""


class RequestSender(Protocol):
    """Sends requests; the dispatcher."""

    def ask(self, ask: RequestSpec) -> Awaitable[tuple[Call, Response]]:
        """See `Dispatcher.ask`."""
        ...

    def takes_copies(self, backend_tag: BackendTag) -> bool:
        """See `Dispatcher.takes_copies`."""
        ...

    def abandon(self, call: Call) -> None:
        """See `Dispatcher.abandon`."""
        ...


@final
class Shadows:
    """Copies requests and follows the copies."""

    def __init__(self, asking: RequestSender, draw: Draw, now: Callable[[], float]) -> None:
        """``draw`` gives random numbers in [0, 1); ``now`` reads the loop's clock."""
        self._asking = asking
        self._draw = draw
        self._now = now
        self._tasks = TaskOwner("shadows")
        self._of_backend: Counter[BackendTag] = Counter()
        self._body_bytes = 0
        self._is_closed = False
        self._failures = RateLimitedLogger(_log.info, interval_s=10.0)

    @property
    def in_flight(self) -> int:
        """Copies under way."""
        return self._of_backend.total()

    def copy(self, ask: RequestSpec) -> None:
        """Send copies of ``ask`` as its endpoint wants it. Never fails, and sends nothing before the caller waits."""
        for backend_tag, proportion in ask.endpoint.shadows:
            if self._draw() >= proportion:
                continue
            # A body that is still arriving, and the messages of a socket, can be read only once.
            is_single = ask.upload is not None or ask.kind is RequestKind.WEBSOCKET
            if is_single or self._has_no_room(backend_tag, len(ask.body)):
                ask.endpoint.tally.add_shadow(backend_tag, ShadowOutcome.SKIPPED)
                continue
            self._of_backend[backend_tag] += 1
            self._body_bytes += len(ask.body)
            copied = msgspec.structs.replace(ask, is_repeatable=False, shadow_backend=backend_tag, trace=None)
            self._tasks.start(self._follow(copied, backend_tag), name="shadow")

    async def close(self, timeout_s: float) -> None:
        """Give up all copies, and make no more."""
        self._is_closed = True
        await self._tasks.close(timeout_s)

    def _has_no_room(self, backend_tag: BackendTag, body_bytes: int) -> bool:
        return (
            self._is_closed
            or not self._asking.takes_copies(backend_tag)
            or len(self._tasks) >= SHADOWS_MAX
            or self._of_backend[backend_tag] >= SHADOWS_PER_BACKEND_MAX
            or self._body_bytes + body_bytes > SHADOW_BODY_BYTES_MAX
        )

    async def _follow(self, ask: RequestSpec, backend_tag: BackendTag) -> None:
        outcome = ShadowOutcome.FAILED
        try:
            call, answer = await self._asking.ask(ask)
            await self._drop(ask, call, answer)
            outcome = ShadowOutcome.ANSWERED if answer.status < 500 else ShadowOutcome.ERROR
        except (ServeError, TimeoutError) as error:
            if isinstance(error, ReplicaError):
                outcome = ShadowOutcome.ERROR
            self._failures.log(
                self._now(),
                "shadow_failed",
                endpoint_tag=ask.endpoint.tag,
                backend_tag=backend_tag,
                request_id=ask.request_id,
                reason=str(error) or "it took too long",
            )
        finally:
            self._of_backend[backend_tag] -= 1
            if not self._of_backend[backend_tag]:
                del self._of_backend[backend_tag]
            self._body_bytes -= len(ask.body)
            ask.endpoint.tally.add_shadow(backend_tag, outcome)

    async def _drop(self, ask: RequestSpec, call: Call, answer: Response) -> None:
        """Read the rest of an answer, as a client would, and keep nothing of it."""
        if answer.stream is None:
            return
        try:
            async with asyncio.timeout_at(ask.deadline):
                while await answer.stream.read() is not None:
                    pass
        finally:
            self._asking.abandon(call)
