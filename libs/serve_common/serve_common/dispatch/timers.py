"""Checks all active requests periodically: deadlines, silent replicas, queues, and the routers' samples."""

from __future__ import annotations

import asyncio
from typing import Final, final

import structlog

from serve_common.dispatch.calls import Attempt, Call
from serve_common.dispatch.dispatcher import Dispatcher
from serve_common.dispatch.errors import BackendStopped, ReplicaTimedOut
from serve_common.dispatch.routes import ModelHolders, Routes, send_wake_if_due
from serve_common.dispatch.upstream import Outgoing
from serve_common.errors import BusUnavailable, DeadlineExceeded, NoReplicaAvailable, ReplicaDied, ServeError
from serve_common.names import ReplicaTag, parse_backend_tag
from serve_common.routing.router import Router

_log = structlog.get_logger(__name__)

TICK_S: Final = 0.025
PROBE_AFTER_S: Final = 1.0
"""Seconds without a message until a request's replica is probed, and between probes; at most half of its time."""
SAMPLE_INTERVAL_S: Final = 0.25
"""Seconds between samples of the routers' counts; fine enough for windows of seconds."""
PATIENCE_S: Final = 0.25
"""Seconds that a probed replica must have been silent before a missed deadline counts as its failure."""


@final
class RequestTimers:
    """Checks all active requests periodically, while it runs."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        routes: Routes,
        outgoing: Outgoing,
        models: ModelHolders | None = None,
    ) -> None:
        """``models`` is swept too, if given."""
        self._models = models
        self._sample_at = float("-inf")
        self._dispatcher = dispatcher
        self._routes = routes
        self._outgoing = outgoing
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Check every `TICK_S` seconds, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            if not self._dispatcher.calls:
                continue
            try:
                self.tick(self._loop.time())
            except Exception:  # noqa: BLE001 - the deadlines of other requests must still be met
                _log.exception("beat_failed")

    def tick(self, now: float) -> None:
        """Do what is due at ``now``."""
        if self._models is not None:
            self._models.sweep(now)
        is_sampling = now >= self._sample_at
        if is_sampling:
            self._sample_at = now + SAMPLE_INTERVAL_S
            self._outgoing.links.sweep()
        for router in list(self._routes.routers.values()):
            if router.has_waiting:
                self._check_queue(router, now)
            if router.has_blocked:
                self._dispatcher.perform(router, router.reopen(now))
            if router.pool.has_leaving:
                self._dispatcher.lost_requests.lose(router.take_left(now), router, "left the backend")
            if is_sampling:
                router.tick(now)
        for replica in self._dispatcher.failure_detector.due(now):
            self._probe_replica(replica)
        for call in list(self._dispatcher.calls.values()):
            if call.attempt is None:
                self._check_waiting(call, now)
            else:
                self._check_sent(call, now)

    def _check_queue(self, router: Router, now: float) -> None:
        for request in router.expire(now):
            call = self._dispatcher.calls.get(request)
            if call is not None:
                self._dispatcher.end_with(call, _expiry_error(call, router))
        if router.is_scaled_to_zero:
            send_wake_if_due(self._outgoing, router, now)

    def _probe_replica(self, replica: ReplicaTag) -> None:
        router = self._routes.routers.get(parse_backend_tag(replica))
        in_flight = () if router is None else router.requests_at(replica)
        for request in in_flight:
            self._outgoing.probe(self._dispatcher.calls[request])
            return
        self._dispatcher.failure_detector.on_sign_of_life(replica)  # nothing is at stake

    def _check_waiting(self, call: Call, now: float) -> None:
        if call.router is not None:
            return  # its router watches the deadline
        if now >= min(call.reconnect_deadline, call.spec.deadline):
            self._dispatcher.end_with(call, BusUnavailable("NATS is away"))

    def _check_sent(self, call: Call, now: float) -> None:
        attempt = call.attempt
        if attempt is None:
            return
        if now >= call.spec.deadline and not call.status:  # a response that has begun may go on
            message = f"replica {attempt.replica} did not answer in time"
            # A bus that hangs delivers nothing, and the replica is not to blame for that.
            is_silent = (
                self._outgoing.is_bus_responsive
                and attempt.last_seen_at < attempt.probed_at
                and now - attempt.last_seen_at >= _probe_after_s(call, attempt) + _silence_limit_s(call)
            )
            self._dispatcher.fail(call, ReplicaTimedOut(message) if is_silent else DeadlineExceeded(message))
            return
        since_s = now - max(attempt.last_seen_at, attempt.probed_at)
        if not self._outgoing.is_bus_responsive and attempt.response_link is None and attempt.link is None:
            return  # probes would queue there, and all arrive at once
        if since_s >= PROBE_AFTER_S or (
            since_s >= PATIENCE_S / 8 and not call.status and since_s >= _probe_after_s(call, attempt)
        ):
            self._outgoing.probe(call)


def _expiry_error(call: Call, router: Router) -> ServeError:
    """The error of ``call``, which expired in the queue of ``router``."""
    tag = router.backend_tag
    if router.is_stopped:
        return BackendStopped(tag)
    if call.is_suspect:
        died = " and ".join(call.lost_with)
        return ReplicaDied(
            f"replica {died} died while it had the request, which may be why; it is not sent to the last healthy one, "
            "and the deadline was over before there was another"
        )
    if router.is_scaled_to_zero:
        return NoReplicaAvailable(f"{tag!r} was scaled to zero and had not woken when the deadline was over")
    return NoReplicaAvailable(f"the deadline was over before a replica of {tag!r} had room")


def _probe_after_s(call: Call, attempt: Attempt) -> float:
    return min(PROBE_AFTER_S, (call.spec.deadline - attempt.sent_at) / 2)


def _silence_limit_s(call: Call) -> float:
    slo_ms = call.spec.endpoint.options.relative_slo_ms
    return PATIENCE_S if slo_ms is None else min(PATIENCE_S, slo_ms / 2000)
