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
from serve_common.config.autoscaling import AutoscalingContext, AutoscalingPolicy, LoadPoint, PolicyScope
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

    def hold(self, why: str) -> None:
        """Take the last sample for unknown, so that the number of replicas stays."""
        self.samples[-1] = msgspec.structs.replace(self.samples[-1], seen=None, burst=None, missing=why)


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
        groups = {tag: self._group(tag) for tag in self._tracked}
        due_groups = {groups[tag] for tag, tracked in self._tracked.items() if now >= tracked.evaluate_at}
        if not due_groups:
            return
        due = [tag for tag, group in groups.items() if group in due_groups]
        checkpoint, observed = self._term.checkpoint, self._term.observed
        requests = build_load_requests(checkpoint, observed, due, now)
        for request in requests:
            # As in Ray Serve, whose control loop calls a program's policy however rarely loads are measured.
            interval_s = TICK_S if request.config.policy.code else request.config.metrics_interval_s
            self._tracked[request.backend_tag].evaluate_at = _next_evaluation(now, interval_s)
        samples = await self._loads.read(requests, build_scrape_targets(observed, now), now)
        decisions: dict[BackendTag, ScalingDecision] = {}
        by_group: dict[tuple[str, str], dict[BackendTag, LoadSample]] = {}
        for tag, sample in samples.items():
            by_group.setdefault(groups[tag], {})[tag] = sample
        are_in_replicas = {
            groups[request.backend_tag]: bool(request.config.policy.code) for request in requests
        }
        policy_slots = asyncio.Semaphore(POLICIES_AT_ONCE)

        async def decide(group: tuple[str, str]) -> None:
            # What runs in replicas needs no process here, and must not make others wait when it hangs.
            async with contextlib.nullcontext() if are_in_replicas[group] else policy_slots:
                decisions.update(await self._decide(by_group[group]))

        async with asyncio.TaskGroup() as tasks:
            for group in by_group:
                tasks.create_task(decide(group), name=f"autoscale {group[0]}")
        self._term.scale(decisions)

    def _group(self, tag: BackendTag) -> tuple[str, str]:
        """What shares one call of a policy: a backend, or those of an application that have its policy."""
        config = self._term.checkpoint.backends[tag].autoscaling
        if config is None or config.policy.scope is PolicyScope.DEPLOYMENT:
            return tag, ""
        return tag.rpartition("/")[0], config.policy.code

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

    async def _decide(self, samples: Mapping[BackendTag, LoadSample]) -> dict[BackendTag, ScalingDecision]:
        """Decide on the backends of one group."""
        group: dict[BackendTag, _BackendState] = {}
        inputs: dict[BackendTag, ScalingInput] = {}
        for tag, sample in samples.items():
            tracked, backend = self._tracked.get(tag), self._term.checkpoint.backends.get(tag)
            if tracked is None or backend is None or backend.autoscaling is None:
                continue  # paused or deleted while the load was read
            self.samples[sample.source or "none", "missing" if sample.seen is None else "ok"] += 1
            tracked.samples.append(sample)
            if sample.seen is not None:
                tracked.read_at = sample.at
            group[tag], inputs[tag] = tracked, self._inputs(backend)
        if any(one.config.policy.policy_function for one in inputs.values()):
            inputs = await self._with_policy(group, inputs)
        decisions = {}
        for tag, one in inputs.items():
            tracked = group[tag]
            decided = decide_scaling(one, list(tracked.samples), tracked.state, self._clock.now())
            self._apply(tag, tracked, decided, samples[tag].source)
            decisions[tag] = decided
        return decisions

    async def _with_policy(
        self, group: Mapping[BackendTag, _BackendState], inputs: Mapping[BackendTag, ScalingInput]
    ) -> dict[BackendTag, ScalingInput]:
        """``inputs`` with what the policy of the group returns, without those whose number stays as it is."""
        policy = next(iter(inputs.values())).config.policy
        # Without replicas nothing evaluates a program's policy: requests wake them; those that start are waited for.
        if policy.code and not any(one.num_running for one in inputs.values()):
            for tag, one in inputs.items():
                if one.num_replicas:
                    group[tag].hold("its replicas are starting")
            return {
                tag: one
                for tag, one in inputs.items()
                if not one.num_replicas or one.num_replicas != within(one.num_replicas, one.config)
            }
        unknown = [tag for tag, tracked in group.items() if tracked.samples[-1].seen is None]
        if unknown:
            for tag in group.keys() - set(unknown):
                group[tag].hold(
                    f"the load of {unknown[0]} is not known: {group[unknown[0]].samples[-1].missing}"
                )
            return dict(inputs)
        try:
            results = await self._call_policy(policy, group, inputs)
        except PolicyFailed as error:
            _log.warning("policy_failed", backend_tags=sorted(group), error=str(error))
            for tag, tracked in group.items():
                # One that fails, or hangs, is not called every second.
                interval_s = inputs[tag].config.metrics_interval_s
                tracked.evaluate_at = _next_evaluation(self._clock.now(), interval_s)
                tracked.hold(f"the policy {policy.policy_function} failed: {last_line(str(error))[:300]}")
            return dict(inputs)
        return {
            tag: msgspec.structs.replace(
                inputs[tag], policy_target=result.num_replicas, new_policy_state=result.policy_state
            )
            for tag, result in results.items()
        }

    def _inputs(self, backend: Backend) -> ScalingInput:
        assert backend.autoscaling is not None
        return ScalingInput(
            config=backend.autoscaling,
            num_replicas=backend.num_wanted,
            num_running=num_running(self._term.checkpoint, backend.backend_tag),
        )

    async def _call_policy(
        self,
        policy: AutoscalingPolicy,
        group: Mapping[BackendTag, _BackendState],
        inputs: Mapping[BackendTag, ScalingInput],
    ) -> dict[BackendTag, PolicyResult]:
        backends = self._term.checkpoint.backends
        contexts = {tag: await self._context(tag, tracked, inputs[tag]) for tag, tracked in group.items()}
        if policy.code:
            if self._programs is None:
                raise PolicyFailed("policies that came with programs are off in this controller")
            replicas = sorted(
                (replica for tag in group for replica in self._running(tag)), key=lambda each: each.ordinal
            )
            if policy.scope is PolicyScope.APPLICATION:
                return await self._programs.run_application(policy, replicas, contexts)
            [(tag, context)] = contexts.items()
            return {tag: await self._programs.run(tag, policy, replicas, context)}
        [(tag, context)] = contexts.items()
        app_dir = backends[tag].target.replica_config.app_dir
        return {tag: await self._policies.run(policy, app_dir, context)}

    async def _context(
        self, tag: BackendTag, tracked: _BackendState, inputs: ScalingInput
    ) -> AutoscalingContext:
        config, sample, now = inputs.config, tracked.samples[-1], self._clock.now()
        app, _, deployment = tag.rpartition("/")
        replicas = self._running(tag)
        series = {} if self._programs is None else await self._programs.record(tag, replicas, config, now)
        return AutoscalingContext(
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
