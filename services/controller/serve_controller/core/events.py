"""Events, derived from recorded changes, and their texts.

Because they follow from the changes alone, an event says what is durable, a decision need not remember to report
itself, and the same change always gives the same events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Reversible
from typing import Final

import msgspec

from serve_common.api.views import EventView, GoalStatus, GoalView
from serve_common.errors import BadField
from serve_common.names import (
    BackendTag,
    EndpointTag,
    GoalId,
    HostId,
    ReplicaTag,
    deployment_tag,
    parse_backend_tag,
)
from serve_common.protocol.subjects import backend_key, endpoint_key
from serve_common.values import truncate
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.goals import application_owned, host_owned
from serve_controller.core.objects import (
    Backend,
    BackendVersion,
    CheckpointObject,
    Goal,
    HostRecord,
    ObjectChanges,
    ObjectKind,
    ProxyRecord,
    Replica,
    ReplicaState,
    parse_number,
)
from serve_controller.core.observed import ObservedState
from serve_controller.core.rollouts.events import rollout_changes
from serve_controller.core.rollouts.record import Rollout
from serve_controller.core.transitions import WANTED
from serve_controller.core.views.hosts import view_goal

MESSAGE_LENGTH_MAX: Final = 500
GOAL: Final = "goal"
"""The kind of events of goals."""


def last_line(error: str) -> str:
    """The last line of a traceback."""
    lines = error.strip().splitlines()
    return lines[-1].strip() if lines else ""


def get_name(version: BackendVersion) -> str:
    """A version's name for people: the user's name for it, or its code version."""
    return version.version or str(version.code_version)


def host_changes(known: HostRecord | None, host: HostRecord) -> Iterator[tuple[str, str]]:
    """State and message of each event of a host."""
    if known is None:
        yield "known", "is heard of for the first time"
    was_draining = known is not None and known.draining
    if host.draining and not was_draining:
        yield "draining", "its replicas move to other hosts and none is placed there"
    elif was_draining and not host.draining:
        yield "undrained", "replicas are placed there again"


def backend_changes(
    known: Backend | None, backend: Backend, *, has_failed: bool
) -> Iterator[tuple[str, str]]:
    """State and message of each event of a backend; ``has_failed``: whether its goal failed by this change."""
    if known is None:
        return
    error = last_line(backend.last_error)
    is_same_aim = known.target == backend.target and known.goal_id == backend.goal_id
    if backend.start_failures > known.start_failures:
        allowed = backend.target.backend_config.max_constructor_retry_count
        count = f"{backend.start_failures} starts failed (a goal fails at {allowed})"
        yield "failing", f"version {get_name(backend.target)}: {count}: {error}"
    elif known.start_failures and not backend.start_failures and is_same_aim and not has_failed:
        yield "recovered", f"version {get_name(backend.target)} starts again"
    if backend.halted and not known.halted:
        yield "halted", f"nothing is started until the next deploy: {error}"
    if backend.retained is not None and backend.retained != known.retained:
        retained = f"replicas of version {get_name(backend.retained)} that serve are kept"
        yield "kept", f"version {get_name(backend.target)} is wanted again; {retained}: {error}"
    elif _was_rolled_back(known, backend):
        yield "went back", f"version {get_name(backend.target)} is put back: {error}"


def _was_rolled_back(known: Backend, backend: Backend) -> bool:
    """Whether the last good version was made the target again under the same goal, so not by a command."""
    if known.last_good is None or known.goal_id != backend.goal_id or known.target == backend.target:
        return False
    number = backend.target.config_version
    return msgspec.structs.replace(known.last_good, config_version=number) == backend.target


EVENTS_LIMIT_MAX: Final = 1000
"""Most events in one reply."""

_SortKey = tuple[int, str, int]
"""Sort key of an event among those of one change: rank of its kind, then name and number of its subject."""
_GOAL_STARTED, _HOST, _PROXY, _BACKEND, _REPLICA, _GOAL_ENDED = range(6)


def get_events(before: Checkpoint, after: Checkpoint, changes: ObjectChanges, now: float) -> list[EventView]:
    """Events of ``changes``, which lead from ``before`` to ``after``, in a deterministic order.

    New goals come first and ended goals last, so that the effects of a goal come between.
    """
    collector = _EventCollector(before, after, now)
    for value in changes.puts:
        collector.of_put(value)
    for kind, name in changes.deletes:
        collector.of_delete(kind, name)
    return collector.events()


def audit_event(now: float, *, verb: str, subject: str, principal: str, goal_id: GoalId | None) -> EventView:
    """The event of an accepted command; ``principal`` is unverified and shown as a claim."""
    message = truncate(f"{verb}, claimed by {principal}" if principal else verb, MESSAGE_LENGTH_MAX)
    return EventView(at=now, kind="audit", subject=subject, message=message, state=verb, goal_id=goal_id)


def conflict_event(now: float, kind: str, name: str) -> EventView:
    """The event of two processes that report as one host or proxy (``kind``). Their incarnations are secret."""
    message = f"another process reports as this {kind}; it is not believed while the one that was first lives"
    return EventView(at=now, kind=kind, subject=name, message=message, state="identity_conflict")


class _EventCollector:
    """Collects the events of one change."""

    def __init__(self, before: Checkpoint, after: Checkpoint, now: float) -> None:
        self._before = before
        self._after = after
        self._now = now
        self._num_wanted: dict[BackendTag, int] = {}
        """Counted once for each backend, however many replicas changed."""
        self._found: list[tuple[_SortKey, EventView]] = []

    def events(self) -> list[EventView]:
        """All events, in order."""
        return [event for _, event in sorted(self._found, key=lambda found: found[0])]

    def of_put(self, value: CheckpointObject) -> None:
        """Add the events of an object's new value."""
        match value:
            case Goal():
                self._goal(self._before.goals.get(value.goal_id), value)
            case HostRecord():
                for state, message in host_changes(self._before.hosts.get(value.host_id), value):
                    self._add((_HOST, value.host_id, 0), "host", state, message)
            case ProxyRecord():
                if value.proxy_id not in self._before.proxies:
                    self._add((_PROXY, value.proxy_id, 0), "proxy", "live", "is heard of: goals wait for it")
            case Backend():
                self._backend(self._before.backends.get(value.backend_tag), value)
            case Rollout():
                known_rollout = self._before.rollouts.get(value.backend_tag)
                for state, message in rollout_changes(known_rollout, value):
                    sort_key = (_BACKEND, value.backend_tag, 0)
                    self._add(sort_key, "rollout", state, message, goal_id=value.goal_id)
            case Replica():
                known = self._before.get_replicas(value.backend_tag).get(value.replica_tag)
                if known is None or known.state is not value.state:
                    self._replica(value, value.state, self._transition_text(known, value))
            case _:
                return

    def of_delete(self, kind: ObjectKind, name: str) -> None:
        """Add the events of an object's deletion."""
        if kind is ObjectKind.HOST:
            self._add((_HOST, name, 0), "host", "forgotten", "is lost, runs nothing and is forgotten")
        elif kind is ObjectKind.PROXY:
            self._add((_PROXY, name, 0), "proxy", "gone", "is silent or leaves: no goal waits for it")
        elif kind is ObjectKind.BACKEND:
            self._add((_BACKEND, name, 0), "backend", "deleted", "its last replica is gone")
        elif kind is ObjectKind.REPLICA:
            tag = ReplicaTag(name)
            replica = self._before.get_replicas(parse_backend_tag(tag)).get(tag)
            if replica is not None:
                self._replica(replica, ReplicaState.STOPPED, self._end_text(replica))

    def _goal(self, known: Goal | None, goal: Goal) -> None:
        about = f"{goal.kind.value} {goal.subject}".strip()
        number, status = parse_number(goal.goal_id), goal.status
        if known is None:
            sort_key = (_GOAL_STARTED, goal.goal_id, number)
            self._add(sort_key, "goal", GoalStatus.PENDING.value, about, goal_id=goal.goal_id)
        if status is not (GoalStatus.PENDING if known is None else known.status):
            line = last_line(goal.error)
            sort_key = (_GOAL_ENDED, goal.goal_id, number)
            self._add(
                sort_key, "goal", status.value, f"{about}: {line}" if line else about, goal_id=goal.goal_id
            )

    def _backend(self, known: Backend | None, backend: Backend) -> None:
        goal_id = backend.goal_id
        goal = self._after.goals.get(goal_id)
        has_failed = goal is not None and goal.status is GoalStatus.FAILED and goal_id in self._before.pending
        for state, message in backend_changes(known, backend, has_failed=has_failed):
            self._add((_BACKEND, backend.backend_tag, 0), "backend", state, message, goal_id=goal_id)

    def _replica(self, replica: Replica, state: ReplicaState, message: str) -> None:
        tag = replica.backend_tag
        backend = self._after.backends.get(tag) or self._before.backends.get(tag)
        goal_id = None if backend is None else backend.goal_id
        if goal_id is not None and goal_id not in self._before.pending and goal_id not in self._after.pending:
            goal_id = None  # the goal has ended: this event is no effect of it
        sort_key = (_REPLICA, tag, replica.ordinal)
        self._add(sort_key, "replica", state.value, message, goal_id=goal_id, subject=replica.replica_tag)

    def _add(
        self,
        sort_key: _SortKey,
        kind: str,
        state: str,
        message: str,
        *,
        goal_id: GoalId | None = None,
        subject: str | None = None,
    ) -> None:
        event = EventView(
            at=self._now,
            kind=kind,
            subject=sort_key[1] if subject is None else subject,
            message=truncate(message, MESSAGE_LENGTH_MAX),
            state=state,
            goal_id=goal_id,
        )
        # Goals are sorted by their numbers, not by their names.
        self._found.append(((sort_key[0], "" if kind == "goal" else sort_key[1], sort_key[2]), event))

    # -- texts -----------------------------------------------------------------------------------------------------

    def _transition_text(self, known: Replica | None, replica: Replica) -> str:
        """Text of a replica's transition from the state of ``known`` (None: it is new)."""
        was = None if known is None else known.state
        match replica.state:
            case ReplicaState.SHOULD_START:
                return replica.message or "waits for a host"
            case ReplicaState.STARTING:
                return f"starts on {replica.host_id}"
            case ReplicaState.RUNNING if was is ReplicaState.UPDATING:
                return f"runs with its new configuration on {replica.host_id}"
            case ReplicaState.RUNNING if was is ReplicaState.UNHEALTHY:
                return f"is healthy again on {replica.host_id}"
            case ReplicaState.RUNNING:
                return f"runs on {replica.host_id}"
            case ReplicaState.UPDATING:
                return f"is given a new configuration on {replica.host_id}"
            case ReplicaState.UNHEALTHY:
                return replica.message or f"its health check fails on {replica.host_id}"
            case ReplicaState.SHOULD_STOP:
                return f"is to stop: {replica.message or self._stop_reason(replica, was)}"
            case ReplicaState.STOPPING:
                return f"finishes what it has on {replica.host_id}"
            case ReplicaState.STOPPED:
                return "is gone"

    def _end_text(self, replica: Replica) -> str:
        """Text of a replica's end; ``replica`` is its last value."""
        if replica.state not in WANTED:
            return "has stopped"
        if replica.state is ReplicaState.SHOULD_START:
            return f"is not started: {self._stop_reason(replica, replica.state)}"
        ended = f"ended on {replica.host_id} while it was {replica.state.value}"
        known = self._before.backends.get(replica.backend_tag)
        backend = self._after.backends.get(replica.backend_tag)
        if known is not None and backend is not None and backend.start_failures > known.start_failures:
            return f"{ended}: {last_line(backend.last_error)}"
        return ended

    def _stop_reason(self, replica: Replica, was: ReplicaState | None) -> str:
        backend = self._after.backends.get(replica.backend_tag)
        host = None if replica.host_id is None else self._after.hosts.get(replica.host_id)
        if backend is None or backend.deleting:
            return f"{replica.backend_tag} is deleted"
        if backend.halted:
            return f"{replica.backend_tag} is halted"
        if host is not None and host.draining:
            return f"the host {host.host_id} is drained"
        if replica.code_version != backend.target.code_version:
            versions = backend.versions()
            old = next((v for v in versions if v.code_version == replica.code_version), None)
            former = str(replica.code_version) if old is None else get_name(old)
            return f"version {former} is replaced by {get_name(backend.target)}"
        if was is ReplicaState.UNHEALTHY:
            return "its health check fails"
        if self._count_wanted(replica.backend_tag) >= backend.num_wanted:
            return f"{backend.num_wanted} replicas are wanted"
        return "another one is started in its place"

    def _count_wanted(self, tag: BackendTag) -> int:
        if tag not in self._num_wanted:
            replicas = self._after.get_replicas(tag).values()
            self._num_wanted[tag] = sum(replica.state in WANTED for replica in replicas)
        return self._num_wanted[tag]


