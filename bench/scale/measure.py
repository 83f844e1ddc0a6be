"""The story of one size: everything is deployed, single things change, nothing changes, the controller is killed.

Why each figure is taken by itself and late: a size whose controller is too slow still says how far it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, final

from bench.scale.meters import AdminCalls, ChangeFailed, Meters, deploy_request
from bench.scale.processes import Controller, ProcessLost, Servers, Simulator, running_servers, usage_of
from bench.scale.report import (
    REPLICAS_PER_BACKEND,
    Column,
    Recovery,
    Sample,
    Size,
    SteadyFigures,
    conclude,
    spread,
)
from muster.embedded.supervisor import last_lines
from serve_common.api.commands import Deploy
from serve_common.errors import ServeError
from serve_common.names import GoalId

CALLS_AT_ONCE: Final = 32
CHANGES: Final = 10
SETTLE_S: Final = 0.3
"""After a change succeeded, until what follows from it is over."""
REST_S: Final = 2.0
STEADY_S: Final = 11.0
"""Postgres' counts of rows are complete only after sessions were idle for 10 s."""
RECOVERIES: Final = 3
RECOVERY_ATTEMPT_S: Final = 3.0
HOSTS_WITHIN_S: Final = 5.0

Say = Callable[[str], None]


@asynccontextmanager
async def _opened(directory: Path, size: Size, profile: Path | None) -> AsyncIterator[Run]:
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(running_servers(directory))
        controller, simulator = Controller(servers, profile), Simulator(servers, size)
        meters, calls = Meters(servers), AdminCalls(servers)
        for close in (meters.close, calls.close, controller.stop, simulator.stop):
            stack.push_async_callback(close)
        await controller.start()
        await simulator.start()
        await meters.open()
        await calls.open()
        yield Run(servers, controller, simulator, meters, calls, size)


async def measure(
    size: Size, directory: Path, within_s: float, say: Say, profile: Path | None = None
) -> Column:
    """Measure one size in ``directory``; what fails or does not end in time is told in the column.

    Raises `StackFailed` when not even the servers start.
    """
    column = Column(size=size)
    async with _opened(directory, size, profile) as run:
        try:
            async with asyncio.timeout(within_s):
                await run.tell_everything(column, say, is_profiled=profile is not None)
        except* TimeoutError:
            column.problem = f"not everything was measured within {within_s:g} s"
        except* (ChangeFailed, ProcessLost, ServeError) as group:
            column.problem = f"{group.exceptions[0]}\n{last_lines(run.controller.log_path)}"
    return column


