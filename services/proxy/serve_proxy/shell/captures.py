"""Captures a share of an endpoint's requests with their responses, and publishes them redacted.

Why so careful: a capture has no value to the client. It is encoded and published by a task of its own after the client
has its response; what waits for that is limited in number, memory and rate, and what is too much is dropped and
counted. What is not sampled costs one comparison, and an endpoint without a capture nothing: its check is that for
shadows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, final

import msgspec
import structlog

from serve_common.clock import TokenBucket
from serve_common.dispatch.calls import RequestSpec, Response
from serve_common.dispatch.capture_rules import REPLAY_HEADER, TARGET_LENGTH_MAX, CaptureRule
from serve_common.names import ReplicaTag, parse_backend_tag
from serve_common.protocol.captures import CapturedPair
from serve_common.protocol.frames import Headers, RequestKind
from serve_common.protocol.subjects import Subjects
from serve_common.routing.replica_choice import Rng
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_lines import RateLimitedLogger
from serve_common.telemetry.request_traces import RequestObserver

_log = structlog.get_logger(__name__)

PAIRS_PER_S_MAX: Final = 200
"""Captured requests a second of this process, so that a share that is too high cannot take its CPU."""
WAITING_MAX: Final = 256
"""Captured requests that wait to be published."""
WAITING_BYTES_MAX: Final = 8 * 1024 * 1024
"""Body bytes of those."""

Publish = Callable[[str, bytes], None]
"""Publishes a payload on a subject at once. Raises a `ServeError` when that is not possible."""


@final
class SampledRequest:
    """A request that is captured: notes which replica responds; a `RequestObserver` around the request's own."""

    __slots__ = ("_inner", "_traceparent", "replica", "rule", "spec", "started_at")

    def __init__(self, spec: RequestSpec, rule: CaptureRule, now: float) -> None:
        self.spec: Final = spec
        self.rule: Final = rule
        self.started_at: Final = now
        self.replica = ReplicaTag("")
        self._inner: RequestObserver | None = spec.trace
        self._traceparent = spec.traceparent

    def waits(self, why: str) -> None:
        """Pass on to the other observer."""
        if self._inner is not None:
            self._inner.waits(why)

    def attempt_started(self, replica: ReplicaTag, *, may_queue: bool) -> str:
        """Note the replica; returns the traceparent to send."""
        self.replica = replica
        if self._inner is not None:
            return self._inner.attempt_started(replica, may_queue=may_queue)
        return self._traceparent

    def attempt_failed(self, kind: str, text: str) -> None:
        """Pass on to the other observer."""
        if self._inner is not None:
            self._inner.attempt_failed(kind, text)

    def attempt_ended(self, status: int) -> None:
        """Pass on to the other observer."""
        if self._inner is not None:
            self._inner.attempt_ended(status)


