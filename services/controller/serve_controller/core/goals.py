"""Goals: what each one owns, what it waits for, and the effects of its success or failure.

A goal owns keys: a later goal that owns the first of them supersedes it, which must be found without a scan of all
goals.

A goal succeeds when its target runs *and* every live proxy has applied the snapshots of it, so that requests after a
successful deploy are served by the new version everywhere. A failed goal makes the last good version the target again:
the version that served before still serves, and its replicas are replaced when they die.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from serve_common.api.views import GoalStatus
from serve_common.config.backend import OnFailure
from serve_common.names import BackendTag, EndpointTag, GoalId, HostId
from serve_common.protocol.reports import ERROR_LENGTH_MAX
from serve_common.protocol.subjects import (
    BACKENDS,
    ENDPOINTS,
    HTTP_KEY,
    backend_key,
    endpoint_key,
    parse_key,
)
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.objects import (
    Application,
    Backend,
    BackendVersion,
    EndpointConfig,
    EndpointRecord,
    Goal,
    GoalKind,
    ObjectKind,
    ReplicaState,
    Revision,
    revision_name,
)
from serve_controller.core.observed import ObservedState
from serve_controller.core.rollouts.record import RolloutOutcome
from serve_controller.core.snapshots import move_route
from serve_controller.core.transitions import ROUTED, WANTED


def end_goal(draft: Draft, goal: Goal, status: GoalStatus, now: float, error: str = "") -> None:
    """Record a goal's end, of which there is exactly one; the retained part of a user's traceback is bounded."""
    assert goal.status is GoalStatus.PENDING, f"{goal.goal_id} ended already"
    draft.put(msgspec.structs.replace(goal, status=status, error=error[-ERROR_LENGTH_MAX:], finished_at=now))


def application_owned(name: str) -> str:
    """The key owned by a goal of a whole application."""
    return f"applications.{name}"


def build_failure_owned(name: str) -> str:
    """The key owned by the goal of a build that failed, which changes nothing that runs."""
    return f"build_failures.{name}"


def host_owned(host_id: HostId) -> str:
    """The key owned by a goal that drains a host."""
    return f"hosts.{host_id}"


def deployment_owned(tag: BackendTag) -> list[str]:
    """The keys owned by a goal of a deployment."""
    return [backend_key(tag), endpoint_key(EndpointTag(tag))]


def backend_keys(owns: Sequence[str]) -> set[str]:
    """The keys of backends among the keys that a goal owns."""
    return {key for key in owns if key.startswith(f"{BACKENDS}.")}


def owned_backends(goal: Goal) -> list[BackendTag]:
    """The backends that a goal owns."""
    return [BackendTag(parse_key(key)[1]) for key in goal.owns if key.startswith(f"{BACKENDS}.")]


def owned_endpoints(goal: Goal) -> list[EndpointTag]:
    """The endpoints that a goal owns."""
    return [EndpointTag(parse_key(key)[1]) for key in goal.owns if key.startswith(f"{ENDPOINTS}.")]


def pending_goal(draft: Checkpoint, tag: BackendTag) -> Goal | None:
    """The pending goal that owns a backend, if any; there is at most one."""
    for goal_id in sorted(draft.owners.get(backend_key(tag), {})):
        return draft.pending[goal_id]
    return None


def goal_failing_with(draft: Checkpoint, backend: Backend) -> Goal | None:
    """The pending goal that fails with this backend; None for a backend that is to be deleted anyway."""
    goal = pending_goal(draft, backend.backend_tag)
    if goal is None or backend.deleting or backend.backend_tag in deployments_removed_by(draft, goal):
        return None
    # A rollout is aborted instead, and its goal fails once no request goes to the new version.
    return None if goal.kind is GoalKind.ROLLOUT else goal


def owned_application(draft: Checkpoint, goal: Goal) -> Application | None:
    """The application that a goal changes as a whole, if any."""
    if goal.kind is not GoalKind.APPLICATION and goal.kind is not GoalKind.DELETE:
        return None
    application = draft.applications.get(goal.subject)
    is_about = application is not None and application_owned(application.name) in goal.owns
    return application if is_about else None


def deployments_removed_by(draft: Checkpoint, goal: Goal) -> list[BackendTag]:
    """Deployments that are deleted from an application when this goal is reached."""
    application = owned_application(draft, goal)
    if application is None or application.deleting:
        return []
    return [tag for tag in owned_backends(goal) if tag not in application.target.deployments]


def fail_after_retries(draft: Draft, backend: Backend, now: float) -> None:
    """Fail a pending change after ``max_constructor_retry_count`` failed starts."""
    goal = goal_failing_with(draft, backend)
    if goal is None:
        return
    if backend.start_failures >= backend.target.backend_config.max_constructor_retry_count:
        fail(draft, goal, backend.last_error, now, of=backend.backend_tag)


def fail(draft: Draft, goal: Goal, error: str, now: float, of: BackendTag) -> None:
    """End a goal FAILED because of one backend, and restore the last good state of everything the goal owns."""
    whole = goal.kind is GoalKind.APPLICATION
    end_goal(draft, goal, GoalStatus.FAILED, now, f"{of}: {error}" if whole else error)
    had_worked = _undo_application(draft, goal)
    for tag in owned_backends(goal):
        backend = draft.backends.get(tag)
        if backend is None or backend.deleting:
            continue
        reason = error if tag == of else f"undone with {of}, which failed"
        is_used = any(user != EndpointTag(tag) for user in draft.used_by.get(tag, {}))
        if backend.last_good is None and whole and had_worked and not is_used:
            draft.put(msgspec.structs.replace(backend, deleting=True, last_error=reason))
            draft.delete((ObjectKind.ENDPOINT, tag))
        else:
            undo_backend(draft, backend, reason[-ERROR_LENGTH_MAX:], is_whole=whole)
        rollout = draft.rollouts.get(tag)
        if (
            rollout is not None
            and rollout.goal_id == goal.goal_id
            and rollout.outcome is RolloutOutcome.PROMOTED
        ):
            why = f"every step passed; then: {reason}"[:ERROR_LENGTH_MAX]
            draft.put(msgspec.structs.replace(rollout, outcome=RolloutOutcome.SUPERSEDED, reason=why))
    for endpoint_tag in owned_endpoints(goal):
        undo_endpoint(draft, endpoint_tag)


def _undo_application(draft: Draft, goal: Goal) -> bool:
    """Restore an application's last good version; returns whether there was one."""
    application = owned_application(draft, goal)
    if application is None:
        return False
    if application.last_good is None:
        target = msgspec.structs.replace(application.target, takes_over=None)
        draft.put(msgspec.structs.replace(application, target=target))
        return False
    good, parts = application.last_good, owned_backends(goal)
    joined = [t for t in application.target.deployments if t not in good.deployments and t not in parts]
    target = msgspec.structs.replace(good, deployments=[*good.deployments, *joined])
    draft.put(msgspec.structs.replace(application, target=target))
    return True


