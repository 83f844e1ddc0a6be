"""Shadow copies of requests, for testing backends with real traffic.

Why so careful: a copy has no value to the caller, so it is sent after the real request, waits behind all real ones, is
dropped rather than retried, and both number and memory are limited. Outcomes of copies are only counted; in shadow
steps of rollouts some of their responses are compared (`response_comparisons`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final, final

import msgspec
import structlog

from serve_common.dispatch.admission import ShadowOutcome
from serve_common.dispatch.calls import Call, RequestSpec, Response
from serve_common.dispatch.capture_rules import REPLAY_HEADER
from serve_common.dispatch.dispatcher import Dispatcher
from serve_common.dispatch.errors import ReplicaError
from serve_common.dispatch.response_comparisons import PendingComparison, ResponseComparisons, read_copy
from serve_common.errors import ServeError
from serve_common.names import BackendTag
from serve_common.protocol.frames import RequestKind
from serve_common.replay.differences import ReplayedResponse
from serve_common.routing.replica_choice import Rng
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_lines import RateLimitedLogger

_log = structlog.get_logger(__name__)

SHADOWS_MAX: Final = 512
"""Concurrent copies in this process."""
SHADOWS_PER_BACKEND_MAX: Final = 128
"""Concurrent copies per backend, so that one that hangs does not use up the capacity of the others."""
SHADOW_BODY_BYTES_MAX: Final = 32 * 1024 * 1024
"""Body bytes of all copies in flight; half of what may wait for the bus, to leave capacity for real requests."""


@final
class Shadows:
    """Sends copies of requests and counts their outcomes."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        rng: Rng,
        now: Callable[[], float],
        comparisons: ResponseComparisons | None = None,
    ) -> None:
        """``rng`` returns random numbers in [0, 1); ``now`` reads the loop's clock; without ``comparisons`` no response
        is compared."""
        self._dispatcher = dispatcher
        self._rng = rng
        self._now = now
        self._comparisons = comparisons
        self._tasks = TaskOwner("shadows")
        self._counts_by_backend: Counter[BackendTag] = Counter()
        self._body_bytes = 0
        self._is_closed = False
        self._failures = RateLimitedLogger(_log.info, interval_s=10.0)

    @property
    def in_flight(self) -> int:
        """Number of copies in flight."""
        return self._counts_by_backend.total()

    def get_differences(self) -> dict[BackendTag, list[str]]:
        """By canary, where its responses differ, for people."""
        return {} if self._comparisons is None else self._comparisons.examples()

    def start(self) -> None:
        """Start comparing."""
        if self._comparisons is not None:
            self._comparisons.start()

    def copy(self, spec: RequestSpec) -> PendingComparison | None:
        """Send copies of ``spec`` as its endpoint configures. Never fails; sends only once the caller awaits.

        Where a comparison is returned, the caller's response must be added to it, or it must be dropped.
        """
        if spec.endpoint.comparisons and self._comparisons is not None:
            return self._copy_compared(spec, self._comparisons)
        for backend_tag, proportion in spec.endpoint.shadows:
            if self._rng() < proportion:
                self._copy_to(spec, backend_tag, None)
        return None

    def _copy_compared(self, spec: RequestSpec, comparisons: ResponseComparisons) -> PendingComparison | None:
        """Send copies to canary and baseline of the same requests, to neither always first."""
        endpoint, rand, pending = spec.endpoint, self._rng(), None
        if any(name == REPLAY_HEADER for name, _ in spec.headers):
            rand = 0.0  # it was sent to be compared
        if any(rand < share for tag, share in endpoint.shadows if tag in endpoint.comparisons):
            pending = comparisons.start_request(spec)
        to = list(endpoint.shadows)
        if self._rng() >= 0.5:
            to.reverse()
        for backend_tag, proportion in to:
            is_compared = backend_tag in endpoint.comparisons
            if (rand if is_compared else self._rng()) < proportion:
                self._copy_to(spec, backend_tag, pending if is_compared else None)
        return pending

    def _copy_to(self, spec: RequestSpec, backend_tag: BackendTag, pending: PendingComparison | None) -> None:
        # A body that is still arriving, and the messages of a socket, can be read only once.
        is_single = spec.upload is not None or spec.kind is RequestKind.WEBSOCKET
        if is_single or self._lacks_capacity(backend_tag, len(spec.body)):
            spec.endpoint.stats.add_shadow(backend_tag, ShadowOutcome.SKIPPED)
            if pending is not None:
                pending.add_copy(backend_tag, None)
            return
        self._counts_by_backend[backend_tag] += 1
        self._body_bytes += len(spec.body)
        copied = msgspec.structs.replace(spec, is_repeatable=False, shadow_backend=backend_tag, trace=None)
        self._tasks.start(self._follow(copied, backend_tag, pending), name="shadow")

    async def close(self, timeout_s: float) -> None:
        """Cancel all copies, and send no more."""
        self._is_closed = True
        await self._tasks.close(timeout_s)
        if self._comparisons is not None:
            await self._comparisons.close(timeout_s)

    def _lacks_capacity(self, backend_tag: BackendTag, body_bytes: int) -> bool:
        return (
            self._is_closed
            or not self._dispatcher.accepts_shadows(backend_tag)
            or len(self._tasks) >= SHADOWS_MAX
            or self._counts_by_backend[backend_tag] >= SHADOWS_PER_BACKEND_MAX
            or self._body_bytes + body_bytes > SHADOW_BODY_BYTES_MAX
        )

    async def _follow(
        self, spec: RequestSpec, backend_tag: BackendTag, pending: PendingComparison | None
    ) -> None:
        outcome, compared = ShadowOutcome.FAILED, None
        try:
            call, response = await self._dispatcher.send(spec)
            compared = None if pending is None else read_copy(response)
            await self._drop(spec, call, response)
            outcome = ShadowOutcome.RESPONDED if response.status < 500 else ShadowOutcome.ERROR
        except (ServeError, TimeoutError) as error:
            if isinstance(error, ReplicaError):
                outcome, compared = ShadowOutcome.ERROR, ReplayedResponse(status=error.status)
            self._failures.log(
                self._now(),
                "shadow_failed",
                endpoint_tag=spec.endpoint.tag,
                backend_tag=backend_tag,
                request_id=spec.request_id,
                reason=str(error) or "it took too long",
            )
        finally:
            if pending is not None:
                pending.add_copy(backend_tag, compared)
            self._counts_by_backend[backend_tag] -= 1
            if not self._counts_by_backend[backend_tag]:
                del self._counts_by_backend[backend_tag]
            self._body_bytes -= len(spec.body)
            spec.endpoint.stats.add_shadow(backend_tag, outcome)

    async def _drop(self, spec: RequestSpec, call: Call, response: Response) -> None:
        """Read the rest of a response, as a client would, and discard it."""
        if response.stream is None:
            return
        try:
            async with asyncio.timeout_at(spec.deadline):
                while await response.stream.read() is not None:
                    pass
        finally:
            self._dispatcher.abandon(call)
