"""Advances rollouts: their replicas, their steps, their judgement and their end.

One plan makes at most one move of a rollout; what it changes makes the next plan due at once. So each move is recorded
by itself, and a new leader goes on from the last one.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from serve_common.api.views import HEALTH_CHECKS_FAILED, GoalStatus
from serve_common.names import BackendTag, EndpointTag, ReplicaTag, parse_backend_tag
from serve_common.protocol.reports import EXAMPLES_MAX, RequestCounts
from serve_common.protocol.subjects import backend_key, endpoint_key
from serve_controller.core.checkpoint import Draft
from serve_controller.core.goals import (
    end_goal,
    fail,
    mark_backend_good,
    mark_endpoint_good,
    not_applied,
    pending_goal,
    replicas_missing,
)
from serve_controller.core.objects import Backend, GoalKind, ObjectKind, ReplicaState
from serve_controller.core.observed import HostStatus, ObservedState, holder_digest, host_status
from serve_controller.core.rollouts.closing import PAUSED_BY, abort, close_rollout
from serve_controller.core.rollouts.external import external_results
from serve_controller.core.rollouts.judge import (
    Gate,
    GateStatus,
    alpha_of_step,
    difference,
    get_status,
    new_gates,
    results,
    total,
    with_counts,
    with_recent,
    with_times,
)
from serve_controller.core.rollouts.promotion import promoted_version, put_endpoint, route_conflict
from serve_controller.core.rollouts.record import (
    PassedStep,
    Rollout,
    RolloutOutcome,
    RolloutState,
    baseline_share,
    baseline_tag,
    canary_tag,
)
from serve_controller.core.rollouts.starting import put_backends
from serve_controller.core.snapshots import is_renewed
from serve_controller.core.transitions import ROUTED
from serve_controller.core.versions import make_backend

JUDGE_EVERY_S: Final = 0.5
"""Seconds between two judgements. Where a block of requests ends must not depend on what is in it."""
_NO_COUNTS: Final = RequestCounts()


def advance_rollout(draft: Draft, observed: ObservedState, tag: BackendTag, now: float) -> float | None:
    """Make the next move of an active rollout, if it can; returns when it could by time alone, or None."""
    rollout = draft.rollouts[tag]
    backend = draft.backends.get(tag)
    if (backend is None or backend.deleting) and rollout.state is not RolloutState.CLOSING:
        close_rollout(draft, tag, RolloutOutcome.SUPERSEDED, f"{tag} was deleted", now)
        return None
    if rollout.state is RolloutState.CLOSING:
        if not _not_applied(draft, observed, rollout):
            _end(draft, rollout, now)
        return None
    assert backend is not None
    if not rollout.promoted_code_version and not _is_based_on(rollout, backend):
        close_rollout(draft, tag, RolloutOutcome.SUPERSEDED, f"another version of {tag} was deployed", now)
        return None
    if not rollout.has_backends:
        _take_over(draft, observed, rollout, backend)
        return rollout.started_at + rollout.config.deadline_s
    goal = draft.goals.get(rollout.goal_id)
    if goal is not None and goal.status is GoalStatus.FAILED:
        close_rollout(
            draft, tag, RolloutOutcome.SUPERSEDED, f"undone with its application: {goal.error[:300]}", now
        )
        return None
    rollout = _with_failures(draft, observed, rollout, now)
    canary = draft.backends.get(canary_tag(tag))
    wrong = _why_wrong(draft, rollout, backend, canary, now)
    if wrong:
        abort(draft, tag, wrong, now)
        return None
    deadline = rollout.started_at + rollout.config.deadline_s
    if rollout.state is RolloutState.PROMOTING:
        _promote(draft, observed, rollout, backend, now)
        return deadline
    at = _step(draft, observed, rollout, backend, now)
    return deadline if at is None else min(at, deadline)


def _is_based_on(rollout: Rollout, backend: Backend) -> bool:
    target = backend.target
    return (target.code_version, target.config_version) == (
        rollout.base_code_version,
        rollout.base_config_version,
    )


def _why_wrong(draft: Draft, rollout: Rollout, backend: Backend, canary: Backend | None, now: float) -> str:
    """Why the rollout must be aborted whatever its requests show; empty if nothing says so."""
    tag = rollout.backend_tag
    if canary is None or canary.deleting:
        return "the backend of its canary was deleted"
    # Without a baseline there is nothing to compare with, however long one waits.
    other = backend if rollout.state is RolloutState.PROMOTING else draft.backends.get(baseline_tag(tag))
    for one in (canary, canary if other is None else other):
        if one.start_failures >= one.target.backend_config.max_constructor_retry_count:
            is_old = one.backend_tag == baseline_tag(tag)
            hint = " (the old version is broken: deploy without a rollout)" if is_old else ""
            return f"{one.backend_tag} does not start{hint}: {one.last_error}"
    more = rollout.failures.get(canary_tag(tag), 0) - rollout.failures.get(baseline_tag(tag), 0)
    if more > rollout.config.max_replica_failures:
        return f"replicas: {more} more of the canary than of the baseline died or fell ill"
    target = backend.target
    if rollout.promoted_code_version and not rollout.is_promoted_to(
        target.code_version, target.config_version
    ):
        return f"{tag} went back to another version while it was promoted"
    if now >= rollout.started_at + rollout.config.deadline_s:
        return f"the deadline of {rollout.config.deadline_s:g} s was over before it was promoted: {rollout.reason}"
    return ""


def _with_failures(draft: Draft, observed: ObservedState, rollout: Rollout, now: float) -> Rollout:
    """Count the replicas of canary and baseline that were running and died or fell ill."""
    failures, running = dict(rollout.failures), []
    for tag in (canary_tag(rollout.backend_tag), baseline_tag(rollout.backend_tag)):
        replicas = draft.get_replicas(tag)
        for name in rollout.running:
            if parse_backend_tag(name) == tag and _has_failed(draft, observed, name, now):
                failures[tag] = failures.get(tag, 0) + 1
        running += sorted(name for name, replica in replicas.items() if replica.state in ROUTED)
    changed = msgspec.structs.replace(rollout, running=tuple(running), failures=failures)
    if changed != rollout:
        draft.put(changed)
    return changed


def _has_failed(draft: Draft, observed: ObservedState, name: ReplicaTag, now: float) -> bool:
    """Whether a replica that was running is ill or gone, though nobody stopped it and its host lives."""
    replica = draft.get_replicas(parse_backend_tag(name)).get(name)
    if replica is not None:
        is_ill = replica.message == HEALTH_CHECKS_FAILED and replica.state not in ROUTED
        return is_ill or replica.state is ReplicaState.UNHEALTHY
    before = draft.base.get_replicas(parse_backend_tag(name)).get(name)
    if before is None or before.state not in ROUTED or before.host_id is None:
        return False
    return host_status(observed, before.host_id, now) is HostStatus.LIVE


def _take_over(draft: Draft, observed: ObservedState, rollout: Rollout, backend: Backend) -> None:
    """Start canary and baseline once those of the rollout before are gone, with all requests that they had.

    So no request goes to a version by the weights of another one, and none of another one is evidence.
    """
    tags = (canary_tag(rollout.backend_tag), baseline_tag(rollout.backend_tag))
    left = [draft.backends[tag] for tag in tags if tag in draft.backends]
    serving = [one for one in left if not one.deleting]
    missing = ""
    if serving:
        missing = _not_applied(draft, observed, rollout)
        for one in () if missing else serving:
            draft.put(msgspec.structs.replace(one, deleting=True))
    if left:
        _set_reason(draft, rollout, missing or "the replicas of the rollout before stop")
        return
    draft.put(msgspec.structs.replace(rollout, has_backends=True, reason=""))
    put_backends(draft, rollout, backend)


# -- steps -------------------------------------------------------------------------------------------------------------


def _step(
    draft: Draft, observed: ObservedState, rollout: Rollout, backend: Backend, now: float
) -> float | None:
    if not rollout.is_in_force:
        _prepare(draft, observed, rollout, backend, now)
        return None
    if rollout.judged_step is None:
        return _last_step(draft, observed, rollout, backend, now)
    rollout, status, text = _judged(draft, observed, rollout, now)
    if status is GateStatus.FAILED:
        abort(draft, rollout.backend_tag, text, now)
        return None
    if rollout.skips_to_end:
        _go_to(draft, rollout, len(rollout.steps) - 1, "promoted by command", now)
        return None
    if rollout.state is RolloutState.PAUSED:
        _set_reason(draft, rollout, f"paused; {text}" if text else "paused")
        return None
    if rollout.approved:
        _go_to(draft, rollout, rollout.step + 1, "let go on by command", now)
        return None
    step, ends_at = rollout.steps[rollout.step], rollout.in_force_at + rollout.steps[rollout.step].hold_s
    if status is GateStatus.PASSED and now >= ends_at and not step.waits:
        _go_to(draft, rollout, rollout.step + 1, text, now)
        return None
    if status is GateStatus.PASSED:
        text = (
            "waits for a person: `muster rollout step`"
            if now >= ends_at
            else f"passed; lasts {step.hold_s:g} s"
        )
    _set_reason(draft, rollout, text)
    return ends_at if now < ends_at else None


def _prepare(draft: Draft, observed: ObservedState, rollout: Rollout, backend: Backend, now: float) -> None:
    """Start the replicas of a step, and let requests go by it once they serve."""
    if rollout.step > 0:
        # Until then requests go by the step before, whose evidence goes on.
        rollout, status, text = _judged(draft, observed, rollout, now)
        if status is GateStatus.FAILED:
            abort(draft, rollout.backend_tag, text, now)
            return
    _set_replicas(draft, rollout, backend)
    missing = "paused" if rollout.state is RolloutState.PAUSED else _not_ready(draft, observed, rollout)
    if missing:
        _set_reason(draft, rollout, missing)
        return
    draft.put(
        msgspec.structs.replace(
            rollout,
            is_in_force=True,
            in_force_at=now,
            approved=False,
            gates=new_gates(rollout.config, rollout.steps[rollout.step]),
            reason="",
        )
    )


def _go_to(draft: Draft, rollout: Rollout, step: int, why: str, now: float) -> None:
    seen = max((gate.worse.seen.canary for gate in rollout.gates), default=0)
    passed = PassedStep(step=str(rollout.steps[rollout.step]), passed_at=now, requests=seen, why=why)
    draft.put(
        msgspec.structs.replace(
            rollout, step=step, is_in_force=False, approved=False, passed=(*rollout.passed, passed), reason=""
        )
    )


def _set_reason(draft: Draft, rollout: Rollout, reason: str) -> None:
    if reason != rollout.reason:
        draft.put(msgspec.structs.replace(rollout, reason=reason))


def _set_replicas(draft: Draft, rollout: Rollout, backend: Backend) -> None:
    """Set how many replicas canary and baseline need for the step; those of the deployment stay."""
    step = rollout.steps[rollout.step]
    wanted = max(backend.num_wanted, 1)
    shares = {
        canary_tag(backend.backend_tag): step.share,
        baseline_tag(backend.backend_tag): baseline_share(step),
    }
    for tag, share in shares.items():
        one = draft.backends.get(tag)
        if one is None:
            continue
        # Never fewer than before: what runs is warm, and the next step needs it.
        number = max(math.ceil(share * wanted - 1e-9), one.target.backend_config.num_replicas)
        config = msgspec.structs.replace(one.target.backend_config, num_replicas=number)
        if config != one.target.backend_config:
            target = msgspec.structs.replace(one.target, backend_config=config)
            draft.put(msgspec.structs.replace(one, target=target))


def _not_ready(draft: Draft, observed: ObservedState, rollout: Rollout) -> str:
    """What is missing until requests may go as the step says; empty when nothing is."""
    for tag in (canary_tag(rollout.backend_tag), baseline_tag(rollout.backend_tag)):
        backend = draft.backends.get(tag)
        if backend is not None:
            missing = replicas_missing(draft, backend)
            if missing:
                return missing
    return _not_applied(draft, observed, rollout)


def _not_applied(draft: Draft, observed: ObservedState, rollout: Rollout) -> str:
    """Which snapshots of the rollout proxies have yet to apply; empty when every live one has all."""
    tags = (rollout.backend_tag, canary_tag(rollout.backend_tag), baseline_tag(rollout.backend_tag))
    endpoints = sorted(draft.used_by.get(rollout.backend_tag, {}))
    if not is_renewed(draft, tags, endpoints):
        return "a snapshot is yet to be made"
    keys = [*(backend_key(tag) for tag in tags), *(endpoint_key(tag) for tag in endpoints)]
    return not_applied(draft, observed, keys)


# -- judgement ---------------------------------------------------------------------------------------------------------


def _judged(
    draft: Draft, observed: ObservedState, rollout: Rollout, now: float
) -> tuple[Rollout, GateStatus, str]:
    """The rollout with the requests that have ended since it was last judged, its status, and why."""
    if now - rollout.judged_at >= JUDGE_EVERY_S:
        missing, counted, counted_by = _counts(draft, observed, rollout)
        if missing:
            return rollout, GateStatus.UNKNOWN, missing
        if counted != rollout.counted or counted_by != rollout.counted_by:
            gates, recent = _judge_counts(rollout, counted, set(counted_by))
            rollout = msgspec.structs.replace(
                rollout,
                gates=gates,
                counted=counted,
                counted_by=counted_by,
                recent_times=recent,
                differences=_differences(observed, rollout),
                judged_at=now,
            )
            draft.put(rollout)
    step = rollout.step if rollout.is_in_force else rollout.step - 1
    alpha = alpha_of_step(rollout.config, len(rollout.steps) - 1, step)
    found = results(rollout.gates, rollout.config, alpha)
    lines = [(result.status, f"{result.kind.value}: {result.text}") for result in found]
    external = external_results(rollout, observed, now)
    lines += [(result.status, f"{result.name}: {result.text}") for result in external]
    status = get_status({of for of, _ in lines})
    # Those that decide: the failed ones, those that are waited for, or all that passed.
    return rollout, status, "; ".join(text for of, text in lines if of is status)


def _judge_counts(
    rollout: Rollout, counted: dict[BackendTag, RequestCounts], counted_by: set[str]
) -> tuple[tuple[Gate, ...], dict[int, float]]:
    """The gates after what was counted since the last judgement, and the old version's recent times."""
    tag, recent = rollout.backend_tag, rollout.recent_times
    # Chosen from what was counted before, so that no request is judged by a time that it took part in.
    gates = with_times(rollout.gates, recent)
    if not set(rollout.counted_by) <= counted_by:
        # A process that had counted some of it is gone, and with it what it counted since.
        return gates, recent
    own, canary, baseline = (
        difference(counted[one], rollout.counted.get(one, _NO_COUNTS))
        for one in (tag, canary_tag(tag), baseline_tag(tag))
    )
    recent = with_recent(recent, own, baseline)
    if canary is None or baseline is None:
        return gates, recent
    return with_counts(gates, rollout.config, canary, baseline), recent