def goal_event(view: GoalView, now: float) -> EventView:
    """The event that says how a goal is now, with its whole error."""
    message = view.error or view.message
    return EventView(
        at=now,
        kind=GOAL,
        subject=view.goal_id,
        message=message,
        state=view.status.value,
        goal_id=view.goal_id,
    )


def goal_progress(
    checkpoint: Checkpoint,
    observed: ObservedState,
    goal_ids: Iterable[GoalId],
    last_messages: Mapping[GoalId, str],
) -> list[GoalView]:
    """Views of the goals whose message differs from ``last_messages``, in the order of their numbers.

    Ended and forgotten goals are left out: their end is an event by itself. Messages are truncated as in events.
    """
    views = []
    for goal_id in sorted(set(goal_ids), key=parse_number):
        if goal_id not in checkpoint.pending:
            continue
        view = view_goal(checkpoint, observed, goal_id)
        view = msgspec.structs.replace(view, message=truncate(view.message, MESSAGE_LENGTH_MAX))
        if view.message != last_messages.get(goal_id):
            views.append(view)
    return views


def latest_events(
    events: Reversible[EventView], checkpoint: Checkpoint, limit: int, subject: str | None
) -> list[EventView]:
    """The newest ``limit`` events about ``subject`` (None: about any), the oldest first.

    An event about a replica is also about its backend, and one about a goal is also about the objects that the goal
    owns, as long as the goal is retained.
    """
    is_meant = _about(subject, checkpoint) if subject is not None else (lambda _: True)
    found: list[EventView] = []
    for event in reversed(events):
        if len(found) >= limit:
            break
        if is_meant(event):
            found.append(event)
    return found[::-1]


def _about(subject: str, checkpoint: Checkpoint) -> Callable[[EventView], bool]:
    names, owned = {subject}, {application_owned(subject), host_owned(HostId(subject))}
    try:
        tag = deployment_tag(subject)
    except BadField:
        pass  # a replica's tag, say
    else:
        names.add(tag)
        owned |= {backend_key(tag), endpoint_key(EndpointTag(tag))}

    def is_meant(event: EventView) -> bool:
        if event.subject in names or event.goal_id == subject:
            return True
        if event.kind == "replica":
            return parse_backend_tag(ReplicaTag(event.subject)) in names
        if event.kind == "goal":
            goal = checkpoint.goals.get(GoalId(event.subject))
            return goal is not None and (goal.subject in names or not owned.isdisjoint(goal.owns))
        return False

    return is_meant
