"""When a goal ends, and what its end leaves behind.

A goal succeeds when what it asked for runs *and* every live proxy has applied the snapshots that say so, so what
follows a successful deploy is served by the new version everywhere. A failed one puts back what last succeeded:
the version that served before still serves, and keeps being replaced when its replicas die.
"""

from __future__ import annotations

import msgspec

from serve_common.names import BackendTag, EndpointTag, GoalId
from serve_common.subjects import backend_key, endpoint_key
from serve_common.wires.views import GoalStatus
from serve_controller.core.checkpoint import Draft, Kind
from serve_controller.core.objects import Backend, Goal, GoalKind, ReplicaState
from serve_controller.core.observed import ObservedState
from serve_controller.core.transitions import WANTED

FINISHED_KEPT_S = 86_400.0
"""A finished goal can be asked for at least a day."""
FINISHED_KEPT_MAX = 5_000
"""Beyond this many, the oldest finished goals are forgotten also before that; their ids still tell that they ended."""
ERROR_LENGTH_MAX = 8_000


def end_goal(draft: Draft, goal: Goal, status: GoalStatus, now: float, error: str = "") -> None:
    """Record a goal's end; a goal ends exactly once."""
    assert goal.status is GoalStatus.PENDING, f"{goal.goal_id} ended already"
    draft.put(msgspec.structs.replace(goal, status=status, error=error[-ERROR_LENGTH_MAX:], finished_at=now))


def pending_goal(draft: Draft, backend: Backend) -> Goal | None:
    """The backend's goal while it is pending."""
    goal = draft.goals.get(backend.goal_id)
    return goal if goal is not None and goal.status is GoalStatus.PENDING else None


def fail_if_hopeless(draft: Draft, backend: Backend, now: float) -> None:
    """Fail a pending deploy whose version could not be started as often as is allowed."""
    goal = pending_goal(draft, backend)
    if goal is None or goal.kind is not GoalKind.DEPLOY:
        return
    allowed = backend.target.backend_config.max_constructor_retry_count
    if backend.start_failures >= allowed:
        fail(draft, backend, goal, backend.last_error, now)


def fail(draft: Draft, backend: Backend, goal: Goal, error: str, now: float) -> None:
    """End a deploy FAILED and put back what last succeeded, or halt when nothing ever did."""
    end_goal(draft, goal, GoalStatus.FAILED, now, error)
    endpoint = draft.endpoints.get(EndpointTag(backend.backend_tag))
    if backend.last_good is None:
        draft.put(msgspec.structs.replace(backend, halted=True, last_error=error[-ERROR_LENGTH_MAX:]))
        return
    target, newest_config = backend.last_good, backend.newest_config_version
    replicas = draft.replicas.get(backend.backend_tag, {}).values()
    if any(
        r.code_version == target.code_version and r.config_version > target.config_version for r in replicas
    ):
        # Some took the failed configuration. Hosts apply only what rises, so the way back gets a new number.
        newest_config += 1
        target = msgspec.structs.replace(target, config_version=newest_config)
    draft.put(
        msgspec.structs.replace(
            backend,
            target=target,
            last_good=target,
            others=[*backend.others, backend.target, backend.last_good],
            newest_config_version=newest_config,
            start_failures=0,
            retry_at=0.0,
            last_error=error[-ERROR_LENGTH_MAX:],
        )
    )
    if endpoint is not None and endpoint.last_good is not None:
        draft.put(msgspec.structs.replace(endpoint, target=endpoint.last_good))


def succeed_where_reached(draft: Draft, observed: ObservedState, now: float) -> None:
    """End every pending goal that is reached, as recorded, published and applied by every live proxy."""
    for goal in [g for g in draft.goals.values() if g.status is GoalStatus.PENDING]:
        if waits_for(draft, observed, goal) == "":
            end_goal(draft, goal, GoalStatus.SUCCEEDED, now)
            backend = draft.backends.get(goal.backend_tag)
            if goal.kind is GoalKind.DEPLOY and backend is not None:
                draft.put(_proven(draft, backend))
                endpoint = draft.endpoints.get(EndpointTag(goal.backend_tag))
                if endpoint is not None:
                    draft.put(msgspec.structs.replace(endpoint, last_good=endpoint.target))