def _differences(observed: ObservedState, rollout: Rollout) -> tuple[str, ...]:
    """Examples of how the canary's responses differ: one for each path, as each proxy has its own."""
    canary, by_path = canary_tag(rollout.backend_tag), dict[str, str]()
    for proxy in observed.proxies.values():
        report = proxy.report
        if report.request_counts.get(canary, _NO_COUNTS).rollout_id == rollout.goal_id:
            for text in report.differences.get(canary, ()):
                by_path.setdefault(text.partition(": ")[0], text)
    return tuple(by_path.values())[:EXAMPLES_MAX]


def _counts(
    draft: Draft, observed: ObservedState, rollout: Rollout
) -> tuple[str, dict[BackendTag, RequestCounts], tuple[str, ...]]:
    """What is missing of the counts, or all of them, and who counted."""
    silent = sorted(proxy_id for proxy_id in draft.proxies if proxy_id not in observed.proxies)
    if silent:
        return f"waits for the counts of the proxy {silent[0]}", {}, ()
    tag = rollout.backend_tag
    parts: dict[BackendTag, list[RequestCounts]] = {tag: [], canary_tag(tag): [], baseline_tag(tag): []}
    counted_by = []
    for proxy in observed.proxies.values():
        known = proxy.report.request_counts
        own = [
            (one, known[one]) for one in parts if one in known and known[one].rollout_id == rollout.goal_id
        ]
        for one, counts in own:
            parts[one].append(counts)
        if own:
            counted_by.append(holder_digest(proxy.report))
    return "", {one: total(some) for one, some in parts.items()}, tuple(sorted(counted_by))


