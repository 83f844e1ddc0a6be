"""One life of the embedded stack: start, example, stay, stop; and what Ctrl-C means at each point."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Final

from muster.cli import output
from muster.cli.example import ExampleDeployment
from muster.cli.exit_codes import ExitCode
from muster.cli.ports import EmbeddedPort
from muster.cli.session import Session
from muster.cli.up_report import UpReport
from muster.client.address import StackAddress
from muster.embedded import leftovers
from muster.secrets import Secrets
from serve_common.errors import ServeError
from serve_common.identities.roles import Role

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EXAMPLE_RETRY_S: Final = 60.0
_TWICE_AT_ONCE_S: Final = 0.5
"""A shell, `timeout` or `make` sends its signal to us and to our group: that is one wish, not two."""


class UpRun:
    """Runs a stack until a signal. Used once, from the main thread's event loop."""

    def __init__(self, session: Session, stack: EmbeddedPort, report: UpReport) -> None:
        """``stack`` is not started yet."""
        self._session = session
        self._stack = stack
        self._report = report
        self._stop_asked_at: float | None = None
        self._task: asyncio.Task[None] | None = None

    async def run(self, *, deploy_example: bool) -> None:
        """Return when a signal asked for it and everything is stopped. Raises what kept the stack from starting."""
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._hear_signal)
        begun = loop.time()
        self._report.starting()
        try:
            async with self._stack:
                self._report.ready(self._stack.record, loop.time() - begun)
                if deploy_example:
                    await self._deploy_example()
                self._report.staying()
                await loop.create_future()  # until it is cancelled
        except asyncio.CancelledError:
            if self._stop_asked_at is None or self._task is None:
                raise
            self._task.uncancel()
            self._report.stopped(loop.time() - self._stop_asked_at)
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _hear_signal(self) -> None:
        if self._stop_asked_at is None and self._task is not None:
            self._stop_asked_at = self._now()
            self._report.stopping()
            self._task.cancel()
        elif self._stop_asked_at is not None and self._now() - self._stop_asked_at >= _TWICE_AT_ONCE_S:
            self._kill()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _kill(self) -> None:
        try:
            leftovers.kill_marked(self._stack.record.stack_id)
        finally:
            # Nothing may hold us up any more, the orderly stop that is under way least of all.
            os._exit(ExitCode.INTERRUPTED)

    async def _deploy_example(self) -> None:
        record = self._stack.record
        example = ExampleDeployment(self._session.directory, record.http_url)
        try:
            address = StackAddress(
                urls=(record.nats_url,),
                credentials_file=str(Secrets(Path(record.secrets)).credentials_file(Role.ADMIN)),
            )
            with output.Progress(example.name) as progress:
                async with self._session.connect(address, progress, retry_for_s=_EXAMPLE_RETRY_S) as stack:
                    lines = await example.ensure(stack.admin, progress)
        except ServeError as error:
            # The stack serves without its example; whoever waits for it sees why it is not there.
            self._report.example([f"error: the example was not deployed: {error}"], is_serving=False)
            return
        self._report.example(lines, is_serving=example.is_serving)
