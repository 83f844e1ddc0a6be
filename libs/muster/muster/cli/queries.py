"""Commands that only read, once or until Ctrl-C; and how every command is declared to typer."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
import typer

from muster.cli.completion import complete_context, complete_deployment
from muster.cli.help import COMMON, WHICH_STACK
from muster.cli.output import Progress, mask_config, mask_secrets, print_json
from muster.cli.session import Result, Session, StackChoice, get_session
from muster.client.admin import AdminClient, Stack
from serve_common.api.queries import Query
from serve_common.api.views import ApplicationView, BackendConfigView, BackendView, DeploymentView, StatusView

HttpHostOption = Annotated[
    str,
    typer.Option(
        "--http-host",
        metavar="ADDRESS",
        help="HTTP address of the stack that the command starts; 0.0.0.0 for all interfaces.",
    ),
]
HttpPortOption = Annotated[
    int,
    typer.Option(
        "--http-port",
        metavar="PORT",
        min=0,
        max=65_535,
        help="HTTP port of the stack that the command starts; 0 for any free one. A taken port is an error.",
    ),
]
OwnHttpHostOption = Annotated[
    str | None,
    typer.Option(
        "--http-host",
        metavar="ADDRESS",
        help="HTTP address of the stack that the command starts. Default: that of the file, or 127.0.0.1.",
    ),
]
OwnHttpPortOption = Annotated[
    int | None,
    typer.Option(
        "--http-port",
        metavar="PORT",
        min=0,
        max=65_535,
        help="HTTP port of the stack that the command starts; 0 for any free one. Default: that of the file, or 8000. "
        "A taken port is an error.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.", rich_help_panel=COMMON)]
NatsOption = Annotated[
    str | None,
    typer.Option(
        "--nats",
        metavar="URL",
        help="URL of the NATS server, or several with commas: nats://[USER:PASSWORD@]HOST:PORT (or MUSTER_NATS_URL). "
        "Default: the stack that is found from this directory.",
        rich_help_panel=WHICH_STACK,
    ),
]
CredsOption = Annotated[
    Path | None,
    typer.Option(
        "--creds",
        metavar="FILE",
        help="NATS credentials file, such as secrets/admin.creds (or MUSTER_NATS_CREDS_FILE).",
        rich_help_panel=WHICH_STACK,
    ),
]
UserOption = Annotated[
    str | None,
    typer.Option(
        "--user",
        metavar="USER",
        help="User, for a NATS that has passwords; overrides that in the URL (or MUSTER_NATS_USER). Default: admin.",
        rich_help_panel=WHICH_STACK,
    ),
]
PasswordFileOption = Annotated[
    Path | None,
    typer.Option(
        "--password-file",
        metavar="FILE",
        help="File with the user's password (or MUSTER_NATS_PASSWORD_FILE, or the password in "
        "MUSTER_NATS_PASSWORD).",
        rich_help_panel=WHICH_STACK,
    ),
]
ContextOption = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="NAME",
        help="Context that names the stack, as 'muster context add' stored it; 'local' for none (or MUSTER_CONTEXT).",
        autocompletion=complete_context,
        rich_help_panel=WHICH_STACK,
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout-s",
        metavar="SECONDS",
        min=0.0,
        max=86_400.0,
        help="Seconds to wait for the change; it goes on after that, and the exit code is 5.",
        rich_help_panel=COMMON,
    ),
]
NoWaitOption = Annotated[
    bool,
    typer.Option(
        "--no-wait",
        help="Print the id of the change once it is recorded, and return; 'muster goal wait ID' waits for it.",
        rich_help_panel=COMMON,
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help="Show what would change, without changing it.", rich_help_panel=COMMON),
]

NAME_HELP: Final = "Name of the deployment; APP/NAME if it belongs to an application."
FieldsOption = Annotated[
    str | None,
    typer.Option(
        "--fields",
        metavar="JSON|@FILE",
        help="Settings to change, as a JSON object by field name; the options below take precedence.",
    ),
]
DeploymentName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help=NAME_HELP,
        autocompletion=complete_deployment,
    ),
]

ShowEnvOption = Annotated[
    bool,
    typer.Option(
        "--show-env", help="Show all values of environment variables, also those that look like secrets."
    ),
]

Run = Callable[[typer.Context, dict[str, Any]], None]
"""Runs a command with the values of all its parameters by name."""


def parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """A keyword-only parameter; ``annotation`` is as typer takes it."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option(
    name: str, kind: Any, text: str, *, panel: str | None = None, metavar: str | None = None
) -> inspect.Parameter:
    """An optional option ``--name``, None when left out; with ``--no-name`` if ``kind`` is bool."""
    spelled = get_option_name(name)
    if kind is bool:
        spelled = f"{spelled}/--no-{spelled.removeprefix('--')}"
    declared = typer.Option(spelled, help=text, rich_help_panel=panel, metavar=metavar)
    return parameter(name, Annotated[kind | None, declared])


def get_option_name(name: str) -> str:
    """The option that sets the field ``name``."""
    return f"--{name.replace('_', '-')}"


