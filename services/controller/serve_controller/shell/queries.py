"""Read-only queries, answered from the state of the term.

A response is no promise: nothing is recorded before it is sent, and no fence guards it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any, Final, TypeAlias

import msgspec

from serve_common.api import queries as q
from serve_common.api.commands import Command, Request
from serve_common.api.queries import COMMANDS, VERBS
from serve_common.api.views import ErrorView, HistoryView, LoadView, PlanView, StatusView
from serve_common.clock import Clock
from serve_common.errors import BadField, NotLeading, ServeError
from serve_common.names import deployment_tag
from serve_common.protocol.subjects import UNREADABLE
from serve_controller.core.autoscaling.values import Targets, build_scrape_targets
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.commands import decide
from serve_controller.core.events import EVENTS_LIMIT_MAX, latest_events
from serve_controller.core.forecast import forecast
from serve_controller.core.views import backends, deployments, hosts, rollouts
from serve_controller.core.views.hosts import checked_limit
from serve_controller.shell.control_loop import Term

_AT_PATH: Final = re.compile(r" - at `\$?\.?(?P<path>[^`]*)`$")
_OF_FIELD: Final = re.compile(
    r"^Object (contains unknown|missing required) field `(?P<name>[^`]*)`", re.DOTALL
)


def parse_request(verb: str, payload: bytes) -> Request[Any]:
    """Decode the request in ``payload``. Raises `BadField` with the path of the invalid field.

    An empty payload means ``{}`` for queries only. A client that may not send commands could have an empty message
    published on its behalf (by JetStream, say), so a command must have a body.

    A `Plan` contains a request, and both are refused with the same messages.
    """
    request_type = VERBS[verb]
    if not payload.strip() and verb in COMMANDS:
        raise BadField("request", f"is empty; {verb} needs a JSON object{_required(request_type)}")
    try:
        request: Request[Any] = msgspec.json.decode(payload or b"{}", type=request_type)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _AT_PATH.search(text)
        text = _AT_PATH.sub("", text)
        named = _OF_FIELD.match(text)
        path = [] if found is None or not found["path"] else [found["path"]]
        path += [] if named is None else [named["name"]]
        # The message repeats parts of the request, so it is cut.
        raise BadField(".".join(path)[:200] or "request", text[:300]) from error
    except UNREADABLE as error:
        raise BadField("request", f"is not JSON: {error}") from error
    return request


def _required(request_type: type[Request[Any]]) -> str:
    names = [field.encode_name for field in msgspec.structs.fields(request_type) if field.required]
    return f" with {', '.join(names)}" if names else ""


def error_view(error: ServeError) -> ErrorView:
    """Convert an error to its form on the wire."""
    field = error.field if isinstance(error, BadField) else ""
    return ErrorView(code=error.error_code, message=str(error), field=field)


ReadLoad: TypeAlias = Callable[[Targets, float], Awaitable[LoadView]]
"""Scrapes all targets at the given time and sums up their loads."""
HISTORY_LIMIT_MAX: Final = 500
SCHEMAS: Final = resources.files("serve_common.api") / "schemas.json"
"""JSON Schemas of all verbs, written by `make docs`."""
HISTORY_ID_MAX: Final = 2**63 - 1


class QueryApi:
    """Answers every query except `WaitForGoal`."""

    def __init__(self, controller_id: str, clock: Clock, read_load: ReadLoad | None) -> None:
        """``read_load`` scrapes all services; None disables `GetLoad`."""
        self._controller_id = controller_id
        self._clock = clock
        self._read_load = read_load

    async def handle(self, term: Term, query: Request[Any]) -> object:  # noqa: C901, PLR0912 - a table
        """Answer any query but `WaitForGoal` from ``term``. Raises a `ServeError`."""
        checkpoint, now = term.checkpoint, self._clock.now()
        match query:
            case q.GetDeploymentInfo():
                return deployments.view_deployment(checkpoint, query.name)
            case q.ListDeployments():
                return deployments.view_deployments(checkpoint, query, include_deleted=query.include_deleted)
            case q.GetAllApplications():
                return deployments.view_applications(checkpoint, query)
            case q.GetAllBackends():
                return backends.view_backends(checkpoint, query)
            case q.GetBackendConfig():
                return backends.view_backend_config(checkpoint, query.backend_tag)
            case q.GetAllEndpoints():
                return deployments.view_endpoints(checkpoint, query)
            case q.GetHttpConfig():
                return checkpoint.http_options
            case q.GetHttpProxies():
                return hosts.view_proxies(term.observed, now, query)
            case q.GetHosts():
                return hosts.view_hosts(checkpoint, term.observed, now, query)
            case q.GetStatus():
                return self._status(term, query)
            case q.GetAutoscaling():
                return backends.view_autoscaling(checkpoint, term.autoscaling, now, query)
            case q.GetRollouts():
                return rollouts.view_rollouts(checkpoint, term.observed, now, query)
            case q.GetCaptures():
                return deployments.view_captures(checkpoint, query)
            case q.GetLoad():
                return await self._load(term)
            case q.GetSnapshot():
                return deployments.view_snapshot(checkpoint, query)
            case q.GetEvents():
                limit = checked_limit(query.limit, EVENTS_LIMIT_MAX)
                return latest_events(term.events, checkpoint, limit, query.subject)
            case q.GetHistory():
                return await _history(term, query)
            case q.GetRevisions():
                return backends.view_revisions(checkpoint, query.name)
            case q.Plan():
                return self._plan(term, query)
            case q.GetSchemas():
                return msgspec.Raw(SCHEMAS.read_bytes())
            case _:
                raise AssertionError(f"{type(query).__name__} is no query")

    def _status(self, term: Term, query: q.GetStatus) -> StatusView:
        checkpoint, now = term.checkpoint, self._clock.now()
        return StatusView(
            controller_id=self._controller_id,
            epoch=term.epoch,
            store_available=term.is_store_available,
            snapshot_id=checkpoint.counters.snapshot,
            store_restored_at=checkpoint.counters.restored_at or None,
            is_shut_down=checkpoint.http is not None and checkpoint.http.is_shut_down,
            deployments=deployments.view_deployments(checkpoint, with_replicas=query.replicas)
            if query.deployments
            else [],
            hosts=hosts.view_hosts(checkpoint, term.observed, now),
            proxies=hosts.view_proxies(term.observed, now),
            autoscaling=backends.view_autoscaling(checkpoint, term.autoscaling, now)
            if query.deployments
            else [],
        )

    async def _load(self, term: Term) -> LoadView:
        if self._read_load is None:
            raise NotLeading("this controller scrapes nobody")
        return await self._read_load(
            build_scrape_targets(term.observed, self._clock.now()), self._clock.now()
        )

    def _plan(self, term: Term, query: q.Plan) -> PlanView:
        if query.command_verb not in COMMANDS:
            raise BadField(
                "verb",
                f"{query.command_verb[:40]!r} changes nothing; it must be one of {', '.join(COMMANDS)}",
            )
        command = parse_request(query.command_verb, bytes(query.request))
        assert isinstance(command, Command)
        return self.plan(term, command)

    def plan(self, term: Term, command: Command[Any]) -> PlanView:
        """What a command would do. Raises its refusal."""
        checkpoint, now = term.checkpoint, self._clock.now()
        accepted = decide(checkpoint, command, now)
        if not accepted.changes:
            return PlanView(
                updating=False, replicas=[], notes=["everything is as asked, or will be by a goal"]
            )
        return forecast(checkpoint, checkpoint.applied(accepted.changes), term.observed, now)


async def _history(term: Term, query: q.GetHistory) -> list[HistoryView]:
    limit = checked_limit(query.limit, HISTORY_LIMIT_MAX)
    if query.before is not None and not 1 <= query.before <= HISTORY_ID_MAX:
        raise BadField("before", "must be the id of an entry")
    subject = None if query.subject is None else _recorded_subject(term.checkpoint, query.subject)
    return await term.read_history(limit, subject, query.before)


def _recorded_subject(checkpoint: Checkpoint, subject: str) -> str:
    """The subject as recorded in the audit log: the name of a host or application, otherwise the full tag."""
    applications = (checkpoint.applications, checkpoint.build_failures)
    if subject in checkpoint.hosts or any(subject in each for each in applications):
        return subject
    return deployment_tag(subject, "subject")
