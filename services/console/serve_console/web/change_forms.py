"""Shows the forms of changes, and turns what was typed into commands."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, final
from urllib.parse import urlencode

import msgspec
import structlog
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from muster.client.requests import NoListeners, NoReply
from serve_common.api.commands import Command, Deploy
from serve_common.api.queries import GetAllBackends, GetBackendConfig, GetHistory, GetHttpConfig, GetRevisions
from serve_common.errors import (
    BadField,
    BusAuthorizationFailed,
    BusUnavailable,
    CommandRefused,
    FencedOut,
    ServeError,
    TransientError,
)
from serve_common.identities.roles import VERBS_OF
from serve_common.names import short_name
from serve_common.protocol.code import digest_code
from serve_console.core.change_forms import (
    CHOICES_MAX,
    FormContext,
    FormField,
    choices,
    find_tag,
    with_errors,
)
from serve_console.core.change_kinds import CHANGES, ChangeKind
from serve_console.core.deploy_form import ARCHIVE_FIELD, find_deploy
from serve_console.core.form_values import FieldsWrong, FormValues, find_field
from serve_console.core.system import System
from serve_console.core.uploaded_archives import UPLOAD_BYTES_MAX, repack
from serve_console.shell.sessions import PersonSession
from serve_console.web.shared import Shared

_log = structlog.get_logger(__name__)

_NOT_TYPED: Final = frozenset({"csrf", "command", "confirm", ARCHIVE_FIELD})
_STATUS_WRONG: Final = 422
_HISTORY_MAX: Final = 200


def find_kind(verb: str) -> ChangeKind:
    """The kind of change of a verb. Raises `HTTPException` for an unknown one."""
    kind = CHANGES.get(verb)
    if kind is None:
        raise HTTPException(404)
    return kind


def check_role(session: PersonSession, verb: str) -> None:
    """Refuse a change that the role may not make. Raises `HTTPException`."""
    if session.may(verb):
        return
    roles = " or ".join(role.value for role, verbs in VERBS_OF.items() if verb in verbs)
    raise HTTPException(
        403, f"This change needs the role {roles}; you are signed in with the role {session.role.value}."
    )


def get_typed(items: Mapping[str, Any] | FormData) -> dict[str, str]:
    """The typed texts of a form or of an address."""
    return {name: value for name, value in items.items() if isinstance(value, str) and name not in _NOT_TYPED}


def describe_failure(error: ServeError) -> str:
    """What went wrong, for people, and what to do."""
    match error:
        case CommandRefused():
            return str(error)
        case BusAuthorizationFailed():
            return "NATS refused it: your session may not do that any more. Sign in again."
        case BusUnavailable():
            return "NATS is away. Try again when it is back."
        case NoListeners() | NoReply() | FencedOut():
            return "No controller leads at the moment. Try again in some seconds."
        case TransientError():
            return f"Not at the moment: {error}. Try again in some seconds."
        case _:
            return str(error)


def get_status(error: ServeError) -> int:
    """The HTTP status of a page that shows the error."""
    match error:
        case BusAuthorizationFailed():
            return 403
        case FencedOut():
            return 503
        case _:
            return error.status_hint


def find_back(kind: ChangeKind, subject: str, system: System) -> str:
    """Where a change is left to."""
    if kind.choice == "host":
        return "/hosts"
    return f"/deployments/{subject}" if system.find_deployment(subject) is not None else "/"


def _build_tabs(name: str) -> list[tuple[str, str, str]]:
    named = {"name": name} if name else {}
    return [
        (source, title, f"/deploy?{urlencode({'source': source, **named})}")
        for source, title in (("mounted", "Mounted app"), ("packaged", "Packaged app"))
    ]


@final
class ChangeForms:
    """Renders forms and parses them."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    async def show(
        self,
        request: Request,
        session: PersonSession,
        verb: str,
        typed: Mapping[str, str],
        *,
        errors: Mapping[str, str] | None = None,
        status: int = 200,
    ) -> Response:
        """The form of a change with what was typed, or a list to choose its object from."""
        kind, errors = find_kind(verb), dict(errors or {})
        context, trouble = await self._load(session, verb, kind, typed)
        is_chosen = not kind.subject or bool(typed.get(kind.subject))
        fields = with_errors(kind.fields(context), errors) if is_chosen else [self._choice(kind, context)]
        shown = {each.name for each in fields if each.error}
        title = kind.heading(short_name(context.subject) if kind.subject and is_chosen else "")
        return self._shared.renderer.page(
            request,
            session,
            "do_form.html",
            page="deploy" if verb in {"deploy", "deploy_application"} else "",
            system=context.system,
            status=status,
            verb=verb,
            title=title,
            kind=kind,
            is_chosen=is_chosen,
            fields=fields,
            hidden=self._get_hidden(verb, kind, context, is_chosen=is_chosen),
            problems=[
                f"{name}: {text}" if name else text for name, text in errors.items() if name not in shown
            ],
            trouble=trouble,
            source=typed.get("source", "mounted"),
            tabs=_build_tabs(typed.get("name", "")) if verb == "deploy" else [],
            back=find_back(kind, context.subject, context.system),
        )

    def _get_hidden(
        self, verb: str, kind: ChangeKind, context: FormContext, *, is_chosen: bool
    ) -> dict[str, str]:
        hidden: dict[str, str] = {}
        if not is_chosen:
            return {name: value for name, value in context.typed.items() if name != kind.subject and value}
        if kind.subject:
            hidden[kind.subject] = context.subject
        if kind.was is not None:
            present = msgspec.json.encode(kind.was(context)).decode()
            hidden["was"] = context.typed.get("was", present)
        if verb == "deploy":
            hidden["source"] = context.value("source", "mounted")
            code = find_deploy(context).replica_config
            digest = code.working_dir
            if hidden["source"] == "packaged":
                hidden["working_dir"] = context.value("working_dir", digest)
        if verb == "control_rollout" and context.typed.get("step"):
            hidden["step"] = context.typed["step"]
        return hidden

    def _choice(self, kind: ChangeKind, context: FormContext) -> FormField:
        system = context.system
        names = {
            "deployment": [view.name for view in system.deployments],
            "backend": [*context.backends, *(view.name for view in system.deployments)],
            "endpoint": list(system.endpoints),
            "application": list(system.applications),
            "host": [] if system.status is None else [host.host_id for host in system.status.hosts],
            "": [],
        }[kind.choice]
        label = kind.choice.capitalize()
        if len(names) > CHOICES_MAX:
            return FormField(name=kind.subject, label=label, is_required=True)
        return FormField(
            name=kind.subject, label=label, kind="select", options=choices(names), is_required=True
        )

    async def _load(
        self, session: PersonSession, verb: str, kind: ChangeKind, typed: Mapping[str, str]
    ) -> tuple[FormContext, str]:
        """What the form is filled in from; with it, in words, what could not be read."""
        system = await self._shared.hub.fresh()
        named = typed.get(kind.subject or ("name" if verb == "deploy" else ""), "").strip()
        is_tag = kind.choice in {"deployment", "backend", "endpoint"} or verb == "deploy"
        subject = find_tag(named) if is_tag and named else named
        context = FormContext(
            system=system, subject=subject, typed=typed, apps_dir=self._shared.settings.apps_dir
        )
        found: dict[str, Any] = {}
        live = session.stack.live
        try:
            if verb == "deploy" and typed.get("goal"):
                found["deployed"] = await self._find_deployed(session, typed["goal"])
            if "backends" in kind.needs or (kind.choice == "backend" and not subject):
                found["backends"] = tuple(view.backend_tag for view in await live.call(GetAllBackends()))
            if "present" in kind.needs and subject:
                found["present"] = await live.call(GetBackendConfig(backend_tag=subject))
            if "revisions" in kind.needs and subject:
                found["revisions"] = tuple(await live.call(GetRevisions(name=subject)))
            if "http" in kind.needs:
                found["http"] = await live.call(GetHttpConfig())
        except CommandRefused as error:
            return msgspec.structs.replace(context, **found), str(error)
        except ServeError as error:
            trouble = f"The present values could not be read. {describe_failure(error)}"
            return msgspec.structs.replace(context, **found), trouble
        return msgspec.structs.replace(context, **found), ""

    async def _find_deployed(self, session: PersonSession, goal_id: str) -> Deploy | None:
        """The deploy of a goal, as history has it."""
        for entry in await session.stack.live.call(GetHistory(limit=_HISTORY_MAX)):
            if entry.goal_id == goal_id and entry.verb == Deploy.verb:
                try:
                    return msgspec.convert(entry.request, Deploy)
                except msgspec.ValidationError as error:
                    _log.info("history_unreadable", goal_id=goal_id, reason=str(error))
        return None

    async def parse(
        self, session: PersonSession, verb: str, form: FormData, typed: dict[str, str]
    ) -> Command[Any]:
        """The command of a form. Raises `FieldsWrong`, `ServeError`.

        An archive is uploaded first, and ``typed`` then has its digest: it need not be chosen again.
        """
        if verb == "deploy":
            digest = await self._upload(session, form, typed)
            if digest:
                typed["working_dir"] = digest
        return find_kind(verb).parse(FormValues(typed))

    async def _upload(self, session: PersonSession, form: FormData, typed: Mapping[str, str]) -> str:
        """Upload the archive of a form; its digest, or empty where there is none."""
        if typed.get("source") != "packaged":
            return ""
        file = form.get(ARCHIVE_FIELD)
        if not isinstance(file, UploadFile) or not file.filename:
            if not typed.get("working_dir"):
                raise FieldsWrong({ARCHIVE_FIELD: "choose a .zip with the modules"})
            return ""
        data = await file.read(UPLOAD_BYTES_MAX + 1)
        try:
            archive = await asyncio.to_thread(repack, data, typed.get("import_path", "").strip())
        except BadField as error:
            raise FieldsWrong({ARCHIVE_FIELD: error.reason}) from error
        digest = digest_code(archive)
        await session.stack.admin.upload_code(digest, archive)
        return digest

    async def refuse(
        self,
        request: Request,
        session: PersonSession,
        verb: str,
        typed: Mapping[str, str],
        error: FieldsWrong | ServeError,
    ) -> Response:
        """The form again, with what was typed and what is wrong with it."""
        if isinstance(error, FieldsWrong):
            return await self.show(request, session, verb, typed, errors=error.errors, status=_STATUS_WRONG)
        errors = {"": describe_failure(error)}
        if isinstance(error, BadField):
            name = find_field(list(typed), error.field)
            errors = {name: error.reason if name and error.field.endswith(name) else str(error)}
        return await self.show(request, session, verb, typed, errors=errors, status=get_status(error))
