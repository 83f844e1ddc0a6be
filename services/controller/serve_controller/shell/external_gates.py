"""Asks the external gates of rollouts, for one term of leadership.

Why in tasks beside the control loop, as autoscaling is: an answer takes a request to another server, and no plan may
wait for that. Answers are handed to the term, whose next plan goes by them.
"""

from __future__ import annotations

import asyncio
from typing import Final, final

import structlog

from serve_common.clock import Clock
from serve_common.runtime.tasks import OwnedTask, TaskOwner
from serve_controller.core.observed import GateKey, GateSample
from serve_controller.core.rollouts.external import DueGate, get_due_gates, with_response, without_response
from serve_controller.ports import GateSilent, GateSource
from serve_controller.shell.control_loop import Term

_log = structlog.get_logger()

TICK_S: Final = 0.5
TIMEOUT_S: Final = 10.0
"""Seconds that an answer may take."""
AT_ONCE: Final = 32
"""Most gates that are asked at once; others wait."""


@final
class GateSampler:
    """Asks every external gate of a judged step at its interval."""

    def __init__(self, term: Term, source: GateSource, clock: Clock) -> None:
        self._term = term
        self._source = source
        self._clock = clock
        self._running: dict[GateKey, OwnedTask] = {}

    async def run(self) -> None:
        """Ask until cancelled; then questions under way are given up."""
        tasks = TaskOwner("external_gates")
        try:
            while True:
                self._start_due(tasks)
                await asyncio.sleep(TICK_S)
        finally:
            await tasks.close(timeout_s=0.1)

    def _start_due(self, tasks: TaskOwner) -> None:
        self._running = {key: task for key, task in self._running.items() if not task.is_done}
        checkpoint = self._term.checkpoint
        if not checkpoint.active_rollouts:
            return
        for due in get_due_gates(checkpoint, self._term.observed.gates, self._clock.now()):
            if len(self._running) >= AT_ONCE:
                return
            if due.key not in self._running:
                self._running[due.key] = tasks.start(self._sample(due), name=f"ask {due.gate.name}")

    async def _sample(self, due: DueGate) -> None:
        known = self._term.observed.gates.get(due.key)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                response = await self._source.read(due.gate, due.request)
        except TimeoutError:
            sample = without_response(due, known, f"nothing came within {TIMEOUT_S:g} s", self._clock.now())
        except GateSilent as error:
            sample = without_response(due, known, str(error), self._clock.now())
        except Exception as error:  # noqa: BLE001 - a defect of one source holds one rollout, and is shown there
            _log.exception("external_gate_failed", gate=due.gate.name, backend_tag=due.request.backend_tag)
            sample = without_response(due, known, f"{type(error).__name__}: {error}", self._clock.now())
        else:
            sample = with_response(due, known, response, self._clock.now())
        self._note(due, known, sample)

    def _note(self, due: DueGate, known: GateSample | None, sample: GateSample) -> None:
        if known is None or known.passed is not sample.passed:
            _log.info(
                "external_gate",
                gate=due.gate.name,
                backend_tag=due.request.backend_tag,
                result={True: "passed", False: "failed", None: "missing"}[sample.passed],
                reason=sample.text,
            )
        self._term.on_gate_sample(due.key, sample)
