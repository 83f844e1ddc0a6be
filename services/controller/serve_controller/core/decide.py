"""Commands: what a caller wants, turned into a new goal state or refused.

Why pure: the reply to a command is a promise, and a promise must depend on nothing but the checkpoint it was made
on. The shell records the changes before it replies.
"""

from __future__ import annotations

import msgspec

from serve_common.errors import BadField, Conflict, LimitReached
from serve_common.names import BackendTag, EndpointTag, GoalId, check_name, check_route, deployment_tag
from serve_common.values import METHODS, BackendConfig, check_backend_config, check_replica_config
from serve_common.wires.commands import ChangeReply, DeleteDeployment, Deploy
from serve_common.wires.views import GoalStatus
from serve_controller.core.checkpoint import Changes, Checkpoint, Draft, Kind
from serve_controller.core.objects import (
    Backend,
    BackendVersion,
    Endpoint,
    EndpointConfig,
    Goal,
    GoalKind,
)

NUM_BACKENDS_MAX = 10_000
GOALS_PENDING_MAX = 10_000

Command = Deploy | DeleteDeployment
CommandReply = ChangeReply | ChangeReply


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """What to record and then to answer. Empty changes: there was nothing to do."""

    changes: Changes
    reply: CommandReply
    subject: str
    """What the command was about, for the audit log."""
    goal_id: GoalId | None


def decide(checkpoint: Checkpoint, command: Command, now: float) -> Accepted:
    """Turn a command into a new goal state.

    Raises a `CommandRefused` (BadField, Conflict, LimitReached), which changes nothing. The same command again is
    accepted again: every command is idempotent.
    """
    match command:
        case Deploy():
            return _deploy(checkpoint, command, now)
        case DeleteDeployment():
            return _delete_deployment(checkpoint, command, now)


def _deploy(checkpoint: Checkpoint, command: Deploy, now: float) -> Accepted:
    tag = deployment_tag(command.name)
    _check_deploy(checkpoint, command, tag)
    existing = checkpoint.backends.get(tag)
    if existing is None and len(checkpoint.backends) >= NUM_BACKENDS_MAX:
        raise LimitReached(f"there are {NUM_BACKENDS_MAX} backends already")
    if command.request_id is not None:
        for goal in checkpoint.goals.values():
            if goal.request_id == command.request_id and goal.backend_tag == tag:
                return _nothing_to_do(tag, ChangeReply(goal_id=goal.goal_id, updating=True))
    config = EndpointConfig(
        route=None if command.route_prefix is None else check_route(command.route_prefix, "route_prefix"),
        methods=sorted(set(command.methods)),
        traffic={tag: 1.0},
    )
    endpoint = checkpoint.endpoints.get(EndpointTag(tag))
    if existing is not None and _is_same(checkpoint, existing, endpoint, command, config):
        return _nothing_to_do(tag, ChangeReply(goal_id=existing.goal_id, updating=False))

    draft = Draft(checkpoint)
    goal_id = _new_goal(draft, GoalKind.DEPLOY, tag, now, request_id=command.request_id)
    draft.put(
        _new_backend(tag, goal_id, command) if existing is None else _changed(existing, goal_id, command)
    )
    draft.put(
        Endpoint(
            endpoint_tag=EndpointTag(tag),
            target=config,
            last_good=None if endpoint is None else endpoint.last_good,
        )
    )
    return Accepted(
        changes=draft.changes(),
        reply=ChangeReply(goal_id=goal_id, updating=True),
        subject=tag,
        goal_id=goal_id,
    )


def _check_deploy(checkpoint: Checkpoint, command: Deploy, tag: BackendTag) -> None:
    check_backend_config(command.backend_config)
    check_replica_config(command.replica_config)
    if command.version is not None and not 0 < len(command.version) <= 200:
        raise BadField("version", "must have 1 to 200 characters")
    if command.request_id is not None:
        check_name(command.request_id, "request_id")
    if not command.methods:
        raise BadField("methods", "must not be empty")
    for index, method in enumerate(command.methods):
        if method not in METHODS:
            raise BadField(f"methods[{index}]", f"{method[:40]!r} is none of {', '.join(METHODS)}")
    if command.route_prefix is None:
        return
    route = check_route(command.route_prefix, "route_prefix")
    for other in checkpoint.endpoints.values():
        # A pending goal may still fail and take its endpoint's former route back, so that one is taken too.
        routes = {c.route for c in (other.target, other.last_good) if c is not None}
        if other.endpoint_tag != EndpointTag(tag) and route in routes:
            raise Conflict(f"route_prefix: {route!r} belongs to the endpoint {other.endpoint_tag!r}")


