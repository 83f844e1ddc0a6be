"""Autoscales backends by their load, for one term of leadership.

Why in a task beside the control loop: reading a load takes a query to another server, and no plan may wait for that.
Decisions are handed to the term, which records them with its next plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import Final, final

import msgspec
import structlog

from serve_common.clock import Clock
from serve_common.config.autoscaling import AutoscalingContext, LoadPoint
from serve_common.names import BackendTag, DeploymentID
from serve_common.protocol.reports import Wake
from serve_controller.core.autoscaling.demand import within
from serve_controller.core.autoscaling.policy import decide_scaling, wake
from serve_controller.core.autoscaling.stats import aggregate_stats
from serve_controller.core.autoscaling.values import (
    LoadSample,
    ScalingDecision,
    ScalingDecisionKind,
    ScalingInput,
    ScalingState,
    ScalingStatus,
    autoscaled,
    build_load_requests,
    build_scrape_targets,
    num_running,
)
from serve_controller.core.events import last_line
from serve_controller.core.objects import Backend, Replica
from serve_controller.core.scaling import scaling_event
from serve_controller.core.transitions import ROUTED
from serve_controller.ports import LoadSource, PolicyFailed, PolicyResult, PolicyRunner
from serve_controller.shell.control_loop import Term
from serve_controller.shell.program_policies import ProgramPolicies

_log = structlog.get_logger()

TICK_S: Final = 1.0
SAMPLES_MAX: Final = 60
"""Most load samples of one backend that a policy gets."""
POLICIES_AT_ONCE: Final = 8


class _BackendState:
    """State of one backend between two evaluations."""

    def __init__(self) -> None:
        self.evaluate_at = 0.0
        self.state = ScalingState()
        self.samples: deque[LoadSample] = deque(maxlen=SAMPLES_MAX)
        self.read_at: float | None = None
        self.counts: Counter[str] = Counter()
        """Number of decisions by verdict."""
        self.wakeups = 0


@final
class Autoscaler:
    """Scales every backend that has an ``autoscaling_config`` and is not paused."""

    def __init__(
        self,
        term: Term,
        loads: LoadSource,
        policies: PolicyRunner,
        clock: Clock,
        programs: ProgramPolicies | None = None,
    ) -> None:
        self.samples: Counter[tuple[str, str]] = Counter()
        """Number of load samples so far, by source and outcome (``ok`` or ``missing``)."""
        self._term = term
        self._loads = loads
        self._policies = policies
        self._programs = programs
        self._clock = clock
        self._tracked: dict[BackendTag, _BackendState] = {}
        self._synced_from: object = None
        """The checkpoint's backends that `_tracked` was built from."""

    async def run(self) -> None:
        """Evaluate periodically until cancelled. A failed evaluation is logged."""
        while True:
            try:
                await self.evaluate(self._clock.now())
            except Exception:  # noqa: BLE001 - a defect must not end the autoscaling of everything
                _log.exception("autoscaling_look_failed")
            now = self._clock.now()
            await asyncio.sleep(TICK_S - now % TICK_S)

    # -- metrics -------------------------------------------------------------------------------------------------------

    def counts(self) -> Mapping[BackendTag, tuple[Mapping[str, int], int]]:
        """For each followed backend: number of decisions by verdict, and of wake-ups."""
        return {tag: (dict(f.counts), f.wakeups) for tag, f in list(self._tracked.items())}

    # -- evaluations ---------------------------------------------------------------------------------------------------

    async def evaluate(self, now: float) -> None:
        """Read the loads of all backends that are due, and decide on their replicas."""
        self._sync_backends()
        due = [tag for tag, tracked in self._tracked.items() if now >= tracked.evaluate_at]
        if not due:
            return
        checkpoint, observed = self._term.checkpoint, self._term.observed
        requests = build_load_requests(checkpoint, observed, due, now)
        for request in requests:
            # As in Ray Serve, whose control loop calls a program's policy however rarely loads are measured.
            interval_s = TICK_S if request.config.policy.code else request.config.metrics_interval_s
            self._tracked[request.backend_tag].evaluate_at = _next_evaluation(now, interval_s)
        samples = await self._loads.read(requests, build_scrape_targets(observed, now), now)
        decisions: dict[BackendTag, ScalingDecision] = {}
        configs = {request.backend_tag: request.config for request in requests}
        policy_slots = asyncio.Semaphore(POLICIES_AT_ONCE)

        async def decide(tag: BackendTag, sample: LoadSample) -> None:
            # What runs in replicas needs no process here, and must not make others wait when it hangs.
            async with contextlib.nullcontext() if configs[tag].policy.code else policy_slots:
                decision = await self._decide(tag, sample)
            if decision is not None:
                decisions[tag] = decision

        async with asyncio.TaskGroup() as tasks:
            for tag, sample in samples.items():
                tasks.create_task(decide(tag, sample), name=f"autoscale {tag}")
        self._term.scale(decisions)

    def _sync_backends(self) -> None:
        """Add backends that are new and remove those that are gone."""
        backends = self._term.checkpoint.backends
        if self._synced_from is backends:
            return
        self._synced_from = backends
        tags = set(autoscaled(self._term.checkpoint))
        self._tracked = {tag: self._tracked.get(tag) or _BackendState() for tag in sorted(tags)}
        for tag in [tag for tag in self._term.autoscaling if tag not in tags]:
            del self._term.autoscaling[tag]
        if self._programs is not None:
            self._programs.forget(tags)

    async def _decide(self, tag: BackendTag, sample: LoadSample) -> ScalingDecision | None:
        tracked = self._tracked.get(tag)
        backend = self._term.checkpoint.backends.get(tag)
        if tracked is None or backend is None or backend.autoscaling is None:
            return None  # paused or deleted while the load was read
        self.samples[sample.source or "none", "missing" if sample.seen is None else "ok"] += 1
        inputs = self._inputs(backend)
        tracked.samples.append(sample)
        if sample.seen is not None:
            tracked.read_at = sample.at
        policy = inputs.config.policy
        # Without replicas nothing evaluates a program's policy: requests wake them; those that start are waited for.
        is_evaluable = inputs.num_running > 0 or not policy.code
        if not is_evaluable and inputs.num_replicas:
            if inputs.num_replicas == within(inputs.num_replicas, inputs.config):
                return None
            sample = msgspec.structs.replace(
                sample, seen=None, burst=None, missing="its replicas are starting"
            )
            tracked.samples[-1] = sample
        if policy.policy_function and sample.seen is not None and is_evaluable:
            try:
                result = await self._call_policy(backend, inputs, tracked)
            except PolicyFailed as error:
                why = (
                    f"the policy {inputs.config.policy.policy_function} failed: {last_line(str(error))[:300]}"
                )
                _log.warning("policy_failed", backend_tag=tag, error=str(error))
                # One that fails, or hangs, is not called every second.
                tracked.evaluate_at = _next_evaluation(self._clock.now(), inputs.config.metrics_interval_s)
                sample = msgspec.structs.replace(sample, seen=None, burst=None, missing=why)
                tracked.samples[-1] = sample
            else:
                inputs = msgspec.structs.replace(
                    inputs, policy_target=result.num_replicas, new_policy_state=result.policy_state
                )
        decided = decide_scaling(inputs, list(tracked.samples), tracked.state, self._clock.now())
        self._apply(tag, tracked, decided, sample.source)
        return decided

    def _inputs(self, backend: Backend) -> ScalingInput:
        assert backend.autoscaling is not None
        return ScalingInput(
            config=backend.autoscaling,
            num_replicas=backend.num_wanted,
            num_running=num_running(self._term.checkpoint, backend.backend_tag),
        )

    async def _call_policy(
        self, backend: Backend, inputs: ScalingInput, tracked: _BackendState
    ) -> PolicyResult:
        config, sample = inputs.config, tracked.samples[-1]
        tag, now = backend.backend_tag, self._clock.now()
        app, _, deployment = tag.rpartition("/")
        replicas = self._running(tag)
        series = {} if self._programs is None else await self._programs.record(tag, replicas, config, now)
        context = AutoscalingContext(
            deployment_name=deployment,
            app_name=app,
            current_num_replicas=inputs.num_running,
            target_num_replicas=inputs.num_replicas,
            total_num_requests=sample.seen or 0.0,
            total_queued_requests=sample.queued,
            capacity_adjusted_min_replicas=config.min_replicas,
            capacity_adjusted_max_replicas=config.max_replicas,
            policy_state=tracked.state.policy_state,
            last_scale_up_time=tracked.state.last_up_at,
            last_scale_down_time=tracked.state.last_down_at,
            current_time=now,
            samples=msgspec.convert(list(tracked.samples), list[LoadPoint], from_attributes=True),
            deployment_id=DeploymentID(deployment, app),
            running_replicas=[replica.replica_tag for replica in replicas],
            aggregated_metrics=aggregate_stats(series, config.aggregation_function),
            raw_metrics={name: {r: list(p) for r, p in of.items()} for name, of in series.items()},
            config=config,
        )
        if config.policy.code:
            if self._programs is None:
                raise PolicyFailed("policies that came with programs are off in this controller")
            return await self._programs.run(tag, config.policy, replicas, context)
        return await self._policies.run(config.policy, backend.target.replica_config.app_dir, context)

    def _running(self, tag: BackendTag) -> list[Replica]:
        """Replicas that take requests, the oldest first."""
        replicas = self._term.checkpoint.get_replicas(tag).values()
        return sorted((r for r in replicas if r.state in ROUTED), key=lambda replica: replica.ordinal)

    def _apply(self, tag: BackendTag, tracked: _BackendState, decision: ScalingDecision, source: str) -> None:
        now = self._clock.now()
        known = self._term.autoscaling.get(tag)
        was_holding = known is not None and known.decision.verdict is ScalingDecisionKind.HELD
        is_holding = decision.verdict is ScalingDecisionKind.HELD
        if is_holding and not was_holding:
            self._term.notify([scaling_event(tag, decision.verdict, decision.why, now)])
        elif was_holding and not is_holding:
            message = f"follows the load again: {decision.why}"
            self._term.notify([scaling_event(tag, decision.verdict, message, now)])
        tracked.state = decision.state
        tracked.counts[decision.verdict.value] += 1
        self._term.autoscaling[tag] = ScalingStatus(
            decision=decision, decided_at=now, source=source, read_at=tracked.read_at
        )

    # -- waking --------------------------------------------------------------------------------------------------------

    def wake(self, message: Wake) -> None:
        """Requests wait for a backend: scale it up if it was scaled to zero, otherwise do nothing."""
        self._sync_backends()
        tag = BackendTag(message.backend_tag)
        tracked, backend = self._tracked.get(tag), self._term.checkpoint.backends.get(tag)
        if tracked is None or backend is None or backend.autoscaling is None:
            return
        inputs = self._inputs(backend)
        if inputs.num_running or inputs.num_replicas >= inputs.config.max_replicas:
            return
        decision = wake(inputs, max(message.waiting, 1), self._clock.now(), tracked.state)
        if decision.target <= inputs.num_replicas:
            return
        if inputs.num_replicas == 0:
            tracked.wakeups += 1
        self._apply(tag, tracked, decision, "")
        self._term.scale({tag: decision})


def _next_evaluation(now: float, interval_s: float) -> float:
    """The next multiple of the interval, so that backends with the same interval share one query."""
    return (math.floor(now / interval_s) + 1) * interval_s
