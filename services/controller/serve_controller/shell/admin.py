"""Commands and queries as they come from the bus: JSON in, JSON or an error out.

Why apart from NATS: what is accepted and how errors read is the same for every way in, and is tested without a bus.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final

import msgspec

from serve_common.errors import BadField, FencedOut, NotLeading, ServeError
from serve_common.ports import Clock
from serve_common.wires.admin import VERBS, ErrorView
from serve_common.wires.commands import DeleteDeployment, Deploy, Request
from serve_common.wires.queries import (
    WAIT_TIMEOUT_S_MAX,
    GetAllBackends,
    GetAllEndpoints,
    GetDeploymentInfo,
    GetStatus,
    ListDeployments,
    WaitForGoal,
)
from serve_common.wires.views import GoalStatus, GoalView, StatusView
from serve_controller.core import views
from serve_controller.core.decide import Command, CommandReply
from serve_controller.shell.term import Term

_AT_PATH: Final = re.compile(r" - at `\$?\.?(?P<path>[^`]*)`$")
_OF_FIELD: Final = re.compile(
    r"^Object (contains unknown|missing required) field `(?P<name>[^`]*)`", re.DOTALL
)


def parse_request(verb: str, payload: bytes) -> Request:
    """The request in ``payload``; empty means ``{}``. Raises `BadField` with the path of what is wrong."""
    request_type, _reply_type = VERBS[verb]
    try:
        return msgspec.json.decode(payload or b"{}", type=request_type)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _AT_PATH.search(text)
        text = _AT_PATH.sub("", text)
        named = _OF_FIELD.match(text)
        path = [] if found is None or not found["path"] else [found["path"]]
        path += [] if named is None else [named["name"]]
        # What the caller wrote comes back in the message, so it is cut.
        raise BadField(".".join(path)[:200] or "request", text[:300]) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadField("request", f"is not JSON: {error}") from error


def error_view(error: ServeError) -> ErrorView:
    """An error as it is sent."""
    field = error.field if isinstance(error, BadField) else ""
    return ErrorView(code=error.error_code, message=str(error), field=field)


class Admin:
    """Answers every verb from the current term."""

    def __init__(self, controller_id: str, clock: Clock, current_term: Callable[[], Term | None]) -> None:
        """``current_term`` gives the term while this controller leads."""
        self._controller_id = controller_id
        self._clock = clock
        self._current_term = current_term
        self._recorded = asyncio.Event()

    def on_recorded(self) -> None:
        """Something changed: let those who wait for a goal look again."""
        self._recorded.set()
        self._recorded = asyncio.Event()

    async def answer(self, verb: str, payload: bytes) -> bytes:
        """The reply as JSON. Raises a `ServeError` for everything that a caller can understand."""
        request = parse_request(verb, payload)
        term = self._term()
        match request:
            case Deploy() | DeleteDeployment():
                return msgspec.json.encode(await self._execute(term, request, payload))
            case WaitForGoal():
                return msgspec.json.encode(await self._wait_for_goal(request))
            case _:
                return msgspec.json.encode(self._query(term, request))

    async def _execute(self, term: Term, command: Command, payload: bytes) -> CommandReply:
        try:
            return await term.execute(command, payload)
        except FencedOut as error:
            # The fence wrote nothing; to a caller this is a change of leader like any other.
            term.on_change()
            raise NotLeading(f"this controller leads no more ({error}); try again") from error

    def _term(self) -> Term:
        term = self._current_term()
        if term is None:
            raise NotLeading("this controller does not lead; try again")
        return term

    def _query(self, term: Term, request: Request) -> object:
        now = self._clock.now()
        checkpoint = term.checkpoint
        match request:
            case GetDeploymentInfo():
                return views.view_deployment(checkpoint, request.name)
            case ListDeployments():
                return views.view_deployments(checkpoint)
            case GetAllBackends():
                return views.view_backends(checkpoint)
            case GetAllEndpoints():
                return views.view_endpoints(checkpoint)
            case GetStatus():
                return StatusView(
                    controller_id=self._controller_id,
                    epoch=term.epoch,
                    store_available=term.is_store_available,
                    snapshot_id=checkpoint.counters.snapshot,
                    deployments=views.view_deployments(checkpoint),
                    hosts=views.view_hosts(checkpoint, term.observed, now),
                    proxies=views.view_proxies(term.observed, now),
                )
            case _:
                raise AssertionError(f"{type(request).__name__} is no query")

    async def _wait_for_goal(self, request: WaitForGoal) -> GoalView:
        if not 0 <= request.timeout_s <= WAIT_TIMEOUT_S_MAX:
            raise BadField(
                "timeout_s", f"is {request.timeout_s:g}; it must be between 0 and {WAIT_TIMEOUT_S_MAX:g}"
            )
        give_up_at = self._clock.now() + request.timeout_s
        while True:
            recorded = self._recorded
            term = self._term()
            now = self._clock.now()
            view = views.view_goal(term.checkpoint, term.observed, request.goal_id)
            if view.status is not GoalStatus.PENDING or now >= give_up_at:
                return view
            try:
                async with asyncio.timeout(give_up_at - now):
                    await recorded.wait()
            except TimeoutError:
                continue  # the loop answers with what is known now
