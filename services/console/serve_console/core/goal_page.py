"""What the page of a goal shows: what it waits for, the replicas that it is about, how it ended and what to do next."""

from __future__ import annotations

import re
from typing import Final, Literal
from urllib.parse import quote

import msgspec

from serve_common.api.views import DeploymentView, GoalStatus, GoalView, HistoryView
from serve_common.names import GoalId, short_name
from serve_console.core.change_kinds import CHANGES
from serve_console.core.now_page import RUNNING_STATES, Dot
from serve_console.core.plain_text import clean_text
from serve_console.core.system import System

GOAL_ID_LENGTH_MAX: Final = 100
_GOAL_ID: Final = re.compile(r"\bg\d+\b")
_DOTS_MAX: Final = 400

GoalPart = Literal["pending", "succeeded", "failed", "superseded", "aborted"]


class GoalSubject(msgspec.Struct, frozen=True, kw_only=True):
    """The change that made a goal."""

    verb: str
    """Empty: not known."""
    name: str
    """Full name, tag or id of the object; empty: not known, or none."""
    at: float
    """When it was accepted, in seconds since 1970; 0: not known."""
    by: str
    """The person's name; empty: not known."""


class GoalLink(msgspec.Struct, frozen=True):
    """Somewhere to go next."""

    label: str
    href: str
    verb: str = ""
    """The command that it leads to, which the role must allow; empty: none."""


