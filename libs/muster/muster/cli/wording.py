"""The end of a change in lines for people."""

from __future__ import annotations

from muster.cli.intent import ChangeResult, Intent, Outcome
from muster.cli.output import brief
from serve_common.wires.commands import Deploy
from serve_common.wires.views import DeploymentStatus, DeploymentView

_SERVING = frozenset({"running", "updating"})


def describe(outcome: Outcome, intent: Intent) -> list[str]:
    """What happened, and what to do next where that is known."""
    what, deployment = intent.what, outcome.deployment
    match outcome.result:
        case ChangeResult.UNCHANGED:
            state = "" if deployment is None else f"; it is {deployment.status.value}"
            lines = [f"nothing to do: {what} {intent.already}{state}"]
            if deployment is not None and deployment.message:
                lines.append(deployment.message)
            elif deployment is None and outcome.error:
                lines.append(f"note: its last change, {outcome.goal_id}, failed: {brief(outcome.error)}")
        case ChangeResult.ACCEPTED:
            lines = [f"accepted as {', '.join(outcome.goal_ids) or 'done'}; {_how_it_goes(intent)}"]
        case ChangeResult.SUCCEEDED:
            serving = "" if deployment is None else f": {_serving(deployment)}"
            lines = [f"{what} {intent.done}{serving} ({outcome.took_s:.1f} s)"]
        case ChangeResult.FAILED:
            lines = [f"error: {what}: the change failed:", outcome.error.rstrip()]
            lines += _after_failure(outcome, intent)
        case ChangeResult.SUPERSEDED:
            lines = [f"error: another change of {what} came after this one: {outcome.error}"]
        case ChangeResult.PENDING:
            waits = f": {outcome.message}" if outcome.message else ""
            lines = [
                f"error: {what}: not done after {outcome.took_s:.0f} s{waits}",
                f"It goes on; {_how_it_goes(intent)}, 'muster goal wait {outcome.goal_id}' waits for it.",
            ]
    return [*lines, *(_curl(url, intent) for url in outcome.urls)]


def _how_it_goes(intent: Intent) -> str:
    return f"'{intent.look}' shows how it goes"


def _after_failure(outcome: Outcome, intent: Intent) -> list[str]:
    lines = []
    command = intent.command
    if (
        isinstance(command, Deploy)
        and "ModuleNotFoundError" in outcome.error
        and not command.replica_config.app_dir
    ):
        lines.append("hint: --app-dir tells in which directory the replicas find the module")
    if intent.deployment is None:
        return lines
    deployment = outcome.deployment
    serving = [] if deployment is None else [r for r in deployment.replicas if r.state in _SERVING]
    if serving:
        version = f" (version {serving[0].version})" if serving[0].version else ""
        lines.append(f"What served before still serves: {_replicas(len(serving))}{version}.")
    elif deployment is not None and _is_at_zero(deployment):
        lines.append("What was there before is back, scaled to zero as it was.")
    else:
        lines.append(f"Nothing serves {intent.what}.")
    return lines


def _is_at_zero(deployment: DeploymentView) -> bool:
    is_well = deployment.status is DeploymentStatus.HEALTHY
    return is_well and deployment.backend_config.num_replicas == 0


def _serving(deployment: DeploymentView) -> str:
    count = sum(replica.state in _SERVING for replica in deployment.replicas)
    version = f", version {deployment.version}" if deployment.version else ""
    return f"{_replicas(count)}{version}"


def _replicas(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"


def _curl(url: str, intent: Intent) -> str:
    flag = "" if not intent.methods or "GET" in intent.methods else f"-X {intent.methods[0]} "
    return f"  curl {flag}{url}"