STACK_OPTIONS = (
    parameter("as_json", JsonOption, default=False),
    parameter("nats", NatsOption),
    parameter("creds", CredsOption),
    parameter("user", UserOption),
    parameter("password_file", PasswordFileOption),
    parameter("context_name", ContextOption),
)
"""Options of every command that reaches a stack."""


def pop_stack_choice(values: dict[str, Any]) -> StackChoice:
    """Remove the options that choose a stack from ``values`` and return them."""
    options = {name: values.pop(name) for name in ("nats", "creds", "user", "password_file")}
    return StackChoice(context=values.pop("context_name"), **options)


def build_command(
    about: Callable[..., Any], run: Run, shared: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """Build a command with the name, help and keyword parameters of ``about``, followed by the shared ones.

    Parameters of ``about`` without an ``Annotated`` option or argument are hidden from typer; ``run`` supplies them.

    Why commands are composed: ``--json``, ``--dry-run`` or ``--nats`` must be the same everywhere, and no command may
    lack one of them.
    """
    own = [
        each
        for each in inspect.signature(about, eval_str=True).parameters.values()
        if each.kind is inspect.Parameter.KEYWORD_ONLY and hasattr(each.annotation, "__metadata__")
    ]
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)

    def command(context: typer.Context, **values: Any) -> None:
        run(context, values)

    parameters = [context, *own, *shared]
    # Read by inspect and thus by typer; the type of functions does not declare it.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__name__, command.__qualname__ = about.__name__, about.__qualname__
    command.__module__, command.__doc__ = about.__module__, about.__doc__
    return command


def call_builder(build: Callable[..., Result], session: Session, values: Mapping[str, Any]) -> Result:
    """Call ``build`` with the values of its parameters by name, and with ``session`` if it has such a parameter."""
    if "session" in inspect.signature(build).parameters:
        return build(session, **values)
    return build(**values)


_RETRY_S = 15.0
Reply = TypeVar("Reply")


class ReadRequest(msgspec.Struct, Generic[Reply], frozen=True):
    """What a command reads from the controller, and how that is printed for a person."""

    query: Query[Reply] | Callable[[AdminClient], Awaitable[Reply]]
    """A query, or a function for what takes several calls."""
    show: Callable[[Reply], None]
    shows_secrets: bool = False
    """Values of environment variables that look like secrets are not masked."""
    piped: ReadRequest[Any] | None = None
    """Takes the place of this request where standard output is no terminal; not with ``--json``."""

    async def send(self, stack: Stack, _progress: Progress) -> Reply:
        """Return the reply of the controller."""
        if isinstance(self.query, Query):
            return await stack.admin.call(self.query)
        return await self.query(stack.admin)


def _masked(reply: Any) -> Any:
    """The reply of a query without secrets in environment variables, wherever it has code."""
    if isinstance(reply, list):
        return [_masked(each) for each in reply]
    if isinstance(reply, StatusView):
        return msgspec.structs.replace(reply, deployments=_masked(reply.deployments))
    if isinstance(reply, DeploymentView | BackendView | BackendConfigView):
        return msgspec.structs.replace(reply, replica_config=mask_secrets(reply.replica_config))
    if isinstance(reply, ApplicationView):
        return msgspec.structs.replace(reply, app_config=mask_config(reply.app_config))
    return reply


def query_command(build: Callable[..., ReadRequest[Any]]) -> Callable[..., None]:
    """Turn a function from ``([session], *, arguments)`` to `ReadRequest` into a command."""

    def run(context: typer.Context, values: dict[str, Any]) -> None:
        session = get_session(context)
        as_json = values.pop("as_json")
        choice = pop_stack_choice(values)
        with session.reporting(as_json=as_json):
            request = call_builder(build, session, values)
            if request.piped is not None and not as_json and not sys.stdout.isatty():
                request = request.piped
            title = build.__name__.replace("_", " ").strip()
            reply = session.run(session.find_stack(choice), title, request.send, retry_for_s=_RETRY_S)
            if not request.shows_secrets:
                reply = _masked(reply)
            if as_json:
                print_json(reply)
            else:
                request.show(reply)

    return build_command(build, run, STACK_OPTIONS)


def stack_command(run: Callable[..., None]) -> Callable[..., None]:
    """Turn a function ``(session, choice, *, arguments, as_json)`` into a command; it reports errors itself.

    ``choice`` has the options that choose the stack.
    """

    def command(context: typer.Context, values: dict[str, Any]) -> None:
        run(get_session(context), pop_stack_choice(values), **values)

    return build_command(run, command, STACK_OPTIONS)


StreamRun = Callable[..., Coroutine[Any, Any, None]]
"""``(session, address, *, as_json, …)``"""


def stream_command(run: StreamRun) -> Callable[..., None]:
    """Turn an async function into a command; its own parameters are those annotated for typer.

    Ctrl-C ends it and is not a failure.
    """

    def command(context: typer.Context, values: dict[str, Any]) -> None:
        session = get_session(context)
        choice = pop_stack_choice(values)
        with session.reporting(as_json=values["as_json"]):
            address = session.find_stack(choice)
            try:
                asyncio.run(run(session, address, **values))
            except KeyboardInterrupt:
                return

    return build_command(run, command, STACK_OPTIONS)