def undo_endpoint(draft: Draft, tag: EndpointTag) -> None:
    """Make the last good configuration of an endpoint its target again, if there is one."""
    endpoint = draft.endpoints.get(tag)
    if endpoint is None or endpoint.last_good is None:
        return
    target = endpoint.last_good
    if endpoint.goal_id in draft.pending:  # some fields were set since, by a goal of the endpoint alone
        target = endpoint.with_set_alone(target)
    draft.put(msgspec.structs.replace(endpoint, target=target))


def undo_backend(draft: Draft, backend: Backend, error: str, *, is_whole: bool) -> None:
    """Make the last good version the target again, or halt the backend when there is none.

    This is a change like any other and not simply the former state: replicas of the failed version may serve, and hosts
    may have taken its configuration.
    """
    if backend.last_good is None:
        draft.put(msgspec.structs.replace(backend, halted=True, last_error=error))
        return
    failed, target, newest_config = backend.target, backend.last_good, backend.newest_config_version
    if failed.config_version == target.config_version and failed == target:
        draft.put(msgspec.structs.replace(backend, start_failures=0, retry_at=0.0, last_error=error))
        return
    replicas = draft.get_replicas(backend.backend_tag).values()
    if any(
        r.code_version == target.code_version and r.config_version > target.config_version for r in replicas
    ):
        # Some replicas took the failed configuration. Hosts apply only rising numbers, so the old one is renumbered.
        newest_config += 1
        target = msgspec.structs.replace(target, config_version=newest_config)
    keeps = not is_whole and failed.backend_config.on_failure is OnFailure.KEEP
    serves = any(r.state in ROUTED and r.config_version == failed.config_version for r in replicas)
    draft.put(
        msgspec.structs.replace(
            backend,
            target=target,
            last_good=target,
            retained=failed if keeps and serves else None,
            others=[*backend.others, failed, backend.last_good],
            newest_config_version=newest_config,
            start_failures=0,
            retry_at=0.0,
            last_error=error,
            autoscaling_paused=(
                "" if target.backend_config.autoscaling_config is None else backend.autoscaling_paused
            ),
        )
    )