class GoalReplicas(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of one deployment."""

    name: str
    title: str
    running: int
    wanted: int
    version: str
    dots: list[Dot]
    wrong: str


class GoalPage(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is shown."""

    goal_id: str
    state: GoalPart
    headline: str
    message: str
    """PENDING: what it waits for; otherwise what that means."""
    traceback: str
    """Why it failed; empty: it did not."""
    replaced_by: str
    """SUPERSEDED: the goal that replaced it."""
    trouble: str
    """Why the progress may be old; empty: it is not."""
    replicas: list[GoalReplicas]
    links: list[GoalLink]

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state != "pending"


def find_subject(goal_id: GoalId, history: list[HistoryView], system: System) -> GoalSubject | None:
    """The change of a goal, from the history or from what it last changed."""
    for entry in reversed(history):  # the oldest is the one that made it
        if entry.goal_id == goal_id:
            return GoalSubject(verb=entry.verb, name=entry.subject, at=entry.at, by=entry.principal)
    for view in system.deployments:
        if view.goal_id == goal_id:
            return GoalSubject(verb="", name=view.name, at=0.0, by="")
    for application in system.applications.values():
        if application.goal_id == goal_id:
            return GoalSubject(verb="deploy_application", name=application.name, at=0.0, by="")
    return None


def describe_change(subject: GoalSubject | None) -> str:
    """The change as a heading, such as ``Scale digits``."""
    if subject is None:
        return "Change"
    kind = CHANGES.get(subject.verb)
    if kind is not None:
        return kind.heading(short_name(subject.name))
    title = subject.verb.replace("_", " ").capitalize() or "Change of"
    return f"{title} {short_name(subject.name)}".strip()


def build_goal_page(goal: GoalView, subject: GoalSubject | None, system: System, trouble: str) -> GoalPage:
    """The page of a goal."""
    views = _find_deployments(subject, system)
    state = _find_state(goal, subject, system)
    error = clean_text(goal.error).strip()
    message = clean_text(goal.message)
    if state == "pending":
        message = message or "Waiting for its first report."
    elif state == "succeeded":
        message = "Every proxy has applied it."
    elif state == "failed":
        message = _describe_serving(views)
    elif state == "superseded":
        message = "A later change of the same object replaced it before it ended."
    elif state == "aborted":
        message = "All requests go to the old version again."
    replaced_by = _GOAL_ID.search(error) if state == "superseded" else None
    return GoalPage(
        goal_id=goal.goal_id,
        state=state,
        headline=_HEADLINES[state],
        message=message,
        traceback=error if state in {"failed", "aborted"} else "",
        replaced_by="" if replaced_by is None else replaced_by[0],
        trouble=trouble,
        replicas=[_build_replicas(view, system) for view in views],
        links=_build_links(goal.goal_id, state, subject, views),
    )


_HEADLINES: Final = {
    "pending": "Under way",
    "succeeded": "Done",
    "failed": "Failed",
    "superseded": "Replaced by a later change",
    "aborted": "Aborted",
}


def _find_state(goal: GoalView, subject: GoalSubject | None, system: System) -> GoalPart:
    if goal.status is GoalStatus.FAILED and subject is not None:
        rollout = system.rollouts.get(subject.name)
        if rollout is not None and rollout.goal_id == goal.goal_id and rollout.outcome == "aborted":
            return "aborted"
    states: dict[GoalStatus, GoalPart] = {
        GoalStatus.PENDING: "pending",
        GoalStatus.SUCCEEDED: "succeeded",
        GoalStatus.FAILED: "failed",
        GoalStatus.SUPERSEDED: "superseded",
    }
    return states[goal.status]


def _find_deployments(subject: GoalSubject | None, system: System) -> list[DeploymentView]:
    if subject is None or not subject.name:
        return []
    found = system.find_deployment(subject.name)
    if found is not None:
        return [found]
    return [view for view in system.deployments if view.application == subject.name]


def _describe_serving(views: list[DeploymentView]) -> str:
    """What requests meet after a failure."""
    for view in views:
        serving = [replica for replica in view.replicas if replica.state in RUNNING_STATES]
        if serving:
            versions = sorted({replica.version or "unversioned" for replica in serving})
            count = len(serving)
            return (
                f"{short_name(view.name)} goes on serving: {count} {'replica' if count == 1 else 'replicas'} of "
                f"version {' and '.join(versions)}."
            )
    if views:
        return "Nothing of it serves requests."
    return "Nothing else was changed."


def _build_replicas(view: DeploymentView, system: System) -> GoalReplicas:
    scaled = system.autoscaling.get(view.name)
    wrong = next((replica.message for replica in view.replicas if replica.message), "")
    return GoalReplicas(
        name=view.name,
        title=short_name(view.name),
        running=sum(replica.state in RUNNING_STATES for replica in view.replicas),
        wanted=view.backend_config.num_replicas if scaled is None else scaled.num_replicas,
        version=view.version or "",
        dots=[Dot(short_name(replica.replica_tag), replica.state) for replica in view.replicas[:_DOTS_MAX]],
        wrong=clean_text(wrong.strip()).splitlines()[-1][:300] if wrong.strip() else "",
    )


def _build_links(
    goal_id: str, state: GoalPart, subject: GoalSubject | None, views: list[DeploymentView]
) -> list[GoalLink]:
    links: list[GoalLink] = []
    if len(views) == 1:
        name = quote(views[0].name)
        if state in {"failed", "aborted"}:
            again = f"&goal={quote(goal_id)}" if subject is not None and subject.verb == "deploy" else ""
            links.append(GoalLink("Change and deploy again", f"/deploy?name={name}{again}", "deploy"))
            links.append(GoalLink("Roll back", f"/do/rollback?name={name}", "rollback"))
        links.append(GoalLink(f"Open {short_name(views[0].name)}", f"/deployments/{name}"))
        if state == "succeeded" and subject is not None and subject.verb in {"deploy", "rollback"}:
            links.append(GoalLink("Try it", f"/try?name={name}"))
        if subject is not None and subject.verb in {"start_rollout", "control_rollout"}:
            links.append(GoalLink("Watch the rollout", f"/rollouts/{name}"))
    if subject is not None and subject.verb in {"drain_host", "undrain_host"}:
        links.append(GoalLink("Hosts", "/hosts"))
    if subject is not None and subject.name:
        links.append(GoalLink("Its events", f"/events?subject={quote(subject.name)}"))
    return links