def _proven(draft: Draft, backend: Backend) -> Backend:
    """The backend with its target as what last succeeded."""
    former, others = backend.last_good, backend.others
    replicas = draft.replicas.get(backend.backend_tag, {}).values()
    if former is not None and any(r.config_version == former.config_version for r in replicas):
        # Its last replicas still stop: what they hold of their hosts must not be forgotten.
        others = [*others, former]
    return msgspec.structs.replace(backend, last_good=backend.target, last_error="", others=others)


def waits_for(draft: Draft, observed: ObservedState, goal: Goal) -> str:
    """What a pending goal still waits for, for people; empty when it is reached."""
    backend = draft.backends.get(goal.backend_tag)
    if goal.kind is GoalKind.DELETE:
        left = len(draft.replicas.get(goal.backend_tag, {}))
        if left:
            return f"{left} replicas still stop"
    elif backend is not None:
        message = _replicas_missing(draft, backend)
        if message:
            return message
    return _not_applied(draft, observed, goal.backend_tag)


def _replicas_missing(draft: Draft, backend: Backend) -> str:
    replicas = list(draft.replicas.get(backend.backend_tag, {}).values())
    wanted, target = backend.num_wanted, backend.target
    ready = [
        r for r in replicas if r.state is ReplicaState.RUNNING and r.config_version == target.config_version
    ]
    old = [r for r in replicas if r.state in WANTED and r.code_version != target.code_version]
    if len(ready) == wanted and not old and sum(r.state in WANTED for r in replicas) == wanted:
        return ""
    parts = [f"{len(ready)} of {wanted} replicas run version {target.version or target.code_version}"]
    if old:
        parts.append(f"{len(old)} of an older version still serve")
    waiting = sorted({r.message for r in replicas if r.message})
    parts += waiting[:2]
    if backend.start_failures and backend.last_error:
        parts.append(f"{backend.start_failures} starts failed: {backend.last_error.strip().splitlines()[-1]}")
    return "; ".join(parts)


def _not_applied(draft: Draft, observed: ObservedState, tag: BackendTag) -> str:
    records = [draft.snapshots.get(key) for key in (endpoint_key(EndpointTag(tag)), backend_key(tag))]
    needed = max((r.snapshot.snapshot_id for r in records if r is not None), default=0)
    bucket = observed.bucket
    if bucket is None:
        return "waits for the bucket of snapshots"
    if any(r is not None and bucket.get(r.key, 0) < r.snapshot.snapshot_id for r in records):
        return f"snapshot {needed} is not published yet"
    applied = {i: p.report.applied_snapshot_id for i, p in observed.proxies.items()}
    behind = [proxy_id for proxy_id in draft.proxies if applied.get(proxy_id, 0) < needed]
    if behind:
        return f"{len(behind)} proxies have not applied snapshot {needed} yet"
    return ""


def forget_finished(draft: Draft, now: float) -> None:
    """Bound the number of finished goals; a backend's newest goal is always kept."""
    newest = {backend.goal_id for backend in draft.backends.values()}
    finished = sorted(
        (g for g in draft.goals.values() if g.finished_at is not None and g.goal_id not in newest),
        key=lambda g: (g.finished_at or 0.0, number_of(g.goal_id)),
    )
    surplus = len(finished) - FINISHED_KEPT_MAX
    for index, goal in enumerate(finished):
        if index < surplus or now - (goal.finished_at or now) > 2 * FINISHED_KEPT_S:
            draft.delete((Kind.GOAL, goal.goal_id))


def number_of(goal_id: GoalId) -> int:
    """The number in a goal's id; 0 for what is no goal id."""
    digits = goal_id.removeprefix("g")
    return (
        int(digits)
        if goal_id.startswith("g") and digits.isascii() and digits.isdigit() and len(digits) < 19
        else 0
    )