# -- the end -----------------------------------------------------------------------------------------------------------


def _last_step(
    draft: Draft, observed: ObservedState, rollout: Rollout, backend: Backend, now: float
) -> float | None:
    """All requests go to the canary; once that has lasted long enough, the deployment gets its version."""
    step = rollout.steps[-1]
    ends_at = rollout.in_force_at + step.hold_s
    external = [(one.status, f"{one.name}: {one.text}") for one in external_results(rollout, observed, now)]
    failed = "; ".join(text for status, text in external if status is GateStatus.FAILED)
    if failed:
        abort(draft, rollout.backend_tag, failed, now)
        return None
    if rollout.state is RolloutState.PAUSED:
        _set_reason(draft, rollout, "paused")
        return None
    missing = "; ".join(text for status, text in external if status is GateStatus.UNKNOWN)
    if missing and not (rollout.skips_to_end or rollout.approved):
        _set_reason(draft, rollout, missing)
        return None
    waits = step.waits and not rollout.approved
    if not rollout.skips_to_end and (now < ends_at or waits):
        _set_reason(
            draft, rollout, "waits for a person: `muster rollout step`" if now >= ends_at else "lasts"
        )
        return ends_at if now < ends_at else None
    missing = _not_applied(draft, observed, rollout)
    goal = pending_goal(draft, rollout.backend_tag)
    if not missing and goal is not None and goal.goal_id != rollout.goal_id:
        missing = f"waits for the end of {goal.goal_id}"
    if missing:
        _set_reason(draft, rollout, missing)
        return None
    conflict = route_conflict(draft, rollout)
    if conflict:
        abort(draft, rollout.backend_tag, conflict, now)
        return None
    promoted = make_backend(backend, rollout.backend_tag, rollout.goal_id, promoted_version(backend, rollout))
    paused = promoted.autoscaling_paused
    if promoted.target.backend_config.autoscaling_config is not None:
        paused = paused or PAUSED_BY  # its own replicas have no load yet
    draft.put(msgspec.structs.replace(promoted, autoscaling_paused=paused))
    put_endpoint(draft, rollout)
    keeps_code = promoted.target.code_version == backend.target.code_version
    draft.put(
        msgspec.structs.replace(
            rollout,
            state=RolloutState.PROMOTING,
            promoted_code_version=promoted.target.code_version,
            promoted_config_version=promoted.target.config_version if keeps_code else 0,
            pauses_autoscaling=rollout.pauses_autoscaling or paused == PAUSED_BY,
            reason="the deployment's own replicas are replaced",
        )
    )
    return None