def _is_same(
    checkpoint: Checkpoint,
    existing: Backend,
    endpoint: Endpoint | None,
    command: Deploy,
    config: EndpointConfig,
) -> bool:
    target = existing.target
    goal = checkpoint.goals.get(existing.goal_id)
    if goal is not None and goal.status is GoalStatus.FAILED:
        # The newest goal is a failed attempt at something else: this command is not answered with its failure.
        return False
    return (
        command.version is not None
        and command.version == target.version
        and not existing.deleting
        and not existing.halted
        and target.replica_config == command.replica_config
        and target.backend_config == command.backend_config
        and endpoint is not None
        and endpoint.target == config
    )


def _nothing_to_do(tag: BackendTag, reply: CommandReply) -> Accepted:
    return Accepted(changes=Changes(), reply=reply, subject=tag, goal_id=None)


def _new_goal(draft: Draft, kind: GoalKind, tag: BackendTag, now: float, *, request_id: str | None) -> GoalId:
    """A pending goal; those of the same backend that were still pending end SUPERSEDED."""
    if sum(goal.status is GoalStatus.PENDING for goal in draft.goals.values()) >= GOALS_PENDING_MAX:
        raise LimitReached(f"{GOALS_PENDING_MAX} goals are pending already")
    goal_id = draft.next_goal_id()
    # Looked up by tag and not by the backend's newest goal: a delete's may outlive the backend's row.
    for former in [
        g for g in draft.goals.values() if g.backend_tag == tag and g.status is GoalStatus.PENDING
    ]:
        draft.put(
            msgspec.structs.replace(
                former, status=GoalStatus.SUPERSEDED, error=f"replaced by {goal_id}", finished_at=now
            )
        )
    draft.put(
        Goal(
            goal_id=goal_id,
            kind=kind,
            backend_tag=tag,
            status=GoalStatus.PENDING,
            created_at=now,
            request_id=request_id,
        )
    )
    return goal_id


def _new_backend(tag: BackendTag, goal_id: GoalId, command: Deploy) -> Backend:
    version = BackendVersion(
        code_version=1,
        config_version=1,
        version=command.version,
        replica_config=command.replica_config,
        backend_config=command.backend_config,
    )
    return Backend(
        backend_tag=tag,
        goal_id=goal_id,
        target=version,
        last_good=None,
        newest_code_version=1,
        newest_config_version=1,
    )


def _changed(existing: Backend, goal_id: GoalId, command: Deploy) -> Backend:
    target = existing.target
    same_code = (
        command.version is not None
        and command.version == target.version
        and command.replica_config == target.replica_config
        and not existing.halted
    )
    light = same_code and _replica_part(command.backend_config) == _replica_part(target.backend_config)
    newest_code = existing.newest_code_version + (0 if same_code else 1)
    newest_config = existing.newest_config_version + (0 if light else 1)
    version = BackendVersion(
        code_version=target.code_version if same_code else newest_code,
        config_version=target.config_version if light else newest_config,
        version=command.version,
        replica_config=command.replica_config,
        backend_config=command.backend_config,
    )
    others = existing.others if light else [*existing.others, target]
    last_good = existing.last_good
    if existing.deleting and last_good is not None:
        # It was given up: should the new version fail, what was deleted must not come back.
        others, last_good = [*others, last_good], None
    return msgspec.structs.replace(
        existing,
        goal_id=goal_id,
        target=version,
        last_good=last_good,
        others=others,
        newest_code_version=newest_code,
        newest_config_version=newest_config,
        deleting=False,
        halted=False,
        start_failures=0,
        last_error="",
        retry_at=0.0,
    )


def _replica_part(config: BackendConfig) -> BackendConfig:
    """The configuration less what no replica needs to hear of."""
    default = BackendConfig()
    return msgspec.structs.replace(
        config,
        num_replicas=default.num_replicas,
        max_queued_requests=default.max_queued_requests,
        max_constructor_retry_count=default.max_constructor_retry_count,
    )


def _delete_deployment(checkpoint: Checkpoint, command: DeleteDeployment, now: float) -> Accepted:
    tag = deployment_tag(command.name)
    existing = checkpoint.backends.get(tag)
    if existing is None:
        return _nothing_to_do(tag, ChangeReply(goal_id=None, updating=False))
    if existing.deleting:
        return _nothing_to_do(tag, ChangeReply(goal_id=existing.goal_id, updating=False))
    draft = Draft(checkpoint)
    goal_id = _new_goal(draft, GoalKind.DELETE, tag, now, request_id=None)
    draft.put(msgspec.structs.replace(existing, goal_id=goal_id, deleting=True))
    draft.delete((Kind.ENDPOINT, tag))
    return Accepted(changes=draft.changes(), reply=ChangeReply(goal_id=goal_id, updating=True), subject=tag, goal_id=goal_id)
