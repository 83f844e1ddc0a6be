"""What a pending goal still waits for, and what no waiting can bring.

Why as words: that nothing is missing and what is missing are one question, so who waits is told just what holds the
goal up.
"""

from __future__ import annotations

from serve_common.names import HostId
from serve_common.subjects import HTTP_KEY
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.goals.scope import backends_of, left_out_by
from serve_controller.core.objects import Backend, Goal, GoalKind, ReplicaState
from serve_controller.core.observed import ObservedState
from serve_controller.core.transitions import WANTED


def waits_for(draft: Checkpoint, observed: ObservedState, goal: Goal) -> str:
    """What a pending goal still waits for, for people; empty when it is reached."""
    left_out = left_out_by(draft, goal)
    for tag in backends_of(goal):
        backend = draft.backends.get(tag)
        if backend is None or backend.deleting:
            left = len(draft.replicas_of(tag))
            if left:
                stuck = sorted({r.message for r in draft.replicas_of(tag).values() if r.message})[:1]
                return "; ".join([f"{left} replicas of {tag} still stop", *stuck])
        elif tag not in left_out:
            message = _replicas_missing(draft, backend)
            if message:
                return message
    if goal.kind is GoalKind.DRAIN:
        message = _not_drained(draft, HostId(goal.subject))
        if message:
            return message
    return _not_applied(draft, observed, goal)


def _not_drained(draft: Checkpoint, host_id: HostId) -> str:
    left = draft.by_host.get(host_id)
    if not left:
        return ""
    backends = {r.backend_tag for r in left.values()}
    waiting = {r.message for tag in backends for r in draft.replicas_of(tag).values() if r.message}
    return "; ".join([f"{len(left)} replicas are still on it", *sorted(waiting)[:2]])


def _replicas_missing(draft: Checkpoint, backend: Backend) -> str:
    replicas = list(draft.replicas_of(backend.backend_tag).values())
    wanted, target, kept = backend.num_wanted, backend.target, backend.kept
    good = {v.config_version for v in (target, kept) if v is not None}
    ready = [r for r in replicas if r.state is ReplicaState.RUNNING and r.config_version in good]
    old = [
        r
        for r in replicas
        if r.state in WANTED and r.code_version != target.code_version and r.config_version not in good
    ]
    # One that still waits for a host is to take the place of one on a host that is drained: that has its own goal.
    placed = sum(r.state in WANTED and r.host_id is not None for r in replicas)
    if len(ready) == wanted and not old and placed == wanted:
        return ""
    name = target.version or str(target.code_version)
    parts = [f"{len(ready)} of {wanted} replicas of {backend.backend_tag} run version {name}"]
    if old:
        parts.append(f"{len(old)} of an older version still serve")
    waiting = sorted({r.message for r in replicas if r.message})
    parts += waiting[:2]
    if backend.start_failures and backend.last_error:
        parts.append(f"{backend.start_failures} starts failed: {backend.last_error.strip().splitlines()[-1]}")
    return "; ".join(parts)


def _not_applied(draft: Checkpoint, observed: ObservedState, goal: Goal) -> str:
    records = [draft.snapshots.get(key) for key in goal.owns]
    needed = max((r.snapshot.snapshot_id for r in records if r is not None), default=0)
    bucket = observed.bucket
    if bucket is None:
        return "waits for the bucket of snapshots"
    if any(r is not None and bucket.get(r.key, 0) < r.snapshot.snapshot_id for r in records):
        return f"snapshot {needed} is not published yet"
    behind = 0
    for proxy_id in draft.proxies:
        proxy = observed.proxies.get(proxy_id)
        behind += proxy is None or proxy.report.applied_snapshot_id < needed
    if behind:
        return f"{behind} proxies have not applied snapshot {needed} yet"
    return ""


def http_refusal(draft: Checkpoint, observed: ObservedState, goal: Goal) -> str:
    """Why a proxy cannot apply what a goal about the HTTP options asks for."""
    record = draft.snapshots.get(HTTP_KEY) if goal.kind is GoalKind.HTTP else None
    if record is None:
        return ""
    for proxy_id in sorted(draft.proxies):
        proxy = observed.proxies.get(proxy_id)
        report = None if proxy is None else proxy.report
        if report is not None and report.http_error_snapshot_id == record.snapshot.snapshot_id:
            return f"the proxy {proxy_id}: {report.http_error}"
    return ""