def _promote(draft: Draft, observed: ObservedState, rollout: Rollout, backend: Backend, now: float) -> None:
    """Once the deployment's own replicas all run the new version, they get the requests back."""
    missing = replicas_missing(draft, backend) or _not_applied(draft, observed, rollout)
    if missing:
        _set_reason(draft, rollout, missing)
        return
    goal = draft.pending.get(rollout.goal_id)
    if goal is not None and goal.kind is GoalKind.ROLLOUT:  # that of an application may still fail
        endpoint = draft.endpoints.get(EndpointTag(rollout.backend_tag))
        if endpoint is not None and rollout.deployed is not None:
            mark_endpoint_good(draft, endpoint, goal)
        mark_backend_good(draft, backend, goal, now)
    close_rollout(draft, rollout.backend_tag, RolloutOutcome.PROMOTED, "every step passed", now)


def _end(draft: Draft, rollout: Rollout, now: float) -> None:
    """Every proxy sends all requests to the deployment: what only the rollout needed goes."""
    tag = rollout.backend_tag
    is_aborted = rollout.outcome is RolloutOutcome.ABORTED
    keeps = is_aborted and rollout.config.keeps_failed and rollout.has_backends
    for one in (canary_tag(tag), baseline_tag(tag)):
        backend = draft.backends.get(one)
        if backend is not None and not backend.deleting and not (keeps and one == canary_tag(tag)):
            draft.put(msgspec.structs.replace(backend, deleting=True))
    if tag in draft.backends:
        draft.put(msgspec.structs.replace(rollout, state=RolloutState.ENDED, ended_at=now))
    else:
        draft.delete((ObjectKind.ROLLOUT, tag))
    goal = draft.pending.get(rollout.goal_id)
    if goal is None or rollout.outcome is not RolloutOutcome.ABORTED:
        return
    if goal.kind is GoalKind.APPLICATION:
        fail(draft, goal, rollout.reason, now, of=tag)
    else:
        end_goal(draft, goal, GoalStatus.FAILED, now, rollout.reason)