def fail_http(draft: Draft, goal: Goal, error: str, now: float) -> None:
    end_goal(draft, goal, GoalStatus.FAILED, now, error)
    record = draft.http
    assert record is not None
    if record.last_good is None and not record.is_shut_down:
        draft.delete((ObjectKind.HTTP, "options"))
    else:
        draft.put(msgspec.structs.replace(record, target=record.last_good))


def waits_for(draft: Checkpoint, observed: ObservedState, goal: Goal) -> str:
    """What a pending goal still waits for, as text for people; empty when it is reached.

    Whether anything is missing and what is missing are one question, so the text names exactly what blocks the goal.
    """
    rollout = draft.rollouts.get(BackendTag(goal.subject)) if goal.kind is GoalKind.ROLLOUT else None
    if rollout is not None and rollout.is_active:
        return rollout.progress
    left_out = deployments_removed_by(draft, goal)
    for tag in owned_backends(goal):
        backend, rollout = draft.backends.get(tag), draft.rollouts.get(tag)
        if rollout is not None and rollout.is_active and rollout.goal_id == goal.goal_id:
            return f"{tag}: {rollout.progress}"
        if backend is None or backend.deleting:
            left = len(draft.get_replicas(tag))
            if left:
                stuck = sorted({r.message for r in draft.get_replicas(tag).values() if r.message})[:1]
                return "; ".join([f"{left} replicas of {tag} still stop", *stuck])
        elif tag not in left_out:
            message = replicas_missing(draft, backend)
            if message:
                return message
    if goal.kind is GoalKind.DRAIN:
        message = _not_drained(draft, HostId(goal.subject))
        if message:
            return message
    return not_applied(draft, observed, goal.owns)


def _not_drained(draft: Checkpoint, host_id: HostId) -> str:
    left = draft.by_host.get(host_id)
    if not left:
        return ""
    backends = {r.backend_tag for r in left.values()}
    waiting = {r.message for tag in backends for r in draft.get_replicas(tag).values() if r.message}
    return "; ".join([f"{len(left)} replicas are still on it", *sorted(waiting)[:2]])