@final
class Captures:
    """Captures requests of endpoints that have a `CaptureRule`."""

    def __init__(
        self, publish: Publish, subjects: Subjects, rng: Rng, *, now: Rng, wall_now: Callable[[], float]
    ) -> None:
        """``rng`` returns random numbers in [0, 1), ``now`` the loop's time, ``wall_now`` seconds since 1970."""
        self.published = 0
        """Captured requests that were published."""
        self.dropped = 0
        """Sampled requests that were not, because too many came at once or NATS was away."""
        self._publish = publish
        self._subjects = subjects
        self._rng = rng
        self._now = now
        self._wall_now = wall_now
        self._rate = TokenBucket(PAIRS_PER_S_MAX, PAIRS_PER_S_MAX)
        self._waiting: deque[_WaitingPair] = deque()
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        self._tasks = TaskOwner("captures")
        self._failures = RateLimitedLogger(_log.warning)

    def start(self) -> None:
        """Start publishing."""
        self._tasks.start(self._run(), name="publish")

    async def close(self, timeout_s: float) -> None:
        """Publish nothing more; what waits is dropped."""
        self.dropped += len(self._waiting)
        self._waiting.clear()
        await self._tasks.close(timeout_s)

    def sample(self, spec: RequestSpec) -> SampledRequest | None:
        """Decide whether a request is captured. Its dispatch must then have the result as its ``trace``."""
        rule = spec.endpoint.capture
        if rule is None or self._rng() >= rule.share:
            return None
        if spec.kind is RequestKind.WEBSOCKET or any(name == REPLAY_HEADER for name, _ in spec.headers):
            return None
        now = self._now()
        if not self._rate.take(now):
            self.dropped += 1
            return None
        return SampledRequest(spec, rule, now)

    def add(self, sampled: SampledRequest, response: Response) -> None:
        """Queue a sampled request whose response came; never fails and never waits."""
        spec, rule = sampled.spec, sampled.rule
        pair = _WaitingPair(
            spec=msgspec.structs.replace(spec, body=b"", upload=None, trace=None),
            rule=rule,
            at=self._wall_now(),
            duration_ms=round((self._now() - sampled.started_at) * 1000, 3),
            replica=sampled.replica,
            request_body=spec.body if rule.keeps(spec.body) else None,
            request_bytes=len(spec.body),
            is_upload=spec.upload is not None,
            status=response.status,
            response_headers=response.headers,
            # Copied, because the buffer is the connection's.
            response_body=bytes(response.body) if rule.keeps(response.body) else None,
            response_bytes=len(response.body),
            is_stream=response.stream is not None,
        )
        if len(self._waiting) >= WAITING_MAX or self._waiting_bytes + pair.size_bytes > WAITING_BYTES_MAX:
            self.dropped += 1
            return
        self._waiting_bytes += pair.size_bytes
        self._waiting.append(pair)
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                pair = self._waiting.popleft()
                self._waiting_bytes -= pair.size_bytes
                self._publish_pair(pair)
                await asyncio.sleep(0)  # requests come first

    def _publish_pair(self, pair: _WaitingPair) -> None:
        try:
            subject = self._subjects.capture(pair.spec.endpoint.tag)
            self._publish(subject, msgspec.json.encode(pair.redacted()))
            self.published += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the capture of others
            self.dropped += 1
            self._failures.log(self._now(), "capture_dropped", error=repr(error), dropped=self.dropped)


class _WaitingPair(msgspec.Struct, frozen=True, kw_only=True):
    """A request with its response, not redacted yet; it exists only in this process, for a moment."""

    spec: RequestSpec
    """Without its body and its observer."""
    rule: CaptureRule
    at: float
    duration_ms: float
    replica: ReplicaTag
    request_body: bytes | None
    """None: only its size is captured."""
    request_bytes: int
    is_upload: bool
    """Whether the request's body came in pieces."""
    status: int
    response_headers: Headers
    response_body: bytes | None
    response_bytes: int
    is_stream: bool
    """Whether the response came in pieces."""

    @property
    def size_bytes(self) -> int:
        """Size of both bodies in memory."""
        return len(self.request_body or b"") + len(self.response_body or b"")

    def redacted(self) -> CapturedPair:
        """What is published."""
        spec, rule = self.spec, self.rule
        path = spec.path.removeprefix(spec.route) if spec.route != "/" else spec.path
        return CapturedPair(
            at=self.at,
            request_id=spec.request_id[:256],
            endpoint_tag=spec.endpoint.tag,
            backend_tag=parse_backend_tag(self.replica),
            method=spec.method[:256],
            path=path[:TARGET_LENGTH_MAX] or "/",
            query=rule.query(spec.query),
            request=rule.message(
                spec.headers, self.request_body, self.request_bytes, is_streamed=self.is_upload
            ),
            status=self.status,
            response=rule.message(
                self.response_headers, self.response_body, self.response_bytes, is_streamed=self.is_stream
            ),
            duration_ms=self.duration_ms,
        )
