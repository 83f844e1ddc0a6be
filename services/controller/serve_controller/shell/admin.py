"""Commands and queries as they come from the bus: JSON in, JSON or an error out.

Why apart from NATS: what is accepted and how errors read is the same for every way in, and is tested without a bus.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Reversible
from typing import Final, Protocol, TypeAlias

import msgspec

from serve_common.errors import BadField, FencedOut, NotLeading
from serve_common.limits import shown
from serve_common.names import BackendTag, GoalId, deployment_tag
from serve_common.ports import Clock
from serve_common.wires import queries as q
from serve_common.wires.admin import COMMANDS, WHO_LENGTH_MAX
from serve_common.wires.commands import AnyCommand, CommandReply, Request
from serve_common.wires.views import (
    EventView,
    GoalStatus,
    GoalView,
    HistoryView,
    LoadView,
    PlanView,
    StatusView,
)
from serve_controller.core import views
from serve_controller.core.autoscaling.asks import targets_of
from serve_controller.core.autoscaling.values import ScalingStatus, Targets
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.commands import decide
from serve_controller.core.events import EVENTS_LIMIT_MAX, latest_events
from serve_controller.core.forecast import forecast
from serve_controller.core.observed import ObservedState
from serve_controller.core.views.paging import checked_limit
from serve_controller.shell.boundary import Boundary
from serve_controller.shell.goal_waits import GoalWaits
from serve_controller.shell.requests import error_view, parse_request

__all__ = ["Admin", "LeadingTerm", "error_view", "parse_request"]

ReadLoad: TypeAlias = Callable[[Targets, float], Awaitable[LoadView]]
"""Scrapes all of the targets, by the time that is given, and sums up."""
HISTORY_LIMIT_MAX: Final = 500
HISTORY_ID_MAX: Final = 2**63 - 1


class LeadingTerm(Protocol):
    """What is asked of a term: `shell.term.Term`."""

    @property
    def epoch(self) -> int:
        """Of this leader."""
        ...

    @property
    def checkpoint(self) -> Checkpoint:
        """As it was last recorded."""
        ...

    @property
    def observed(self) -> ObservedState:
        """As it was last heard."""
        ...

    @property
    def autoscaling(self) -> Mapping[BackendTag, ScalingStatus]:
        """What the autoscaler found last."""
        ...

    @property
    def is_store_available(self) -> bool:
        """Whether Postgres answered last."""
        ...

    @property
    def events(self) -> Reversible[EventView]:
        """What happened lately, the newest last."""
        ...

    async def execute(self, command: AnyCommand, request: bytes, who: str) -> CommandReply:
        """Decide and record a command."""
        ...

    async def read_history(self, limit: int, subject: str | None, before: int | None) -> list[HistoryView]:
        """Entries of the audit log, the newest first. Raises `StoreUnavailable`."""
        ...

    @property
    def on_change(self) -> Callable[[], None]:
        """Called when a plan should be made soon."""
        ...


class Admin:
    """Answers every verb from the current term."""

    def __init__(
        self,
        controller_id: str,
        clock: Clock,
        boundary: Boundary,
        current_term: Callable[[], LeadingTerm | None],
        read_load: ReadLoad | None = None,
    ) -> None:
        """``current_term`` gives the term while this controller leads; replies to commands cross ``boundary``.

        ``read_load`` scrapes all services; None: this controller cannot.
        """
        self._controller_id = controller_id
        self._clock = clock
        self._boundary = boundary
        self._current_term = current_term
        self._read_load = read_load
        self._waits = GoalWaits()
        self._seen = _GoalViews()

    def on_goals(self, goal_ids: Collection[GoalId]) -> None:
        """These goals changed, as recorded: let those who wait for one of them look again."""
        self._waits.wake(goal_ids)

    def on_term_end(self) -> None:
        """Nothing more will be heard of any goal: who waits must ask the next leader. Also after a checkpoint was
        read anew, when any goal may have changed."""
        self._seen = _GoalViews()
        self._waits.wake_all()

    async def answer(self, verb: str, payload: bytes, who: str = "") -> bytes:
        """The reply as JSON. Raises a `ServeError` for everything that a caller can understand.

        ``who`` is what the caller says of itself, for the audit log.
        """
        request = parse_request(verb, payload)
        term = self._term()
        if isinstance(request, AnyCommand):
            return await self._command(term, request, payload, who[:WHO_LENGTH_MAX])
        return msgspec.json.encode(await self._query(term, request))

    def _term(self) -> LeadingTerm:
        term = self._current_term()
        if term is None:
            raise NotLeading("this controller does not lead; try again")
        return term

    async def _command(self, term: LeadingTerm, command: AnyCommand, payload: bytes, who: str) -> bytes:
        async def encoded() -> bytes:
            return msgspec.json.encode(reply)

        try:
            reply = await term.execute(command, payload, who)
            return await self._boundary.cross("reply", encoded)
        except FencedOut as error:
            # The fence wrote nothing; to a caller this is a change of leader like any other.
            term.on_change()
            raise NotLeading(f"this controller leads no more ({error}); try again") from error

    async def _query(self, term: LeadingTerm, query: Request) -> object:
        match query:
            case q.WaitForGoal():
                return await self._wait_for_goal(query)
            case q.GetHistory():
                return await _history(term, query)
            case q.GetLoad():
                return await self._load(term)
            case q.Plan():
                return self._plan(term, query)
            case q.GetEvents():
                limit = checked_limit(query.limit, EVENTS_LIMIT_MAX)
                return latest_events(term.events, term.checkpoint, limit, query.subject)
            case q.GetStatus():
                return self._status(term, query)
            case q.PagedQuery():
                return self._list(term, query)
            case _:
                return _single(term.checkpoint, query)

    def _list(self, term: LeadingTerm, query: q.PagedQuery) -> object:
        checkpoint, now = term.checkpoint, self._clock.now()
        match query:
            case q.ListDeployments():
                return views.view_deployments(checkpoint, query, include_deleted=query.include_deleted)
            case q.GetAllApplications():
                return views.view_applications(checkpoint, query)
            case q.GetAllBackends():
                return views.view_backends(checkpoint, query)
            case q.GetAllEndpoints():
                return views.view_endpoints(checkpoint, query)
            case q.GetHttpProxies():
                return views.view_proxies(term.observed, now, query)
            case q.GetHosts():
                return views.view_hosts(checkpoint, term.observed, now, query)
            case q.GetAutoscaling():
                return views.view_autoscaling(checkpoint, term.autoscaling, now, query)
            case q.GetSnapshot():
                return views.view_snapshot(checkpoint, query)
            case _:
                raise AssertionError(f"{type(query).__name__} is no query")

    def _status(self, term: LeadingTerm, query: q.GetStatus) -> StatusView:
        checkpoint, now = term.checkpoint, self._clock.now()
        return StatusView(
            controller_id=self._controller_id,
            epoch=term.epoch,
            store_available=term.is_store_available,
            snapshot_id=checkpoint.counters.snapshot,
            deployments=views.view_deployments(checkpoint, with_replicas=query.replicas)
            if query.deployments
            else [],
            hosts=views.view_hosts(checkpoint, term.observed, now),
            proxies=views.view_proxies(term.observed, now),
            autoscaling=views.view_autoscaling(checkpoint, term.autoscaling, now)
            if query.deployments
            else [],
        )

    async def _load(self, term: LeadingTerm) -> LoadView:
        if self._read_load is None:
            raise NotLeading("this controller scrapes nobody")
        return await self._read_load(targets_of(term.observed, self._clock.now()), self._clock.now())

    def _plan(self, term: LeadingTerm, query: q.Plan) -> PlanView:
        if query.verb not in COMMANDS:
            raise BadField(
                "verb", f"{query.verb[:40]!r} changes nothing; it must be one of {', '.join(COMMANDS)}"
            )
        command = parse_request(query.verb, bytes(query.request))
        assert isinstance(command, AnyCommand)
        checkpoint, now = term.checkpoint, self._clock.now()
        accepted = decide(checkpoint, command, now)
        if not accepted.changes:
            return PlanView(
                updating=False, replicas=[], notes=["everything is as asked, or will be by a goal"]
            )
        return forecast(checkpoint, checkpoint.applied(accepted.changes), term.observed, now)

    async def _wait_for_goal(self, request: q.WaitForGoal) -> GoalView:
        if not 0 <= request.timeout_s <= q.WAIT_TIMEOUT_S_MAX:
            raise BadField(
                "timeout_s",
                f"is {shown(request.timeout_s)}; it must be between 0 and {q.WAIT_TIMEOUT_S_MAX:g}",
            )
        try:
            async with asyncio.timeout(request.timeout_s):
                while request.goal_id in self._term().checkpoint.pending:
                    await self._waits.changed(request.goal_id)
        except TimeoutError:
            pass  # it is answered with what is known now
        term = self._term()
        return self._seen.view(term.checkpoint, term.observed, request.goal_id)


class _GoalViews:
    """Views of pending goals, kept while nothing changes: a thousand may give up waiting for one goal at once."""

    def __init__(self) -> None:
        self._of: tuple[Checkpoint, ObservedState] | None = None
        self._views: dict[GoalId, GoalView] = {}

    def view(self, checkpoint: Checkpoint, observed: ObservedState, goal_id: GoalId) -> GoalView:
        """See `views.view_goal`."""
        if self._of is None or self._of[0] is not checkpoint or self._of[1] is not observed:
            self._of, self._views = (checkpoint, observed), {}
        view = self._views.get(goal_id)
        if view is None:
            view = views.view_goal(checkpoint, observed, goal_id)
            if view.status is GoalStatus.PENDING:
                self._views[goal_id] = view
        return view


async def _history(term: LeadingTerm, query: q.GetHistory) -> list[HistoryView]:
    limit = checked_limit(query.limit, HISTORY_LIMIT_MAX)
    if query.before is not None and not 1 <= query.before <= HISTORY_ID_MAX:
        raise BadField("before", "must be the id of an entry")
    subject = None if query.subject is None else _recorded_subject(term.checkpoint, query.subject)
    return await term.read_history(limit, subject, query.before)


def _recorded_subject(checkpoint: Checkpoint, subject: str) -> str:
    """The subject as commands are recorded with it: hosts and applications by their names, all else by its tag."""
    if subject in checkpoint.hosts or subject in checkpoint.applications:
        return subject
    return deployment_tag(subject, "subject")


def _single(checkpoint: Checkpoint, query: Request) -> object:
    match query:
        case q.GetDeploymentInfo():
            return views.view_deployment(checkpoint, query.name)
        case q.GetBackendConfig():
            return views.view_backend_config(checkpoint, query.backend_tag)
        case q.GetHttpConfig():
            return views.view_http_config(checkpoint)
        case q.GetRevisions():
            return views.view_revisions(checkpoint, query.name)
        case _:
            raise AssertionError(f"{type(query).__name__} is no query")