def replicas_missing(draft: Checkpoint, backend: Backend) -> str:
    """What is missing until all wanted replicas run the target and no older one serves; empty when nothing is."""
    replicas = list(draft.get_replicas(backend.backend_tag).values())
    wanted, target, retained = backend.num_wanted, backend.target, backend.retained
    good = {v.config_version for v in (target, retained) if v is not None}
    ready = [r for r in replicas if r.state is ReplicaState.RUNNING and r.config_version in good]
    old = [
        r
        for r in replicas
        if r.state in WANTED and r.code_version != target.code_version and r.config_version not in good
    ]
    # A replica that still waits for a host replaces one on a drained host, which has a goal of its own.
    placed = sum(r.state in WANTED and r.host_id is not None for r in replicas)
    if len(ready) == wanted and not old and placed == wanted:
        return ""
    # A version without a name has only a number of ours, which tells its user nothing.
    name = f" version {target.version}" if target.version else ""
    parts = [f"{len(ready)} of {wanted} replicas of {backend.backend_tag} run{name}"]
    if old:
        parts.append(f"{len(old)} of an older version still serve")
    waiting = sorted({r.message for r in replicas if r.message})
    parts += waiting[:2]
    if backend.start_failures and backend.last_error:
        parts.append(f"{backend.start_failures} starts failed: {backend.last_error.strip().splitlines()[-1]}")
    return "; ".join(parts)


def not_applied(draft: Checkpoint, observed: ObservedState, keys: Iterable[str]) -> str:
    """Which of the recorded snapshots some live proxy has yet to apply; empty when all have."""
    records = [draft.snapshots.get(key) for key in keys]
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
        proxies = "one proxy has" if behind == 1 else f"{behind} proxies have"
        return f"{proxies} not applied snapshot {needed} yet"
    return ""


def http_refusal(draft: Checkpoint, observed: ObservedState, goal: Goal) -> str:
    """Why a proxy cannot apply the HTTP options of a goal; empty if none refused them."""
    record = draft.snapshots.get(HTTP_KEY) if goal.kind is GoalKind.HTTP else None
    if record is None:
        return ""
    for proxy_id in sorted(draft.proxies):
        proxy = observed.proxies.get(proxy_id)
        report = None if proxy is None else proxy.report
        if report is not None and report.http_error_snapshot_id == record.snapshot.snapshot_id:
            return f"the proxy {proxy_id}: {report.http_error}"
    return ""


REVISIONS_MAX = 10
"""Revisions retained for each backend; the oldest are deleted."""


def complete_reached_goals(
    draft: Draft, observed: ObservedState, goal_ids: Iterable[GoalId], now: float
) -> None:
    """End the pending goals that are reached: recorded, published and applied by every live proxy."""
    for goal_id in goal_ids:
        goal = draft.pending.get(goal_id)
        if goal is None:
            continue
        refusal = http_refusal(draft, observed, goal)
        if refusal:
            fail_http(draft, goal, refusal, now)
        elif waits_for(draft, observed, goal) == "":
            # One step after the other, each applied by every proxy: a removed deployment may have had the route.
            if move_route(draft, owned_application(draft, goal)) or _drop_left_out(draft, goal, now):
                continue
            end_goal(draft, goal, GoalStatus.SUCCEEDED, now)
            _mark_good(draft, goal, now)


def _drop_left_out(draft: Draft, goal: Goal, now: float) -> bool:
    """Delete the deployments that an application no longer has; returns whether there were any."""
    dropped = False
    for tag in deployments_removed_by(draft, goal):
        backend = draft.backends.get(tag)
        if backend is not None and not backend.deleting:
            draft.put(msgspec.structs.replace(backend, deleting=True))
            draft.delete((ObjectKind.ENDPOINT, tag))
            dropped = True
    if dropped:
        # From here on a failure restores nothing: the deleted deployments cannot come back.
        _mark_good(draft, goal, now)
    return dropped


def _mark_good(draft: Draft, goal: Goal, now: float) -> None:
    """Record the targets of a succeeded goal as last good.

    The last good version is stored beside the target: a later failure, or a user's rollback, goes back to it.
    """
    application = owned_application(draft, goal)
    if application is not None:
        _mark_application_good(draft, application, goal)
    elif goal.kind is GoalKind.DEPLOY:
        _mark_part_good(draft, BackendTag(goal.subject))
    for endpoint_tag in owned_endpoints(goal):
        endpoint = draft.endpoints.get(endpoint_tag)
        if endpoint is not None:
            mark_endpoint_good(draft, endpoint, goal)
    for tag in owned_backends(goal):
        backend = draft.backends.get(tag)
        if backend is not None and not backend.deleting:
            mark_backend_good(draft, backend, goal, now)
    if goal.kind is GoalKind.HTTP and draft.http is not None:
        draft.put(msgspec.structs.replace(draft.http, last_good=draft.http.target))


