"""Keeps the processes of a stack alive, and ends all of them together.

Why not leave it to asyncio's subprocesses: a stack must come back after ``kill -9`` of any of its processes, and
leave nothing behind after its own end, however that comes. Each process therefore has a guardian (guardian.py);
the supervisor starts guardians again when they end and looks after what a killed guardian left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from muster.embedded import leftovers, logfiles
from muster.embedded.charge import KILL_WAIT_S, Charge
from muster.embedded.errors import StartFailed
from muster.embedded.process import OnEvent, ProcessSpec, RunningProcess
from serve_common import guardian
from serve_common.tasks import TaskOwner

_log = structlog.get_logger()

STOP_TIMEOUT_S = 9.0
"""Of the whole stack; what is left then is killed."""
_SWEEP_S = 2.0


class Supervisor:
    """Owns the processes of one stack.

    Used from the main thread's event loop: the kernel ties a guardian to the thread that started it.
    """

    def __init__(self, stack_id: str, specs: Sequence[ProcessSpec], on_event: OnEvent) -> None:
        """``specs`` are in an order in which every process comes after those it depends on."""
        self._stack_id = stack_id
        self._charges = {
            spec.name: Charge(spec, stack_id, self._hear_of_first_start, on_event) for spec in specs
        }
        for position, spec in enumerate(specs):
            missing = set(spec.depends_on) - {earlier.name for earlier in specs[:position]}
            assert not missing, f"{spec.name} depends on {missing}, which must come before it"
        self._owner = TaskOwner("supervisor", on_failure=lambda _name, error: self._end_start(error))
        self._outcome: asyncio.Future[BaseException | None] | None = None
        """Of the start: None once everything is ready, or the first failure."""

    @property
    def processes(self) -> list[RunningProcess]:
        """What is known of every process now."""
        return [charge.running for charge in self._charges.values()]

    async def start(self) -> None:
        """Start everything in order and return when all are ready.

        Raises `StartFailed` with the end of the log of the process that did not get ready; everything is stopped
        then. Afterwards processes that die are started again until `stop`.
        """
        self._outcome = asyncio.get_running_loop().create_future()
        guardian.prctl(guardian.PR_SET_CHILD_SUBREAPER, 1)
        for charge in self._charges.values():
            needed = [self._charges[name].was_ready for name in charge.spec.depends_on]
            self._owner.start(charge.keep(needed), name=charge.spec.name)
        self._owner.start(self._sweep(), name="sweep")
        failure = await self._outcome
        if failure is not None:
            await self.stop()
            raise failure

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop every process, the last one first; kill what is left after ``timeout_s``. Safe to call again."""
        give_up_at = asyncio.get_running_loop().time() + timeout_s
        self._end_start(StartFailed("it was stopped before everything was ready"))
        for charge in self._charges.values():
            charge.is_stopping = True
        for charge in reversed(self._charges.values()):
            await charge.stop(give_up_at)
        await self._owner.close(timeout_s=KILL_WAIT_S)
        count = await asyncio.to_thread(leftovers.kill_marked, self._stack_id)
        if count:
            _log.warning("leftovers_killed", stack_id=self._stack_id, count=count)
        guardian.prctl(guardian.PR_SET_CHILD_SUBREAPER, 0)

    def _hear_of_first_start(self, failure: BaseException | None) -> None:
        if failure is not None or all(charge.was_ready.is_set() for charge in self._charges.values()):
            self._end_start(failure)

    def _end_start(self, failure: BaseException | None) -> None:
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(failure)

    async def _sweep(self) -> None:
        """Keep logs and the table of processes from growing."""
        zombies: frozenset[int] = frozenset()
        while True:
            await asyncio.sleep(_SWEEP_S)
            zombies = await asyncio.to_thread(leftovers.reap_zombies, zombies)
            for charge in self._charges.values():
                try:
                    await asyncio.to_thread(logfiles.cut_when_long, charge.spec.log_path)
                except OSError as error:
                    _log.warning("log_not_cut", path=str(charge.spec.log_path), error=str(error))
