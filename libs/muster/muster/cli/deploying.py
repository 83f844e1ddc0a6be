"""One deploy from the request to its end, for `muster deploy` and for the example of `muster up` alike."""

from __future__ import annotations

import asyncio
from enum import Enum
from urllib.parse import urlsplit

import msgspec

from muster.cli.exit_codes import ExitCode
from muster.cli.output import Progress, short_name
from muster.cli.ports import AdminPort
from serve_common.errors import NotFound, ServeError
from serve_common.names import GoalId
from serve_common.wires.commands import Deploy
from serve_common.wires.views import DeploymentView, GoalStatus, GoalView, StatusView

_WILDCARDS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - compared with, not bound
_SERVING = frozenset({"running", "updating"})


class DeployResult(Enum):
    """How a deploy ended, as far as we waited."""

    UNCHANGED = "unchanged"
    ACCEPTED = "accepted"
    """Recorded; not waited for."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    PENDING = "pending"
    """The time to wait is over."""


EXIT_CODES = {
    DeployResult.UNCHANGED: ExitCode.OK,
    DeployResult.ACCEPTED: ExitCode.OK,
    DeployResult.SUCCEEDED: ExitCode.OK,
    DeployResult.FAILED: ExitCode.FAILED,
    DeployResult.SUPERSEDED: ExitCode.FAILED,
    DeployResult.PENDING: ExitCode.TIMED_OUT,
}
_ENDS = {
    GoalStatus.SUCCEEDED: DeployResult.SUCCEEDED,
    GoalStatus.FAILED: DeployResult.FAILED,
    GoalStatus.SUPERSEDED: DeployResult.SUPERSEDED,
    GoalStatus.PENDING: DeployResult.PENDING,
}


class DeployOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What is known at the end of a deploy."""

    result: DeployResult
    goal_id: GoalId | None
    error: str = ""
    """Of a failed one the user's traceback or the reason; of a superseded one what replaced it."""
    message: str = ""
    """Of a pending one: what it waits for."""
    took_s: float
    deployment: DeploymentView | None = None
    urls: list[str] = []
    """Where HTTP reaches it, when proxies told their addresses."""

    @property
    def exit_code(self) -> ExitCode:
        """For the end of the program."""
        return EXIT_CODES[self.result]


async def run_deploy(
    admin: AdminPort, request: Deploy, *, timeout_s: float, is_waiting: bool, host: str, progress: Progress
) -> DeployOutcome:
    """Deploy and wait. ``host`` stands for a proxy that listens on every address. Raises what the controller raises."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    reply = await admin.deploy(request)
    if not is_waiting:
        result = DeployResult.ACCEPTED if reply.updating else DeployResult.UNCHANGED
        return DeployOutcome(result=result, goal_id=reply.goal_id, took_s=loop.time() - begun)
    if not reply.updating:
        # Its goal says how an older change ended, which may have failed since; only one that is not over matters.
        deployment = await _deployment(admin, request.name)
        if deployment is None or deployment.goal_status is not GoalStatus.PENDING:
            return DeployOutcome(
                result=DeployResult.UNCHANGED,
                goal_id=reply.goal_id,
                took_s=loop.time() - begun,
                deployment=deployment,
                urls=await _urls(admin, deployment, host),
            )
    left_s = max(0.0, timeout_s - (loop.time() - begun))
    view = await admin.wait_for_goal(
        reply.goal_id, deadline_s=left_s, on_progress=lambda goal: show_progress(goal, progress)
    )
    deployment = await _deployment(admin, request.name)
    succeeded = view.status is GoalStatus.SUCCEEDED
    return DeployOutcome(
        result=_ENDS[view.status],
        goal_id=reply.goal_id,
        error=view.error,
        message=view.message,
        took_s=loop.time() - begun,
        deployment=deployment,
        urls=await _urls(admin, deployment, host) if succeeded else [],
    )


def show_progress(goal: GoalView, progress: Progress) -> None:
    """What a pending goal waits for."""
    if goal.status is GoalStatus.PENDING:
        progress.say(goal.message)


def describe(outcome: DeployOutcome, request: Deploy) -> list[str]:
    """The outcome in lines for people."""
    name = short_name(request.name)
    deployment = outcome.deployment
    match outcome.result:
        case DeployResult.UNCHANGED:
            state = "" if deployment is None else f"; it is {deployment.status.value}"
            lines = [f"nothing to do: {name} is already as given{state}"]
            if deployment is not None and deployment.message:
                lines.append(deployment.message)
        case DeployResult.ACCEPTED:
            lines = [f"accepted as {outcome.goal_id}; 'muster status {name}' shows how it goes"]
        case DeployResult.SUCCEEDED:
            lines = [f"{name} is deployed: {_serving(deployment)} ({outcome.took_s:.1f} s)"]
        case DeployResult.FAILED:
            lines = [f"error: {name} failed:", outcome.error.rstrip(), *_after_failure(outcome, request)]
        case DeployResult.SUPERSEDED:
            lines = [f"error: another change of {name} came after this one: {outcome.error}"]
        case DeployResult.PENDING:
            waits = f": {outcome.message}" if outcome.message else ""
            lines = [
                f"error: {name} was not ready after {outcome.took_s:.0f} s{waits}",
                f"It goes on; 'muster status {name}' shows how.",
            ]
    return [*lines, *(_curl(url, deployment) for url in outcome.urls)]


def _after_failure(outcome: DeployOutcome, request: Deploy) -> list[str]:
    name, deployment = short_name(request.name), outcome.deployment
    lines = []
    if "ModuleNotFoundError" in outcome.error and not request.replica_config.app_dir:
        lines.append("hint: --app-dir tells in which directory the replicas find the module")
    serving = [] if deployment is None else [r for r in deployment.replicas if r.state in _SERVING]
    if serving:
        version = f" (version {serving[0].version})" if serving[0].version else ""
        lines.append(f"What served before still serves: {len(serving)} {_replicas(len(serving))}{version}.")
    else:
        lines.append(f"Nothing serves {name}.")
    return lines


def _serving(deployment: DeploymentView | None) -> str:
    if deployment is None:
        return "done"
    count = sum(replica.state in _SERVING for replica in deployment.replicas)
    version = f", version {deployment.version}" if deployment.version else ""
    return f"{count} {_replicas(count)}{version}"


def _replicas(count: int) -> str:
    return "replica" if count == 1 else "replicas"


def _curl(url: str, deployment: DeploymentView | None) -> str:
    methods = [] if deployment is None else deployment.methods
    flag = "" if not methods or "GET" in methods else f"-X {methods[0]} "
    return f"  curl {flag}{url}"


async def _deployment(admin: AdminPort, name: str) -> DeploymentView | None:
    try:
        return await admin.get_deployment_info(name)
    except NotFound:
        return None


async def _urls(admin: AdminPort, deployment: DeploymentView | None, host: str) -> list[str]:
    if deployment is None or deployment.route_prefix is None:
        return []
    try:
        status = await admin.get_status()
    except ServeError:
        return []  # only a convenience: what was asked for is done
    return [f"{base}{deployment.route_prefix}" for base in proxy_urls(status, host)]


def proxy_urls(status: StatusView, host: str) -> list[str]:
    """The base URLs of the live proxies; ``host`` stands for those that listen on every address."""
    urls = []
    for proxy in status.proxies:
        split = urlsplit(f"//{proxy.address}")
        if proxy.status != "live" or not proxy.address or split.port is None:
            continue
        name = split.hostname or ""
        named = host if name in _WILDCARDS else name
        urls.append(f"http://{f'[{named}]' if ':' in named else named}:{split.port}")
    return sorted(set(urls))