def _mark_application_good(draft: Draft, application: Application, goal: Goal) -> None:
    if application.deleting:
        draft.delete((ObjectKind.APPLICATION, application.name))
        return
    target, parts = application.target, owned_backends(goal)
    # A deployment that joined since has a goal of its own.
    good = msgspec.structs.replace(target, deployments=[t for t in target.deployments if t in parts])
    draft.put(msgspec.structs.replace(application, last_good=good))


def _mark_part_good(draft: Draft, tag: BackendTag) -> None:
    """Add a deployment that joined an application by its own goal to the application's last good version."""
    deployment = draft.deployments.get(tag)
    application = None if deployment is None else draft.applications.get(deployment.application)
    good = None if application is None else application.last_good
    if application is None or good is None or tag in good.deployments:
        return
    if tag in application.target.deployments:
        good = msgspec.structs.replace(good, deployments=sorted([*good.deployments, tag]))
        draft.put(msgspec.structs.replace(application, last_good=good))


def mark_endpoint_good(draft: Draft, endpoint: EndpointRecord, goal: Goal) -> None:
    """Record an endpoint's target as its last good configuration, as far as it is the goal's."""
    reached: EndpointConfig | None = endpoint.target
    if goal.kind is GoalKind.ROUTE and draft.owners.get(endpoint_key(endpoint.endpoint_tag)):
        # The other fields belong to a deploy that may still fail.
        last_good = endpoint.last_good
        reached = None if last_good is None else endpoint.with_set_alone(last_good)
    if endpoint.last_good != reached:
        draft.put(msgspec.structs.replace(endpoint, last_good=reached))


def mark_backend_good(draft: Draft, backend: Backend, goal: Goal, now: float) -> None:
    """Record a backend's target as its last good version, and as a revision where it is another one."""
    former, others = backend.last_good, backend.others
    replicas = draft.get_replicas(backend.backend_tag).values()
    if former is not None and any(r.config_version == former.config_version for r in replicas):
        # Its last replicas are still stopping: the resources that they occupy must remain known.
        others = [*others, former]
    endpoint = draft.endpoints.get(EndpointTag(backend.backend_tag))
    is_deployment = draft.living_deployment(backend.backend_tag) is not None
    reached = endpoint.target if endpoint is not None and is_deployment else None
    revision = backend.newest_revision
    if not _is_alike(former, backend.target) or _newest_endpoint(draft, backend) != reached:
        revision += 1
        draft.put(
            Revision(
                backend_tag=backend.backend_tag,
                revision=revision,
                at=now,
                goal_id=goal.goal_id,
                version=backend.target,
                endpoint=reached,
            )
        )
        for old in sorted(draft.revisions[backend.backend_tag])[:-REVISIONS_MAX]:
            draft.delete((ObjectKind.REVISION, revision_name(backend.backend_tag, old)))
    draft.put(
        msgspec.structs.replace(
            backend, last_good=backend.target, last_error="", others=others, newest_revision=revision
        )
    )


def _is_alike(former: BackendVersion | None, target: BackendVersion) -> bool:
    """Whether both are equal but for ``num_replicas``, which a rollback leaves unchanged."""
    if former is None:
        return False
    num_replicas = target.backend_config.num_replicas
    config = msgspec.structs.replace(former.backend_config, num_replicas=num_replicas)
    return msgspec.structs.replace(former, backend_config=config) == target


def _newest_endpoint(draft: Checkpoint, backend: Backend) -> EndpointConfig | None:
    revisions = draft.revisions.get(backend.backend_tag)
    newest = None if revisions is None else revisions.get(backend.newest_revision)
    return None if newest is None else newest.endpoint
