"""One change from the command to its end: sent, waited for, and looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from urllib.parse import urlsplit

from muster.cli.intent import RESULT_OF, ChangeResult, Intent, Outcome
from muster.cli.output import Progress
from muster.cli.ports import AdminPort
from serve_common.errors import NotFound, ServeError
from serve_common.names import GoalId
from serve_common.wires.commands import Shutdown
from serve_common.wires.queries import GetDeploymentInfo
from serve_common.wires.views import DeploymentView, GoalStatus, GoalView, ProxyView

_WILDCARDS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - compared with, not bound


async def perform(
    admin: AdminPort, intent: Intent, *, timeout_s: float, is_waiting: bool, host: str, progress: Progress
) -> Outcome:
    """Change and wait. ``host`` stands for a proxy that listens on every address. Raises what the controller raises."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    goal_ids, updating = await _send(admin, intent)
    goal_id = goal_ids[-1] if goal_ids else None

    def passed_s() -> float:
        return loop.time() - begun

    if not is_waiting:
        result = ChangeResult.ACCEPTED if updating else ChangeResult.UNCHANGED
        return Outcome(result=result, goal_id=goal_id, goal_ids=goal_ids, took_s=passed_s())
    if not updating:
        # The goal of an older change: only one that is not over yet matters to whoever asks for the same.
        older = await _ended(admin, goal_ids)
        if older is None or older.status is not GoalStatus.PENDING:
            deployment = await _deployment(admin, intent)
            return Outcome(
                result=ChangeResult.UNCHANGED,
                goal_id=goal_id,
                goal_ids=goal_ids,
                error="" if older is None else older.error,
                took_s=passed_s(),
                deployment=deployment,
                urls=await _urls(admin, intent, host),
            )
    view: GoalView | None = None
    for each in goal_ids:
        left_s = max(0.0, timeout_s - passed_s())
        view = await admin.wait_for_goal(
            each, deadline_s=left_s, on_progress=lambda goal: show_progress(goal, progress)
        )
        if view.status is not GoalStatus.SUCCEEDED:
            break
    result = ChangeResult.SUCCEEDED if view is None else RESULT_OF[view.status]
    return Outcome(
        result=result,
        goal_id=goal_id if view is None else view.goal_id,
        goal_ids=goal_ids,
        error="" if view is None else view.error,
        message="" if view is None else view.message,
        took_s=passed_s(),
        deployment=await _deployment(admin, intent),
        urls=await _urls(admin, intent, host) if result is ChangeResult.SUCCEEDED else [],
    )


def show_progress(goal: GoalView, progress: Progress) -> None:
    """What a pending goal waits for."""
    if goal.status is GoalStatus.PENDING:
        progress.say(goal.message)


async def _send(admin: AdminPort, intent: Intent) -> tuple[list[GoalId], bool]:
    command = intent.command
    if isinstance(command, Shutdown):
        goal_ids = (await admin.shutdown(command)).goal_ids
        return goal_ids, bool(goal_ids)
    reply = await admin.change(command)
    return ([] if reply.goal_id is None else [reply.goal_id]), reply.updating


async def _ended(admin: AdminPort, goal_ids: Sequence[GoalId]) -> GoalView | None:
    for goal_id in goal_ids:
        try:
            return await admin.wait_for_goal(goal_id, deadline_s=0.0, on_progress=lambda _goal: None)
        except NotFound:
            return None  # ended so long ago that it is forgotten
    return None


async def _deployment(admin: AdminPort, intent: Intent) -> DeploymentView | None:
    if intent.deployment is None:
        return None
    try:
        return await admin.get_deployment_info(GetDeploymentInfo(name=intent.deployment))
    except NotFound:
        return None


async def _urls(admin: AdminPort, intent: Intent, host: str) -> list[str]:
    if intent.route is None:
        return []
    try:
        proxies = await admin.get_http_proxies()
    except ServeError:
        return []  # only a convenience: what was asked for is done
    return [f"{base}{intent.route}" for base in proxy_urls(proxies, host)]


def proxy_urls(proxies: Sequence[ProxyView], host: str) -> list[str]:
    """The base URLs of the live proxies; ``host`` stands for those that listen on every address."""
    urls = []
    for proxy in proxies:
        split = urlsplit(f"//{proxy.address}")
        if proxy.status != "live" or not proxy.address or split.port is None:
            continue
        name = split.hostname or ""
        named = host if name in _WILDCARDS else name
        urls.append(f"http://{f'[{named}]' if ':' in named else named}:{split.port}")
    return sorted(set(urls))
