"""Sends captured requests again while this controller leads, where a rollout wants it: few at a time, each once.

A new leader starts anew with the oldest ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, final

import structlog

from serve_common.errors import ServeError
from serve_common.replay.captured_requests import can_replay
from serve_common.runtime.tasks import OwnedTask, TaskOwner
from serve_common.telemetry.log_lines import RateLimitedLogger
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.rollouts.replays import ReplayRule, get_replays, is_needed
from serve_controller.ports import CapturedRequests

_log = structlog.get_logger(__name__)

REPLAYS_MAX: Final = 8
"""Endpoints whose requests are sent at a time; further ones wait."""
PAUSE_S: Final = 0.1
"""Seconds between two requests to an endpoint."""
TIMEOUT_S: Final = 30.0
"""Seconds to wait for a response, before the next request."""
_CHECK_EVERY_S: Final = 1.0
_RETRY_S: Final = 2.0
_CLOSE_S: Final = 1.0


@final
class CaptureReplays:
    """Sends captured requests to endpoints."""

    def __init__(
        self,
        captured: CapturedRequests,
        get_checkpoint: Callable[[], Checkpoint | None],
        now: Callable[[], float],
    ) -> None:
        """``get_checkpoint`` returns None while this controller does not lead; ``now`` reads any clock, for logs."""
        self.sent = 0
        """Requests that were sent."""
        self._captured = captured
        self._get_checkpoint = get_checkpoint
        self._tasks = TaskOwner("capture_replays")
        self._running: dict[ReplayRule, OwnedTask] = {}
        """Also those that have ended, so that none starts twice."""
        self._now = now
        self._failures = RateLimitedLogger(_log.warning)

    async def run(self) -> None:
        """Start and end replays as rollouts want it, until cancelled."""
        try:
            while True:
                self._update(self._get_checkpoint())
                await asyncio.sleep(_CHECK_EVERY_S)
        finally:
            await self._tasks.close(_CLOSE_S)

    def _update(self, checkpoint: Checkpoint | None) -> None:
        rules = [] if checkpoint is None else get_replays(checkpoint)
        for rule in self._running.keys() - set(rules):
            self._running.pop(rule).cancel()
        for rule in rules:
            is_full = sum(not task.is_done for task in self._running.values()) >= REPLAYS_MAX
            if rule not in self._running and not is_full:
                self._running[rule] = self._tasks.start(self._replay(rule), name="replay")

    async def _replay(self, rule: ReplayRule) -> None:
        sequence, sent = 1, 0
        while True:
            checkpoint = self._get_checkpoint()
            if checkpoint is None or not is_needed(checkpoint, rule):
                await asyncio.sleep(_CHECK_EVERY_S)
                continue
            try:
                found = await self._captured.find(rule.endpoint_tag, sequence)
                if found is None or (found.pair is not None and found.pair.at >= rule.captured_before):
                    _log.info("captures_replayed", endpoint_tag=rule.endpoint_tag, sent=sent)
                    return
                sequence = found.sequence + 1
                if found.pair is not None and can_replay(found.pair, is_unsafe=rule.is_unsafe):
                    sent += 1
                    self.sent += 1
                    await self._captured.send(rule.endpoint_tag, found.pair, TIMEOUT_S)
                    await asyncio.sleep(PAUSE_S)
            except ServeError as error:
                self._failures.log(
                    self._now(), "replay_failed", endpoint_tag=rule.endpoint_tag, reason=str(error)
                )
                await asyncio.sleep(_RETRY_S)
