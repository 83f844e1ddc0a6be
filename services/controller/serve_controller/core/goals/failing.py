"""What a failed goal leaves behind: what last succeeded is wanted again.

Why not simply the former state: replicas of the failed version may serve and hosts may have taken its configuration,
so the way back is a change like any other.
"""

from __future__ import annotations

import msgspec

from serve_common.names import BackendTag, EndpointTag
from serve_common.values.backend_config import OnFailure
from serve_common.wires.views import GoalStatus
from serve_controller.core.changes import Kind
from serve_controller.core.checkpoint import Draft
from serve_controller.core.goals.ending import ERROR_LENGTH_MAX, end_goal
from serve_controller.core.goals.scope import application_of, backends_of, endpoints_of, goal_at_stake
from serve_controller.core.objects import Backend, Goal, GoalKind
from serve_controller.core.transitions import ROUTED


def fail_if_hopeless(draft: Draft, backend: Backend, now: float) -> None:
    """Fail a pending change whose version could not be started as often as is allowed."""
    goal = goal_at_stake(draft, backend)
    if goal is None:
        return
    if backend.start_failures >= backend.target.backend_config.max_constructor_retry_count:
        fail(draft, goal, backend.last_error, now, of=backend.backend_tag)


def fail(draft: Draft, goal: Goal, error: str, now: float, of: BackendTag) -> None:
    """End a goal FAILED because of one backend; what last succeeded is wanted again, for all that it decides."""
    whole = goal.kind is GoalKind.APPLICATION
    end_goal(draft, goal, GoalStatus.FAILED, now, f"{of}: {error}" if whole else error)
    had_worked = _undo_application(draft, goal)
    for tag in backends_of(goal):
        backend = draft.backends.get(tag)
        if backend is None or backend.deleting:
            continue
        why = error if tag == of else f"undone with {of}, which failed"
        is_used = any(user != EndpointTag(tag) for user in draft.used_by.get(tag, {}))
        if backend.last_good is None and whole and had_worked and not is_used:
            draft.put(msgspec.structs.replace(backend, deleting=True, last_error=why))
            draft.delete((Kind.ENDPOINT, tag))
        else:
            _undo(draft, backend, why[-ERROR_LENGTH_MAX:], is_whole=whole)
    for endpoint_tag in endpoints_of(goal):
        _undo_endpoint(draft, endpoint_tag)


def _undo_application(draft: Draft, goal: Goal) -> bool:
    """Put back what an application was; whether it was anything."""
    application = application_of(draft, goal)
    if application is None:
        return False
    if application.last_good is None:
        target = msgspec.structs.replace(application.target, takes_over=None)
        draft.put(msgspec.structs.replace(application, target=target))
        return False
    good, parts = application.last_good, backends_of(goal)
    joined = [t for t in application.target.deployments if t not in good.deployments and t not in parts]
    target = msgspec.structs.replace(good, deployments=[*good.deployments, *joined])
    draft.put(msgspec.structs.replace(application, target=target))
    return True


def _undo_endpoint(draft: Draft, tag: EndpointTag) -> None:
    endpoint = draft.endpoints.get(tag)
    if endpoint is None or endpoint.last_good is None:
        return
    target = endpoint.last_good
    if endpoint.goal_id in draft.pending:  # some of it was set meanwhile, by a goal of its own
        target = endpoint.with_set_alone(target)
    draft.put(msgspec.structs.replace(endpoint, target=target))


def _undo(draft: Draft, backend: Backend, error: str, *, is_whole: bool) -> None:
    """Make what last succeeded the target again, or halt when nothing ever did."""
    if backend.last_good is None:
        draft.put(msgspec.structs.replace(backend, halted=True, last_error=error))
        return
    failed, target, newest_config = backend.target, backend.last_good, backend.newest_config_version
    if failed.config_version == target.config_version and failed == target:
        draft.put(msgspec.structs.replace(backend, start_failures=0, retry_at=0.0, last_error=error))
        return
    replicas = draft.replicas_of(backend.backend_tag).values()
    if any(
        r.code_version == target.code_version and r.config_version > target.config_version for r in replicas
    ):
        # Some took the failed configuration. Hosts apply only what rises, so the way back gets a new number.
        newest_config += 1
        target = msgspec.structs.replace(target, config_version=newest_config)
    keeps = not is_whole and failed.backend_config.on_failure is OnFailure.KEEP
    serves = any(r.state in ROUTED and r.config_version == failed.config_version for r in replicas)
    draft.put(
        msgspec.structs.replace(
            backend,
            target=target,
            last_good=target,
            kept=failed if keeps and serves else None,
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
    if record.last_good is None:
        draft.delete((Kind.HTTP, "options"))
    else:
        draft.put(msgspec.structs.replace(record, target=record.last_good))