@final
class Run:
    """One size under measurement."""

    def __init__(
        self,
        servers: Servers,
        controller: Controller,
        simulator: Simulator,
        meters: Meters,
        calls: AdminCalls,
        size: Size,
    ) -> None:
        self.controller = controller
        self._servers = servers
        self._simulator = simulator
        self._meters = meters
        self._calls = calls
        self._size = size
        self._now = asyncio.get_running_loop().time

    async def tell_everything(self, column: Column, say: Say, *, is_profiled: bool) -> None:
        """Fill the column, one part after the other."""
        await self._hosts_are_known()
        self._end_phase(is_profiled=is_profiled)
        column.deploy_all_s = await self._deploy_all()
        say(f"everything was deployed in {column.deploy_all_s:.1f} s")
        self._end_phase(is_profiled=is_profiled)
        indices = spread(CHANGES, self._size.backends)
        await _side_by_side(partial(self._break_in, index) for index in indices)
        await asyncio.sleep(STEADY_S)
        rows = await self._meters.rows_written()
        column.scale = conclude(
            [await self._change(deploy_request(i, REPLICAS_PER_BACKEND + 1)) for i in indices]
        )
        say(f"one replica more takes {column.scale.p50_ms:.1f} ms")
        column.user_config = conclude(
            [await self._change(deploy_request(i, REPLICAS_PER_BACKEND + 1, 0.6)) for i in indices]
        )
        say(f"another user_config takes {column.user_config.p50_ms:.1f} ms")
        self._end_phase(is_profiled=is_profiled)
        await asyncio.sleep(REST_S)
        column.steady = await self._steady()
        column.rows_per_change = (await self._meters.rows_written() - rows) / (2 * len(indices))
        say(f"a report costs {column.steady.cpu_us_per_report:.0f} µs")
        self._end_phase(is_profiled=is_profiled)
        for number in range(0 if is_profiled else RECOVERIES):
            column.recoveries.append(await self._recover(0.7 + number / 100))
            say(f"killed, it applies a change after {column.recoveries[-1].applied_s:.2f} s")
            await asyncio.sleep(REST_S)
        counters = await self._simulator.counters()
        column.reports_dropped, column.goals_refused = counters.reports_dropped, counters.goals_refused

    def _end_phase(self, *, is_profiled: bool) -> None:
        if is_profiled:
            self.controller.write_profile()

    async def _hosts_are_known(self) -> None:
        """Every host and proxy is known: by then each has reported twice, and most were told a first goal."""
        deadline = self._now() + HOSTS_WITHIN_S
        await asyncio.sleep(REST_S)
        while self._now() < deadline:
            if (await self._simulator.counters()).hosts_with_goal >= self._size.hosts:
                return
            await asyncio.sleep(SETTLE_S)

    async def _deploy_all(self) -> float:
        begun = self._now()
        goals: list[GoalId | None] = []

        async def deploy(index: int) -> None:
            goals.append((await self._calls.deploy(deploy_request(index))).goal_id)

        await _side_by_side(partial(deploy, index) for index in range(self._size.backends))
        await _side_by_side(partial(self._calls.wait_for_success, goal) for goal in goals)
        return self._now() - begun

    async def _break_in(self, index: int) -> None:
        """Make a backend larger and smaller again.

        The first row that is put between those of a bulk load splits its page of the index, which is written to the
        log once; the next hundred rows there find room.
        """
        for num_replicas in (REPLICAS_PER_BACKEND + 1, REPLICAS_PER_BACKEND):
            reply = await self._calls.deploy(deploy_request(index, num_replicas))
            await self._calls.wait_for_success(reply.goal_id)

    async def _change(self, request: Deploy) -> Sample:
        sent, counters = await self._meters.sent(), await self._simulator.counters()
        wal = await self._meters.wal_bytes()
        begun = self._now()
        reply = await self._calls.deploy(request)
        if reply.goal_id is None:
            raise ChangeFailed(f"{request.name}: the change made no goal")
        await self._calls.wait_for_success(reply.goal_id)
        seconds = self._now() - begun
        await asyncio.sleep(SETTLE_S)
        wal_after = await self._meters.wal_bytes()
        sent_after, counters_after = await self._meters.sent(), await self._simulator.counters()
        return Sample(
            seconds=seconds,
            wal_bytes=wal_after - wal,
            messages=sent_after.messages - sent.messages,
            published_bytes=sent_after.bytes - sent.bytes,
            goals=counters_after.goals - counters.goals,
            goal_bytes=counters_after.goal_bytes - counters.goal_bytes,
            snapshots=counters_after.snapshots - counters.snapshots,
            snapshot_bytes=counters_after.snapshot_bytes - counters.snapshot_bytes,
            proxy_reports=counters_after.proxy_reports - counters.proxy_reports,
        )

    async def _steady(self) -> SteadyFigures:
        nats = usage_of(self._servers.nats_pid)
        counters, plan_s = await self._simulator.counters(), await self._meters.plan_s()
        begun, usage = self._now(), self.controller.usage
        await asyncio.sleep(STEADY_S)
        seconds, usage_after = self._now() - begun, self.controller.usage
        counters_after, plan_after_s = await self._simulator.counters(), await self._meters.plan_s()
        reports = max(counters_after.reports - counters.reports, 1)
        cpu_s = usage_after.cpu_s - usage.cpu_s
        planned_s = None if plan_s is None or plan_after_s is None else plan_after_s - plan_s
        return SteadyFigures(
            seconds=seconds,
            reports_per_s=reports / seconds,
            cpu_us_per_report=cpu_s / reports * 1e6,
            plan_us_per_report=None if planned_s is None else planned_s / reports * 1e6,
            cpu_share=cpu_s / seconds,
            nats_cpu_share=(usage_of(self._servers.nats_pid).cpu_s - nats.cpu_s) / seconds,
            simulator_cpu_share=(counters_after.cpu_s - counters.cpu_s) / seconds,
            rss_bytes=usage_after.rss_bytes,
            simulator_late_s=counters_after.late_s,
        )

    async def _recover(self, threshold: float) -> Recovery:
        await self.controller.kill()
        killed = self._now()
        await self.controller.start()
        request = deploy_request(0, REPLICAS_PER_BACKEND + 1, threshold)
        reply = await self._calls.deploy(request, RECOVERY_ATTEMPT_S)
        replied = self._now()
        await self._calls.wait_for_success(reply.goal_id)
        return Recovery(reply_s=replied - killed, applied_s=self._now() - killed)


async def _side_by_side(calls: Iterable[Callable[[], Coroutine[None, None, None]]]) -> None:
    """Make all calls, a few at once."""
    waiting = iter(calls)

    async def work() -> None:
        for call in waiting:
            await call()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CALLS_AT_ONCE):
            _ = tasks.create_task(work())
