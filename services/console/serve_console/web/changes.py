"""Every change by one way: its form, its dry run, then the change itself, once."""

from __future__ import annotations

import contextlib
import hmac
import uuid
from collections.abc import Mapping
from typing import Any, final
from urllib.parse import urlencode

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute

from serve_common.api.commands import ChangeReply, Command
from serve_common.api.queries import COMMANDS, Plan
from serve_common.api.views import PlanView
from serve_common.errors import CommandRefused, ServeError
from serve_common.names import short_name
from serve_console.core.change_forms import find_tag
from serve_console.core.equal_commands import command_line
from serve_console.core.form_values import FieldsWrong, get_subject
from serve_console.core.plan_page import build_plan_page
from serve_console.shell.sessions import PersonSession
from serve_console.web.change_forms import (
    ChangeForms,
    check_role,
    describe_failure,
    find_back,
    find_kind,
    get_status,
    get_typed,
)
from serve_console.web.shared import Shared

_log = structlog.get_logger(__name__)


@final
class ChangePages:
    """Their routes."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._forms = ChangeForms(shared)

    def routes(self) -> list[BaseRoute]:
        """Forms, dry runs, and changes."""
        get, post = self._shared.get, self._shared.post
        return [
            get("/deploy", self._show_deploy),
            get("/do/{verb}", self._show),
            post("/do/{verb}/edit", self._edit),
            post("/do/{verb}/plan", self._plan),
            post("/do/{verb}/apply", self._apply),
            *(get(f"/do/{{verb}}/{step}", self._start_again) for step in ("edit", "plan", "apply")),
            get("/do/{verb}/done", self._show_done),
        ]

    async def _show(self, request: Request, session: PersonSession) -> Response:
        verb = _find_verb(request, session)
        if verb == "deploy":
            return RedirectResponse(f"/deploy?{request.url.query}".rstrip("?"), status_code=303)
        return await self._forms.show(request, session, verb, get_typed(request.query_params))

    async def _show_deploy(self, request: Request, session: PersonSession) -> Response:
        check_role(session, "deploy")
        typed = get_typed(request.query_params)
        view = self._shared.hub.system.find_deployment(find_tag(typed.get("name", "")))
        if "source" not in typed and view is not None and view.replica_config.working_dir:
            typed["source"] = "packaged"
        if "name" in typed:
            typed["name"] = short_name(typed["name"])
        return await self._forms.show(request, session, "deploy", typed)

    async def _start_again(self, request: Request, session: PersonSession) -> Response:
        """What an address without its form leads to."""
        return RedirectResponse(f"/do/{_find_verb(request, session)}", status_code=303)

    async def _edit(self, request: Request, session: PersonSession) -> Response:
        verb = _find_verb(request, session)
        typed = _parse_typed(str((await request.form()).get("typed", "{}")))
        return await self._forms.show(request, session, verb, typed)

    async def _plan(self, request: Request, session: PersonSession) -> Response:
        verb = _find_verb(request, session)
        form = await request.form()
        typed = get_typed(form)
        try:
            command = await self._forms.parse(session, verb, form, typed)
            if hasattr(command, "request_id"):
                command = msgspec.structs.replace(command, request_id=uuid.uuid4().hex)
            view = await session.stack.admin.call(Plan.for_command(command))
        except (FieldsWrong, ServeError) as error:
            return await self._forms.refuse(request, session, verb, typed, error)
        return self._show_plan(request, session, command, typed, view=view)

    def _show_plan(
        self,
        request: Request,
        session: PersonSession,
        command: Command[Any],
        typed: Mapping[str, str],
        *,
        view: PlanView | None = None,
        error: str = "",
        confirm_error: str = "",
        confirm: str = "",
        status: int = 200,
    ) -> Response:
        kind, subject = find_kind(command.verb), get_subject(command)
        return self._shared.renderer.page(
            request,
            session,
            "plan.html",
            page="deploy" if command.verb in {"deploy", "deploy_application"} else "",
            system=self._shared.hub.system,
            status=status,
            verb=command.verb,
            kind=kind,
            subject=short_name(subject),
            title=kind.heading(short_name(subject)),
            plan=None if view is None else build_plan_page(view),
            line=command_line(command, self._shared.settings.stack.subject_prefix),
            fields={
                "command": msgspec.json.encode(command).decode(),
                "typed": msgspec.json.encode(dict(typed)).decode(),
            },
            error=error,
            confirm_error=confirm_error,
            confirm=confirm,
            back=find_back(kind, subject, self._shared.hub.system),
        )

    async def _apply(self, request: Request, session: PersonSession) -> Response:
        verb = _find_verb(request, session)
        form = await request.form()
        command = _parse_command(verb, str(form.get("command", "")))
        typed = _parse_typed(str(form.get("typed", "{}")))
        kind, subject = find_kind(verb), get_subject(command)
        confirm = str(form.get("confirm", "")).strip()
        if kind.deletes and confirm not in {subject, short_name(subject)}:
            text = f"Type {short_name(subject)} to delete it."
            view = None
            with contextlib.suppress(
                ServeError
            ):  # the same page again; what is away shows at the next attempt
                view = await session.stack.live.call(Plan.for_command(command))
            return self._show_plan(
                request, session, command, typed, view=view, confirm_error=text, confirm=confirm, status=422
            )
        try:
            reply: ChangeReply = await session.stack.admin.call(command)
        except ServeError as error:
            _log.info("change_failed", verb=verb, subject=subject, reason=str(error))
            text = describe_failure(error)
            if not isinstance(error, CommandRefused):
                text = f"{text} Sending it again is safe: the change is made once."
            return self._show_plan(
                request, session, command, typed, error=text, confirm=confirm, status=get_status(error)
            )
        await self._shared.hub.changed()
        fields = {"verb": verb, "name": subject, "changed": str(reply.updating).lower()}
        if reply.goal_id is None:
            fields["proof"] = _prove(session, fields)
        query = urlencode(fields)
        target = f"/do/{verb}/done" if reply.goal_id is None else f"/goals/{reply.goal_id}"
        return RedirectResponse(f"{target}?{query}", status_code=303)

    async def _show_done(self, request: Request, session: PersonSession) -> Response:
        verb = request.path_params["verb"]
        kind, name = find_kind(verb), request.query_params.get("name", "")
        fields = {"verb": verb, "name": name, "changed": request.query_params.get("changed", "")}
        proof = request.query_params.get("proof", "")
        if not hmac.compare_digest(proof.encode(), _prove(session, fields).encode()):
            raise HTTPException(404)  # an address alone must not claim that something was done
        return self._shared.renderer.page(
            request,
            session,
            "done.html",
            system=await self._shared.hub.fresh(),
            title=kind.heading(short_name(name)),
            name=name,
            has_changed=request.query_params.get("changed") == "true",
            is_deployment=self._shared.hub.system.find_deployment(name) is not None,
        )


def _find_verb(request: Request, session: PersonSession) -> str:
    """The verb of an address that the role may send. Raises `HTTPException`."""
    verb: str = request.path_params["verb"]
    find_kind(verb)
    check_role(session, verb)
    return verb


def _prove(session: PersonSession, fields: Mapping[str, str]) -> str:
    """What only this session's own changes have in the address of their end."""
    return hmac.digest(session.csrf.encode(), msgspec.json.encode(fields), "sha256").hex()


def _parse_command(verb: str, text: str) -> Command[Any]:
    """The command that a plan's page carries. Raises `HTTPException`: it may be anything that was sent."""
    try:
        command: Command[Any] = msgspec.json.decode(text, type=COMMANDS[verb])
        return command
    except (msgspec.DecodeError, RecursionError) as error:
        raise HTTPException(
            400, f"The form does not have a command that can be read: {error}. Start again at its form."
        ) from error


def _parse_typed(text: str) -> dict[str, str]:
    try:
        return get_typed(msgspec.json.decode(text, type=dict[str, str]))
    except (msgspec.DecodeError, RecursionError) as error:
        raise HTTPException(400, "The form was changed on its way; load it again.") from error
